# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import find_commit, module_versions, result_path, write_json
from benchmarks.ops.measure import measure_ceilings, measure_group, profile_op, warm
from benchmarks.ops.registry import MODES, OPS
from benchmarks.ops.report import group_table, kernel_table, write_plot

SHAPES = [(16, 2048), (8, 4096), (2, 16384), (1, 32768)]
DECODE_SHAPES = [(1, 1), (16, 1), (128, 1)]
GAIN_SHAPES = [(8, 4096)]


def batch_and_tokens(value: str) -> tuple[int, int]:
    B, T = map(int, value.split('x'))
    return B, T


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.ops',
        description="Time KDN's ops beside FLA's: chunked, decoding (a layer's token), and the gain stage alone. What a layer "
                    'computes outside of the op is not timed. Floors: the least time to move the bytes and to compute the '
                    'FLOPs. Cold: the first calls, with kernels that earlier ops share compiled already.',
    )
    parser.add_argument('--shapes', nargs='+', type=batch_and_tokens, default=SHAPES, metavar='BxT',
                        help=f'of the chunked ops; default: {" ".join(f"{B}x{T}" for B, T in SHAPES)}')
    parser.add_argument('--heads', type=int, default=16)
    parser.add_argument('--dim', type=int, default=128, help='of keys and values; default: %(default)s')
    parser.add_argument('--ops', nargs='+', choices=OPS, default=list(OPS), metavar='OP', help='see --list; default: all')
    parser.add_argument('--modes', nargs='+', choices=MODES['chunk'], default=list(MODES['chunk']), help='of the chunked ops')
    parser.add_argument('--rep', type=int, default=200, help='milliseconds of calls for each row; default: %(default)s')
    parser.add_argument('--bandwidth', type=float, default=4.3, help='TB/s of the floors; default: %(default)s')
    parser.add_argument('--tflops', type=float, default=790., help='TFLOP/s (bf16) of the floors; default: %(default)s')
    parser.add_argument('--warm', type=int, metavar='N', help='first compile the ops in N processes')
    parser.add_argument('--profile', choices=OPS, metavar='OP', help='only show the kernels of one op, at its first shape')
    parser.add_argument('--out', type=Path, default=Path('benchmarks/results'), help='folder; default: %(default)s')
    parser.add_argument('--list', action='store_true', help='list the ops')
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 if nothing could be timed, 2 without a CUDA device."""
    args = make_parser().parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if args.list:
        for op in OPS.values():
            say(f'{op.name:30} {op.import_path}.{op.func_name or op.name} {op.extra_kwargs or ""}')
        return 0
    if not torch.cuda.is_available():
        say('benchmarks.ops needs a CUDA device, and PyTorch finds none.')
        return 2

    modes = {**MODES, 'chunk': tuple(mode for mode in MODES['chunk'] if mode in args.modes)}
    shapes = {'chunk': args.shapes, 'decode': DECODE_SHAPES, 'gain': GAIN_SHAPES}
    shapes = {kind: [(B, T, args.heads, args.dim) for B, T in found] for kind, found in shapes.items()}
    if args.profile:
        op = OPS[args.profile]
        shape, mode = shapes[op.kind][0], modes[op.kind][-1]
        console.print(kernel_table(profile_op(op, shape, mode), f'{op.name} {mode} {shape[0]} x {shape[1]}'))
        return 0

    start = time.perf_counter()
    ops = [OPS[name] for name in dict.fromkeys(args.ops)]
    measured = measure_ceilings()
    card = torch.cuda.get_device_name()
    content = {
        'card': card,
        'versions': module_versions('fla_kdn', 'torch', 'triton', 'fla'),
        'commit': find_commit(),
        'settings': {key: value for key, value in vars(args).items() if key not in ('out', 'list', 'profile')},
        'measured_ceilings': measured,
        'rows': [],
    }
    say(f'{card}; ' + ', '.join(f'{name} {version}' for name, version in content['versions'].items()))
    say(f'copy {measured["bandwidth"]:.2f} TB/s, matmul {measured["tflops"]:.0f} TFLOP/s; '
        f'floors at {args.bandwidth:g} TB/s and {args.tflops:g} TFLOP/s')
    if args.warm:
        tasks = [(op.name, shapes[op.kind], modes[op.kind]) for op in ops]
        content['warm'] = {}
        for name, result in warm(tasks, args.warm):
            content['warm'][name] = result
            say(f'{name}: ' + (result if isinstance(result, str) else f'compiled in {result:.1f} s, beside others'))

    path = result_path(args.out, 'ops', card)
    for kind, kind_shapes in shapes.items():
        group_ops = [op for op in ops if op.kind == kind]
        for shape in kind_shapes if group_ops else []:
            ceilings = {'bandwidth': args.bandwidth, 'tflops': args.tflops}
            for rows in measure_group(group_ops, shape, modes[kind], args.rep, ceilings, say):
                console.print(group_table(rows))
                for row in rows:
                    if 'error' in row:
                        say(f'{row["op"]} {row["mode"]}: {row["error"]}')
                content['rows'] += rows
                content['seconds'] = time.perf_counter() - start
                # after each group, so that an interrupted run leaves what it has
                write_json(path, content)
        write_plot(path.with_suffix('.png'), content)
    say(f'{path}, {path.with_suffix(".png")}; {content["seconds"]:.0f} s')
    return int(not any('ms' in row for row in content['rows']))


if __name__ == '__main__':
    sys.exit(main())
