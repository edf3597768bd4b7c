# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Several runs at once, in processes of their own. Models that misbehave are defined here, where those processes find them."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from fla.layers.mamba2 import Mamba2
from test_compare import ALL_TASKS, TINY, compare  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.autotuner import Autotuner

from benchmarks.compare import workers
from benchmarks.compare.mixers import MIXERS, build_config
from benchmarks.compare.runs import Run, result_file
from benchmarks.compare.workers import Job, Warm, Watcher, Workers
from fla_kdn import KDNConfig, KDNForCausalLM

MINUTE = 60


class FaultyConfig(KDNConfig):
    model_type = 'test-faulty'

    def __init__(self, fault: str = 'raise', **kwargs):
        self.fault = fault
        super().__init__(**kwargs)


class FaultyForCausalLM(KDNForCausalLM):
    config_class = FaultyConfig

    def forward(self, *args, **kwargs):
        if self.config.fault == 'raise':
            raise RuntimeError('no such kernel')
        if self.config.fault == 'die':
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100 * MINUTE)


AutoConfig.register(FaultyConfig.model_type, FaultyConfig, exist_ok=True)
AutoModelForCausalLM.register(FaultyConfig, FaultyForCausalLM, exist_ok=True)


class Notes(Watcher):
    """Remembers what it is told."""

    def __init__(self):
        self.begun, self.steps = [], {}

    def begin(self, order):
        self.begun.append(order)

    def update(self, order, step, tokens, loss):
        self.steps[order] = step


@pytest.fixture
def make_job(tmp_path):
    """A job of `kda` and of mixers with the faults they are named by."""
    def make(*faults):
        sizes = build_config('kda', TINY.backbone, 64)
        configs = {'kda': sizes}
        for fault in faults:
            configs[fault] = FaultyConfig(
                fault, hidden_size=sizes.hidden_size, num_hidden_layers=1, num_heads=2, head_dim=16, vocab_size=256,
            )
        task = ALL_TASKS['recall']
        tasks = {'recall': replace(task, training=replace(task.training, steps=3))}
        settings = {Run(mixer, 'recall', seed): {} for mixer in configs for seed in (0, 1)}
        return Job(configs, tasks, settings, False, torch.device('cpu'), tmp_path)

    return make


class CountingWorkers(Workers):
    started = 0

    def start(self):
        self.started += 1
        super().start()


def carry_out(job, orders, count, seconds=math.inf):
    notes = Notes()
    with CountingWorkers(job, count, [job.device]) as pool:
        outcomes = {outcome.order: outcome for outcome in pool.do(orders, time.monotonic() + seconds, notes)}
    assert not any(worker.process.is_alive() for worker in pool.running)
    return outcomes, notes, pool.started


def test_runs_that_raise_or_are_killed_do_not_stop_the_others(make_job, tmp_path):
    job = make_job('raise', 'die')
    orders = [Run(mixer, 'recall', seed) for mixer, seed in (('die', 0), ('raise', 0), ('kda', 0), ('kda', 1))]
    dies, fails, first, second = expected = tuple(orders)
    outcomes, notes, started = carry_out(job, orders, 2)
    assert set(outcomes) == set(notes.begun) == set(expected) and not orders
    assert outcomes[dies].reason == 'its process ended with exit code -9'
    assert outcomes[fails].reason == 'RuntimeError: no such kernel'
    # a process in which something failed is not used again
    assert started == 4
    for run in (first, second):
        assert outcomes[run].reason is None and notes.steps[run] == 3
        stored = json.loads(result_file(tmp_path, run).read_text())['result']
        assert stored['accuracy'] == outcomes[run].result['accuracy']
    assert not result_file(tmp_path, dies).exists()


def test_runs_wait_for_the_first_steps_of_their_mixer(make_job):
    job = make_job('raise')
    run, lost = Run('kda', 'recall', 0), Run('raise', 'recall', 0)
    outcomes, notes, _ = carry_out(job, [Warm('raise'), Warm('kda'), lost, run], 1)
    assert notes.begun == [Warm('raise'), Warm('kda'), run]
    assert outcomes[Warm('raise')].reason == 'RuntimeError: no such kernel' and outcomes[run].result
    assert outcomes[Warm('kda')].result['seconds'] > 0


def test_runs_that_hang_are_ended_at_the_deadline(make_job):
    job = make_job('hang')
    run, late = Run('hang', 'recall', 0), Run('kda', 'recall', 0)
    outcomes, notes, _ = carry_out(job, [run, late], 1, seconds=1)
    assert notes.begun == [run] and not outcomes


def test_orders_added_after_a_failure_are_carried_out(make_job):
    job = make_job('raise')
    failing, added = Run('raise', 'recall', 0), Run('kda', 'recall', 0)
    orders, outcomes = [failing], []
    with Workers(job, 1, [job.device]) as pool:
        for outcome in pool.do(orders, math.inf, Notes()):
            outcomes.append(outcome)
            if outcome.order == failing:
                orders.append(added)
    assert [outcome.order for outcome in outcomes] == [failing, added] and outcomes[1].result


def test_a_process_in_place_of_a_failed_one_has_its_device(make_job, monkeypatch):
    process = SimpleNamespace(start=lambda: None)
    connection = SimpleNamespace(close=lambda: None)
    context = SimpleNamespace(Pipe=lambda: (connection, connection), Process=lambda **_: process)
    monkeypatch.setattr(multiprocessing, 'get_context', lambda method: context)
    devices = [torch.device('cuda', i) for i in range(3)]
    pool = Workers(make_job(), 3, devices)
    for _ in range(3):
        pool.start()
    del pool.running[1]
    pool.start()
    assert sorted(worker.device.index for worker in pool.running) == [0, 1, 2]


@pytest.fixture
def fla_logger():
    """FLA's logger, as if no test had set it up before."""
    logger = logging.getLogger('fla')
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)


def test_workers_are_silent_about_kernels_that_mamba_lacks(fla_logger, caplog):
    sizes = {'hidden_size': 16, 'expand': 1, 'head_dim': 16, 'state_size': 16}
    Mamba2(**sizes)
    assert 'Triton' in caplog.text
    caplog.clear()
    workers.set_up_process()
    Mamba2(**sizes)
    assert not caplog.text


def test_workers_find_the_same_results(compare, monkeypatch, tmp_path, capsys):  # noqa: F811
    """And a mixer that fails is named, as it is without them."""
    arguments = ('--steps', '3', '--mixers', 'kda', 'kdn-isotropic', '--tasks', 'recall', '--seeds', '2', '--no-speed')
    assert compare(*arguments, '--workers', '1') == 0
    alone = json.loads((tmp_path / 'out' / 'results.json').read_text())['mixers']
    monkeypatch.setitem(MIXERS, 'kdn-isotropic', replace(MIXERS['kdn-isotropic'], config_class=FaultyConfig))
    assert compare(*arguments, '--workers', '2') == 0
    together = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert list(together['mixers']) == ['kda']
    assert together['mixers']['kda'] == alone['kda']
    output = capsys.readouterr().out
    assert 'KDN isotropic, recall seed 0; recall seed 1: RuntimeError: no such kernel' in output
    # lines, not bars, where the output is no terminal
    assert '1/4 kda-recall-seed0: loss' in output and '4 of 4 over' in output


def test_untuned_kernels(monkeypatch):
    """The first configuration that works is taken, and no other is tried."""
    # the tests' own way to leave kernels untuned
    monkeypatch.undo()
    for name in ('prune_configs', '_bench'):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))
    workers.leave_kernels_untuned()
    sizes, done = (1, 2, 4, 8), []

    @triton.autotune([triton.Config({'B': B}) for B in sizes], key=['n'])
    @triton.jit
    def kernel(n, B: triton.language.constexpr):
        pass

    class Kernel:
        arg_names = ('n', 'B')

        def run(self, n, B, **kwargs):
            if B < 4:
                raise triton.OutOfResources(B, 1, 'shared memory')
            done.append(B)

    kernel.fn = Kernel()
    kernel.run(3)
    kernel.run(3)
    assert kernel.best_config.kwargs == {'B': 4} and set(done) == {4} and not kernel.cache_results
