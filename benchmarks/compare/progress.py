# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What the job shows while it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.compare.workers import Warm, Watcher

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from benchmarks.compare.runs import Run
    from benchmarks.compare.tasks import Language, Synthetic
    from benchmarks.compare.workers import Outcome

# seconds between lines where the output is no terminal
LINE_INTERVAL = 10


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f'{minutes}:{seconds:02d}'


@dataclass
class Active:
    """An order that is being carried out."""
    label: str
    start: float
    bar: TaskID | None
    tokens: int = 0
    status: str = ''


class Progression(Watcher):
    """Shows loss, tokens per second and time left: bars in a terminal, lines elsewhere."""

    def __init__(self, console: Console, orders: list[Run | Warm], tasks: dict[str, Language | Synthetic]):
        self.console, self.tasks = console, tasks
        # orders that will be, are begun and are over
        self.count, self.begun, self.ended = len(orders), 0, 0
        # tokens of all runs, and of those that are over
        self.total = sum(map(self.tokens_of, orders))
        self.over = 0
        self.active: dict[Run | Warm, Active] = {}
        self.bars = None
        if console.is_terminal:
            self.bars = Progress(
                TextColumn('{task.description}'), BarColumn(bar_width=20), TextColumn('{task.fields[status]}'),
                TimeRemainingColumn(),
                console=console, transient=True,
            )
            self.all_runs = self.bars.add_task('all runs', total=self.total, status='')

    def __enter__(self) -> Progression:
        self.start = self.last_line = time.perf_counter()
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bars:
            self.bars.stop()

    def begin(self, order: Run | Warm) -> None:
        self.begun += 1
        label = f'{self.begun}/{self.count} {order.name}'
        steps = None if isinstance(order, Warm) else self.tasks[order.task].training.steps
        bar = self.bars.add_task(label, total=steps, status='') if self.bars else None
        self.active[order] = Active(label, time.perf_counter(), bar)

    def update(self, order: Run | Warm, step: int, tokens: int, loss: float) -> None:
        now, active, training = time.perf_counter(), self.active[order], self.tasks[order.task].training
        active.tokens = step * training.tokens
        active.status = f'loss {loss:.3f}, {tokens / (now - active.start):,.0f} tokens/s'
        done = self.over + sum(x.tokens for x in self.active.values())
        if self.bars:
            self.bars.update(active.bar, completed=step, status=active.status)
            self.bars.update(self.all_runs, completed=done)
        elif now - self.last_line >= LINE_INTERVAL:
            self.last_line = now
            left = clock((now - self.start) * (self.total / done - 1))
            others = f'{len(self.active) - 1} others at work, ' if len(self.active) > 1 else ''
            self.say(f'{active.label}: step {step}/{training.steps}, {active.status}, {others}{left} left')

    def end(self, outcome: Outcome) -> None:
        order = outcome.order
        active = self.active.pop(order)
        self.ended += 1
        self.over += self.tokens_of(order)
        seconds = time.perf_counter() - active.start
        if self.bars:
            self.bars.remove_task(active.bar)
            self.bars.update(self.all_runs, completed=self.over)
        if outcome.reason:
            self.say(f'{active.label} failed, {self.ended} of {self.count} over: {outcome.reason}')
        elif not self.bars:
            status = f'{active.status}, ' if active.status else ''
            self.say(f'{active.label}: {status}done in {seconds:.0f} s, {self.ended} of {self.count} over')

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tokens_of(self, order: Run | Warm) -> int:
        if isinstance(order, Warm):
            return 0
        training = self.tasks[order.task].training
        return training.steps * training.tokens
