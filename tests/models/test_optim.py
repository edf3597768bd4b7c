# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Weight decay by names: in new, loaded, wrapped and adapted models, and in a `Trainer`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from utils import OPTIONS, make_model

from fla_kdn.models.optim import DecayByNameMixin, no_weight_decay_names, parameter_groups

NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
WRAPPERS = {
    'none': (lambda model: model, ''),
    'compiled': (lambda model: torch.compile(model, backend='eager'), '_orig_mod.'),
    'parallel': (lambda model: nn.ModuleDict({'module': model}), 'module.'),
}


def kdn_names(**options) -> set[str]:
    """What no decay is meant for, in models of `make_model` with these options, one by one."""
    mixer = [
        'o_norm.weight', 'A_log', 'dt_bias', 'prior_precision', 'r_proj.bias', 'g_proj.1.bias',
        'omega_proj.bias' if options.get('covariance') == 'isotropic' else 'omega_proj.1.bias',
    ]
    if options.get('learn_info_scale'):
        mixer.append('log_info_scale')
    if options.get('conv_bias'):
        mixer += [f'{x}_conv1d.bias' for x in 'qkv']
    attention = options.get('attn', {'layers': []})
    names = {'model.norm.weight'}
    for i in range(options.get('num_hidden_layers', 2)):
        leaves = [f'{x}_proj.bias' for x in 'qkv'] if i in attention['layers'] else mixer
        names |= {f'model.layers.{i}.attn.{leaf}' for leaf in leaves}
        names |= {f'model.layers.{i}.{norm}.weight' for norm in ('attn_norm', 'mlp_norm')}
    return names


def group_names(model: nn.Module, weight_decay: float = 0.1) -> tuple[set[str], set[str]]:
    """Names of the decayed and of the other parameters; each trainable parameter is in one group, once."""
    decayed, plain = parameter_groups(model, weight_decay)
    assert decayed['weight_decay'] == weight_decay and plain['weight_decay'] == 0
    names = {p: name for name, p in model.named_parameters()}
    counts = Counter([*decayed['params'], *plain['params']])
    assert counts == Counter(p for p in model.parameters() if p.requires_grad)
    return {names[p] for p in decayed['params']}, {names[p] for p in plain['params']}


@pytest.mark.parametrize('wrapper', WRAPPERS)
@pytest.mark.parametrize('options', [*NAMED_OPTIONS, pytest.param({'conv_bias': True}, id='convolution-bias')])
def test_names(options, wrapper, tmp_path):
    model = make_model(**options)
    model.save_pretrained(tmp_path)
    wrap, prefix = WRAPPERS[wrapper]
    expected = {prefix + name for name in kdn_names(**options)}
    for m in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        m = wrap(m)
        assert no_weight_decay_names(m) == expected
        decayed, plain = group_names(m)
        assert plain == expected
        assert f'{prefix}model.embeddings.weight' in decayed
        assert (f'{prefix}lm_head.weight' in decayed) == (not options.get('tie_word_embeddings'))


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_step_without_gradients(options, tmp_path):
    """It shrinks the decayed parameters, and leaves the bits of the others."""
    make_model(**options).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(parameter_groups(model, 0.5), lr=0.1).step()
    unchanged = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert unchanged == kdn_names(**options)
    for name in before.keys() - unchanged:
        torch.testing.assert_close(model.get_parameter(name).detach(), 0.95 * before[name])


@pytest.mark.parametrize('name', ['kda', 'gated_deltanet', 'comba', 'mamba'])
def test_models_of_fla(name):
    config = AutoConfig.for_model(name, hidden_size=32, num_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=9)
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config)
    marked = {n for n, p in model.named_parameters() if getattr(p, '_no_weight_decay', False)}
    assert {n.split('.')[-1] for n in marked} == ({'A_log', 'D'} if name == 'mamba' else {'A_log', 'dt_bias'}) | (
        {'D'} if name == 'comba' else set())
    vectors = {n for n, p in model.named_parameters() if p.ndim == 1}
    assert no_weight_decay_names(model) == group_names(model)[1] == marked | vectors


def test_frozen_parameters():
    model = make_model()
    model.model.embeddings.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    decayed, plain = group_names(model)
    assert 'model.embeddings.weight' not in decayed and 'model.norm.weight' not in plain
    assert plain == kdn_names() - {'model.norm.weight'}


def test_tied_embeddings():
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embeddings.weight
    decayed, _ = parameter_groups(model, 0.1)
    assert sum(p is model.lm_head.weight for p in decayed['params']) == 1


@pytest.mark.parametrize('use_dora', [False, True], ids=['lora', 'dora'])
def test_adapters(use_dora):
    peft = pytest.importorskip('peft')
    config = peft.LoraConfig(
        r=2, target_modules=['q_proj', 'v_proj'], modules_to_save=['attn_norm', 'g_proj'], use_dora=use_dora)
    model = peft.get_peft_model(make_model(), config)
    decayed, plain = group_names(model)
    prefix, attn = 'base_model.model.model.layers.{}.', 'base_model.model.model.layers.{}.attn.'
    expected = [f'{prefix}attn_norm.modules_to_save.default.weight', f'{attn}g_proj.modules_to_save.default.1.bias']
    if use_dora:
        expected += [f'{attn}{x}_proj.lora_magnitude_vector.default.weight' for x in 'qv']
    assert plain == {name.format(i) for name in expected for i in range(2)}
    expected = [f'{attn}{x}_proj.lora_{y}.default.weight' for x in 'qv' for y in 'AB']
    expected += [f'{attn}g_proj.modules_to_save.default.{i}.weight' for i in range(2)]
    assert decayed == {name.format(i) for name in expected for i in range(2)}
    # frozen ones keep their side
    assert {f'base_model.model.{name}' for name in kdn_names() if 'attn_norm' not in name and 'g_proj' not in name} <= (
        no_weight_decay_names(model))


@pytest.mark.parametrize('sharding', ['fsdp', 'zero-3'])
def test_flattened_parameters(sharding):
    """As the two leave them: vectors, or empty, all of them."""
    model = make_model(learn_info_scale=True)
    for p in model.parameters():
        if sharding == 'fsdp':
            p._fsdp_flattened = True
            p.data = p.data.flatten()
        else:
            p.ds_shape = p.shape
            p.data = p.new_empty(0)
    assert no_weight_decay_names(model) == kdn_names(learn_info_scale=True)


@pytest.mark.parametrize('covariance', ['diagonal', 'isotropic'])
def test_trainer(covariance, tmp_path):
    class KDNTrainer(DecayByNameMixin, Trainer):
        pass

    model = make_model(covariance=covariance)
    model.lm_head.requires_grad_(False)
    args = TrainingArguments(tmp_path, weight_decay=0.3, learning_rate=0.25, use_cpu=True, report_to='none')
    groups = KDNTrainer(model, args).create_optimizer().param_groups
    for group, expected in zip(groups, parameter_groups(model, 0.3), strict=True):
        assert group['weight_decay'] == expected['weight_decay'] and group['lr'] == 0.25
        # in the same order, by identity
        assert list(map(id, group['params'])) == list(map(id, expected['params']))
    assert any(p is model.model.layers[0].attn.prior_precision for p in groups[1]['params'])
