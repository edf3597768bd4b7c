# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import argparse
import platform
import sys
import time
import warnings
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from rich.console import Console

import fla_kdn
from benchmarks.compare.data import Text, read_documents
from benchmarks.compare.measure import MEMORY_LABELS, measure, sample
from benchmarks.compare.mixers import MIXERS, matched_config
from benchmarks.compare.progress import Progression, clock
from benchmarks.compare.report import summarize, table, write_report
from benchmarks.compare.runs import TASKS, Run, load_finished, result_file, run_settings, training_of, write_json
from benchmarks.compare.settings import PRESETS
from benchmarks.compare.train import train
from fla_kdn.models.compat import fix_fla_generation

if TYPE_CHECKING:
    from benchmarks.compare.settings import Preset


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f'{value!r} is no positive number')
    return int(value)


def seed_list(value: str) -> list[int]:
    """`3` is 0, 1, 2; `3,7` is 3 and 7."""
    if ',' not in value:
        return list(range(positive(value)))
    seeds = [x.strip() for x in value.split(',') if x.strip()]
    if not seeds or not all(x.isdecimal() for x in seeds) or len(set(map(int, seeds))) < len(seeds):
        raise argparse.ArgumentTypeError(f'{value!r} is neither a number of seeds nor a list of different ones, such as 3,7')
    return [int(x) for x in seeds]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.compare',
        description='Train one backbone with several mixers, on text and on key-value recall, and report how they compare.',
    )
    parser.add_argument('--mixers', nargs='+', choices=MIXERS, default=list(MIXERS), metavar='MIXER', help=', '.join(MIXERS))
    parser.add_argument('--preset', choices=PRESETS, help='sizes; default: gpu where there is one, else cpu')
    parser.add_argument('--steps', type=positive, help='training steps of both tasks')
    parser.add_argument('--seeds', type=seed_list, default=[0], help='how many, or which (3,7); results are mean and spread')
    parser.add_argument('--seq-len', type=positive, help='bytes in a window of text')
    parser.add_argument('--text', metavar='FILE-OR-FOLDER', help='what to learn; default: the documentation inside Python')
    parser.add_argument('--out', type=Path, default=Path('runs/compare'), help='folder for results; default: %(default)s')
    parser.add_argument('--resume', action='store_true', help='keep the runs that an interrupted job has finished')
    return parser


def make_preset(args: argparse.Namespace) -> Preset:
    """The preset with what the arguments override."""
    name = args.preset or ('gpu' if torch.cuda.is_available() else 'cpu')
    preset = PRESETS[name]
    if preset.device == 'cuda' and not torch.cuda.is_available():
        raise ValueError(f'--preset {name}: PyTorch finds no CUDA device')
    if args.steps:
        preset = replace(preset, **{task: replace(training_of(preset, task), steps=args.steps) for task in TASKS})
    return replace(preset, seq_len=args.seq_len) if args.seq_len else preset


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == 'cuda' else f'CPU ({platform.machine()})'


def find_versions() -> dict[str, str]:
    versions = {name: version(name) for name in ('torch', 'triton', 'transformers', 'flash-linear-attention')}
    return {'fla_kdn': fla_kdn.__version__, **versions, 'python': platform.python_version()}


def reason_of(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'


def main(argv: list[str] | None = None) -> int:
    """Run the job; returns the exit code, which is 0 unless every mixer failed."""
    start = time.perf_counter()
    parser = make_parser()
    args = parser.parse_args(argv)
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings('ignore', category=FutureWarning)
    fix_fla_generation()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        preset = make_preset(args)
        text = Text(read_documents(args.text), args.text or "Python's documentation")
        text.check(preset.seq_len)
    except ValueError as error:
        parser.error(str(error))
    device, versions = torch.device(preset.device), find_versions()

    configs, parameters, failures = {}, {}, {}
    for mixer in dict.fromkeys(args.mixers):
        try:
            configs[mixer], parameters[mixer] = matched_config(mixer, preset.backbone)
        except Exception as error:
            failures[mixer] = reason_of(error)

    runs = [Run(mixer, task, seed) for seed in args.seeds for task in TASKS for mixer in configs]
    settings = {run: run_settings(run, preset, configs[run.mixer], text, versions, describe_device(device)) for run in runs}
    results: dict[Run, dict] = {}
    if args.resume:
        try:
            results = load_finished(args.out, settings)
        except ValueError as error:
            parser.error(str(error))
        say(f'{len(results)} of {len(runs)} runs are finished already')
    else:
        for run in runs:
            result_file(args.out, run).unlink(missing_ok=True)
    say(f'{describe_device(device)}; {text.name}: {len(text.train):,} bytes to train on, {len(text.validation):,} held out')
    say('parameters: ' + ', '.join(f'{mixer} {count:,}' for mixer, count in parameters.items()))

    with Progression(console, [run for run in runs if run not in results], preset) as progression:
        for run in progression:
            if run.mixer in failures:
                continue
            try:
                results[run] = train(run, preset, configs[run.mixer], text, device, args.out, progression.update)
                write_json(result_file(args.out, run), {'settings': settings[run], 'result': results[run]})
            except Exception as error:
                failures[run.mixer] = f'{run.task}: {reason_of(error)}'
                say(f'{run.mixer} failed: {failures[run.mixer]}')

    say('measuring speed and memory')
    seed = args.seeds[0]
    trained = [Run(mixer, 'language', seed) for mixer in configs]
    folders = {run.mixer: run.model_folder(args.out) for run in trained if run in results}
    measured, failed = measure(folders, preset, text, device)
    for mixer, error in failed.items():
        failures.setdefault(mixer, f'measuring: {reason_of(error)}')
    content = {
        'device': {'name': describe_device(device), 'type': device.type, 'threads': torch.get_num_threads()},
        'versions': versions,
        'settings': {'seeds': args.seeds, 'text': {'name': text.name, 'fingerprint': text.fingerprint}, **asdict(preset)},
        'memory': MEMORY_LABELS[device.type],
        'mixers': {
            mixer: {
                'parameters': parameters[mixer],
                'intermediate_size': configs[mixer].intermediate_size,
                **measured.get(mixer, {}),
                **summarize({run: result for run, result in results.items() if run.mixer == mixer}),
            } for mixer in configs if any(run.mixer == mixer for run in results)
        },
        'failures': failures,
    }
    if folders:
        best = min(folders, key=lambda mixer: content['mixers'][mixer]['bits_per_byte']['mean'])
        try:
            content['sample'] = {'mixer': best, **sample(folders[best], preset, text, device)}
        except Exception as error:
            failures.setdefault(best, f'generate: {reason_of(error)}')
    content['seconds'] = time.perf_counter() - start
    write_json(args.out / 'results.json', content)
    if content['mixers']:
        write_report(args.out, content)
        console.print(table(content))
        say(f'report: {args.out / "report.html"}, all numbers: {args.out / "results.json"}')
    for mixer, reason in failures.items():
        say(f'{mixer} could not be compared in full: {reason}')
    say(f'{clock(content["seconds"])} minutes')
    return int(failures.keys() >= set(args.mixers))


if __name__ == '__main__':
    # models of the CPU preset gain little from a second thread, and lose much where the cores have other work
    torch.set_num_threads(1)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit('interrupted; with --resume the job goes on from the runs that are finished')
