# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shared by the benchmarks: what a result is told with, how it is written, and kernels compiled in other processes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f'{value!r} is no positive number')
    return int(value)


def nbytes(*states: object) -> int:
    """Bytes of all tensors in nested containers."""
    return sum(x.nbytes for x in tree_leaves(states) if isinstance(x, torch.Tensor))


def reason_of(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'


def find_commit() -> str | None:
    """The commit that is checked out, marked if code differs from it, results aside; `None` outside a repository."""
    def git(*words: str) -> str:
        root = Path(__file__).parents[1]
        return subprocess.run(['git', *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git('status', '--porcelain', '--untracked-files=no', '--', '.', ':!benchmarks/results', ':!README.md')
        return git('rev-parse', 'HEAD') + ('-dirty' if changed else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def module_versions(*names: str) -> dict[str, str]:
    return {name: import_module(name).__version__ for name in names}


def result_path(folder: Path, job: str, card: str) -> Path:
    """Where the results of a job on a card are kept."""
    return folder / f'{job}_{re.sub("[^A-Za-z0-9]+", "-", card).strip("-")}.json'


def write_json(path: Path, content: dict) -> None:
    """Write all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix('.tmp')
    temporary.write_text(json.dumps(content, indent=1) + '\n')
    os.replace(temporary, path)


def load_rows(path: Path, content: dict, same: Iterable[str], measured: str) -> list[dict]:
    """Rows with a value of `measured` that are in a file; raises if they were made with another value of one of `same`."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    for key in same:
        if stored[key] != content[key]:
            raise ValueError(f'--resume: {path} has the {key} {stored[key]}, and now it is {content[key]}')
    return [row for row in stored['rows'] if measured in row]


def reject_beside_others(rows: Iterable[dict], device: torch.device) -> None:
    """Give an error to rows that were timed while other processes were on the GPU, as far as `nvidia-smi` tells."""
    if device.type != 'cuda':
        return
    gpu = f'--id=GPU-{torch.cuda.get_device_properties(device).uuid}'
    command = ['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader', gpu]
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return
    # in a container the numbers may be others than those inside; one is this process's
    others = sum(line.strip().isdecimal() for line in lines) - 1
    if others > 0:
        for row in rows:
            row.setdefault('error', f'not timed alone: {others} other processes were on the GPU')


def compile_in_processes(
    compile_one: Callable[..., float | str],
    tasks: dict[str, tuple],
    workers: int,
) -> Iterator[tuple[str, float | str]]:
    """Call `compile_one` with the arguments of each task in `workers` processes: name, and seconds or why it failed.

    Compiled kernels are kept; what was tuned is not, as the processes contend for the device.
    """
    before = dict(os.environ)
    os.environ['FLA_CACHE_RESULTS'] = '0'
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context('spawn')) as pool:
            futures = {pool.submit(compile_one, *arguments): name for name, arguments in tasks.items()}
            for future in as_completed(futures):
                # a worker that died
                error = future.exception()
                yield futures[future], reason_of(error) if error else future.result()
    finally:
        os.environ.pop('FLA_CACHE_RESULTS')
        os.environ.update(before)
