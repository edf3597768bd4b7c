# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from fla.layers.gdn2 import GatedDeltaNet2
from fla.layers.kda import KimiDeltaAttention
from rich.console import Console

from benchmarks import common
from benchmarks.common import reject_beside_others
from benchmarks.throughput import measure, report
from benchmarks.throughput.measure import (
    Inference,
    LayerTraining,
    ModelTraining,
    Work,
    count_parameters,
    first_call,
    nbytes,
    take_turns,
)
from benchmarks.throughput.mixers import COMPILED, LAYERS, MODELS, make_config, make_layer
from benchmarks.throughput.plan import PLANS, TOKENS, Cell, Group, Plan, alone, decoding, training
from fla_kdn.layers import KalmanDeltaNet
from fla_kdn.layers.attn import Attention

job = import_module('benchmarks.throughput.__main__')

CPU = torch.device('cpu')
TINY = Plan(
    groups=(
        *alone('tiny', training('model', (64,), 128))[:2],
        Group('tiny', ('kdn-diagonal', 'gdn2', 'window'), training('layer', (64, 128), 128)),
        Group('tiny', ('kdn-swa-diagonal', 'attention'), decoding((64,), batches=(1, 2))),
    ),
    decode_tokens=3,
    seconds=0.0,
    calls=(1, 1),
)
ROWS = 2 + 6 + 6


def test_plan():
    first, second = PLANS['cuda'].groups[:2]
    assert first.size == second.size == '1.3b' and first.mixers != second.mixers
    assert [cell.tokens for cell in first.cells] == [4096, 32768]
    lengths = {2**i for i in range(11, 16)}
    found: dict[tuple, set] = {}
    for group in PLANS['cuda'].groups:
        for cell in group.cells:
            for mixer in group.mixers:
                key = (group.size, mixer, cell.kind, cell.batch if cell.kind == 'decode' else None)
                assert cell.tokens not in found.setdefault(key, set())
                found[key].add(cell.tokens)
                if cell.kind in ('model', 'layer'):
                    assert cell.batch * cell.tokens == TOKENS
    assert set(map(frozenset, found.values())) == {frozenset(lengths)}
    assert {key[1] for key in found if key[2] == 'model'} == set(MODELS)
    assert {key[1] for key in found if key[2] == 'layer'} == set(LAYERS)
    assert {key[3] for key in found if key[2] == 'decode'} == {1, 64}


@pytest.mark.parametrize('size', ['0.4b', '1.3b'])
def test_models_are_of_one_size(size):
    parameters = count_parameters(size)
    assert set(parameters) == set(MODELS)
    assert max(parameters.values()) / min(parameters.values()) < 1.001
    assert make_config('kda-bounded', size).safe_gate and not make_config('kda', size).safe_gate


def test_layers():
    kinds = {'gdn2': GatedDeltaNet2, 'attention': Attention, 'window': Attention, 'kda': KimiDeltaAttention}
    found = {mixer: make_layer(mixer, 'tiny', CPU) for mixer in LAYERS}
    for mixer, layer in found.items():
        assert type(layer) is kinds.get(mixer, KimiDeltaAttention if mixer == 'kda-bounded' else KalmanDeltaNet)
        assert layer.hidden_size == 64 and layer.num_heads == 2
    assert found['attention'].window_size is None and found['window'].window_size == 64
    assert found['kdn-isotropic'].covariance == 'isotropic' and found['kda-bounded'].lower_bound == -5
    assert set(report.STYLES) == set(report.NAMES) == {*LAYERS, *MODELS}
    model = measure.make_model(make_config('attention', 'tiny'), CPU)
    assert all(type(block.attn) is Attention and block.attn.window_size is None for block in model.model.layers)


@pytest.mark.parametrize('mixer', ['kdn-swa-diagonal', 'kda', 'attention'])
def test_decoding_is_greedy(mixer, monkeypatch):
    """The tokens are those of full forward passes, for each row of the batch; the prompt is longer than the window."""
    torch.manual_seed(0)
    subject, fed = Inference(mixer, 'tiny', CPU, TINY), []
    forward = type(subject.model).forward

    def recording(self, input_ids, **kwargs):
        fed.append(input_ids)
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(subject.model), 'forward', recording)
    work = subject.prepare(Cell('decode', 2, 80))
    before = work.held()
    assert work.tokens == 2 * TINY.decode_tokens
    logits = work.call()
    prompt, *steps = fed
    assert prompt.shape == (1, 80) and [x.shape for x in steps] == [(2, 1)] * TINY.decode_tokens
    tokens = torch.cat((prompt.expand(2, -1), *steps), 1)
    with torch.inference_mode():
        full = forward(subject.model, input_ids=tokens, use_cache=False).logits
    assert torch.equal(full[:, 79:-1].argmax(-1), tokens[:, 80:])
    assert torch.allclose(logits[:, -1], full[:, -1], atol=1e-4)
    # two layers, keys and values of 64 channels
    assert work.held() - before == (2 * 2 * 2 * TINY.decode_tokens * 64 * 4 if mixer == 'attention' else 0)


def test_training_step():
    subject = ModelTraining('kdn-diagonal', 'tiny', CPU, TINY)
    weights = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    work = subject.prepare(Cell('model', 2, 32))
    assert work.tokens == 64 and work.held() == nbytes(list(subject.model.parameters()))
    assert work.call().isfinite()
    assert all((p != weights[name]).any() for name, p in subject.model.named_parameters())
    assert all(p.grad is None for p in subject.model.parameters())
    # weights and two moments, and a count of steps for each parameter
    assert work.held() == 3 * nbytes(list(weights.values())) + 4 * len(weights)


class OutOfMemory(ModelTraining):
    """Has memory for a step with checkpointing only, if `limit` is 1, or for none."""
    limit = 1

    def prepare(self, cell, checkpointing=False):
        work = super().prepare(cell, checkpointing)
        weight = next(self.model.parameters())
        assert weight.grad is None
        assert self.model.is_gradient_checkpointing == checkpointing

        def call():
            if checkpointing >= self.limit:
                return work.call()
            # interrupted after a part of the backward
            weight.grad = torch.ones_like(weight)
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has 1 GiB.')

        return replace(work, call=call)


def test_checkpointing_where_a_step_does_not_fit(monkeypatch):
    subject = OutOfMemory('kdn-diagonal', 'tiny', CPU, TINY)
    _, notes = first_call(subject, Cell('model', 2, 32), CPU)
    assert notes['checkpointing'] and notes['first_s'] > 0
    monkeypatch.setattr(OutOfMemory, 'limit', 2)
    with pytest.raises(torch.OutOfMemoryError, match='1 GiB'):
        first_call(subject, Cell('model', 2, 32), CPU)
    _, notes = first_call(ModelTraining('kdn-diagonal', 'tiny', CPU, TINY), Cell('model', 2, 32), CPU)
    assert 'checkpointing' not in notes


def test_first_call_must_be_finite(monkeypatch):
    subject = ModelTraining('kda', 'tiny', CPU, TINY)
    torch.nn.init.constant_(subject.model.lm_head.weight, float('nan'))
    with pytest.raises(FloatingPointError, match='not finite'):
        first_call(subject, Cell('model', 1, 32), CPU)


def test_taking_turns(monkeypatch):
    """As many calls as are needed for the time, between the bounds; one that fails leaves the others alone."""
    calls = []
    seconds = {'slow': [5., 1., 3.], 'quick': [0.1] * 9, 'broken': [1.]}

    def run(call, device):
        return call(), 100 * len(calls), None

    def work(name):
        def call():
            calls.append(name)
            return seconds[name].pop(0)

        return Work(call, 60, lambda: 7)

    monkeypatch.setattr(measure, 'run', run)
    rows = {name: {} for name in seconds}
    take_turns({name: work(name) for name in seconds}, rows, replace(TINY, seconds=2., calls=(3, 5)), CPU)
    assert calls == ['slow', 'quick', 'broken', 'slow', 'quick', 'broken', 'slow', 'quick', 'quick', 'quick']
    assert rows['broken'] == {'error': 'IndexError: pop from empty list'}
    # the peak is of what is held and of the largest that a call added
    assert rows['slow'] == {
        'tokens_per_second': 20, 'ms': 3000, 'ms_least': 1000, 'ms_most': 5000, 'calls': 3,
        'held_bytes': 7, 'peak_bytes': 707,
    }
    assert rows['quick']['calls'] == 5 and rows['quick']['ms'] == pytest.approx(100)


@pytest.mark.parametrize(('listed', 'error'), [
    ('11\n', None), ('', None), ('No devices were found\n', None),
    ('11\n12\n', 'not timed alone: 1 other processes were on the GPU'),
])
def test_times_beside_other_processes_are_not_kept(tmp_path, monkeypatch, listed, error):
    (tmp_path / 'nvidia-smi').write_text(f'#!/bin/sh\nprintf "{listed}"\n')
    (tmp_path / 'nvidia-smi').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(uuid='x'))
    rows = [{}, {'error': 'failed'}]
    reject_beside_others(rows, torch.device('cuda'))
    assert rows == [{'error': error} if error else {}, {'error': 'failed'}]
    monkeypatch.setenv('PATH', '')
    reject_beside_others(rows, torch.device('cuda'))


def test_results_leave_the_commit_as_it_is(tmp_path, monkeypatch):
    """An interrupted run whose results are tracked can be resumed."""
    def git(*words):
        return subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x', *words], cwd=tmp_path, check=True,
                              capture_output=True, text=True).stdout.strip()

    (tmp_path / 'benchmarks' / 'results').mkdir(parents=True)
    for name in ('benchmarks/common.py', 'benchmarks/results/a.json', 'README.md'):
        (tmp_path / name).write_text('one')
    monkeypatch.setattr(common, '__file__', str(tmp_path / 'benchmarks' / 'common.py'))
    assert common.find_commit() is None
    git('init')
    git('add', '.')
    git('commit', '-m', 'one')
    for name in ('benchmarks/results/a.json', 'README.md', 'benchmarks/new.py'):
        (tmp_path / name).write_text('two')
    assert common.find_commit() == git('rev-parse', 'HEAD')
    (tmp_path / 'benchmarks' / 'common.py').write_text('two')
    assert common.find_commit() == git('rev-parse', 'HEAD') + '-dirty'


@pytest.fixture
def throughput(monkeypatch, tmp_path):
    """The job on the CPU at tiny sizes: takes further arguments, returns exit code and content."""
    monkeypatch.setitem(PLANS, 'cpu', TINY)
    monkeypatch.setattr(job, 'count_parameters', lambda size: {})

    def call(*arguments):
        code = job.main(['--device', 'cpu', '--out', str(tmp_path), *arguments])
        return code, json.loads(next(tmp_path.glob('throughput_CPU-*.json')).read_text())

    return call


def test_main(throughput, tmp_path, capsys):
    code, content = throughput()
    assert code == 0 and len(content['rows']) == ROWS and content['seconds'] > 0 and content['method'] == measure.METHOD
    assert str(tmp_path) not in json.dumps(content)
    for row in content['rows']:
        if row['mixer'] == 'gdn2':
            # has no PyTorch form
            assert row['error'] and 'ms' not in row
        else:
            assert row['tokens_per_second'] > 0 and row['held_bytes'] > 0 and row['peak_bytes'] is None
    assert {plot.name for plot in report.plot_paths(tmp_path / 'throughput_x.json').values()} == {
        'throughput_x_models.png', 'throughput_x_layers.png', 'throughput_x_decoding.png',
    }
    assert len(list(tmp_path.glob('throughput_CPU-*.png'))) == 3
    assert 'gdn2: ' in capsys.readouterr().out


def test_resume(throughput, tmp_path, monkeypatch, capsys):
    code, content = throughput('--deadline', '0')
    assert code == 1 and [row.get('not_run') for row in content['rows']] == ['the deadline of 0 s had passed'] * ROWS
    assert not list(tmp_path.glob('*.png'))
    code, content = throughput()
    numbers = {tuple(row[key] for key in job.KEYS): row['ms'] for row in content['rows'] if 'ms' in row}
    code, content = throughput('--resume', '--deadline', '0')
    assert code == 0 and len(content['rows']) == ROWS
    assert {tuple(row[key] for key in job.KEYS): row['ms'] for row in content['rows'] if 'ms' in row} == numbers
    # what has failed is tried again
    assert [row['mixer'] for row in content['rows'] if 'not_run' in row] == ['gdn2', 'gdn2']
    monkeypatch.setattr(job, 'METHOD', {})
    with pytest.raises(SystemExit):
        throughput('--resume')
    assert '--resume: ' in capsys.readouterr().err


def test_interrupted_run_leaves_what_it_has(throughput, tmp_path, monkeypatch):
    class Interrupted(Inference):
        def prepare(self, cell):
            raise KeyboardInterrupt

    monkeypatch.setitem(measure.SUBJECTS, 'prefill', Interrupted)
    with pytest.raises(KeyboardInterrupt):
        throughput()
    content = json.loads(next(tmp_path.glob('*.json')).read_text())
    assert len(content['rows']) == ROWS - 6


def test_model_that_cannot_be_built(throughput, monkeypatch):
    class Broken(ModelTraining):
        def __init__(self, mixer, *args):
            if mixer == 'kdn-diagonal':
                raise RuntimeError('no such model')
            super().__init__(mixer, *args)

    monkeypatch.setitem(measure.SUBJECTS, 'model', Broken)
    code, content = throughput()
    models = {row['mixer']: row for row in content['rows'] if row['kind'] == 'model'}
    assert code == 0 and models['kdn-diagonal']['error'] == 'RuntimeError: no such model' and models['kdn-isotropic']['ms'] > 0


@pytest.mark.parametrize('arguments', [['--device', 'tpu'], ['--warm', '2'], ['--device', 'cuda']])
def test_wrong_arguments(throughput, monkeypatch, arguments):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit):
        throughput(*arguments)


def test_warm(monkeypatch):
    """Every mixer with kernels of its own at every size; what workers tune is not kept, and why one failed comes back."""
    seen = []

    def compile_mixer(mixer, size, cells, plan, device):
        seen.append((mixer, size, os.environ['FLA_CACHE_RESULTS']))
        assert {cell.kind for cell in cells} == {'model', 'layer', 'prefill', 'decode'}
        if mixer == 'kda':
            raise MemoryError('a worker died')
        return 1.5

    monkeypatch.setenv('FLA_CACHE_RESULTS', '1')
    monkeypatch.setattr(measure, 'compile_mixer', compile_mixer)
    monkeypatch.setattr(common, 'ProcessPoolExecutor', lambda workers, mp_context: ThreadPoolExecutor(workers))
    results = dict(measure.warm(TINY, 2, CPU))
    assert set(seen) == {(mixer, 'tiny', '0') for mixer in COMPILED} and os.environ['FLA_CACHE_RESULTS'] == '1'
    assert results == {f'{mixer} tiny': 'MemoryError: a worker died' if mixer == 'kda' else 1.5 for mixer in COMPILED}


@pytest.mark.parametrize('mixer', ['kda', 'attention'])
def test_compiling_runs_every_kind(monkeypatch, mixer):
    """A model that is trained is its mixer there, and what is around the mixers is one layer of attention."""
    cells, ran = [cell for group in TINY.groups for cell in group.cells], []
    for subject in (ModelTraining, LayerTraining, Inference):
        class Recording(subject):
            def prepare(self, cell, name=subject.__name__):
                ran.append((name, cell.kind))
                assert name != 'ModelTraining' or len(self.model.model.layers) == 1
                return super().prepare(cell)

        monkeypatch.setattr(measure, subject.__name__, Recording)
    assert measure.compile_mixer(mixer, 'tiny', cells, TINY, CPU) > 0
    # no cache of attention, which would be large
    assert ran == ([('ModelTraining', 'model')] * 2 if mixer == 'attention' else [
        *[('LayerTraining', 'model')] * 2, *[('LayerTraining', 'layer')] * 2,
        ('Inference', 'prefill'), ('Inference', 'decode'), ('Inference', 'decode'),
    ])


def test_compiling_gdn2():
    """It has no model to decode with, and on a CPU no op."""
    cells = TINY.groups[-1].cells
    assert isinstance(measure.compile_mixer('gdn2', 'tiny', cells, TINY, CPU), float)
    assert 'Error: ' in measure.compile_mixer('gdn2', 'tiny', TINY.groups[0].cells, TINY, CPU)


def fake_row(mixer: str, tokens: int, **more) -> dict:
    numbers = {'tokens_per_second': 12500., 'ms': 3., 'ms_least': 2., 'ms_most': 4., 'calls': 3, 'first_s': 9.}
    numbers |= {'held_bytes': 2**30, 'peak_bytes': 3 * 2**30}
    row = {'size': '1.3b', 'mixer': mixer, 'kind': 'model', 'batch': 32768 // tokens, 'tokens': tokens}
    return {**row, **(more if more.keys() & {'error', 'not_run'} else {**numbers, **more})}


def test_report(tmp_path, monkeypatch):
    rows = [
        fake_row('kdn-diagonal', 2048),
        fake_row('kdn-diagonal', 32768, checkpointing=True),
        fake_row('attention', 2048, error='OutOfMemoryError: CUDA out of memory. Tried'),
        fake_row('kda', 2048, not_run='late'),
        fake_row('kda-bounded', 2048, error='RuntimeError: no'),
    ]
    console = Console(width=140, record=True, file=open(os.devnull, 'w'))  # noqa: SIM115
    console.print(report.group_table(rows))
    text = console.export_text()
    for words in ('12,500', 'out of memory', 'not run', 'failed', 'kdn-diagonal (checkpoints)', 'whole model, 1.3B', '3.00'):
        assert words in text
    assert '…' not in text
    drawn = []
    close = report.plt.close
    monkeypatch.setattr(report.plt, 'close', lambda figure: (drawn.append(figure), close(figure)))
    report.write_plots(tmp_path / 'throughput_x.json', {'card': 'Card', 'rows': rows})
    assert [path.name for path in tmp_path.iterdir()] == ['throughput_x_models.png']
    speed, memory = drawn[0].axes
    assert [x.get_text() for x in speed.get_xticklabels()] == ['2K', '32K'] and '1.3B' in speed.get_title(loc='left')
    points = {tuple(map(tuple, line.get_xydata())) for line in speed.lines}
    assert ((0, 12.5), (1, 12.5)) in points
    # crosses of the two that failed: below where there is no speed, at the top where memory was too small
    for ax, edge in ((speed, 0), (memory, 1)):
        crosses = [line for line in ax.lines if line.get_marker() == 'x']
        assert [tuple(line.get_xydata()[0]) for line in crosses] == [(0, edge)] * 2
    hollow = [line for line in speed.lines if line.get_markerfacecolor() == 'white']
    assert [tuple(line.get_xydata()[0]) for line in hollow] == [(1, 12.5)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_main_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(PLANS, 'cuda', TINY)
    # other tests may be on the GPU
    monkeypatch.setattr('benchmarks.throughput.measure.reject_beside_others', lambda rows, device: None)
    assert job.main(['--out', str(tmp_path)]) == 0
    content = json.loads(next(tmp_path.glob('throughput_*.json')).read_text())
    assert len(content['rows']) == ROWS
    for row in content['rows']:
        assert row['peak_bytes'] > row['held_bytes'] > 0
