# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Where runs are trained: one after another in this process, or several at once in others."""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, NamedTuple

import torch
import transformers
from triton.runtime.autotuner import Autotuner

from benchmarks.common import reason_of, write_json
from benchmarks.compare.runs import Run, result_file
from benchmarks.compare.train import train, warm_up
from fla_kdn.models.compat import fix_fla_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from transformers import PreTrainedConfig

    from benchmarks.compare.tasks import Language, Synthetic

# seconds that processes have to go
EXIT_TIME = 5


class Warm(NamedTuple):
    """Compile the kernels of a mixer."""
    mixer: str

    @property
    def name(self) -> str:
        return f'{self.mixer}, first steps'

    @property
    def what(self) -> str:
        return 'everything'


class Outcome(NamedTuple):
    """How a run or a warm-up ended: with a result, or with the reason why there is none."""
    order: Run | Warm
    result: dict | None
    reason: str | None


def set_up_process() -> None:
    """What every process of the job needs, before it makes models."""
    # models of the CPU preset gain little from a second thread, and lose much where the cores have other work
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # FLA's Mamba-2 says in every process, for every layer, which kernels it lacks
    logging.getLogger('fla').setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings('ignore', category=FutureWarning)
    fix_fla_generation()


def leave_kernels_untuned() -> None:
    """From now on this process runs each kernel in the first of its configurations that works.

    To time them all takes minutes, and beside other processes tells little; it changes speeds, not results.
    """
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self, kwargs):
        self.has_run, self.cache_results = False, False
        return prune(self, kwargs)

    def run_once(self, *args, **kwargs):
        if self.has_run:
            return [math.inf]
        self._do_bench = lambda call, quantiles: call() or [0.]
        result = bench(self, *args, **kwargs)
        self.has_run = result[0] == 0
        return result[:1]

    Autotuner.prune_configs, Autotuner._bench = prune_configs, run_once


@dataclass
class Job:
    """All that it takes to carry out an order, in any process."""
    configs: dict[str, PreTrainedConfig]
    tasks: dict[str, Language | Synthetic]
    # what decides the result of each run, stored beside it
    settings: dict[Run, dict]
    bf16: bool
    device: torch.device
    out: Path

    def do(self, order: Run | Warm, report: Callable[[int, int, float], None]) -> Outcome:
        """Carry out an order; a result is written before it is returned."""
        config = self.configs[order.mixer]
        try:
            if isinstance(order, Warm):
                start = time.perf_counter()
                warm_up(config, list(self.tasks.values()), self.bf16, self.device)
                return Outcome(order, {'seconds': time.perf_counter() - start}, None)
            result = train(order, config, self.tasks[order.task], self.bf16, self.device, self.out, report)
            write_json(result_file(self.out, order), {'settings': self.settings[order], 'result': result})
            return Outcome(order, result, None)
        except Exception as error:
            return Outcome(order, None, reason_of(error))


class Watcher:
    """What is told how far orders are; this one does not listen."""

    def begin(self, order: Run | Warm) -> None: ...

    def update(self, order: Run | Warm, step: int, tokens: int, loss: float) -> None: ...

    def end(self, outcome: Outcome) -> None: ...


def do_here(job: Job, orders: list[Run | Warm], deadline: float, watcher: Watcher) -> Iterator[Outcome]:
    """Carry out orders in this process; none is begun after the deadline, a time of `time.monotonic`.

    Whoever receives an outcome may add orders.
    """
    while orders and time.monotonic() < deadline:
        order = orders.pop(0)
        watcher.begin(order)
        outcome = job.do(order, lambda *args, order=order: watcher.update(order, *args))
        watcher.end(outcome)
        yield outcome


def work(job: Job, connection: Connection) -> None:
    """A worker process: orders come in, reports and outcomes go out, until the other end is closed."""
    set_up_process()
    if job.device.type == 'cuda':
        leave_kernels_untuned()
        torch.cuda.set_device(job.device)
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(job.do(connection.recv(), lambda *args: connection.send(args)))


@dataclass
class Worker:
    """A process, this end of its connection, and what it is at."""
    process: multiprocessing.Process
    connection: Connection
    device: torch.device
    order: Run | Warm | None = None


@dataclass
class Workers:
    """Processes, spread over the GPUs, that carry out orders at the same time. One that fails is replaced."""
    job: Job
    count: int
    devices: list[torch.device]
    running: list[Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        for _ in range(self.count):
            self.start()
        return self

    def __exit__(self, *_) -> None:
        for worker in self.running:
            worker.process.kill()
        end = time.monotonic() + EXIT_TIME
        for worker in self.running:
            worker.process.join(max(0, end - time.monotonic()))

    def start(self) -> None:
        device = min(self.devices, key=lambda device: sum(worker.device == device for worker in self.running))
        context = multiprocessing.get_context('spawn')
        here, there = context.Pipe()
        process = context.Process(target=work, args=(replace(self.job, device=device), there), daemon=True)
        process.start()
        # a closed end is how death is told
        there.close()
        self.running.append(Worker(process, here, device))

    def do(self, orders: list[Run | Warm], deadline: float, watcher: Watcher) -> Iterator[Outcome]:
        """Carry out orders until the deadline, a time of `time.monotonic`; what is not over then is left.

        Runs wait for the warm-up of their mixer, if there is one among the orders, and are left out if it fails. Whoever
        receives an outcome may add orders.
        """
        cold = {order.mixer for order in orders if isinstance(order, Warm)}
        while time.monotonic() < deadline:
            while orders and len(self.running) < self.count:
                self.start()
            for worker in self.running:
                if worker.order:
                    continue
                order = next((x for x in orders if isinstance(x, Warm) or x.mixer not in cold), None)
                if order:
                    orders.remove(order)
                    worker.order = order
                    watcher.begin(order)
                    # one that died meanwhile is found below
                    with suppress(OSError):
                        worker.connection.send(order)
            busy = {worker.connection: worker for worker in self.running if worker.order}
            if not busy:
                return
            left = deadline - time.monotonic()
            for connection in wait(busy, None if math.isinf(left) else max(0, left)):
                worker = busy[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    message = Outcome(worker.order, None, f'its process ended with exit code {worker.process.exitcode}')
                if not isinstance(message, Outcome):
                    watcher.update(worker.order, *message)
                    continue
                worker.order = None
                watcher.end(message)
                if message.reason:
                    # an error may have left the GPU unusable for its process
                    worker.process.kill()
                    self.running.remove(worker)
                if isinstance(message.order, Warm):
                    if message.reason:
                        orders[:] = (x for x in orders if x.mixer != message.order.mixer)
                    cold.discard(message.order.mixer)
                yield message
