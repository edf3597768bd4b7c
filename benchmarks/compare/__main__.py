# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

import fla_kdn
from benchmarks.common import find_commit, positive, reason_of, write_json
from benchmarks.compare.data import TEXTS, Text, read_documents
from benchmarks.compare.measure import MEMORY_LABELS, measure, sample
from benchmarks.compare.mixers import MIXERS, matched_config
from benchmarks.compare.progress import Progression, clock
from benchmarks.compare.report import write_report
from benchmarks.compare.runs import Plan, Run, load_finished, result_file, run_settings
from benchmarks.compare.settings import PRESETS
from benchmarks.compare.summary import describe_task, failure_lines, markdown, summarize, summarize_rates, tables
from benchmarks.compare.tasks import Language, with_each_rate
from benchmarks.compare.workers import Job, Warm, Workers, do_here, set_up_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.settings import Preset
    from benchmarks.compare.workers import Outcome, Watcher


def seed_list(value: str) -> list[int]:
    """`3` is 0, 1, 2; `3,7` is 3 and 7."""
    if ',' not in value:
        return list(range(positive(value)))
    seeds = [x.strip() for x in value.split(',') if x.strip()]
    if not seeds or not all(x.isdecimal() for x in seeds) or len(set(map(int, seeds))) < len(seeds):
        raise argparse.ArgumentTypeError(f'{value!r} is neither a number of seeds nor a list of different ones, such as 3,7')
    return [int(x) for x in seeds]


def seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'{value!r} is no number of seconds')
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.compare',
        description='Train one backbone with several mixers, on text and on synthetic tasks, and report how they compare.',
    )
    parser.add_argument('--preset', choices=PRESETS, help='sizes, mixers and tasks; default: gpu where there is one, else cpu')
    mixers = f"default: the preset's; {', '.join(MIXERS)}"
    parser.add_argument('--mixers', nargs='+', choices=MIXERS, metavar='MIXER', help=mixers)
    parser.add_argument('--tasks', nargs='+', metavar='TASK', help="default: the preset's; language, recall, ...")
    parser.add_argument('--steps', type=positive, help='training steps of all tasks')
    parser.add_argument('--seeds', type=seed_list, default=[0], help='how many, or which (3,7); results are mean and spread')
    every = 'learn each synthetic task with each of its learning rates and all seeds, not with the one that trains best'
    parser.add_argument('--every-rate', action='store_true', help=every)
    parser.add_argument('--seq-len', type=positive, help='bytes in a window of text')
    text = "what to learn; default: Python's documentation, on a GPU its library"
    parser.add_argument('--text', metavar='FILE-OR-FOLDER', help=text)
    parser.add_argument('--out', type=Path, default=Path('runs/compare'), help='folder for results; default: %(default)s')
    parser.add_argument('--resume', action='store_true', help='keep the runs that an interrupted job has finished')
    parser.add_argument('--workers', type=positive, metavar='N', help="processes that train at once; default: the preset's")
    deadline = 'begin no run later than that; with workers, end those that are at it'
    parser.add_argument('--deadline', type=seconds, default=math.inf, metavar='SECONDS', help=deadline)
    parser.add_argument('--no-speed', action='store_true', help='do not measure speed and memory, nor write a text')
    return parser


def make_preset(args: argparse.Namespace) -> Preset:
    """The preset with what the arguments override."""
    name = args.preset or ('gpu' if torch.cuda.is_available() else 'cpu')
    preset = PRESETS[name]
    if preset.device == 'cuda' and not torch.cuda.is_available():
        raise ValueError(f'--preset {name}: PyTorch finds no CUDA device')
    mixers = tuple(dict.fromkeys(args.mixers or preset.mixers))
    if preset.device == 'cpu' and (unfit := [mixer for mixer in mixers if MIXERS[mixer].needs_gpu]):
        raise ValueError(f'--mixers: {", ".join(unfit)} runs on a GPU only')
    tasks = dict.fromkeys(args.tasks or task_names(preset))
    if unknown := [task for task in tasks if task not in task_names(preset)]:
        raise ValueError(f'--tasks: {", ".join(unknown)} is not among {", ".join(task_names(preset))} of --preset {name}')

    def shorten(training):
        return replace(training, steps=args.steps) if args.steps else training

    synthetic = {task: replace(x, training=shorten(x.training)) for task, x in preset.tasks.items() if task in tasks}
    return replace(
        preset,
        mixers=mixers,
        language=shorten(preset.language) if 'language' in tasks else None,
        tasks=with_each_rate(synthetic) if args.every_rate else synthetic,
        seq_len=args.seq_len or preset.seq_len,
        workers=args.workers or preset.workers,
    )


def task_names(preset: Preset) -> list[str]:
    return [*(['language'] if preset.language else []), *preset.tasks]


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == 'cuda' else f'CPU ({platform.machine()})'


def find_versions() -> dict[str, str]:
    versions = {name: version(name) for name in ('torch', 'triton', 'transformers', 'flash-linear-attention')}
    return {'fla_kdn': fla_kdn.__version__, **versions, 'python': platform.python_version()}


def carry_out(job: Job, orders: list[Run | Warm], workers: int, deadline: float, watcher: Watcher) -> Iterator[Outcome]:
    """Outcomes of orders, as they come."""
    if workers == 1:
        yield from do_here(job, orders, deadline, watcher)
        return
    count = torch.cuda.device_count() if job.device.type == 'cuda' else 0
    devices = [torch.device('cuda', i) for i in range(count)] or [job.device]
    with Workers(job, min(workers, len(orders)), devices) as pool:
        yield from pool.do(orders, deadline, watcher)


def write_results(out: Path, content: dict) -> None:
    """All numbers, and their tables."""
    write_json(out / 'results.json', content)
    if content['mixers']:
        (out / 'results.md').write_text(markdown(content), encoding='utf-8')


def main(argv: list[str] | None = None) -> int:
    """Run the job; returns the exit code, which is 0 unless every mixer failed."""
    start, begun = time.perf_counter(), time.monotonic()
    parser = make_parser()
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    set_up_process()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        preset = make_preset(args)
        name, read = (args.text, lambda: read_documents(args.text)) if args.text else TEXTS[preset.text]
        text = Text(read(), name)
        text.check(preset.seq_len)
    except ValueError as error:
        parser.error(str(error))
    device, versions = torch.device(preset.device), find_versions()
    tasks = {'language': Language(text, preset.seq_len, preset.language)} if preset.language else {}
    tasks |= preset.tasks

    configs, parameters, failures = {}, {}, []

    def note(mixer: str, what: str, reason: str) -> None:
        failures.append({'mixer': mixer, 'what': what, 'reason': reason})

    for mixer in preset.mixers:
        try:
            configs[mixer], parameters[mixer] = matched_config(mixer, preset.backbone)
        except Exception as error:
            note(mixer, 'everything', reason_of(error))

    plan = Plan(configs, tasks, args.seeds)
    settings = {
        run: run_settings(run, preset, configs[run.mixer], tasks[run.task], versions, describe_device(device))
        for run in plan.possible()
    }
    if args.resume:
        try:
            for run, result in load_finished(args.out, settings).items():
                plan.end(run, result)
        except ValueError as error:
            parser.error(str(error))
        say(f'{len(plan.results)} runs are finished already')
    else:
        for run in settings:
            result_file(args.out, run).unlink(missing_ok=True)
    say(f'{describe_device(device)}; {text.name}: {len(text.train):,} bytes to train on, {len(text.validation):,} held out')
    say('parameters: ' + ', '.join(f'{mixer} {count:,}' for mixer, count in parameters.items()))

    def begin_order(order: Run | Warm) -> int:
        """All mixers on all tasks from the first seed, then from the second."""
        return -1 if isinstance(order, Warm) else args.seeds.index(order.seed)

    orders: list[Run | Warm] = sorted((run for about in plan.trials for run in plan.due(*about)), key=begin_order)
    # kernels are compiled once for each mixer, and not by every process
    if device.type == 'cuda' and preset.workers > 1:
        orders = [*map(Warm, dict.fromkeys(run.mixer for run in orders)), *orders]
    job = Job(configs, tasks, settings, preset.bf16, device, args.out)
    with Progression(console, [*orders, *plan.waiting()], tasks) as progression:
        for order, result, reason in carry_out(job, orders, preset.workers, begun + args.deadline, progression):
            if reason:
                note(order.mixer, order.what, reason)
            if isinstance(order, Warm):
                # what fails at its first steps is not tried again
                plan.over |= {run for run in settings if reason and run.mixer == order.mixer}
                continue
            orders += plan.end(order, result)
            orders.sort(key=begin_order)
    not_run: dict[str, list[str]] = {}
    for run in (*(run for about in plan.trials for run in plan.due(*about)), *plan.waiting()):
        not_run.setdefault(run.what, []).append(run.mixer)
    finished = {about: plan.finished(*about) for about in plan.trials}

    content = {
        'device': {'name': describe_device(device), 'type': device.type, 'threads': torch.get_num_threads()},
        'versions': versions,
        'commit': find_commit(),
        'command': shlex.join(['python', '-m', 'benchmarks.compare', *(sys.argv[1:] if argv is None else argv)]),
        'settings': {**asdict(preset), 'seeds': args.seeds, 'text': {'name': text.name, 'fingerprint': text.fingerprint}},
        'memory': MEMORY_LABELS[device.type],
        'tasks': {name: describe_task(task) for name, task in preset.tasks.items()},
        'mixers': {
            mixer: {
                'parameters': parameters[mixer],
                'intermediate_size': configs[mixer].intermediate_size,
                **summarize({run: result for task in tasks for run, result in finished[mixer, task].items()}),
                **summarize_rates({task: plan.by_rate(mixer, task) for task in tasks}),
            } for mixer in configs if any(finished[mixer, task] for task in tasks)
        },
        'failures': failures,
        'not_run': not_run,
    }
    write_results(args.out, content)

    written = {mixer: next(iter(found)) for (mixer, task), found in finished.items() if found and task == 'language'}
    folders = {mixer: run.model_folder(args.out) for mixer, run in written.items()}
    if folders and not args.no_speed:
        say('measuring speed and memory')
        measured, failed = measure(folders, preset, text, device)
        for mixer, numbers in measured.items():
            content['mixers'][mixer] |= numbers
        for mixer, error in failed.items():
            note(mixer, 'speed', reason_of(error))
        best = min(folders, key=lambda mixer: content['mixers'][mixer]['bits_per_byte']['mean'])
        try:
            content['sample'] = {'mixer': best, **sample(folders[best], preset, text, device)}
        except Exception as error:
            note(best, 'text', reason_of(error))
    content['seconds'] = time.perf_counter() - start
    write_results(args.out, content)
    if content['mixers']:
        for table in tables(content):
            console.print(table)
        write_report(args.out, content)
        say(f'report: {args.out / "report.html"}; tables: {args.out / "results.md"}; all numbers: {args.out / "results.json"}')
    for what, reason in failure_lines(content):
        say(f'{what}: {reason}')
    say(f'{clock(content["seconds"])} minutes')
    return int(not content['mixers'])


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit('interrupted; with --resume the job goes on from the runs that are finished')
