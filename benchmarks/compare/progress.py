# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What the job shows while it trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.compare.runs import training_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from benchmarks.compare.runs import Run
    from benchmarks.compare.settings import Preset

# seconds between lines where the output is no terminal
LINE_INTERVAL = 10


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f'{minutes}:{seconds:02d}'


class Progression:
    """Goes through runs and shows loss, tokens per second and time left: bars in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, runs: list[Run], preset: Preset):
        self.console = console
        self.runs = runs
        self.trainings = [training_of(preset, run.task) for run in runs]
        # tokens of all runs, and of those that are over
        self.total = sum(x.steps * x.tokens for x in self.trainings)
        self.over = 0
        self.bars = None
        if console.is_terminal:
            self.bars = Progress(
                TextColumn('{task.description}'), BarColumn(bar_width=20), TextColumn('{task.fields[status]}'),
                TimeRemainingColumn(),
                console=console, transient=True,
            )
            self.all_runs = self.bars.add_task('all runs', total=self.total, status='')

    def __enter__(self) -> Progression:
        self.start = time.perf_counter()
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bars:
            self.bars.stop()

    def __iter__(self) -> Iterator[Run]:
        for i, (run, training) in enumerate(zip(self.runs, self.trainings, strict=True), start=1):
            self.training, self.run_start, self.last_line = training, time.perf_counter(), time.perf_counter()
            self.label = f'{i}/{len(self.runs)} {run.mixer} {run.task} seed {run.seed}'
            if self.bars:
                self.bar = self.bars.add_task(self.label, total=training.steps, status='')
            yield run
            self.over += training.steps * training.tokens
            if self.bars:
                self.bars.remove_task(self.bar)
                self.bars.update(self.all_runs, completed=self.over)

    def update(self, step: int, tokens: int, loss: float) -> None:
        """Show where the present run is."""
        now, done, steps = time.perf_counter(), self.over + step * self.training.tokens, self.training.steps
        status = f'loss {loss:.3f}, {tokens / (now - self.run_start):,.0f} tokens/s'
        if self.bars:
            self.bars.update(self.bar, completed=step, status=status)
            self.bars.update(self.all_runs, completed=done)
        elif now - self.last_line >= LINE_INTERVAL or step == steps:
            self.last_line = now
            left = clock((now - self.start) * (self.total / done - 1))
            line = f'{self.label}: step {step}/{steps}, {status}, {left} left'
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
