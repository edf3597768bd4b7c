# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import json
import random
import re
import uuid
from collections import Counter
from dataclasses import asdict

import pytest
import tiny

from benchmarks.compare.data import byte_tokenizer
from evals import needles
from evals.common import load, load_tokenizer
from evals.haystack import (
    ADJECTIVES,
    ANSWER_TOKENS,
    DEPTHS,
    NOISE,
    NOUNS,
    TASKS,
    Haystack,
    largest,
    make_sample,
    make_samples,
    score,
)
from fla_kdn.models.compat import fix_fla_generation

TOKENIZER = tiny.make_tokenizer()
ESSAY = 'Once there was a house. Nobody lived in it! "Why?" asked some who passed, and went on. (It was old.) So it is\n\n' * 3
HAYSTACK = Haystack(ESSAY)

each_task = pytest.mark.parametrize('task', TASKS.values(), ids=TASKS)


def samples_of(task, length: int = 1200, count: int = 12, seed: int = 0) -> list:
    return list(make_samples(task, TOKENIZER, HAYSTACK, length, count, seed))


def context_of(prompt: str) -> str:
    return prompt.split(' afterwards.\n', 1)[1].rsplit('\nWhat is', 1)[0]


@each_task
def test_samples_follow_the_seed(task):
    first, again, more, other = (samples_of(task, count=count, seed=seed) for count, seed in ((6, 0), (6, 0), (9, 0), (6, 1)))
    assert first == again == more[:6]
    assert not {x.prompt for x in first} & {x.prompt for x in other}
    assert len({x.key for x in more}) > 6 and len({x.answers for x in more}) == 9


@each_task
@pytest.mark.parametrize('length', [700, 1023, 2500])
def test_samples_are_as_long_as_asked(task, length):
    for i, sample in enumerate(samples_of(task, length, count=4)):
        assert sample.tokens == len(TOKENIZER(sample.prompt)['input_ids']) <= length - ANSWER_TOKENS
        again, size = make_sample(task, TOKENIZER, HAYSTACK, length, random.Random(f'0 {task.name} {length} {i}'), start=7)
        assert again == sample
        # one more line of noise, or one more word, does not fit
        unit = len(NOISE) + 1 if task.haystack == 'noise' else max(map(len, HAYSTACK.words)) + 1
        assert sample.tokens + unit > length - ANSWER_TOKENS
        hay = len(context_of(sample.prompt).split()) - 10 * task.keys
        assert size == (hay / len(NOISE.split()) if task.haystack == 'noise' else hay)


@each_task
def test_a_needle_and_its_answer_stand_once_and_where_they_are_said_to_be(task):
    for sample in samples_of(task):
        answer, = sample.answers
        context = context_of(sample.prompt)
        found = re.findall(r'One of the special magic (\w+)s for ([a-z]+-[a-z]+) is: ([0-9a-f-]+)\.', context)
        assert len(found) == len({key for _, key, _ in found}) == len({value for *_, value in found}) == task.keys
        assert (task.kind, sample.key, answer) in found
        assert sample.prompt.count(answer) == 1 and sample.prompt.count(sample.key) == 3
        needle = f'One of the special magic {task.kind}s for {sample.key} is: {answer}.'
        before, after = (x.strip() for x in context.split(needle))
        if task.haystack == 'noise':
            before, after = (x.splitlines() for x in (before, after))
            assert set(before + after) == {NOISE}
        else:
            other = r'One of the special magic \w+ for \S+ is: \S+\.'
            before, after = (Haystack(re.sub(other, '', x) or '.') if x else None for x in (before, after))
            before, after = (x.sentences(len(x.words)) if x else [] for x in (before, after))
            assert sample.depth in DEPTHS
            assert HAYSTACK.text.startswith(' '.join(before)[:len(HAYSTACK.text)])
        assert len(before) == int((len(before) + len(after)) * sample.depth / 100)


@each_task
def test_prompts_are_those_of_ruler(task):
    sample = samples_of(task, count=1)[0]
    kind, key = task.kind, sample.key
    assert sample.prompt.startswith(
        f'A special magic {kind} is hidden within the following text. Make sure to memorize it. '
        f'I will quiz you about the {kind} afterwards.\n',
    )
    assert sample.prompt.endswith(
        f'\nWhat is the special magic {kind} for {key} mentioned in the provided text? '
        f'The special magic {kind} for {key} mentioned in the provided text is',
    )
    answer, = sample.answers
    assert re.fullmatch(r'\d{7}', answer) if kind == 'number' else uuid.UUID(answer).version == 4


def test_depths_are_spread():
    assert DEPTHS[:3] == [0, 3, 5] and DEPTHS[-2:] == [97, 100] and len(set(DEPTHS)) == 40
    for name, count in (('s_niah_1', 60), ('s_niah_2', 60), ('mk_niah_1', 20)):
        depths = Counter(int(x.depth // 25.1) for x in samples_of(TASKS[name], 1100, count))
        assert len(depths) == 4


def test_words_of_keys_differ():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) > 100 and len(set(NOUNS)) == len(NOUNS) > 100
    assert all(re.fullmatch('[a-z]+', word) for word in ADJECTIVES + NOUNS)


def test_an_essay_is_cut_into_sentences_and_repeated():
    haystack = Haystack('One two. Three\nfour! "Five?" (Six.) Seven')
    assert haystack.sentences(7) == ['One two.', 'Three four!', '"Five?"', '(Six.)', 'Seven']
    assert haystack.sentences(9)[4:] == ['Seven One two.']
    assert haystack.sentences(3) == ['One two.', 'Three']
    assert haystack.sentences(0) == []


def test_a_value_of_the_essay_is_no_answer(monkeypatch):
    drawn = iter([1000001, 1000001, 2000002])
    monkeypatch.setattr(random.Random, 'randint', lambda *_: next(drawn))
    sample, _ = make_sample(TASKS['s_niah_2'], TOKENIZER, Haystack('In 1000001 years.'), 900, random.Random(0))
    assert sample.answers == ('2000002',)


@pytest.mark.parametrize('start', [0, 1, 5, 36, 37, 38, 1000])
def test_the_largest_number_that_fits(start):
    for limit in (-1, 0, 1, 37):
        calls = []
        assert largest(lambda x: calls.append(x) or x <= limit, start) == limit  # noqa: B023
        assert min(calls) >= 0 and len(calls) < 25


@pytest.mark.parametrize(('prediction', 'answers', 'expected'), [
    (' 1234567.', ('1234567',), 1),
    (' 123456', ('1234567',), 0),
    ('It is ABCD-12', ('abcd-12',), 1),
    ('first 11, then 22', ('11', '22'), 1),
    ('only 22', ('11', '22'), 0.5),
    ('', ('1',), 0),
])
def test_score(prediction, answers, expected):
    assert score(prediction, answers) == expected


@pytest.mark.parametrize('name', tiny.MODELS)
def test_predictions_do_not_depend_on_the_batch(name, monkeypatch):
    monkeypatch.setattr(needles, 'ANSWER_TOKENS', 16)
    fix_fla_generation()
    model = tiny.make_model(name)
    prompts = [ESSAY[i:i + n] for i, n in enumerate((3, 40, 64, 90))]
    together = needles.predict(model, TOKENIZER, prompts)
    assert together == [needles.predict(model, TOKENIZER, [prompt])[0] for prompt in prompts]
    assert len(set(together)) == 4


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The job on a tiny model, two tasks and two lengths; takes further arguments, returns the results."""
    monkeypatch.setattr(needles, 'ANSWER_TOKENS', 4)
    (tmp_path / 'essay.txt').write_text(ESSAY)
    model, output = tiny.save(tmp_path, 'diagonal'), tmp_path / 'out'
    arguments = [
        model, '--tasks', 's_niah_1', 'mk_niah_1', '--lengths', '900', '1000', '--samples', '3',
        '--text', str(tmp_path / 'essay.txt'), '--output', str(output),
    ]

    def job(*more: str) -> dict:
        needles.main([*arguments, *more])
        return json.loads((output / 'needles.json').read_text())

    job.output = output
    return job


@pytest.fixture
def predicted(monkeypatch):
    """Prompts that go through the model from now on."""
    prompts, predict = [], needles.predict

    def recording(model, tokenizer, batch):
        prompts.extend(batch)
        return predict(model, tokenizer, batch)

    monkeypatch.setattr(needles, 'predict', recording)
    return prompts


def cells_of(output) -> dict:
    return {path.stem: json.loads(path.read_text())['result'] for path in (output / 'cells').iterdir()}


def test_job_reports_and_resumes(run, predicted, capsys):
    content = run()
    assert content['accuracy'] == {task: {'900': 0, '1000': 0} for task in ('s_niah_1', 'mk_niah_1')}
    assert (run.output / 'needles.png').read_bytes().startswith(b'\x89PNG')
    cells = cells_of(run.output)
    assert set(cells) == {'s_niah_1-900', 's_niah_1-1000', 'mk_niah_1-900', 'mk_niah_1-1000'}
    expected = make_samples(TASKS['mk_niah_1'], TOKENIZER, HAYSTACK, 1000, 3, 0)
    for found, sample in zip(cells['mk_niah_1-1000']['samples'], expected, strict=True):
        wanted = asdict(sample)
        assert {key: wanted[key] for key in ('key', 'depth', 'tokens')}.items() <= found.items()
        assert found['answers'] == list(sample.answers) and sample.prompt in predicted
    assert len(predicted) == 12

    predicted.clear()
    (run.output / 'cells' / 's_niah_1-1000.json').unlink()
    assert run('--batch-size', '1') == content
    assert len(predicted) == 3
    # nor do the answers depend on the size of a batch
    assert cells_of(run.output) == cells

    with pytest.raises(SystemExit, match='2'):
        run('--seed', '1')
    assert 'seed was 0 and is now 1' in capsys.readouterr().err
    model = tiny.make_model('diagonal')
    model.lm_head.weight.data.neg_()
    model.save_pretrained(content['settings']['model'])
    with pytest.raises(SystemExit, match='2'):
        run()
    assert 'weights was' in capsys.readouterr().err


def test_interrupted_job_goes_on_where_it_was(run, predicted, monkeypatch):
    evaluate = needles.evaluate

    def interrupted(*args):
        if predicted:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(needles, 'evaluate', interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert set(cells_of(run.output)) == {'s_niah_1-900'} and len(predicted) == 3
    monkeypatch.setattr(needles, 'evaluate', evaluate)
    run()
    assert len(predicted) == 12


def test_job_finds_what_a_reader_finds(run, monkeypatch):
    def read(model, tokenizer, prompts):
        keys = [re.search(r'magic \w+ for (\S+) mentioned in the provided text is$', prompt)[1] for prompt in prompts]
        found = [re.search(rf'for {key} is: (\S+)\.', prompt)[1] for key, prompt in zip(keys, prompts, strict=True)]
        # whose memory has lost the noise
        return [f' {x}.' if NOISE not in prompt else '' for x, prompt in zip(found, prompts, strict=True)]

    monkeypatch.setattr(needles, 'predict', read)
    assert run()['accuracy'] == {'s_niah_1': {'900': 0, '1000': 0}, 'mk_niah_1': {'900': 1, '1000': 1}}


@pytest.mark.parametrize(('argument', 'value', 'match'), [
    ('--text', 'no/such/file', '--text: no/such/file'),
    ('--lengths', '200', '--lengths 200: S-NIAH-1 needs at least'),
    ('--lengths', '0', '--lengths'),
    ('--samples', '0', '--samples'),
    ('--tasks', 'niah', '--tasks'),
    ('--dtype', 'int8', '--dtype'),
])
def test_bad_arguments_are_named(run, capsys, argument, value, match):
    with pytest.raises(SystemExit, match='2'):
        run(argument, value)
    assert match in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match='2'):
        needles.main([str(tmp_path / 'nothing')])
    assert f'MODEL {tmp_path}/nothing' in capsys.readouterr().err


def test_bytes_as_tokens(tmp_path):
    """As the models of the side-by-side job have them."""
    tiny.make_model('diagonal', vocab_size=320).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='has no tokenizer'):
        load_tokenizer(str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path)
    _, tokenizer = load(str(tmp_path))
    text = 'naïve <0x41>\n\n 漢字'
    ids = tokenizer(text)['input_ids']
    assert bytes(ids) == text.encode() and tokenizer.decode([*ids, 300]) == tokenizer.decode(ids) == text
    # not even the name of the token that pads
    assert tokenizer('<0x00>')['input_ids'] == list(b'<0x00>') and tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    # nor is a length told to do that is too short for a later sample
    task, arguments = TASKS['mk_niah_1'], (Haystack('one two three'), 665, 20, 0)
    with pytest.raises(ValueError, match='needs at least'):
        list(make_samples(task, tokenizer, *arguments))
    with pytest.raises(SystemExit, match='2'):
        needles.main([str(tmp_path), '--tasks', 'mk_niah_1', '--lengths', '665', '--samples', '20', '--seed', '0',
                      '--output', str(tmp_path / 'out')])
