# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Which share of needles a model finds in texts of growing length: `python -m evals.needles MODEL`."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.common import positive, write_json
from benchmarks.compare.report import draw
from benchmarks.compare.runs import load_result
from evals.common import DTYPES, load, read_text, text_fingerprint, weights_fingerprint
from evals.haystack import ANSWER_TOKENS, TASKS, Haystack, make_samples, score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evals.haystack import Sample

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m evals.needles',
        description="Hide needles in long texts as RULER does, ask a model for them, and count the answers that are right. "
                    'Cells (a task at a length) that the output folder has already are kept.',
    )
    parser.add_argument('model', metavar='MODEL', help='folder or name of a model, with its tokenizer')
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS), metavar='TASK', help=', '.join(TASKS))
    parser.add_argument('--lengths', nargs='+', type=positive, default=LENGTHS, metavar='TOKENS',
                        help=f'prompt and {ANSWER_TOKENS} tokens of answer together; default: {" ".join(map(str, LENGTHS))}')
    parser.add_argument('--samples', type=positive, default=100, help='of each cell; RULER takes 500; default: %(default)s')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--text', metavar='FILE-OR-FOLDER', help='the essay haystack; default: documentation inside Python')
    parser.add_argument('--batch-size', type=positive, default=4, help='prompts at once; default: %(default)s')
    parser.add_argument('--dtype', choices=DTYPES, default='auto', help="default: the checkpoint's")
    parser.add_argument('--output', type=Path, default=Path('runs/needles'), help='folder for results; default: %(default)s')
    return parser


@torch.inference_mode()
def predict(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """What the model writes after each prompt, greedily; shorter prompts are padded on the left."""
    rows = [tokenizer(prompt, verbose=False)['input_ids'] for prompt in prompts]
    width = max(map(len, rows))
    pad = next((x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
    )
    return tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Iterator[Sample],
    batch_size: int,
    report: Callable[[int], None],
) -> dict:
    """Accuracy of a cell, and what was asked and answered; `report(number of samples)` is called after each batch."""
    results = []
    samples = list(samples)
    for batch in (samples[i:i + batch_size] for i in range(0, len(samples), batch_size)):
        for sample, prediction in zip(batch, predict(model, tokenizer, [x.prompt for x in batch]), strict=True):
            results.append({
                'key': sample.key,
                'answers': list(sample.answers),
                'depth': sample.depth,
                'tokens': sample.tokens,
                'prediction': prediction,
                'score': score(prediction, sample.answers),
            })
        report(len(batch))
    return {'accuracy': sum(x['score'] for x in results) / len(results), 'samples': results}


def plot(content: dict) -> Figure:
    """Accuracy by task and length."""
    accuracy = content['accuracy']
    lengths = list(next(iter(accuracy.values())))
    figure, ax = plt.subplots(figsize=(1.8 + 0.8 * len(lengths), 1.3 + 0.5 * len(accuracy)), layout='constrained')
    ax.imshow([list(row.values()) for row in accuracy.values()], cmap='Blues', vmin=0, vmax=1, aspect='auto')
    for y, row in enumerate(accuracy.values()):
        for x, value in enumerate(row.values()):
            ax.annotate(f'{100 * value:.0f}', (x, y), ha='center', va='center', color='white' if value > 0.5 else 'black')
    ax.set(title=f'Needles found, %: {Path(content["settings"]["model"]).name}', xlabel='context, tokens')
    ax.set_xticks(range(len(lengths)), [f'{int(x):,}' for x in lengths])
    ax.set_yticks(range(len(accuracy)), [TASKS[task].name for task in accuracy])
    ax.grid(False)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    console = Console()
    tasks, lengths = list(dict.fromkeys(args.tasks)), sorted(set(args.lengths))
    try:
        haystack = Haystack(read_text(args.text))
        model, tokenizer = load(args.model, args.dtype)
        for task in tasks:
            # a length that is too short, for one sample at least, is told before the work begins
            deque(make_samples(TASKS[task], tokenizer, haystack, lengths[0], args.samples, args.seed), maxlen=0)
        shared = {
            'model': args.model,
            'weights': weights_fingerprint(model),
            'dtype': str(model.dtype).removeprefix('torch.'),
            'text': text_fingerprint(haystack.text),
            'samples': args.samples,
            'seed': args.seed,
        }
        cells = {(task, length): {**shared, 'task': task, 'length': length} for task in tasks for length in lengths}
        files = {cell: args.output / 'cells' / f'{cell[0]}-{cell[1]}.json' for cell in cells}
        results = {cell: load_result(files[cell], settings, '--output') for cell, settings in cells.items()}
    except ValueError as error:
        parser.error(str(error))

    columns = TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task('', total=args.samples * sum(x is None for x in results.values()))
        for task, length in [cell for cell, result in results.items() if result is None]:
            progress.update(bar, description=f'{TASKS[task].name} {length:,}')
            samples = make_samples(TASKS[task], tokenizer, haystack, length, args.samples, args.seed)
            result = evaluate(model, tokenizer, samples, args.batch_size, lambda count: progress.advance(bar, count))
            write_json(files[task, length], {'settings': cells[task, length], 'result': result})
            results[task, length] = result
            console.print(f'{TASKS[task].name}, {length:,} tokens: {result["accuracy"]:.1%}', highlight=False)

    accuracy = {task: {str(length): results[task, length]['accuracy'] for length in lengths} for task in tasks}
    content = {'settings': {**shared, 'lengths': lengths}, 'accuracy': accuracy}
    write_json(args.output / 'needles.json', content)
    (args.output / 'needles.png').write_bytes(draw(plot, content, 'light'))
    console.print(f'{args.output / "needles.json"}, {args.output / "needles.png"}', highlight=False, soft_wrap=True)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('interrupted; the same command goes on from the cells that are finished')
