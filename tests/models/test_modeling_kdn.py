# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""KDN models: losses and gradients in every configuration, and what transformers does with them: save, load, initialise."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, rel
from fla.models import GatedDeltaNetForCausalLM, KDAForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from utils import CACHE, OPTIONS, make_config, make_ids, make_model, run_python

from fla_kdn import KalmanDeltaNet, KDNConfig, KDNForCausalLM, KDNModel
from fla_kdn.layers import Attention
from fla_kdn.models.kdn.configuration_kdn import CODE_FILE

NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
LOSSES = {
    'torch-loss': {'fuse_cross_entropy': False},
    'fused-loss': {'fuse_cross_entropy': True},
    'fused-linear-loss': {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
}
NAMED_LOSSES = [pytest.param(options, id=name) for name, options in LOSSES.items()]


def make_labels(ids: torch.Tensor) -> torch.Tensor:
    """`ids` with some targets ignored, the last one of the first row among them."""
    labels = ids.clone()
    labels[0, :3] = labels[0, -1] = labels[1, 10:14] = -100
    return labels


def loss_and_gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f'no gradient for {missing}'
    return {'loss': loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tol: float = 2e-5) -> None:
    """Vectors get a tolerance of their own: their gradients are sums over all tokens whose terms nearly cancel."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert_close(got[name], x, 10 * tol if x.ndim == 1 else tol, name)


def logits(model, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


# ---- forward and backward


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_forward_backward(options, training):
    model, ids = make_model(**options).train(training), make_ids(2, 70)
    result = loss_and_gradients(model, input_ids=ids, labels=make_labels(ids))
    for name, x in result.items():
        assert x.isfinite().all() and x.any(), f'{name} has no finite or no nonzero value'
    reference = F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), make_labels(ids)[:, 1:].flatten())
    assert_close(result['loss'], reference, 1e-6, 'loss')


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_packed_sequences(options):
    model, ids = make_model(**options), make_ids(3, 70)
    fixed = model(ids, output_hidden_states=True)
    cu_seqlens = torch.arange(0, 3 * 70 + 1, 70, dtype=torch.int32)
    packed = model(ids.view(1, -1), output_hidden_states=True, cu_seqlens=cu_seqlens)
    assert len(fixed.hidden_states) == len(packed.hidden_states) == model.config.num_hidden_layers + 1
    for i, (got, want) in enumerate(zip(packed.hidden_states, fixed.hidden_states, strict=True)):
        assert_close(got.view(3, 70, -1), want, 1e-5, f'hidden states {i}')
    packed.hidden_states[-1].square().sum().backward()


@pytest.mark.parametrize('covariance', ['diagonal', 'isotropic'])
def test_training_reduces_the_loss(covariance):
    torch.manual_seed(0)
    model, ids = KDNForCausalLM(make_config(covariance=covariance)).train(), make_ids(2, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(losses[0] - math.log(50)) < 0.2
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize('loss', NAMED_LOSSES)
@pytest.mark.parametrize('fuse_swiglu', [False, True], ids=['swiglu', 'fused-swiglu'])
@pytest.mark.parametrize('fuse_norm', [False, True], ids=['norm', 'fused-norm'])
def test_fused_modules(fuse_norm, fuse_swiglu, loss):
    ids = make_ids(2, 40)
    plain = make_model(fuse_norm=False, fuse_swiglu=False, **LOSSES['torch-loss'])
    model = make_model(fuse_norm=fuse_norm, fuse_swiglu=fuse_swiglu, **loss)
    results = [loss_and_gradients(m.train(), input_ids=ids, labels=make_labels(ids)) for m in (model, plain)]
    check(*results)
    assert (type(model.model.norm) is type(plain.model.norm)) == (not fuse_norm)


@pytest.mark.parametrize('loss', NAMED_LOSSES)
def test_l2warp(loss):
    ids = make_ids(2, 40)
    results = [
        loss_and_gradients(make_model(use_l2warp=l2warp, **options), input_ids=ids, labels=ids)
        for l2warp, options in ((True, loss), (True, LOSSES['torch-loss']), (False, loss))
    ]
    check(*results[:2])
    assert rel(results[0]['lm_head.weight'], results[2]['lm_head.weight']) > 1e-4
    # and with the number of targets given, as trainers do: of this batch, or of one twice as large
    model = make_model(use_l2warp=True, **loss)
    for num_items, share in ((78, 1.), (torch.tensor(156), 0.5)):
        got = loss_and_gradients(model, input_ids=ids, labels=ids, num_items_in_batch=num_items)
        check(got, {name: share * x for name, x in results[0].items()})


@pytest.mark.parametrize('num_items', [None, 156], ids=['mean', 'trainer'])
def test_loss_in_fp16_of_many_targets(num_items, monkeypatch):
    """PyTorch adds up in fp32 on GPUs and rounds the loss to fp16, whose range ends at 65,504."""
    def cross_entropy(self, logits, targets):
        return F.cross_entropy(logits.float(), targets, reduction=self.reduction).to(logits.dtype)

    monkeypatch.setattr(torch.nn.CrossEntropyLoss, 'forward', cross_entropy)
    model, ids = make_model(**LOSSES['torch-loss']), make_ids(2, 40)
    with torch.no_grad():
        # 78 losses of some thousands
        model.lm_head.weight.mul_(1e4 / logits(model, ids).std())
    want, got = (m(ids, labels=ids, num_items_in_batch=num_items).loss for m in (model, copy.deepcopy(model).half()))
    assert want * (num_items or 78) > 65504
    assert_close(got, want, 1e-2, 'loss')


def test_config_reaches_attention_and_mlp():
    sizes = {'hidden_size': 256, 'num_heads': 2, 'head_dim': 16, 'vocab_size': 50, 'num_hidden_layers': 2}
    options = {**sizes, 'intermediate_size': None}
    attn = {'layers': [0], 'num_heads': 2, 'rope_theta': 500., 'qkv_bias': True}
    first, second = KDNForCausalLM(KDNConfig(**options, attn=attn, hidden_ratio=2, hidden_act='powlu')).model.layers
    assert first.attn.rope_theta == 500. and first.attn.qkv_bias and second.mlp.hidden_act == 'powlu'
    wider = KDNForCausalLM(KDNConfig(**options, hidden_ratio=4)).model.layers[1]
    assert second.mlp.intermediate_size < wider.mlp.intermediate_size


@pytest.mark.parametrize('as_tensor', [False, True], ids=['int', 'tensor'])
@pytest.mark.parametrize('loss', NAMED_LOSSES)
def test_num_items_in_batch(loss, as_tensor):
    """Two batches of unequal numbers of targets, accumulated, are one."""
    model, ids = make_model(**loss), make_ids(4, 30)
    labels = ids.clone()
    labels[2:, 5:] = -100
    num_items = int((labels[:, 1:] != -100).sum())
    want = loss_and_gradients(model, input_ids=ids, labels=labels)
    num_items = torch.tensor(num_items) if as_tensor else num_items
    first, second = (
        loss_and_gradients(model, input_ids=ids[i:i + 2], labels=labels[i:i + 2], num_items_in_batch=num_items) for i in (0, 2)
    )
    check({name: first[name] + second[name] for name in first}, want)


@pytest.mark.parametrize('keep', [0, 1, 3, None, torch.tensor([1, 5])], ids=['0', '1', '3', 'none', 'positions'])
def test_logits_to_keep(keep):
    model, ids = make_model(), make_ids(2, 20)
    full = logits(model, ids)
    kept = range(20)[-keep:] if isinstance(keep, int) else range(20) if keep is None else keep.tolist()
    assert_close(logits(model, ids, logits_to_keep=keep), full[:, list(kept)], 1e-6, 'logits')


def test_tuple_output():
    model, ids = make_model(), make_ids(2, 20)
    output = model(ids, labels=ids, output_hidden_states=True)
    loss, scores, _, hidden_states = model(ids, labels=ids, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, output.loss) and torch.equal(scores, output.logits)
    assert torch.equal(hidden_states[-1], output.hidden_states[-1])
    # and from embeddings in place of tokens
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, output.logits)


@pytest.mark.parametrize('use_reentrant', [False, True], ids=['no-reentry', 'reentry'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_gradient_checkpointing(options, use_reentrant):
    model, ids = make_model(**options).train(), make_ids(2, 70)
    calls = []
    for layer in model.model.layers:
        layer.attn.register_forward_hook(lambda *_: calls.append(1))
    want = loss_and_gradients(model, input_ids=ids, labels=ids)
    assert len(calls) == model.config.num_hidden_layers
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': use_reentrant})
    # a cache cannot be written twice
    check(loss_and_gradients(model, input_ids=ids, labels=ids, use_cache=True), want, 1e-6)
    assert len(calls) == 3 * model.config.num_hidden_layers, 'the layers did not run again in the backward pass'


@pytest.mark.parametrize('low_precision', ['bf16', 'autocast'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_low_precision(options, low_precision):
    model, ids = make_model(**options), make_ids(2, 70)
    want = model(ids, labels=ids)
    model = model.bfloat16() if low_precision == 'bf16' else model
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=low_precision == 'autocast'):
        output = model(ids, labels=ids)
        assert output.logits.dtype == torch.bfloat16
        # before the backward pass, as it may write gradients over them
        assert_close(output.logits.float(), want.logits, 5e-2, 'logits')
        assert_close(output.loss.float(), want.loss, 2e-2, 'loss')
        output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_one_copy_under_autocast(options):
    """What a norm gives to several projections is rounded once, and not by each of them."""
    model, inputs = make_model(**options), {'attn': set(), 'mlp': set()}
    # as long as one is held its memory is not used again
    held = []

    def note(module, args, part):
        held.append(args[0])
        inputs[part].add((args[0].data_ptr(), args[0].dtype))

    block = model.model.layers[0]
    for part in inputs:
        for module in getattr(block, part).modules():
            reads_it = isinstance(module, torch.nn.Linear) and module not in (block.attn.o_proj, block.mlp.down_proj)
            if reads_it and module.in_features == model.config.hidden_size:
                module.register_forward_pre_hook(functools.partial(note, part=part))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        model(make_ids(2, 30))
    for part, of in inputs.items():
        assert [dtype for _, dtype in of] == [torch.bfloat16], (part, of)
    exact = make_model(**options).double()(make_ids(2, 30)).logits
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(make_model(**options).double()(make_ids(2, 30)).logits, exact)


@pytest.mark.parametrize('model_class', [KDNModel, KDNForCausalLM])
@torch.no_grad()
def test_both_names_of_the_cache(model_class):
    model, ids = make_model(), make_ids(2, 20)
    model = model.model if model_class is KDNModel else model
    assert type(model) is model_class
    cache = model(ids[:, :12], use_cache=True).past_key_values
    caches = [copy.deepcopy(cache) for _ in range(2)]
    outputs = [model(ids[:, 12:], **{name: c})[0] for name, c in zip(('cache', 'past_key_values'), caches, strict=True)]
    assert torch.equal(*outputs)
    assert_close(outputs[0], model(ids)[0][:, 12:], 1e-5, 'output')
    assert [c.get_seq_length() for c in caches] == [20, 20]
    with pytest.raises(ValueError, match='both `cache` and `past_key_values`'):
        model(ids[:, 12:], cache=cache, past_key_values=cache)


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=['deepcopy', 'pickle'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_copies_of_the_cache(options, copied):
    """A copy continues as the original, and one is not changed by decoding from the other."""
    model, ids = make_model(**options), make_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True).past_key_values
    copies = [copied(cache) for _ in range(2)]
    results = [
        [logits(model, ids[:, t:t + 1], **{CACHE: c}, use_cache=True) for t in range(12, 20)] for c in (*copies, cache)
    ]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert_close(torch.cat(results[0], 1), logits(model, ids)[:, 12:], 1e-5, 'logits')


# ---- configuration


def test_default_config():
    config = KDNConfig()
    assert config.model_type == 'kdn' and config.covariance == 'diagonal'
    with torch.device('meta'):
        model = KDNForCausalLM(config)
    assert len(model.model.layers) == config.num_hidden_layers == 24


def test_config_round_trip(tmp_path):
    """Of every field: each has a value here that is not its default."""
    fields = {
        'attn_mode': 'fused_recurrent', 'hidden_size': 48, 'expand_v': 2.0, 'covariance': 'isotropic', 'info_scale': 3.0,
        'learn_info_scale': True, 'r_min': 0.02, 'fixed_r': 0.5, 'fixed_omega': 0.25, 'use_short_conv': False,
        'safe_gate': True, 'lower_bound': -2.5, 'conv_size': 3, 'conv_bias': True, 'head_dim': 8, 'num_heads': 3,
        'num_v_heads': 6, 'max_position_embeddings': 99, 'hidden_ratio': 3, 'intermediate_size': 77, 'hidden_act': 'sigmoid',
        'num_hidden_layers': 5, 'norm_eps': 1e-4, 'attn': {'layers': [1, 3], 'num_heads': 4, 'window_size': 7},
        'use_cache': False, 'pad_token_id': 3, 'bos_token_id': 4, 'eos_token_id': 5, 'tie_word_embeddings': True,
        'initializer_range': 0.05, 'fuse_norm': False, 'fuse_swiglu': False, 'fuse_cross_entropy': False,
        'fuse_linear_cross_entropy': True, 'use_l2warp': True, 'vocab_size': 99,
    }
    defaults = {name: p.default for name, p in inspect.signature(KDNConfig.__init__).parameters.items()}
    assert fields.keys() == defaults.keys() - {'self', 'kwargs'}
    # the two values of a switch are both covered
    fields_off = {**fields, 'safe_gate': False, 'lower_bound': None}
    assert all(value != defaults[name] for name, value in fields.items() if name != 'safe_gate')
    for values in (fields, fields_off):
        config = KDNConfig(**values)
        config.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert type(loaded) is KDNConfig
        for other in (config, loaded, KDNConfig.from_dict(config.to_dict()), copy.deepcopy(config)):
            for name, value in values.items():
                got = getattr(other, name)
                assert (value.items() <= got.items()) if name == 'attn' else got == value, name
        assert loaded.to_dict() == config.to_dict() | {'_name_or_path': str(tmp_path)}


@pytest.mark.parametrize(
    'options',
    [
        {'covariance': 'full'},
        {'attn_mode': 'parallel'},
        {'expand_v': 0.3},
        {'num_v_heads': 3},
        {'r_min': 0.},
        {'fixed_r': 0.},
        {'fixed_omega': -1.},
        {'info_scale': 0.},
        {'safe_gate': False, 'lower_bound': -5.},
        {'lower_bound': -6.},
        {'fuse_cross_entropy': True, 'fuse_linear_cross_entropy': True},
        {'attn': {'layers': [2], 'num_heads': 2}},
        {'attn': {'layers': [0]}},
    ],
    ids=str,
)
def test_contradictory_config(options):
    with pytest.raises(ValueError):
        make_config(**options)


def test_config_reaches_the_layer():
    options = {
        'covariance': 'isotropic', 'expand_v': 2, 'num_v_heads': 4, 'attn_mode': 'fused_recurrent', 'info_scale': 3.,
        'learn_info_scale': True, 'r_min': 0.02, 'fixed_r': 0.5, 'fixed_omega': 0.25, 'use_short_conv': True, 'conv_size': 3,
        'conv_bias': True, 'safe_gate': True, 'lower_bound': -2., 'norm_eps': 0.1,
    }
    model = KDNForCausalLM(make_config(**options))
    want = KalmanDeltaNet(
        **{'mode' if name == 'attn_mode' else name: value for name, value in options.items()},
        hidden_size=32, num_heads=2, head_dim=8,
    )
    parameters = set(inspect.signature(KalmanDeltaNet.__init__).parameters) - {'self', 'layer_idx', 'norm_eps'}
    for i, layer in enumerate(model.model.layers):
        assert layer.attn.layer_idx == i and layer.attn.o_norm.eps == 0.1
        for name in parameters:
            assert getattr(layer.attn, name) == getattr(want, name), name


def test_hybrid_model():
    attn = [{'layers': [0], 'num_heads': 2}, {'layers': [2], 'num_heads': 4, 'num_kv_heads': 1, 'window_size': 9}]
    model = KDNModel(make_config(num_hidden_layers=3, attn=attn))
    assert [type(layer.attn) for layer in model.layers] == [Attention, KalmanDeltaNet, Attention]
    first, last = model.layers[0].attn, model.layers[2].attn
    assert (first.num_heads, first.num_kv_heads, first.window_size, first.layer_idx) == (2, 2, None, 0)
    assert (last.num_heads, last.num_kv_heads, last.window_size, last.layer_idx) == (4, 1, 9, 2)


def test_registration():
    types = {}
    for name in ('kdn', 'kda', 'gated_deltanet'):
        config = AutoConfig.for_model(name, hidden_size=32, num_heads=2, head_dim=16, num_hidden_layers=1, vocab_size=9)
        with torch.device('meta'):
            types[name] = [type(auto.from_config(config)) for auto in (AutoModel, AutoModelForCausalLM)]
    assert types['kdn'] == [KDNModel, KDNForCausalLM]
    assert types['kda'][1] is KDAForCausalLM and types['gated_deltanet'][1] is GatedDeltaNetForCausalLM


# ---- saving and loading


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_save_and_load(options, tmp_path):
    model, ids = make_model(**options), make_ids(2, 70)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {'config.json', 'model.safetensors', CODE_FILE.name}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is KDNForCausalLM and not any(info.values()), info
    assert torch.equal(logits(loaded.eval(), ids), want)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert type(base) is KDNModel
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)

    tied = model.config.tie_word_embeddings
    assert ('lm_head.weight' in load_file(tmp_path / 'model.safetensors')) == (not tied)
    for m in (model, loaded):
        assert (m.lm_head.weight is m.model.embeddings.weight) == tied
        assert m.get_output_embeddings() is m.lm_head and m.get_input_embeddings() is m.model.embeddings

    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for name, p in half.named_parameters():
        kept = name.endswith(('A_log', 'dt_bias', 'prior_precision', 'log_info_scale'))
        assert p.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert_close(logits(half, ids).float(), want, 5e-2, 'logits in bf16')


def check_initial(name: str, x: torch.Tensor) -> None:
    """That a parameter of a model with heads of 8 channels has the value or the distribution it starts with."""
    leaf, numel = name.split('.')[-1], x.numel()
    if leaf == 'A_log':
        assert x.min() >= 0 and x.max() <= math.log(16) and x.std() > 0.1, name
    elif leaf == 'dt_bias':
        dt = F.softplus(x)
        assert dt.min() > 0.99e-3 and dt.max() < 0.101 and dt.log().std() > 0.5, name
    elif leaf == 'prior_precision':
        assert_close(1 / (0.1 + F.softplus(x)), torch.ones_like(x), 1e-6, name)
    elif leaf == 'log_info_scale':
        assert_close(x.exp(), torch.full_like(x, 8), 1e-6, name)
    elif leaf == 'bias' or name.endswith('omega_proj.1.weight'):
        assert not x.any(), name
    elif name.endswith('norm.weight'):
        assert (x == 1).all(), name
    else:
        assert abs(x.mean()) < 5 * 0.02 / numel ** 0.5, name
        assert abs(x.std() / 0.02 - 1) < 5 / (2 * numel) ** 0.5, name


@pytest.mark.parametrize(
    'key',
    [
        'attn.A_log', 'attn.dt_bias', 'attn.prior_precision', 'attn.log_info_scale', 'attn.r_proj.weight', 'attn.r_proj.bias',
        'attn.omega_proj.0.weight', 'attn.omega_proj.1.weight', 'attn.omega_proj.1.bias', 'attn.q_proj.weight',
        'attn.g_proj.1.bias', 'attn.k_conv1d.weight', 'attn.o_norm.weight', 'attn_norm.weight', 'mlp.gate_proj.weight',
    ],
)
def test_one_weight_missing(tmp_path, key):
    """It alone is initialised, as in a new model; what was loaded is not overwritten."""
    key = f'model.layers.1.{key}'
    make_model(learn_info_scale=True, num_v_heads=16).save_pretrained(tmp_path)
    saved = {name: torch.full_like(x, 0.5) for name, x in load_file(tmp_path / 'model.safetensors').items()}
    del saved[key]
    save_file(saved, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    torch.manual_seed(0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info['missing_keys']) == {key}
    parameters = dict(model.named_parameters())
    assert {name for name, p in parameters.items() if not (p == 0.5).all()} == {key}
    check_initial(key, parameters[key])


@pytest.mark.parametrize('how', ['direct', 'auto', 'meta-apply', 'meta-init-weights'])
@pytest.mark.parametrize('covariance', ['diagonal', 'isotropic'])
def test_initial_values(covariance, how):
    config = make_config(covariance=covariance, learn_info_scale=True, num_v_heads=16)
    torch.manual_seed(0)
    if how.startswith('meta'):
        with torch.device('meta'):
            model = KDNForCausalLM(config)
        model.to_empty(device='cpu')
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(math.nan)
        if how == 'meta-apply':
            model.apply(model._init_weights)
        else:
            model.init_weights()
    else:
        model = KDNForCausalLM(config) if how == 'direct' else AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        check_initial(name, p.detach())
    assert rel(model.model.layers[0].attn.A_log, model.model.layers[1].attn.A_log) > 0.1
    if how != 'direct':
        assert model(make_ids(1, 9), labels=make_ids(1, 9)).loss.isfinite()


TRUST_REMOTE_CODE = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

path, second_path = sys.argv[1:]


class Missing:
    @staticmethod
    def find_spec(name, *_):
        if name.split('.')[0] == 'fla_kdn':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)


sys.meta_path.insert(0, Missing)
try:
    AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
except ImportError as error:
    message = str(error)
sys.meta_path.remove(Missing)
assert 'fla_kdn' not in sys.modules

model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
config = AutoConfig.from_pretrained(path, trust_remote_code=True)
with torch.no_grad():
    logits = model(torch.tensor([[1, 2, 3]])).logits
generated = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
model.save_pretrained(second_path)
print(json.dumps({
    'message': message,
    'modules': [type(model).__module__, type(model.model).__module__, type(config).__module__],
    'logits': logits.tolist(),
    'generated': generated.tolist(),
}))
"""


def test_trust_remote_code(tmp_path):
    """In a process that has not imported this package: a clear message where it is not installed, then its own classes."""
    model, ids = make_model(), torch.tensor([[1, 2, 3]])
    first, second, third = (tmp_path / name for name in ('first', 'second', 'third'))
    model.save_pretrained(first)
    output = json.loads(run_python(TRUST_REMOTE_CODE, first, second, HF_HOME=str(tmp_path / 'hf')).splitlines()[-1])
    assert 'the package fla_kdn, is not installed' in output['message']
    assert output['modules'] == [
        'fla_kdn.models.kdn.modeling_kdn', 'fla_kdn.models.kdn.modeling_kdn', 'fla_kdn.models.kdn.configuration_kdn']
    assert torch.equal(torch.tensor(output['logits']), logits(model, ids))
    assert output['generated'] == model.generate(ids, max_new_tokens=3, do_sample=False).tolist()

    AutoModelForCausalLM.from_pretrained(second, trust_remote_code=True).save_pretrained(third)
    for path in (first, second, third):
        assert [file.name for file in path.glob('*.py')] == [CODE_FILE.name]
        assert (path / CODE_FILE.name).read_text() == CODE_FILE.read_text()
        auto_map = json.loads((path / 'config.json').read_text())['auto_map']
        assert auto_map == {
            'AutoConfig': 'auto_kdn.KDNConfig',
            'AutoModel': 'auto_kdn.KDNModel',
            'AutoModelForCausalLM': 'auto_kdn.KDNForCausalLM',
        }
        assert torch.equal(logits(KDNForCausalLM.from_pretrained(path).eval(), ids), logits(model, ids))
    # it only hands over
    code = [line for line in CODE_FILE.read_text().splitlines() if line.startswith(('class ', 'def '))]
    assert not code, code


@pytest.mark.parametrize('registered', [KDNConfig, KDNModel, KDNForCausalLM])
def test_code_file_of_a_registered_class(monkeypatch, registered, tmp_path):
    """`register_for_auto_class`, which `trust_remote_code` calls too, would have the modeling code saved with a model."""
    monkeypatch.setattr(registered, '_auto_class', None)
    registered.register_for_auto_class()
    make_model().save_pretrained(tmp_path)
    make_model().model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob('*.py')] == [CODE_FILE.name]
    assert json.loads((tmp_path / 'config.json').read_text())['auto_map']['AutoModel'] == 'auto_kdn.KDNModel'


def test_saving_in_shards(tmp_path):
    model, ids = make_model(), make_ids(1, 9)
    model.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('*.safetensors'))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), logits(model, ids))
