# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import page
from benchmarks.ops.__main__ import make_parser as ops_parser
from benchmarks.throughput import report

README = 'Before.\n\n<!-- results -->\nold\n<!-- /results -->\n\nAfter.\n'
NUMBERS = {
    'tokens_per_second': 1234.5, 'ms': 3., 'ms_least': 2., 'ms_most': 4., 'calls': 3, 'first_s': 9., 'held_bytes': 2**30,
    'peak_bytes': 3 * 2**30,
}
OUT_OF_MEMORY = 'OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 139 GiB.'


def throughput_row(mixer: str, kind: str, batch: int, tokens: int, **found) -> dict:
    return {'size': '1.3b', 'mixer': mixer, 'kind': kind, 'batch': batch, 'tokens': tokens, **(found or NUMBERS)}


THROUGHPUT = {
    'card': 'Some Card',
    'versions': {'fla_kdn': '0.1.0', 'torch': '2.11.0+cu130', 'triton': '3.6.0', 'fla': '0.6.0', 'transformers': '5.17.0'},
    'commit': None,
    'settings': {'device': None, 'warm': 14, 'deadline': 240., 'resume': True},
    'method': {'model': 'how a model', 'times': 'how times'},
    'parameters': {'1.3b': {'kdn-diagonal': 1.3e9}},
    'rows': [
        throughput_row('kdn-diagonal', 'model', 8, 4096),
        throughput_row('kda', 'model', 8, 4096, **NUMBERS, checkpointing=True),
        throughput_row('kdn-diagonal', 'model', 16, 2048),
        throughput_row('kda', 'model', 16, 2048, not_run='the deadline of 240 s had passed'),
        throughput_row('attention', 'model', 16, 2048, not_run='the deadline of 240 s had passed'),
        throughput_row('kdn-diagonal', 'decode', 1, 4096),
        throughput_row('kdn-diagonal', 'decode', 64, 4096),
        throughput_row('attention', 'decode', 64, 4096, error=OUT_OF_MEMORY),
    ],
    'seconds': 239.6,
}
COMPARE = {
    'device': {'name': 'Some Card'},
    'settings': {'seeds': [0, 1]},
    'tasks': {'recall': {
        'title': 'recall',
        'panels': {'pairs': {'title': 'pairs', 'xlabel': 'pairs'}},
        'best': {'pairs': {'4': 1., '128': 1.}},
    }},
    'mixers': {
        'kdn-diagonal': {
            'bits_per_byte': {'mean': 1.25, 'spread': 0.01},
            'accuracy': {'recall': {'pairs': {'4': {'mean': 1., 'spread': 0.}, '128': {'mean': 0.5, 'spread': None}}}},
            'accuracy_by_rate': {'recall': {'0.001': {'pairs': {'128': 0.1}}, '0.003': {'pairs': {'128': 0.5}}}},
        },
        'kda': {'bits_per_byte': {'mean': 1.5, 'spread': None}, 'accuracy_by_rate': {}},
        'kdn-diagonal-fixed-r': {'bits_per_byte': {'mean': 9., 'spread': None}, 'accuracy_by_rate': {}},
    },
}
VERSIONS = {'card': 'Some Card', 'versions': {'torch': '2.11.0+cu130'}, 'commit': 'abc', 'seconds': 400., 'text_bytes': 12345}
SETTINGS = {'seq_len': 4096, 'batch_tokens': 65536, 'rows': 4, 'text': None}
TRAINED = {'tokens_per_second_per_gpu': 45678.9, 'mfu': 0.391, 'memory_gib': 61.25, 'estimated_gib': 62.9}
SCALING = {
    **VERSIONS,
    'settings': {**SETTINGS, 'models': ['kdn-1.3b-diagonal'], 'gpus': [1, 2, 4], 'steps': 12},
    'rows': [
        {'model': 'kdn-1.3b-diagonal', 'gpus': 1, 'losses': [5.5, 4.5], **TRAINED},
        {'model': 'kdn-1.3b-diagonal', 'gpus': 2, 'losses': [5.5, 4.503], **TRAINED},
        {'model': 'kdn-1.3b-diagonal', 'gpus': 4, 'error': 'the machine has 2 GPUs'},
    ],
}
RUN = {
    **VERSIONS,
    'settings': {**SETTINGS, 'model': 'kdn-0.1b-diagonal', 'train_tokens': 2e8, 'learning_rate': 1e-3},
    'run': {**TRAINED, 'losses': [5.5, 1.25], 'tokens': [1000., 2000.], 'seconds': 90., 'sample': 'def a():\n```'},
}


@pytest.fixture
def root(tmp_path):
    """A repository with the results of the ops, and others that are made up."""
    results = tmp_path / page.RESULTS
    results.mkdir(parents=True)
    for path in (page.ROOT / page.RESULTS).glob('ops_*'):
        shutil.copy(path, results)
    for name, content in {'throughput': THROUGHPUT, 'pretraining-scaling': SCALING, 'pretraining-run': RUN}.items():
        (results / f'{name}_Some-Card.json').write_text(json.dumps(content))
    folder = results / 'compare_Some-Card'
    folder.mkdir()
    (folder / 'results.json').write_text(json.dumps(COMPARE))
    (folder / 'results.md').write_text('### Overview\n\n![Losses](losses.png) [more](https://example.org/losses.png)\n')
    (folder / 'losses.png').touch()
    (tmp_path / 'README.md').write_text(README)
    return tmp_path


def run(root, *arguments: str) -> tuple[int, str, str]:
    code = page.main([f'--root={root}', *arguments])
    return code, (root / page.RESULTS / 'README.md').read_text(), (root / 'README.md').read_text()


def test_committed_page():
    """Both files are as the results make them."""
    assert page.main(['--check']) == 0


def test_check(root, capsys):
    assert page.main([f'--root={root}', '--check']) == 1
    assert not (root / page.RESULTS / 'README.md').exists() and (root / 'README.md').read_text() == README
    code, text, readme = run(root)
    assert code == 0
    assert run(root, '--check') == (0, text, readme)
    for path in (root / 'README.md', root / page.RESULTS / 'README.md'):
        kept = path.read_text()
        path.write_text(kept.replace('1,23', '1,24', 1))
        capsys.readouterr()
        assert run(root, '--check')[0] == 1
        assert capsys.readouterr().out == f'{path.relative_to(root)}: not as it would be written\n'
        path.write_text(kept)


def test_page(root):
    _, text, _ = run(root)
    # numbers, command, versions, plots
    stored = json.loads((root / page.RESULTS / 'ops_NVIDIA-H200.json').read_text())
    kda = {(*row['shape'][:2], row['mode']): row['ms'] for row in stored['rows'] if row['op'] == 'chunk_kda' and 'ms' in row}
    assert f' {kda[8, 4096, "fwdbwd"]:.2f} |' in text and '`python -m benchmarks.ops --' in text
    assert 'Gated DeltaNet): RuntimeError: ' in text and '![Chunked ops](ops_' in text
    assert '`python -m benchmarks.throughput --warm 14 --deadline 240 --resume` on one Some Card, 240 s.' in text
    assert 'torch 2.11.0+cu130' in text and 'commit not recorded' in text and '- Training, whole model: how a model.' in text
    assert '![Models](throughput_Some-Card_models.png)' in text and '![Layers]' not in text
    # a table over sorted lengths
    training = text[text.index('### Training, whole model, 1.3B'):text.index('### Decoding, 1.3B')]
    assert '| tokens/s | 2K | 4K |' in training and '| KDA | not run | 1,234 † |' in training
    assert '| peak memory, GiB | 2K | 4K |' in training and '| KDN diagonal | 3.00 | 3.00 |' in training
    # what has no number
    assert '| softmax attention | out of memory |' in text
    assert (
        '### Failed\n\n- Decoding, 1.3B, batch 64, 4K (softmax attention): OutOfMemoryError: CUDA out of memory. '
        'Tried to allocate 6.00 GiB.\n' in text
    )
    assert '- Training, whole model, 1.3B, 2K (KDA; softmax attention): the deadline of 240 s had passed\n' in text
    assert '## Ops, NVIDIA H200\n' in text and '## Ops, NVIDIA H200, decoding\n' in text
    # ready tables, with links that lead into their folder
    assert text.endswith(
        '## Compare, Some Card\n\n### Overview\n\n![Losses](compare_Some-Card/losses.png) [more](https://example.org/losses.png)\n'
    )


def test_plots_that_an_interrupted_run_has_not_drawn(root, monkeypatch):
    _, text, _ = run(root)
    plots = {path.name for path in (root / page.RESULTS).glob('throughput_*.png')}
    assert plots == {f'throughput_Some-Card_{name}.png' for name in ('models', 'decoding')}
    monkeypatch.setattr(page, 'write_plots', None)
    assert run(root)[1] == text


def test_readme(root):
    _, _, readme = run(root)
    before, _, after = readme.partition('<!-- results -->')
    block, _, after = after.partition('<!-- /results -->')
    assert before == 'Before.\n\n' and after == '\n\nAfter.\n' and 'old' not in block
    stored = json.loads((root / page.RESULTS / 'ops_NVIDIA-H200.json').read_text())
    ops = {row['op']: f'{row["ms"]:.2f}' for row in stored['rows']
           if 'ms' in row and row['mode'] == 'fwdbwd' and row['shape'][0] == 1 and row['kind'] == 'chunk'}
    names = ('chunk_kdn', 'chunk_kdn_isotropic', 'chunk_kda', 'chunk_kda_bounded', 'chunk_gdn2', 'chunk_precond_kda')
    assert f'| 1 × 32,768 | {" | ".join(ops[name] for name in names)} |' in block
    # of decoding the most sequences; without KDA, which did not train at 2K, there would be no row for it
    assert '| tokens/s | training 1.3B, 8 × 4,096 | training 1.3B, 16 × 2,048 | decoding 1.3B, 64 × 4,096 |' in block
    assert '| KDN diagonal | 1,234 | 1,234 | 1,234 |' in block and '| KDA | 1,234 | not run | – |' in block
    assert '| softmax attention | – | not run | out of memory |' in block
    assert '| mixer | bits per byte | recall, 128 pairs |' in block
    assert '| KDN diagonal | 1.250 ± 0.010 | 50.0% |' in block and '| KDA | 1.500 | – |' in block and '9.000' not in block
    assert 'moves an accuracy of this table by up to 40 points (recall, KDN diagonal)' in block


@pytest.mark.parametrize('readme', ['none', README + README, '<!-- /results -->\n<!-- results -->\n'])
def test_readme_without_its_markers(root, capsys, readme):
    (root / 'README.md').write_text(readme)
    with pytest.raises(SystemExit):
        page.main([f'--root={root}'])
    assert 'README.md needs the lines <!-- results --> and <!-- /results -->' in capsys.readouterr().err
    assert (root / 'README.md').read_text() == readme


def test_command():
    """What differs from the defaults, as it is typed."""
    parser = ops_parser()
    settings = vars(parser.parse_args(['--shapes', '2x64', '1x128', '--bandwidth', '3', '--modes', 'fwd']))
    settings = json.loads(json.dumps({key: value for key, value in settings.items() if key != 'out'}))
    assert page.command_of(parser, settings) == 'python -m benchmarks.ops --shapes 2x64 1x128 --modes fwd --bandwidth 3'
    assert page.command_of(parser, {'rep': 200}) == 'python -m benchmarks.ops'


def test_names_of_all_ops_and_mixers():
    stored = [json.loads(path.read_text()) for path in (page.ROOT / page.RESULTS).glob('ops_*.json')]
    assert stored and all(row['op'] in page.OP_NAMES for content in stored for row in content['rows'])
    assert set(page.README_OPS) <= set(page.OP_NAMES) and set(report.KINDS) == {'model', 'layer', 'prefill', 'decode'}


def test_pretraining(root):
    _, text, _ = run(root)
    assert '`python -m benchmarks.pretraining scaling --models kdn-1.3b-diagonal --gpus 1 2 4` on 2 Some Card, 400 s.' in text
    assert '| kdn-1.3b-diagonal | 1 | 45,679 | 39.1% | 61.2 | 62.9 | – |' in text
    assert '| kdn-1.3b-diagonal | 2 | 45,679 | 39.1% | 61.2 | 62.9 | 0.003 |' in text
    assert '- Pretraining, 4 GPUs (kdn-1.3b-diagonal): the machine has 2 GPUs' in text
    assert '`python -m benchmarks.pretraining run --train-tokens 2e+08 --batch-tokens 65536 --rows 4` on one Some Card' in text
    assert 'from 5.50 to 3.375 nats per byte' in text and '![Loss](pretraining-run_Some-Card.png)' in text
    # the end of the sample is that of its block
    assert text.count('```') == 2
