# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""
Needles among tokens that mean nothing: what small models can learn and be judged by.

A sequence is distractors with needles between them, each of a marker, a key and its value, and at its end questions, each of
another marker, one of the keys, and its value, which is to be told. Example::

    needles = TokenNeedles()
    model = AutoModelForCausalLM.from_config(KDNConfig(vocab_size=needles.vocab_size, ...))
    for inputs, targets in training_batches(needles, lengths=(64, 128), tokens=8192, steps=1000, seed=0):
        logits = model(input_ids=inputs).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        ...
    evaluate(model, needles, lengths=(128, 256, 512))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.compare.data import IGNORE
from benchmarks.compare.train import score

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

NEEDLE, QUESTION = 0, 1
# tokens of a needle, and of a question with its answer
WIDTH = 3


@dataclass(frozen=True)
class TokenNeedles:
    """What is hidden. Tokens are the two markers, then keys, values and distractors; all keys of a sequence differ."""
    needles: int = 1
    # needles that are asked for, in another order
    questions: int = 1
    keys: int = 64
    values: int = 64
    distractors: int = 64

    def __post_init__(self):
        if not 1 <= self.questions <= self.needles <= self.keys:
            raise ValueError(
                f'expected 1 <= questions <= needles <= keys, got {self.questions}, {self.needles} and {self.keys}',
            )
        if self.needles > self.values:
            raise ValueError(f'values: expected one for each of {self.needles} needles, got {self.values}')
        if self.distractors < 1:
            raise ValueError(f'distractors: expected at least one token, got {self.distractors}')

    @property
    def vocab_size(self) -> int:
        return 2 + self.keys + self.values + self.distractors

    @property
    def min_length(self) -> int:
        """Tokens of a sequence without distractors."""
        return WIDTH * (self.needles + self.questions) - 1


def make_batch(
    needles: TokenNeedles,
    length: int,
    sequences: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Inputs and targets `[sequences, length]`, and the depth of the last needle that is asked for, `[sequences]`, from 0 to 1.

    Only the answers are targets; where the last key is read stands the last of them. No two needles share a value.
    """
    if length < needles.min_length:
        raise ValueError(f'length: expected at least {needles.min_length} tokens for {needles}, got {length}')
    N, count = sequences, needles.needles

    def choose(symbols: int, size: int) -> torch.Tensor:
        return torch.rand(N, symbols, generator=generator).argsort(1)[:, :size]

    keys = 2 + choose(needles.keys, count)
    values = 2 + needles.keys + choose(needles.values, count)
    first = needles.vocab_size - needles.distractors
    # one token more than the inputs: the last answer
    tokens = torch.randint(first, needles.vocab_size, (N, length + 1), generator=generator)

    # of places for distractors and needles some are needles, which are wider
    places = length + 1 - WIDTH * needles.questions - (WIDTH - 1) * count
    starts = choose(places, count).sort(1).values + (WIDTH - 1) * torch.arange(count)
    hidden = torch.stack((torch.full_like(keys, NEEDLE), keys, values), dim=-1)
    tokens.scatter_(1, (starts[..., None] + torch.arange(WIDTH)).flatten(1), hidden.flatten(1))

    order = choose(count, needles.questions)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    tokens[:, length + 1 - WIDTH * needles.questions:] = torch.stack(
        (torch.full_like(asked, QUESTION), asked, answers), dim=-1,
    ).flatten(1)

    targets = torch.full((N, length), IGNORE)
    ends = length - 1 - WIDTH * torch.arange(needles.questions - 1, -1, -1)
    targets[:, ends] = answers
    depth = starts.gather(1, order[:, -1:])[:, 0] / max(1, length + 1 - WIDTH * (needles.questions + 1))
    return tokens[:, :-1], targets, depth


def training_batches(
    needles: TokenNeedles,
    lengths: Sequence[int],
    tokens: int,
    steps: int,
    seed: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of each training step, about `tokens` tokens; all sequences of a step have one of the lengths."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        inputs, targets, _ = make_batch(needles, length, max(1, tokens // length), generator)
        yield inputs, targets


def evaluation_batch(
    needles: TokenNeedles,
    length: int,
    sequences: int,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sequences by which every model is judged, which no seed below 2^31 trains on; as `make_batch` returns them."""
    return make_batch(needles, length, sequences, torch.Generator().manual_seed(2**31 + 1000003 * seed + length))


def evaluate(
    model: PreTrainedModel,
    needles: TokenNeedles,
    lengths: Sequence[int],
    sequences: int = 256,
    seed: int = 0,
    bf16: bool = False,
) -> dict[int, float]:
    """The share of questions that a model answers rightly at each length."""
    training, accuracy = model.training, {}
    model.eval()
    for length in lengths:
        inputs, targets, _ = evaluation_batch(needles, length, sequences, seed)
        accuracy[length] = score(model, inputs, targets, bf16)[1]
    model.train(training)
    return accuracy
