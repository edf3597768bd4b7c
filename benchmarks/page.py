# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""One page of what lies in benchmarks/results, and the results in the README.

    python -m benchmarks.page            # after new results: writes both
    python -m benchmarks.page --check    # are both as they would be written?
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import result_path
from benchmarks.compare.mixers import MIXERS
from benchmarks.ops.__main__ import make_parser as ops_parser
from benchmarks.ops.report import number
from benchmarks.pretraining.__main__ import make_parsers as pretraining_parsers
from benchmarks.throughput.__main__ import make_parser as throughput_parser
from benchmarks.throughput.report import KINDS, NAMES, length_name, plot_paths, short_reason, size_name, write_plots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[1]
RESULTS = Path('benchmarks/results')
MARKERS = ('<!-- results -->', '<!-- /results -->')

# of the side-by-side job
ABLATION = re.compile('kdn-(diagonal|isotropic)-')

OP_NAMES = {
    'chunk_kdn': 'KDN diagonal',
    'chunk_kdn_uncertainty': 'KDN diagonal, uncertainty',
    'chunk_kdn_unbounded': 'KDN diagonal, no floor',
    'chunk_kdn_isotropic': 'KDN isotropic',
    'chunk_kdn_isotropic_uncertainty': 'KDN isotropic, uncertainty',
    'chunk_kdn_isotropic_unbounded': 'KDN isotropic, no floor',
    'chunk_kda': 'KDA',
    'chunk_kda_bounded': 'KDA, bounded gate',
    'chunk_gdn2': 'GDN-2',
    'chunk_precond_kda': 'preconditioned KDA',
    'chunk_gated_delta_rule': 'Gated DeltaNet',
    'flash_attention': 'softmax attention',
    'fused_recurrent_kdn': 'KDN diagonal',
    'fused_recurrent_kdn_uncertainty': 'KDN diagonal, uncertainty',
    'fused_recurrent_kdn_isotropic': 'KDN isotropic',
    'fused_recurrent_kdn_isotropic_uncertainty': 'KDN isotropic, uncertainty',
    'fused_recurrent_kda': 'KDA',
    'kdn_gain': 'KDN diagonal',
    'kdn_gain_isotropic': 'KDN isotropic',
}
README_OPS = ('chunk_kdn', 'chunk_kdn_isotropic', 'chunk_kda', 'chunk_kda_bounded', 'chunk_gdn2', 'chunk_precond_kda')
OP_KINDS = {'chunk': 'Chunked ops', 'decode': 'Decoding, one token of a layer', 'gain': 'Gain stage alone'}
MODE_NAMES = {'fwd': 'forward', 'fwdbwd': 'forward and backward', 'bwd': 'backward'}


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ['---'] * len(header), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def command_of(parser: argparse.ArgumentParser, settings: dict) -> str:
    """The command with these settings, which do not hold the folder for results."""
    words = [parser.prog]
    for action in parser._actions:
        value = settings.get(action.dest)
        if action.dest not in settings or value == json.loads(json.dumps(action.default)):
            continue
        words.append(action.option_strings[-1])
        for x in [] if value is True else value if isinstance(value, list) else [value]:
            words.append('x'.join(map(str, x)) if isinstance(x, list) else f'{x:g}' if isinstance(x, float) else str(x))
    return ' '.join(words)


def described(content: dict, command: str, number_of_cards: str = 'one') -> str:
    versions = ', '.join(f'{name} {version}' for name, version in content['versions'].items())
    commit = f'commit {content["commit"]}' if content['commit'] else 'commit not recorded'
    return f'`{command}` on {number_of_cards} {content["card"]}, {content["seconds"]:.0f} s. {versions}; {commit}.'


def reasons(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """A list of what has no numbers, from (what, where, who, why): who is named together where all else is the same, then
    where."""
    who_of: dict[tuple[str, str, str], list[str]] = {}
    for what, where, who, why in rows:
        who_of.setdefault((what, where, why), []).append(who)
    where_of: dict[tuple[str, str, str], list[str]] = {}
    for (what, where, why), who in who_of.items():
        where_of.setdefault((what, '; '.join(dict.fromkeys(who)), why), []).append(where)
    return '\n'.join(f'- {what}, {", ".join(where)} ({who}): {why}' for (what, who, why), where in where_of.items())


def first_sentences(error: str) -> str:
    """An error's first line; the state of the allocator, which CUDA's adds, is left out."""
    return error.strip().splitlines()[0].partition(' GPU 0 has ')[0]


def shape_text(batch: int, tokens: int) -> str:
    return f'{batch} × {tokens:,}'


def ops_table(rows: list[dict], kind: str, mode: str, ops: Iterable[str]) -> str | None:
    """Milliseconds by shape and op; `None` if there are none."""
    rows = [row for row in rows if row['kind'] == kind and row['mode'] == mode]
    ops = [op for op in ops if any(row['op'] == op and 'ms' in row for row in rows)]
    if not ops:
        return None
    found = {(row['op'], *row['shape'][:2]): row.get('ms') for row in rows}
    shapes = dict.fromkeys(tuple(row['shape'][:2]) for row in rows)
    lines = [[shape_text(*shape), *(number(found.get((op, *shape))) or '–' for op in ops)] for shape in shapes]
    return markdown_table(['tokens', *(OP_NAMES[op] for op in ops)], lines)


def ops_section(content: dict, plot: Path) -> str:
    rows = content['rows']
    *_, H, D = rows[0]['shape']
    # what of the ops it is of, if not of all, follows the card
    part = plot.stem.removeprefix(result_path(Path(), 'ops', content['card']).stem).replace('_', ', ')
    parts = [
        f'## Ops, {content["card"]}{part}',
        described(content, command_of(ops_parser(), content['settings'])),
        f'Milliseconds, medians; {H} heads of {D}, bf16. A copy in memory ran at '
        f'{content["measured_ceilings"]["bandwidth"]:.2f} TB/s, a product of matrices at '
        f'{content["measured_ceilings"]["tflops"]:.0f} TFLOP/s.',
    ]
    for kind, mode in dict.fromkeys((row['kind'], row['mode']) for row in rows):
        if table := ops_table(rows, kind, mode, OP_NAMES):
            parts += [f'### {OP_KINDS[kind]}: {MODE_NAMES.get(mode, mode)}', table]
    if plot.exists():
        parts.append(f'![Chunked ops]({plot.name})')
    if failed := [row for row in rows if 'error' in row]:
        parts += ['### Without numbers', reasons(
            (
                OP_KINDS[row['kind']],
                MODE_NAMES.get(row['mode'], row['mode']),
                OP_NAMES[row['op']],
                first_sentences(row['error']),
            ) for row in failed
        )]
    return '\n\n'.join(parts)


def throughput_tables(rows: list[dict]) -> list[str]:
    """Tokens a second, and memory, of rows of one kind, size and, in decoding, batch; without lengths and mixers that were not
    run."""
    run = [row for row in rows if 'not_run' not in row]
    lengths = sorted({row['tokens'] for row in run})
    found = {(row['mixer'], row['tokens']): row for row in rows}
    mixers = [mixer for mixer in NAMES if any(row['mixer'] == mixer for row in run)]

    def cell(row: dict | None, key: str, form: Callable[[float], str]) -> str:
        if row is None:
            return '–'
        if reason := short_reason(row):
            return reason
        return '–' if row[key] is None else form(row[key]) + (' †' if row.get('checkpointing') else '')

    def table(title: str, key: str, form: Callable[[float], str]) -> str:
        lines = [[NAMES[mixer], *(cell(found.get((mixer, x)), key, form) for x in lengths)] for mixer in mixers]
        return markdown_table([title, *map(length_name, lengths)], lines)

    return [
        table('tokens/s', 'tokens_per_second', '{:,.0f}'.format),
        table('peak memory, GiB', 'peak_bytes', lambda x: number(x / 2**30)),
    ]


def title_of(row: dict) -> str:
    batch = f', batch {row["batch"]}' if row['kind'] in ('prefill', 'decode') else ''
    return f'{KINDS[row["kind"]]}, {size_name(row["size"])}{batch}'


def throughput_section(content: dict, path: Path) -> str:
    groups: dict[str, list[dict]] = {}
    for row in content['rows']:
        groups.setdefault(title_of(row), []).append(row)
    parameters = '\n'.join(
        f'- {size_name(size)}: ' + '; '.join(f'{NAMES[mixer]} {count / 1e6:,.1f}M' for mixer, count in counts.items())
        for size, counts in content['parameters'].items()
    )
    parts = [
        f'## Throughput, {content["card"]}',
        described(content, command_of(throughput_parser(), content['settings'])),
        '\n'.join(f'- {KINDS.get(name, name.capitalize())}: {text}.' for name, text in content['method'].items()),
        f'Parameters:\n\n{parameters}',
        *(f'![{name.capitalize()}]({plot.name})' for name, plot in plot_paths(path).items() if plot.exists()),
    ]
    for title, rows in groups.items():
        if any(short_reason(row) is None for row in rows):
            parts += [f'### {title}', *throughput_tables(rows)]
    if any(row.get('checkpointing') for row in content['rows']):
        parts.append('† with activation checkpointing, as it did not fit without.')
    for heading, key in (('Failed', 'error'), ('Not run', 'not_run')):
        if rows := [row for row in content['rows'] if key in row]:
            parts += [f'### {heading}', reasons(
                (title_of(row), length_name(row['tokens']), NAMES[row['mixer']], first_sentences(row[key]))
                for row in sorted(rows, key=lambda row: row['tokens'])
            )]
    return '\n\n'.join(parts)


def folder_section(path: Path) -> str:
    """Ready tables of a folder as they are; links to what lies beside them are made to lead there."""
    def lead(match: re.Match) -> str:
        inside = path.parent / match[1]
        return f']({path.parent.name}/{match[1]})' if inside.exists() else match[0]

    text = re.sub(r'\]\(([^)#:]+)\)', lead, path.read_text().strip())
    job, _, card = path.parent.name.partition('_')
    return f'## {job.capitalize()}, {card.replace("-", " ")}\n\n{text}'


def load(results: Path, pattern: str) -> dict[Path, dict]:
    return {path: json.loads(path.read_text()) for path in sorted(results.glob(pattern))}


def scaling_section(content: dict) -> str:
    """Speed and memory of `examples/pretrain.py` by model and number of GPUs, and how far losses are from those on one."""
    rows, settings = content['rows'], content['settings']
    most = str(max((row['gpus'] for row in rows if 'losses' in row), default=0))
    alone = {row['model']: row['losses'] for row in rows if row['gpus'] == 1 and 'losses' in row}
    lines = []
    for row in rows:
        if 'losses' not in row:
            continue
        differences = [abs(x - y) for x, y in zip(row['losses'], alone.get(row['model'], []), strict=False)]
        lines.append([
            row['model'], str(row['gpus']), f'{row["tokens_per_second_per_gpu"]:,.0f}',
            '–' if row['mfu'] is None else f'{row["mfu"]:.1%}', f'{row["memory_gib"]:.1f}', f'{row["estimated_gib"]:.1f}',
            f'{max(differences):.1g}' if differences and row['gpus'] > 1 else '–',
        ])
    header = ['model', 'GPUs', 'tokens/s each', 'FLOPs used', 'GiB on each', 'estimated', 'losses differ by up to']
    parts = [
        f'## Pretraining, {content["card"]}',
        described(content, command_of(pretraining_parsers()[1]['scaling'], settings), most),
        f'`examples/pretrain.py`: steps of {settings["batch_tokens"]:,} tokens, rows of {settings["seq_len"]:,}, '
        f'{settings["rows"]} to a micro-batch; bf16 autocast over fp32 weights, AdamW, FSDP2 on more than one GPU. Medians.',
        markdown_table(header, lines),
    ]
    if failed := [row for row in rows if 'error' in row]:
        parts += ['### Without numbers', reasons(
            # of what a run has printed the last line, which tells its error
            ('Pretraining', f'{row["gpus"]} GPU{"s" if row["gpus"] > 1 else ""}', row['model'],
             first_sentences(row['error'].strip().splitlines()[-1])) for row in failed
        )]
    return '\n\n'.join(parts)


def run_section(content: dict, plot: Path) -> str:
    """One real run: how far the loss fell, how fast, and what the model writes."""
    run, settings = content['run'], content['settings']
    return '\n\n'.join((
        f'## A pretraining run, {content["card"]}',
        described(content, command_of(pretraining_parsers()[1]['run'], settings)),
        f'`{settings["model"]}` on {run["tokens"][-1]:,.0f} tokens, of {content["text_bytes"]:,} bytes of text: '
        f'{run["seconds"] / 60:.1f} minutes, {run["tokens_per_second_per_gpu"]:,.0f} tokens/s, {run["memory_gib"]:.1f} GiB; '
        f'from {run["losses"][0]:.2f} to {statistics.fmean(run["losses"][-20:]):.3f} nats per byte, the mean of 20 steps.',
        f'![Loss]({plot.name})',
        'The last checkpoint, exported and loaded, writes (temperature 0.7, top 40):',
        '```text\n' + run['sample'].replace('```', "'''") + '\n```',
    ))


def make_page(results: Path) -> str:
    parts = [
        '# Results',
        'Written by `python -m benchmarks.page` from the files in this folder, which hold all numbers. What could not be run '
        'is named at the end of its section.',
        *(ops_section(content, path.with_suffix('.png')) for path, content in load(results, 'ops_*.json').items()),
        *(throughput_section(content, path) for path, content in load(results, 'throughput_*.json').items()),
        *(scaling_section(content) for content in load(results, 'pretraining-scaling_*.json').values()),
        *(run_section(content, path.with_suffix('.png')) for path, content in load(results, 'pretraining-run_*.json').items()),
        *(folder_section(path) for path in sorted(results.glob('*/results.md'))),
    ]
    return '\n\n'.join(parts) + '\n'


def short_version(content: dict) -> str:
    torch, triton = ('.'.join(content['versions'][name].split('.')[:2]) for name in ('torch', 'triton'))
    return f'torch {torch}, Triton {triton}'


def readme_ops(content: dict) -> str | None:
    table = ops_table(content['rows'], 'chunk', 'fwdbwd', README_OPS)
    if table is None:
        return None
    B, T, H, D = next(row['shape'] for row in content['rows'] if row['kind'] == 'chunk')
    return (
        f"`python -m benchmarks.ops` times the ops beside FLA's. Forward and backward of {B * T:,} tokens on one "
        f'{content["card"]}, {H} heads of {D}, bf16, as layers call them ({short_version(content)}), in ms:\n\n{table}'
    )


def readme_throughput(content: dict) -> str | None:
    """Tokens a second at the two lengths that are measured first: training of the largest models, decoding of the most
    sequences."""
    rows = content['rows']
    columns: dict[str, list[dict]] = {}
    trained = [row for row in rows if row['kind'] == 'model']
    decoded = [row for row in rows if row['kind'] == 'decode']
    trained = [row for row in trained if row['size'] == trained[0]['size']]
    decoded = [row for row in decoded if row['batch'] == max(row['batch'] for row in decoded)]
    for group in (trained, decoded):
        for tokens in list(dict.fromkeys(row['tokens'] for row in group))[:2]:
            found = [row for row in group if row['tokens'] == tokens]
            verb = 'training' if group is trained else 'decoding'
            size, shape = size_name(found[0]['size']), shape_text(found[0]['batch'], tokens)
            if any(short_reason(row) is None for row in found):
                columns[f'{verb} {size}, {shape}'] = found
    if not columns:
        return None

    def cell(mixer: str, column: list[dict]) -> str:
        row = next((row for row in column if row['mixer'] == mixer), None)
        return '–' if row is None else short_reason(row) or f'{row["tokens_per_second"]:,.0f}'

    run = {row['mixer'] for column in columns.values() for row in column if 'not_run' not in row}
    lines = [[NAMES[mixer], *(cell(mixer, column) for column in columns.values())] for mixer in NAMES if mixer in run]
    table = markdown_table(['tokens/s', *columns], lines)
    return (
        f'`python -m benchmarks.throughput` times whole models on one {content["card"]} ({short_version(content)}), steps of '
        f'training and decoding after a context:\n\n{table}'
    )


def readme_quality(content: dict) -> str | None:
    """Bits per byte, and accuracy at the last place of each task's first panel, of the mixers but for ablations."""
    def cell(value: dict | None, form: Callable[[float], str]) -> str:
        if value is None:
            return '–'
        return form(value['mean']) + (f' ± {form(value["spread"])}' if value['spread'] is not None else '')

    mixers = {mixer: x for mixer, x in content['mixers'].items() if not ABLATION.match(mixer)}
    columns: dict[str, dict[str, str]] = {
        'bits per byte': {mixer: cell(x.get('bits_per_byte'), '{:.3f}'.format) for mixer, x in mixers.items()},
    }
    # of the accuracies that are shown, how far one learning rate's is from another's
    moved: list[tuple[float, str]] = []
    for name, task in content['tasks'].items():
        panel, about = next(iter(task['panels'].items()))
        place = list(task['best'][panel])[-1]
        for mixer, x in mixers.items():
            by_rate = [found[panel][place] for found in x['accuracy_by_rate'].get(name, {}).values()]
            if by_rate:
                moved.append((max(by_rate) - min(by_rate), f'{task["title"]}, {MIXERS[mixer].label}'))
        columns[f'{task["title"]}, {place} {about["xlabel"]}'] = {
            mixer: cell(x.get('accuracy', {}).get(name, {}).get(panel, {}).get(place), '{:.1%}'.format)
            for mixer, x in mixers.items()
        }
    lines = [[MIXERS[mixer].label, *(column[mixer] for column in columns.values())] for mixer in mixers]
    if not lines:
        return None
    text = (
        f'`python -m benchmarks.compare` trains mixers side by side; on {content["device"]["name"]}s, seeds '
        f'{", ".join(map(str, content["settings"]["seeds"]))}, accuracies where it is hardest:\n\n'
        f'{markdown_table(["mixer", *columns], lines)}'
    )
    notes = ['KDA has its bounded gate here.'] if 'kda' in mixers else []
    if moved:
        notes.append(
            'Each mixer has the learning rate with the lowest loss of the first seed, on each task. That alone moves an '
            f"accuracy of this table by up to {100 * max(moved)[0]:.0f} points ({max(moved)[1]}): at the far end a difference "
            "is as much the rate's as the mixer's. The page has the accuracies with each rate."
        )
    if notes:
        text += '\n\n' + ' '.join(notes)
    return text


def make_block(results: Path) -> str:
    """What stands between the markers of the README."""
    parts = [
        *map(readme_ops, load(results, 'ops_*.json').values()),
        *map(readme_throughput, load(results, 'throughput_*.json').values()),
        *map(readme_quality, load(results, 'compare*/results.json').values()),
        f'All results: [{RESULTS}]({RESULTS}/README.md).',
    ]
    return '\n\n'.join(part for part in parts if part)


def with_block(readme: str, block: str) -> str:
    """The README with another text between its markers."""
    start, end = MARKERS
    if [readme.count(marker) for marker in MARKERS] != [1, 1] or readme.index(start) > readme.index(end):
        raise ValueError(f'README.md needs the lines {start} and {end}, once each and in this order')
    return readme[:readme.index(start) + len(start)] + f'\n{block}\n' + readme[readme.index(end):]


def main(argv: list[str] | None = None) -> int:
    """Write the page and the README's part; returns the exit code: with `--check`, 1 if either differs."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks.page', description=__doc__.partition('\n')[0])
    parser.add_argument('--check', action='store_true', help='write nothing; fail if a file is not as it would be written')
    parser.add_argument('--root', type=Path, default=ROOT, help='folder of the repository; default: this one')
    args = parser.parse_args(argv)
    results = args.root / RESULTS
    if not args.check:
        for path, content in load(results, 'throughput_*.json').items():
            # those that an interrupted run has not drawn
            if not any(plot.exists() for plot in plot_paths(path).values()):
                write_plots(path, content)
    readme = args.root / 'README.md'
    try:
        texts = {
            results / 'README.md': make_page(results),
            readme: with_block(readme.read_text(), make_block(results)),
        }
    except ValueError as error:
        parser.error(str(error))
    different = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in different:
        print(f'{path.relative_to(args.root)}: ' + ('not as it would be written' if args.check else 'written'))
        if not args.check:
            path.write_text(texts[path])
    return int(args.check and bool(different))


if __name__ == '__main__':
    sys.exit(main())
