# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Time and memory of ops, side by side in one process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from benchmarks.common import compile_in_processes, reason_of, reject_beside_others
from benchmarks.ops.registry import BASELINES, OPS, make_inputs, make_work, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.ops.registry import OpConfig, Shape, Work

# ops take turns as often, so that a slow moment of the machine meets all of them
ROUNDS = 4
PROFILED_CALLS = 5


def measure_ceilings() -> dict[str, float]:
    """TB/s of a copy of 1 GiB, and TFLOP/s of a product of bf16 matrices."""
    x, y = torch.empty(2, 2**30, dtype=torch.uint8, device='cuda')
    copy_ms = do_bench(lambda: y.copy_(x), return_mode='median')
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device='cuda')
    matmul_ms = do_bench(lambda: a @ b, return_mode='median')
    return {'bandwidth': 2 * x.nbytes / copy_ms / 1e9, 'tflops': 2 * 8192**3 / matmul_ms / 1e9}


def floors(work: Work, bandwidth: float, tflops: float) -> dict[str, float | None]:
    """Milliseconds that moving the bytes (TB/s), and computing the products (TFLOP/s), take at least."""
    flops_ms = None if work.flops is None else work.flops / tflops / 1e9
    return {'floor_bytes_ms': work.bytes / bandwidth / 1e9, 'floor_flops_ms': flops_ms}


def first_calls(work: Work, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Wall seconds of the first call, which compiles and tunes, and the peak memory of the second."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work.call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.call()
    above = torch.cuda.max_memory_allocated() - before
    return {'cold_s': seconds, 'peak_above_inputs_bytes': above, 'peak_bytes': above + nbytes(inputs.values())}


def capture(work: Work) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.call()
    return graph.replay


def measure_group(
    ops: list[OpConfig],
    shape: Shape,
    modes: tuple[str, ...],
    rep: int,
    ceilings: dict[str, float],
    say: Callable[[str], None],
) -> Iterator[list[dict]]:
    """Rows of all `ops` at one shape, one mode after another; those that failed have a reason in place of numbers."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    rows = {(x.name, mode): {'op': x.name, 'kind': x.kind, 'shape': list(shape), 'mode': mode} for mode in modes for x in ops}
    calls, shared = {}, {}
    for op in ops:
        cold = 0.
        for mode in modes:
            row = rows[op.name, mode]
            try:
                inputs = make_inputs(op, shape, 'cuda', shared)
                work = make_work(op, shape, inputs, mode)
                row |= floors(work, **ceilings) | first_calls(work, inputs)
                # all first calls of the op up to here, as later modes find kernels of earlier ones compiled
                row['cold_s'] = cold = cold + row['cold_s']
                calls[op.name, mode] = capture(work) if mode.startswith('graph') else work.call, work.layers
            except Exception as error:
                row['error'] = reason_of(error)
        say(f'{op.name}: first calls took {cold:.1f} s')
    for mode in modes:
        times = {op.name: [] for op in ops if (op.name, mode) in calls}
        for _ in range(ROUNDS):
            for name in [x for x in times if 'error' not in rows[x, mode]]:
                call, layers = calls[name, mode]
                try:
                    times[name] += [ms / layers for ms in do_bench(call, rep=rep / ROUNDS, return_mode='all')]
                except Exception as error:
                    rows[name, mode]['error'] = reason_of(error)
        group = [rows[op.name, mode] for op in ops]
        reject_beside_others(group, torch.device('cuda'))
        for row in group:
            if 'error' not in row:
                quantiles = torch.tensor(times[row['op']]).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
                row |= zip(('ms', 'ms_p20', 'ms_p80'), quantiles, strict=True)
        baseline = rows.get((BASELINES.get(ops[0].kind), mode), {}).get('ms')
        for row in group:
            if baseline and 'ms' in row:
                row['ratio'] = row['ms'] / baseline
        yield group


def compile_op(name: str, shapes: list[Shape], modes: tuple[str, ...]) -> float | str:
    """Seconds of an op's first calls, or why they failed; runs in a worker process."""
    start = time.perf_counter()
    try:
        for shape in shapes:
            inputs = make_inputs(OPS[name], shape, 'cuda')
            for mode in modes:
                make_work(OPS[name], shape, inputs, mode).call()
            torch.cuda.synchronize()
            del inputs
            torch.cuda.empty_cache()
    except Exception as error:
        return reason_of(error)
    return time.perf_counter() - start


def warm(tasks: list[tuple[str, list[Shape], tuple[str, ...]]], workers: int) -> Iterator[tuple[str, float | str]]:
    """Compile ops in `workers` processes: name, and seconds or why it failed."""
    return compile_in_processes(compile_op, {task[0]: task for task in tasks}, workers)


def profile_op(op: OpConfig, shape: Shape, mode: str) -> list[dict]:
    """GPU time of the kernels of one call, the longest first."""
    work = make_work(op, shape, make_inputs(op, shape, 'cuda'), mode)
    for _ in range(3):
        work.call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            work.call()
        torch.cuda.synchronize()
    kernels = [
        {'kernel': event.key, 'calls': event.count / PROFILED_CALLS, 'ms': event.self_device_time_total / PROFILED_CALLS / 1e3}
        for event in profiler.key_averages() if event.device_type == DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda x: -x['ms'])
