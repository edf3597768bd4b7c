# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What a model says of each token: through layers, padding, packing, caches and `generate`; and of tokens that a kept cache is
only asked about."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import assert_close
from utils import CACHE, OPTIONS, make_ids, make_model

from fla_kdn.layers import KalmanDeltaNet
from fla_kdn.ops.kdn import naive_recurrent_kdn

if TYPE_CHECKING:
    from fla_kdn.ops.kdn import KDNUncertainty

NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
ASKED = 'log_likelihood'


def stacked(uncertainty: tuple[KDNUncertainty | None, ...]) -> torch.Tensor:
    """Of all layers that have some, `[layers, 4, B, T, HV]`."""
    return torch.stack([torch.stack(x) for x in uncertainty if x is not None])


def of(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return stacked(model(ids, output_uncertainty=ASKED, **kwargs).uncertainty)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_output(options):
    model, ids = make_model(**options), make_ids(2, 70)
    plain, output = model(ids, labels=ids), model(ids, labels=ids, output_uncertainty=ASKED)
    assert not hasattr(plain, 'uncertainty')
    assert torch.equal(output.loss, plain.loss) and torch.equal(output.logits, plain.logits)
    kinds = [isinstance(layer.attn, KalmanDeltaNet) for layer in model.model.layers]
    assert [x is not None for x in output.uncertainty] == kinds
    for x, layer in zip(output.uncertainty, model.model.layers, strict=True):
        if x is not None:
            assert all(y.shape == (2, 70, layer.attn.num_v_heads) and y.dtype == torch.float32 for y in x)
            assert x.write_strength.min() > 0 and x.write_strength.max() < 1
    assert model(ids, output_uncertainty=True).uncertainty[1].log_likelihood is None
    *_, last = model(ids, output_uncertainty=ASKED, return_dict=False)
    assert torch.equal(stacked(last), stacked(output.uncertainty))
    base = model.model(ids, output_uncertainty=ASKED)
    assert torch.equal(stacked(base.uncertainty), stacked(output.uncertainty))


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_training(options):
    """Also with gradient checkpoints, whose layers run twice."""
    model, ids = make_model(**options).train(), make_ids(2, 70)
    want = model(ids, labels=ids, output_uncertainty=ASKED)
    model.gradient_checkpointing_enable()
    got = model(ids, labels=ids, output_uncertainty=ASKED)
    got.loss.backward()
    assert len(got.uncertainty) == model.config.num_hidden_layers
    assert_close(stacked(got.uncertainty), stacked(want.uncertainty), 1e-6)
    assert not stacked(got.uncertainty).requires_grad


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_padding_and_packing(options):
    model, ids = make_model(**options), make_ids(3, 70)
    mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(1)) > 0.3
    padded = of(model, ids, attention_mask=mask)
    assert not padded[..., ~mask, :].any()
    rows = [of(model, x[valid][None])[:, :, 0] for x, valid in zip(ids, mask, strict=True)]
    for row, valid in enumerate(mask):
        assert_close(padded[:, :, row, valid], rows[row], 1e-5, f'row {row}')
    packed = of(model, ids[mask][None], cu_seqlens=torch.tensor([0, *mask.sum(1).cumsum(0)]))
    assert_close(packed[:, :, 0], torch.cat(rows, 2), 1e-5)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_pieces(options):
    model, ids, cache, parts = make_model(**options), make_ids(2, 75), None, []
    for piece in ids.split([66, 7, 1, 1], 1):
        with torch.no_grad():
            output = model(piece, use_cache=True, output_uncertainty=ASKED, **({} if cache is None else {CACHE: cache}))
        cache = output.past_key_values
        parts.append(stacked(output.uncertainty))
    assert_close(torch.cat(parts, 3), of(model, ids), 1e-5)


def ask(model, ids: torch.Tensor, cache, **kwargs) -> torch.Tensor:
    """`key_variance` of tokens that the cache is asked about, `[layers, B, T, HV]`."""
    with torch.no_grad():
        output = model(ids, use_cache=False, output_uncertainty=True, **{CACHE: cache}, **kwargs)
    assert output.past_key_values is cache
    return torch.stack([x.key_variance for x in output.uncertainty if x is not None])


def remember(model, ids: torch.Tensor, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=True, **kwargs).past_key_values


def assert_untouched(cache, before) -> None:
    """Bitwise the same states, and the same counts of tokens."""
    assert len(cache) == len(before)
    for i, (state, kept) in enumerate(zip(cache, before, strict=True)):
        assert cache.get_seq_length(i) == before.get_seq_length(i)
        assert {name for name, x in state.items() if x is not None} == {name for name, x in kept.items() if x is not None}
        for name, x in state.items():
            assert all(torch.equal(*pair) for pair in zip(x or (), kept[name] or (), strict=True)), f'{name} of layer {i}'


@pytest.mark.parametrize('options', NAMED_OPTIONS)
@pytest.mark.parametrize('T', [1, 5, 70])
def test_asking_leaves_the_cache_alone(options, T):
    """One token, the token-by-token kernel, the chunk form, and the chunk form with gradients."""
    model, ids = make_model(**options), make_ids(2, 20 + T)
    cache = remember(model, ids[:, :20])
    before = copy.deepcopy(cache)
    got = ask(model, ids[:, 20:], cache)
    assert_untouched(cache, before)
    model(ids[:, 20:], use_cache=False, output_uncertainty=True, **{CACHE: cache})
    assert_untouched(cache, before)
    # asked again it gives the same answer, which is that of the text read at once
    assert torch.equal(ask(model, ids[:, 20:], cache), got)
    strength, _, variance, _ = of(model, ids).unbind(1)
    assert_close(got, (strength * variance)[:, :, 20:], 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('options', [
    {},
    {'covariance': 'isotropic'},
    {'num_hidden_layers': 3, 'attn': {'layers': [0, 2], 'num_heads': 4, 'num_kv_heads': 2, 'window_size': 16}},
], ids=['diagonal', 'isotropic', 'hybrid'])
def test_asking_on_a_gpu(options):
    """The same of the kernels, whose convolution of one token moves its state on in place."""
    model = make_model(hidden_size=128, head_dim=64, **options).to('cuda', torch.bfloat16)
    for T in (1, 5, 70):
        ids = make_ids(2, 100 + T).cuda()
        cache = remember(model, ids[:, :100])
        before = copy.deepcopy(cache)
        got = ask(model, ids[:, 100:], cache)
        assert_untouched(cache, before)
        strength, _, variance, _ = of(model, ids).unbind(1)
        assert_close(got, (strength * variance)[:, :, 100:], 5e-2, f'{T} tokens')


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_asking_a_padded_and_a_packed_cache(options):
    model, ids, asked = make_model(**options), make_ids(3, 20), make_ids(3, 4, seed=1)
    mask = torch.arange(20) >= torch.tensor([0, 7, 13])[:, None]
    rows = torch.cat([ask(model, y[None], remember(model, x[m][None])) for x, y, m in zip(ids, asked, mask, strict=True)], 1)
    caches = {
        'padded': remember(model, ids, attention_mask=mask),
        'packed': remember(model, ids[mask][None], cu_seqlens=torch.tensor([0, *mask.sum(1).cumsum(0)])),
    }
    for name, cache in caches.items():
        before = copy.deepcopy(cache)
        assert_close(ask(model, asked, cache), rows, 1e-5, name)
        # of the asked tokens, too, some may be padding
        valid = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
        got = ask(model, asked.gather(1, (torch.arange(4) - (~valid).sum(1)[:, None]) % 4), cache, attention_mask=valid)
        assert not got[:, ~valid].any()
        for row, n in enumerate(valid.sum(1).tolist()):
            assert_close(got[:, row, 4 - n:], rows[:, row, :n], 1e-5, f'{name}, row {row}')
        assert_untouched(cache, before)


def test_asking_of_tokens_one_by_one():
    """A cache repeated for each of them: none sees what another one would write."""
    model, ids, asked = make_model(), make_ids(1, 20), torch.arange(1, 6)
    cache = remember(model, ids)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(len(asked))
    got = ask(model, asked[:, None], repeated)
    assert_close(got, torch.cat([ask(model, x.view(1, 1), cache) for x in asked], 1), 1e-6)


@pytest.mark.parametrize('covariance', ['diagonal', 'isotropic'])
def test_key_variance_is_that_of_the_predicted_covariance(covariance):
    model, ids = make_model(covariance=covariance), make_ids(2, 24)
    block = model.model.layers[0]
    with torch.no_grad():
        predicted, k2, _ = block.attn.predicted_covariance(block.attn_norm(model.model.embeddings(ids)))
    got = ask(model, ids[:, 20:], remember(model, ids[:, :20]))[0]
    assert_close(got, (predicted * k2).sum(-1)[:, 20:], 1e-5)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_filter_inputs(options):
    """The equations on what a layer says that it gives them say the same of each token as the layer."""
    model = make_model(**options)
    layer, x = model.model.layers[1].attn, torch.randn(1, 20, model.config.hidden_size)
    packing = {'cu_seqlens': torch.tensor([0, 7, 20])}
    with torch.no_grad():
        inputs = layer.filter_inputs(x, **packing)
        assert all(y.dtype == torch.float32 for y in inputs.values())
        *_, want = naive_recurrent_kdn(
            **inputs,
            **packing,
            v=x.new_zeros(1, 20, layer.num_v_heads, 1),
            initial_cov=layer.prior_covariance(),
            covariance=layer.covariance,
            info_scale=layer.log_info_scale.exp() if layer.learn_info_scale else None,
            output_uncertainty=True,
        )
        _, got, _ = layer(x, **packing, output_uncertainty=True)
    for name in ('write_strength', 'read_variance', 'innovation_variance'):
        assert_close(getattr(got, name), getattr(want, name), 1e-5, name)


def test_what_was_seen_often_is_known_best():
    """Keys that are functions of their token, without decay and process noise: the oftener, the surer, and surer than of what
    was never seen."""
    model = make_model(use_short_conv=False, fixed_omega=0., head_dim=16, num_v_heads=2)
    attn = model.model.layers[0].attn
    with torch.no_grad():
        attn.dt_bias.fill_(-40)
    others, tokens = torch.arange(40, 46), torch.arange(1, 21)
    variances = []
    for count in (0, 1, 2, 4, 8):
        ids = torch.cat((others.expand(len(tokens), -1), tokens[:, None].expand(-1, count)), 1)
        cache = remember(model, ids)
        known, unknown = ask(model, tokens[:, None], cache)[0], ask(model, tokens[:, None] + 20, cache)[0]
        variances.append(known)
        if count >= 4:
            assert (known < unknown).float().mean() > 0.9
    assert (torch.stack(variances).diff(dim=0) < 0).all()


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_generate(options):
    model, ids = make_model(**options), make_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    kwargs = {'attention_mask': mask, 'max_new_tokens': 6, 'do_sample': False, 'pad_token_id': 0}
    output = model.generate(ids, **kwargs, output_uncertainty=ASKED, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(ids, **kwargs))
    assert [x[1].write_strength.shape[1] for x in output.uncertainty] == [20, 1, 1, 1, 1, 1]
    # the last token is not in the memory yet
    full = of(model, output.sequences[:, :-1], attention_mask=torch.nn.functional.pad(mask, (0, 5), value=1))
    assert_close(torch.cat([stacked(x) for x in output.uncertainty], 3), full, 1e-5)
    assert not model._forward_hooks and not model.model._forward_hooks


def test_generate_with_guidance():
    """Whose processor calls the model for itself."""
    model, ids = make_model(), make_ids(1, 9)
    kwargs = {'max_new_tokens': 3, 'do_sample': False, 'pad_token_id': 0, 'guidance_scale': 1.5}
    output = model.generate(ids, **kwargs, output_uncertainty=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(ids, **kwargs))
    assert [x[1].write_strength.shape[1] for x in output.uncertainty] == [9, 1, 1]


def test_errors():
    model, ids = make_model(), make_ids(1, 9)
    for kwargs in ({}, {'return_dict_in_generate': True, 'num_beams': 2}):
        with pytest.raises(ValueError, match='`output_uncertainty` needs'):
            model.generate(ids, max_new_tokens=2, output_uncertainty=True, **kwargs)
    with pytest.raises(ValueError, match='`output_uncertainty` must be'):
        model(ids, output_uncertainty='all')
    assert not model.model._forward_hooks
