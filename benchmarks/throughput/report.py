# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What a run shows and writes: tables and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from rich.table import Table

from benchmarks.ops.report import COLORS, number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

NAMES = {
    'kdn-diagonal': 'KDN diagonal',
    'kdn-isotropic': 'KDN isotropic',
    'kdn-swa-diagonal': 'KDN diagonal + sliding window',
    'kda': 'KDA',
    'kda-bounded': 'KDA, bounded gate',
    'gdn2': 'GDN-2',
    'attention': 'softmax attention',
    'window': 'sliding window',
}
# colour as in the plot of the ops, marker; dashed: with a window
STYLES = {
    'kdn-diagonal': (COLORS['chunk_kdn'], 'o', '-'),
    'kdn-isotropic': (COLORS['chunk_kdn_isotropic'], 's', '-'),
    'kdn-swa-diagonal': (COLORS['chunk_kdn'], 'D', '--'),
    'kda': (COLORS['chunk_kda'], '^', '-'),
    'kda-bounded': (COLORS['chunk_kda_bounded'], 'v', '-'),
    'gdn2': (COLORS['chunk_gdn2'], 'P', '-'),
    'attention': (COLORS['flash_attention'], 'h', '-'),
    'window': (COLORS['flash_attention'], 'D', '--'),
}
KINDS = {
    'model': 'Training, whole model',
    'layer': 'Training, mixer alone',
    'prefill': 'Prefill',
    'decode': 'Decoding',
}


def short_reason(row: dict) -> str | None:
    """Why a row has no numbers, in a few words; `None` if it has."""
    if 'not_run' in row:
        return 'not run'
    if 'error' not in row:
        return None
    return 'out of memory' if 'out of memory' in row['error'] else 'failed'


def gib(size: int | None) -> str:
    return '' if size is None else number(size / 2**30)


def group_table(rows: list[dict]) -> Table:
    """Rows of one cell; failures are told below it."""
    row = rows[0]
    title = f'{KINDS[row["kind"]]}, {size_name(row["size"])}: {row["batch"]} x {row["tokens"]:,} tokens'
    table = Table(title=title, title_justify='left', title_style='bold')
    table.add_column('mixer', no_wrap=True)
    for title in ('tokens/s', 'ms', 'least to most', 'calls', 'held GiB', 'peak GiB', 'first call s'):
        table.add_column(title, justify='right', no_wrap=True)
    for row in rows:
        if reason := short_reason(row):
            table.add_row(row['mixer'], f'[red]{reason}[/red]')
            continue
        table.add_row(
            row['mixer'] + (' (checkpoints)' if row.get('checkpointing') else ''),
            f'[bold]{row["tokens_per_second"]:,.0f}[/bold]',
            number(row['ms']),
            f'{number(row["ms_least"])} to {number(row["ms_most"])}',
            str(row['calls']),
            gib(row['held_bytes']),
            gib(row['peak_bytes']),
            f'{row["first_s"]:.1f}',
        )
    return table


def length_name(tokens: int) -> str:
    return f'{tokens // 1024}K' if tokens % 1024 == 0 else str(tokens)


def size_name(size: str | int) -> str:
    """`1.3b` as `1.3B`."""
    return str(size).replace('b', 'B')


def draw(ax: Axes, rows: list[dict], value: Callable[[dict], float | None], title: str, edge: float) -> None:
    """Lines of the mixers over the length; hollow: with activation checkpointing; a cross at the `edge`, 0 or 1: no number."""
    lengths, top = sorted({row['tokens'] for row in rows}), 0.
    for mixer, (color, marker, line) in STYLES.items():
        found = sorted((row for row in rows if row['mixer'] == mixer), key=lambda row: row['tokens'])
        points = [(lengths.index(row['tokens']), value(row), row) for row in found if short_reason(row) is None]
        points = [(x, y, row) for x, y, row in points if y is not None]
        top = max([top, *(y for _, y, _ in points)])
        ax.plot([x for x, _, _ in points], [y for _, y, _ in points], line, color=color, lw=1.8, zorder=2)
        for x, y, row in points:
            ax.plot(x, y, marker, ms=7, color=color, mfc='white' if row.get('checkpointing') else color, zorder=3)
        lost = [lengths.index(row['tokens']) for row in found if short_reason(row) in ('out of memory', 'failed')]
        if lost:
            on_edge = {'transform': ax.get_xaxis_transform(), 'clip_on': False}
            ax.plot(lost, [edge] * len(lost), 'x', ms=9, mew=2.5, color=color, zorder=4, **on_edge)
    ax.set_title(title, loc='left', fontweight='bold')
    ax.set_xticks(range(len(lengths)), [length_name(x) for x in lengths])
    ax.set_xlim(-0.3, len(lengths) - 0.7)
    ax.set_ylim(0, 1.05 * top or 1)
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(axis='y', color='#d0d7de', lw=0.6)
    ax.set_axisbelow(True)


def write_figure(path: Path, card: str, panels: list[tuple[str, list[dict]]], thousands: bool, xlabel: str) -> None:
    """A row for each panel: tokens a second, and memory."""
    unit, suffix = (1e3, 'thousand tokens/s') if thousands else (1, 'tokens/s')
    figure, axes = plt.subplots(len(panels), 2, figsize=(12, 1.2 + 3.6 * len(panels)), layout='constrained', squeeze=False)
    for (speed, memory), (title, rows) in zip(axes, panels, strict=True):
        draw(speed, rows, lambda row: row['tokens_per_second'] / unit, f'{title}: {suffix} (higher is better)', 0)
        draw(memory, rows, lambda row: row['peak_bytes'] and row['peak_bytes'] / 2**30, f'{title}: peak memory, GiB', 1)
        for ax in (speed, memory):
            ax.set_xlabel(xlabel)
    rows = [row for _, rows in panels for row in rows]
    present = {row['mixer'] for row in rows}
    handles = [
        Line2D([], [], color=color, marker=marker, ls=line, ms=7, label=NAMES[mixer])
        for mixer, (color, marker, line) in STYLES.items() if mixer in present
    ]
    if any(row.get('checkpointing') for row in rows):
        handles.append(Line2D([], [], color='black', marker='o', mfc='white', ls='', label='with activation checkpointing'))
    if any(short_reason(row) in ('out of memory', 'failed') for row in rows):
        handles.append(Line2D([], [], color='black', marker='x', ms=9, mew=2.5, ls='', label='out of memory, or failed'))
    figure.legend(handles=handles, loc='outside upper center', ncols=4, frameon=False)
    figure.supxlabel(card, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_paths(path: Path) -> dict[str, Path]:
    """Plots beside the JSON file, by what they show."""
    return {name: path.with_name(f'{path.stem}_{name}.png') for name in ('models', 'layers', 'decoding')}


def write_plots(path: Path, content: dict) -> None:
    """The plots of a run beside its JSON file; one that would have no number is not written."""
    def panels(kind: str, key: str, title: str) -> list[tuple[str, list[dict]]]:
        rows = [row for row in content['rows'] if row['kind'] == kind and 'not_run' not in row]
        found = {x: [row for row in rows if row[key] == x] for x in dict.fromkeys(row[key] for row in rows)}
        found = {x: rows for x, rows in found.items() if any(short_reason(row) is None for row in rows)}
        return [(title.format(size_name(x)), rows) for x, rows in found.items()]

    paths = plot_paths(path)
    tokens = next((row['batch'] * row['tokens'] for row in content['rows'] if row['kind'] in ('model', 'layer')), 0)
    training = f'tokens of a sequence, in batches of {tokens:,}'
    size = next((row['size'] for row in content['rows'] if row['kind'] == 'decode'), '')
    figures = {
        'models': (panels('model', 'size', 'Training, {} models'), True, training),
        'layers': (panels('layer', 'size', 'Mixer alone, {}'), True, training),
        'decoding': (panels('decode', 'batch', f'Decoding, {size_name(size)}, batch {{}}'), False, 'tokens of context'),
    }
    for name, (found, thousands, xlabel) in figures.items():
        if found:
            write_figure(paths[name], content['card'], found, thousands, xlabel)
