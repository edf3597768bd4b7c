# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""
Does a memory know what it does not know? Small models learn to recall key-value pairs. Then each is asked, from a kept cache,
for every key there is, shown or not, and two things are predicted: was the key ever shown, and if so, is the answer right?

    pip install -e '.[compare]'
    python examples/uncertainty.py

It downloads nothing and takes about ten minutes on a CPU. What was found, as AUROC, the mean of three models of each variant
(2 layers, 2 heads, K = 32; of variances by a logistic regression on those of all heads):

    was the key ever shown?        diagonal, pairs shown:  1     2     8    32     isotropic:  1     2     8    32
    largest probability                                  0.90  0.95  0.99  0.84              0.92  0.95  0.99  0.81
    KDN's read variance q^T P q                          0.99  0.83  0.59  0.53              0.70  0.68  0.60  0.54
    read variance, full covariance                       1.00  1.00  0.97  0.79              0.98  0.97  0.92  0.73
    softmax and full covariance                          1.00  1.00  1.00  0.89              0.99  0.99  1.00  0.85

- The idea is sound, the two approximations lose it. An exact Kalman filter that is given the same keys, queries,
  decays and noise knows which keys were shown, and something that the softmax does not. But a diagonal covariance
  tells channels apart, not keys, and a few keys use all channels; an isotropic one is the same for all keys. (In
  isotropic models only the second layer tells anything: its noise depends on what the first has read.)
- So KDN's own variances foretell little once a memory holds several keys, at the question or at the answer, alone or
  beside the softmax. Larger heads do not mend it (64 channels, one model: 0.61 at 8 pairs, 0.56 at 32), nor does
  `info_scale=1` (one model: 0.93 at 2 pairs, 0.67 at 8).
- How much the memory would be surprised by the model's own answer (its innovation) says more than the variances from
  two pairs on, but differs from model to model.
- Whether an answer about a key that *was* shown is right is best told by the largest probability (0.90 at 32 pairs,
  diagonal; full covariance 0.65, KDN's variances 0.5), and nothing here adds to it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup, set_seed

from fla_kdn import KDNConfig
from fla_kdn.models.optim import parameter_groups
from fla_kdn.ops.kdn import naive_recurrent_exact_kdn

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

COVARIANCES = ('diagonal', 'isotropic')
# keys are the tokens below, values those from here on
SYMBOLS = 64
TRAINED_PAIRS = (2, 4, 8, 16)
PAIRS = (1, 2, 4, 8, 16, 32, 48)
TOKENS_PER_STEP = 2048
LEARNING_RATE = 2e-3
# memories that are asked, for each number of pairs; the probes learn from the first half and are judged by the second
SEQUENCES = 64
# of fewer right, or wrong, answers in a half no AUROC is told
MIN_COUNT = 20

# ---- a model that recalls


def make_pairs(pairs: int, sequences: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, which differ in a sequence, and their values, both `[sequences, pairs]`."""
    keys = torch.rand(sequences, SYMBOLS, generator=generator).argsort(1)[:, :pairs]
    return keys, torch.randint(SYMBOLS, 2 * SYMBOLS, (sequences, pairs), generator=generator)


def train(covariance: str, seed: int, steps: int, advance: Callable[[], None]) -> PreTrainedModel:
    """A model of 0.15M parameters that has read `k1 v1 k2 v2 ...`, then each key again, in another order, and its value."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(KDNConfig(
        covariance=covariance,
        vocab_size=2 * SYMBOLS,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=32,
        intermediate_size=160,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
    ))
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pairs = TRAINED_PAIRS[int(torch.randint(len(TRAINED_PAIRS), (), generator=generator))]
        keys, values = make_pairs(pairs, TOKENS_PER_STEP // (4 * pairs), generator)
        order = torch.rand(keys.shape, generator=generator).argsort(1)
        shown = torch.stack((keys, values), -1).flatten(1)
        asked = torch.stack((keys.gather(1, order), values.gather(1, order)), -1).flatten(1)
        logits = model(torch.cat((shown, asked), 1), use_cache=False).logits[:, 2 * pairs::2]
        F.cross_entropy(logits.flatten(0, 1), asked[:, 1::2].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        advance()
    return model.eval()


# ---- asked from a kept cache


class Answers(NamedTuple):
    """Of each question, those of a sequence together: `[questions]`, and signals `[questions, features]`."""

    shown: torch.Tensor
    right: torch.Tensor
    signals: dict[str, torch.Tensor]


@torch.no_grad()
def ask(model: PreTrainedModel, keys: torch.Tensor, values: torch.Tensor) -> Answers:
    """Let a model read pairs `[sequences, pairs]` once, then ask it for every key, each time from the same memory."""
    context = torch.stack((keys, values), -1).flatten(1)
    questions = torch.arange(SYMBOLS).repeat(len(keys)).unsqueeze(1)
    read = model(context, use_cache=True, output_hidden_states=True)
    cache = read.past_key_values
    cache.batch_repeat_interleave(SYMBOLS)
    # without `use_cache` nothing is written into it
    asked = model(questions, past_key_values=cache, use_cache=False, output_hidden_states=True)
    # the surest differ far behind the comma
    probabilities = asked.logits[:, -1].double().softmax(-1)
    answers = probabilities.argmax(-1, keepdim=True)
    # what the memory would say if it were told its own answer
    told = torch.cat((questions, answers), 1)
    layers = model(told, past_key_values=cache, use_cache=False, output_uncertainty='log_likelihood').uncertainty
    truth = torch.full((len(keys), SYMBOLS), -1).scatter(1, keys, values).flatten()

    def of_heads(value: Callable, token: int) -> torch.Tensor:
        return torch.cat([value(i, x)[:, token] for i, x in enumerate(layers)], 1).log()

    def squared_z(i: int, x) -> torch.Tensor:
        V = model.model.layers[i].attn.head_v_dim
        return -2 / V * x.log_likelihood - (2 * math.pi * x.innovation_variance).log()

    entropy = torch.special.entr(probabilities).sum(-1)
    signals = {
        'softmax': torch.stack((probabilities.amax(-1).logit(eps=1e-12), entropy.clamp(min=1e-12).log()), 1),
        'read variance': of_heads(lambda i, x: x.read_variance, 0),
        # a short convolution lets the token of a value be stored under the key before it
        'key variance': of_heads(lambda i, x: x.key_variance, 1),
        'innovation': of_heads(squared_z, 1),
        'full covariance': full_read_variance(model, read.hidden_states, asked.hidden_states).log(),
    }
    return Answers(truth >= 0, truth == answers.squeeze(1), {name: x.float() for name, x in signals.items()})


@torch.no_grad()
def full_read_variance(
    model: PreTrainedModel,
    context: tuple[torch.Tensor, ...],
    questions: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """
    `q^T P q` `[questions, layers * heads]` of exact Kalman filters that are given the keys, queries, decays and noise of the
    model, from its hidden states: of each layer `[sequences, T, hidden_size]` and `[questions, 1, hidden_size]`.
    """
    variances = []
    for block, past, last in zip(model.model.layers, context, questions, strict=False):
        layer = block.attn

        def told(x: torch.Tensor, block=block, layer=layer) -> dict[str, torch.Tensor]:
            inputs = layer.filter_inputs(block.attn_norm(x))
            if layer.covariance == 'isotropic':
                inputs['omega'] = inputs['omega'].unsqueeze(-1).expand_as(inputs['g'])
            # variances do not depend on values
            return inputs | {'v': torch.zeros_like(inputs['r']).unsqueeze(-1)}

        _, _, cov = naive_recurrent_exact_kdn(**told(past), initial_cov=layer.prior_covariance(), output_final_state=True)
        # a question and the tokens before it that the short convolutions see
        last = torch.cat((past[:, 1 - layer.conv_size:].repeat_interleave(SYMBOLS, 0), last), 1)
        last = {name: x[:, -1:] for name, x in told(last).items()}
        cov = cov.repeat_interleave(SYMBOLS, 0)
        variances.append(naive_recurrent_exact_kdn(**last, initial_cov=cov, output_uncertainty=True)[3].read_variance[:, 0])
    return torch.cat(variances, 1)


# ---- how well a signal tells

TASKS = {'shown': 'Was the key ever shown?', 'right': 'Shown keys: is the answer right?'}
# signals that a logistic regression is given
PROBES = {
    'read variance': ('read variance',),
    'key variance': ('key variance',),
    "answer's innovation": ('innovation',),
    'full covariance': ('full covariance',),
    'softmax': ('softmax',),
    'softmax + these of KDN': ('softmax', 'read variance', 'key variance', 'innovation'),
    'softmax + full covariance': ('softmax', 'full covariance'),
}
ROWS = ('largest probability', 'entropy', *PROBES)


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """How often a positive has a higher score than a negative, ties counting half; both `[N]`."""
    _, group, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[group].double()
    n = int(positive.sum())
    return ((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n))).item()


def probe(features: torch.Tensor, positive: torch.Tensor, penalty: float = 0.01) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logistic regression on features `[N, F]`, in units of their standard deviation; returns a function to scores `[M]`."""
    mean, std = features.mean(0), features.std(0) + 1e-9
    weight = torch.zeros(features.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn='strong_wolfe')

    def scores(x: torch.Tensor) -> torch.Tensor:
        return ((x - mean) / std).double() @ weight[1:] + weight[0]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(scores(features), positive.double())
        loss = loss + penalty / 2 * weight[1:].square().sum()
        loss.backward()
        return loss

    optimizer.step(loss)
    weight.requires_grad_(False)
    return scores


def judge(answers: Answers) -> dict[str, dict[str, float]]:
    """AUROC of every row for both tasks, on the second half; NaN where there are too few of a kind."""
    first = torch.arange(len(answers.shown)) < len(answers.shown) // 2
    result = {}
    for task, positive, asked in (
        ('shown', answers.shown, torch.ones_like(answers.shown)),
        ('right', answers.right, answers.shown),
    ):
        fit, test = asked & first, asked & ~first
        counts = [int((half & kind).sum()) for half in (fit, test) for kind in (positive, ~positive)]
        if min(counts) < MIN_COUNT:
            result[task] = dict.fromkeys(ROWS, math.nan)
            continue
        largest, entropy = answers.signals['softmax'].T
        scores = {'largest probability': largest[test], 'entropy': -entropy[test]}
        for row, names in PROBES.items():
            features = torch.cat([answers.signals[name] for name in names], 1)
            scores[row] = probe(features[fit], positive[fit])(features[test])
        result[task] = {row: auroc(x, positive[test]) for row, x in scores.items()}
    return result


# ---- what is shown of it


def spread(values: list[float]) -> str:
    """Mean of the seeds and half their range."""
    return '–' if any(map(math.isnan, values)) else f'{sum(values) / len(values):.2f} ±{(max(values) - min(values)) / 2:.2f}'


def make_table(covariance: str, accuracy: dict[int, list[float]], results: dict[int, list[dict]]) -> Table:
    table = Table('AUROC', *map(str, PAIRS), title=f'{covariance}, by the number of pairs shown', title_justify='left')
    table.add_row('share of right answers', *(spread(accuracy[pairs]) for pairs in PAIRS), end_section=True)
    for task, title in TASKS.items():
        table.add_row(title)
        for row in ROWS:
            table.add_row(f'  {row}', *(spread([x[task][row] for x in results[pairs]]) for pairs in PAIRS))
        table.add_section()
    return table


# what is drawn of the rows
LINES = {
    'largest probability': ('largest probability', '#222222', '-'),
    'read variance': ("KDN's read variance", '#d6452e', '-'),
    'full covariance': ('read variance of a full covariance', '#2f6fb0', '-'),
    'softmax + full covariance': ('softmax and full covariance', '#2f6fb0', ':'),
}


def plot(results: dict[str, dict[int, list[dict]]]) -> Figure:
    """How well it is told which keys were shown, against the number of pairs; bands are the range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout='constrained')
    axes = figure.subplots(1, len(results), sharey=True)
    for axis, (covariance, by_pairs) in zip(axes, results.items(), strict=True):
        for name, (label, colour, style) in LINES.items():
            values = torch.tensor([[x['shown'][name] for x in by_pairs[pairs]] for pairs in PAIRS])
            axis.plot(PAIRS, values.mean(1), style, color=colour, label=label, marker='o', markersize=3.5)
            axis.fill_between(PAIRS, values.amin(1), values.amax(1), color=colour, alpha=0.12, linewidth=0)
        axis.axhline(0.5, color='grey', linewidth=0.8, linestyle='--')
        axis.axvspan(max(TRAINED_PAIRS), max(PAIRS) * 1.1, color='grey', alpha=0.08, linewidth=0)
        axis.set_xscale('log', base=2)
        axis.set(title=covariance, xlim=(min(PAIRS) / 1.1, max(PAIRS) * 1.1), ylim=(0.45, 1.02))
        axis.set_xticks(PAIRS, PAIRS)
        axis.set_xlabel('pairs in the memory (grey: more than trained on)')
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].set_ylabel('AUROC (0.5 is chance)')
    figure.suptitle(TASKS['shown'])
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=len(LINES), frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description='What a KDN memory knows of what it knows.')
    parser.add_argument('--seeds', type=int, default=3, help='models of each variant')
    parser.add_argument('--steps', type=int, default=600, help='training steps of each model')
    parser.add_argument('--out', type=Path, default=Path('runs/uncertainty'), help='folder of the plot')
    args = parser.parse_args(argv)
    for name in ('seeds', 'steps'):
        if getattr(args, name) < 1:
            parser.error(f'--{name}: expected at least 1, got {getattr(args, name)}')
    console, results = Console(width=150), {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task('', total=len(COVARIANCES) * args.seeds * (args.steps + len(PAIRS)))
        for covariance in COVARIANCES:
            results[covariance], accuracy = {pairs: [] for pairs in PAIRS}, {pairs: [] for pairs in PAIRS}
            for seed in range(args.seeds):
                progress.update(bar, description=f'{covariance}, seed {seed}')
                model = train(covariance, seed, args.steps, lambda: progress.advance(bar))
                for pairs in PAIRS:
                    generator = torch.Generator().manual_seed(2**31 + 100 * seed + pairs)
                    answers = ask(model, *make_pairs(pairs, SEQUENCES, generator))
                    accuracy[pairs].append(answers.right[answers.shown].double().mean().item())
                    results[covariance][pairs].append(judge(answers))
                    progress.advance(bar)
                console.print(f'{covariance}, seed {seed}: {accuracy[pairs][-1]:.0%} of answers on {pairs} pairs are right')
            console.print(make_table(covariance, accuracy, results[covariance]))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / 'uncertainty.png'
    plot(results).savefig(path, dpi=130)
    console.print(f'Plot: {path}')


if __name__ == '__main__':
    main()
