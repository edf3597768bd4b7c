# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Perplexity against the number of tokens a model has read: `python -m evals.positions MODEL --text FILE`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F

from benchmarks.common import positive, write_json
from benchmarks.compare.report import draw
from evals.common import DTYPES, load, read_text, text_fingerprint, weights_fingerprint

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# tokens of the first bucket; each of the others ends at sqrt(2) times its start
FIRST_BUCKET = 16
# tokens that go through a model at once where whole windows are too large
PIECE = 2048
COLORS = ('#3b7dd8', '#2aa198', '#e08a1e', '#a65fb5', '#b5404a', '#7d8590')


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m evals.positions',
        description='Perplexity of the tokens of long texts by their position in a window: how well models use what they have '
                    'read, and whether they hold beyond the lengths that they were trained on.',
    )
    parser.add_argument('models', nargs='+', metavar='MODEL', help='folders or names of models, with their tokenizers')
    parser.add_argument('--text', metavar='FILE-OR-FOLDER', help='what to read; default: the documentation inside Python')
    parser.add_argument('--max-length', type=positive, default=32768, help='tokens of a window; default: %(default)s')
    parser.add_argument('--windows', type=positive, default=8, help='at most so many, side by side; default: %(default)s')
    parser.add_argument('--piece', type=positive, metavar='TOKENS',
                        help=f'read windows in pieces of so many tokens, through the cache; default: whole windows if their '
                             f'logits fit into memory, else {PIECE}')
    parser.add_argument('--dtype', choices=DTYPES, default='auto', help="default: the checkpoint's")
    parser.add_argument('--output', type=Path, default=Path('runs/positions'), help='folder; default: %(default)s')
    return parser


def make_windows(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, count: int) -> torch.Tensor:
    """Windows of the text `[windows, max_length + 1]`, which share their first and last tokens with their neighbours."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)['input_ids'])
    count = min(count, (len(ids) - 1) // max_length)
    if count < 1:
        raise ValueError(f'--text: {len(ids):,} tokens, expected more than those of a window, --max-length {max_length:,}')
    return ids[:count * max_length + 1].unfold(0, max_length + 1, max_length)


def choose_piece(model: PreTrainedModel, max_length: int) -> int:
    """Tokens to read at once: the window, if its logits take at most a quarter of the memory."""
    if model.device.type == 'cuda':
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    # logits as they are, in fp32, and their exponentials
    return max_length if 12 * max_length * model.config.vocab_size <= memory / 4 else min(PIECE, max_length)


@torch.inference_mode()
def token_losses(model: PreTrainedModel, window: torch.Tensor, piece: int) -> torch.Tensor:
    """Cross entropy in nats of each token of a window `[max_length + 1]` but the first, in fp32 on the CPU."""
    window = window.to(model.device)
    inputs, targets = window[None, :-1], window[1:]
    losses, cache = [], None
    whole = piece >= len(targets)
    for ids, following in zip(inputs.split(piece, 1), targets.split(piece), strict=True):
        output = model(input_ids=ids, past_key_values=cache, use_cache=not whole)
        cache = output.past_key_values
        losses.append(F.cross_entropy(output.logits[0].float(), following, reduction='none').cpu())
    return torch.cat(losses)


def make_edges(max_length: int) -> list[int]:
    """Where buckets begin, and where the last one ends."""
    edges = [0]
    while (edge := round(FIRST_BUCKET * 2 ** ((len(edges) - 1) / 2))) < max_length:
        edges.append(edge)
    return [*edges, max_length]


def bucket(losses: torch.Tensor, edges: list[int]) -> dict[str, list[float]]:
    """Perplexity of each bucket over all windows, and the standard error of its mean loss between windows, in nats."""
    parts = [losses[:, start:end].double().mean(1) for start, end in zip(edges, edges[1:], strict=False)]
    count = len(losses)
    return {
        'perplexity': [math.exp(part.mean()) for part in parts],
        'standard_error_nats': [(part.std() / count ** 0.5).item() if count > 1 else None for part in parts],
    }


def plot(content: dict) -> Figure:
    edges, models = content['settings']['edges'], content['models']
    figure, ax = plt.subplots(figsize=(8, 4.2), layout='constrained')
    middles = [math.sqrt(max(1, start) * end) for start, end in zip(edges, edges[1:], strict=False)]
    names = {model: Path(model).name for model in models}
    if len(set(names.values())) < len(names):
        names = {model: model for model in models}
    for i, (model, result) in enumerate(models.items()):
        color = COLORS[i % len(COLORS)]
        perplexity, errors = result['perplexity'], result['standard_error_nats']
        ax.plot(middles, perplexity, color=color, lw=1.6, marker='o', ms=3, label=names[model])
        if None not in errors:
            low, high = ([x * math.exp(sign * e) for x, e in zip(perplexity, errors, strict=True)] for sign in (-1, 1))
            ax.fill_between(middles, low, high, color=color, alpha=0.15, lw=0)
    ax.set_xscale('log', base=2)
    ax.set_yscale('log')
    ax.set(title='Perplexity by position', xlabel='tokens read before')
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f'{x:,.0f}'))
    for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        axis(FuncFormatter(lambda x, _: f'{x:g}'))
    ax.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    console = Console()
    edges = make_edges(args.max_length)
    content = {'settings': {'max_length': args.max_length, 'edges': edges}, 'models': {}}
    try:
        text = read_text(args.text)
        content['settings']['text'] = text_fingerprint(text)
        for path in dict.fromkeys(args.models):
            model, tokenizer = load(path, args.dtype)
            windows = make_windows(tokenizer, text, args.max_length, args.windows)
            piece = min(args.piece or choose_piece(model, args.max_length), args.max_length)
            rows = track(windows, description=path, console=console)
            losses = torch.stack([token_losses(model, window, piece) for window in rows])
            content['models'][path] = {
                'weights': weights_fingerprint(model),
                'dtype': str(model.dtype).removeprefix('torch.'),
                'windows': len(windows),
                'piece': piece,
                'mean_perplexity': math.exp(losses.double().mean()),
                **bucket(losses, edges),
            }
            write_json(args.output / 'positions.json', content)
            del model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            first, last = (content['models'][path]['perplexity'][i] for i in (0, -1))
            console.print(f'{path}: perplexity {first:.2f} at the start, {last:.2f} at the end of {len(windows)} windows',
                          highlight=False, soft_wrap=True)
    except ValueError as error:
        parser.error(str(error))
    (args.output / 'positions.png').write_bytes(draw(plot, content, 'light'))
    console.print(f'{args.output / "positions.json"}, {args.output / "positions.png"}', highlight=False, soft_wrap=True)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('interrupted')
