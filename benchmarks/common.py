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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f'{value!r} is no positive number')
    return int(value)


def reason_of(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'


def find_commit() -> str | None:
    """The commit that is checked out, marked if files differ from it; `None` outside a repository."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


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
