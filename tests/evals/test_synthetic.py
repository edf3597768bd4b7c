# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.compare.data import IGNORE
from evals.synthetic import NEEDLE, QUESTION, TokenNeedles, evaluate, evaluation_batch, make_batch, training_batches
from fla_kdn import KDNConfig

SPECS = [TokenNeedles(), TokenNeedles(needles=4), TokenNeedles(needles=4, questions=3, keys=5, values=4, distractors=1)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize('more', [0, 1, 50])
@pytest.mark.parametrize('needles', SPECS)
def test_sequences(needles, more):
    length = needles.min_length + more
    inputs, targets, depths = make_batch(needles, length, 20, generator())
    assert inputs.shape == targets.shape == (20, length)
    assert inputs.max() < needles.vocab_size
    body = length + 1 - 3 * needles.questions
    first_value, first_distractor = 2 + needles.keys, 2 + needles.keys + needles.values
    for x, y, depth in zip(inputs.tolist(), targets.tolist(), depths.tolist(), strict=True):
        starts = [i for i, token in enumerate(x) if token == NEEDLE]
        hidden = {x[i + 1]: x[i + 2] for i in starts}
        assert len(hidden) == len(set(hidden.values())) == len(starts) == needles.needles
        assert all(2 <= key < first_value <= value < first_distractor for key, value in hidden.items())
        # all else before the questions are distractors
        assert sum(token >= first_distractor for token in x) == body - 3 * needles.needles
        places = [i for i, token in enumerate(y) if token != IGNORE]
        assert places == list(range(body + 1, length, 3)) and places[-1] == length - 1
        for i in places:
            assert x[i - 1] == QUESTION and y[i] == hidden[x[i]]
            assert x[i + 1:i + 2] in ([], [y[i]])
        # once in the needle, and once more where it is the answer before another question
        asked = x[places[-1]]
        assert x.count(hidden[asked]) == 1
        start = next(i for i in starts if x[i + 1] == asked)
        assert depth == pytest.approx(start / max(1, body - 3)) and 0 <= depth <= 1


def test_needles_are_at_all_depths():
    *_, depths = make_batch(TokenNeedles(), 30, 2000, generator())
    counts = torch.histc(depths, 5, 0, 1)
    assert (counts > 300).all()


def test_data_follow_the_seed():
    first, again, other = (list(training_batches(SPECS[1], (40, 64), 256, 6, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    assert {x.shape for x, _ in first} == {(6, 40), (4, 64)}
    one, same, two = (evaluation_batch(SPECS[0], 40, 4, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, two)


@pytest.mark.parametrize(('options', 'match'), [
    ({'questions': 2}, 'questions <= needles'),
    ({'needles': 65, 'values': 100}, 'needles <= keys'),
    ({'needles': 4, 'values': 3}, 'values'),
    ({'distractors': 0}, 'distractors'),
])
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        TokenNeedles(**options)


def test_a_length_without_room_is_refused():
    with pytest.raises(ValueError, match='length: expected at least 5 tokens'):
        make_batch(TokenNeedles(), 4, 1, generator())


class Reader(torch.nn.Module):
    """Looks up the value of the last key."""
    device = torch.device('cpu')

    def __init__(self, needles: TokenNeedles, right: bool):
        super().__init__()
        self.needles, self.right = needles, right

    def forward(self, input_ids: torch.Tensor, use_cache: bool):
        logits = torch.zeros(*input_ids.shape, self.needles.vocab_size)
        for row, x in enumerate(input_ids.tolist()):
            logits[row, -1, x[x.index(x[-1]) + 1] if self.right else 0] = 1
        return SimpleNamespace(logits=logits)


def test_evaluation_counts_right_answers():
    assert evaluate(Reader(SPECS[1], right=True), SPECS[1], (30, 60), sequences=8) == {30: 1.0, 60: 1.0}
    assert evaluate(Reader(SPECS[1], right=False), SPECS[1], (30,), sequences=8) == {30: 0.0}


def test_a_small_model_learns_it_and_finds_needles_in_longer_texts():
    needles = TokenNeedles(keys=8, values=8, distractors=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KDNConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=1,
        head_dim=32,
        intermediate_size=64,
        vocab_size=needles.vocab_size,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in training_batches(needles, (12, 20), 1024, 60, seed=0):
        loss = F.cross_entropy(model(input_ids=inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.training
    accuracy = evaluate(model, needles, (20, 80), sequences=64)
    assert accuracy[20] > 0.9 and accuracy[80] > 0.8, accuracy
    assert model.training
