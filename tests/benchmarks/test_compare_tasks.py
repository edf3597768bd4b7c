# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The synthetic tasks, against plain loops over their sequences."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.compare import summary, tasks
from benchmarks.compare.data import IGNORE
from benchmarks.compare.tasks import Evaluation, Needles, NoisyAssociations, Overwriting, Recall, Training
from evals.synthetic import TokenNeedles

TRAINING = Training(steps=20, tokens=256, learning_rates=(1e-3,))
SIZES = {'keys': 12, 'values': 5, 'train_writes': (1, 2, 4), 'more_writes': ((4, 8), (16, 16)), 'eval_sequences': 64}
RECALL = Recall(TRAINING, symbols=16, train_pairs=(2, 8), eval_pairs=(4, 16), eval_sequences=8)
SCATTERED = replace(RECALL, fillers=6, train_stretch=(1, 2), eval_lengths=(20, 40, 80), length_pairs=5)
NOISY = NoisyAssociations(TRAINING, **SIZES, reliability=0.6)
OVERWRITING = Overwriting(TRAINING, **SIZES, train_keys=(3, 6), eval_keys=(3, 6, 9))
NEEDLES = Needles(TRAINING, TokenNeedles(keys=4, values=4, distractors=4), (16, 24), (16, 32), eval_sequences=8)
TASKS = [RECALL, SCATTERED, NOISY, OVERWRITING, NEEDLES]
TASK_IDS = ['recall', 'scattered', 'noisy', 'overwriting', 'needles']


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize('length', [20, 33])
def test_recall_answers_are_those_shown(length):
    pairs = 5
    inputs, targets = SCATTERED.make_batch(pairs, length, 7, generator())
    assert inputs.shape == targets.shape == (7, length - 1)
    symbols = SCATTERED.symbols
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        asked = [i for i, token in enumerate(y) if token != IGNORE]
        assert len(asked) == pairs
        # what is said before the first question
        shown = {x[i]: x[i + 1] for i in range(asked[0]) if x[i] < symbols}
        assert len(shown) == pairs and all(symbols <= value < 2 * symbols for value in shown.values())
        # an answer stands where its key is read, and every key is asked
        assert {x[i]: y[i] for i in asked} == shown
        # the next input is the answer
        assert all(x[i + 1] == y[i] for i in asked if i + 1 < len(x))
        others = [token for token in x if token >= 2 * symbols]
        # inputs lack the last token of the sequence, the last answer or one without a meaning
        assert len(others) == length - 4 * pairs - (asked[-1] + 1 < len(x))
        assert all(token < 2 * symbols + SCATTERED.fillers for token in others)


def test_pairs_stand_anywhere():
    inputs, _ = SCATTERED.make_batch(2, 40, 400, generator())
    at = (inputs < SCATTERED.symbols).float().mean(0)
    # no position that always, or never, holds a key, but the last, where only an answer could stand behind it
    assert at.min() > 0 and at.max() < 0.5


def read_writes(batch, keys: int) -> list[tuple[dict, dict]]:
    """For each sequence: what was written to each key, with its place, and the answer to each, with its place."""
    sequences = []
    for x, y in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        asked = [i for i, token in enumerate(y) if token != IGNORE]
        written, answers = defaultdict(list), {}
        for i in range(0, asked[0], 2):
            assert x[i] < keys <= x[i + 1]
            written[x[i]].append((x[i + 1], i + 1))
        for i in asked:
            assert x[i] not in answers
            answers[x[i]] = y[i], i
        assert asked == list(range(asked[0], len(x), 2))
        assert all(x[i + 1] == y[i] for i in asked[:-1])
        assert written.keys() == answers.keys()
        sequences.append((written, answers))
    return sequences


@pytest.mark.parametrize('task', [NOISY, OVERWRITING], ids=['noisy', 'overwriting'])
def test_facts_of_associations_are_those_of_the_sequence(task):
    batch = task.make_batch(SIZES['train_writes'], 50, generator())
    for n, (written, answers) in enumerate(read_writes(batch, task.keys)):
        assert sorted(len(x) for x in written.values()) == sorted(SIZES['train_writes'])
        for c, (key, (answer, place)) in enumerate(answers.items()):
            value, _ = written[key][-1]
            assert batch.counts[n, c] == len(written[key])
            assert batch.last_wrong[n, c] == (value != answer)
            assert batch.at_answers(batch.counts)[n, place] == len(written[key])


def test_latest_value_is_asked_and_every_write_changes_it():
    batch = OVERWRITING.make_batch((1, 2, 8), 200, generator())
    for written, answers in read_writes(batch, OVERWRITING.keys):
        for key, writes in written.items():
            values = [value for value, _ in writes]
            assert answers[key][0] == values[-1]
            assert all(x != y for x, y in zip(values, values[1:], strict=False))
    assert not batch.last_wrong.any() and (batch.best == 1).all()


def test_true_value_is_written_as_often_as_promised_and_nothing_tells_when():
    batch = NOISY.make_batch((8, 8), 3000, generator())
    right = torch.tensor([
        [value == answers[key][0] for value, _ in writes]
        for written, answers in read_writes(batch, NOISY.keys) for key, writes in written.items()
    ]).float()
    error = math.sqrt(0.6 * 0.4 / len(right))
    # the same at the first and at the last write
    assert (right.mean(0) - 0.6).abs().max() < 4 * error
    # and independent of the write before
    assert abs(torch.corrcoef(right[:, :2].T)[0, 1]) < 4 / math.sqrt(len(right))


def test_best_rule_is_bayes_rule():
    """The posterior of the true value, from the likelihood of every write; its mode, any of several, as a chance of each."""
    batch = NOISY.make_batch((1, 2, 3, 5), 200, generator())
    values, right = NOISY.values, math.log(NOISY.reliability)
    wrong = math.log((1 - NOISY.reliability) / (values - 1))
    for n, (written, answers) in enumerate(read_writes(batch, NOISY.keys)):
        for c, (key, (answer, _)) in enumerate(answers.items()):
            likelihood = [
                sum(right if value - NOISY.keys == truth else wrong for value, _ in written[key]) for truth in range(values)
            ]
            modes = [truth for truth in range(values) if likelihood[truth] > max(likelihood) - 1e-9]
            expected = (answer - NOISY.keys in modes) / len(modes)
            assert batch.best[n, c].item() == pytest.approx(expected)


def test_best_rule_scores_what_it_does_on_the_evaluation():
    """A majority vote by hand, with the expectation over ties, gives the score that a report shows."""
    batch = NOISY.make_batch(SIZES['train_writes'], SIZES['eval_sequences'], generator(2**31))
    scores = defaultdict(list)
    for written, answers in read_writes(batch, NOISY.keys):
        for key, writes in written.items():
            votes = Counter(value for value, _ in writes)
            winners = [value for value, count in votes.items() if count == max(votes.values())]
            wrong = writes[-1][0] != answers[key][0]
            scores['last_wrong' if wrong else 'last_right', len(writes)].append((answers[key][0] in winners) / len(winners))
    best = NOISY.best()
    for (panel, count), found in scores.items():
        assert best[panel][str(count)] == pytest.approx(sum(found) / len(found))
    # one write that is wrong tells nothing; a guess without it would be right more often
    assert best['last_wrong']['1'] == 0 and best['last_right']['1'] == 1
    assert best['last_wrong']['16'] > best['last_wrong']['2']


def test_sequences_beyond_training_score_only_what_training_lacks():
    assert list(NOISY.best()['last_right']) == ['1', '2', '4', '8', '16']
    assert list(OVERWRITING.best()['changes']) == ['0', '1', '3', '7', '15']
    few, as_trained, many, more, _ = OVERWRITING.evaluations()
    assert set(few.places) == set(as_trained.places) == {'keys', 'changes'} and set(more.places) == {'changes'}
    # changes count where there are as many keys as training has at most
    for evaluation, keys, changes in ((few, 3, {-1}), (as_trained, 6, {0, 1, 3}), (many, 9, {-1})):
        answers = evaluation.targets != IGNORE
        assert answers.sum() == keys * SIZES['eval_sequences']
        assert (evaluation.places['keys'][answers] == keys).all() and (evaluation.places['keys'][~answers] == -1).all()
        assert set(evaluation.places['changes'][answers].tolist()) == changes
    scored = more.places['changes'][more.targets != IGNORE]
    # of the keys written 4 and 8 times one half
    assert set(scored.tolist()) == {-1, 7} and (scored == 7).sum() == 3 * SIZES['eval_sequences']


def test_steps_of_overwriting_have_each_number_of_keys():
    found = {int((targets != IGNORE).sum(1).unique()) for _, targets in OVERWRITING.batches(seed=0)}
    assert found == {3, 6}


def test_long_sequences_are_fewer(monkeypatch):
    monkeypatch.setattr(tasks, 'LONG_EVAL_TOKENS', 120)
    for task in (SCATTERED, NEEDLES):
        sizes = {x.inputs.shape for x in task.evaluations() if 'length' in x.places}
        assert {rows for rows, _ in sizes} == {min(8, 120 // length) for length in task.eval_lengths}


@pytest.mark.parametrize('task', TASKS, ids=TASK_IDS)
def test_data_follow_the_seed_and_the_evaluation_is_always_the_same(task):
    first, again, other = ([x for x, _ in task.batches(seed)] for seed in (0, 0, 1))
    assert len(first) == TRAINING.steps
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    evaluations, torch_state = list(task.evaluations()), torch.manual_seed(1)
    for x, y in zip(evaluations, task.evaluations(), strict=True):
        assert torch.equal(x.inputs, y.inputs) and torch.equal(x.targets, y.targets)
    assert torch_state.initial_seed() == 1


@pytest.mark.parametrize('task', TASKS, ids=TASK_IDS)
def test_a_model_that_knows_the_answers_is_right_and_one_that_does_not_is_wrong(task):
    """Every place of every panel is scored, and by the answers alone."""
    known = {tuple(x.inputs[0].tolist()): x for x in task.evaluations()}

    def respond(input_ids, use_cache, shift):
        evaluation = known[tuple(input_ids[0].tolist())]
        answers = evaluation.targets.clamp(min=0) + shift
        return SimpleNamespace(logits=torch.nn.functional.one_hot(answers, 100).float())

    for shift, accuracy in ((0, 1.0), (1, 0.0)):
        def model(input_ids, use_cache, shift=shift):
            return respond(input_ids, use_cache, shift)

        model.device = torch.device('cpu')
        found = task.evaluate(model, bf16=False)['accuracy']
        assert {panel: list(places) for panel, places in found.items()} == {
            panel: list(places) for panel, places in task.best().items()
        }
        assert {value for places in found.values() for value in places.values()} == {accuracy}


def test_scores_are_means_over_the_targets_of_a_place():
    targets = torch.tensor([[1, IGNORE, 1], [1, 1, IGNORE]])
    places = torch.tensor([[4, 4, 8], [4, -1, 4]])
    values = torch.tensor([[1., 1., 0.], [0., 1., 1.]])
    assert RECALL.average([(Evaluation(targets, targets, {'pairs': places}), values)]) == {'pairs': {'4': 0.5, '8': 0.0}}


@pytest.mark.parametrize(('make', 'match'), [
    (lambda: replace(RECALL, eval_pairs=(17,)), 'symbols'),
    (lambda: replace(SCATTERED, fillers=0), 'fillers'),
    (lambda: replace(NOISY, keys=2), 'keys'),
    (lambda: replace(OVERWRITING, keys=8), 'keys: 8'),
    (lambda: replace(OVERWRITING, eval_keys=(4,)), 'eval_keys'),
])
def test_sizes_that_do_not_fit_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_no_seed_trains_on_the_evaluation():
    for x, pairs in zip(RECALL.evaluations(), RECALL.eval_pairs, strict=True):
        assert not torch.equal(x.inputs, RECALL.make_batch(pairs, 4 * pairs, 8, generator(pairs))[0])


def test_a_step_has_a_sequence_at_least():
    assert len(next(replace(RECALL, training=replace(TRAINING, tokens=4)).batches(0))[0]) == 1


@pytest.mark.parametrize('task', [RECALL, SCATTERED], ids=['recall', 'scattered'])
def test_panels_say_what_training_has(task):
    for name, panel in task.panels.items():
        sizes = set()
        for x, y in task.batches(0):
            pairs = int((y[0] != IGNORE).sum())
            sizes.add(pairs if name == 'pairs' else (x.shape[1] + 1) // pairs * task.length_pairs)
        assert (min(sizes), max(sizes)) == panel.trained


# ---- summary


def test_spread_is_that_of_a_sample():
    assert summary.spread_of([1., 3.])['spread'] == pytest.approx(2 ** 0.5) and summary.spread_of([1.])['spread'] is None


def test_no_two_mixers_are_best():
    column = summary.Column('x', lambda x: x['v'], summary.percent, max)
    values = {'a': {'v': 0.5}, 'b': {'v': 0.50001}, 'c': {'v': 0.1}}
    assert [best for _, best in summary.cells(column, values)] == [False] * 3
    assert [best for _, best in summary.cells(column, values | {'b': {'v': 0.6}})] == [False, True, False]


def test_headline_is_the_hardest_of_training():
    values = {pairs: {'mean': 1., 'spread': None, 'values': [1.]} for pairs in ('4', '16')}
    mixer = {'losses_by_rate': {}, 'accuracy_by_rate': {}, 'accuracy': {'recall': {'pairs': values}}}
    about = summary.describe_task(RECALL)
    about['panels']['pairs']['trained'] = (2, 16)
    content = {'settings': {'seeds': [0]}, 'tasks': {'recall': about}, 'mixers': {'kda': mixer}}
    assert next(x for x in summary.blocks_of(content) if x.task == 'recall').headline.title == '16'
