# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""One run: a fresh model with one mixer, trained on one task from one seed, then scored and saved."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from benchmarks.common import nbytes
from benchmarks.compare.data import IGNORE, byte_tokenizer
from benchmarks.compare.mixers import build_model
from fla_kdn.models.optim import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedConfig, PreTrainedModel

    from benchmarks.compare.runs import Run
    from benchmarks.compare.tasks import Language, Synthetic, Training

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
WARMUP_SHARE = 0.1

# points of a loss curve, each the mean over the steps since the last
CURVE_POINTS = 100
EVAL_TOKENS = 16384
STATE_TOKENS = 512
# batches among which the shapes of a task are looked for
WARM_BATCHES = 50

RELOAD_TOLERANCE = 1e-5


def precision(device: torch.device, bf16: bool):
    """The autocast context of training and of scoring."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def loss_of(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats, computed in one way for all mixers."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


def make_optimizer(
    model: PreTrainedModel, training: Training, learning_rate: float | None = None,
) -> tuple[Optimizer, LRScheduler]:
    """AdamW, and a cosine schedule with warm-up."""
    learning_rate = learning_rate or training.learning_rates[0]
    optimizer = torch.optim.AdamW(parameter_groups(model, WEIGHT_DECAY), lr=learning_rate, betas=BETAS)
    warmup = round(WARMUP_SHARE * training.steps)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, warmup, training.steps)


def train_step(model, optimizer, inputs, targets, bf16: bool) -> torch.Tensor:
    """Forward, backward and update; returns the loss."""
    with precision(inputs.device, bf16):
        loss = loss_of(model, inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(
    run: Run,
    config: PreTrainedConfig,
    task: Language | Synthetic,
    bf16: bool,
    device: torch.device,
    out: Path,
    report: Callable[[int, int, float], None],
) -> dict:
    """Train, score, save and load again; `report(steps done, tokens done, loss)` is called as it goes."""
    training = task.training
    model = build_model(config, run.seed).to(device).train()
    optimizer, schedule = make_optimizer(model, training, run.learning_rate)

    curve = {'step': [], 'loss': []}
    pending, tokens, start = [], 0, time.perf_counter()
    every = max(1, training.steps // CURVE_POINTS)
    for step, (inputs, targets) in enumerate(task.batches(run.seed), start=1):
        pending.append(train_step(model, optimizer, inputs.to(device), targets.to(device), bf16))
        schedule.step()
        tokens += inputs.numel()
        if step % every == 0 or step == training.steps:
            loss = torch.stack(pending).mean().item()
            if not math.isfinite(loss):
                raise FloatingPointError(f'the loss is {loss} at step {step} of {training.steps}')
            curve['step'].append(step)
            curve['loss'].append(loss)
            pending.clear()
            report(step, tokens, loss)

    result = {'curve': curve, 'tokens': tokens, 'seconds': time.perf_counter() - start}
    model.eval()
    result |= task.evaluate(model, bf16)
    result['state_bytes'] = state_size(model, bf16)
    folder = run.model_folder(out)
    model.save_pretrained(folder)
    if run.task == 'language':
        byte_tokenizer().save_pretrained(folder)
    result['reload_error'] = reload_error(model, folder, bf16)
    return result


def warm_up(config: PreTrainedConfig, tasks: list[Language | Synthetic], bf16: bool, device: torch.device) -> None:
    """Train on a batch of each shape that a task has, and evaluate: its kernels are compiled, and kept on disk."""
    model = build_model(config, seed=0).to(device)
    for task in tasks:
        optimizer, _ = make_optimizer(model.train(), task.training)
        shapes = {inputs.shape: (inputs, targets) for inputs, targets in islice(task.batches(seed=0), WARM_BATCHES)}
        for inputs, targets in shapes.values():
            train_step(model, optimizer, inputs.to(device), targets.to(device), bf16)
        task.evaluate(model.eval(), bf16)


def logits_of(
    model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, bf16: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits in fp32 and targets, on the model's device, of some sequences at a time."""
    size = max(1, EVAL_TOKENS // inputs.shape[1])
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        with precision(model.device, bf16):
            logits = model(input_ids=x.to(model.device), use_cache=False).logits
        yield logits.float(), y.to(model.device)


@torch.inference_mode()
def score(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, bf16: bool) -> tuple[float, float]:
    """Mean cross entropy in nats and accuracy over the scored targets."""
    loss, right, count = 0.0, 0, 0
    for logits, y in logits_of(model, inputs, targets, bf16):
        scored = y != IGNORE
        loss += F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction='sum').item()
        right += (logits.argmax(-1) == y)[scored].sum().item()
        count += scored.sum().item()
    return loss / count, right / count


@torch.inference_mode()
def is_right(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Whether the likeliest token is the target, `[sequences, tokens]`."""
    return torch.cat([(logits.argmax(-1) == y).cpu() for logits, y in logits_of(model, inputs, targets, bf16)])


@torch.inference_mode()
def state_size(model: PreTrainedModel, bf16: bool) -> int:
    """Bytes that the cache keeps for a sequence of `STATE_TOKENS` tokens."""
    prompt = torch.zeros(1, STATE_TOKENS, dtype=torch.long, device=model.device)
    with precision(model.device, bf16):
        cache = model(input_ids=prompt, use_cache=True).past_key_values
    return nbytes(list(cache))


@torch.inference_mode()
def reload_error(model: PreTrainedModel, folder: Path, bf16: bool) -> float:
    """Largest difference between the logits of a model and of the one loaded from its folder; raises if they differ."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).to(model.device).eval()
    tokens = torch.arange(128, device=model.device)[None] % model.config.vocab_size
    with precision(model.device, bf16):
        logits, again = (x(input_ids=tokens, use_cache=False).logits.float() for x in (model, loaded))
    error = (again - logits).abs().max().item()
    if not error <= RELOAD_TOLERANCE:
        raise RuntimeError(f'the model loaded from {folder} gives other logits, by up to {error}')
    return error
