# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What is measured, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.throughput.mixers import LAYERS, MODELS


@dataclass(frozen=True)
class Cell:
    """`kind` is `model` or `layer` (training), `prefill` or `decode`; `tokens` is the length of each of `batch` sequences, in
    decoding that of the context."""
    kind: str
    batch: int
    tokens: int


@dataclass(frozen=True)
class Group:
    """Cells of several mixers, which are all in memory and take turns."""
    size: str
    mixers: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        groups (tuple[Group, ...]): in the order of measuring.
        decode_tokens (int): tokens that a timed call decodes.
        seconds (float): of timed calls that are enough for a row, between `calls[0]` and `calls[1]` of them.
        calls (tuple[int, int]): least and most timed calls of a row.
    """
    groups: tuple[Group, ...]
    decode_tokens: int
    seconds: float
    calls: tuple[int, int]


def training(kind: str, lengths: tuple[int, ...], tokens: int) -> tuple[Cell, ...]:
    """The same number of tokens at each length."""
    return tuple(Cell(kind, tokens // length, length) for length in lengths)


def decoding(contexts: tuple[int, ...], batches: tuple[int, ...]) -> tuple[Cell, ...]:
    return tuple(
        cell for context in contexts
        for cell in (Cell('prefill', 1, context), *(Cell('decode', batch, context) for batch in batches))
    )


def alone(size: str, cells: tuple[Cell, ...]) -> tuple[Group, ...]:
    """A group for each model: where weights, gradients and moments of all do not fit beside the activations of one."""
    return tuple(Group(size, (mixer,), cells) for mixer in MODELS)


TOKENS = 32768
LENGTHS = (4096, 32768, 2048, 16384, 8192)
PLANS = {
    'cuda': Plan(
        groups=(
            *alone('1.3b', training('model', LENGTHS[:2], TOKENS)),
            Group('1.3b', LAYERS, training('layer', LENGTHS, TOKENS)),
            Group('0.4b', tuple(MODELS), decoding(LENGTHS, batches=(1, 64))),
            *alone('1.3b', training('model', LENGTHS[2:], TOKENS)),
            Group('0.4b', tuple(MODELS), training('model', LENGTHS, TOKENS)),
            Group('0.4b', LAYERS, training('layer', LENGTHS, TOKENS)),
        ),
        decode_tokens=8,
        seconds=0.5,
        calls=(3, 10),
    ),
    # only shows that everything runs
    'cpu': Plan(
        groups=(
            *alone('tiny', training('model', (128,), 256)),
            Group('tiny', LAYERS, training('layer', (128, 256), 256)),
            Group('tiny', tuple(MODELS), decoding((128, 256), batches=(1, 2))),
            Group('tiny', tuple(MODELS), training('model', (256,), 256)),
        ),
        decode_tokens=2,
        seconds=0.0,
        calls=(1, 1),
    ),
}
