# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""KDA models become KDN models: what is copied, how closely gains and logits match, and the command line."""

from __future__ import annotations

import copy
import functools
import re
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, rel
from fla.layers import attn as fla_attn
from fla.models import KDAConfig, KDAForCausalLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from utils import SIZES, make_ids, randomize

from fla_kdn import KalmanDeltaNet, KDNForCausalLM
from fla_kdn.layers import Attention
from fla_kdn.models.kdn.convert_from_kda import COVARIANCE, convert_config, convert_kda, main, write_strengths
from fla_kdn.ops.kdn import chunk_kdn, naive_recurrent_kdn

if TYPE_CHECKING:
    from pathlib import Path

COVARIANCES = ('diagonal', 'isotropic')
OPTIONS = {
    'default': {},
    'grouped-values': {'num_v_heads': 4, 'expand_v': 2},
    'no-convolution': {'use_short_conv': False},
    'unfused': {'tie_word_embeddings': True, 'fuse_norm': False, 'fuse_swiglu': False, 'norm_eps': 1e-4},
}
NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
NEW = {
    'diagonal': {'r_proj.weight', 'r_proj.bias', 'omega_proj.0.weight', 'omega_proj.1.weight', 'omega_proj.1.bias'},
    'isotropic': {'r_proj.weight', 'r_proj.bias', 'omega_proj.weight', 'omega_proj.bias'},
}


def make_kda_config(**options) -> KDAConfig:
    return KDAConfig(**{**SIZES, **options})


@functools.cache
def make_kda(shared: float = 0.6, **options) -> KDAForCausalLM:
    """A tiny KDA model in evaluation mode with random parameters, not to be changed.

    Tokens share a component, as they do in trained models: a mean beta of 0.18 to 0.56 in its heads.
    """
    torch.manual_seed(1)
    model = randomize(KDAForCausalLM(make_kda_config(**options)), 1).eval()
    with torch.no_grad():
        model.model.embeddings.weight += shared * torch.randn(32, generator=torch.Generator().manual_seed(1))
    return model


def make_default(kda: KDAForCausalLM, covariance: str) -> KDNForCausalLM:
    """KDN with the weights of a KDA model and new parameters as initialised."""
    torch.manual_seed(5)
    config = convert_config(kda.config, covariance=covariance)
    config.r_min = 0.01
    model = KDNForCausalLM(config).eval()
    model.load_state_dict(kda.state_dict(), strict=False)
    return model


def new_parameters(kdn: KDNForCausalLM) -> dict[str, torch.Tensor]:
    """Parameters of the first layer that KDA lacks."""
    names = ('prior_precision', 'log_info_scale', *NEW[kdn.config.covariance])
    return {name: x for name, x in kdn.model.layers[0].attn.named_parameters() if name in names}


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits.float()


@torch.no_grad()
def measure(kda: KDAForCausalLM, kdn: KDNForCausalLM, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Beta and write strength `[B * T, HV]` of each layer, both for the activations of the KDA model.

    With the values of token t a one in channel t, and the keys as queries, the op gives `k_t^T kappa_t` in that channel.
    """
    inputs, results = [], []
    handles = [
        block.attn.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(kwargs['hidden_states']), with_kwargs=True)
        for block in kda.model.layers
    ]
    kda(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    B, T = ids.shape
    for old, new, x in zip(kda.model.layers, kdn.model.layers, inputs, strict=True):
        layer, new = old.attn, new.attn
        k = layer.k_proj(x)
        k = layer.k_conv1d(x=k)[0] if layer.use_short_conv else F.silu(k)
        k, f = (y.unflatten(-1, (-1, layer.head_k_dim)) for y in (k, layer.f_proj(x)))
        o, _, _ = naive_recurrent_kdn(
            q=k,
            k=k,
            v=torch.eye(T).view(1, T, 1, T).expand(B, T, layer.num_v_heads, T),
            g=f,
            **new.noise(x),
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            scale=1.,
            initial_cov=new.prior_covariance(),
            covariance=new.covariance,
            info_scale=new.log_info_scale.exp() if new.learn_info_scale else new.info_scale,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=new.safe_gate,
        )
        strength = o.diagonal(dim1=1, dim2=3).transpose(1, 2)
        results.append(tuple(y.flatten(0, 1) for y in (layer.b_proj(x).sigmoid(), strength)))
    return results


def summary(results) -> tuple[float, float, float]:
    """Of all layers and heads: largest difference of the means, root mean square difference, smallest correlation."""
    bias = max((strength - beta).mean(0).abs().max().item() for beta, strength in results)
    rms = torch.cat([strength - beta for beta, strength in results], 1).square().mean().sqrt().item()
    correlation = min(
        torch.corrcoef(torch.stack(pair))[0, 1].item() for x in results for pair in zip(*(y.unbind(1) for y in x), strict=True)
    )
    return bias, rms, correlation


# ---- the model


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_copy(options, covariance):
    kda = make_kda(**options)
    kdn = convert_kda(kda, covariance, make_ids(1, 40), learn_info_scale=True)
    old, new = kda.state_dict(), kdn.state_dict()
    dropped = {name for name in old if name not in new}
    assert dropped == {f'model.layers.{i}.attn.b_proj.weight' for i in range(2)}
    for name in old.keys() - dropped:
        assert torch.equal(new[name], old[name]), name
        assert new[name].data_ptr() != old[name].data_ptr(), f'{name} is shared'
    added = {name.split('.attn.')[1] for name in new.keys() - old.keys()}
    assert added == {*NEW[covariance], 'prior_precision', 'log_info_scale'}
    assert (kdn.lm_head.weight is kdn.model.embeddings.weight) == kda.config.tie_word_embeddings
    assert not kdn.training and not any(p.grad_fn for p in kdn.parameters())


def test_hybrid(monkeypatch):
    """FLA's attention layers need flash-attn; their weights do not, and the converted model runs without."""
    monkeypatch.setattr(fla_attn, 'flash_attn_func', object())
    torch.manual_seed(0)
    kda = randomize(KDAForCausalLM(make_kda_config(attn={'layers': [0], 'num_heads': 4, 'num_kv_heads': 2, 'window_size': 6})))
    kdn = convert_kda(kda)
    assert [type(layer.attn) for layer in kdn.model.layers] == [Attention, KalmanDeltaNet]
    assert kdn.model.layers[0].attn.window_size == 6
    new = kdn.state_dict()
    assert all(torch.equal(x, new[name]) for name, x in kda.state_dict().items() if '.b_proj.' not in name)
    assert logits(kdn, make_ids(1, 20)).isfinite().all()


def test_config():
    options = {'tie_word_embeddings': True, 'norm_eps': 1e-4, 'num_v_heads': 4, 'use_l2warp': True, 'pad_token_id': 3}
    kda = make_kda_config(**options)
    kdn = convert_config(kda, covariance='isotropic', info_scale=2.)
    fields = kda.to_dict().keys() & kdn.to_dict().keys() - {'model_type', 'safe_gate', 'lower_bound', 'architectures'}
    assert fields >= {'hidden_size', 'attn', 'vocab_size', *options}
    assert {name: getattr(kdn, name) for name in fields} == {name: getattr(kda, name) for name in fields}
    assert (kdn.model_type, kdn.safe_gate, kdn.lower_bound) == ('kdn', True, None)
    assert (kdn.covariance, kdn.info_scale, kdn.r_min) == ('isotropic', 2., COVARIANCE / 100)
    assert not hasattr(kdn, 'allow_neg_eigval') and not hasattr(kdn, 'attnres_block_size')


@pytest.mark.parametrize(('field', 'options'), [
    ('allow_neg_eigval', {'allow_neg_eigval': True}),
    ('safe_gate', {'safe_gate': True, 'lower_bound': -5.}),
    ('lower_bound', {'lower_bound': -5.}),
    ('attnres_block_size', {'attnres_block_size': 2}),
])
def test_refused_config(field, options):
    with pytest.raises(ValueError, match=f'^{field}='):
        convert_config(make_kda_config(**options))


def test_refused_options():
    for name in ('fixed_r', 'fixed_omega', 'r_min', 'hidden_size', 'conv_bias'):
        with pytest.raises(ValueError, match=f'^{name} is not an option'):
            convert_config(make_kda_config(), **{name: 1})
    with pytest.raises(ValueError, match="^model_type='kdn'"):
        convert_config(convert_config(make_kda_config()))


# ---- the gain


@pytest.mark.parametrize(('tokens', 'bias', 'rms'), [(False, 0.1, 0.06), (True, 0.015, 0.03)], ids=['weights', 'tokens'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_write_strength(covariance, tokens, bias, rms):
    """On tokens other than those of the fit."""
    kda, ids = make_kda(), make_ids(2, 128, 1)
    kdn = convert_kda(kda, covariance, make_ids(2, 128, 2) if tokens else None)
    results = measure(kda, kdn, ids)
    got = summary(results)
    assert got[0] < bias and got[1] < rms and got[2] > 0.96, got
    default = summary(measure(kda, make_default(kda, covariance), ids))
    assert default[0] > 0.3 and default[1] > 0.2 and default[2] < 0, default

    reported = write_strengths(kda, kdn, ids)
    assert list(reported) == [0, 1]
    for layer_idx, pair in enumerate(results):
        for x, y in zip(reported[layer_idx], pair, strict=True):
            assert_close(x, y.mean(0), 1e-5, f'report of layer {layer_idx}')


@pytest.mark.parametrize('learn', [False, True], ids=['fixed', 'learned'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_info_scale(covariance, learn):
    kda = make_kda()
    kdn = convert_kda(kda, covariance, make_ids(2, 128, 2), info_scale=1., learn_info_scale=learn)
    got = summary(measure(kda, kdn, make_ids(2, 128, 1)))
    assert got[0] < 0.015 and got[1] < 0.03, got


@pytest.mark.parametrize('info_scale', [None, 1.])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_stationary_covariance(covariance, info_scale):
    """With weights alone the covariance stays: at an input that leaves gates at their biases, with k^2 = 1 / K."""
    layer = convert_kda(make_kda(), covariance, info_scale=info_scale).model.layers[0].attn
    k, x = torch.ones(1, 30, 2, 8), torch.zeros(1, 30, 32)
    _, _, cov = naive_recurrent_kdn(
        q=k,
        k=k,
        v=k,
        g=torch.zeros(1, 30, 2, 8),
        **layer.noise(x),
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        initial_cov=layer.prior_covariance(),
        output_final_state=True,
        covariance=covariance,
        info_scale=info_scale,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
    )
    want = COVARIANCE / (1 + (8 if info_scale is None else info_scale) / 8)
    assert (cov / want - 1).abs().max() < 0.01


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_channel_without_keys(covariance):
    kda = copy.deepcopy(make_kda())
    with torch.no_grad():
        kda.model.layers[0].attn.k_proj.weight[0] = 0
    kdn = convert_kda(kda, covariance, make_ids(2, 128, 2))
    assert all(x.isfinite().all() for x in kdn.parameters())
    got = summary(measure(kda, kdn, make_ids(2, 128, 1)))
    assert got[0] < 0.02 and got[1] < 0.03, got


def test_gain_at_constant_covariance():
    """Where the predicted covariance is s and |k| = 1, the write strength is beta up to 0.01 for |b| <= 4."""
    kda = make_kda()
    layer, kdn = kda.model.layers[0].attn, convert_kda(kda, 'isotropic')
    x = torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(0)) * 2
    b, r = layer.b_proj(x), kdn.model.layers[0].attn.noise(x)['r']
    r = kdn.config.r_min + F.softplus(r)
    near = b.abs() <= 4
    assert (b.abs() > 3.5).logical_and(near).any()
    assert (COVARIANCE / (COVARIANCE + r) - b.sigmoid())[near].abs().max() < 0.01
    assert_close(kdn.model.layers[0].attn.prior_covariance(), torch.full((2,), COVARIANCE), 1e-6, 'prior')


@pytest.mark.parametrize(('covariance', 'shared', 'tokens', 'tol', 'share'), [
    # in a model whose tokens have much in common, a diagonal fit needs tokens
    ('diagonal', 0., False, 0.6, 0.8),
    ('diagonal', 0.6, True, 0.2, 0.35),
    ('isotropic', 0.6, False, 0.08, 0.25),
    ('isotropic', 0.6, True, 0.03, 0.1),
])
def test_logits(covariance, shared, tokens, tol, share):
    """Within `tol` of KDA's, and nearer by the factor `share` than with new parameters as initialised."""
    kda, ids = make_kda(shared), make_ids(2, 128, 1)
    want = logits(kda, ids)
    error = rel(logits(convert_kda(kda, covariance, make_ids(2, 128, 2) if tokens else None), ids), want)
    default = rel(logits(make_default(kda, covariance), ids), want)
    assert error < tol and error < share * default, (error, default)


@pytest.mark.parametrize('op', [naive_recurrent_kdn, chunk_kdn])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_scale_invariance(covariance, op):
    """Outputs are the same for a common factor on r, omega and prior: s is free."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 80, 2, 8, generator=generator) for _ in range(4))
    r, omega = torch.rand(2, 80, 2, generator=generator), torch.rand(2, 80, 2, 8, generator=generator)
    omega = omega if covariance == 'diagonal' else omega[..., 0]
    o, scaled = (
        op(
            q, k, v, F.logsigmoid(g), c * omega, c * (r + 0.01), initial_cov=c * torch.tensor([1., 2.]), covariance=covariance,
            use_qk_l2norm_in_kernel=True,
        )[0] for c in (1., COVARIANCE)
    )
    assert_close(scaled, o, 2e-6)


# ---- training, types, files


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradients(covariance):
    """They reach all new parameters (`omega_proj.0` once a step has moved the last weight), and r learns as `b_proj` would."""
    kda, ids = make_kda(), make_ids(2, 60)
    kdn = convert_kda(kda, covariance, ids, learn_info_scale=True).train()
    optimizer = torch.optim.AdamW(kdn.parameters(), lr=1e-3)
    kdn(ids, labels=ids).loss.backward()
    gradients = {name: x.grad.clone() for name, x in new_parameters(kdn).items()}
    optimizer.step()
    kdn.zero_grad()
    kdn(ids, labels=ids).loss.backward()
    for name, x in new_parameters(kdn).items():
        assert x.grad.isfinite().all() and x.grad.any(), name
        assert gradients[name].any() or name == 'omega_proj.0.weight', name

    kda.zero_grad()
    kda(ids, labels=ids).loss.backward()
    want = -kda.model.layers[0].attn.b_proj.weight.grad
    kda.zero_grad()
    got = gradients['r_proj.weight']
    assert F.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.7
    assert 0.5 < got.norm() / want.norm() < 2


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_bfloat16(covariance):
    """Parameters have the types of those that they stand beside, and rounding moves logits no more than it moves KDA's."""
    kda, ids, tokens = make_kda(), make_ids(2, 128, 1), make_ids(2, 128, 2)
    rounded = copy.deepcopy(kda).bfloat16()
    kdn = convert_kda(rounded, covariance, tokens)
    assert {x.dtype for x in kdn.state_dict().values()} == {torch.bfloat16}
    want = rel(logits(rounded, ids), logits(kda, ids))
    error = rel(logits(kdn, ids), logits(convert_kda(kda, covariance, tokens), ids))
    assert error < 2 * want, (error, want)

    for old in rounded.model.layers:
        for x in (old.attn.A_log, old.attn.dt_bias):
            x.data = x.data.float()
    kdn = convert_kda(rounded, covariance, tokens, learn_info_scale=True)
    float32 = {name.rpartition('.')[2] for name, x in kdn.state_dict().items() if x.dtype == torch.float32}
    assert float32 == {'A_log', 'dt_bias', 'prior_precision', 'log_info_scale'}
    assert logits(kdn, ids).isfinite().all()


def save_source(folder: Path, tokenizer: bool = True) -> KDAForCausalLM:
    """The model that is read from a folder of a bfloat16 KDA model."""
    kda = copy.deepcopy(make_kda()).bfloat16()
    kda.generation_config.temperature = 0.5
    kda.generation_config.do_sample = True
    kda.save_pretrained(folder)
    if tokenizer:
        words = Tokenizer(models.WordLevel({f'w{i}': i for i in range(50)}, unk_token='w0'))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token='w0').save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype='auto')


def check_saved(folder: Path, want: KDNForCausalLM, drawn: str | None = None) -> KDNForCausalLM:
    """The model in a folder is `want`, but for parameters drawn at random."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype='auto')
    got, want = model.state_dict(), want.state_dict()
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == want[name].dtype
        assert torch.equal(x, want[name]) or drawn is not None and drawn in name, name
    assert got['model.layers.0.attn.r_proj.weight'].dtype == torch.bfloat16
    return model


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_command(covariance, tmp_path, capsys):
    kda = save_source(tmp_path / 'kda')
    ids = make_ids(1, 600, 2)
    (tmp_path / 'text').write_text(' '.join(f'w{i}' for i in ids[0].tolist()))
    main([str(tmp_path / 'kda'), str(tmp_path / 'kdn'), '--covariance', covariance, '--text', str(tmp_path / 'text')])
    # 600 tokens are one window
    kdn = check_saved(tmp_path / 'kdn', convert_kda(kda, covariance, ids), drawn='omega_proj.0')
    assert kdn.config.covariance == covariance and kdn.config.r_min == COVARIANCE / 100
    assert kdn.generation_config.temperature == 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / 'kdn')('w3 w1').input_ids == [3, 1]

    report = capsys.readouterr().out
    copied, dropped, *_ = (line for line in report.splitlines() if re.match('copied|dropped', line))
    assert copied.split()[1:] == ['43', f'{sum(x.numel() for x in kda.parameters()) - 128:,}']
    assert dropped.split()[2:] == ['2', '128']
    layers = [line.split() for line in report.splitlines() if re.match(r'\d', line)]
    assert [x[0] for x in layers] == ['0', '1']
    for _, beta, strength, difference in layers:
        assert abs(float(strength) - float(beta)) <= float(difference) + 0.001 and float(difference) < 0.02


def test_command_without_text(tmp_path, capsys):
    kda = save_source(tmp_path / 'kda', tokenizer=False)
    main([str(tmp_path / 'kda'), str(tmp_path / 'kdn')])
    check_saved(tmp_path / 'kdn', convert_kda(kda), drawn='omega_proj.0')
    assert 'write strength' not in capsys.readouterr().out
    assert not list((tmp_path / 'kdn').glob('tokenizer*'))


def test_refused_commands(tmp_path, capsys):
    save_source(tmp_path / 'kda', tokenizer=False)
    KDAForCausalLM(make_kda_config(allow_neg_eigval=True)).save_pretrained(tmp_path / 'negative')
    (tmp_path / 'text').write_text('w1 w2')
    for args, message in {
        ('kda', 'kda'): 'is not empty',
        ('nothing', 'kdn'): 'nothing',
        ('negative', 'kdn'): 'allow_neg_eigval=True',
        ('kda', 'kdn', '--text', str(tmp_path / 'text')): 'SOURCE has no tokenizer',
    }.items():
        with pytest.raises(SystemExit):
            main([str(tmp_path / args[0]), str(tmp_path / args[1]), *args[2:]])
        assert message in capsys.readouterr().err
    assert not (tmp_path / 'kdn').exists()


@torch.no_grad()
def test_floor_of_the_decay_in_omega():
    layer = convert_kda(make_kda(), 'diagonal', lower_bound=-0.05).model.layers[0].attn
    g = -layer.A_log.exp()[:, None] * F.softplus(layer.dt_bias.view(2, 8))
    assert (g < -0.05).any()
    omega = F.softplus(layer.omega_proj[-1].bias).view(2, 8)
    assert_close(omega, COVARIANCE * (1 - (2 * g.clamp(min=-0.05)).exp() / 2), 1e-3)
