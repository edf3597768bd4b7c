# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import math
import sys

import pytest
import tiny
import torch
import yaml

pytest.importorskip('lm_eval')

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from benchmarks.compare.data import byte_tokenizer
from benchmarks.compare.mixers import build_model, matched_config
from benchmarks.compare.settings import PRESETS
from evals import harness
from fla_kdn.models.compat import fix_fla_generation

# likelihoods of the same text in other batches differ by rounding, relative to themselves
TOLERANCE = 1e-6
# on both sides of a chunk of 64 tokens
SIZES = (3, 20, 50, 63, 64, 65, 100, 140)
STORY = ''.join(f'On day {i} the ship sailed {7 * i % 100} miles. ' for i in range(60))

DOCUMENTS = [
    {'question': f'{a} and {b} and {"again " * (a % 4)}is', 'choices': [str(a + b), str(a * b), 'unknown'], 'answer': b % 3}
    for a, b in ((1, 2), (3, 4), (5, 5), (17, 8), (90, 1), (23, 6))
]
DATA = {
    'dataset_path': 'json',
    'test_split': 'train',
    'doc_to_text': '{{question}}',
    'metadata': {'version': 1.0},
}
TASKS = {
    'local_choice': {
        'output_type': 'multiple_choice',
        'doc_to_choice': '{{choices}}',
        'doc_to_target': 'answer',
    },
    'local_likelihood': {
        'output_type': 'loglikelihood',
        'doc_to_target': '{{" " + choices[0]}}',
        'metric_list': [{'metric': 'perplexity', 'aggregation': 'perplexity', 'higher_is_better': False}],
    },
    'local_generate': {
        'output_type': 'generate_until',
        'doc_to_target': '{{choices[0]}}',
        'generation_kwargs': {'until': ['\n\n'], 'max_gen_toks': 12},
        'metric_list': [{'metric': 'exact_match'}],
    },
}


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, x, i) for i, x in enumerate(arguments)]


@pytest.mark.parametrize('name', tiny.MODELS)
def test_results_do_not_depend_on_the_batch(name, tmp_path):
    fix_fla_generation()
    folder = tiny.save(tmp_path, name)
    texts = [STORY[7 * i:7 * i + size] for i, size in enumerate(SIZES)]
    choices = [(text, f' {i} miles') for i, text in enumerate(texts)] + [('The ship sailed', ' 4')]
    prompts = [(text, {'until': ['\n\n\n'], 'max_gen_toks': 12}) for text in texts]
    one, four = (HFLM(folder, batch_size=size, device='cpu', max_length=200) for size in (1, 4))
    likelihoods = [lm.loglikelihood(requests('loglikelihood', choices), disable_tqdm=True) for lm in (one, four)]
    for (x, greedy), (again, also_greedy) in zip(*likelihoods, strict=True):
        assert x == pytest.approx(again, rel=TOLERANCE) and greedy == also_greedy
    # texts longer than a window, too
    whole = [(STORY[:size],) for size in (50, 230, 700)]
    rolling = [lm.loglikelihood_rolling(requests('loglikelihood_rolling', whole), disable_tqdm=True) for lm in (one, four)]
    assert rolling[0] == pytest.approx(rolling[1], rel=TOLERANCE)
    written = [lm.generate_until(requests('generate_until', prompts), disable_tqdm=True) for lm in (one, four)]
    assert written[0] == written[1] and len(set(written[0])) > len(SIZES) - 2

    # and they are right: the likelihood of a continuation, and the greedy one
    ids = torch.tensor([one.tok_encode(choices[-1][0] + choices[-1][1])])
    with torch.no_grad():
        logits = one.model(input_ids=ids, use_cache=False).logits[0, -3:-1].log_softmax(-1)
    assert likelihoods[0][-1][0] == pytest.approx(logits.gather(1, ids[0, -2:, None]).sum().item(), rel=1e-5)
    ids = torch.tensor([one.tok_encode(texts[2])])
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat((ids, one.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert one.tok_decode(ids[0, -12:]).startswith(written[0][2])


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with a task of each kind, on a file of their own."""
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    folder = tmp_path / 'tasks'
    folder.mkdir()
    (folder / 'data.json').write_text(json.dumps(DOCUMENTS))
    for name, task in TASKS.items():
        content = {'task': name, **DATA, 'dataset_kwargs': {'data_files': str(folder / 'data.json')}, **task}
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(content))
    return folder


@pytest.mark.parametrize('kind', ['isotropic', 'side-by-side'])
def test_command_runs_tasks_of_all_kinds(tasks, tmp_path, monkeypatch, kind):
    """On a model of the side-by-side job, too: one that only it has, of bytes."""
    output = tmp_path / 'results.json'
    if kind == 'side-by-side':
        folder = str(tmp_path / 'model')
        build_model(matched_config('attention', PRESETS['cpu'].backbone)[0], seed=0).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    else:
        folder = tiny.save(tmp_path, kind)
    monkeypatch.setattr(sys, 'argv', [
        'harness', '--model_args', f'pretrained={folder},dtype=float32', '--tasks', ','.join(TASKS), '--batch_size', '4',
        '--include_path', str(tasks), '--output_path', str(output), '--log_samples',
    ])
    harness.main()
    found, = tmp_path.glob('results_*.json')
    results = json.loads(found.read_text())['results']
    assert set(results) == set(TASKS)
    assert 0 <= results['local_choice']['acc,none'] <= 1 and results['local_generate']['exact_match,none'] == 0

    lm = HFLM(folder, batch_size=1, device='cpu')
    pairs = [(x['question'], f' {x["choices"][0]}') for x in DOCUMENTS]
    likelihoods = [x for x, _ in lm.loglikelihood(requests('loglikelihood', pairs), disable_tqdm=True)]
    expected = math.exp(-sum(likelihoods) / len(likelihoods))
    assert results['local_likelihood']['perplexity,none'] == pytest.approx(expected, rel=1e-5)


def test_groups_name_tasks_that_there_are(monkeypatch):
    manager = TaskManager(include_path=str(harness.TASKS))
    for file in harness.TASKS.iterdir():
        group = yaml.safe_load(file.read_text())
        assert group['group'] == file.stem and file.stem in manager.all_groups
        assert len(group['task']) in (6, 7) and set(group['task']) <= set(manager.all_subtasks)
    assert set(harness.LENGTHS) <= set(manager.all_groups)


@pytest.mark.parametrize(('arguments', 'model_args'), [
    (['--tasks', 'paper_recall'], {'max_length': 2048}),
    (['--tasks', 'piqa,paper_recall', '--model_args', 'pretrained=x'], {'max_length': 2048, 'pretrained': 'x'}),
    (['--tasks', 'paper_recall', '--model_args', 'max_length=512'], {'max_length': 512}),
    (['--tasks', 'paper_ppl_and_commonsense', '--model_args', 'pretrained=x,dtype=float32'],
     {'pretrained': 'x', 'dtype': 'float32'}),
    (['--config', 'CONFIG'], {'max_length': 2048, 'pretrained': 'y'}),
])
def test_recall_is_cut_to_its_length(tmp_path, monkeypatch, arguments, model_args):
    config = tmp_path / 'config.yaml'
    config.write_text(yaml.safe_dump({'tasks': ['paper_recall'], 'model_args': {'pretrained': 'y'}, 'include_path': 'mine'}))
    monkeypatch.setattr(sys, 'argv', ['harness', 'run', *(str(config) if x == 'CONFIG' else x for x in arguments)])
    args = harness.Harness().parse_args()
    assert args.model_args == model_args
    assert args.include_path == [str(harness.TASKS), *(['mine'] if 'CONFIG' in arguments else [])]


def test_generation_of_fla_models_is_fixed_first(monkeypatch):
    calls = []
    monkeypatch.setattr(harness, 'fix_fla_generation', lambda: calls.append('fix'))
    monkeypatch.setattr(harness.Harness, 'execute', lambda *_: calls.append('execute'))
    monkeypatch.setattr(sys, 'argv', ['harness', 'ls', 'groups'])
    harness.main()
    assert calls == ['fix', 'execute']


def test_other_commands_are_passed_on(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['harness', 'validate', '--tasks', 'paper_recall', '--include_path', 'mine'])
    args = harness.Harness().parse_args()
    assert args.tasks == 'paper_recall' and args.include_path == [str(harness.TASKS), 'mine']
