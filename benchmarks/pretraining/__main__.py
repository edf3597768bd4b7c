# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import matplotlib
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import find_commit, load_rows, module_versions, result_path, write_json
from benchmarks.compare.data import read_documents, read_sources
from examples.pretraining.shapes import GIB, costs, make_config, meta_model
from fla_kdn.models.compat import fix_fla_generation

matplotlib.use('Agg')

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT = Path(__file__).parents[2] / 'examples' / 'pretrain.py'
# steps that compile and tune the kernels
WARMUP = 3
# over which the rate rises, as in a long run: at the full rate of a first step rounding soon parts the losses
RATE_WARMUP = 100
# the default of its --lanes
STREAMS = 64
PROMPT, SAMPLE_TOKENS = 'def __init__(self, ', 400


def make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command's parser, and that of each job."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.pretraining',
        description='`examples/pretrain.py` on this machine: `scaling` trains some steps on each number of GPUs, for speed, '
                    'memory and losses; `run` trains one model, loads its checkpoint and lets it write.',
    )
    jobs = parser.add_subparsers(dest='job', required=True)
    scaling = jobs.add_parser('scaling')
    scaling.add_argument('--models', nargs='+', default=['kdn-1.3b-diagonal', 'kdn-1.3b-isotropic', 'kda-1.3b'])
    scaling.add_argument('--gpus', nargs='+', type=int, default=[1, 2], help='default: 1 2; those the machine has')
    scaling.add_argument('--steps', type=int, default=12)
    scaling.add_argument('--resume', action='store_true', help='keep the numbers that an earlier run has written')
    run = jobs.add_parser('run')
    run.add_argument('--model', default='kdn-0.1b-diagonal')
    run.add_argument('--train-tokens', type=float, default=1e8)
    run.add_argument('--learning-rate', type=float, default=1e-3)
    # small models have small kernels, which need many tokens
    for job, batch_tokens, rows in ((scaling, 65536, 4), (run, 131072, 16)):
        job.add_argument('--seq-len', type=int, default=4096)
        job.add_argument('--batch-tokens', type=int, default=batch_tokens, help='of a step; default: %(default)s')
        job.add_argument('--rows', type=int, default=rows, help='of a micro-batch; default: %(default)s')
        job.add_argument('--text', metavar='FILE-OR-FOLDER',
                         help='what to learn, byte by byte; default: the sources of PyTorch and transformers')
        job.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder; default: %(default)s')
    return parser, {'scaling': scaling, 'run': run}


def read_packages() -> dict[str, str]:
    """The sources of PyTorch and transformers."""
    return {
        f'{package.__name__}/{name}': text
        for package in (torch, transformers) for name, text in read_sources(Path(package.__file__).parent).items()
    }


def write_text(text: str | None, folder: Path) -> int:
    """The documents as JSON lines, a file for each stream of `pretrain.py`; returns their bytes."""
    documents = [document for _, document in sorted((read_documents(text) if text else read_packages()).items())]
    folder.mkdir()
    for i in range(min(STREAMS, len(documents))):
        lines = [json.dumps({'text': document}) + '\n' for document in documents[i::STREAMS]]
        (folder / f'{i:02}.jsonl').write_text(''.join(lines))
    return sum(len(document.encode()) for document in documents)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get('CUDA_VISIBLE_DEVICES')
    return names.split(',') if names else list(map(str, range(torch.cuda.device_count())))


def parse_log(line: str) -> dict[str, float] | None:
    """The numbers of a step, if the line tells them."""
    found = re.search(r"\{'loss'.*\}", line)
    return {key: float(value) for key, value in ast.literal_eval(found[0]).items()} if found else None


def pretrain(
    model: str,
    args: argparse.Namespace,
    data: Path,
    folder: Path,
    devices: list[int],
    options: list[str],
    say: Callable[[str], None],
) -> list[dict[str, float]]:
    """Logs of the steps of a run on some of the visible GPUs, none for a CPU; if it fails, a `RuntimeError` with the end of
    its output."""
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={len(devices)}'] if len(devices) > 1 else []
    command = [
        sys.executable, *launcher, str(SCRIPT), f'--model={model}', f'--data={data}', '--tokenizer=bytes',
        f'--seq_len={args.seq_len}', f'--batch_tokens={args.batch_tokens}', f'--per_device_train_batch_size={args.rows}',
        f'--output_dir={folder}', '--logging_steps=1', '--disable_tqdm=true', '--report_to=none', *options,
    ]
    gpus = visible_gpus()
    environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': ','.join(gpus[i] for i in devices), 'PYTHONUNBUFFERED': '1'}
    environment.setdefault('OMP_NUM_THREADS', '4' if devices else '1')
    steps, tail, is_over = [], [], False
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        # torchrun tells at length that a process failed, after that process has told why
        is_over = is_over or 'torch/distributed/elastic' in line
        if step := parse_log(line):
            steps.append(step)
            if math.log2(len(steps)).is_integer() or len(steps) % 50 == 0:
                say(f'{model} on {max(1, len(devices))}: step {len(steps)}, loss {step["loss"]:.3f}, '
                    f'{step["tokens_per_second_per_gpu"]:,.0f} tokens/s each, {step["memory_gib"]:.1f} GiB')
        elif not is_over:
            tail = [*tail[-19:], line]
    if process.wait():
        raise RuntimeError(f'{shlex.join(command)} ended with {process.returncode}:\n{"".join(tail)}')
    return steps


def summarize(steps: list[dict[str, float]]) -> dict:
    """Losses of all steps; of those after the first, median speed, and memory."""
    timed = steps[WARMUP:] or steps[-1:]
    return {
        'losses': [step['loss'] for step in steps],
        'tokens_per_second_per_gpu': statistics.median(step['tokens_per_second_per_gpu'] for step in timed),
        'mfu': statistics.median(step['mfu'] for step in timed) if 'mfu' in timed[0] else None,
        'memory_gib': max(step['memory_gib'] for step in steps),
    }


def scale(
    args: argparse.Namespace,
    done: set[tuple[str, int]],
    data: Path,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[dict]:
    """A row for each model and number of GPUs that is not `done`. Runs on fewer GPUs than there are run beside each other, the
    first model first: its kernels are tuned then for those after it."""
    available = torch.cuda.device_count()

    def measure(model: str, devices: list[int]) -> dict:
        count = len(devices)
        estimate = costs(meta_model(make_config(model)), args.seq_len).memory(
            args.rows * args.seq_len, count, 'fsdp', False, args.batch_tokens > count * args.rows * args.seq_len) / GIB
        row = {'model': model, 'gpus': count, 'estimated_gib': estimate}
        options = [f'--max_steps={args.steps}', f'--warmup_steps={RATE_WARMUP}', '--save_strategy=no']
        try:
            row |= summarize(pretrain(model, args, data, folder / f'{model}-{count}', devices, options, say))
        except RuntimeError as error:
            row['error'] = str(error)
            say(row['error'])
        return row

    for count in args.gpus:
        models = [model for model in args.models if (model, count) not in done]
        groups: SimpleQueue[list[int]] = SimpleQueue()
        for start in range(0, available - count + 1, count):
            groups.put(list(range(start, start + count)))
        if groups.empty():
            yield from ({'model': model, 'gpus': count, 'error': f'the machine has {available} GPUs'} for model in models)
            continue

        def take_turn(model: str, groups: SimpleQueue = groups) -> dict:
            devices = groups.get()
            try:
                return measure(model, devices)
            finally:
                groups.put(devices)

        pool = ThreadPoolExecutor(groups.qsize())
        try:
            yield from (turn.result() for turn in as_completed([pool.submit(take_turn, model) for model in models]))
        finally:
            # those that wait do not begin if this was interrupted
            pool.shutdown(wait=False, cancel_futures=True)


def train_and_write(args: argparse.Namespace, data: Path, folder: Path, say: Callable[[str], None]) -> dict:
    """A whole run, and what its last checkpoint writes."""
    devices = [0] if torch.cuda.is_available() else []
    options = [f'--train_tokens={args.train_tokens}', f'--learning_rate={args.learning_rate}', '--save_total_limit=1']
    if devices:
        # a small model on a GPU reads faster than one process tokenizes
        options.append('--dataloader_num_workers=4')
    start = time.perf_counter()
    steps = pretrain(args.model, args, data, folder / 'run', devices, options, say)
    result = {**summarize(steps), 'tokens': [step['tokens'] for step in steps], 'seconds': time.perf_counter() - start}
    result['health'] = {name: [step[name] for step in steps] for name in steps[-1] if name.startswith('kdn_')}
    checkpoint = max((folder / 'run').glob('checkpoint-*'), key=lambda path: int(path.name.partition('-')[2]))
    subprocess.run([sys.executable, str(SCRIPT), 'export', str(checkpoint), str(folder / 'model')], check=True)
    device = 'cuda' if devices else 'cpu'
    fix_fla_generation()
    model = AutoModelForCausalLM.from_pretrained(folder / 'model').to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / 'model')
    inputs = tokenizer(PROMPT, return_tensors='pt', add_special_tokens=False).to(device)
    torch.manual_seed(0)
    with torch.autocast(device, torch.bfloat16, enabled=bool(devices)):
        tokens = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=True, temperature=0.7, top_k=40)
    return {**result, 'sample': tokenizer.decode(tokens[0], skip_special_tokens=True)}


def write_curve(path: Path, content: dict) -> None:
    """Loss by tokens, each step and the mean of 20."""
    run = content['run']
    losses = torch.tensor(run['losses'])
    figure, ax = plt.subplots(figsize=(8, 4), layout='constrained')
    tokens = [x / 1e6 for x in run['tokens']]
    ax.plot(tokens, losses, color='#1f5fbf', lw=0.6, alpha=0.4)
    width = min(20, len(losses))
    ax.plot(tokens[width - 1:], losses.unfold(0, width, 1).mean(1), color='#1f5fbf', lw=1.8)
    ax.set_xlabel('million tokens (bytes)')
    ax.set_ylabel('loss, nats per byte')
    # the first steps would press the rest against the axis
    ax.set_yscale('log')
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter('{x:g}')
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title(f'{content["settings"]["model"]} on {content["card"]}, {run["seconds"] / 60:.1f} minutes', loc='left')
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(color='#d0d7de', lw=0.6)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 if nothing was trained, 2 without a GPU that is needed."""
    start = time.perf_counter()
    parser, jobs = make_parsers()
    args = parser.parse_args(argv)
    console = Console()

    def say(line: str) -> None:
        console.print(f'{time.perf_counter() - start:4.0f} s: {line}', markup=False, highlight=False, soft_wrap=True)

    if args.job == 'scaling' and torch.cuda.device_count() == 0:
        say('scaling needs a CUDA device, and PyTorch finds none.')
        return 2
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
    path = result_path(args.out, f'pretraining-{args.job}', card)
    with TemporaryDirectory() as folder:
        data = Path(folder, 'text')
        content = {
            'card': card,
            'versions': module_versions('fla_kdn', 'torch', 'triton', 'fla', 'transformers'),
            'commit': find_commit(),
            'settings': {key: value for key, value in vars(args).items() if key not in ('out', 'job', 'resume')},
            'text_bytes': write_text(args.text, data),
        }
        say(f'{card}; {content["text_bytes"]:,} bytes of text')
        if args.job == 'scaling':
            content['rows'] = []
            if args.resume:
                try:
                    same = ('versions', 'commit', 'settings', 'text_bytes')
                    content['rows'] = load_rows(path, content, same, measured='losses')
                except ValueError as error:
                    jobs['scaling'].error(str(error))
                say(f'{len(content["rows"])} rows are measured already')
            done = {(row['model'], row['gpus']) for row in content['rows']}
            for row in scale(args, done, data, Path(folder), say):
                content['rows'].append(row)
                content['rows'].sort(key=lambda row: (args.gpus.index(row['gpus']), args.models.index(row['model'])))
                content['seconds'] = time.perf_counter() - start
                # after each, so that an interrupted benchmark leaves what it has
                write_json(path, content)
            trained = any('losses' in row for row in content['rows'])
        else:
            content['run'] = train_and_write(args, data, Path(folder), say)
            trained = True
    content['seconds'] = time.perf_counter() - start
    write_json(path, content)
    if args.job == 'run':
        write_curve(path.with_suffix('.png'), content)
        say(content['run']['sample'])
    say(str(path))
    return int(not trained)


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit('interrupted; scaling goes on with --resume')
