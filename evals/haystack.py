# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Texts that hide needles, by the rules of RULER (arXiv 2404.06654): S-NIAH-1, 2, 3 and MK-NIAH-1."""

from __future__ import annotations

import random
import re
import uuid
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerBase

# tokens that a model may write; part of a context's length
ANSWER_TOKENS = 128

NOISE = 'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.'
NEEDLE = 'One of the special magic {kind}s for {key} is: {value}.'
PROMPT = (
    'A special magic {kind} is hidden within the following text. Make sure to memorize it. '
    'I will quiz you about the {kind} afterwards.\n{context}\n'
    'What is the special magic {kind} for {key} mentioned in the provided text? '
    'The special magic {kind} for {key} mentioned in the provided text is'
)

# per cent of the sentences before a needle
DEPTHS = [round(100 * i / 39) for i in range(40)]

SENTENCE_END = re.compile(r'[.!?]["\')\]]*$')

# a key is an adjective and a noun
ADJECTIVES, NOUNS = (part.split() for part in Path(__file__).with_name('words.txt').read_text().split('\n\n'))


@dataclass(frozen=True)
class Task:
    """What is hidden, and where; one of the keys is asked."""
    name: str
    haystack: str
    kind: str
    keys: int = 1


TASKS = {
    's_niah_1': Task('S-NIAH-1', haystack='noise', kind='number'),
    's_niah_2': Task('S-NIAH-2', haystack='essay', kind='number'),
    's_niah_3': Task('S-NIAH-3', haystack='essay', kind='uuid'),
    'mk_niah_1': Task('MK-NIAH-1', haystack='essay', kind='number', keys=4),
}


@dataclass(frozen=True)
class Sample:
    prompt: str
    # tokens of the prompt
    tokens: int
    key: str
    answers: tuple[str, ...]
    # per cent of the haystack before the needle that is asked for
    depth: float


class Haystack:
    """A text as words and sentences; it begins anew where it ends."""

    def __init__(self, text: str):
        self.words = text.split()
        if not self.words:
            raise ValueError('--text: expected a text with at least one word')
        self.text = ' '.join(self.words)

    def sentences(self, count: int) -> list[str]:
        """The first `count` words as sentences, the last of which may be cut."""
        sentences, words = [], []
        for word in islice(cycle(self.words), count):
            words.append(word)
            if SENTENCE_END.search(word):
                sentences.append(' '.join(words))
                words = []
        return sentences + [' '.join(words)] * bool(words)


def draw(task: Task, haystack: Haystack, rng: random.Random) -> tuple[list[str], list[str], list[float]]:
    """Keys, values and depths of the needles. No two are the same, and the haystack has neither the keys nor the values."""
    def distinct(make: Callable[[], str]) -> list[str]:
        found: list[str] = []
        while len(found) < task.keys:
            candidate = make()
            if candidate not in found and candidate not in haystack.text:
                found.append(candidate)
        return found

    keys = distinct(lambda: f'{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}')
    if task.kind == 'number':
        values = distinct(lambda: str(rng.randint(10**6, 10**7 - 1)))
    else:
        values = distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))
    if task.haystack == 'noise':
        return keys, values, sorted(100 * rng.random() for _ in keys)
    return keys, values, [float(x) for x in sorted(rng.sample(DEPTHS, task.keys))]


def hide(task: Task, haystack: Haystack, size: int, needles: list[str], depths: list[float]) -> str:
    """The context: `size` words of an essay, or `size` lines of noise, and the needles between its sentences."""
    pieces = [NOISE] * size if task.haystack == 'noise' else haystack.sentences(size)
    places = [int(len(pieces) * depth / 100) for depth in depths]
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda x: x[0], reverse=True):
        pieces.insert(place, needle)
    return ('\n' if task.haystack == 'noise' else ' ').join(pieces)


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, where all smaller ones do, sought from `start`; -1 if not even 0 fits."""
    step = 1
    if fits(start):
        low = start
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = start
        while (low := high - step) >= 0 and not fits(low):
            high, step = low, 2 * step
        low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def make_sample(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    rng: random.Random,
    start: int = 1,
) -> tuple[Sample, int]:
    """A sample with the largest haystack that leaves room for the answer, and the size of it, which is sought from `start`."""
    keys, values, depths = draw(task, haystack, rng)
    needles = [NEEDLE.format(kind=task.kind, key=key, value=value) for key, value in zip(keys, values, strict=True)]
    asked = rng.randrange(task.keys)

    def prompt_of(size: int) -> str:
        return PROMPT.format(kind=task.kind, context=hide(task, haystack, size, needles, depths), key=keys[asked])

    @cache
    def tokens_of(size: int) -> int:
        return len(tokenizer(prompt_of(size), verbose=False)['input_ids'])

    size = largest(lambda size: tokens_of(size) + ANSWER_TOKENS <= length, start)
    if size < 1:
        raise ValueError(
            f'--lengths {length}: {task.name} needs at least {tokens_of(1) + ANSWER_TOKENS} tokens of this tokenizer, '
            f'{ANSWER_TOKENS} of them for the answer',
        )
    return Sample(prompt_of(size), tokens_of(size), keys[asked], (values[asked],), depths[asked]), size


def make_samples(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    count: int,
    seed: int,
) -> Iterator[Sample]:
    """Samples of a task whose prompts and answers are up to `length` tokens; fewer of a seed are the first of more."""
    size = 1
    for number in range(count):
        rng = random.Random(f'{seed} {task.name} {length} {number}')
        sample, size = make_sample(task, tokenizer, haystack, length, rng, size)
        yield sample


def score(prediction: str, answers: tuple[str, ...]) -> float:
    """The share of the answers that stand in the prediction, whatever the case of their letters."""
    prediction = prediction.lower()
    return sum(answer.lower() in prediction for answer in answers) / len(answers)
