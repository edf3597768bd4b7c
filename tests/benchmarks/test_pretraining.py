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
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.pretraining import __main__ as pretraining

ROOT = Path(__file__).parents[2]
STEP = "{'loss': '2.5', 'grad_norm': '1.5', 'tokens': 2048, 'tokens_per_second_per_gpu': '1e+04', 'memory_gib': '0.7'}"
# in place of pretrain.py: says on which GPUs it runs, and that is its loss
FAKE = f"""
import os, sys, time
devices = os.environ['CUDA_VISIBLE_DEVICES']
if sys.argv[1] == '--model=' + os.environ.get('BROKEN', ''):
    sys.exit('no such kernel')
time.sleep(0.3)
for _ in range(5):
    print("{STEP}".replace('2.5', devices.replace(',', '')))
"""


def test_parse_log():
    assert pretraining.parse_log(f'  3%|x| {STEP}\n') == {
        'loss': 2.5, 'grad_norm': 1.5, 'tokens': 2048, 'tokens_per_second_per_gpu': 1e4, 'memory_gib': 0.7}
    assert pretraining.parse_log("{'train_runtime': '5.5'}") is None


def make_texts(folder: Path) -> list[str]:
    folder.mkdir()
    texts = [f'document {i} \u00e4 ' * 40 for i in range(70)]
    for i, text in enumerate(texts):
        (folder / f'{i:02}.py').write_text(text)
    return texts


def test_write_text(tmp_path):
    texts = make_texts(tmp_path / 'text')
    assert pretraining.write_text(str(tmp_path / 'text'), tmp_path / 'data') == sum(len(text.encode()) for text in texts)
    files = sorted((tmp_path / 'data').iterdir())
    assert len(files) == 64
    assert sorted(json.loads(line)['text'] for path in files for line in path.read_text().splitlines()) == sorted(texts)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / 'fake.py').write_text(FAKE)
    monkeypatch.setattr(pretraining, 'SCRIPT', tmp_path / 'fake.py')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    return tmp_path


def scale(folder, *arguments: str) -> list[dict]:
    assert pretraining.main(['scaling', f'--out={folder}', *arguments]) == 0
    path, = folder.glob('pretraining-scaling_*.json')
    return json.loads(path.read_text())['rows']


def test_runs_on_one_gpu_are_beside_each_other(fake, capsys):
    rows = scale(fake, '--models', 'kdn-tiny-diagonal', 'kda-tiny', '--gpus', '1')
    assert [row['model'] for row in rows] == ['kdn-tiny-diagonal', 'kda-tiny']
    assert {row['losses'][0] for row in rows} == {0, 1}
    assert all(row['tokens_per_second_per_gpu'] == 1e4 and row['memory_gib'] == 0.7 and row['mfu'] is None for row in rows)
    assert 'kda-tiny on 1: step 4, loss' in capsys.readouterr().out


def test_a_model_that_fails_and_gpus_that_are_not_there(fake, monkeypatch):
    rows = scale(fake, '--models', 'kdn-tiny-diagonal', '--gpus', '1', '3')
    assert 'losses' in rows[0] and rows[1]['error'] == 'the machine has 2 GPUs'
    monkeypatch.setenv('BROKEN', 'kda-tiny')
    assert pretraining.main(['scaling', f'--out={fake}', '--models', 'kda-tiny', '--gpus', '1']) == 1


def test_runs_stay_on_the_gpus_they_are_given(fake, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5,7')
    rows = scale(fake, '--models', 'kdn-tiny-diagonal', 'kda-tiny', '--gpus', '1')
    assert {row['losses'][0] for row in rows} == {5, 7}


def test_scaling_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    assert pretraining.main(['scaling', f'--out={tmp_path}']) == 2
    assert 'scaling needs a CUDA device, and PyTorch finds none.' in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_interrupted_benchmark_leaves_what_it_has(fake, monkeypatch):
    def interrupt(*args, pretrain=pretraining.pretrain):
        if args[0] == 'kda-tiny':
            while not list(fake.glob('*.json')):
                time.sleep(0.05)
            raise KeyboardInterrupt
        return pretrain(*args)

    monkeypatch.setattr(pretraining, 'pretrain', interrupt)
    with pytest.raises(KeyboardInterrupt):
        scale(fake, '--models', 'kdn-tiny-diagonal', 'kda-tiny', '--gpus', '1')
    path, = fake.glob('pretraining-scaling_*.json')
    assert [row['model'] for row in json.loads(path.read_text())['rows']] == ['kdn-tiny-diagonal']


def test_a_run_tells_why_it_failed(fake):
    """And not what torchrun says of it."""
    summary = 'E1130 torch/distributed/elastic/multiprocessing/api.py: failed\\n' + 30 * 'root cause\\n'
    fake.joinpath('fake.py').write_text(f"import sys; print('OutOfMemoryError: too large'); sys.exit('{summary}')")
    assert pretraining.main(['scaling', f'--out={fake}', '--models', 'kda-tiny', '--gpus', '1']) == 1
    path, = fake.glob('pretraining-scaling_*.json')
    row, = json.loads(path.read_text())['rows']
    assert row['error'].strip().splitlines()[-1] == 'OutOfMemoryError: too large'


def test_an_interruption_begins_no_other_run(fake):
    """A run that is at it ends by the same signal."""
    fake.joinpath('fake.py').write_text(
        "import os, pathlib, signal, time\n"
        f"pathlib.Path({str(fake)!r}, str(os.getpid())).touch()\n"
        "time.sleep(1)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
    )
    command = [sys.executable, '-c', (
        'import sys, torch; torch.cuda.device_count = lambda: 1\n'
        'from benchmarks.pretraining import __main__ as pretraining\n'
        f'pretraining.SCRIPT = {str(fake / "fake.py")!r}\n'
        f'pretraining.main(["scaling", "--out={fake}", "--models", "kda-tiny", "kdn-tiny-diagonal", "--gpus", "1"])\n'
    )]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert 'KeyboardInterrupt' in process.stderr
    assert len([path for path in fake.iterdir() if path.name.isdecimal()]) == 1


def test_resume(fake, monkeypatch, capsys):
    monkeypatch.setenv('BROKEN', 'kda-tiny')
    arguments = ['--models', 'kdn-tiny-diagonal', 'kda-tiny', '--gpus', '1']
    rows = scale(fake, *arguments)
    assert 'losses' in rows[0] and 'error' in rows[1]
    rows[0]['losses'] = [9.]
    path, = fake.glob('pretraining-scaling_*.json')
    path.write_text(json.dumps({**json.loads(path.read_text()), 'rows': rows}))
    # what has failed is tried again
    again = scale(fake, *arguments, '--resume')
    assert again[0] == rows[0] and 'error' in again[1]
    with pytest.raises(SystemExit):
        scale(fake, *arguments, '--resume', '--steps', '2')
    assert '--resume: ' in capsys.readouterr().err


def test_default_text():
    documents = pretraining.read_packages()
    assert sum(map(len, documents.values())) > 5e7
    assert any(name.endswith('transformers/trainer.py') and 'class Trainer' in text for name, text in documents.items())


@pytest.mark.skipif(os.name == 'nt', reason='needs fork')
def test_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretraining, 'SAMPLE_TOKENS', 60)
    make_texts(tmp_path / 'text')
    start = time.perf_counter()
    arguments = ['--model=kdn-tiny-isotropic', '--train-tokens=8192', '--seq-len=128', '--batch-tokens=2048', '--rows=4']
    assert pretraining.main(['run', *arguments, f'--text={tmp_path / "text"}', f'--out={tmp_path}']) == 0
    path, = tmp_path.glob('pretraining-run_*.json')
    content = json.loads(path.read_text())
    run = content['run']
    assert len(run['losses']) == len(run['tokens']) == 4 and run['tokens'][-1] == 8192
    assert run['losses'][-1] < run['losses'][0] and 0 < run['health']['kdn_write_strength'][0] < 1
    assert run['sample'].startswith(pretraining.PROMPT) and len(run['sample']) > len(pretraining.PROMPT) + 20
    assert path.with_suffix('.png').exists() and run['seconds'] < time.perf_counter() - start
    assert pretraining.PROMPT in capsys.readouterr().out
