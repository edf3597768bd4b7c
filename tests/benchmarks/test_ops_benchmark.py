# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import inspect
import json
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch
from rich.console import Console

from benchmarks import common
from benchmarks.ops import measure, registry, report
from benchmarks.ops.registry import BASELINES, LAYERS, MODES, OPS, make_inputs, make_work

job = import_module('benchmarks.ops.__main__')

B, T, H, D = SHAPE = (2, 70, 3, 8)
SIZES = {
    **dict.fromkeys(('q', 'k', 'v', 'g', 'omega', 'b', 'w', 'do', 'dq', 'dk', 'dgc'), (B, T, H, D)),
    **dict.fromkeys(('r', 'beta', 'g_atk', 'beta_atk', 'dbeta'), (B, T, H)),
    **dict.fromkeys(('A_log', 'initial_cov', 'log_atk_scale', 'mu'), (H,)),
    'dt_bias': (H * D,),
    'initial_state': (LAYERS, B, H, D, D),
    'p0': (B, H, D),
}
OTHER_SIZES = {
    'chunk_kdn_isotropic': {'omega': (B, T, H)},
    'chunk_kdn_isotropic_unbounded': {'omega': (B, T, H)},
    'chunk_gated_delta_rule': {'g': (B, T, H), 'dt_bias': (H,)},
    'fused_recurrent_kdn': {'initial_cov': (LAYERS, B, H, D)},
    'fused_recurrent_kdn_isotropic': {'omega': (B, T, H), 'initial_cov': (LAYERS, B, H)},
    'kdn_gain_isotropic': {'omega': (B, T, H), 'p0': (B, H, 1)},
}
CHUNK = [op for op in OPS.values() if op.kind == 'chunk']
DECODE = [op for op in OPS.values() if op.kind == 'decode']
ON_CPU = [op for op in CHUNK if op.name.startswith(('chunk_kdn', 'chunk_kda', 'chunk_gated', 'flash'))]

each_op = pytest.mark.parametrize('op', OPS.values(), ids=lambda op: op.name)


def check_call(func, kwargs: dict) -> None:
    """Names that an op does not know vanish in its **kwargs; FLA takes a few from there."""
    loose = inspect.signature(func).bind(**kwargs).arguments.get('kwargs', {})
    assert loose.keys() <= {'A_log', 'dt_bias', 'use_gate_in_kernel'}


@each_op
def test_inputs(op):
    inputs = make_inputs(op, SHAPE, 'cpu')
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {
        name: OTHER_SIZES.get(op.name.removesuffix('_uncertainty'), {}).get(name, SIZES[name]) for name in op.inputs
    }
    assert all(x.isfinite().all() for x in inputs.values())
    for name, x in inputs.items():
        assert x.requires_grad == (op.kind == 'chunk' and name != 'do')
        if name in ('initial_cov', 'p0', 'mu'):
            assert x.dtype == torch.float32 and (x >= 0).all()
        if name in ('omega', 'r'):
            # raw, as a projection gives it
            assert x.dtype == torch.bfloat16 and (x < 0).any()
    if 'A_log' not in inputs and 'g' in inputs:
        assert (inputs['g'] < 0).all()


def test_registry():
    assert all(BASELINES[kind] in OPS for kind in BASELINES)
    assert set(report.COLORS) == {op.name for op in CHUNK}
    assert {op.kind for op in OPS.values()} == set(MODES)


def test_ops_share_inputs():
    shared = {}
    kdn, kda, gdn2 = (make_inputs(OPS[name], SHAPE, 'cpu', shared) for name in ('chunk_kdn', 'chunk_kda', 'chunk_gdn2'))
    assert kdn['q'] is kda['q'] is gdn2['q'] and kdn['g'] is kda['g'] and kdn['do'] is kda['do']
    assert kdn['q'] is not kdn['k'] and kdn['g'] is not gdn2['g']


@pytest.mark.parametrize('op', CHUNK, ids=lambda op: op.name)
def test_chunk_arguments(op):
    inputs = make_inputs(op, SHAPE, 'cpu')
    inputs.pop('do')
    check_call(op.load(), {**inputs, **op.extra_kwargs})


@pytest.mark.parametrize('op', ON_CPU, ids=lambda op: op.name)
def test_chunk_runs_in_pytorch(op):
    inputs = make_inputs(op, SHAPE, 'cpu')
    o = make_work(op, SHAPE, inputs, 'fwd').call()
    assert o.shape == (B, T, H, D) and o.isfinite().all()
    grads = make_work(op, SHAPE, inputs, 'fwdbwd').call()
    assert [x.shape for x in grads] == [x.shape for name, x in inputs.items() if name != 'do']
    assert all(x.isfinite().all() for x in grads) and all(x.grad is None for x in inputs.values())


@pytest.mark.parametrize('mode', MODES['decode'])
@pytest.mark.parametrize('op', DECODE, ids=lambda op: op.name)
def test_decode_arguments(op, mode, monkeypatch):
    calls = []
    suffix = '' if mode == 'eager' else '_fwd'
    original = op.load(suffix)

    def record(**kwargs):
        check_call(original, kwargs)
        calls.append(kwargs)

    record.__signature__ = inspect.signature(original)
    monkeypatch.setattr(import_module(op.import_path), original.__name__, record)
    inputs = make_inputs(op, (B, 1, H, D), 'cpu')
    work = make_work(op, (B, 1, H, D), inputs, mode)
    work.call()
    assert len(calls) == work.layers == LAYERS
    for layer, kwargs in enumerate(calls):
        assert kwargs['initial_state'].data_ptr() == inputs['initial_state'][layer].data_ptr()
        assert kwargs['initial_state'].shape == (B, H, D, D)
        if mode != 'eager':
            assert kwargs['inplace_final_state'] == (mode == 'graph in place')
            assert kwargs['out'].shape == (B, 1, H, D)


@pytest.mark.parametrize('name', ['fused_recurrent_kdn', 'fused_recurrent_kdn_isotropic'])
def test_decode_runs_in_pytorch(name):
    make_work(OPS[name], (B, 1, H, D), make_inputs(OPS[name], (B, 1, H, D), 'cpu'), 'eager').call()


@pytest.mark.parametrize('name', ['kdn_gain', 'kdn_gain_isotropic'])
def test_gain_arguments(name, monkeypatch):
    called = []
    for direction in ('fwd', 'bwd'):
        original = getattr(registry, f'kdn_gain_{direction}')

        def record(*args, original=original, direction=direction, **kwargs):
            inspect.signature(original).bind(*args, **kwargs)
            called.append(direction)

        monkeypatch.setattr(registry, f'kdn_gain_{direction}', record)
    inputs = make_inputs(OPS[name], SHAPE, 'cpu')
    work = make_work(OPS[name], SHAPE, inputs, 'bwd')
    work.call()
    work.call()
    assert called == ['fwd', 'bwd', 'bwd']
    make_work(OPS[name], SHAPE, inputs, 'fwd').call()
    assert called == ['fwd', 'bwd', 'bwd', 'fwd']


def test_floors():
    shape = (1, 128, 2, 64)
    # 16384 numbers in each of q, k, v, g, o; A_log, beta of 2 and 256 numbers, dt_bias of 128
    inputs = 4 * 16384 * 2 + 2 * 4 + 128 * 4 + 256 * 2
    # per token and head: 6 * 64^2 + 5 * 64 * 64 + 64^2 / 3
    flops = 256 * (24576 + 20480 + 4096 / 3)
    kda = OPS['chunk_kda']
    forward = make_work(kda, shape, make_inputs(kda, shape, 'cpu'), 'fwd')
    assert forward.bytes == inputs + 32768
    assert forward.flops == pytest.approx(flops)
    both = make_work(kda, shape, make_inputs(kda, shape, 'cpu'), 'fwdbwd')
    assert both.bytes == (inputs + 32768) + (inputs + 32768) + inputs
    assert both.flops == pytest.approx(3 * flops)
    # in place of beta: raw omega of 16384 and r of 256 numbers in bf16, and the prior of 2 heads
    kdn = OPS['chunk_kdn']
    assert make_work(kdn, shape, make_inputs(kdn, shape, 'cpu'), 'fwd').bytes == forward.bytes - 512 + 32768 + 512 + 8
    # half of 128^2 pairs, 2 heads, 2 products of 2 * 64
    assert registry.attention_flops(*shape) == 8192 * 2 * 2 * 128
    # one layer's state of 2 x 64 x 64 is read and written
    recurrent, shape = OPS['fused_recurrent_kda'], (1, 1, 2, 64)
    work = make_work(recurrent, shape, make_inputs(recurrent, shape, 'cpu'), 'eager')
    assert work.bytes == 2 * 8192 * 4 + 5 * 128 * 2 + 2 * 4 + 128 * 4 + 2 * 2
    times = measure.floors(registry.Work(print, bytes=43 * 10**8, flops=79 * 10**10), bandwidth=4.3, tflops=790)
    assert times == {'floor_bytes_ms': pytest.approx(1), 'floor_flops_ms': pytest.approx(1)}


def test_floors_of_the_gain_stage():
    shape = (1, 128, 2, 64)
    op = OPS['kdn_gain']
    inputs = make_inputs(op, shape, 'cpu')
    # q, k, g, omega and r in bf16; A_log, mu, dt_bias, p0
    read = 4 * 32768 + 512 + 2 * 8 + 2 * 512
    # q, k; the cumulated decay and beta in fp32
    assert make_work(op, shape, inputs, 'fwd').bytes == read + 2 * 32768 + 65536 + 1024
    assert make_work(op, shape, inputs, 'bwd').bytes == 2 * read + 3 * 65536 + 1024


def fake_row(op: str, mode: str, shape: tuple, ms: float) -> dict:
    return {
        'op': op, 'kind': OPS[op].kind, 'shape': list(shape), 'mode': mode, 'ms': ms, 'ms_p20': 0.9 * ms, 'ms_p80': 1.1 * ms,
        'ratio': ms / 2, 'floor_bytes_ms': 0.2, 'floor_flops_ms': 0.1 if OPS[op].kind == 'chunk' else None, 'cold_s': 12.3,
        'peak_above_inputs_bytes': 2**29, 'peak_bytes': 2**31,
    }


def test_report(tmp_path):
    shapes = [(16, 2048, 16, 128), (1, 32768, 16, 128)]
    rows = [fake_row(op.name, mode, shape, 1 + i) for i, op in enumerate(CHUNK) for mode in MODES['chunk'] for shape in shapes]
    rows[3] = {**{key: rows[3][key] for key in ('op', 'kind', 'shape', 'mode')}, 'error': 'RuntimeError: no'}
    decode = [fake_row('fused_recurrent_kdn', 'eager', (1, 1, 16, 128), 0.0123)]
    content = {'card': 'Card', 'rows': rows + decode}
    common.write_json(tmp_path / 'new' / 'ops.json', content)
    assert json.loads((tmp_path / 'new' / 'ops.json').read_text()) == content
    report.write_plot(tmp_path / 'ops.png', content)
    assert (tmp_path / 'ops.png').read_bytes().startswith(b'\x89PNG')
    report.write_plot(tmp_path / 'none.png', {'card': 'Card', 'rows': decode})
    assert not (tmp_path / 'none.png').exists()

    console = Console(width=140, record=True, file=open(os.devnull, 'w'))  # noqa: SIM115
    console.print(report.group_table([row for row in rows if row['mode'] == 'fwdbwd' and row['shape'][0] == 1]))
    console.print(report.group_table(decode))
    console.print(report.kernel_table([{'kernel': 'a', 'calls': 2., 'ms': 3.}, {'kernel': 'b', 'calls': 1., 'ms': 1.}], 'op'))
    text = console.export_text()
    assert 'failed' in text and '0.0123' in text and '75.0%' in text and '…' not in text


def test_needs_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert job.main([]) == 2
    assert capsys.readouterr().out.splitlines() == ['benchmarks.ops needs a CUDA device, and PyTorch finds none.']
    assert job.main(['--list']) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(OPS)


@pytest.mark.parametrize('argument', ['--shapes=8', '--shapes=8x4x2', '--ops=nothing', '--modes=bwd'])
def test_wrong_arguments(argument):
    with pytest.raises(SystemExit):
        job.main([argument])


def test_main(tmp_path, monkeypatch, capsys):
    """On the CPU, with a clock of its own; a mode that fails is told of, and the other goes on."""
    def first_calls(work, inputs):
        work.call()
        return {'cold_s': 1., 'peak_above_inputs_bytes': 10, 'peak_bytes': 20}

    def do_bench(call, rep, return_mode):
        call()
        return [3., 1., 2.]

    def no_backward(*args):
        raise RuntimeError('no backward here')

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'Some Card (80 GB)')
    monkeypatch.setattr(job, 'measure_ceilings', lambda: {'bandwidth': 4., 'tflops': 700.})
    monkeypatch.setattr(measure, 'make_inputs', lambda op, shape, device, shared: make_inputs(op, shape, 'cpu', shared))
    monkeypatch.setattr(measure, 'first_calls', first_calls)
    monkeypatch.setattr(measure, 'reject_beside_others', lambda rows, device: None)
    monkeypatch.setattr(measure, 'do_bench', do_bench)
    monkeypatch.setattr(torch.autograd, 'grad', no_backward)
    ops = ['chunk_kda', 'chunk_kdn', 'chunk_gated_delta_rule']
    arguments = ['--shapes', '1x64', '2x64', '--heads=2', '--dim=8', f'--out={tmp_path}', '--ops', *ops]
    assert job.main([*arguments, '--modes', 'fwdbwd', 'fwd']) == 0
    content = json.loads((tmp_path / 'ops_Some-Card-80-GB.json').read_text())
    assert content['card'] == 'Some Card (80 GB)' and content['measured_ceilings']['tflops'] == 700
    assert set(content['versions']) == {'fla_kdn', 'torch', 'triton', 'fla'} and str(tmp_path) not in json.dumps(content)
    assert [(row['op'], row['mode']) for row in content['rows']] == [
        (op, mode) for _ in range(2) for mode in MODES['chunk'] for op in ops
    ]
    for row in content['rows']:
        if row['mode'] == 'fwd':
            assert row['ms'] == 2 and row['ratio'] == 1 and row['cold_s'] == 1 and row['floor_bytes_ms'] > 0
        else:
            assert row['error'] == 'RuntimeError: no backward here' and 'ms' not in row
    assert (tmp_path / 'ops_Some-Card-80-GB.png').exists()
    out = capsys.readouterr().out
    assert 'chunk_gated_delta_rule fwdbwd: RuntimeError: no backward here' in out and 'copy 4.00 TB/s' in out
    assert job.main([*arguments, '--modes', 'fwdbwd']) == 1


def test_warm(monkeypatch):
    """What workers tune is not kept; the reason of one that fails comes back."""
    seen = []

    def compile_op(name, shapes, modes):
        seen.append(os.environ['FLA_CACHE_RESULTS'])
        if name == 'chunk_gdn2':
            raise MemoryError('a worker died')
        return 1.5

    monkeypatch.setenv('FLA_CACHE_RESULTS', '1')
    monkeypatch.setattr(measure, 'compile_op', compile_op)
    monkeypatch.setattr(common, 'ProcessPoolExecutor', lambda workers, mp_context: ThreadPoolExecutor(workers))
    results = dict(measure.warm([(name, [SHAPE], ('fwd',)) for name in ('chunk_kdn', 'chunk_gdn2')], 2))
    assert results == {'chunk_kdn': 1.5, 'chunk_gdn2': 'MemoryError: a worker died'}
    assert seen == ['0', '0'] and os.environ['FLA_CACHE_RESULTS'] == '1'


def test_compile_op_tells_why_it_failed(monkeypatch):
    monkeypatch.setattr(measure, 'make_inputs', lambda *_: (_ for _ in ()).throw(RuntimeError('no device')))
    assert measure.compile_op('chunk_kdn', [SHAPE], ('fwd',)) == 'RuntimeError: no device'
