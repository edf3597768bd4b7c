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
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from benchmarks.common import find_commit, load_rows, module_versions, result_path, write_json
from benchmarks.throughput.measure import METHOD, count_parameters, measure_group, warm
from benchmarks.throughput.plan import PLANS
from benchmarks.throughput.report import group_table, write_plots

# what tells one row from another
KEYS = ('kind', 'size', 'mixer', 'batch', 'tokens')


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.throughput',
        description='Time training and decoding of whole models and of mixers alone, over lengths of 2K to 32K tokens: KDN '
                    'beside KDA, GDN-2 and softmax attention. On a CPU at tiny sizes, which only shows that everything runs.',
    )
    parser.add_argument('--device', choices=PLANS, help='default: cuda where there is one')
    parser.add_argument('--warm', type=int, metavar='N', help='first compile the mixers in N processes')
    parser.add_argument('--deadline', type=float, metavar='SECONDS', help='begin with nothing new so long after the start')
    parser.add_argument('--resume', action='store_true', help='keep the numbers that an earlier run has written')
    parser.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder; default: %(default)s')
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 if nothing could be timed."""
    start = time.perf_counter()
    parser = make_parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    if device.type == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: PyTorch finds no CUDA device')
    if args.warm and device.type != 'cuda':
        parser.error('--warm: only kernels for a CUDA device are compiled')
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings('ignore', category=FutureWarning)
    torch.manual_seed(0)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def why_stop() -> str | None:
        late = args.deadline is not None and time.perf_counter() - start >= args.deadline
        return f'the deadline of {args.deadline:g} s had passed' if late else None

    plan = PLANS[device.type]
    card = torch.cuda.get_device_name() if device.type == 'cuda' else f'CPU {platform.machine()}'
    path = result_path(args.out, 'throughput', card)
    content = {
        'card': card,
        'versions': module_versions('fla_kdn', 'torch', 'triton', 'fla', 'transformers'),
        'commit': find_commit(),
        'settings': {key: value for key, value in vars(args).items() if key != 'out'},
        'method': METHOD,
        'parameters': {size: count_parameters(size) for size in dict.fromkeys(group.size for group in plan.groups)},
        'rows': [],
    }
    if args.resume:
        try:
            content['rows'] = load_rows(path, content, same=('versions', 'commit', 'method'), measured='ms')
        except ValueError as error:
            parser.error(str(error))
    done = {tuple(row[key] for key in KEYS) for row in content['rows']}
    total = sum(len(group.mixers) * len(group.cells) for group in plan.groups)
    say(f'{card}; ' + ', '.join(f'{name} {version}' for name, version in content['versions'].items()))
    say(f'{len(done)} of {total} rows are measured already' if done else f'{total} rows')
    if args.warm:
        content['warm'] = {}
        for name, result in warm(plan, args.warm, device):
            content['warm'][name] = result
            say(f'{name}: ' + (result if isinstance(result, str) else f'compiled in {result:.1f} s, beside others'))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task('rows', total=total, completed=len(done))
        for group in plan.groups:
            for rows in measure_group(group, plan, device, lambda row: tuple(row[key] for key in KEYS) not in done, why_stop):
                content['rows'] += rows
                content['seconds'] = time.perf_counter() - start
                # after each cell, so that an interrupted run leaves what it has
                write_json(path, content)
                progress.advance(bar, len(rows))
                if any('not_run' not in row for row in rows):
                    console.print(group_table(rows))
                for row in rows:
                    if 'error' in row:
                        say(f'{row["mixer"]}: {row["error"]}')
    write_json(path, content)
    write_plots(path, content)
    measured = sum('ms' in row for row in content['rows'])
    say(f'{path}: {measured} of {total} rows; {time.perf_counter() - start:.0f} s')
    return int(measured == 0)


if __name__ == '__main__':
    sys.exit(main())
