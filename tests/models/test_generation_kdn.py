# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Decoding with a cache against decoding without one.

Two cached runs may agree and both be wrong: a model that ignores the cache under the name that transformers gives it decodes
every token from an empty memory. So the reference is the full forward pass, of the whole sequence at each step.
"""

from __future__ import annotations

import functools

import pytest
import torch
import utils
from conftest import assert_close
from utils import CACHE, OPTIONS, greedy, make_ids, make_model

NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
LENGTHS = [1, 5, 70]
NEW = 10
generate = functools.partial(utils.generate, max_new_tokens=NEW)
reference = functools.partial(utils.reference, num_tokens=NEW)


def left_pad(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long()
    return ids * mask, mask


@pytest.mark.parametrize('T', LENGTHS)
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_greedy(options, T):
    model, ids = make_model(**options), make_ids(2, T)
    assert torch.equal(generate(model, ids), reference(model, ids))


@pytest.mark.parametrize('T', [5, 70])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_greedy_left_padded(options, T):
    model, pads = make_model(**options), [T - 1, 0, 3]
    ids, mask = left_pad(make_ids(3, T), pads)
    result = generate(model, ids, attention_mask=mask)
    assert torch.equal(result, greedy(model, ids, NEW, attention_mask=mask))
    for row, pad in enumerate(pads):
        alone = ids[row:row + 1, pad:]
        assert torch.equal(result[row:row + 1, pad:], reference(model, alone))
        assert torch.equal(result[row:row + 1, pad:], generate(model, alone))
    ignored = generate(model, ids, attention_mask=torch.ones_like(mask))
    assert not torch.equal(ignored, result), 'the padding makes no difference'


@pytest.mark.parametrize('first', [1, 6, 66])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_continue_from_a_kept_cache(options, first):
    """The first piece through the model, the rest of the prompt through `generate`, and then once more."""
    model, ids = make_model(**options), make_ids(2, 70)
    expected = reference(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :first], use_cache=True).past_key_values
    halfway = generate(model, ids, cache, max_new_tokens=NEW // 2, return_dict_in_generate=True)
    assert torch.equal(halfway.sequences, expected[:, :-NEW // 2])
    cache = halfway.past_key_values
    # the last token is not in it yet
    assert cache.get_seq_length() == 70 + NEW // 2 - 1
    assert torch.equal(generate(model, halfway.sequences, cache, max_new_tokens=NEW // 2), expected)


@pytest.mark.parametrize('first', [4, 66])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_continue_left_padded(options, first):
    """The first piece of one row is padding only, of another in part."""
    model = make_model(**options)
    ids, mask = left_pad(make_ids(3, 70), [first, 0, first - 2])
    with torch.no_grad():
        cache = model(ids[:, :first], attention_mask=mask[:, :first], use_cache=True).past_key_values
    expected = greedy(model, ids, NEW, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)


@pytest.mark.parametrize(
    'pieces', [(1,) * 12, (70, *[1] * 5), (33, 37), (3, 65, 1, 1)], ids=['tokens', 'prompt', 'two', 'mixed'])
@pytest.mark.parametrize('padded', [False, True], ids=['full', 'left-padded'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
@torch.no_grad()
def test_cached_logits(options, padded, pieces):
    """Piece after piece against one forward pass of each sequence."""
    model, T = make_model(**options), sum(pieces)
    pads = [2, 0, 5] if padded else [0, 0, 0]
    ids, mask = left_pad(make_ids(3, T), pads)
    logits, cache, end = [], None, 0
    for piece in ids.split(pieces, 1):
        end += piece.shape[1]
        output = model(
            piece,
            attention_mask=mask[:, :end].clone() if padded else None,
            use_cache=True,
            **({CACHE: cache} if cache is not None else {}),
        )
        cache = output.past_key_values
        logits.append(output.logits)
    logits = torch.cat(logits, 1)
    assert cache.get_seq_length() == T
    for row, pad in enumerate(pads):
        full = model(ids[row:row + 1, pad:], use_cache=False).logits
        assert_close(logits[row:row + 1, pad:], full, 1e-5, f'logits of row {row}')


@pytest.mark.parametrize('padded', [False, True], ids=['full', 'left-padded'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_beam_search(options, padded):
    """The beams move between the rows of the cache."""
    model = make_model(**options)
    ids, mask = left_pad(make_ids(2, 20), [7, 0] if padded else [0, 0])
    kwargs = {'attention_mask': mask, 'num_beams': 3, 'num_return_sequences': 2}
    result = generate(model, ids, **kwargs)
    assert result.shape == (4, 20 + NEW)
    assert torch.equal(result, generate(model, ids, use_cache=False, **kwargs))
    assert not torch.equal(result[::2], generate(model, ids, attention_mask=mask)), 'beam search is greedy here'


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_sampling(options):
    model, ids = make_model(**options), make_ids(2, 20)

    def sample(seed, **kwargs):
        torch.manual_seed(seed)
        return generate(model, ids, do_sample=True, num_return_sequences=3, **kwargs)

    result = sample(0)
    assert result.shape == (6, 20 + NEW)
    assert torch.equal(result[:, :20], ids.repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in result}) == 6
    assert torch.equal(result, sample(0))
    assert not torch.equal(result, sample(1))
    assert torch.equal(result, sample(0, use_cache=False))


def test_end_of_sequence():
    """A row that ends is padded while the others go on."""
    model, ids = make_model(), make_ids(4, 20)
    expected = greedy(model, ids, NEW)
    stop = int(expected[0, 22])
    result = generate(model, ids, eos_token_id=stop, pad_token_id=49)
    ends = []
    for row, full in zip(result[:, 20:].tolist(), expected[:, 20:].tolist(), strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert row == (full[:end] + [49] * NEW)[:len(row)]
        ends.append(end)
    assert len(set(ends)) > 1


def test_from_embeddings():
    model, ids = make_model(), make_ids(2, 20)
    embeds = model.get_input_embeddings()(ids)
    result = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(result, reference(model, ids)[:, 20:])


def test_in_training_mode():
    model, ids = make_model(), make_ids(2, 20)
    expected = reference(model, ids)
    assert torch.equal(generate(model.train(), ids), expected)
