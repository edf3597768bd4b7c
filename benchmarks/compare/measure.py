# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Speed, memory and state of trained models, measured side by side in one process."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import nbytes
from benchmarks.compare.train import loss_of, make_optimizer, precision, train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.compare.data import Text
    from benchmarks.compare.settings import Preset

# calls before the clock starts: kernels are compiled and tuned, memory pools grow
WARMUP = 2

PROMPT_BYTES, SAMPLE_BYTES = 120, 300

MEMORY_LABELS = {
    'cpu': 'weights, gradients, AdamW state and tensors kept for backward; temporary buffers are not counted',
    'cuda': 'torch.cuda.max_memory_allocated over a training step, the model alone on the GPU',
}


def measure(
    folders: dict[str, Path],
    preset: Preset,
    text: Text,
    device: torch.device,
) -> tuple[dict[str, dict], dict[str, Exception]]:
    """Numbers of each mixer's saved model, and the errors of those that failed."""
    results: dict[str, dict] = {mixer: {} for mixer in folders}
    failures: dict[str, Exception] = {}

    @contextmanager
    def noting_failure(mixer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # without what its frames hold, which would be in the memory of the others
            failures[mixer] = error.with_traceback(None)

    inputs, targets = (x.to(device) for x in next(text.batches(preset.language, preset.seq_len, seed=0)))
    for mixer, folder in folders.items():
        with noting_failure(mixer):
            results[mixer]['memory_bytes'] = training_memory(folder, preset, inputs, targets)

    steps = {}
    for mixer, folder in folders.items():
        with noting_failure(mixer):
            steps[mixer] = training_steps(folder, preset, inputs, targets)
    for mixer, seconds in side_by_side(steps, preset.repeats, device).items():
        results[mixer]['train_tokens_per_second'] = inputs.numel() / seconds
    steps.clear()

    prompt = inputs[:1, :preset.seq_len // 2].expand(preset.decode_batch, -1)
    blocks = {}
    for mixer, folder in folders.items():
        with noting_failure(mixer):
            blocks[mixer] = decoding_blocks(folder, preset, prompt)
    for mixer, seconds in side_by_side(blocks, preset.repeats, device).items():
        results[mixer]['decode_tokens_per_second'] = preset.decode_batch * preset.decode_tokens / seconds
    return results, failures


def side_by_side(functions: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a slow moment of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(WARMUP + repeats):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def training_steps(folder: Path, preset: Preset, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """A function that trains for one step; it has been called once."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(inputs.device).train()
    optimizer, _ = make_optimizer(model, preset.language)

    def step() -> None:
        train_step(model, optimizer, inputs, targets, preset.bf16)

    step()
    return step


@torch.inference_mode()
def decoding_blocks(folder: Path, preset: Preset, prompt: torch.Tensor) -> Callable[[], None]:
    """A function that decodes a block of tokens greedily; it has been called once."""
    dtype = torch.bfloat16 if preset.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(prompt.device).eval()
    output = model(input_ids=prompt, use_cache=True)

    @torch.inference_mode()
    def block() -> None:
        nonlocal output
        for _ in range(preset.decode_tokens):
            tokens = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=tokens, past_key_values=output.past_key_values, use_cache=True)

    block()
    return block


def training_memory(folder: Path, preset: Preset, inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes that a training step holds (see `MEMORY_LABELS`)."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(inputs.device).train()
    optimizer, _ = make_optimizer(model, preset.language)
    # the optimizer's state exists from the first step on
    train_step(model, optimizer, inputs, targets, preset.bf16)
    if inputs.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(inputs.device)
        train_step(model, optimizer, inputs, targets, preset.bf16)
        return torch.cuda.max_memory_allocated(inputs.device)

    # kept until backward, so that no memory of it is used twice and counted once
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    parameters = list(model.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), precision(inputs.device, preset.bf16):
        loss = loss_of(model, inputs, targets)
    del loss
    state = nbytes(list(optimizer.state.values()))
    # each weight has a gradient
    return 2 * sum(p.nbytes for p in parameters) + state + sum(n for pointer, n in kept.items() if pointer not in weights)


@torch.inference_mode()
def sample(folder: Path, preset: Preset, text: Text, device: torch.device) -> dict[str, str]:
    """Text that a saved model writes after the beginning of the validation text."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    prompt = text.validation[:min(PROMPT_BYTES, preset.seq_len)].long()[None].to(device)
    torch.manual_seed(0)
    with precision(device, preset.bf16):
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=SAMPLE_BYTES,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            # tokens that are no bytes
            suppress_tokens=list(range(256, model.config.vocab_size)) or None,
        )
    given, written = (bytes(x.tolist()).decode(errors='replace') for x in (prompt[0], tokens[0, prompt.shape[1]:]))
    return {'prompt': given, 'text': written}
