# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import gc
import json
import sys
import weakref
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.compare import data, measure, mixers, workers
from benchmarks.compare.data import SHARED_LENGTH, Text, paragraphs, read_documents, read_library, split
from benchmarks.compare.mixers import MIXERS, build_config, build_model, count_parameters, matched_config
from benchmarks.compare.settings import PRESETS, Backbone
from benchmarks.compare.tasks import Needles, NoisyAssociations, Overwriting, Recall, Training
from evals.synthetic import TokenNeedles
from fla_kdn.models.optim import parameter_groups

job = import_module('benchmarks.compare.__main__')

TRAINING = Training(steps=50, tokens=64, learning_rates=(1e-3,))
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
    language=TRAINING,
    tasks={'recall': Recall(TRAINING, symbols=8, train_pairs=(2, 4), eval_pairs=(2, 8), eval_sequences=4)},
    decode_batch=2,
    decode_tokens=2,
    repeats=1,
)
WRITES = {'keys': 8, 'values': 4, 'train_writes': (1, 2), 'more_writes': ((4,),), 'eval_sequences': 32}
ALL_TASKS = {
    **TINY.tasks,
    'needles': Needles(TRAINING, TokenNeedles(keys=4, values=4, distractors=4), (16,), (16, 32), eval_sequences=4),
    'noisy': NoisyAssociations(TRAINING, **WRITES, reliability=0.6),
    'overwriting': Overwriting(TRAINING, **WRITES, train_keys=(2,), eval_keys=(2, 4)),
}
DEFAULT_MIXERS = PRESETS['cpu'].mixers
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
    names, train = [], workers.train

    def recording(run, *args):
        names.append(run.name)
        return train(run, *args)

    monkeypatch.setattr(workers, 'train', recording)
    return names


def read_results(tmp_path) -> dict:
    return json.loads((tmp_path / 'out' / 'results.json').read_text())


def long_paragraphs(texts: list[str]) -> set[str]:
    return {words for text in texts for words, _ in paragraphs(text) if len(words) >= SHARED_LENGTH}


def test_split_keeps_headings_and_does_not_depend_on_the_order():
    documents = {f'{i}.txt': f'Title\n\nlong paragraph {i} ' + f'w{i} ' * 40 for i in range(30)}
    train, validation = split(documents)
    assert split(dict(reversed(documents.items()))) == (train, validation)
    assert all(text.startswith('Title\n\n') for text in train)


def test_the_last_window_fits():
    text = Text({'a': 'x' * 40}, 'a')
    size = len(text.train)
    for _, targets in text.batches(Training(200, 8, (1e-3,)), size - 1, 0):
        assert targets.shape[1] == size - 1


@pytest.mark.parametrize('lines', [('\n', '\r\n'), ('\n\n', '\n  \n\t\n')], ids=['ends', 'blank'])
def test_paragraphs_of_files_from_elsewhere(tmp_path, lines):
    """Paragraphs are told apart in files of other editors and systems, too."""
    for name, text in DOCUMENTS.items():
        (tmp_path / name).write_bytes(text.replace(*lines).encode())
    documents = read_documents(str(tmp_path))
    assert {name: ' '.join(x.split()) for name, x in documents.items()} == {
        name: ' '.join(x.split()) for name, x in DOCUMENTS.items()}
    assert long_paragraphs(list(documents.values())) == long_paragraphs(list(DOCUMENTS.values()))


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


def test_library_of_python_is_its_sources_without_tests():
    documents = read_library()
    assert 'argparse.py' in documents and 'json/decoder.py' in documents
    assert all(name.endswith('.py') for name in documents)
    assert not any({'site-packages', 'test', 'tests'} & set(name.split('/')) for name in documents)
    assert sum(map(len, documents.values())) > 5e6


def test_what_is_held_out_of_a_long_text_is_limited(monkeypatch):
    whole = sum(map(len, DOCUMENTS.values()))
    monkeypatch.setattr(data, 'VALIDATION_LIMIT', whole // 20)
    _, validation = split(DOCUMENTS)
    assert whole // 20 <= sum(map(len, validation)) < 0.08 * whole


def test_documentation_of_python_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pydoc_data.topics', None)
    with pytest.raises(ValueError, match='--text'):
        read_documents(None)


@pytest.mark.parametrize(('argument', 'value', 'match'), [
    ('--text', 'no/such/file', '--text: no/such/file'),
    ('--seq-len', '1000000', '--seq-len 1000000'),
    ('--steps', '0', '--steps'),
    ('--seeds', '1,1', '--seeds'),
    ('--mixers', 'mamba', '--mixers'),
    ('--mixers', 'gdn2', 'gdn2 runs on a GPU only'),
    ('--tasks', 'noisy', 'noisy is not among language, recall'),
    ('--deadline', '-1', '--deadline'),
    ('--workers', '0', '--workers'),
])
def test_bad_arguments_are_named(compare, capsys, argument, value, match):
    with pytest.raises(SystemExit, match='2'):
        compare(argument, value)
    assert match in capsys.readouterr().err


@pytest.mark.parametrize('mixer', MIXERS)
@pytest.mark.parametrize('name', PRESETS)
def test_models_have_one_size(name, mixer):
    backbone = PRESETS[name].backbone
    target = count_parameters(build_config('kda', backbone, backbone.intermediate_size))
    config, parameters = matched_config(mixer, backbone)
    assert abs(parameters / target - 1) <= 0.01
    if backbone.hidden_size < 128:
        assert sum(p.numel() for p in build_model(config, seed=0).parameters()) == parameters


@pytest.mark.parametrize('name', PRESETS)
def test_presets_fit_together(name):
    preset = PRESETS[name]
    assert set(preset.mixers) <= set(MIXERS)
    for task in preset.tasks.values():
        inputs, _ = next(task.batches(seed=0))
        assert inputs.numel() <= task.training.tokens
        for x in (inputs, *(evaluation.inputs for evaluation in task.evaluations())):
            assert x.min() >= 0 and x.max() < preset.backbone.vocab_size


def test_a_size_that_cannot_be_matched_is_refused():
    with pytest.raises(ValueError, match='gated-deltanet'):
        matched_config('gated-deltanet', replace(TINY.backbone, width_step=64))


def test_weights_that_all_mixers_have_start_equal():
    configs = [matched_config(mixer, TINY.backbone)[0] for mixer in DEFAULT_MIXERS]
    models = [dict(build_model(config, seed=3).named_parameters()) for config in configs]
    for name in ('model.embeddings', 'lm_head', 'model.layers.0.attn.k_proj', 'model.layers.0.attn.v_conv1d'):
        assert all(torch.equal(model[f'{name}.weight'], models[0][f'{name}.weight']) for model in models)
    again = dict(build_model(matched_config('kda', TINY.backbone)[0], seed=4).named_parameters())
    assert not torch.equal(again['lm_head.weight'], models[0]['lm_head.weight'])


@pytest.mark.parametrize('mixer', ['kdn-diagonal', 'kda', 'gated-deltanet', 'gdn2', 'precond-kda', 'mamba2', 'kdn-exact'])
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
    assert len(trained) == 2 * len(DEFAULT_MIXERS)
    out = tmp_path / 'out'
    content = read_results(tmp_path)
    assert tuple(content['mixers']) == DEFAULT_MIXERS and not content['failures'] and not content['not_run']
    for mixer, x in content['mixers'].items():
        assert x['bits_per_byte']['mean'] > 0 and set(x['accuracy']['recall']['pairs']) == {'2', '8'}
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
    assert 'Gated DeltaNet' in capsys.readouterr().out

    trained.clear()
    assert compare('--steps', '2', '--resume') == 0
    assert not trained
    with pytest.raises(SystemExit, match='2'):
        compare('--steps', '3', '--resume')
    assert 'steps was 2 and is now 3' in capsys.readouterr().err


def test_all_tasks_are_reported(compare, monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, 'cpu', replace(TINY, tasks=ALL_TASKS))
    assert compare('--steps', '1', '--mixers', 'kda', 'attention', '--seeds', '2', '--no-speed') == 0
    out, content = tmp_path / 'out', read_results(tmp_path)
    for x in content['mixers'].values():
        assert x['state_bytes'] > 0 and 'train_tokens_per_second' not in x
        assert {task: set(panels) for task, panels in x['accuracy'].items()} == {
            task: set(about.panels) for task, about in ALL_TASKS.items()
        }
        assert all(0 <= value['mean'] <= 1 and len(value['values']) == 2
                   for panels in x['accuracy'].values() for places in panels.values() for value in places.values())
    # a plot for each task, the losses, in two themes; no speed
    page = (out / 'report.html').read_text()
    assert page.count('data:image/png;base64,') == 2 * (len(ALL_TASKS) + 1)
    assert {path.stem for path in (out / 'plots').iterdir()} == {*ALL_TASKS, 'losses'}
    text = (out / 'results.md').read_text()
    assert {line.split()[0] for line in text.splitlines() if line.startswith('#')} == {'###'}
    for title in ('text', *(about.title for about in ALL_TASKS.values())):
        assert f'- **{title}**: ' in text
    assert {line for line in text.splitlines() if line.startswith('!')} == {
        f'![{about.title.capitalize()}](plots/{task}.png)' for task, about in ALL_TASKS.items()
    }
    # every row of a table has the cells of its head
    for table in text.split('\n\n'):
        assert len({line.replace('\\|', '').count('|') for line in table.splitlines() if line.startswith('|')}) <= 1
    for note in ('- KDA has its bounded gate', '- Softmax attention has rotary positions'):
        assert note in text and note[2:] in page
    noisy = content['tasks']['noisy']
    assert f'| *best possible* | *{noisy["best"]["last_right"]["1"]:.1%}*' in text


def test_tasks_are_chosen(compare, trained, tmp_path):
    assert compare('--steps', '1', '--mixers', 'kda', '--tasks', 'recall') == 0
    assert trained == ['kda-recall-seed0']
    content = read_results(tmp_path)
    assert 'sample' not in content and 'bits_per_byte' not in content['mixers']['kda']


def test_interrupted_job_goes_on_where_it_was(compare, trained, monkeypatch):
    names, train = trained, workers.train

    def interrupted(run, *args):
        if len(names) == 2:
            raise KeyboardInterrupt
        return train(run, *args)

    arguments = ('--steps', '1', '--mixers', 'kda', '--seeds', '2')
    monkeypatch.setattr(workers, 'train', interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(*arguments)
    assert names == ['kda-language-seed0', 'kda-recall-seed0']
    names.clear()
    monkeypatch.setattr(workers, 'train', train)
    assert compare(*arguments, '--resume') == 0
    assert names == ['kda-language-seed1', 'kda-recall-seed1']


def test_a_mixer_that_fails_is_reported_and_the_others_go_on(compare, monkeypatch, tmp_path, capsys):
    train = workers.train

    def failing(run, *args):
        if run.mixer == 'gated-deltanet' and run.task == 'recall':
            raise RuntimeError('not on this machine')
        return train(run, *args)

    def no_config(**_):
        raise RuntimeError('no such mixer')

    monkeypatch.setattr(workers, 'train', failing)
    monkeypatch.setitem(mixers.MIXERS, 'kdn-isotropic', replace(MIXERS['kdn-isotropic'], config_class=no_config))
    assert compare('--steps', '1', '--mixers', 'kda', 'gated-deltanet', 'kdn-isotropic') == 0
    content = read_results(tmp_path)
    assert list(content['mixers']) == ['kda', 'gated-deltanet']
    assert 'bits_per_byte' in content['mixers']['gated-deltanet'] and not content['mixers']['gated-deltanet']['accuracy']
    assert content['failures'] == [
        {'mixer': 'kdn-isotropic', 'what': 'everything', 'reason': 'RuntimeError: no such mixer'},
        {'mixer': 'gated-deltanet', 'what': 'recall seed 0', 'reason': 'RuntimeError: not on this machine'},
    ]
    for name in ('report.html', 'results.md'):
        assert 'not on this machine' in (tmp_path / 'out' / name).read_text()
    assert 'Gated DeltaNet, recall seed 0: RuntimeError: not on this machine' in capsys.readouterr().out
    assert compare('--steps', '1', '--mixers', 'kdn-isotropic') == 1


def test_a_model_that_could_not_be_measured_takes_no_memory(compare, monkeypatch, tmp_path):
    alive, models = [], []

    def failing(model, *_):
        gc.collect()
        alive.append(sum(x() is not None for x in models))
        models.append(weakref.ref(model))
        raise RuntimeError('too large')

    monkeypatch.setattr(measure, 'train_step', failing)
    assert compare('--steps', '1', '--mixers', 'kda', 'kdn-diagonal', '--tasks', 'language') == 0
    assert alive == [0] * 4
    assert {x['reason'] for x in read_results(tmp_path)['failures']} == {'RuntimeError: too large'}


def test_no_run_begins_after_the_deadline(compare, trained, tmp_path, capsys):
    arguments = ('--steps', '1', '--mixers', 'kda')
    assert compare(*arguments, '--tasks', 'recall') == 0
    trained.clear()
    assert compare(*arguments, '--deadline', '0', '--resume') == 0
    assert not trained
    content = read_results(tmp_path)
    assert content['not_run'] == {'language seed 0': ['kda']} and content['mixers']['kda']['accuracy']
    assert '<b>language seed 0, KDA</b>: not over' in (tmp_path / 'out' / 'report.html').read_text()
    assert 'language seed 0, KDA: not over before the deadline' in capsys.readouterr().out


@pytest.fixture
def choose(compare, monkeypatch):
    """The job on recall with two learning rates, of which the second trains best or fails."""
    task, train = TINY.tasks['recall'], workers.train
    tasks = {'recall': replace(task, training=replace(task.training, learning_rates=(1e-3, 2e-3)))}
    monkeypatch.setitem(PRESETS, 'cpu', replace(TINY, tasks=tasks))

    def start(*more, fails=()):
        def with_known_losses(run, *args):
            if (run.learning_rate, run.seed) in fails:
                raise FloatingPointError('the loss is nan')
            result = train(run, *args)
            result['curve'] = {'step': list(range(20)), 'loss': [9.] * 18 + [1e-3 / (run.learning_rate or 1)] * 2}
            return result

        monkeypatch.setattr(workers, 'train', with_known_losses)
        return compare('--steps', '1', '--mixers', 'kda', '--tasks', 'recall', '--seeds', '3', '--no-speed', *more)

    return start


def stored_runs(tmp_path) -> set[str]:
    return {path.stem for path in (tmp_path / 'out' / 'runs').iterdir()}


def read_run(tmp_path, name: str) -> dict:
    return json.loads((tmp_path / 'out' / 'runs' / f'{name}.json').read_text())['result']


def test_every_learning_rate_with_all_seeds(choose, tmp_path):
    assert choose('--every-rate') == 0
    assert stored_runs(tmp_path) == {f'kda-recall-{rate}-seed{seed}' for rate in ('0.001', '0.002') for seed in (0, 1, 2)}
    content = read_results(tmp_path)
    kda = content['mixers']['kda']
    assert not kda['losses_by_rate'] and not content['not_run']
    for rate in ('0.001', '0.002'):
        assert len(kda['accuracy'][f'recall-{rate}']['pairs']['2']['values']) == 3
        assert f'### Recall, learning rate {rate}, more pairs' in (tmp_path / 'out' / 'results.md').read_text()
        assert (tmp_path / 'out' / 'plots' / f'recall-{rate}.png').exists()


def test_all_seeds_have_the_learning_rate_that_trains_best(choose, tmp_path):
    assert choose() == 0
    runs = {'kda-recall-seed0-lr0.001', *(f'kda-recall-seed{seed}-lr0.002' for seed in (0, 1, 2))}
    assert stored_runs(tmp_path) == runs
    content = read_results(tmp_path)
    kda = content['mixers']['kda']
    assert kda['losses_by_rate'] == {'recall': {'0.001': 1., '0.002': 0.5}} and not content['not_run']
    assert kda['accuracy_by_rate']['recall'] == {
        rate: read_run(tmp_path, f'kda-recall-seed0-lr{rate}')['accuracy'] for rate in ('0.001', '0.002')
    }
    assert [curve['seed'] for curve in kda['curves']['recall']] == [0, 1, 2]
    assert all(curve['loss'][-1] == 0.5 for curve in kda['curves']['recall'])
    text = (tmp_path / 'out' / 'results.md').read_text()
    last = max(kda['accuracy']['recall']['pairs'], key=int)
    ends = [f'{kda["accuracy_by_rate"]["recall"][rate]["pairs"][last]:.1%}' for rate in ('0.001', '0.002')]
    assert '### Recall, each learning rate: accuracy at the ends, seed 0' in text and f'| KDA | {" | ".join(ends)} |' in text
    assert '### Learning rates that train best' in text and '| KDA | 0.002 |' in text and 'learning rates 0.001, 0.002' in text
    assert 'Learning rates that train best' in (tmp_path / 'out' / 'report.html').read_text()
    # what is missing is made up for, and nothing else
    (tmp_path / 'out' / 'runs' / 'kda-recall-seed2-lr0.002.json').unlink()
    assert choose('--resume', fails=[(2e-3, 0), (2e-3, 1), (1e-3, 0)]) == 0
    assert stored_runs(tmp_path) == runs and not read_results(tmp_path)['failures']


def test_rows_of_fewer_seeds_say_so(choose, tmp_path):
    """One learning rate fails, and the other after the first seed."""
    assert choose(fails=[(2e-3, 0), (1e-3, 1)]) == 0
    assert stored_runs(tmp_path) == {'kda-recall-seed0-lr0.001', 'kda-recall-seed2-lr0.001'}
    text = (tmp_path / 'out' / 'results.md').read_text()
    assert '| KDA (2 of 3 seeds) | ' in text and '| KDA | 0.001 |' in text
    assert 'recall seed 0, learning rate 0.002; recall seed 1, learning rate 0.001: FloatingPointError' in text
    assert 'KDA (2 of 3 seeds)' in (tmp_path / 'out' / 'report.html').read_text()


def test_seeds_without_a_learning_rate_yet_are_left_at_the_deadline(choose, tmp_path):
    assert choose() == 0
    for name in ('kda-recall-seed0-lr0.001', 'kda-recall-seed1-lr0.002'):
        (tmp_path / 'out' / 'runs' / f'{name}.json').unlink()
    assert choose('--resume', '--deadline', '0') == 0
    content = read_results(tmp_path)
    assert content['not_run'] == {'recall seed 0, learning rate 0.001': ['kda'], 'recall seed 1': ['kda']}
    assert '| KDA (2 of 3 seeds) | ' in (tmp_path / 'out' / 'results.md').read_text()


def test_results_are_written_before_the_page(compare, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, 'write_report', interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare('--steps', '1', '--mixers', 'kda', '--tasks', 'recall')
    assert read_results(tmp_path)['mixers']['kda']['accuracy']
    assert '| KDA | ' in (tmp_path / 'out' / 'results.md').read_text()
