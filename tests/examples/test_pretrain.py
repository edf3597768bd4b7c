# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Runs of `examples/pretrain.py`: on one process and on two, killed and taken up again, with a NaN, on a full disk.

One process imports the libraries and forks all runs, `python test_pretrain.py FOLDER`; the tests look at what they left.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
# where they are imported by name, as the script itself does
sys.path.insert(0, str(ROOT / 'examples'))

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 6
OPTIONS = {
    'model': 'kdn-swa-tiny-diagonal',
    'tokenizer': 'bytes',
    'seq_len': 128,
    'batch_tokens': 8 * 128,
    'per_device_train_batch_size': 2,
    'max_steps': STEPS,
    'logging_steps': 1,
    'save_steps': 2,
    'save_total_limit': 3,
    'learning_rate': 1e-2,
    'shuffle_block': 8,
    'dataloader_num_workers': 0,
    'disable_tqdm': True,
    'use_cpu': True,
}


def arguments(folder: Path, run: str, **options) -> list[str]:
    options = {**OPTIONS, 'data': folder / 'data', 'output_dir': folder / run, **options}
    return [x for name, value in options.items() for x in (f'--{name}', str(value))]


# ---- the runs


def write_data(folder: Path) -> None:
    """Documents of uneven length, some without text, in files of two sizes."""
    rng, folder = random.Random(0), folder / 'data'
    folder.mkdir()
    for file, count in enumerate((40, 30)):
        texts = [' '.join(rng.choices(['aa', 'bcd', 'efghi', '\n'], k=rng.choice([0, 3, 20, 100]))) for _ in range(count)]
        (folder / f'{file}.jsonl').write_text('\n'.join(json.dumps({'id': i, 'text': x}) for i, x in enumerate(texts)))


def allow_fsdp() -> None:
    """accelerate offers FSDP to accelerators: let it take the processes for some."""
    import pretrain
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    init = pretrain.PretrainingArguments.__post_init__

    def post_init(self):
        init(self)
        PartialState._shared_state['distributed_type'] = DistributedType.MULTI_XPU

    pretrain.PretrainingArguments.__post_init__ = post_init
    wrapped, save = [], pretrain.PretrainingTrainer._save_checkpoint

    def save_checkpoint(self, model, trial=None):
        wrapped.append(type(next(model.parameters())).__name__)
        assert wrapped[-1] == 'DTensor', wrapped
        save(self, model, trial)

    pretrain.PretrainingTrainer._save_checkpoint = save_checkpoint


def kill_while_saving() -> None:
    """When the weights of the second checkpoint are written, and what says where they are is not."""
    from torch.distributed.checkpoint import FileSystemWriter

    finish = FileSystemWriter.finish

    def finish_or_die(self, **kwargs):
        if 'checkpoint-4' in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, **kwargs)

    FileSystemWriter.finish = finish_or_die


def kill_before_renaming() -> None:
    """When the second checkpoint is written and has yet to get its name."""
    rename = Path.rename

    def rename_or_die(self, target):
        if self.name == 'partial-checkpoint-4':
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = rename_or_die


def fail_on_one_process() -> None:
    """The first save begins on one process, and not on the other."""
    from pretraining import trainer

    async_save, calls = trainer.dcp.async_save, []

    def save_or_fail(*args, **kwargs):
        calls.append(1)
        if os.environ['RANK'] == '1' and len(calls) == 1:
            raise RuntimeError('no memory for a copy')
        return async_save(*args, **kwargs)

    trainer.dcp.async_save = save_or_fail


def save_slowly() -> None:
    """A save, but for that at the end, waits until the step after the next begins."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    from pretraining import trainer

    pool, begun, steps = ThreadPoolExecutor(1), Event(), []
    async_save, training_step = trainer.dcp.async_save, trainer.PretrainingTrainer.training_step

    def slow_save(state, **kwargs):
        future = async_save(state, **kwargs)
        if steps[-1] == STEPS - 1:
            return future
        begun.clear()
        steps.clear()
        return pool.submit(lambda: (begun.wait(30) or os.abort(), future.result()))

    def step(self, *args):
        steps.append(self.state.global_step)
        if steps[-1] == steps[0] + 1:
            begun.set()
        return training_step(self, *args)

    trainer.dcp.async_save, trainer.PretrainingTrainer.training_step = slow_save, step


def lose_a_number() -> None:
    from pretraining.trainer import PretrainingTrainer

    compute = PretrainingTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return loss * float('nan') if self.state.global_step == 3 and self.args.process_index == 1 else loss

    PretrainingTrainer.compute_loss = compute_loss


def fill_the_disk() -> None:
    """No file larger than 100 kB in the first save, nor in the first attempt at the last one."""
    from pretraining import trainer

    begin, attempts = trainer.PretrainingTrainer._begin_save, []
    trainer.RETRY_SECONDS = 0
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin_within_limit(self, positions):
        attempts.append(self.state.global_step)
        is_full = attempts[-1] == 2 or attempts.count(STEPS) == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if is_full else limit, hard))
        begin(self, positions)

    trainer.PretrainingTrainer._begin_save = begin_within_limit


def start(argv: list[str], log: str, prepare: Callable[[], None] | None) -> int:
    import pretrain

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if prepare is not None:
        prepare()
    return pretrain.main(argv)


def fork(processes: int, argv: list[str], log: Path, prepare: Callable[[], None] | None = None) -> list[int]:
    """Exit codes of a run; several processes are started by what `torchrun` is made of."""
    if processes > 1:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=log.stem,
            rdzv_backend='c10d',
            rdzv_endpoint='localhost:0',
            start_method='fork',
            monitor_interval=0.1,
            max_restarts=0,
        )
        return list(elastic_launch(config, start)(argv, str(log), prepare).values())
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = start(argv, str(log), prepare)
        finally:
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def run_all(folder: Path) -> None:
    import pretrain  # noqa: F401
    from transformers import LlamaConfig

    write_data(folder)
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=264,
    ).save_pretrained(folder / 'llama')
    codes = {}

    def run(name: str, processes: int = 1, prepare: Callable[[], None] | None = None, **options) -> None:
        codes.setdefault(name, []).append(fork(processes, arguments(folder, name, **options), folder / f'{name}.log', prepare))

    def copy(source: str, target: str) -> None:
        shutil.copytree(folder / source / 'checkpoint-2', folder / target / 'checkpoint-2')

    run('one')
    run('ddp', 2, dataloader_num_workers=1, parallel='ddp')
    run('fsdp', 2, allow_fsdp, dataloader_num_workers=2)
    run('bf16', bf16=True, max_steps=2)
    run('bf16-ddp', 2, bf16=True, max_steps=2, parallel='ddp')
    run('bf16-fsdp', 2, allow_fsdp, bf16=True, max_steps=2)
    copy('fsdp', 'fsdp-to-one')
    run('fsdp-to-one', dataloader_num_workers=4)
    copy('fsdp', 'fsdp-to-ddp')
    run('fsdp-to-ddp', 2, parallel='ddp')
    copy('one', 'one-to-fsdp')
    run('one-to-fsdp', 2, allow_fsdp, gradient_checkpointing=True)
    run('killed', prepare=kill_while_saving)
    (folder / 'killed' / 'partial-checkpoint-4').rename(folder / 'found')
    shutil.copytree(folder / 'found', folder / 'killed' / 'partial-checkpoint-4')
    shutil.copytree(folder / 'found', folder / 'killed' / 'checkpoint-4')
    run('killed')
    run('renamed', prepare=kill_before_renaming)
    run('renamed')
    copy('one', 'other-steps')
    run('other-steps', save_steps=3)
    copy('one', 'other-rate')
    run('other-rate', learning_rate=1e-6, weight_decay=0)
    for _ in range(2):
        run('again', resume_from_checkpoint=folder / 'one' / 'checkpoint-4')
    run('failed-once', 2, fail_on_one_process, parallel='ddp')
    run('nan', 2, lose_a_number, parallel='ddp')
    run('full', prepare=fill_the_disk)
    run('slow', prepare=save_slowly)
    copy('slow', 'slow-to-one')
    run('slow-to-one')
    run('kda', model='kda-tiny', max_steps=2)
    run('isotropic', model='kdn-tiny-isotropic', max_steps=2, packing='concatenated')
    run('llama', model=folder / 'llama', max_steps=2, packing='concatenated')
    (folder / 'codes.json').write_text(json.dumps(codes))


# ---- what they left


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """Where all runs are, made by the first test process that gets here."""
    from filelock import FileLock

    base = tmp_path_factory.getbasetemp()
    base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
    folder = base / 'pretrain'
    with FileLock(f'{folder}.lock'):
        if not folder.exists():
            folder.mkdir()
            env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'TOKENIZERS_PARALLELISM': 'false'}
            with open(folder / 'all.log', 'w') as log:
                command = [sys.executable, __file__, str(folder)]
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
                try:
                    process.wait(timeout=200)
                finally:
                    # with what it forked
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
    assert (folder / 'codes.json').exists(), (folder / 'all.log').read_text()[-3000:]
    return folder


def history(run: Path, step: int = STEPS) -> list[dict]:
    state = json.loads((run / f'checkpoint-{step}' / 'trainer_state.json').read_text())
    return [entry for entry in state['log_history'] if 'loss' in entry]


def losses(run: Path, step: int = STEPS) -> list[float]:
    return [entry['loss'] for entry in history(run, step)]


def names(run: Path) -> list[str]:
    """What lies in the folder of a run, but for its lock."""
    return sorted(x.name for x in run.iterdir() if not x.name.startswith('.'))


def test_exit_codes(folder):
    codes = json.loads((folder / 'codes.json').read_text())
    assert codes.pop('killed') == codes.pop('renamed') == [[-signal.SIGKILL], [0]]
    assert codes.pop('nan') == [[1, 1]]
    for name, code in codes.items():
        assert not any(code[0]), (name, (folder / f'{name}.log').read_text()[-2000:])


def test_it_learns(folder):
    values = losses(folder / 'one')
    assert len(values) == STEPS and abs(values[0] - 5.58) < 0.1 and values[-1] < values[0] - 0.5, values
    assert len(set(values)) == STEPS


@pytest.mark.parametrize('run', ['ddp', 'fsdp'])
def test_two_processes_are_one(folder, run):
    """The same rows in each step, with any number of workers, and the same update."""
    for got, want in zip(history(folder / run), history(folder / 'one'), strict=True):
        assert got['loss'] == pytest.approx(want['loss'], rel=1e-6)
        assert got['grad_norm'] == pytest.approx(want['grad_norm'], rel=1e-5)


@pytest.mark.parametrize('run', ['bf16-ddp', 'bf16-fsdp'])
def test_bf16(folder, run):
    """Products are rounded to bf16, by FSDP as on one process, and weights are not."""
    got, want = history(folder / run, 2), history(folder / 'bf16', 2)
    assert got[0]['loss'] == pytest.approx(want[0]['loss'], rel=1e-6)
    assert got[0]['grad_norm'] == pytest.approx(want[0]['grad_norm'], rel=2e-3)
    assert got[1]['loss'] == pytest.approx(want[1]['loss'], rel=2e-3)
    of_ddp = history(folder / 'bf16-ddp', 2)[0]
    assert got[0]['kdn_write_strength'] == pytest.approx(of_ddp['kdn_write_strength'], rel=1e-4)
    assert got[0]['loss'] != pytest.approx(losses(folder / 'one')[0], rel=2e-6)


@pytest.mark.parametrize('run', ['fsdp-to-one', 'fsdp-to-ddp', 'one-to-fsdp'])
def test_another_kind_of_run_goes_on(folder, run):
    """On another number of processes, or with the weights whole."""
    assert f'going on from {folder / run / "checkpoint-2"}' in (folder / f'{run}.log').read_text()
    assert losses(folder / run) == pytest.approx(losses(folder / 'one'), rel=1e-6)


def test_going_back_needs_another_folder(folder, capsys):
    import pretrain

    options = arguments(folder, 'one', resume_from_checkpoint=folder / 'one' / 'checkpoint-4')
    assert pretrain.main(options) == 2
    assert f'{folder / "one"} has a later checkpoint, checkpoint-6, which would count' in capsys.readouterr().err


def test_a_killed_run_goes_on(folder):
    """Killed in the middle of its second save, of which nothing counts; from then on its losses are equal to the last bit."""
    assert (folder / 'found' / 'distcp').exists()
    log = (folder / 'killed.log').read_text()
    assert f'going on from {folder / "killed" / "checkpoint-2"}' in log
    assert f'{folder / "killed" / "checkpoint-4"} is not whole and is passed over' in log
    assert losses(folder / 'killed') == losses(folder / 'one')
    assert not list((folder / 'killed').glob('partial-*'))


def test_a_checkpoint_that_is_written_counts(folder):
    """The run was killed before it could give it its name."""
    assert f'going on from {folder / "renamed" / "checkpoint-4"}' in (folder / 'renamed.log').read_text()
    assert losses(folder / 'renamed') == losses(folder / 'one')
    assert names(folder / 'renamed') == ['checkpoint-2', 'checkpoint-4', 'checkpoint-6']


def test_rate_and_decay_are_the_commands(folder):
    """Those of the checkpoint would bring a run that has stopped for a NaN to it again."""
    rates = [entry['learning_rate'] for entry in history(folder / 'other-rate')]
    want = [entry['learning_rate'] for entry in history(folder / 'one')]
    assert rates[:2] == want[:2] and rates[2:] == pytest.approx([x * 1e-6 / OPTIONS['learning_rate'] for x in want[2:]])
    weights = folder / 'other-rate' / 'checkpoint-6' / 'distcp'
    names = dcp.FileSystemReader(weights).read_metadata().state_dict_metadata
    state = {name: 1. for name in names if name.endswith('.weight_decay')}
    dcp.load(state, checkpoint_id=weights)
    assert state and set(state.values()) == {0.}


def test_the_same_command_goes_on_from_the_newest_checkpoint(folder):
    """Also if it has named one of another run to begin with."""
    log = (folder / 'again.log').read_text()
    assert f'going on from {folder / "one" / "checkpoint-4"}' in log
    assert f'{folder / "again" / "checkpoint-6"} is the end of this run' in log


def test_tidy(folder, tmp_path):
    """What is written in part, or removed in part, is no checkpoint."""
    from pretraining.trainer import DISCARDED, PARTIAL, checkpoints, discard, tidy

    for name in ('checkpoint-2', f'{PARTIAL}checkpoint-2', f'{PARTIAL}checkpoint-4', f'{DISCARDED}checkpoint-6'):
        shutil.copytree(folder / 'one' / 'checkpoint-2', tmp_path / name)
    shutil.copytree(folder / 'found', tmp_path / f'{PARTIAL}checkpoint-8')
    tidy(tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ['checkpoint-2', 'checkpoint-4']
    discard(tmp_path / 'checkpoint-2')
    assert checkpoints(tmp_path) == list(tmp_path.iterdir()) == [tmp_path / 'checkpoint-4']


def test_how_often_to_save_is_the_commands(folder):
    """And not that of the checkpoint from which the run goes on."""
    saved = names(folder / 'other-steps')
    assert saved == ['checkpoint-2', 'checkpoint-3', f'checkpoint-{STEPS}']
    assert losses(folder / 'other-steps') == losses(folder / 'one')


def test_a_save_that_one_process_cannot_begin(folder):
    log = (folder / 'failed-once.log').read_text()
    assert log.count('checkpoint-2 could not be saved: RuntimeError: no memory for a copy\n') == 1
    assert names(folder / 'failed-once') == ['checkpoint-4', f'checkpoint-{STEPS}']
    assert losses(folder / 'failed-once') == pytest.approx(losses(folder / 'one'), rel=1e-6)


def test_training_goes_on_while_a_checkpoint_is_written(folder):
    """It would have been aborted else. And what is written is what there was before: a run from it has equal losses."""
    assert losses(folder / 'slow') == losses(folder / 'slow-to-one') == losses(folder / 'one')
    assert f'going on from {folder / "slow-to-one" / "checkpoint-2"}' in (folder / 'slow-to-one.log').read_text()


def test_a_nan_stops_the_run(folder):
    log = (folder / 'nan.log').read_text()
    assert log.count('pretrain.py: error: step 4: the norm of the gradient is nan') == 1
    assert f'is in {folder / "nan" / "nonfinite-4"}; the last checkpoint is {folder / "nan" / "checkpoint-2"}' in log
    assert names(folder / 'nan') == ['checkpoint-2', 'nonfinite-4']
    kept = [torch.load(folder / 'nan' / 'nonfinite-4' / f'process-{i}.pt')['micro_batches'] for i in range(2)]
    assert [[bool(x['loss'].isnan()) for x in part] for part in kept] == [[False, False], [True, True]]
    assert all(x['inputs']['input_ids'].shape == (1, 256) for part in kept for x in part)


def test_a_full_disk_loses_nothing(folder):
    """What cannot be saved is left out, training goes on, and the end of the run is tried until it is saved."""
    log = (folder / 'full.log').read_text()
    for name in ('checkpoint-2', f'checkpoint-{STEPS}'):
        assert log.count(f'{name} could not be saved: ') == 1
    assert 'Training goes on, to the next save.' in log and 'The next attempt is in 0 seconds.' in log
    assert log.count('could not be saved: OSError: [Errno 27] File too large') == 2
    assert log.count(f'Make room in {folder / "full"}') == 2
    assert names(folder / 'full') == ['checkpoint-4', f'checkpoint-{STEPS}']
    assert losses(folder / 'full') == losses(folder / 'one')


def test_log(folder):
    entry = history(folder / 'fsdp')[-1]
    assert entry['tokens'] == STEPS * OPTIONS['batch_tokens'] and entry['epoch'] == 1
    assert entry['tokens_per_second_per_gpu'] > 0 and entry['memory_gib'] > 0
    assert 0 < entry['kdn_write_strength'] < 1 and 0 <= entry['kdn_decay_floor_share'] <= 1
    assert 0 < entry['kdn_covariance_min'] < entry['kdn_covariance_max']
    # of the same rows, from weights in parts and from whole ones
    for got, want in zip(history(folder / 'fsdp'), history(folder / 'ddp'), strict=True):
        for name in ('kdn_write_strength', 'kdn_covariance_min', 'kdn_covariance_max', 'kdn_decay_floor_share'):
            assert got[name] == pytest.approx(want[name], rel=1e-4), name
    assert not any(name.startswith('kdn') for name in history(folder / 'kda', 2)[-1])
    for run in ('kda', 'isotropic', 'llama'):
        first, second = losses(folder / run, 2)
        assert abs(first - 5.58) < 0.1 and second != first, run


def test_export(folder, tmp_path):
    """Weights of a sharded checkpoint are those of one that is not, and the model loads by its name."""
    import pretrain
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import fla_kdn  # noqa: F401

    models = {}
    for run in ('one', 'fsdp'):
        assert pretrain.main(['export', str(folder / run / f'checkpoint-{STEPS}'), str(tmp_path / run)]) == 0
        models[run] = AutoModelForCausalLM.from_pretrained(tmp_path / run).eval()
    assert models['fsdp'].config.use_cache
    want = models['one'].state_dict()
    for name, x in models['fsdp'].state_dict().items():
        torch.testing.assert_close(x, want[name], rtol=1e-4, atol=1e-6)
    ids = AutoTokenizer.from_pretrained(tmp_path / 'fsdp')('bcd aa', return_tensors='pt').input_ids
    assert ids.shape == (1, 6) and models['fsdp'].generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 10)


def test_torchrun(folder, tmp_path):
    """The command itself, with the defaults of several processes."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', 'examples/pretrain.py']
    argv = arguments(folder, 'one', output_dir=tmp_path / 'run')
    result = subprocess.run([*command, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert losses(tmp_path / 'run') == pytest.approx(losses(folder / 'one'), rel=1e-6)


if __name__ == '__main__':
    run_all(Path(sys.argv[1]))
