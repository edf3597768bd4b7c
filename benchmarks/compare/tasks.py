# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What the models learn and are judged by: text, and four synthetic tasks whose best possible score is known.

A synthetic sequence ends with questions, each a key whose value is to be told. The keys, the values and where things stand are
random, so that the position of a token says nothing about its value. The data of a seed are always the same, and so are the
sequences by which all models are judged, which no seed below 2^31 trains on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from benchmarks.compare.data import IGNORE
from benchmarks.compare.train import is_right, score
from evals.synthetic import TokenNeedles, evaluation_batch, training_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from benchmarks.compare.data import Text

EVAL_SEED = 2**31
# of long sequences fewer are evaluated
LONG_EVAL_TOKENS = 2**19


@dataclass(frozen=True)
class Training:
    """How long and how fast a task is trained."""
    steps: int
    # tokens of a step
    tokens: int
    # each is tried with the first seed where there are several
    learning_rates: tuple[float, ...]
    # whether the title of the task says the learning rate
    in_title: bool = False


class Panel(NamedTuple):
    """A curve of accuracies: its title, what it goes along, and from where to where that goes in training."""
    title: str
    xlabel: str
    trained: tuple[int, int]


class Evaluation(NamedTuple):
    """Inputs and targets `[sequences, tokens]`, for each panel where in it a target counts (nowhere below 0), and how likely
    the best possible rule is right, 1 if `None`."""
    inputs: torch.Tensor
    targets: torch.Tensor
    places: dict[str, torch.Tensor]
    best: torch.Tensor | None = None


class Language:
    """The next byte of a text."""
    title = 'text'

    def __init__(self, text: Text, seq_len: int, training: Training):
        self.text, self.seq_len, self.training = text, seq_len, training

    def settings(self) -> dict:
        return {**asdict(self.training), 'seq_len': self.seq_len, 'text': self.text.fingerprint}

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of each training step."""
        return self.text.batches(self.training, self.seq_len, seed)

    def evaluate(self, model: PreTrainedModel, bf16: bool) -> dict:
        return {'bits_per_byte': score(model, *self.text.validation_windows(self.seq_len), bf16)[0] / math.log(2)}


@dataclass(frozen=True)
class Synthetic:
    """A task whose answers are single tokens, judged by the share of them that are right."""
    name: ClassVar[str]

    training: Training

    @property
    def title(self) -> str:
        return self.name + (f', learning rate {self.training.learning_rates[0]:g}' if self.training.in_title else '')

    def settings(self) -> dict:
        settings = asdict(self)
        return {**settings.pop('training'), **settings}

    @property
    def chance(self) -> float:
        """Accuracy of a guess among the values."""
        raise NotImplementedError

    @property
    def panels(self) -> dict[str, Panel]:
        raise NotImplementedError

    def describe(self) -> str:
        """What a sequence is, for readers of a report."""
        raise NotImplementedError

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of each training step."""
        raise NotImplementedError

    def evaluations(self) -> Iterator[Evaluation]:
        raise NotImplementedError

    def evaluate(self, model: PreTrainedModel, bf16: bool) -> dict:
        """Accuracies in each panel, by where on it."""
        return {'accuracy': self.average((x, is_right(model, x.inputs, x.targets, bf16).float()) for x in self.evaluations())}

    def best(self) -> dict[str, dict[str, float]]:
        """What the best possible rule scores on the sequences of the evaluation."""
        ones = ((x, torch.ones(x.targets.shape)) for x in self.evaluations())
        return self.average((x, one if x.best is None else x.best) for x, one in ones)

    def average(self, scored: Iterator[tuple[Evaluation, torch.Tensor]]) -> dict[str, dict[str, float]]:
        """Means over the targets at each place of each panel; places are strings, as keys of JSON are."""
        sums: dict = {name: defaultdict(float) for name in self.panels}
        counts: dict = {name: defaultdict(int) for name in self.panels}
        for evaluation, values in scored:
            for name, places in evaluation.places.items():
                counted = (evaluation.targets != IGNORE) & (places >= 0)
                for place in places[counted].unique().tolist():
                    found = values[counted & (places == place)]
                    sums[name][place] += found.sum().item()
                    counts[name][place] += found.numel()
        return {name: {str(place): sums[name][place] / counts[name][place] for place in sorted(sums[name])} for name in sums}


def with_each_rate(tasks: dict[str, Synthetic]) -> dict[str, Synthetic]:
    """A task for each learning rate of each task."""
    return {
        f'{name}-{rate:g}': replace(task, training=replace(task.training, learning_rates=(rate,), in_title=True))
        for name, task in tasks.items() for rate in task.training.learning_rates
    }


def permutations(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, size, generator=generator).argsort(1)


def fitting(sequences: int, length: int) -> int:
    """Sequences of a length that are evaluated."""
    return min(sequences, max(1, LONG_EVAL_TOKENS // length))


@dataclass(frozen=True)
class Recall(Synthetic):
    """Multi-query associative recall: pairs of a key and a value, then each key again, among tokens without a meaning.

    Tokens are the keys, below `symbols`, as many values, then the `fillers`. A sequence of training is as long as its pairs
    need, 4 tokens each, times one of `train_stretch`.
    """
    name = 'recall'

    symbols: int
    # numbers of pairs in a sequence
    train_pairs: tuple[int, ...]
    eval_pairs: tuple[int, ...]
    eval_sequences: int
    fillers: int = 0
    train_stretch: tuple[int, ...] = (1,)
    # lengths in which `length_pairs` pairs are asked for
    eval_lengths: tuple[int, ...] = ()
    length_pairs: int = 0

    def __post_init__(self):
        if max(*self.train_pairs, *self.eval_pairs) > self.symbols:
            raise ValueError(f'symbols: {self.symbols} keys are too few for {max(*self.train_pairs, *self.eval_pairs)} pairs')
        if not self.fillers and (self.eval_lengths or max(self.train_stretch) > 1):
            raise ValueError('fillers: sequences longer than their pairs need at least one, got 0')

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @property
    def panels(self) -> dict[str, Panel]:
        panels = {
            'pairs': Panel('more pairs', 'key-value pairs in the sequence', (min(self.train_pairs), max(self.train_pairs))),
        }
        if self.eval_lengths:
            lengths = tuple(4 * self.length_pairs * stretch for stretch in (min(self.train_stretch), max(self.train_stretch)))
            panels['length'] = Panel(f'longer sequences of {self.length_pairs} pairs', 'tokens in the sequence', lengths)
        return panels

    def describe(self) -> str:
        times = ' or '.join(map(str, self.train_stretch))
        among = f', among tokens of {self.fillers} kinds without a meaning, which make it {times} times as long in training'
        return (
            'A sequence shows pairs of a key and a value, then asks each key once, in another order'
            f'{among if self.fillers else ""}. There are {self.symbols} keys and as many values; '
            f'training has {", ".join(map(str, self.train_pairs))} pairs.'
        )

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All sequences of a step have the same number of pairs."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.training.steps):
            pairs = self.train_pairs[int(torch.randint(len(self.train_pairs), (), generator=generator))]
            length = 4 * pairs
            if self.fillers:
                length *= self.train_stretch[int(torch.randint(len(self.train_stretch), (), generator=generator))]
            yield self.make_batch(pairs, length, max(1, self.training.tokens // length), generator)

    def evaluations(self) -> Iterator[Evaluation]:
        for pairs in self.eval_pairs:
            generator = torch.Generator().manual_seed(EVAL_SEED + pairs)
            inputs, targets = self.make_batch(pairs, 4 * pairs, self.eval_sequences, generator)
            yield Evaluation(inputs, targets, {'pairs': torch.full_like(targets, pairs)})
        for length in self.eval_lengths:
            generator = torch.Generator().manual_seed(EVAL_SEED + self.symbols + length)
            inputs, targets = self.make_batch(self.length_pairs, length, fitting(self.eval_sequences, length), generator)
            yield Evaluation(inputs, targets, {'length': torch.full_like(targets, length)})

    def make_batch(
        self, pairs: int, length: int, sequences: int, generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets `[sequences, length - 1]`; keys of a sequence differ, and only answers are scored."""
        keys = permutations(sequences, self.symbols, generator)[:, :pairs]
        values = torch.randint(self.symbols, 2 * self.symbols, (sequences, pairs), generator=generator)
        order = permutations(sequences, pairs, generator)
        shown = torch.stack((keys, values), dim=-1)
        asked = torch.stack((keys.gather(1, order), values.gather(1, order)), dim=-1)
        units = torch.cat((shown, asked), dim=1)
        # where the units, of two tokens each, begin
        free = length - 4 * pairs
        if free:
            starts = permutations(sequences, 2 * pairs + free, generator)[:, :2 * pairs].sort(1).values
            tokens = torch.randint(2 * self.symbols, 2 * self.symbols + self.fillers, (sequences, length), generator=generator)
        else:
            starts = torch.arange(2 * pairs).expand(sequences, -1)
            tokens = torch.empty(sequences, length, dtype=torch.long)
        starts = starts + torch.arange(2 * pairs)
        tokens.scatter_(1, starts, units[..., 0]).scatter_(1, starts + 1, units[..., 1])
        targets = torch.full((sequences, length - 1), IGNORE)
        targets.scatter_(1, starts[:, pairs:], asked[..., 1])
        return tokens[:, :-1], targets


@dataclass(frozen=True)
class Needles(Synthetic):
    """Needles among distractors (see `evals.synthetic`), in sequences that grow beyond those of training."""
    name = 'needles'

    needles: TokenNeedles
    train_lengths: tuple[int, ...]
    eval_lengths: tuple[int, ...]
    eval_sequences: int

    @property
    def chance(self) -> float:
        return 1 / self.needles.values

    @property
    def panels(self) -> dict[str, Panel]:
        lengths = (min(self.train_lengths), max(self.train_lengths))
        return {'length': Panel('longer sequences', 'tokens in the sequence', lengths)}

    def describe(self) -> str:
        return (
            f'A sequence hides {self.needles.needles} needles, each a marker, a key and a value, among distractors of '
            f'{self.needles.distractors} kinds, and asks for {self.needles.questions} of them at its end. There are '
            f'{self.needles.keys} keys and {self.needles.values} values; training has '
            f'{" or ".join(map(str, self.train_lengths))} tokens.'
        )

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return training_batches(self.needles, self.train_lengths, self.training.tokens, self.training.steps, seed)

    def evaluations(self) -> Iterator[Evaluation]:
        for length in self.eval_lengths:
            inputs, targets, _ = evaluation_batch(self.needles, length, fitting(self.eval_sequences, length))
            yield Evaluation(inputs, targets, {'length': torch.full_like(targets, length)})


class Writes(NamedTuple):
    """A batch of associations; `C` keys of a sequence, in the order in which they are asked for."""
    inputs: torch.Tensor
    targets: torch.Tensor
    # [sequences, C]: how often each key was written, whether the last value was wrong
    counts: torch.Tensor
    last_wrong: torch.Tensor
    # [sequences, C]: how likely the best rule is right
    best: torch.Tensor

    def at_answers(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `[sequences, C]` where the answers are, -1 elsewhere."""
        return torch.full(self.targets.shape, -1, dtype=values.dtype).masked_scatter(self.targets != IGNORE, values)


@dataclass(frozen=True)
class Associations(Synthetic):
    """Pairs of a key and a value, each key written several times in among the others, then each key again.

    `writes` says how often the keys of a sequence are written, one number for each; which keys those are, and the order of all
    writes, is random. Tokens are the keys, then the values.
    """
    # panels that go along the number of writes
    by_writes: ClassVar[tuple[str, ...]]

    keys: int
    values: int
    train_writes: tuple[int, ...]
    # evaluation has sequences as in training, and these, of which the numbers that training lacks are scored
    more_writes: tuple[tuple[int, ...], ...]
    eval_sequences: int

    def __post_init__(self):
        longest = max(map(len, (*self.training_writes(), *self.evaluation_writes(), *self.unseen_writes())))
        if longest > self.keys:
            raise ValueError(f'keys: {self.keys} are too few for the {longest} keys of a sequence')

    def training_writes(self) -> list[tuple[int, ...]]:
        """The writes of which each step of training has one."""
        return [self.train_writes]

    def evaluation_writes(self) -> list[tuple[int, ...]]:
        """Writes as often as in training."""
        return [self.train_writes]

    def unseen_writes(self) -> list[tuple[int, ...]]:
        """Writes more often than in training."""
        return list(self.more_writes)

    @property
    def chance(self) -> float:
        return 1 / self.values

    def describe_writes(self) -> str:
        sizes = ' or '.join(str(len(writes)) for writes in self.training_writes())
        numbers = ', '.join(map(str, sorted(set(self.train_writes))))
        return f'Each of {sizes} keys is written several times ({numbers}) in among the others'

    def draw(self, owner: torch.Tensor, sequences: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Values `[sequences, W]` of writes, those to tell `[sequences, C]`, and how likely the best rule tells them."""
        raise NotImplementedError

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator, choices = torch.Generator().manual_seed(seed), self.training_writes()
        for _ in range(self.training.steps):
            writes = choices[int(torch.randint(len(choices), (), generator=generator))]
            sequences = max(1, self.training.tokens // (2 * (sum(writes) + len(writes))))
            batch = self.make_batch(writes, sequences, generator)
            yield batch.inputs, batch.targets

    def evaluations(self) -> Iterator[Evaluation]:
        as_trained = self.evaluation_writes()
        for i, writes in enumerate((*as_trained, *self.unseen_writes())):
            batch = self.make_batch(writes, self.eval_sequences, torch.Generator().manual_seed(EVAL_SEED + i))
            places = self.places(batch)
            if i >= len(as_trained):
                known = torch.isin(batch.counts, torch.tensor(self.train_writes))
                places = {name: places[name].masked_fill(known, -1) for name in self.by_writes}
            yield Evaluation(
                batch.inputs, batch.targets, {name: batch.at_answers(x) for name, x in places.items()},
                batch.at_answers(batch.best),
            )

    def places(self, batch: Writes) -> dict[str, torch.Tensor]:
        """For each panel, where in it each answer `[sequences, C]` counts."""
        raise NotImplementedError

    def make_batch(self, writes: tuple[int, ...], sequences: int, generator: torch.Generator) -> Writes:
        N, C, W = sequences, len(writes), sum(writes)
        counts = torch.tensor(writes)
        keys = permutations(N, self.keys, generator)[:, :C]
        # writes of one key after another, then those of all keys in the order of time, which keeps that of each key
        owner = torch.arange(C).repeat_interleave(counts)
        written, answers, best = self.draw(owner, N, generator)
        in_time = owner[permutations(N, W, generator)]
        slots = in_time.argsort(dim=1, stable=True)
        values = torch.empty_like(written).scatter_(1, slots, written)

        order = permutations(N, C, generator)
        shown = torch.stack((keys.gather(1, in_time), self.keys + values), dim=-1)
        asked = torch.stack((keys.gather(1, order), self.keys + answers.gather(1, order)), dim=-1)
        tokens = torch.cat((shown, asked), dim=1).flatten(1)
        targets = torch.full((N, 2 * (W + C) - 1), IGNORE)
        targets[:, 2 * W::2] = asked[..., 1]

        last_wrong = (written[:, counts.cumsum(0) - 1] != answers).gather(1, order)
        return Writes(tokens[:, :-1], targets, counts[order], last_wrong, best.gather(1, order))


@dataclass(frozen=True)
class NoisyAssociations(Associations):
    """Each write has the key's true value with probability `reliability`, else another one; the true value is to be told.

    All writes are alike, the last as well: what is wrong shows in nothing but in how often each value was written.
    """
    name = 'noisy associations'
    by_writes = ('last_wrong', 'last_right')

    reliability: float

    @property
    def panels(self) -> dict[str, Panel]:
        seen = (min(self.train_writes), max(self.train_writes))
        return {
            'last_wrong': Panel('last write wrong', 'writes of the key', seen),
            'last_right': Panel('last write right', 'writes of the key', seen),
        }

    def describe(self) -> str:
        return (
            f'{self.describe_writes()}, with its true value in {self.reliability:.0%} of the writes, independently, else with '
            f'another one of {self.values} values. The true value is to be told. The best rule is the value written most '
            'often, at a tie any of them; its score is computed on the sequences of the evaluation.'
        )

    def draw(self, owner, sequences, generator):
        truth = torch.randint(self.values, (sequences, int(owner[-1]) + 1), generator=generator)
        wrong = torch.rand(sequences, len(owner), generator=generator) >= self.reliability
        offset = torch.randint(1, self.values, (sequences, len(owner)), generator=generator)
        written = (truth[:, owner] + wrong * offset) % self.values
        # how often each value was written, [sequences, C, values]
        votes = torch.zeros(*truth.shape, self.values, dtype=torch.long).flatten(1)
        votes.scatter_add_(1, owner * self.values + written, torch.ones_like(written))
        votes = votes.unflatten(1, (-1, self.values))
        winners = votes == votes.amax(-1, keepdim=True)
        best = winners.gather(-1, truth[..., None])[..., 0] / winners.sum(-1)
        return written, truth, best

    def places(self, batch):
        return {
            'last_wrong': batch.counts.masked_fill(~batch.last_wrong, -1),
            'last_right': batch.counts.masked_fill(batch.last_wrong, -1),
        }


def repeat(writes: tuple[int, ...], keys: int) -> tuple[int, ...]:
    return writes * (keys // len(writes))


@dataclass(frozen=True)
class Overwriting(Associations):
    """Each write of a key has another value than the one before; the latest is to be told.

    `train_writes` and `more_writes` are repeated until there are as many as keys in the sequence.
    """
    name = 'overwriting'
    by_writes = ('changes',)

    # numbers of keys in a sequence
    train_keys: tuple[int, ...]
    eval_keys: tuple[int, ...]

    def __post_init__(self):
        if any(keys % len(self.train_writes) for keys in (*self.train_keys, *self.eval_keys)):
            raise ValueError(
                f'train_keys, eval_keys: expected multiples of {len(self.train_writes)}, the length of train_writes, '
                f'got {self.train_keys} and {self.eval_keys}',
            )
        super().__post_init__()

    def training_writes(self):
        return [repeat(self.train_writes, keys) for keys in self.train_keys]

    def evaluation_writes(self):
        return [repeat(self.train_writes, keys) for keys in self.eval_keys]

    def unseen_writes(self):
        return [repeat(writes, max(self.train_keys)) for writes in self.more_writes]

    @property
    def panels(self) -> dict[str, Panel]:
        changes = (min(self.train_writes) - 1, max(self.train_writes) - 1)
        return {
            'keys': Panel('more keys', 'keys in the sequence', (min(self.train_keys), max(self.train_keys))),
            'changes': Panel(f'more changes of {max(self.train_keys)} keys', "changes of the key's value", changes),
        }

    def describe(self) -> str:
        return (
            f'{self.describe_writes()}, each time with another one of {self.values} values than before. The latest is to be '
            'told.'
        )

    def draw(self, owner, sequences, generator):
        W, C = len(owner), int(owner[-1]) + 1
        steps = torch.randint(1, self.values, (sequences, W), generator=generator)
        written = torch.randint(self.values, (sequences, C), generator=generator)[:, owner] + steps.cumsum(1)
        written = written % self.values
        last = torch.bincount(owner).cumsum(0) - 1
        return written, written[:, last], torch.ones(sequences, C)

    def places(self, batch):
        keys = batch.counts.shape[1]
        changes = batch.counts - 1 if keys == max(self.train_keys) else torch.full_like(batch.counts, -1)
        return {'keys': torch.full_like(batch.counts, keys), 'changes': changes}
