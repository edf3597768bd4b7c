# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Inputs on which models of this kind have failed, by name: masks, packed batches, caches of every origin, backends, types.

What a cached run is held to is the full forward pass of each sequence alone, without a cache.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
import utils
from conftest import assert_close, rel
from fla.models.cache_utils import Cache
from transformers import DynamicCache, LogitsProcessorList
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from utils import OPTIONS, make_ids, make_model

from fla_kdn import KDNForCausalLM
from fla_kdn.layers import Attention
from fla_kdn.models.packing import PACKING

KINDS = [pytest.param(OPTIONS[name], id=name) for name in ('diagonal', 'isotropic', 'hybrid')]
LOSSES = {
    'torch-loss': {'fuse_cross_entropy': False},
    'fused-loss': {'fuse_cross_entropy': True},
    'fused-linear-loss': {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
}
NAMED_LOSSES = [pytest.param(options, id=name) for name, options in LOSSES.items()]
NEW = 8
generate = functools.partial(utils.generate, max_new_tokens=NEW)
reference = functools.partial(utils.reference, num_tokens=NEW)


@torch.no_grad()
def full_logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def random_mask(B: int, T: int) -> torch.Tensor:
    """Padding everywhere; the first row begins with some, the second ends on some, the last row is whole."""
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(3)) > 0.3).long()
    mask[0, :5], mask[1, -3:], mask[-1] = 0, 0, 1
    return mask


def check_rows(model, ids: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor) -> None:
    """Of each row the tokens without padding against those tokens alone."""
    for row, valid in enumerate(mask.bool()):
        assert_close(logits[row, valid][None], full_logits(model, ids[row, valid][None]), 1e-5, f'logits of row {row}')


def states(cache: Cache) -> list[torch.Tensor]:
    """Every tensor of a cache: memory, covariance, convolutions; keys, values and positions of attention."""
    def tensors(x):
        if isinstance(x, torch.Tensor):
            return [x]
        return [] if x is None else [y for item in (x.values() if isinstance(x, dict) else x) for y in tensors(item)]

    return [x for state in cache for x in tensors(state)]


# ---- masks


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_cu_seqlens_with_a_mask_of_ones(options, dtype):
    model, ids = make_model(**options), make_ids(1, 30)
    cu_seqlens = torch.tensor([0, 11, 30], dtype=dtype)
    want = model(ids, cu_seqlens=cu_seqlens).logits
    for mask in (torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool)):
        assert torch.equal(model(ids, attention_mask=mask, cu_seqlens=cu_seqlens).logits, want)


@pytest.mark.parametrize('name', ['cu_seqlens', 'cu_seq_lens_q'])
@pytest.mark.parametrize('options', KINDS)
def test_cu_seqlens_with_padding(options, name):
    mask = torch.ones(1, 30)
    mask[:, -4:] = 0
    with pytest.raises(ValueError, match='padding in a packed batch'):
        make_model(**options)(make_ids(1, 30), attention_mask=mask, **{name: torch.tensor([0, 11, 30])})


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_padding_inside(options, dtype):
    model, ids, mask = make_model(**options), make_ids(4, 80), random_mask(4, 80)
    logits = model(ids, attention_mask=mask.to(dtype)).logits
    check_rows(model, ids, mask, logits)
    assert rel(logits[0, -1], full_logits(model, ids)[0, -1]) > 1e-2, 'the padding makes no difference'


@pytest.mark.parametrize('pieces', [(5, 66, 1, 1, 7), (1,) * 20, (30, 50)], ids=['mixed', 'tokens', 'two'])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_padding_inside_in_pieces(options, pieces):
    """The first piece of a row is padding only; of single tokens some rows have one and others none."""
    model, T = make_model(**options), sum(pieces)
    ids, mask, cache, logits, end = make_ids(4, T), random_mask(4, T), None, [], 0
    for piece in ids.split(pieces, 1):
        end += piece.shape[1]
        output = model(piece, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    assert cache.get_seq_length() == T
    check_rows(model, ids, mask, torch.cat(logits, 1))


@pytest.mark.parametrize('inferred', [False, True], ids=['mask', 'inferred'])
@pytest.mark.parametrize('options', KINDS)
def test_one_left_padded_row(options, inferred):
    """A mask in a batch of one; `generate` infers it where padding tokens are in the prompt."""
    model, ids = make_model(**options), make_ids(1, 12)
    padded = torch.cat((torch.zeros(1, 7, dtype=torch.long), ids), 1)
    kwargs = {} if inferred else {'attention_mask': (padded != 0).long()}
    assert torch.equal(generate(model, padded, **kwargs)[:, 7:], reference(model, ids))
    assert not torch.equal(generate(model, padded, attention_mask=torch.ones_like(padded))[:, 7:], reference(model, ids))


def poison(embeds: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    fill = {
        'zeros': torch.zeros_like(embeds),
        'random': torch.randn(embeds.shape, generator=torch.Generator().manual_seed(9)),
        'nan': torch.full_like(embeds, math.nan),
    }[how]
    return torch.where(mask.bool().unsqueeze(-1), embeds, fill)


@pytest.mark.parametrize('how', ['zeros', 'random', 'nan'])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_what_stands_at_padding_changes_nothing(options, how):
    """Neither the output nor the cache, to the last bit: in a prompt, in more of it, in a decoded token."""
    model, ids, mask = make_model(**options), make_ids(4, 100), random_mask(4, 100)
    mask[:, -1] = torch.tensor([0, 1, 0, 1])
    embeds, caches, end = model.get_input_embeddings()(ids), [None, None], 0
    for piece in (70, 29, 1):
        start, end = end, end + piece
        outputs = [
            model(inputs_embeds=x[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            for x, cache in zip((embeds, poison(embeds, mask, how)), caches, strict=True)
        ]
        caches = [output.past_key_values for output in outputs]
        want, got = (states(cache) for cache in caches)
        # memory, covariance and three convolutions of a KDN layer; keys, values and positions of attention
        assert len(got) == len(want) == sum(3 if isinstance(layer.attn, Attention) else 5 for layer in model.model.layers)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and not (a.is_floating_point() and a.isnan().any())
        valid = mask[:, start:end].bool()
        assert torch.equal(outputs[1].logits[valid], outputs[0].logits[valid])
        if how == 'nan':
            assert outputs[1].logits[~valid].isnan().all(), 'nothing was poisoned'


@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_which_token_pads_changes_nothing(options):
    model, ids, mask = make_model(**options), make_ids(4, 80), random_mask(4, 80)
    other = torch.where(mask.bool(), ids, make_ids(4, 80, seed=5))
    assert not torch.equal(other, ids)
    outputs = [model(x, attention_mask=mask, use_cache=True) for x in (ids, other, ids * mask)]
    for output in outputs[1:]:
        assert torch.equal(output.logits[mask.bool()], outputs[0].logits[mask.bool()])
        assert all(map(torch.equal, states(output.past_key_values), states(outputs[0].past_key_values)))


# ---- convolutions


@pytest.mark.parametrize('backend', ['triton', 'cuda'])
@pytest.mark.parametrize('options', KINDS)
def test_backends_of_the_convolution(monkeypatch, options, backend):
    """FLA reads the backend where a layer is built; without causal-conv1d the second falls back to the first."""
    missing = importlib.util.find_spec('causal_conv1d') is None
    if backend == 'cuda' and not missing and not torch.cuda.is_available():
        pytest.skip('causal-conv1d is there and needs a GPU')
    monkeypatch.setenv('FLA_CONV_BACKEND', backend)
    if backend == 'cuda' and missing:
        with pytest.warns(UserWarning, match='`causal_conv1d_fn` is not available'):
            model = make_model(**options)
    else:
        model = make_model(**options)
    device = 'cuda' if backend == 'cuda' and not missing else 'cpu'
    monkeypatch.delenv('FLA_CONV_BACKEND')
    ids = make_ids(2, 20)
    expected = reference(make_model(**options), ids)
    model = model.to(device)
    assert torch.equal(generate(model, ids.to(device)).cpu(), expected)
    with torch.no_grad():
        cache = model(ids[:, :9].to(device), use_cache=True).past_key_values
    assert torch.equal(generate(model, ids.to(device), cache).cpu(), expected)


# ---- training


@pytest.mark.parametrize('loss', NAMED_LOSSES)
@pytest.mark.parametrize('options', KINDS)
def test_logits_without_labels_in_training(options, loss):
    model, ids = make_model(**{**options, **loss}), make_ids(2, 70)
    want = full_logits(model, ids)
    output = model.train()(ids)
    assert output.loss is None and output.past_key_values is None
    assert_close(output.logits, want, 1e-5, 'logits')


@pytest.mark.parametrize('use_l2warp', [False, True], ids=['plain', 'l2warp'])
@pytest.mark.parametrize('loss', NAMED_LOSSES)
@pytest.mark.parametrize('options', KINDS)
def test_nothing_but_ignored_labels(options, loss, use_l2warp):
    """A mean over no target is 0 / 0. `use_l2warp` has a gradient at every token, target or not."""
    model, ids = make_model(**{**options, **loss}, use_l2warp=use_l2warp).train(), make_ids(2, 20)
    output = model(ids, labels=torch.full_like(ids, -100))
    output.loss.backward()
    assert output.loss == 0
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and (use_l2warp or not p.grad.any()), name
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize('options', KINDS)
def test_second_piece_with_gradient(options):
    """Of more than one token, behind a cache: the gradient goes on into the first piece."""
    model, ids = make_model(**options).train(), make_ids(2, 40)
    weights = torch.randn(2, 17, 50, generator=torch.Generator().manual_seed(1))
    results = []
    for in_pieces in (False, True):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        if in_pieces:
            cache = model(inputs_embeds=embeds[:, :23], use_cache=True).past_key_values
            logits = model(inputs_embeds=embeds[:, 23:], past_key_values=cache, use_cache=True).logits
        else:
            logits = model(inputs_embeds=embeds).logits[:, 23:]
        results.append((logits, *torch.autograd.grad((logits * weights).sum(), embeds)))
    assert_close(results[1][0], results[0][0], 1e-5, 'logits')
    assert results[0][1][:, :23].any()
    assert_close(results[1][1], results[0][1], 2e-5, 'gradient')


# ---- packed samples

# the first is shorter than a convolution
LENGTHS = [3, 21]
SPELLINGS = ['cu_seqlens', 'cu_seq_lens', 'position_ids']


def borders(spelling: str, lengths: list[int] = LENGTHS) -> dict[str, torch.Tensor | int]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return {
        'cu_seqlens': {'cu_seqlens': cu_seqlens},
        'cu_seq_lens': {
            'cu_seq_lens_q': cu_seqlens.int(),
            'cu_seq_lens_k': cu_seqlens.int(),
            'max_length_q': max(lengths),
            'max_length_k': max(lengths),
        },
        'position_ids': {'position_ids': torch.cat([torch.arange(n) for n in lengths])[None]},
    }[spelling]


@pytest.mark.parametrize('cache', [None, 'new', 'empty'], ids=['no-cache', 'new-cache', 'empty-cache'])
@pytest.mark.parametrize('spelling', SPELLINGS)
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_two_packed_samples(options, spelling, cache):
    """Each is as alone, and with a cache goes on as alone."""
    model, ids = make_model(**options), make_ids(1, sum(LENGTHS))
    past_key_values = Cache() if cache == 'empty' else None
    output = model(ids, past_key_values=past_key_values, use_cache=cache is not None, **borders(spelling))
    samples = ids.split(LENGTHS, 1)
    want = torch.cat([full_logits(model, x) for x in samples], 1)
    assert_close(output.logits, want, 1e-5, 'logits')
    assert rel(full_logits(model, ids), want) > 1e-1, 'a leak would not show'
    if cache is not None:
        more = make_ids(2, 5, seed=1)
        logits = model(more, past_key_values=output.past_key_values, use_cache=True).logits
        for n, x in enumerate(samples):
            want = full_logits(model, torch.cat((x, more[n:n + 1]), 1))[:, -5:]
            assert_close(logits[n:n + 1], want, 1e-5, f'logits after sample {n}')


@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('options', KINDS)
def test_restarts_in_a_batch_of_rows(options, rows):
    position_ids = borders('position_ids')['position_ids'].expand(rows, -1)
    with pytest.raises(ValueError, match='position_ids restart'):
        make_model(**options)(make_ids(2, sum(LENGTHS)), position_ids=position_ids)


@pytest.mark.parametrize('options', KINDS)
def test_restarts_behind_padding(options):
    """Padding is not a border: nothing tells the samples apart, and none of them is alone."""
    ids, position_ids = make_ids(1, sum(LENGTHS)), borders('position_ids')['position_ids']
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    with pytest.raises(ValueError, match='position_ids'):
        make_model(**options)(ids, attention_mask=mask, position_ids=position_ids)


@pytest.mark.parametrize('start', [0, 9])
@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_plain_positions_change_nothing(options, rows, start):
    """Nor do those that `generate` makes of a mask, which are 0 all through the padding."""
    model, ids = make_model(**options), make_ids(2, 24)
    position_ids = torch.arange(start, start + 24).expand(rows, -1)
    assert torch.equal(model(ids, position_ids=position_ids).logits, model(ids).logits)
    cache = model(ids[:, :10], position_ids=position_ids[:, :10], use_cache=True).past_key_values
    logits = model(ids[:, 10:], position_ids=position_ids[:, 10:], past_key_values=cache, use_cache=True).logits
    assert_close(logits, full_logits(model, ids)[:, 10:], 1e-5, 'logits of the second piece')
    mask = (torch.arange(24) >= torch.tensor([[7], [0]])).long()
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    check_rows(model, ids, mask, padded)


# ---- caches


@pytest.mark.parametrize('cache', [None, 'empty', 'reset'])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_caches_without_content(options, cache):
    model, ids = make_model(**options), make_ids(2, 20)
    given = None if cache is None else Cache()
    if cache == 'reset':
        model(make_ids(2, 9, seed=3), past_key_values=given, use_cache=True)
        given.reset()
        assert given.get_seq_length() == 0
    output = model(ids[:, :12], past_key_values=given, use_cache=True)
    filled = output.past_key_values
    assert isinstance(filled, Cache) and (given is None or filled is given)
    logits = torch.cat((output.logits, model(ids[:, 12:], past_key_values=filled, use_cache=True).logits), 1)
    assert_close(logits, full_logits(model, ids), 1e-5, 'logits')
    assert torch.equal(generate(model, ids, Cache()), reference(model, ids))


@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_legacy_cache(options):
    """Its states do not say how many tokens they are of, which `generate` asks for: refused, and taken with the number."""
    model, ids = make_model(**options), make_ids(2, 20)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    legacy = cache.to_legacy_cache()
    assert isinstance(legacy, tuple) and len(legacy) == model.config.num_hidden_layers
    for use_cache in (False, True):
        with pytest.raises((TypeError, ValueError), match='seen_tokens'):
            model(ids[:, 12:], past_key_values=legacy, use_cache=use_cache)
    with pytest.raises((TypeError, ValueError), match='(?i)cache'):
        generate(model, ids, legacy)

    cache = Cache.from_legacy_cache(legacy, seen_tokens=12)
    logits = model(ids[:, 12:16], past_key_values=cache, use_cache=True).logits
    assert_close(logits, full_logits(model, ids)[:, 12:16], 1e-5, 'logits')
    assert cache.get_seq_length() == 16
    assert torch.equal(generate(model, ids, cache), reference(model, ids))


@pytest.mark.parametrize('use_cache', [False, True])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_dynamic_cache(options, use_cache):
    """transformers' own has no place for the states: refused, empty or with keys of another model."""
    model, ids = make_model(**options), make_ids(2, 20)
    filled = DynamicCache()
    for layer_idx in range(model.config.num_hidden_layers):
        filled.update(torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8), layer_idx)
    for cache in (DynamicCache(), DynamicCache(config=model.config), filled):
        with pytest.raises(TypeError, match='FLA cache'):
            model(ids, past_key_values=cache, use_cache=use_cache)
    with pytest.raises(TypeError, match='FLA cache'):
        generate(model, ids, DynamicCache())


@pytest.mark.parametrize('tokens', [1, 8])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_cache_of_another_batch(options, tokens):
    model, ids = make_model(**options), make_ids(3, 20)
    cache = model(ids[:1, :12], use_cache=True).past_key_values
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        model(ids[:, 12:12 + tokens], past_key_values=cache, use_cache=True)
    cache = model(ids[:1, :12], use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    prefix = ids[:1, :12].expand(3, -1)
    logits = model(ids[:, 12:12 + tokens], past_key_values=cache, use_cache=True).logits
    want = full_logits(model, torch.cat((prefix, ids[:, 12:12 + tokens]), 1))[:, 12:]
    assert_close(logits, want, 1e-5, 'logits')


@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_length_of_the_cache(options):
    """The same in every layer, whichever is the first."""
    model, ids, cache, end = make_model(**options), make_ids(2, 30), Cache(), 0
    assert isinstance(model.model.layers[0].attn, Attention) == ('attn' in options)
    assert cache.get_seq_length() == 0
    for piece in (12, 1, 1, 16):
        mask = torch.ones(2, end + piece)
        mask[0, :3] = 0
        cache = model(ids[:, end:end + piece], attention_mask=mask, past_key_values=cache, use_cache=True).past_key_values
        end += piece
        assert [cache.get_seq_length(i) for i in range(len(cache))] == [end] * model.config.num_hidden_layers
    output = generate(model, ids, return_dict_in_generate=True)
    assert output.past_key_values.get_seq_length() == 30 + NEW - 1


@pytest.mark.parametrize('spelling', SPELLINGS)
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_length_of_a_packed_cache(options, spelling):
    """A row each, as if padded on the left: of the longest in every layer, so that `generate` takes up the rows."""
    model, lengths = make_model(**options), [5, 15, 8]
    ids = make_ids(1, sum(lengths))
    cache = model(ids, use_cache=True, **borders(spelling, lengths)).past_key_values
    assert [cache.get_seq_length(i) for i in range(len(cache))] == [15] * model.config.num_hidden_layers

    samples = [torch.cat((x, make_ids(1, 2, seed=n)), 1) for n, x in enumerate(ids.split(lengths, 1))]
    rows = torch.cat([F.pad(x, (17 - x.shape[1], 0)) for x in samples])
    result = generate(model, rows, cache, attention_mask=(rows != 0).long())
    for row, x in zip(result, samples, strict=True):
        assert torch.equal(row[-NEW - x.shape[1]:][None], reference(model, x))


@pytest.mark.parametrize('layer', [0, 1])
@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_layer_without_an_index(options, layer):
    """Layers would write over each other's states."""
    model, ids = make_model(**options), make_ids(2, 9)
    want = full_logits(model, ids)
    model.model.layers[layer].attn.layer_idx = None
    assert torch.equal(full_logits(model, ids), want)
    with pytest.raises(ValueError, match='requires `layer_idx`'):
        model(ids, use_cache=True)


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=['deepcopy', 'pickle'])
@pytest.mark.parametrize('options', KINDS)
def test_branches_of_one_prefix(options, copied):
    """Continuations of a kept prompt, some of its rows padded, each from a copy: none finds what another wrote."""
    model, ids = make_model(**options), make_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    kept = [x.clone() for x in states(cache)]
    for seed in range(3):
        more, branch = torch.cat((ids, make_ids(2, 3, seed=seed)), 1), copied(cache)
        assert type(branch) is type(cache) and branch.get_seq_length() == 20 and branch.is_sliding == cache.is_sliding
        result = generate(model, more, branch, attention_mask=F.pad(mask, (0, 3), value=1))
        for row, pad in enumerate((6, 0)):
            assert torch.equal(result[row:row + 1, pad:], reference(model, more[row:row + 1, pad:]))
    assert cache.get_seq_length() == 20 and all(map(torch.equal, states(cache), kept))


# ---- types and devices


def nearly_greedy(model, result: torch.Tensor, num_tokens: int) -> None:
    """No token has clearly more than the one chosen in a full forward pass of the same model."""
    logits = model(result, use_cache=False).logits.float()[:, -num_tokens - 1:-1]
    chosen = logits.gather(-1, result[:, -num_tokens:, None]).squeeze(-1)
    assert (logits.amax(-1) - chosen <= 0.1 * logits.std()).all()


@pytest.mark.parametrize('autocast', [torch.bfloat16, torch.float16], ids=['autocast-bf16', 'autocast-fp16'])
@pytest.mark.parametrize('weights', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('options', KINDS)
def test_low_precision_weights_under_autocast(options, weights, autocast):
    """FLA's norms compute with weights that autocast does not cast."""
    model, ids = make_model(**options), make_ids(2, 40)
    want = full_logits(model, ids)
    model = model.to(weights)
    with torch.autocast('cpu', dtype=autocast):
        logits = full_logits(model, ids)
        assert_close(logits.float(), want, 5e-2, 'logits')
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == weights and p.grad.isfinite().all() and p.grad.any(), name
    with torch.autocast('cpu', dtype=autocast), torch.no_grad():
        result = generate(model.eval(), ids)
        nearly_greedy(model, result, NEW)
        with pytest.raises(AssertionError):
            nearly_greedy(model, torch.cat((result[:, :-NEW], make_ids(2, NEW, seed=7)), 1), NEW)


# ---- what tools do to a model


def test_columns_that_trainer_keeps():
    """Borders of packed sequences in a data set reach the model; `Trainer` drops columns that `forward` does not name."""
    parameters = inspect.signature(KDNForCausalLM.forward).parameters
    assert {*PACKING, 'cache', 'input_ids', 'labels'} <= set(parameters)


def test_label_smoothing():
    """`Trainer` shifts the labels of models it knows to predict the next token."""
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES['kdn'] == 'KDNForCausalLM'


@pytest.mark.parametrize('criterion', [
    torch.nn.CrossEntropyLoss(ignore_index=0), torch.nn.CrossEntropyLoss(weight=torch.arange(1., 51.)),
], ids=['ignored-token', 'weighted'])
def test_criterion_of_the_user(criterion):
    model, ids = make_model(), make_ids(2, 20)
    labels = ids.where(ids % 3 > 0, 0)
    model.criterion = criterion
    shifted = F.pad(labels[:, 1:], (0, 1), value=criterion.ignore_index)
    want = criterion(full_logits(model, ids).flatten(0, 1), shifted.flatten())
    assert_close(model(ids, labels=labels).loss, want, 1e-6, 'loss')


@pytest.mark.parametrize('register', ['register_forward_hook', 'register_forward_pre_hook'])
@pytest.mark.parametrize('options', KINDS)
def test_hook_on_a_projection(options, register):
    """A hook on any of them is called, also where a fused function would use the weight alone."""
    model, ids, called = make_model(**options), make_ids(1, 9), set()
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name in names:
        getattr(model.get_submodule(name), register)(lambda *_, name=name: called.add(name))
    model(ids, labels=ids)
    assert called == names


def test_lengths_under_both_names():
    with pytest.raises(ValueError, match='two names of one argument'):
        make_model()(make_ids(1, 4), cu_seqlens=torch.tensor([0, 4]), cu_seq_lens_q=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize('position_ids', [[0, 1, 0, 1], [[0, 1, 0]], [[[0, 1, 0, 1]]]], ids=str)
def test_position_ids_of_a_wrong_shape(position_ids):
    with pytest.raises(ValueError, match='position_ids must have shape'):
        make_model()(make_ids(1, 4), position_ids=torch.tensor(position_ids))


def test_restart_of_a_single_token_behind_padding():
    with pytest.raises(ValueError, match='restart within a row'):
        make_model()(make_ids(1, 4), torch.tensor([[0, 1, 1, 1]]), position_ids=torch.tensor([[0, 0, 0, 1]]))


def test_mask_that_is_added():
    for mask in (torch.tensor([[0., -math.inf, 0.]]), torch.tensor([[0., 0., torch.finfo(torch.float32).min]])):
        with pytest.raises(ValueError, match='0-1 matrix'):
            make_model()(make_ids(1, 3), attention_mask=mask)


@pytest.mark.parametrize('mask', [[1, 1, 2], [0, 1, 2], [0, 1, -1]], ids=str)
def test_mask_that_numbers_documents(mask):
    with pytest.raises(ValueError, match='nor numbers of documents'):
        make_model()(make_ids(1, 3), attention_mask=torch.tensor([mask]))


@pytest.mark.parametrize('options', KINDS)
@torch.no_grad()
def test_lengths_changed_in_place(options):
    """Nothing derived from the old values is kept: what FLA derives, it keeps by the tensor, so layers see another."""
    model, ids, cu_seqlens, seen = make_model(**options), make_ids(1, 20), torch.tensor([0, 5, 20]), []
    handle = model.model.layers[0].attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs['cu_seqlens']), with_kwargs=True)
    model(ids, cu_seqlens=cu_seqlens)
    handle.remove()
    assert seen[0] is not cu_seqlens and torch.equal(seen[0], cu_seqlens)
    cu_seqlens.copy_(torch.tensor([0, 12, 20]))
    assert torch.equal(model(ids, cu_seqlens=cu_seqlens).logits, model(ids, cu_seqlens=cu_seqlens.clone()).logits)


def test_arguments_of_generate():
    model, ids = make_model(), make_ids(1, 9)
    assert torch.equal(model.generate(ids, None, LogitsProcessorList(), max_new_tokens=3, do_sample=False, pad_token_id=0),
                       generate(model, ids, max_new_tokens=3))
    for name, value in (('cu_seqlens', torch.tensor([0, 9])), ('position_ids', torch.arange(9)[None])):
        with pytest.raises(ValueError, match=name):
            generate(model, ids, **{name: value})
