# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The page on a text: what is on it, from where it takes the text, and what it says of mistakes."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from fla.models import KDAConfig, KDAForCausalLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fla_kdn import KDNConfig, KDNForCausalLM
from fla_kdn.inspect import MEASURES, Trace, heat_maps, main, trace

TEXT = 'one two </script> two\n<one> & two'
WORDS = ['one', 'two', '</script>', '<one>', '&']
SIZES = {'hidden_size': 32, 'num_heads': 2, 'head_dim': 8, 'num_hidden_layers': 3, 'vocab_size': len(WORDS)}


@pytest.fixture
def folder(tmp_path):
    """Folders of a diagonal hybrid, of an isotropic model and of FLA's KDA, with a tokenizer of words."""
    torch.manual_seed(0)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, model in {
        'hybrid': KDNForCausalLM(KDNConfig(**SIZES, attn={'layers': [1], 'num_heads': 2})),
        'isotropic': KDNForCausalLM(KDNConfig(**SIZES, covariance='isotropic', num_v_heads=4)),
        'kda': KDAForCausalLM(KDAConfig(**SIZES)),
    }.items():
        model.save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / name)
    return tmp_path


def test_values(folder):
    """Those of the model itself, by layer and head."""
    x = trace(str(folder / 'hybrid'), TEXT, 100, 'cpu')
    model = KDNForCausalLM.from_pretrained(folder / 'hybrid').eval()
    ids = torch.tensor([[0, 1, 2, 1, 3, 4, 1]])
    with torch.no_grad():
        output = model(ids, labels=ids, output_uncertainty='log_likelihood')
    assert x.tokens == ['one', 'two', '</script>', 'two', '<one>', '&', 'two'] and x.layers == [0, 2]
    assert abs(x.loss[1:].mean() - output.loss) < 1e-6
    for i, layer in enumerate(x.layers):
        got = {name: values[i].T[None] for name, values in x.values.items()}
        want = output.uncertainty[layer]
        assert torch.equal(got['write'], want.write_strength)
        assert torch.equal(got['read'], want.read_variance.sqrt())
        assert torch.equal(got['surprise'], -want.log_likelihood / 8)
    assert x.covariance.shape == (2, 2, 8) and (x.covariance.diff() <= 0).all() and x.covariance.min() > 0


@pytest.mark.parametrize('names', [['hybrid'], ['hybrid', 'isotropic']], ids=str)
def test_page(folder, names, capsys):
    arguments = [*(str(folder / name) for name in names), '--text', TEXT, '--output', str(folder / 'page')]
    main(arguments)
    assert capsys.readouterr().out == f'{folder / "page" / "index.html"}\n'
    files = {path.name for path in (folder / 'page').iterdir()}
    assert files == {'index.html', 'heat_maps.png', 'histograms.png'}
    page = (folder / 'page' / 'index.html').read_text()
    assert page.count('data:image/png;base64,') == 2 and 'http' not in page.replace('http-equiv', '')
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(data) == len(names)
    for name, x in zip(names, data, strict=True):
        assert set(x['values']) == set(MEASURES)
        # by which the page finds the rows of a layer
        assert x['layers'] == ([0, 2] if name == 'hybrid' else [0, 1, 2])
        assert all(len(rows) == len(x['layers']) and len(row) == 7 for rows in x['values'].values() for row in rows)
    offered = re.findall(r'<option value="(\d+)">layer (\d+)</option>', page)
    assert offered == [(str(i), str(i)) for i in ([0, 2] if names == ['hybrid'] else [0, 1, 2])]
    assert page.count('<span data-t="2">&lt;/script&gt;</span>') == len(names)


def test_long_text():
    """Longer than what `quantile` takes."""
    values = torch.arange(2 ** 24 + 8.).view(2, 4, -1)
    heat_maps([Trace(*[None] * len(Trace._fields))._replace(name='x', layers=[0, 1], values=dict.fromkeys(MEASURES, values))])


def test_sources_of_the_text(folder, monkeypatch, capsys):
    (folder / 'text').write_text(TEXT)
    pages = []
    for arguments in (['--text', TEXT], ['--file', str(folder / 'text')], []):
        monkeypatch.setattr('sys.stdin', io.StringIO(TEXT))
        main([str(folder / 'isotropic'), *arguments, '--output', str(folder / 'page')])
        pages.append((folder / 'page' / 'index.html').read_text())
    assert len(set(pages)) == 1
    main([str(folder / 'isotropic'), '--text', TEXT, '--max-tokens', '2', '--output', str(folder / 'page')])
    assert 'of 2 tokens' in (folder / 'page' / 'index.html').read_text()


@pytest.mark.parametrize(('arguments', 'message'), [
    (['kda', '--text', 'one'], "of type 'kda'"),
    (['hybrid', '--text', ''], 'no tokens'),
    (['hybrid', '--text', 'one', '--max-tokens', '0'], '--max-tokens'),
    (['hybrid', '--file', 'missing'], 'missing'),
    (['hybrid', 'hybrid', 'hybrid', '--text', 'one'], 'two models'),
    (['hybrid', '--text', 'one', '--output', 'hybrid/config.json'], 'File exists'),
], ids=str)
def test_mistakes(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err
