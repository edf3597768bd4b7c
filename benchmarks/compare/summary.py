# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Results over seeds, in tables for the terminal, for the page and for Markdown: a row for each mixer, a column a number."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.compare.mixers import MIXERS
from benchmarks.compare.runs import end_loss
from benchmarks.compare.train import STATE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.compare.runs import Run
    from benchmarks.compare.tasks import Synthetic


def spread_of(values: list[float]) -> dict:
    """Mean over seeds and sample standard deviation, which one seed does not have."""
    return {
        'mean': statistics.fmean(values),
        'spread': statistics.stdev(values) if len(values) > 1 else None,
        'values': values,
    }


def summarize(results: dict[Run, dict]) -> dict:
    """One mixer's results over its seeds."""
    curves: dict[str, list] = {}
    accuracies: dict[str, list] = {}
    for run, result in results.items():
        curves.setdefault(run.task, []).append({'seed': run.seed, **result['curve']})
        if 'accuracy' in result:
            accuracies.setdefault(run.task, []).append(result['accuracy'])
    # the same for all tasks
    summary: dict = {'curves': curves, 'state_bytes': next(iter(results.values()))['state_bytes']}
    bits = [result['bits_per_byte'] for result in results.values() if 'bits_per_byte' in result]
    if bits:
        summary['bits_per_byte'] = spread_of(bits)
    summary['accuracy'] = {
        task: {
            panel: {place: spread_of([x[panel][place] for x in found]) for place in places}
            for panel, places in found[0].items()
        } for task, found in accuracies.items()
    }
    return summary


def summarize_rates(results: dict[str, dict[str, dict]]) -> dict:
    """One mixer's loss at the end of training, and its accuracies, by task and learning rate, where there are several."""
    tried = {task: found for task, found in results.items() if found}
    return {
        'losses_by_rate': {task: {rate: end_loss(x) for rate, x in found.items()} for task, found in tried.items()},
        'accuracy_by_rate': {
            task: {rate: x['accuracy'] for rate, x in found.items()}
            for task, found in tried.items() if all('accuracy' in x for x in found.values())
        },
    }


def describe_task(task: Synthetic) -> dict:
    """What a report needs to know of a task."""
    return {
        'title': task.title,
        'description': task.describe(),
        'chance': task.chance,
        'training': task.settings(),
        'panels': {name: panel._asdict() for name, panel in task.panels.items()},
        'best': task.best(),
    }


@dataclass(frozen=True)
class Column:
    """How to find a number and how to write it; `best` picks the winner, if there is one."""
    title: str
    value: Callable[[dict], dict | float | None]
    form: Callable[[float], str]
    best: Callable | None = None


@dataclass(frozen=True)
class Block:
    """A table: what it is of, its columns, rows of cells that stand above those of the mixers; if it is of a task, which one,
    and the column that counts."""
    title: str
    columns: list[Column]
    references: dict[str, list[str]]
    task: str | None = None
    headline: Column | None = None


def blocks_of(content: dict) -> Iterator[Block]:
    """The tables of a report, without those of which no mixer has a number."""
    yield Block('Overview', known(overview_columns(), content), {})
    if rates := rate_columns(content):
        yield Block('Learning rates that train best', rates, {})
    for name, task in content['tasks'].items():
        for panel, about in task['panels'].items():
            best = task['best'][panel]
            columns = [
                Column(place, lambda x, name=name, panel=panel, place=place: accuracy(x, name, panel, place), percent, max)
                for place in best
            ]
            if not known(columns, content):
                continue
            references = {'guessing': [percent(task['chance'])] * len(best)}
            if min(best.values()) < 1:
                references['best possible'] = [percent(x) for x in best.values()]
            title = f'{task["title"].capitalize()}, {about["title"]}: accuracy by {about["xlabel"]}'
            # the hardest of what training has
            seen = [x for x in columns if int(x.title) <= about['trained'][1]]
            yield Block(title, columns, references, name, seen[-1] if seen else columns[0])
        if columns := known(accuracy_by_rate_columns(content, name), content):
            title = f'{task["title"].capitalize()}, each learning rate: accuracy at the ends, seed'
            yield Block(f'{title} {content["settings"]["seeds"][0]}', columns, {}, name)


def overview_columns() -> list[Column]:
    def named(key: str) -> Callable:
        return lambda x: x.get(key)

    return [
        Column('parameters', named('parameters'), '{:,.0f}'.format),
        Column(f'state after {STATE_TOKENS} tokens, bytes', named('state_bytes'), '{:,.0f}'.format, min),
        Column('bits per byte', named('bits_per_byte'), '{:.3f}'.format, min),
        Column('training tokens/s', named('train_tokens_per_second'), '{:,.0f}'.format, max),
        Column('decoding tokens/s', named('decode_tokens_per_second'), '{:,.0f}'.format, max),
        Column('training memory, MiB', named('memory_bytes'), lambda x: f'{x / 2**20:,.1f}', min),
    ]


def rate_columns(content: dict) -> list[Column]:
    """The best learning rate on each task that has several."""
    tasks = dict.fromkeys(task for x in content['mixers'].values() for task in x['losses_by_rate'])

    def best(task: str) -> Callable:
        return lambda x: float(min(losses, key=losses.get)) if (losses := x['losses_by_rate'].get(task)) else None

    titles = {task: content['tasks'][task]['title'] if task in content['tasks'] else 'text' for task in tasks}
    return [Column(titles[task], best(task), '{:g}'.format) for task in tasks]


def accuracy_by_rate_columns(content: dict, task: str) -> list[Column]:
    """What the first seed reaches at the last place of each panel, by learning rate: often what decides."""
    about, found = content['tasks'][task], [x['accuracy_by_rate'].get(task, {}) for x in content['mixers'].values()]

    def value(panel: str, place: str, rate: str) -> Callable:
        return lambda x: x['accuracy_by_rate'].get(task, {}).get(rate, {}).get(panel, {}).get(place)

    return [
        Column(f'{about["panels"][panel]["title"]}, {place}, {rate}', value(panel, place, rate), percent, max)
        for panel, place in ((panel, list(best)[-1]) for panel, best in about['best'].items())
        for rate in sorted({rate for x in found for rate in x}, key=float)
    ]


def accuracy(summary: dict, task: str, panel: str, place: str) -> dict | None:
    return summary.get('accuracy', {}).get(task, {}).get(panel, {}).get(place)


def percent(x: float) -> str:
    return f'{x:.1%}'


def known(columns: list[Column], content: dict) -> list[Column]:
    return [x for x in columns if any(x.value(mixer) is not None for mixer in content['mixers'].values())]


def cells(column: Column, mixers: dict[str, dict]) -> list[tuple[str, bool]]:
    """The text of each mixer's cell, and whether it is the best, which no two mixers are."""
    found = [column.value(x) for x in mixers.values()]
    means = [x['mean'] if isinstance(x, dict) else x for x in found]
    written_means = [column.form(x) for x in means if x is not None]
    best = column.form(column.best(x for x in means if x is not None)) if column.best and written_means else None
    written = []
    for value, mean in zip(found, means, strict=True):
        if mean is None:
            written.append(('–', False))
            continue
        text = column.form(mean)
        is_best = text == best and written_means.count(best) == 1 and len(written_means) > 1
        if isinstance(value, dict) and value['spread'] is not None:
            text += f' ± {column.form(value["spread"])}'
        written.append((text, is_best))
    return written


def rows(block: Block, content: dict) -> Iterator[tuple[str, str, tuple[tuple[str, bool], ...]]]:
    """Each mixer, its label, and its cells in the order of the columns."""
    mixers = content['mixers']
    found = zip(*(cells(column, mixers) for column in block.columns), strict=True)
    for (mixer, x), row in zip(mixers.items(), found, strict=True):
        yield mixer, label_of(mixer, [column.value(x) for column in block.columns], content), row


def label_of(mixer: str, values: Iterable[dict | float | None], content: dict) -> str:
    """The mixer's label, and how many seeds its values are over where they are not over all; these are the same for each."""
    seeds = len(content['settings']['seeds'])
    count = next((len(value['values']) for value in values if isinstance(value, dict)), seeds)
    return MIXERS[mixer].label + (f' ({count} of {seeds} seeds)' if count < seeds else '')


def tables(content: dict) -> Iterator[Table]:
    """The tables for the terminal."""
    seeds = ', '.join(map(str, content['settings']['seeds']))
    for block in blocks_of(content):
        result = Table(title=f'{block.title}\n{content["device"]["name"]}, seeds {seeds}')
        result.add_column('')
        for column in block.columns:
            result.add_column(column.title, justify='right')
        for name, texts in block.references.items():
            result.add_row(name, *texts, style='dim')
        for _, label, row in rows(block, content):
            result.add_row(label, *(f'[bold]{text}[/bold]' if best else text for text, best in row))
        yield result


def failure_lines(content: dict) -> list[tuple[str, str]]:
    """What could not be run, and why; one reason is given once for a mixer."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for failure in content['failures']:
        reasons.setdefault((failure['mixer'], failure['reason']), []).append(failure['what'])
    lines = [(f'{MIXERS[mixer].label}, {"; ".join(what)}', reason) for (mixer, reason), what in reasons.items()]
    for what, left in content['not_run'].items():
        lines.append((f'{what}, {", ".join(MIXERS[mixer].label for mixer in left)}', 'not over before the deadline'))
    return lines


def markdown(content: dict) -> str:
    """All tables, under headings of the third level, and the plots of the tasks."""
    settings = content['settings']
    versions = ', '.join(f'{name} {version}' for name, version in content['versions'].items())
    seeds = ', '.join(map(str, settings['seeds']))
    commit = f'commit {content["commit"]}' if content['commit'] else 'commit not recorded'
    lines = [
        f'`{content["command"]}` on {content["device"]["name"]}; {versions}; {commit}; seeds {seeds}, mean ± sample standard '
        f'deviation. {sizes_line(content)} {rates_line(content)}', '',
    ]
    shown: set[str | None] = {None}
    for block in blocks_of(content):
        lines += [f'### {block.title}', '']
        if block.task not in shown:
            shown.add(block.task)
            lines += [f'![{content["tasks"][block.task]["title"].capitalize()}](plots/{block.task}.png)', '']
        lines += ['| | ' + ' | '.join(column.title for column in block.columns) + ' |']
        lines.append('|---|' + '---:|' * len(block.columns))
        for name, texts in block.references.items():
            lines.append(f'| *{name}* | ' + ' | '.join(f'*{text}*' for text in texts) + ' |')
        for _, label, row in rows(block, content):
            texts = (f'**{text}**' if best else text for text, best in row)
            lines.append(f'| {label} | ' + ' | '.join(texts) + ' |')
        lines.append('')
    if notes := mixer_lines(content):
        lines += ['### Mixers', '', *(f'- {note}' for note in notes), '']
    if settings['language'] or content['tasks']:
        lines += ['### Tasks', '']
        if settings['language']:
            lines.append(f'- **text**: {text_line(content)}')
        lines += [
            f'- **{task["title"]}**: {task["description"]} {task["training"]["steps"]:,} steps of '
            f'{task["training"]["tokens"]:,} tokens.' for task in content['tasks'].values()
        ]
        lines.append('')
    if failures := failure_lines(content):
        lines += ['### Not run', '']
        lines += [f'- {what}: {reason}' for what, reason in failures]
        lines.append('')
    return '\n'.join(lines)


def sizes_line(content: dict) -> str:
    backbone = content['settings']['backbone']
    return (
        f'One backbone of {backbone["num_hidden_layers"]} layers of width {backbone["hidden_size"]}, '
        f'{backbone["num_heads"]} heads of {backbone["head_dim"]}; the width of the MLPs makes the numbers of parameters '
        'agree within 1 %.'
    )


def rates_line(content: dict) -> str:
    tried = [losses for x in content['mixers'].values() for losses in x['losses_by_rate'].values()]
    rates = sorted({rate for losses in tried for rate in losses}, key=float)
    if not rates:
        return 'The learning rate is the same for all mixers, and tuned for none in particular.'
    return (
        f'Each mixer has tried the learning rates {", ".join(rates)} on each task with the first seed; all of its seeds have '
        'the one with the lowest loss over the last tenth of training.'
    )


def mixer_lines(content: dict) -> list[str]:
    """What is particular to the mixers that are compared."""
    notes = {
        'kda': 'KDA has its bounded gate (safe_gate, lower bound -5), which its faster kernels need; KDN runs on these.',
        'mamba2': (
            "Mamba-2 is FLA's, with a state of the same size; without mamba-ssm it runs in PyTorch. It starts with larger "
            'steps and slower decay than its own, with which its few heads hardly begin to learn in so short a training.'
        ),
        'attention': (
            'Softmax attention has rotary positions, and on queries, keys and values the short convolutions that the other '
            'mixers have.'
        ),
    }
    return [note for mixer, note in notes.items() if mixer in content['mixers']]


def text_line(content: dict) -> str:
    settings = content['settings']
    return (
        f'{settings["text"]["name"]} as bytes, {settings["language"]["steps"]} steps of {settings["language"]["tokens"]:,} '
        'tokens. Bits per byte are over the held-out documents; paragraphs of theirs that stand elsewhere too are not trained '
        'on.'
    )
