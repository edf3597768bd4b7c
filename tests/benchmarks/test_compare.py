# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.compare import measure, mixers
from benchmarks.compare.data import (
    IGNORE,
    SHARED_LENGTH,
    Text,
    paragraphs,
    read_documents,
    recall_batch,
    recall_batches,
    split,
)
from benchmarks.compare.mixers import MIXERS, build_config, build_model, count_parameters, matched_config
from benchmarks.compare.settings import PRESETS, Backbone, Recall, Training
from fla_kdn.models.optim import parameter_groups

job = import_module('benchmarks.compare.__main__')

TINY = replace(
    PRESETS['cpu'],
    backbone=Backbone(
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=2,
        head_dim=16,
        intermediate_size=64,
        width_step=1,
        initializer_range=0.04,
    ),
    seq_len=32,
    language=Training(steps=50, tokens=64, learning_rate=1e-3),
    recall=Training(steps=50, tokens=64, learning_rate=1e-3),
    recall_data=Recall(symbols=8, train_pairs=(2, 4), eval_pairs=(2, 8), eval_sequences=4),
    decode_batch=2,
    decode_tokens=2,
    repeats=1,
)
DOCUMENTS = {
    f'{i}.txt': '\n\n'.join([f'Document {i}.', *(f'{i}, paragraph {j}: ' + 'some words of it ' * 6 for j in range(8))])
    for i in range(20)
}


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The job at tiny sizes, on text of its own; takes further arguments, returns the exit code."""
    monkeypatch.setitem(PRESETS, 'cpu', TINY)
    monkeypatch.setattr(measure, 'SAMPLE_BYTES', 4)
    folder = tmp_path / 'text'
    folder.mkdir()
    for name, document in DOCUMENTS.items():
        (folder / name).write_text(document)
    arguments = ['--preset', 'cpu', '--text', str(folder), '--out', str(tmp_path / 'out')]
    return lambda *more: job.main([*arguments, *more])


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that are trained from now on."""
    names, train = [], job.train

    def recording(run, *args):
        names.append(run.name)
        return train(run, *args)

    monkeypatch.setattr(job, 'train', recording)
    return names


def test_recall_answers_are_those_shown():
    recall, pairs = Recall(symbols=16, train_pairs=(2, 8), eval_pairs=(4,), eval_sequences=4), 5
    inputs, targets = recall_batch(recall, pairs, 7, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (7, 4 * pairs - 1)
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        shown = dict(zip(x[:2 * pairs:2], x[1:2 * pairs:2], strict=True))
        assert len(shown) == pairs
        assert max(shown) < recall.symbols <= min(shown.values())
        # an answer stands where its key is read, and every key is asked
        assert {x[i]: token for i, token in enumerate(y) if token != IGNORE and i >= 2 * pairs} == shown
        assert sum(token != IGNORE for token in y) == pairs
        # the next input is the answer
        assert all(token in (IGNORE, after) for token, after in zip(y, x[1:], strict=False))


def test_recall_data_follow_the_seed():
    first, again, other = ([x for x, _ in recall_batches(TINY.recall_data, TINY.recall, seed)] for seed in (0, 0, 1))
    assert len(first) == TINY.recall.steps
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def long_paragraphs(texts: list[str]) -> set[str]:
    return {words for text in texts for words, _ in paragraphs(text) if len(words) >= SHARED_LENGTH}


def test_documents_that_quote_each_other_are_not_in_both_parts():
    # in lines of another width
    quoting = '\n\n'.join(DOCUMENTS.values()).replace('words of', 'words\n   of')
    train, validation = split({**DOCUMENTS, 'a.txt': quoting, 'z.txt': quoting})
    assert train and validation
    assert not long_paragraphs(train) & long_paragraphs(validation)
    assert long_paragraphs(train) | long_paragraphs(validation) == long_paragraphs(list(DOCUMENTS.values()))


def test_one_document_is_split_at_its_tail():
    lines = [f'line {i}' for i in range(1000)]
    (train,), (validation,) = split({'a': '\n'.join(lines)})
    assert (train + validation).splitlines() == lines
    assert 0.08 < len(validation) / len(train + validation) < 0.12


def test_text_batches_follow_the_seed_and_stay_in_the_training_part():
    text = Text(DOCUMENTS, 'documents')
    first, again, other = (list(text.batches(TINY.language, TINY.seq_len, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(first[0], again[0], strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    stream = bytes(text.train.tolist())
    for inputs, targets in first[:5]:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert all(bytes(x.tolist()) in stream for x in inputs)
    inputs, targets = text.validation_windows(TINY.seq_len)
    assert bytes(inputs.flatten().tolist()) == bytes(text.validation.tolist())[:inputs.numel()]
    assert len(text.validation) - inputs.numel() <= TINY.seq_len


def test_documentation_of_python_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pydoc_data.topics', None)
    with pytest.raises(ValueError, match='--text'):
        read_documents(None)


@pytest.mark.parametrize(('argument', 'value', 'match'), [
    ('--text', 'no/such/file', '--text: no/such/file'),
    ('--seq-len', '1000000', '--seq-len 1000000'),
    ('--steps', '0', '--steps'),
    ('--seeds', '1,1', '--seeds'),
    ('--mixers', 'attention', '--mixers'),
])
def test_bad_arguments_are_named(compare, capsys, argument, value, match):
    with pytest.raises(SystemExit, match='2'):
        compare(argument, value)
    assert match in capsys.readouterr().err


@pytest.mark.parametrize('mixer', MIXERS)
@pytest.mark.parametrize('preset', [PRESETS['cpu'], PRESETS['gpu'], TINY], ids=['cpu', 'gpu', 'tiny'])
def test_models_have_one_size(preset, mixer):
    backbone = preset.backbone
    target = count_parameters(build_config('kda', backbone, backbone.intermediate_size))
    config, parameters = matched_config(mixer, backbone)
    assert abs(parameters / target - 1) <= 0.01
    if backbone.hidden_size < 128:
        assert sum(p.numel() for p in build_model(config, seed=0).parameters()) == parameters


def test_a_size_that_cannot_be_matched_is_refused():
    with pytest.raises(ValueError, match='gated-deltanet'):
        matched_config('gated-deltanet', replace(TINY.backbone, width_step=64))


def test_weights_that_all_mixers_have_start_equal():
    models = [dict(build_model(matched_config(mixer, TINY.backbone)[0], seed=3).named_parameters()) for mixer in MIXERS]
    for name in ('model.embeddings', 'lm_head', 'model.layers.0.attn.k_proj', 'model.layers.0.attn.v_conv1d'):
        assert all(torch.equal(model[f'{name}.weight'], models[0][f'{name}.weight']) for model in models)
    again = dict(build_model(matched_config('kda', TINY.backbone)[0], seed=4).named_parameters())
    assert not torch.equal(again['lm_head.weight'], models[0]['lm_head.weight'])


@pytest.mark.parametrize('mixer', MIXERS)
def test_loaded_models_keep_their_undecayed_parameters(mixer, tmp_path):
    model = build_model(matched_config(mixer, TINY.backbone)[0], seed=0)
    flagged = {name for name, p in model.named_parameters() if getattr(p, '_no_weight_decay', False)}
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    decayed, plain = parameter_groups(model, 0.1)
    names = {p: name for name, p in model.named_parameters()}
    undecayed = {names[p] for p in plain['params']}
    assert decayed['weight_decay'] == 0.1 and plain['weight_decay'] == 0
    assert {names[p] for p in decayed['params']} | undecayed == set(names.values())
    assert flagged <= undecayed
    assert undecayed >= {name for name, p in model.named_parameters() if p.ndim == 1}
    assert not any(p.ndim > 1 for p in plain['params'])


def test_job_reports_and_resumes(compare, trained, tmp_path, capsys):
    assert compare('--steps', '2') == 0
    assert len(trained) == 2 * len(MIXERS)
    out = tmp_path / 'out'
    content = json.loads((out / 'results.json').read_text())
    assert list(content['mixers']) == list(MIXERS) and not content['failures']
    for mixer, x in content['mixers'].items():
        assert x['bits_per_byte']['mean'] > 0 and set(x['recall']) == {'2', '8'}
        assert x['train_tokens_per_second'] > 0 and x['decode_tokens_per_second'] > 0
        # at least weights, gradients and two moments, in fp32
        assert x['memory_bytes'] > 16 * x['parameters']
        # memory of two heads and the last four inputs of three convolutions, in fp32
        extra = {'kdn-diagonal': 2 * 16 * 4, 'kdn-isotropic': 2 * 4}.get(mixer, 0)
        assert x['state_bytes'] == 2 * 16 * 16 * 4 + 3 * 32 * 4 * 4 + extra
        assert AutoModelForCausalLM.from_pretrained(out / 'models' / mixer).config.vocab_size == 256
    best = min(content['mixers'], key=lambda mixer: content['mixers'][mixer]['bits_per_byte']['mean'])
    assert content['sample']['mixer'] == best and content['sample']['text']
    page = (out / 'report.html').read_text()
    assert page.count('data:image/png;base64,') == 6 and 'Gated DeltaNet' in page and 'http' not in page

    trained.clear()
    assert compare('--steps', '2', '--resume') == 0
    assert not trained
    with pytest.raises(SystemExit, match='2'):
        compare('--steps', '3', '--resume')
    assert 'steps was 2 and is now 3' in capsys.readouterr().err


def test_interrupted_job_goes_on_where_it_was(compare, trained, monkeypatch):
    names, train = trained, job.train

    def interrupted(run, *args):
        if len(names) == 2:
            raise KeyboardInterrupt
        return train(run, *args)

    arguments = ('--steps', '1', '--mixers', 'kda', '--seeds', '2')
    monkeypatch.setattr(job, 'train', interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(*arguments)
    assert names == ['kda-language-seed0', 'kda-recall-seed0']
    names.clear()
    monkeypatch.setattr(job, 'train', train)
    assert compare(*arguments, '--resume') == 0
    assert names == ['kda-language-seed1', 'kda-recall-seed1']


def test_a_mixer_that_fails_is_reported_and_the_others_go_on(compare, monkeypatch, tmp_path, capsys):
    train = job.train

    def failing(run, *args):
        if run.mixer == 'gated-deltanet' and run.task == 'recall':
            raise RuntimeError('not on this machine')
        return train(run, *args)

    def no_config(**_):
        raise RuntimeError('no such mixer')

    monkeypatch.setattr(job, 'train', failing)
    monkeypatch.setitem(mixers.MIXERS, 'kdn-isotropic', (no_config, {}))
    assert compare('--steps', '1', '--mixers', 'kda', 'gated-deltanet', 'kdn-isotropic') == 0
    content = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert list(content['mixers']) == ['kda', 'gated-deltanet']
    assert 'bits_per_byte' in content['mixers']['gated-deltanet'] and 'recall' not in content['mixers']['gated-deltanet']
    assert 'not on this machine' in content['failures']['gated-deltanet']
    assert 'no such mixer' in content['failures']['kdn-isotropic']
    assert 'not on this machine' in (tmp_path / 'out' / 'report.html').read_text()
    assert 'kdn-isotropic could not be compared in full' in capsys.readouterr().out
    assert compare('--steps', '1', '--mixers', 'kdn-isotropic') == 1
