# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""FLA's own models on a CPU, and that importing this package changes nothing else of FLA."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import fla.backends
import pytest
import torch
import transformers
from conftest import assert_close
from fla.backends import BackendRegistry
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, KDAConfig, KDAForCausalLM
from packaging.version import Version

import fla_kdn  # noqa: F401

TESTS = Path(__file__).resolve().parents[1]
KDA, GDN = (KDAForCausalLM, KDAConfig), (GatedDeltaNetForCausalLM, GatedDeltaNetConfig)
MODELS = [
    pytest.param(KDA, {}, id='kda'),
    pytest.param(KDA, {'num_v_heads': 4, 'safe_gate': True, 'lower_bound': -5.}, id='kda-grouped-values-safe-gate'),
    pytest.param(KDA, {'use_short_conv': False, 'allow_neg_eigval': True, 'expand_v': 2.}, id='kda-no-conv-negative'),
    pytest.param(GDN, {}, id='gated-deltanet'),
    pytest.param(GDN, {'num_v_heads': 4, 'allow_neg_eigval': True}, id='gated-deltanet-grouped-values-negative'),
    pytest.param(GDN, {'use_gate': False, 'expand_v': 1.}, id='gated-deltanet-no-gate'),
]
# what `fla_kdn.backends.torch` gives an implementation for CPU tensors: functions in FLA's registry of functions, ...
FUNCTIONS = {
    'fla.modules.activations.ops': [
        'powglu_fwd', 'powglu_fwdbwd', 'powglu_linear', 'swiglu_fwd', 'swiglu_fwdbwd', 'swiglu_linear'],
    'fla.modules.causal_conv1d.ops': ['causal_conv1d_bwd', 'causal_conv1d_fwd', 'causal_conv1d_update'],
    'fla.modules.fused_cross_entropy.ops': ['cross_entropy_bwd', 'cross_entropy_fwd'],
    'fla.modules.fused_linear_cross_entropy.ops': ['fused_linear_cross_entropy_bwd'],
    'fla.modules.norm.fused_norm_gate': ['layer_norm_gated_bwd', 'layer_norm_gated_fwd'],
    'fla.modules.norm.l2norm': ['l2norm_bwd', 'l2norm_fwd'],
    'fla.modules.norm.layernorm': ['layer_norm_bwd', 'layer_norm_fwd'],
    'fla.ops.kda.chunk': ['chunk_kda'],
}
FUNCTIONS = sorted(f'{module}.{name}' for module, names in FUNCTIONS.items() for name in names)
# ... functions of an operation in its registry of operations, ...
OPERATIONS = {'gated_delta_rule': ['chunk_gated_delta_rule'], 'kda': ['fused_recurrent_kda_fwd']}
# ... and attributes that FLA does not dispatch, which are replaced
REPLACED = [
    'fla.modules.fused_cross_entropy.ops.FusedCrossEntropyLoss.forward',
    'fla.ops.gated_delta_rule.fused_recurrent.fused_recurrent_gated_delta_rule_fwd',
]


def run_python(code: str, **env: str) -> dict:
    """What `code` prints last, as JSON, in a process of its own that finds this package and the helpers of the tests."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / 'models'), os.environ.get('PYTHONPATH', '')])
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path, **env},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def make_model(model, randomize: bool = True, **options):
    """A tiny model of FLA; `randomize` moves every parameter off its initial value."""
    model_class, config_class = model
    torch.manual_seed(0)
    model = model_class(config_class(**{
        'hidden_size': 32,
        'num_hidden_layers': 2,
        'num_heads': 2,
        'head_dim': 8,
        'vocab_size': 50,
        **options,
    }))
    if randomize:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.2 * torch.randn_like(p)
    return model


def make_ids(B: int, T: int) -> torch.Tensor:
    return torch.randint(1, 49, (B, T), generator=torch.Generator().manual_seed(0))


# ---- FLA's models


@pytest.mark.parametrize(('model', 'options'), MODELS)
def test_training_reduces_the_loss(model, options):
    model, ids = make_model(model, randomize=False, **options).train(), make_ids(2, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(losses[0] - math.log(50)) < 0.2
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize('fused_linear', [False, True], ids=['fused-loss', 'fused-linear-loss'])
@pytest.mark.parametrize(('model', 'options'), MODELS)
def test_fused_modules(model, options, fused_linear):
    """Loss and gradients with every flag on are those with every flag off, where the modules are those of PyTorch."""
    ids, labels = make_ids(2, 70), make_ids(2, 70)
    labels[0, :5] = labels[1, -1] = -100
    flags = {'fuse_norm': True, 'fuse_swiglu': True, 'fuse_cross_entropy': True}
    if model is GDN:
        flags |= {'fuse_cross_entropy': not fused_linear, 'fuse_linear_cross_entropy': fused_linear}
    fused, plain = (make_model(model, **flags, **options) for flags in (flags, dict.fromkeys(flags, False)))
    if model is KDA:
        # it fuses the projection into the loss while it trains
        fused.train(fused_linear)
    losses = []
    for m in (fused, plain):
        losses.append(m(ids, labels=labels).loss)
        losses[-1].backward()
    assert_close(*losses, 1e-6, 'loss')
    gradients = {name: p.grad for name, p in fused.named_parameters()}
    for name, p in plain.named_parameters():
        assert p.grad.any(), name
        # gradients of vectors are sums over all tokens whose terms nearly cancel
        assert_close(gradients[name], p.grad, 5e-4 if p.ndim == 1 else 5e-5, name)


@pytest.mark.parametrize('low_precision', ['bf16', 'autocast'])
@pytest.mark.parametrize(('model', 'options'), MODELS)
def test_low_precision(model, options, low_precision):
    model, ids = make_model(model, **options).train(), make_ids(2, 70)
    want = model(ids, labels=ids).loss
    model = model.bfloat16() if low_precision == 'bf16' else model
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=low_precision == 'autocast'):
        loss = model(ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            logits = model.eval()(ids[:, :40]).logits
    assert_close(loss.float(), want, 3e-2, 'loss')
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


@pytest.mark.parametrize('padded', [False, True], ids=['full', 'left-padded'])
@pytest.mark.parametrize(('model', 'options'), MODELS)
@torch.no_grad()
def test_cached_decoding(model, options, padded):
    model, ids, pads = make_model(model, **options).eval(), make_ids(3, 76), [3, 0, 64] if padded else [0, 0, 0]
    mask = (torch.arange(76) >= torch.tensor(pads)[:, None]).long() if padded else None
    logits, cache, end = [], None, 0
    for piece in ids.split((70, *[1] * 6), 1):
        end += piece.shape[1]
        output = model(
            piece,
            attention_mask=mask[:, :end].clone() if padded else None,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits.append(output.logits)
    logits = torch.cat(logits, 1)
    for row, pad in enumerate(pads):
        full = model(ids[row:row + 1, pad:], use_cache=False).logits
        assert_close(logits[row:row + 1, pad:], full, 2e-5, f'logits of row {row}')


GENERATE = """
import json
import torch
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, KDAConfig, KDAForCausalLM
from fla_kdn.models.compat import fix_fla_generation
from utils import CACHE, greedy, make_ids, make_model, randomize

options = dict(
    hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=8, vocab_size=50, bos_token_id=None, eos_token_id=None)
torch.manual_seed(0)
models = {
    'kda': KDAForCausalLM(KDAConfig(**options)),
    'gated-deltanet': GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**options)),
}
models = {name: randomize(model).eval() for name, model in models.items()} | {'kdn': make_model()}


def right(model, T, pad):
    ids = make_ids(2, T)
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    result = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = greedy(model, ids, 6, attention_mask=mask)
    assert not torch.equal(expected, greedy(model, ids, 6, context=1)), 'no memory is needed for these tokens'
    return torch.equal(result, expected)


def check():
    cases = [(1, 0), (5, 0), (70, 0), (5, 2), (70, 66)]
    return {f'{name}-{T}-{pad}': right(model, T, pad) for name, model in models.items() for T, pad in cases}


def right_from_a_kept_cache(model):
    ids = make_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True).past_key_values
    result = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **{CACHE: cache})
    return torch.equal(result, greedy(model, ids, 6))


before = check()
fix_fla_generation()
# once more changes nothing
fix_fla_generation()
kept = {f'{name}-kept-cache': right_from_a_kept_cache(model) for name, model in models.items()}
print(json.dumps([before, {**check(), **kept}]))
"""


def test_generate():
    """FLA 0.6.0 reads the cache as `past_key_values`; transformers from 5.24 on gives it as `cache`."""
    before, after = run_python(GENERATE)
    assert len(after) == 18 and all(after.values()), after
    needed = Version(transformers.__version__) >= Version('5.24.dev0')
    for name, right in before.items():
        assert right == (name.startswith('kdn') or not needed), f'{name} without the fix'


# ---- what the import changes


def torch_registries() -> dict[str, tuple[str, fla.backends.BaseBackend]]:
    """Names of functions for which the backend of this package is registered, and that backend."""
    found = {}
    for function, registry in fla.backends._function_registries.items():
        if backend := registry._backends.get('torch'):
            found[f'{function.__module__}.{function.__name__}'] = function.__name__, backend
    for operation, registry in fla.backends._operation_registries.items():
        if backend := registry._backends.get('torch'):
            for name in vars(type(backend)):
                if isinstance(vars(type(backend))[name], staticmethod):
                    found[f'{operation}/{name}'] = name, backend
    return found


EXPECTED = [*FUNCTIONS, *(f'{operation}/{name}' for operation, names in OPERATIONS.items() for name in names)]


def dispatch(name: str, backend: fla.backends.BaseBackend, *args, **kwargs) -> str:
    """Which one FLA calls for these arguments, the backend's implementation or the default, if there is no other backend."""
    assert callable(backend.get_implementation(name))
    registry = BackendRegistry('test')

    class Recorder(type(backend)):
        def get_implementation(self, function_name):
            return lambda *args, **kwargs: 'torch'

    recorder = Recorder()
    recorder.verifier = backend.verifier
    registry.register(recorder)

    def default(*args, **kwargs):
        return 'default'

    default.__name__ = name
    return registry.dispatch(default)(*args, **kwargs)


def test_registered_functions():
    assert sorted(torch_registries()) == sorted(EXPECTED)
    assert fla.backends._operation_registries.keys() >= OPERATIONS.keys()


@pytest.mark.parametrize('entry_point', EXPECTED)
def test_calls_off_the_cpu_are_left_alone(monkeypatch, entry_point):
    entry_point = torch_registries()[entry_point]
    cpu, meta = torch.ones(2), torch.ones(2, device='meta')
    assert dispatch(*entry_point, cpu, 1, None, x=[cpu]) == 'torch'
    # a call for a GPU may carry lengths of sequences on the CPU
    for args in ((meta,), (cpu, meta), (None, 1., [cpu, meta]), ((meta,), cpu)):
        assert dispatch(*entry_point, *args) == 'default'
        assert dispatch(*entry_point, **{f'x{i}': x for i, x in enumerate(args)}) == 'default'
        assert dispatch(*entry_point, cpu, x=args[-1]) == ('default' if args[-1] is not cpu else 'torch')
    assert dispatch(*entry_point, 1, None) == 'default'

    monkeypatch.setenv('FLA_TORCH', '0')
    assert dispatch(*entry_point, cpu) == 'default'
    monkeypatch.setenv('FLA_TORCH', '1')
    assert dispatch(*entry_point, cpu) == 'torch'


IMPORT = """
import json, os, sys, types, warnings
import torch
import fla, fla.backends, fla.models, fla.ops, fla.modules
from fla.modules.fused_cross_entropy import ops as loss_ops
from fla.ops.gated_delta_rule import fused_recurrent
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

calls = []


def original(*args, **kwargs):
    calls.append(1)


# stand-ins, which launch nothing on a device that is not there
loss_ops.FusedCrossEntropyLoss.forward = original
fused_recurrent.fused_recurrent_gated_delta_rule_fwd = original


def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name == 'fla' or name.startswith('fla.'):
            for key, value in list(vars(module).items()):
                found[f'{name}.{key}'] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update((f'{name}.{key}.{k}', v) for k, v in list(vars(value).items()))
    return found


def contents(found):
    return {name: list(value) for name, value in found.items() if isinstance(value, (dict, list, set))}


def registries():
    found = {}
    for functions in (fla.backends._function_registries, fla.backends._operation_registries):
        for key, registry in functions.items():
            name = key if isinstance(key, str) else f'{key.__module__}.{key.__name__}'
            for backend_type, backend in registry._backends.items():
                found[f'{name}:{backend_type}'] = backend, backend.priority, backend.verifier, backend.implementation
    return found


def state():
    return {
        'dtype': str(torch.get_default_dtype()),
        'device': str(torch.get_default_device()),
        'threads': [torch.get_num_threads(), torch.get_num_interop_threads()],
        'grad': [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        'anomaly': torch.is_anomaly_enabled(),
        'autocast': [torch.is_autocast_enabled('cpu'), torch.is_autocast_enabled('cuda')],
        'tf32': [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        'precision': torch.get_float32_matmul_precision(),
        'reduced': torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        'cudnn': [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        'deterministic': torch.are_deterministic_algorithms_enabled(),
        'cuda': torch.cuda.is_initialized(),
        'random': torch.get_rng_state().tolist(),
        'environment': dict(os.environ),
        'warnings': [str(x) for x in warnings.filters],
        'functional': sorted(torch.nn.functional.__dict__),
        'configs': sorted(set(CONFIG_MAPPING.keys()) - {'kdn'}),
    }


before = attributes(), contents(attributes()), registries(), state(), 'kdn' in CONFIG_MAPPING.keys()
import fla_kdn
after = attributes(), contents(attributes()), registries(), state(), 'kdn' in CONFIG_MAPPING.keys()

changed = [name for name, value in before[0].items() if after[0].get(name) is not value]
added = [name for name, value in after[0].items() if name not in before[0]]
new_modules = [name for name in sys.modules if name.startswith('fla.') and f'{name}.__name__' in added]
report = {
    'changed': changed,
    'added': [name for name in added if not name.startswith(tuple(f'{m}.' for m in new_modules)) and name not in new_modules],
    'contents': [name for name, value in before[1].items() if after[1].get(name) != value],
    'registries changed': [name for name, value in before[2].items() if after[2].get(name) != value],
    'registries added': [name for name in after[2] if name not in before[2]],
    'state': [name for name, value in before[3].items() if after[3][name] != value],
    'cuda': after[3]['cuda'],
    'kdn': [before[4], after[4]],
}


def called(fn):
    calls.clear()
    try:
        fn()
    except Exception as error:
        return repr(error)
    return len(calls)


def loss(device, target_device):
    logits = torch.randn(3, 5, device=device)
    target = torch.ones(3, dtype=torch.long, device=target_device)
    return loss_ops.FusedCrossEntropyLoss()(logits, target)


def decode(device, lens_device):
    q, k = torch.randn(2, 1, 1, 2, 4, device=device)
    v, g = torch.randn(1, 1, 2, 6, device=device), -torch.rand(1, 1, 2, device=device)
    return fused_recurrent.fused_recurrent_gated_delta_rule_fwd(
        q, k, v, g=g, beta=-g, cu_seqlens=torch.tensor([0, 1], device=lens_device))


for name, fn in {'loss': loss, 'decode': decode}.items():
    report[name] = {str(devices): called(lambda: fn(*devices)) for devices in (
        ('cpu', 'cpu'), ('meta', 'meta'), ('meta', 'cpu'), ('cpu', 'meta'))}
    os.environ['FLA_TORCH'] = '0'
    report[name]['off'] = called(lambda: fn('cpu', 'cpu'))
    del os.environ['FLA_TORCH']
print(json.dumps(report))
"""


def test_import():
    """It adds implementations for CPU tensors, the model KDN and two replacements that leave other tensors alone."""
    report = run_python(IMPORT)
    assert sorted(report['changed']) == REPLACED
    assert report['added'] == [] and report['contents'] == []
    assert report['registries changed'] == []
    assert sorted(report['registries added']) == sorted(f'{name}:torch' for name in (*FUNCTIONS, *OPERATIONS))
    assert report['state'] == [] and report['cuda'] is False
    assert report['kdn'] == [False, True]
    # calls of what FLA had there before
    expected = {"('cpu', 'cpu')": 0, "('meta', 'meta')": 1, "('meta', 'cpu')": 1, "('cpu', 'meta')": 1, 'off': 1}
    assert report['loss'] == report['decode'] == expected
