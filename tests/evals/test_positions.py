# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import math

import pytest
import tiny
import torch
from torch.nn import functional as F

from evals import positions
from evals.common import read_text
from evals.positions import FIRST_BUCKET, bucket, choose_piece, make_edges, make_windows, token_losses

TOKENIZER = tiny.make_tokenizer()
TEXT = ''.join(f'{i} times {i} is {i * i}.\n' for i in range(200))


def test_windows_lie_side_by_side():
    windows = make_windows(TOKENIZER, TEXT, 500, 4)
    assert windows.shape == (4, 501)
    ids = TOKENIZER(TEXT)['input_ids']
    assert windows[:, :-1].flatten().tolist() == ids[:2000] and windows[-1, -1] == ids[2000]
    assert len(make_windows(TOKENIZER, TEXT, 500, 100)) == (len(ids) - 1) // 500
    assert len(make_windows(TOKENIZER, TEXT, len(ids) - 1, 100)) == 1
    with pytest.raises(ValueError, match=r'--text: .* --max-length'):
        make_windows(TOKENIZER, TEXT, len(ids), 1)


@pytest.mark.parametrize('max_length', [1, 16, 17, 32, 1000, 32768])
def test_buckets_cover_a_window(max_length):
    edges = make_edges(max_length)
    assert edges[0] == 0 and edges[-1] == max_length and edges == sorted(set(edges))
    assert all(1.3 < end / start < 1.5 for start, end in zip(edges[1:-1], edges[2:-1], strict=False))
    assert edges[1] == min(FIRST_BUCKET, max_length)


@pytest.mark.parametrize('name', tiny.MODELS)
def test_perplexity_is_the_cross_entropy_of_the_tokens(name):
    model = tiny.make_model(name)
    windows = make_windows(TOKENIZER, TEXT, 150, 3)
    losses = torch.stack([token_losses(model, window, piece=150) for window in windows])
    with torch.no_grad():
        logits = model(input_ids=windows, use_cache=False).logits[:, :-1].double()
    expected = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction='none')
    torch.testing.assert_close(losses.double(), expected, atol=5e-5, rtol=0)

    edges = make_edges(150)
    result = bucket(losses, edges)
    assert len(result['perplexity']) == len(edges) - 1
    for i, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        assert math.log(result['perplexity'][i]) == pytest.approx(expected[:, start:end].mean().item(), abs=5e-5)
        means = expected[:, start:end].mean(1)
        assert result['standard_error_nats'][i] == pytest.approx((means.std() / 3 ** 0.5).item(), abs=5e-5)

    # through the cache, in pieces that do not divide the window
    for piece in (1, 64, 70):
        torch.testing.assert_close(token_losses(model, windows[0], piece), losses[0], atol=1e-4, rtol=0)


def test_the_piece_follows_the_memory(monkeypatch):
    model = tiny.make_model('diagonal')
    assert choose_piece(model, 5000) == 5000
    monkeypatch.setattr(positions.os, 'sysconf', lambda _: 1000)
    assert choose_piece(model, 5000) == positions.PIECE and choose_piece(model, 600) == 600


@pytest.fixture
def run(tmp_path):
    """The job on two tiny models; takes further arguments, returns the results."""
    (tmp_path / 'text.txt').write_text(TEXT)
    models = [tiny.save(tmp_path, name) for name in ('diagonal', 'kda')]
    arguments = [*models, '--text', str(tmp_path / 'text.txt'), '--max-length', '400', '--output', str(tmp_path / 'out')]

    def job(*more: str) -> dict:
        positions.main([*arguments, *more])
        return json.loads((tmp_path / 'out' / 'positions.json').read_text())

    job.output, job.models = tmp_path / 'out', models
    return job


def test_job_reports_all_models(run, capsys):
    content = run()
    assert list(content['models']) == run.models
    assert (run.output / 'positions.png').read_bytes().startswith(b'\x89PNG')
    assert capsys.readouterr().out.count('perplexity') == 2
    pieces = run('--piece', '100', '--windows', '2')
    for path, result in pieces['models'].items():
        assert len(result['perplexity']) == len(content['settings']['edges']) - 1
        assert (result['windows'], result['piece'], content['models'][path]['piece']) == (2, 100, 400)
        windows = make_windows(TOKENIZER, read_text(str(run.output.parent / 'text.txt')), 400, 2)
        expected = torch.stack([token_losses(tiny.make_model(path.split('/')[-1]), x, 400) for x in windows])
        assert math.log(result['mean_perplexity']) == pytest.approx(expected.mean().item(), abs=1e-4)
    alone = run('--windows', '1')['models'][run.models[0]]
    assert set(alone['standard_error_nats']) == {None}


@pytest.mark.parametrize(('argument', 'value', 'match'), [
    ('--text', 'no/such/file', '--text: no/such/file'),
    ('--max-length', '100000', '--max-length 100,000'),
    ('--windows', '0', '--windows'),
    ('--piece', 'x', '--piece'),
])
def test_bad_arguments_are_named(run, capsys, argument, value, match):
    with pytest.raises(SystemExit, match='2'):
        run(argument, value)
    assert match in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match='2'):
        positions.main([str(tmp_path / 'nothing')])
    assert f'MODEL {tmp_path}/nothing' in capsys.readouterr().err
