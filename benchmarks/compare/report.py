# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What comes out: the table, the plots and a page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import io
import math
import statistics
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use('Agg')

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.table import Table

from benchmarks.compare.mixers import MIXERS
from benchmarks.compare.runs import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure

    from benchmarks.compare.runs import Run

COLORS = dict(zip(MIXERS, ('#3b7dd8', '#2aa198', '#e08a1e', '#a65fb5'), strict=True))
MARKERS = dict(zip(MIXERS, 'osD^', strict=True))
NAMES = {
    'kdn-diagonal': 'KDN diagonal',
    'kdn-isotropic': 'KDN isotropic',
    'kda': 'KDA',
    'gated-deltanet': 'Gated DeltaNet',
}

THEMES = {
    'light': {'text': '#1f2328', 'quiet': '#d0d7de', 'background': '#ffffff'},
    'dark': {'text': '#e6edf3', 'quiet': '#3d444d', 'background': '#161b22'},
}


def spread_of(values: list[float]) -> dict:
    """Mean over seeds and sample standard deviation, which one seed does not have."""
    return {
        'mean': statistics.fmean(values),
        'spread': statistics.stdev(values) if len(values) > 1 else None,
        'values': values,
    }


def summarize(results: dict[Run, dict]) -> dict:
    """One mixer's results over its seeds."""
    language, recall = ([(run, result) for run, result in results.items() if run.task == task] for task in TASKS)
    summary: dict = {'curves': {task: [] for task in TASKS}}
    for run, result in results.items():
        summary['curves'][run.task].append({'seed': run.seed, **result['curve']})
    if language:
        summary['bits_per_byte'] = spread_of([result['bits_per_byte'] for _, result in language])
    if recall:
        summary['recall'] = {
            pairs: spread_of([result['recall'][pairs] for _, result in recall]) for pairs in recall[0][1]['recall']
        }
    return summary


@dataclass(frozen=True)
class Column:
    """A column of the table: how to find its number and how to write it; `best` picks the winner, if there is one."""
    title: str
    value: Callable[[dict], dict | float | None]
    form: Callable[[float], str]
    best: Callable | None = None


def columns_of(content: dict) -> list[Column]:
    def recall(pairs: int) -> Callable:
        return lambda x: x.get('recall', {}).get(str(pairs))

    def named(key: str) -> Callable:
        return lambda x: x.get(key)

    return [
        Column('parameters', named('parameters'), '{:,.0f}'.format),
        Column('bits per byte', named('bits_per_byte'), '{:.3f}'.format, min),
        *(Column(f'recall, {pairs} pairs', recall(pairs), '{:.1%}'.format, max) for pairs in recall_pairs(content)),
        Column('training tokens/s', named('train_tokens_per_second'), '{:,.0f}'.format, max),
        Column('decoding tokens/s', named('decode_tokens_per_second'), '{:,.0f}'.format, max),
        Column('state bytes per sequence', named('state_bytes'), '{:,.0f}'.format, min),
        Column('training memory, MiB', named('memory_bytes'), lambda x: f'{x / 2**20:,.1f}', min),
    ]


def recall_pairs(content: dict) -> list[int]:
    return list(content['settings']['recall_data']['eval_pairs'])


def cells(column: Column, mixers: dict[str, dict]) -> list[tuple[str, bool]]:
    """The text of each mixer's cell, and whether it is the best, which no two mixers are."""
    found = [column.value(x) for x in mixers.values()]
    means = [x['mean'] if isinstance(x, dict) else x for x in found]
    known = [column.form(x) for x in means if x is not None]
    best = column.form(column.best(x for x in means if x is not None)) if column.best and known else None
    written = []
    for value, mean in zip(found, means, strict=True):
        if mean is None:
            written.append(('–', False))
            continue
        text = column.form(mean)
        is_best = text == best and known.count(best) == 1 and len(known) > 1
        if isinstance(value, dict) and value['spread'] is not None:
            text += f' ± {column.form(value["spread"])}'
        written.append((text, is_best))
    return written


def table(content: dict) -> Table:
    """The table for the terminal, one row a number and one column a mixer, so that it fits."""
    mixers = content['mixers']
    result = Table(title=f'{content["device"]["name"]}, seeds {", ".join(map(str, content["settings"]["seeds"]))}')
    result.add_column('')
    for mixer in mixers:
        result.add_column(mixer, justify='right')
    for column in columns_of(content):
        result.add_row(column.title, *(f'[bold]{text}[/bold]' if best else text for text, best in cells(column, mixers)))
    return result


def smooth(values: list[float], weight: float = 0.75) -> list[float]:
    """Moving average whose start is not drawn towards zero."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def plain_number(x: float, _: int | None = None) -> str:
    return f'{x:g}'


def plot_losses(content: dict) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
    symbols = content['settings']['recall_data']['symbols']
    titles = ('Text: training loss, bits per byte', 'Recall: training loss, nats per answer')
    for ax, task, unit, title in zip(axes, TASKS, (math.log(2), 1), titles, strict=True):
        low, high = math.inf, 0.0
        for mixer, x in content['mixers'].items():
            for i, curve in enumerate(x['curves'][task]):
                loss = [value / unit for value in smooth(curve['loss'])]
                ax.plot(curve['step'], loss, color=COLORS[mixer], lw=1.6, alpha=0.9, label=None if i else NAMES[mixer])
                low, high = min(low, *loss), max(high, *loss)
        ax.set(title=title, xlabel='step', yscale='log')
        if task == 'recall':
            ax.axhline(math.log(symbols), ls=':', lw=1, color=plt.rcParams['text.color'])
            ax.annotate('guessing', (1, math.log(symbols)), xycoords=('axes fraction', 'data'), xytext=(-4, 3),
                        textcoords='offset points', ha='right', fontsize=9)
            ax.set_ylim(max(0.8 * min(low, math.log(symbols)), 1e-3), 1.5 * max(high, math.log(symbols)))
        else:
            ax.set_ylim(low * 0.95, high * 1.05)
            ticks = [x for x in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if low * 0.95 <= x <= high * 1.05]
            ax.set_yticks(ticks)
            ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(plain_number))
    axes[0].legend()
    return figure


def plot_recall(content: dict) -> Figure:
    figure, ax = plt.subplots(figsize=(10, 4), layout='constrained')
    settings = content['settings']['recall_data']
    for mixer, x in content['mixers'].items():
        if 'recall' not in x:
            continue
        means, spreads = ([value[key] for value in x['recall'].values()] for key in ('mean', 'spread'))
        ax.errorbar(
            [int(pairs) for pairs in x['recall']],
            [100 * mean for mean in means],
            None if None in spreads else [100 * spread for spread in spreads],
            color=COLORS[mixer], marker=MARKERS[mixer], ms=6, lw=1.6, capsize=3, label=NAMES[mixer],
        )
    low, high = min(*settings['train_pairs'], *settings['eval_pairs']), max(settings['train_pairs'])
    ax.axvspan(low, high, color=plt.rcParams['text.color'], alpha=0.07, lw=0)
    ax.axhline(100 / settings['symbols'], ls=':', lw=1, color=plt.rcParams['text.color'])
    ax.annotate('guessing', (0, 100 / settings['symbols']), xycoords=('axes fraction', 'data'), xytext=(4, 3),
                textcoords='offset points', fontsize=9)
    ax.annotate('seen in training', (high, 1), xycoords=('data', 'axes fraction'), xytext=(-4, -4), textcoords='offset points',
                ha='right', va='top', fontsize=9)
    ax.set_xscale('log', base=2)
    ax.set(title='Recall: answers that are right, %', xlabel='key-value pairs in the sequence', ylim=(0, 108))
    ax.set_xticks(settings['eval_pairs'])
    ax.set_yticks(range(0, 101, 20))
    ax.xaxis.set_major_formatter(FuncFormatter(plain_number))
    ax.legend(loc='lower left', bbox_to_anchor=(0, 0.08))
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
        bars = ax.barh([NAMES[mixer] for mixer in mixers], values, color=[COLORS[mixer] for mixer in mixers], height=0.62)
        ax.bar_label(bars, [f'{value:,.0f}' if value else '–' for value in values], padding=4, fontsize=9)
        ax.set(title=title, xlim=(0, 1.25 * max(*values, 1e-9)))
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_xticks([])
        ax.spines['bottom'].set_visible(False)
        ax.tick_params(axis='y', length=0)
    axes[0].set_ylim(len(mixers) - 0.5, -0.5)
    return figure


PLOTS = {
    'losses': (plot_losses, 'Loss while training'),
    'recall': (plot_recall, 'Recall against the number of pairs'),
    'speed': (plot_speed, 'Speed and memory'),
}


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
td.best { background: var(--best); font-weight: 600; }
i.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 7px; }
figure { margin: 0 0 16px; padding: 12px; }
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
<h2>Numbers</h2>
<div class="scroll"><table>$table</table></div>
<p class="quiet">$note</p>
<h2>Plots</h2>
$figures
$sample
<h2>How it was measured</h2>
<ul>$method</ul>
<details><summary>Settings and versions</summary><dl>$settings</dl></details>
</main></body>
</html>
''')


def write_report(out: Path, content: dict) -> None:
    """Write `report.html`, and the plots in `plots/`."""
    mixers = content['mixers']
    (out / 'plots').mkdir(parents=True, exist_ok=True)
    figures = []
    for name, (plot, caption) in PLOTS.items():
        images = {theme: draw(plot, content, theme) for theme in THEMES}
        (out / 'plots' / f'{name}.png').write_bytes(images['light'])
        light, dark = (f'data:image/png;base64,{base64.b64encode(images[theme]).decode()}' for theme in ('light', 'dark'))
        figures.append(
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{caption}"></picture></figure>',
        )
    head = ''.join(f'<th><i class="dot" style="background:{COLORS[mixer]}"></i>{NAMES[mixer]}</th>' for mixer in mixers)
    columns = columns_of(content)
    body = ''.join(
        f'<tr><th>{column.title}</th>'
        + ''.join(f'<td{" class=best" if best else ""}>{text}</td>' for text, best in cells(column, mixers)) + '</tr>'
        for column in columns
    )
    settings = content['settings']
    seeds = settings['seeds']
    seen = max(p for p in recall_pairs(content) if p <= max(settings['recall_data']['train_pairs']))
    shown = {
        'bits per byte': ('best on held-out text', 'bits per byte'),
        f'recall, {seen} pairs': (f'best recall of {seen} pairs', 'of the answers right'),
        'training tokens/s': ('fastest to train', 'tokens/s'),
        'decoding tokens/s': ('fastest to decode', 'tokens/s'),
    }
    page = PAGE.substitute(
        title='Kalman Delta Networks beside KDA and Gated DeltaNet',
        subtitle=html.escape(
            f'{content["device"]["name"]} · {len(mixers)} mixers in one backbone, '
            f'{min(x["parameters"] for x in mixers.values()):,} parameters · '
            f'{len(seeds)} seed{"s" * (len(seeds) > 1)} · {content["seconds"] / 60:.1f} minutes',
        ),
        failures=''.join(
            f'<div class="failed"><p><b>{NAMES[mixer]}</b> could not be compared in full: {html.escape(reason)}</p></div>'
            for mixer, reason in content['failures'].items()
        ),
        cards=''.join(card(column, mixers, *shown[column.title]) for column in columns if column.title in shown),
        table=f'<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>',
        note=(
            f'Mean ± sample standard deviation over {len(seeds)} seeds. ' if len(seeds) > 1
            else 'One seed: small differences may be chance; --seeds 3 shows the spread. '
        ) + 'The best of a row is marked where there is one.',
        figures=''.join(figures),
        sample=sample_section(content),
        method=''.join(f'<li>{html.escape(line)}</li>' for line in method_of(content)),
        settings=''.join(
            f'<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>'
            for key, value in {**flatten(settings), **content['versions']}.items()
        ),
    )
    (out / 'report.html').write_text(page, encoding='utf-8')


def card(column: Column, mixers: dict[str, dict], title: str, unit: str) -> str:
    """The winner of a column, at a glance."""
    found = [(mixer, text) for mixer, (text, best) in zip(mixers, cells(column, mixers), strict=True) if best]
    if not found:
        return ''
    mixer, text = found[0]
    name = f'<b style="color:{COLORS[mixer]}">{NAMES[mixer]}</b>'
    return f'<div class="card"><span class="quiet">{title}</span>{name}{text} {unit}</div>'


def sample_section(content: dict) -> str:
    if 'sample' not in content:
        return ''
    sample = content['sample']
    return (
        f'<h2>Text written by {NAMES[sample["mixer"]]}</h2>'
        '<p class="quiet">The best on held-out text, loaded again from where it was saved, goes on from the grey part.</p>'
        f'<pre><span class="quiet">{html.escape(sample["prompt"])}</span>{html.escape(sample["text"])}</pre>'
    )


def method_of(content: dict) -> list[str]:
    settings = content['settings']
    language, recall = settings['language'], settings['recall']
    symbols, pairs = settings['recall_data']['symbols'], settings['recall_data']['train_pairs']
    count = content['device']['threads']
    threads = f', on {count} thread{"s" * (count > 1)}' if content['device']['type'] == 'cpu' else ''
    windows = max(1, language['tokens'] // settings['seq_len'])
    return [
        'One backbone for all mixers. The width of its MLPs makes up for what a mixer has more or less, so that the numbers '
        'of parameters agree within 1 %. Weights that all mixers have start equal; data, their order, the optimizer and '
        'its learning rate, which is tuned for no mixer in particular, are the same.',
        f'Text: {settings["text"]["name"]} as bytes, {language["steps"]} steps of {language["tokens"]:,} tokens. Bits per '
        'byte are over the held-out documents; paragraphs of theirs that stand elsewhere too are not trained on.',
        f'Recall: separate models of the same shape, {recall["steps"]} steps of {recall["tokens"]:,} tokens. A sequence '
        'shows pairs of a key and a value, then asks each key once, in another order. '
        f'There are {symbols} keys and as many values; training has {", ".join(map(str, pairs))} pairs.',
        'KDA has its bounded gate (safe_gate, lower bound -5), which its faster kernels need; KDN runs on the same.',
        'Speed: median over calls that the mixers make in turn, in one process, after warm-up'
        f'{threads}. '
        f'Training: steps of {windows} windows of {settings["seq_len"]} bytes, optimizer included. '
        f'Decoding: {settings["decode_batch"]} sequences, one token after another from the cache.',
        f'Training memory: {content["memory"]}.',
        'State: all that the cache keeps for a sequence, convolutions included.',
        'Loss curves are moving averages.',
        'Each model was saved, loaded again with AutoModelForCausalLM, and gave the same logits.',
    ]


def flatten(settings: dict, prefix: str = '') -> dict:
    """Nested settings under dotted names."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
    return flat
