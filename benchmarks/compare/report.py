# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What comes out: the plots and a page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import io
import math
from string import Template
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use('Agg')

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.compare.mixers import MIXERS
from benchmarks.compare.summary import (
    blocks_of,
    cells,
    failure_lines,
    known,
    label_of,
    mixer_lines,
    overview_columns,
    percent,
    rates_line,
    rows,
    sizes_line,
    text_line,
)
from benchmarks.compare.train import STATE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.compare.summary import Block

# up to as many mixers have their names in the plot itself
NAMES_INSIDE = 5

THEMES = {
    'light': {'text': '#1f2328', 'quiet': '#d0d7de', 'background': '#ffffff'},
    'dark': {'text': '#e6edf3', 'quiet': '#3d444d', 'background': '#161b22'},
}


def smooth(values: list[float], weight: float = 0.75) -> list[float]:
    """Moving average whose start is not drawn towards zero."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def plain_number(x: float, _: int | None = None) -> str:
    return f'{x:g}'


def draw_legend(figure: Figure, ax: Axes, **inside) -> None:
    """Names in a plot where they are few, else below it."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) <= NAMES_INSIDE:
        ax.legend(**inside)
    else:
        figure.legend(handles, labels, loc='outside lower center', ncols=4, fontsize=9)


def plot_losses(content: dict) -> Figure:
    tasks = list(dict.fromkeys(task for x in content['mixers'].values() for task in x['curves']))
    columns = min(len(tasks), 2 if len(tasks) < 5 else 3)
    lines = math.ceil(len(tasks) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(10, 3.6 * lines), layout='constrained', squeeze=False)
    for ax in axes.flat[len(tasks):]:
        ax.set_visible(False)
    for ax, task in zip(axes.flat, tasks, strict=False):
        about = content['tasks'].get(task)
        unit = 1 if about else math.log(2)
        low, high = math.inf, 0.0
        for mixer, x in content['mixers'].items():
            for i, curve in enumerate(x['curves'].get(task, [])):
                loss = [value / unit for value in smooth(curve['loss'])]
                style = {'color': MIXERS[mixer].color, 'label': None if i else MIXERS[mixer].label}
                ax.plot(curve['step'], loss, lw=1.4, alpha=0.9, **style)
                low, high = min(low, *loss), max(high, *loss)
        title, ylabel = (about['title'].capitalize(), 'loss, nats an answer') if about else ('Text', 'loss, bits per byte')
        ax.set(title=title, xlabel='step', ylabel=ylabel, yscale='log')
        if about:
            guess = -math.log(about['chance'])
            ax.axhline(guess, ls=':', lw=1, color=plt.rcParams['text.color'])
            ax.annotate('guessing', (1, guess), xycoords=('axes fraction', 'data'), xytext=(-4, 3),
                        textcoords='offset points', ha='right', fontsize=9)
            low, high = max(0.8 * min(low, guess), 1e-3), 1.5 * max(high, guess)
        else:
            low, high = 0.95 * low, 1.05 * high
        ax.set_ylim(low, high)
        # few where the loss falls far
        ticks = (1e-3, 1e-2, 0.1, 0.3, 1, 2, 3, 5, 8) if low < 0.5 else (0.5, 0.7, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        ax.set_yticks([x for x in ticks if low <= x <= high])
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(plain_number))
    draw_legend(figure, axes.flat[0])
    return figure


def plot_task(content: dict, task: str) -> Figure:
    """Accuracy in each panel of a task: a line for the mean of each mixer, and a band over all of its seeds."""
    about = content['tasks'][task]
    panels = about['panels']
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 4), layout='constrained', sharey=True, squeeze=False)
    for ax, (panel, labels) in zip(axes.flat, panels.items(), strict=True):
        best = {int(place): 100 * x for place, x in about['best'][panel].items()}
        for mixer, x in content['mixers'].items():
            places = x['accuracy'].get(task, {}).get(panel)
            if not places:
                continue
            at, means = [int(place) for place in places], [100 * value['mean'] for value in places.values()]
            look, label = MIXERS[mixer], label_of(mixer, places.values(), content)
            ax.plot(at, means, color=look.color, marker=look.marker, ms=5, lw=1.6, label=label)
            low, high = ([100 * end(value['values']) for value in places.values()] for end in (min, max))
            ax.fill_between(at, low, high, color=look.color, alpha=0.1, lw=0)
        if min(best.values()) < 100:
            ax.plot(*zip(*best.items(), strict=True), color=plt.rcParams['text.color'], ls='--', lw=1.2, label='best possible')
        start, end = (min(max(x, min(best)), max(best)) for x in labels['trained'])
        ax.axvspan(start, end, color=plt.rcParams['text.color'], alpha=0.07, lw=0)
        ax.annotate('seen in training', (start, 1), xycoords=('data', 'axes fraction'), xytext=(4, -4),
                    textcoords='offset points', va='top', fontsize=9)
        ax.axhline(100 * about['chance'], ls=':', lw=1, color=plt.rcParams['text.color'])
        ax.annotate('guessing', (0, 100 * about['chance']), xycoords=('axes fraction', 'data'), xytext=(4, 3),
                    textcoords='offset points', fontsize=9)
        if min(best) > 0:
            ax.set_xscale('log', base=2)
        else:
            ax.set_xscale('symlog', base=2, linthresh=1)
            ax.set_xlim(-0.3, 1.2 * max(best))
        ax.set(title=labels['title'].capitalize(), xlabel=labels['xlabel'], ylim=(0, 112))
        ax.set_xticks(list(best))
        ax.set_yticks(range(0, 101, 20))
        ax.xaxis.set_major_formatter(FuncFormatter(plain_number))
        ax.xaxis.set_minor_locator(NullLocator())
    axes.flat[0].set_ylabel('answers that are right, %')
    draw_legend(figure, axes.flat[0], loc='lower left', bbox_to_anchor=(0, 0.08))
    return figure


def plot_speed(content: dict) -> Figure:
    panels = [
        ('Training, tokens/s', 'train_tokens_per_second', 1),
        ('Decoding, tokens/s', 'decode_tokens_per_second', 1),
        ('Training memory, MiB', 'memory_bytes', 2**20),
    ]
    mixers = list(content['mixers'])
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 1.3 + 0.4 * len(mixers)), layout='constrained', sharey=True)
    for ax, (title, key, unit) in zip(axes, panels, strict=True):
        values = [(content['mixers'][mixer].get(key) or 0) / unit for mixer in mixers]
        bars = ax.barh(
            [MIXERS[mixer].label for mixer in mixers], values, color=[MIXERS[mixer].color for mixer in mixers], height=0.62,
        )
        ax.bar_label(bars, [f'{value:,.0f}' if value else '–' for value in values], padding=4, fontsize=9)
        ax.set(title=title, xlim=(0, 1.25 * max(*values, 1e-9)))
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_xticks([])
        ax.spines['bottom'].set_visible(False)
        ax.tick_params(axis='y', length=0)
    axes[0].set_ylim(len(mixers) - 0.5, -0.5)
    return figure


def plots_of(content: dict) -> dict[str, tuple[Callable[[dict], Figure], str]]:
    """Name, function and caption of each plot for which there are numbers."""
    plots = {}
    for task, about in content['tasks'].items():
        if any(task in x['accuracy'] for x in content['mixers'].values()):
            plots[task] = (lambda content, task=task: plot_task(content, task), about['title'].capitalize())
    plots['losses'] = (plot_losses, 'Loss while training')
    if any('train_tokens_per_second' in x for x in content['mixers'].values()):
        plots['speed'] = (plot_speed, 'Speed and memory')
    return plots


def draw(plot: Callable[[dict], Figure], content: dict, theme: str) -> bytes:
    """A plot as PNG."""
    color = THEMES[theme]
    style = {
        'font.size': 10, 'axes.titlesize': 11, 'axes.titleweight': 'bold', 'axes.titlelocation': 'left',
        'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True, 'axes.grid.which': 'major',
        'grid.color': color['quiet'], 'grid.linewidth': 0.6, 'legend.frameon': False, 'axes.axisbelow': True,
        'figure.facecolor': color['background'], 'axes.facecolor': color['background'], 'text.color': color['text'],
        **dict.fromkeys(('axes.labelcolor', 'axes.titlecolor', 'xtick.color', 'ytick.color'), color['text']),
        'axes.edgecolor': color['quiet'],
    }
    with plt.rc_context(style):
        figure = plot(content)
        buffer = io.BytesIO()
        figure.savefig(buffer, format='png', dpi=150)
        plt.close(figure)
    return buffer.getvalue()


PAGE = Template('''<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --text: #1f2328; --quiet: #59636e; --line: #d0d7de; --page: #f6f8fa; --card: #ffffff; --best: #dafbe1;
}
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --quiet: #9198a1; --line: #3d444d; --page: #0d1117; --card: #161b22; --best: #12361f; }
}
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 8px; }
.quiet { color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px; margin-top: 20px; }
.card, figure, .scroll, pre, .failed { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 12px 16px; }
.card b { display: block; font-size: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
th:first-child { text-align: left; }
thead th { vertical-align: bottom; }
tbody th { font-weight: 400; }
tr.reference > * { color: var(--quiet); }
td.best { background: var(--best); font-weight: 600; }
i.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 7px; }
figure { margin: 16px 0; padding: 12px; }
figure img { display: block; max-width: 100%; margin: 0 auto; }
pre { padding: 12px 16px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.failed { padding: 4px 16px; border-left: 4px solid #cf222e; margin-top: 16px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body><main>
<h1>$title</h1>
<div class="quiet">$subtitle</div>
$failures
<div class="cards">$cards</div>
<p class="quiet">$note</p>
$sections
$sample
<h2>How it was measured</h2>
<ul>$method</ul>
<details><summary>Settings and versions</summary><dl>$settings</dl></details>
</main></body>
</html>
''')


def write_report(out: Path, content: dict) -> None:
    """Write `report.html`, and the plots in `plots/`."""
    mixers, settings = content['mixers'], content['settings']
    (out / 'plots').mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, (plot, caption) in plots_of(content).items():
        images = {theme: draw(plot, content, theme) for theme in THEMES}
        (out / 'plots' / f'{name}.png').write_bytes(images['light'])
        light, dark = (f'data:image/png;base64,{base64.b64encode(images[theme]).decode()}' for theme in ('light', 'dark'))
        figures[name] = (
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{html.escape(caption)}"></picture></figure>'
        )
    overview, *blocks = blocks_of(content)
    sections = f'<h2>{overview.title}</h2>{table_section(overview, content)}{figures.pop("speed", "")}'
    sections += ''.join(f'<h2>{block.title}</h2>{table_section(block, content)}' for block in blocks if block.task is None)
    for name, task in content['tasks'].items():
        if name in figures:
            sections += f'<h2>{task["title"].capitalize()}</h2><p>{html.escape(task["description"])}</p>{figures.pop(name)}'
            sections += ''.join(
                f'<h3>{html.escape(block.title)}</h3>{table_section(block, content)}' for block in blocks if block.task == name
            )
    sections += f'<h2>Loss while training</h2>{figures.pop("losses")}'
    seeds = settings['seeds']
    page = PAGE.substitute(
        title='Kalman Delta Networks side by side with other mixers',
        subtitle=html.escape(
            f'{content["device"]["name"]} · {len(mixers)} mixers in one backbone, '
            f'{min(x["parameters"] for x in mixers.values()):,} parameters · '
            f'{len(seeds)} seed{"s" * (len(seeds) > 1)} · {content["seconds"] / 60:.1f} minutes',
        ),
        failures=''.join(
            f'<div class="failed"><p><b>{html.escape(what)}</b>: {html.escape(reason)}</p></div>'
            for what, reason in failure_lines(content)
        ),
        cards=''.join(cards_of(content)),
        note=(
            f'Mean ± sample standard deviation over {len(seeds)} seeds. ' if len(seeds) > 1
            else 'One seed: small differences may be chance; --seeds 3 shows the spread. '
        ) + 'The best of a column is marked where there is one.',
        sections=sections,
        sample=sample_section(content),
        method=''.join(f'<li>{html.escape(line)}</li>' for line in method_of(content)),
        settings=''.join(
            f'<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>'
            for key, value in {**flatten(settings), **content['versions']}.items()
        ),
    )
    (out / 'report.html').write_text(page, encoding='utf-8')


def table_section(block: Block, content: dict) -> str:
    """A table of the page."""
    head = ''.join(f'<th>{html.escape(column.title)}</th>' for column in block.columns)
    body = ''.join(
        f'<tr class="reference"><th>{name}</th>' + ''.join(f'<td>{text}</td>' for text in texts) + '</tr>'
        for name, texts in block.references.items()
    )
    for mixer, label, row in rows(block, content):
        dot = f'<i class="dot" style="background:{MIXERS[mixer].color}"></i>'
        body += f'<tr><th>{dot}{html.escape(label)}</th>'
        body += ''.join(f'<td{" class=best" if best else ""}>{text}</td>' for text, best in row) + '</tr>'
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cards_of(content: dict) -> list[str]:
    """The winners at a glance."""
    mixers = content['mixers']
    shown = {
        'bits per byte': ('best on held-out text', 'bits per byte'),
        'training tokens/s': ('fastest to train', 'tokens/s'),
        'decoding tokens/s': ('fastest to decode', 'tokens/s'),
    }
    found = [(column, *shown[column.title]) for column in known(overview_columns(), content) if column.title in shown]
    for block in blocks_of(content):
        if not block.headline:
            continue
        title, along = block.title.split(': accuracy by ')
        found.append((block.headline, f'{title}: {block.headline.title} {along}', 'of the answers right'))
    winners = []
    for column, title, unit in found:
        for mixer, (text, best) in zip(mixers, cells(column, mixers), strict=True):
            if best:
                name = f'<b style="color:{MIXERS[mixer].color}">{html.escape(MIXERS[mixer].label)}</b>'
                winners.append(f'<div class="card"><span class="quiet">{html.escape(title)}</span>{name}{text} {unit}</div>')
    return winners


def sample_section(content: dict) -> str:
    if 'sample' not in content:
        return ''
    sample = content['sample']
    return (
        f'<h2>Text written by {MIXERS[sample["mixer"]].label}</h2>'
        '<p class="quiet">The best on held-out text, loaded again from where it was saved, goes on from the grey part.</p>'
        f'<pre><span class="quiet">{html.escape(sample["prompt"])}</span>{html.escape(sample["text"])}</pre>'
    )


def method_of(content: dict) -> list[str]:
    settings = content['settings']
    language = settings['language']
    lines = [
        f'{sizes_line(content)} Weights that all mixers have start equal; data, their order and the optimizer are the same. '
        f'{rates_line(content)}',
    ]
    if language:
        lines.append(f'Text: {text_line(content)}')
    for task in content['tasks'].values():
        training = task['training']
        lines.append(
            f'{task["title"].capitalize()}: separate models of the same shape, {training["steps"]} steps of '
            f'{training["tokens"]:,} tokens. A guess is right in {percent(task["chance"])}.',
        )
    lines += [
        'All answers are single tokens, and only they are trained on; the sequences of the evaluation are the same for all '
        'mixers and seeds.',
        f'State: all that the cache keeps for a sequence of {STATE_TOKENS} tokens, convolutions included.',
    ]
    lines += mixer_lines(content)
    if any('train_tokens_per_second' in x for x in content['mixers'].values()):
        count = content['device']['threads']
        threads = f', on {count} thread{"s" * (count > 1)}' if content['device']['type'] == 'cpu' else ''
        windows = max(1, language['tokens'] // settings['seq_len'])
        lines += [
            'Speed: median over calls that the mixers make in turn, in one process, after warm-up'
            f'{threads}. Training: steps of {windows} windows of {settings["seq_len"]} bytes, optimizer included. '
            f'Decoding: {settings["decode_batch"]} sequences, one token after another from the cache.',
            f'Training memory: {content["memory"]}.',
        ]
    return [
        *lines,
        'Loss curves are moving averages.',
        'Each model was saved, loaded again with AutoModelForCausalLM, and gave the same logits.',
    ]


def flatten(settings: dict, prefix: str = '') -> dict:
    """Nested settings under dotted names."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
    return flat
