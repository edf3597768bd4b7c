# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What a run shows and writes: tables, JSON, and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

matplotlib.use('Agg')

import matplotlib.pyplot as plt
from rich.table import Table

from benchmarks.ops.registry import MODES

if TYPE_CHECKING:
    from pathlib import Path

# KDN blue and green, darker with uncertainty, lighter without the floor of the gate; KDA orange; others grey to purple
COLORS = {
    'chunk_kdn': '#1f5fbf',
    'chunk_kdn_uncertainty': '#123a75',
    'chunk_kdn_unbounded': '#8db8f0',
    'chunk_kdn_isotropic': '#138a72',
    'chunk_kdn_isotropic_uncertainty': '#0b5244',
    'chunk_kdn_isotropic_unbounded': '#86d3c0',
    'chunk_kda': '#e07b12',
    'chunk_kda_bounded': '#f5bd7a',
    'chunk_gdn2': '#8e4fb0',
    'chunk_precond_kda': '#c5a3da',
    'chunk_gated_delta_rule': '#b5404a',
    'flash_attention': '#7d8590',
}


def number(x: float | None) -> str:
    if x is None:
        return ''
    return f'{x:.2f}' if x >= 1 else f'{x:.3g}'


def shape_name(shape: list[int]) -> str:
    return f'{shape[0]} x {shape[1]}'


def group_table(rows: list[dict]) -> Table:
    """Rows of one shape and mode; failures are told below it."""
    B, T, H, D = rows[0]['shape']
    table = Table(title=f'{rows[0]["mode"]}: {B} x {T} tokens, {H} heads of {D}', title_justify='left', title_style='bold')
    table.add_column('op', overflow='fold')
    titles = ('ms', '20 to 80 %', 'x KDA', 'x floor', 'floor bytes', 'floor FLOPs', 'peak GiB', 'above inputs', 'cold s')
    for title in titles:
        table.add_column(title, justify='right', no_wrap=True)
    for row in rows:
        if 'error' in row:
            table.add_row(row['op'], '[red]failed[/red]')
            continue
        floor = max(row['floor_bytes_ms'], row['floor_flops_ms'] or 0)
        table.add_row(
            row['op'],
            f'[bold]{number(row["ms"])}[/bold]',
            f'{number(row["ms_p20"])} to {number(row["ms_p80"])}',
            number(row.get('ratio')),
            number(row['ms'] / floor),
            number(row['floor_bytes_ms']),
            number(row['floor_flops_ms']),
            number(row['peak_bytes'] / 2**30),
            number(row['peak_above_inputs_bytes'] / 2**30),
            f'{row["cold_s"]:.1f}',
        )
    return table


def kernel_table(kernels: list[dict], title: str) -> Table:
    total = sum(x['ms'] for x in kernels)
    table = Table(title=f'{title}: {number(total)} ms on the GPU', title_justify='left', title_style='bold')
    table.add_column('kernel', overflow='fold')
    for column in ('calls', 'ms', 'share'):
        table.add_column(column, justify='right', no_wrap=True)
    for x in kernels:
        table.add_row(x['kernel'], f'{x["calls"]:g}', number(x['ms']), f'{x["ms"] / total:.1%}')
    return table


def write_plot(path: Path, content: dict) -> None:
    """Milliseconds of the chunked ops by shape, a panel for each mode; a black line across a bar is its floor."""
    rows = [row for row in content['rows'] if row['kind'] == 'chunk' and 'ms' in row]
    modes = [mode for mode in MODES['chunk'] if any(row['mode'] == mode for row in rows)]
    shapes = list(dict.fromkeys(shape_name(row['shape']) for row in rows))
    ops = [op for op in COLORS if any(row['op'] == op for row in rows)]
    if not rows:
        return
    figure, axes = plt.subplots(len(modes), 1, figsize=(12, 1 + 3.6 * len(modes)), layout='constrained', squeeze=False)
    width = 0.84 / len(ops)
    for ax, mode in zip(axes[:, 0], modes, strict=True):
        for i, op in enumerate(ops):
            found = [row for row in rows if row['op'] == op and row['mode'] == mode]
            x = [shapes.index(shape_name(row['shape'])) + (i - (len(ops) - 1) / 2) * width for row in found]
            ax.bar(x, [row['ms'] for row in found], 0.9 * width, color=COLORS[op], label=op)
            floor = [max(row['floor_bytes_ms'], row['floor_flops_ms']) for row in found]
            ax.hlines(floor, [a - width / 2 for a in x], [a + width / 2 for a in x], color='black', lw=1.6,
                      label='floor' if i == len(ops) - 1 else None)
        title = {'fwd': 'Forward', 'fwdbwd': 'Forward and backward'}[mode]
        ax.set_title(f'{title}, ms (lower is better)', loc='left', fontweight='bold')
        ax.set_xticks(range(len(shapes)), [f'{name} tokens' for name in shapes])
        ax.spines[['top', 'right']].set_visible(False)
        ax.grid(axis='y', color='#d0d7de', lw=0.6)
        ax.set_axisbelow(True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside upper center', ncols=4, frameon=False)
    _, _, H, D = rows[0]['shape']
    figure.supxlabel(f'{content["card"]}, {H} heads of {D}, bf16', fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
