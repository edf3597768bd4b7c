# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The example on uncertainty: what its signals and its AUROCs are, and that it runs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'examples'))
import uncertainty as example  # noqa: E402

from fla_kdn.ops.kdn import naive_recurrent_exact_kdn  # noqa: E402


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize('levels', [3, 1000])
def test_auroc(levels):
    """Against all pairs, with many ties and with few."""
    scores = torch.randint(levels, (60,), generator=generator()).float()
    positive = torch.rand(60, generator=generator(1)) > 0.7
    wins = [float(a > b) + 0.5 * float(a == b) for a in scores[positive] for b in scores[~positive]]
    assert example.auroc(scores, positive) == pytest.approx(sum(wins) / len(wins), abs=1e-12)
    assert example.auroc(-scores, positive) == pytest.approx(1 - sum(wins) / len(wins), abs=1e-12)
    assert example.auroc(positive.float(), positive) == 1 and example.auroc(torch.zeros(60), positive) == 0.5


def test_probe():
    """It finds the direction that tells, whatever the units of the features."""
    x = torch.randn(4000, 5, generator=generator())
    logits = x @ torch.tensor([1., -2., 0., 0., 0.5]) + 1
    positive = torch.rand(4000, generator=generator(1)) < logits.sigmoid()
    scores = example.probe(x[:2000], positive[:2000])(x[2000:])
    best = example.auroc(logits[2000:], positive[2000:])
    assert best > 0.85 and example.auroc(scores, positive[2000:]) > best - 0.01
    units, shift = torch.tensor([1e3, 1., 1e-3, 10., 1.]), torch.tensor([0., 50., 0., -3., 0.])
    other = example.probe(x[:2000] * units + shift, positive[:2000])(x[2000:] * units + shift)
    assert_close(other, scores, 1e-2)


def make_answers(questions: int, **signals: torch.Tensor) -> example.Answers:
    """Noise, but for the signals that are given."""
    shown = torch.rand(questions, generator=generator(1)) > 0.4
    right = shown & (torch.rand(questions, generator=generator(2)) > 0.4)
    names = ('softmax', 'read variance', 'key variance', 'innovation', 'full covariance')
    noise = {name: torch.randn(questions, 2, generator=generator(i)) for i, name in enumerate(names, start=3)}
    return example.Answers(shown, right, noise | signals)


def test_judge():
    noise = example.judge(make_answers(4000))
    assert all(abs(x - 0.5) < 0.05 for result in noise.values() for x in result.values())
    answers = make_answers(4000)
    told = answers.right.float()[:, None].expand(-1, 2)
    result = example.judge(answers._replace(signals=answers.signals | {'read variance': -told}))['right']
    assert result['read variance'] == result['softmax + these of KDN'] == 1
    assert abs(result['softmax + full covariance'] - 0.5) < 0.05
    result = example.judge(answers._replace(signals=answers.signals | {'softmax': told}))['right']
    # surer is a larger probability, and a smaller entropy
    assert result['largest probability'] == 1 and result['entropy'] == 0 and result['softmax'] == 1


def test_judge_does_not_learn_from_what_it_judges():
    """Features enough to learn the noise by heart."""
    answers = make_answers(300, **{'full covariance': torch.randn(300, 100, generator=generator())})
    fitted = example.probe(answers.signals['full covariance'], answers.shown)(answers.signals['full covariance'])
    assert example.auroc(fitted, answers.shown) > 0.85
    assert abs(example.judge(answers)['shown']['full covariance'] - 0.5) < 0.15


def test_judge_of_too_few():
    answers = make_answers(4000)
    few = answers._replace(right=answers.shown & (torch.arange(4000) != answers.shown.nonzero()[0]))
    result = example.judge(few)
    assert all(map(math.isnan, result['right'].values())) and not any(map(math.isnan, result['shown'].values()))


def test_spread():
    assert example.spread([0.5, 0.7, 0.6]) == '0.60 ±0.10'
    assert example.spread([0.5, math.nan]) == '–'


@pytest.mark.parametrize('covariance', example.COVARIANCES)
def test_ask(covariance):
    """The same as reading every sequence with its question, and with its answer, from the start."""
    model = example.train(covariance, 0, steps=2, advance=lambda: None)
    keys, values = example.make_pairs(5, 3, generator())
    assert all(len(set(row)) == 5 for row in keys.tolist()) and keys.max() < example.SYMBOLS <= values.min()
    # one of two values is the answer, so that some answers are right
    direction = 0.2 * torch.randn(64, generator=generator(1))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[100], model.lm_head.weight[101] = direction, -direction
    values = 100 + values % 2
    answers = example.ask(model, keys, values)
    context = torch.stack((keys, values), -1).flatten(1).repeat_interleave(example.SYMBOLS, 0)
    questions = torch.arange(example.SYMBOLS).repeat(3)[:, None]
    with torch.no_grad():
        logits = model(torch.cat((context, questions), 1), use_cache=False).logits[:, -1]
        told = torch.cat((context, questions, logits.argmax(-1, keepdim=True)), 1)
        layers = model(told, use_cache=False, output_uncertainty='log_likelihood', output_hidden_states=True)
    pairs = [dict(zip(k, v, strict=True)) for k, v in zip(keys.tolist(), values.tolist(), strict=True)]
    truth = [row.get(key) for row in pairs for key in range(example.SYMBOLS)]
    assert answers.shown.tolist() == [x is not None for x in truth]
    assert answers.right.tolist() == [x == y for x, y in zip(truth, logits.argmax(-1).tolist(), strict=True)]
    assert 0 < answers.right.sum() < answers.shown.sum() == 15

    probabilities = logits.double().softmax(-1)
    entropy = torch.distributions.Categorical(probabilities).entropy()
    V = model.config.head_dim
    full = []
    with torch.no_grad():
        for block, x in zip(model.model.layers, layers.hidden_states, strict=False):
            inputs = block.attn.filter_inputs(block.attn_norm(x))
            if covariance == 'isotropic':
                inputs['omega'] = inputs['omega'][..., None].expand(*inputs['omega'].shape, 32)
            v = torch.zeros(*inputs['r'].shape, 1)
            *_, exact = naive_recurrent_exact_kdn(
                **inputs, v=v, initial_cov=block.attn.prior_covariance(), output_uncertainty=True)
            full.append(exact.read_variance[:, -2])
    likelihoods = [-2 * x.log_likelihood - V * (2 * math.pi * x.innovation_variance).log() for x in layers.uncertainty]
    want = {
        'softmax': torch.stack((probabilities.amax(-1).logit(), entropy.log()), 1),
        'read variance': torch.cat([x.read_variance[:, -2] for x in layers.uncertainty], 1).log(),
        'key variance': torch.cat([x.key_variance[:, -1] for x in layers.uncertainty], 1).log(),
        'innovation': torch.cat([x[:, -1] / V for x in likelihoods], 1).log(),
        'full covariance': torch.cat(full, 1).log(),
    }
    assert answers.signals.keys() == want.keys()
    for name, x in want.items():
        assert_close(answers.signals[name], x, 1e-4, name)


def test_main(monkeypatch, capsys, tmp_path):
    sizes = {'PAIRS': (1, 2), 'TRAINED_PAIRS': (1, 2), 'TOKENS_PER_STEP': 64, 'SEQUENCES': 4, 'MIN_COUNT': 1}
    for name, value in sizes.items():
        monkeypatch.setattr(example, name, value)
    example.main(['--seeds', '2', '--steps', '3', '--out', str(tmp_path)])
    output = capsys.readouterr().out
    for text in (*example.COVARIANCES, *example.ROWS, *example.TASKS.values(), 'share of right answers'):
        assert text in output
    assert output.count('of answers on 2 pairs are right') == 4
    assert output.count('±') >= 2 * len(example.ROWS) * 2
    assert (tmp_path / 'uncertainty.png').stat().st_size > 10_000


def test_errors(capsys):
    for name in ('seeds', 'steps'):
        with pytest.raises(SystemExit):
            example.main([f'--{name}', '0'])
        assert f'--{name}: expected at least 1, got 0' in capsys.readouterr().err
