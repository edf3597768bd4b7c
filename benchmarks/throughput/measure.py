# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Time and memory of models and layers, side by side in one process."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.common import compile_in_processes, nbytes, reason_of, reject_beside_others
from benchmarks.throughput.mixers import COMPILED, MODELS, make_config, make_layer, make_model
from fla_kdn.models.optim import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.throughput.plan import Cell, Group, Plan

WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0

# how it is measured, for those who read the results
METHOD = {
    'model': 'a step: forward, loss, backward, clipping and fused AdamW, without torch.compile; with activation checkpointing '
             'only where a step did not fit otherwise',
    'layer': 'forward and backward of a mixer with its projections, convolutions and norm',
    'prefill': 'one sequence, up to the first logits',
    'decode': 'greedy, token by token from the cache in PyTorch without CUDA graphs, as generate runs it; the cache of one '
              'prefilled sequence, copied to the batch. Softmax attention appends to its cache by a copy of it',
    'precision': 'training has fp32 weights and bf16 autocast, inference bf16 weights; on a CPU all is fp32',
    'times': 'medians of timed calls after one that compiles and tunes; mixers take turns, but for the 1.3B models, each of '
             'which is alone in memory',
    'memory': 'peak of allocated memory: weights, optimizer, cache and what a call adds',
}


@dataclass(frozen=True)
class Work:
    """A call to time, tokens that it processes, and a function for the bytes that are held before it."""
    call: Callable[[], torch.Tensor]
    tokens: int
    held: Callable[[], int]


def precision(device: torch.device) -> torch.autocast:
    """bf16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda')


class ModelTraining:
    def __init__(self, mixer: str, size: str, device: torch.device, plan: Plan, num_hidden_layers: int | None = None):
        self.device = device
        self.model = make_model(make_config(mixer, size, num_hidden_layers), device).train()
        # a rate that leaves weights about as they are
        groups = parameter_groups(self.model, WEIGHT_DECAY)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)

    def prepare(self, cell: Cell, checkpointing: bool = False) -> Work:
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()
        # also those that an interrupted step has left
        self.optimizer.zero_grad(set_to_none=True)
        tokens = torch.randint(self.model.config.vocab_size, (cell.batch, cell.tokens), device=self.device)

        def step() -> torch.Tensor:
            with precision(self.device):
                loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return Work(step, tokens.numel(), lambda: nbytes(list(self.model.parameters()), list(self.optimizer.state.values())))


class LayerTraining:
    def __init__(self, mixer: str, size: str, device: torch.device, plan: Plan):
        self.device = device
        self.layer = make_layer(mixer, size, device).train()

    def prepare(self, cell: Cell) -> Work:
        x, dy = torch.randn(2, cell.batch, cell.tokens, self.layer.hidden_size, device=self.device)
        inputs = [x.requires_grad_(), *self.layer.parameters()]

        def call() -> torch.Tensor:
            with precision(self.device):
                y = self.layer(x)[0]
            return torch.autograd.grad(y, inputs, dy.to(y.dtype))[0]

        return Work(call, cell.batch * cell.tokens, lambda: nbytes(inputs, dy))


class Inference:
    def __init__(self, mixer: str, size: str, device: torch.device, plan: Plan):
        self.device, self.decode_tokens = device, plan.decode_tokens
        dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
        self.model = make_model(make_config(mixer, size), device, dtype).eval()

    def prepare(self, cell: Cell) -> Work:
        prompt = torch.randint(self.model.config.vocab_size, (1, cell.tokens), device=self.device)

        @torch.inference_mode()
        def prefill():
            return self.model(input_ids=prompt, use_cache=True, logits_to_keep=1)

        if cell.kind == 'prefill':
            return Work(lambda: prefill().logits, cell.tokens, lambda: nbytes(list(self.model.parameters())))
        return self.prepare_decoding(cell, prefill())

    @torch.inference_mode()
    def prepare_decoding(self, cell: Cell, output) -> Work:
        cache, logits = output.past_key_values, output.logits.repeat(cell.batch, 1, 1)
        if cell.batch > 1:
            cache.batch_repeat_interleave(cell.batch)

        @torch.inference_mode()
        def block() -> torch.Tensor:
            nonlocal cache, logits
            for _ in range(self.decode_tokens):
                tokens = logits[:, -1:].argmax(-1)
                output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache, logits = output.past_key_values, output.logits
            return logits

        return Work(block, cell.batch * self.decode_tokens, lambda: nbytes(list(self.model.parameters()), list(cache)))


SUBJECTS = {'model': ModelTraining, 'layer': LayerTraining, 'prefill': Inference, 'decode': Inference}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.empty_cache()


def run(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, int | None, torch.Tensor]:
    """Wall seconds of a call, bytes that it allocated at its peak (`None` on a CPU), and what it returned."""
    cuda = device.type == 'cuda'
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() - before if cuda else None, result


def first_call(
    subject: ModelTraining | LayerTraining | Inference,
    cell: Cell,
    device: torch.device,
) -> tuple[Work, dict[str, float | bool]]:
    """The work of a cell after a call, and what to note of it; a step that does not fit is tried with checkpointing."""
    variants = ({}, {'checkpointing': True}) if cell.kind == 'model' else ({},)
    for options in variants:
        try:
            work = subject.prepare(cell, **options)
            seconds, _, result = run(work.call, device)
            if not result.isfinite().all():
                raise FloatingPointError('the first call gave numbers that are not finite')
            return work, {'first_s': seconds, **options}
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # after the error has gone, and with it what its frames held
        release(device)
    raise torch.OutOfMemoryError(reason)


def take_turns(works: dict[str, Work], rows: dict[str, dict], plan: Plan, device: torch.device) -> None:
    """Time the works by turns, so that a slow moment of the machine meets all of them, and complete their rows."""
    times: dict[str, list[float]] = {mixer: [] for mixer in works}
    peaks: dict[str, list[int]] = {mixer: [] for mixer in works}
    least, most = plan.calls
    waiting = list(works)
    while waiting:
        for mixer in waiting:
            try:
                held = works[mixer].held()
                seconds, above, _ = run(works[mixer].call, device)
            except Exception as error:
                rows[mixer]['error'] = reason_of(error)
                continue
            times[mixer].append(seconds)
            if above is not None:
                peaks[mixer].append(held + above)
        waiting = [
            mixer for mixer in waiting if 'error' not in rows[mixer]
            and (len(times[mixer]) < least or sum(times[mixer]) < plan.seconds and len(times[mixer]) < most)
        ]
    reject_beside_others([rows[mixer] for mixer in works], device)
    for mixer, work in works.items():
        if 'error' in rows[mixer]:
            continue
        seconds = statistics.median(times[mixer])
        rows[mixer] |= {
            'tokens_per_second': work.tokens / seconds,
            'ms': 1e3 * seconds,
            'ms_least': 1e3 * min(times[mixer]),
            'ms_most': 1e3 * max(times[mixer]),
            'calls': len(times[mixer]),
            'held_bytes': work.held(),
            'peak_bytes': max(peaks[mixer], default=None),
        }


def measure_group(
    group: Group,
    plan: Plan,
    device: torch.device,
    is_wanted: Callable[[dict], bool],
    why_stop: Callable[[], str | None],
) -> Iterator[list[dict]]:
    """
    Rows of a group, those of one cell after another; one that failed, or that was not run, has a reason in place of numbers.

    Args:
        is_wanted (Callable[[dict], bool]): whether to measure a row, of which size, mixer and cell are given.
        why_stop (Callable[[], str | None]): the reason not to begin with another measurement, if there is one.
    """
    wanted = {
        cell: {
            mixer: row for mixer in group.mixers
            if is_wanted(row := {'size': group.size, 'mixer': mixer, **asdict(cell)})
        } for cell in group.cells
    }
    subjects, failures = {}, {}
    release(device)
    for mixer in group.mixers:
        if why_stop() or not any(mixer in rows for rows in wanted.values()):
            continue
        try:
            subjects[mixer] = SUBJECTS[group.cells[0].kind](mixer, group.size, device, plan)
        except Exception as error:
            failures[mixer] = reason_of(error)
    for cell, rows in wanted.items():
        works = {}
        for mixer, row in rows.items():
            if mixer in failures:
                row['error'] = failures[mixer]
            elif reason := why_stop():
                row['not_run'] = reason
            else:
                try:
                    works[mixer], notes = first_call(subjects[mixer], cell, device)
                    row |= notes
                except Exception as error:
                    row['error'] = reason_of(error)
                if 'error' in row:
                    release(device)
        take_turns(works, rows, plan, device)
        works.clear()
        release(device)
        if rows:
            yield list(rows.values())


def count_parameters(size: str) -> dict[str, int]:
    """Parameters of each model of a size, none of which is allocated."""
    models = {mixer: make_model(make_config(mixer, size), torch.device('meta')) for mixer in MODELS}
    return {mixer: sum(p.numel() for p in model.parameters()) for mixer, model in models.items()}


def compile_mixer(mixer: str, size: str, cells: list[Cell], plan: Plan, device: torch.device) -> float | str:
    """Seconds of a mixer's first calls, or why they failed; runs in a worker process, beside others in the same memory.

    Of models that are trained it runs the mixer; `attention`, which has no kernel of its own, stands for what is around the
    mixers in training: one layer and the loss.
    """
    start = time.perf_counter()
    try:
        for cell in cells:
            if mixer == 'attention':
                if cell.kind != 'model':
                    continue
                subject = ModelTraining(mixer, size, device, plan, num_hidden_layers=1)
            elif cell.kind in ('model', 'layer'):
                subject = LayerTraining(mixer, size, device, plan)
            elif mixer in MODELS:
                subject = Inference(mixer, size, device, plan)
            else:
                continue
            run(subject.prepare(cell).call, device)
            release(device)
    except Exception as error:
        return reason_of(error)
    return time.perf_counter() - start


def warm(plan: Plan, workers: int, device: torch.device) -> Iterator[tuple[str, float | str]]:
    """Compile the mixers of each size in `workers` processes: what, and seconds or why it failed."""
    cells: dict[str, dict[Cell, None]] = {}
    for group in plan.groups:
        cells.setdefault(group.size, {}).update(dict.fromkeys(group.cells))
    return compile_in_processes(compile_mixer, {
        f'{mixer} {size}': (mixer, size, list(found), plan, device) for size, found in cells.items() for mixer in COMPILED
    }, workers)
