# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The attention layer of hybrids against a dense form: windows, padding anywhere, packed, in pieces, by every kernel."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from conftest import assert_close, rel
from fla.layers import attn as fla_attn
from fla.models.cache_utils import Cache
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fla_kdn.layers import Attention, KalmanDeltaNet, attn

HEADS = 4
# 300 is more than the shortest block of queries
WINDOWS = [None, 1, 6, 300]
OPTIONS = [pytest.param({'num_kv_heads': kv, 'window_size': window}, id=f'{kv}-kv-heads-window-{window}')
           for kv in (1, 4) for window in WINDOWS]
FEW_OPTIONS = [pytest.param({'window_size': window, 'num_kv_heads': 2}, id=f'window-{window}') for window in (None, 6)]


def make_layer(implementation: str | None = None, dtype: torch.dtype = torch.float64, **options) -> Attention:
    torch.manual_seed(0)
    config = None if implementation is None else SimpleNamespace(_attn_implementation=implementation)
    options = {'hidden_size': 32, 'num_heads': HEADS, 'qkv_bias': True, 'layer_idx': 0, **options}
    return Attention(**options, config=config).to(dtype)


def make_input(B: int, T: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """Attention from its definition, `[B, T, hidden_size]`: rotation by complex numbers, a matrix of all pairs of tokens."""
    (B, T, _), D = x.shape, layer.head_dim
    q, k, v = (proj(x).view(B, T, -1, D) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    phase = torch.arange(T).double()[:, None] / layer.rope_theta ** (torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(phase), phase)[:, None]
    q, k = (turn * torch.complex(*y.double().chunk(2, -1)) for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // layer.num_kv_heads, 2) for y in (k, v))
    scores = torch.einsum('bihd,bjhd->bhij', q, k.conj()).real / D ** 0.5
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (layer.window_size or T))
    o = torch.einsum('bhij,bjhd->bihd', scores.masked_fill(hidden, float('-inf')).softmax(-1), v.double())
    return layer.o_proj(o.flatten(-2).to(x.dtype))


def random_mask(B: int, T: int) -> torch.Tensor:
    """Padding everywhere; the first row begins with some and the last row is whole."""
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, :9], mask[-1] = False, True
    return mask


def check_padded(layer: Attention, x: torch.Tensor, o: torch.Tensor, mask: torch.Tensor, tol: float = 1e-12) -> None:
    for row, valid in enumerate(mask):
        assert_close(o[row][valid], dense(layer, x[row][valid][None])[0], tol, f'row {row}')


@pytest.mark.parametrize('T', [1, 15, 70, 700])
@pytest.mark.parametrize('options', OPTIONS)
def test_against_dense(options, T):
    layer, x, do = make_layer(**options), make_input(2, T).requires_grad_(), make_input(2, T, seed=2)
    results = []
    for f in (lambda x: layer(x)[0], lambda x: dense(layer, x)):
        o = f(x)
        results.append((o, *torch.autograd.grad((o * do).sum(), [x, *layer.parameters()])))
    # a key alone has the weight 1, whatever the query
    names = ['o', 'dx', *(name for name, _ in layer.named_parameters())]
    for name, got, want in zip(names, *results, strict=True):
        if want.norm() < 1e-9:
            assert got.norm() < 1e-9, name
        else:
            assert_close(got, want, 1e-11, name)


@pytest.mark.parametrize('pieces', [(1,) * 20, (310, 200, 1, 1, 188), (3, 5, 290, 2)], ids=str)
@pytest.mark.parametrize('padded', [False, True], ids=['full', 'padded'])
@pytest.mark.parametrize('options', OPTIONS)
@torch.no_grad()
def test_in_pieces(options, padded, pieces):
    """Padding in the middle of a cached sequence leaves its window as long as without."""
    layer, T = make_layer(**options), sum(pieces)
    x, mask, cache, outputs, end = make_input(3, T), random_mask(3, T), Cache(), [], 0
    for piece in x.split(pieces, 1):
        end += piece.shape[1]
        attention_mask = mask[:, :end] if padded else None
        outputs.append(layer(piece, attention_mask=attention_mask, past_key_values=cache, use_cache=True)[0])
        if options['window_size'] is not None:
            assert cache[0]['attn_state'][0].shape[1] <= options['window_size']
    assert cache.get_seq_length() == T
    check_padded(layer, x, torch.cat(outputs, 1), mask if padded else torch.ones_like(mask))


@pytest.mark.parametrize('options', OPTIONS)
def test_padding_changes_nothing(options):
    """Nor does what stands there, a NaN included, in the output or in a gradient."""
    layer, x, mask = make_layer(**options), make_input(3, 330), random_mask(3, 330)
    poisoned = x.masked_fill(~mask.unsqueeze(-1), float('nan')).requires_grad_()
    o, _, _ = layer(poisoned, attention_mask=mask)
    check_padded(layer, x, o, mask)
    (dx,) = torch.autograd.grad(o[mask].sum(), poisoned)
    assert not dx[~mask].any() and dx[mask].isfinite().all() and dx[mask].any()


@pytest.mark.parametrize('cached', [False, True], ids=['no-cache', 'cache'])
@pytest.mark.parametrize('options', OPTIONS)
def test_packed(options, cached):
    layer, x = make_layer(**options), make_input(1, 716)
    lens = [0, 3, 300, 0, 397, 1, 15, 0]
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0)
    cache = {'past_key_values': Cache(), 'use_cache': True} if cached else {}
    o, _, _ = layer(x, cu_seqlens=cu_seqlens, **cache)
    want = torch.cat([dense(layer, y) for y in x.split(lens, 1) if y.shape[1]], 1)
    assert_close(o, want, 1e-12)
    assert rel(dense(layer, x), want) > 1e-2 or options['window_size'] == 1, 'nothing would leak'
    if cached:
        # each sequence goes on, some with no token
        more, more_lens = make_input(1, 10, seed=4), [2, 1, 3, 0, 0, 2, 1, 1]
        o, _, _ = layer(more, cu_seqlens=torch.tensor([0, *more_lens]).cumsum(0), **cache)
        for n, (first, second) in enumerate(zip(x.split(lens, 1), more.split(more_lens, 1), strict=True)):
            if second.shape[1]:
                want = dense(layer, torch.cat((first, second), 1))[:, -second.shape[1]:]
                assert_close(o.split(more_lens, 1)[n], want, 1e-12, f'sequence {n}')


@pytest.mark.parametrize('options', OPTIONS)
@torch.no_grad()
def test_reading_a_cache_leaves_it(options):
    layer, x, cache = make_layer(**options), make_input(2, 20), Cache()
    layer(x[:, :15], past_key_values=cache, use_cache=True)
    kept = copy.deepcopy(cache)
    o, _, _ = layer(x[:, 15:], past_key_values=cache, use_cache=False)
    assert_close(o, dense(layer, x)[:, 15:], 1e-12)
    assert cache.get_seq_length() == 15
    assert all(map(torch.equal, cache[0]['attn_state'], kept[0]['attn_state']))


# ---- kernels


def inputs_of_every_kind(layer: Attention, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of the plain, the padded, the packed and the cached call; of the padded one where there are tokens."""
    T = x.shape[1]
    mask, cu_seqlens, cache = random_mask(len(x), T), torch.tensor([0, 3, T // 2, T]), Cache()
    first = layer(x[:, :T // 2], past_key_values=cache, use_cache=True)[0]
    return {
        'plain': layer(x)[0],
        'padded': layer(x, attention_mask=mask)[0][mask],
        'packed': layer(x[:1], cu_seqlens=cu_seqlens)[0],
        'first piece': first,
        'second piece': layer(x[:, T // 2:-1], past_key_values=cache, use_cache=True)[0],
        'last token': layer(x[:, -1:], past_key_values=cache, use_cache=True)[0],
    }


def check_implementation(implementation: str, options: dict, dtype: torch.dtype, tol: float, T: int = 330) -> None:
    x = make_input(2, T, dtype)
    with torch.no_grad():
        got = inputs_of_every_kind(make_layer(implementation, dtype, **options).eval(), x)
        want = inputs_of_every_kind(make_layer('sdpa', **options), x.double())
    for name, y in want.items():
        assert_close(got[name].to(y.dtype), y, tol, name)


@pytest.mark.parametrize('options', OPTIONS)
def test_eager(options):
    # its softmax is in fp32
    check_implementation('eager', options, torch.float64, 1e-6)


@pytest.mark.parametrize('options', FEW_OPTIONS)
def test_flex_attention(options):
    # as it is written, uncompiled: PyTorch's compiler would take minutes for the shapes of this test
    with torch.compiler.set_stance('force_eager'):
        check_implementation('flex_attention', options, torch.float32, 1e-5, T=40)


def flash_attention(module, q, k, v, attention_mask, scaling, dropout, sliding_window=None, cu_seq_lens_q=None, **kwargs):
    """What transformers' flash attention means by its arguments; queries and keys end together."""
    assert scaling == module.head_dim ** -0.5 and dropout == 0
    if cu_seq_lens_q is None:
        valid = torch.ones(len(k), k.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        rows = [(row, valid[row, -q.shape[2]:], valid[row]) for row in range(len(q))]
    else:
        assert cu_seq_lens_q.dtype == torch.int32 and torch.equal(cu_seq_lens_q, kwargs['cu_seq_lens_k'])
        assert kwargs['max_length_q'] == kwargs['max_length_k'] >= cu_seq_lens_q.diff().max() and attention_mask is None
        at = torch.arange(q.shape[2])
        rows = [(0, inside, inside) for a, b in zip(cu_seq_lens_q, cu_seq_lens_q[1:], strict=False)
                for inside in [(at >= a) & (at < b)]]
    o = torch.zeros_like(q)
    for row, of_q, of_k in rows:
        k_row, v_row = (x[row][:, of_k].repeat_interleave(HEADS // x.shape[1], 0) for x in (k, v))
        S, T = int(of_k.sum()), int(of_q.sum())
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        hidden = (distance < 0) | (distance >= (sliding_window or S))
        scores = (q[row][:, of_q] @ k_row.mT * scaling).masked_fill(hidden, float('-inf'))
        o[row, :, of_q] = scores.softmax(-1) @ v_row
    return o.transpose(1, 2), None


@pytest.mark.parametrize('keys', [320, 384])
def test_cudnn_is_left_out_where_its_gradients_fail(monkeypatch, keys):
    layer, x, on = make_layer(window_size=64), make_input(1, 2 * (keys - 64)), {}
    sdpa = ALL_ATTENTION_FUNCTIONS['sdpa']

    def spy(module, q, k, v, attention_mask, **kwargs):
        on[k.shape[2], attention_mask is not None] = torch.backends.cuda.cudnn_sdp_enabled()
        return sdpa(module, q, k, v, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, 'sdpa', spy)
    monkeypatch.setattr(attn, 'MIN_BLOCK', keys - 64)
    default = torch.backends.cuda.cudnn_sdp_enabled()
    layer(x)
    assert on[keys, True] == (default and keys == 384)
    with torch.no_grad():
        layer(x)
    assert on[keys, True] == torch.backends.cuda.cudnn_sdp_enabled() == default


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_gradients_where_all_scores_are_far_below_zero():
    layer = make_layer(window_size=64, hidden_size=256, dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        # of the channels that turn most slowly
        for proj, value in ((layer.q_proj, 1.), (layer.k_proj, -120. * layer.head_dim ** 0.5)):
            proj.weight.mul_(0.1)
            proj.bias.zero_().view(HEADS, -1)[:, layer.head_dim // 2 - 1] = value
    x = torch.randn(1, 512, 256, device='cuda', dtype=torch.bfloat16, requires_grad=True)
    layer(x)[0].float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert x.grad.isfinite().all()


@pytest.mark.parametrize('options', OPTIONS)
def test_arguments_of_flash_attention(monkeypatch, options):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, 'flash_attention_2', flash_attention)
    check_implementation('flash_attention_2', options, torch.float64, 1e-12)


@pytest.mark.parametrize('options', [{}, {'window_size': 6}, {'num_kv_heads': 1}], ids=str)
@pytest.mark.parametrize(('B', 'T'), [(0, 5), (2, 0)])
def test_no_rows_or_no_tokens(B, T, options):
    assert make_layer(**options)(make_input(B, T))[0].shape == (B, T, 32)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    layer, x = make_layer(window_size=30), make_input(2, 100)
    o, _, _ = make_layer(window_size=30, dtype=dtype)(x.to(dtype))
    assert o.dtype == dtype
    assert_close(o.double(), dense(layer, x), 2e-2)


def test_angles_of_distant_tokens_in_low_precision():
    layer, x, tokens = make_layer(dtype=torch.bfloat16), make_input(1, 600, torch.bfloat16), torch.arange(600)[None]
    exact = copy.deepcopy(layer).double().project(x.double(), tokens)
    for got, want in zip(layer.project(x, tokens), exact, strict=True):
        assert rel(got, want) < 1e-2


@torch.no_grad()
def test_the_cache_of_a_window_keeps_no_more():
    cache = Cache()
    make_layer(window_size=6)(make_input(1, 50), past_key_values=cache, use_cache=True)
    for x in cache[0]['attn_state']:
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor, and of all, that operations return."""

    largest = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.largest, self.total = max(self.largest, x.numel()), self.total + x.numel()
        return result


@pytest.mark.parametrize('how', ['plain', 'padded', 'packed', 'packed-cached'])
def test_linear_in_the_length(how):
    """Memory and work of a window; a mask of all pairs of 8,192 tokens would have 67 million elements."""
    layer = make_layer(window_size=16, dtype=torch.float32)
    seen = {}
    for T in (4096, 8192):
        options = {'attention_mask': random_mask(1, T)} if how == 'padded' else {}
        if how.startswith('packed'):
            # one long sequence among many short ones
            options['cu_seqlens'] = torch.cat((torch.tensor([0]), torch.arange(T // 2, T + 1, 8)))
        if how.endswith('cached'):
            options |= {'past_key_values': Cache(), 'use_cache': True}
        x = make_input(1, T, torch.float32).requires_grad_()
        with Largest() as seen[T]:
            layer(x, **options)[0].sum().backward()
    assert seen[8192].largest <= 2.01 * seen[4096].largest and seen[8192].largest <= 8192 * 33
    assert seen[8192].total <= 2.1 * seen[4096].total


# ---- parameters and errors


def test_parameters_of_fla(monkeypatch):
    """FLA's checkpoints of hybrids fit."""
    monkeypatch.setattr(fla_attn, 'flash_attn_func', object())
    options = {'hidden_size': 32, 'num_heads': 4, 'num_kv_heads': 2, 'qkv_bias': True}
    ours, theirs = (nn.ModuleDict({'attn': cls(**options)}).state_dict() for cls in (Attention, fla_attn.Attention))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}


@pytest.mark.parametrize('options', [
    {'num_heads': 3}, {'num_heads': 32}, {'num_kv_heads': 3}, {'window_size': 0},
], ids=str)
def test_contradictory_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_layer(**options)


@pytest.mark.parametrize('shape', [(2, 9), (1, 10), (2, 1, 10, 10), (10,)], ids=str)
@pytest.mark.parametrize('layer', [Attention, KalmanDeltaNet])
def test_mask_of_a_wrong_shape(layer, shape):
    with pytest.raises(ValueError, match='attention_mask must be a 0-1 matrix'):
        layer(hidden_size=32, num_heads=2)(make_input(2, 10, torch.float32), attention_mask=torch.ones(shape))


@pytest.mark.parametrize('cu_seqlens', [[0, 3, 8], [0, 3, 20], [2, 10], [3, 7], [0, 7, 3, 10], [0., 10.], [10]], ids=str)
@pytest.mark.parametrize('layer', [Attention, KalmanDeltaNet])
def test_lengths_that_do_not_fit(layer, cu_seqlens):
    with pytest.raises(ValueError, match='`cu_seqlens` must'):
        layer(hidden_size=32, num_heads=2)(make_input(1, 10, torch.float32), cu_seqlens=torch.tensor(cu_seqlens))


def test_a_cache_needs_the_index_of_the_layer():
    with pytest.raises(ValueError, match='layer_idx'):
        make_layer(layer_idx=None)(make_input(1, 3), past_key_values=Cache(), use_cache=True)
