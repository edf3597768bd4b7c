# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The KDN layer against a plain composition of its steps, and against itself: packed, padded, in pieces, in every mode."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, rel
from fla.models.cache_utils import Cache

import fla_kdn.layers.kdn as kdn_module
from fla_kdn.layers import KalmanDeltaNet
from fla_kdn.ops.kdn import naive_recurrent_kdn

COVARIANCES = ['diagonal', 'isotropic']
OPTIONS = {
    'default': {},
    'grouped-values': {'num_v_heads': 4},
    'wide-grouped-values': {'num_v_heads': 6, 'expand_v': 2},
    'narrow-values': {'expand_v': 0.5},
    'no-conv': {'use_short_conv': False},
    'conv-bias': {'conv_bias': True, 'conv_size': 3},
    'info-scale': {'info_scale': 2.5},
    'learned-info-scale': {'learn_info_scale': True, 'num_v_heads': 4},
    'r-min': {'r_min': 0.5},
    'fixed-r': {'fixed_r': 0.3},
    'fixed-omega': {'fixed_omega': 0.2},
    'no-omega': {'fixed_omega': 0.},
    'no-safe-gate': {'safe_gate': False},
    'lower-bound': {'lower_bound': -0.5},
    'norm-eps': {'norm_eps': 0.1},
}
LAYERS = [
    pytest.param({'covariance': covariance, **options}, id=f'{covariance}-{name}')
    for covariance in COVARIANCES for name, options in OPTIONS.items()
]
FEW_LAYERS = [
    pytest.param({'covariance': 'diagonal'}, id='diagonal'),
    pytest.param({'covariance': 'isotropic'}, id='isotropic'),
    pytest.param({'num_v_heads': 4, 'expand_v': 2, 'use_short_conv': False}, id='grouped-values-no-conv'),
]


def make_layer(randomize: bool = True, **options) -> KalmanDeltaNet:
    """A tiny layer; `randomize` moves every parameter off its initial value, since zeros and ones hide errors."""
    torch.manual_seed(0)
    layer = KalmanDeltaNet(**{'hidden_size': 32, 'head_dim': 8, 'num_heads': 2, 'layer_idx': 0, **options})
    if randomize:
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p += (2 if name == 'dt_bias' else 0.2) * torch.randn_like(p)
    return layer


def make_input(B: int, T: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(seed))


def gradients(layer: KalmanDeltaNet, x: torch.Tensor, forward) -> dict[str, torch.Tensor]:
    """Of a fixed weighting of `forward(x)`: the gradient of the input and of every parameter; also the output."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    o = forward(x)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    (o * weights.to(o.dtype)).sum().backward()
    missing = [name for name, p in layer.named_parameters() if p.grad is None]
    assert not missing, f'no gradient for {missing}'
    return {'o': o, 'x': x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def check_gradients(
    got: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    o: float = 1e-5,
    matrix: float = 2e-5,
    vector: float = 5e-4,
) -> None:
    """Vectors get a tolerance of their own: their gradients are sums over all tokens whose terms nearly cancel."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert_close(got[name].to(x.dtype), x, o if name == 'o' else matrix if x.ndim > 1 else vector, name)


def plain_conv(conv, x: torch.Tensor) -> torch.Tensor:
    y = F.pad(x.transpose(1, 2), (conv.weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(y, conv.weight, conv.bias, groups=x.shape[-1]).transpose(1, 2))


def plain_layer(layer: KalmanDeltaNet, x: torch.Tensor, floored: list[bool] | None = None) -> torch.Tensor:
    """What the layer computes, with no function of FLA."""
    H, HV, K = layer.num_heads, layer.num_v_heads, layer.head_dim
    q, k, v = (getattr(layer, f'{n}_proj')(x) for n in 'qkv')
    if layer.use_short_conv:
        q, k, v = (plain_conv(getattr(layer, f'{n}_conv1d'), y) for n, y in zip('qkv', (q, k, v), strict=True))
    else:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q, k = (y.unflatten(-1, (H, K)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))

    f = x @ layer.f_proj[0].weight.T @ layer.f_proj[1].weight.T
    g = -layer.A_log.exp()[:, None] * F.softplus(f + layer.dt_bias).unflatten(-1, (HV, K))
    if layer.safe_gate:
        floor = -5. if layer.lower_bound is None else layer.lower_bound
        if floored is not None:
            floored.append(bool((g < floor).any()))
        g = g.clamp(min=floor)

    if layer.fixed_r is None:
        r = layer.r_min + F.softplus(layer.r_proj(x))
    else:
        r = torch.full((*x.shape[:2], HV), layer.fixed_r, dtype=x.dtype)
    channels = (HV, K) if layer.covariance == 'diagonal' else (HV,)
    if layer.fixed_omega is None:
        omega = F.softplus(layer.omega_proj(x)).unflatten(-1, channels)
    else:
        omega = torch.full((*x.shape[:2], *channels), layer.fixed_omega, dtype=x.dtype)

    o, *_ = naive_recurrent_kdn(
        q=q,
        k=k,
        v=v.unflatten(-1, (HV, -1)),
        g=g,
        omega=omega,
        r=r,
        initial_cov=1 / (0.1 + F.softplus(layer.prior_precision)),
        covariance=layer.covariance,
        info_scale=layer.log_info_scale.exp() if layer.learn_info_scale else layer.info_scale,
    )
    o = o * (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * layer.o_norm.weight
    gate = layer.g_proj[1](layer.g_proj[0](x)).sigmoid()
    return layer.o_proj(o.flatten(2) * gate)


@pytest.mark.parametrize('options', LAYERS)
def test_layer_is_its_plain_composition(options):
    layer, x = make_layer(**options), make_input(2, 70)
    got = gradients(layer, x, lambda x: layer(x)[0])
    for name, grad in got.items():
        assert grad.isfinite().all() and grad.any(), f'{name} has no finite or no nonzero value'
    floored = []
    layer.double()
    want = gradients(layer, x.double(), lambda x: plain_layer(layer, x, floored))
    assert floored == ([True] if layer.safe_gate else []), 'the floor of the decay is not tested'
    check_gradients(got, want)


@pytest.mark.parametrize('options', LAYERS)
def test_forward_backward_as_initialised(options):
    layer = make_layer(randomize=False, **options)
    result = gradients(layer, make_input(2, 65), lambda x: layer(x)[0])
    assert all(x.isfinite().all() for x in result.values())
    without = {name for name, x in result.items() if not x.any()}
    # behind a weight that starts at zero
    assert without == ({'omega_proj.0.weight'} if 'omega_proj.0.weight' in result else set())


@pytest.mark.parametrize('low_precision', ['bf16', 'autocast'])
@pytest.mark.parametrize('options', FEW_LAYERS)
def test_low_precision(options, low_precision):
    layer, x = make_layer(**options), make_input(2, 70)
    want = gradients(layer, x, lambda x: layer(x)[0])
    if low_precision == 'bf16':
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=low_precision == 'autocast'):
        got = gradients(layer, x, lambda x: layer(x)[0])
        with torch.no_grad():
            recurrent = layer(x[:, :40])[0]
    assert got['o'].dtype == recurrent.dtype == torch.bfloat16
    assert_close(recurrent.float(), want['o'][:, :40], 2e-2, 'o of the recurrent form')
    check_gradients(got, want, o=2e-2, matrix=6e-2, vector=0.5)


# ---- parameters


@pytest.mark.parametrize('options', LAYERS)
def test_parameter_names(options):
    layer = make_layer(**options)
    names = {f'{n}_proj.weight' for n in 'qkvo'}
    names |= {f'{n}_proj.{i}.weight' for n in 'fg' for i in (0, 1)} | {'g_proj.1.bias'}
    names |= {'A_log', 'dt_bias', 'o_norm.weight', 'prior_precision'}
    if layer.use_short_conv:
        names |= {f'{n}_conv1d.weight' for n in 'qkv'}
        names |= {f'{n}_conv1d.bias' for n in 'qkv'} if options.get('conv_bias') else set()
    if options.get('fixed_r') is None:
        names |= {'r_proj.weight', 'r_proj.bias'}
    if options.get('fixed_omega') is None and layer.covariance == 'diagonal':
        names |= {'omega_proj.0.weight', 'omega_proj.1.weight', 'omega_proj.1.bias'}
    elif options.get('fixed_omega') is None:
        names |= {'omega_proj.weight', 'omega_proj.bias'}
    if options.get('learn_info_scale'):
        names |= {'log_info_scale'}
    assert layer.state_dict().keys() == names


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_initial_values(covariance):
    layer = make_layer(
        randomize=False, covariance=covariance, num_heads=64, num_v_heads=128, head_dim=4, learn_info_scale=True)
    x, one = make_input(2, 5), torch.ones(128)
    assert_close(1 / (0.1 + F.softplus(layer.prior_precision)), one, 1e-6, 'prior covariance')
    assert_close(layer.log_info_scale.exp(), 4 * one, 1e-6, 'info scale')
    assert not layer.r_proj.bias.any()
    # what the softplus of omega is taken of: zero for every token
    assert layer.omega_proj(x).shape == (2, 5, 128 * 4 if covariance == 'diagonal' else 128)
    last = layer.omega_proj[-1] if covariance == 'diagonal' else layer.omega_proj
    assert not last.bias.any()
    assert layer.omega_proj(x).any() == last.weight.any() == (covariance == 'isotropic')

    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert A.min() >= 1 and A.max() <= 16 and abs(A.mean() - 8.5) < 1.5, 'A is not uniform in [1, 16]'
    assert dt.min() >= 0.999e-3 and dt.max() <= 0.1001, 'dt is not in [0.001, 0.1]'
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.2, 'dt is not uniform in log space'


@pytest.mark.parametrize('info_scale', [None, 0.5])
def test_initial_info_scale(info_scale):
    layer = make_layer(randomize=False, learn_info_scale=True, info_scale=info_scale)
    assert_close(layer.log_info_scale.exp(), torch.full((2,), info_scale or 8.), 1e-6, 'info scale')
    fixed = make_layer(randomize=False, info_scale=info_scale)
    assert_close(layer(make_input(1, 9))[0], fixed(make_input(1, 9))[0], 1e-6, 'o')
    other = make_layer(randomize=False, info_scale=3.)
    assert rel(other(make_input(1, 9))[0], fixed(make_input(1, 9))[0]) > 1e-3


@pytest.mark.parametrize('learn_info_scale', [False, True], ids=['given-info-scale', 'learned-info-scale'])
def test_no_weight_decay(learn_info_scale):
    layer = make_layer(learn_info_scale=learn_info_scale)
    flagged = {name for name, p in layer.named_parameters() if getattr(p, '_no_weight_decay', False)}
    assert flagged == {'A_log', 'dt_bias', 'prior_precision'} | ({'log_info_scale'} if learn_info_scale else set())


def test_reset_parameters_keeps_what_was_loaded():
    layer = make_layer()
    before = copy.deepcopy(layer.state_dict())
    layer.A_log._is_hf_initialized = layer.omega_proj[1].weight._is_hf_initialized = True
    layer.reset_parameters()
    changed = {name for name, x in layer.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {'dt_bias', 'prior_precision', 'r_proj.bias', 'omega_proj.1.bias'}


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        pytest.param({'covariance': 'full'}, "covariance='full'", id='covariance'),
        pytest.param({'mode': 'parallel'}, "mode='parallel'", id='mode'),
        pytest.param({'expand_v': 1.3}, 'expand_v=1.3', id='expand-v'),
        pytest.param({'num_heads': 0}, 'num_heads=0 must be positive', id='no-heads'),
        pytest.param({'num_v_heads': 3}, 'num_v_heads=3', id='v-heads-not-a-multiple'),
        pytest.param({'num_v_heads': 1}, 'num_v_heads=1', id='fewer-v-heads'),
        pytest.param({'r_min': 0.}, 'r_min=0', id='r-min-zero'),
        pytest.param({'r_min': -1.}, 'r_min=-1', id='r-min-negative'),
        pytest.param({'fixed_r': 0.}, 'fixed_r=0', id='r-zero'),
        pytest.param({'fixed_r': -1.}, 'fixed_r=-1', id='r-negative'),
        pytest.param({'fixed_r': math.nan}, 'fixed_r=nan', id='r-nan'),
        pytest.param({'fixed_omega': -0.1}, 'fixed_omega=-0.1', id='omega-negative'),
        pytest.param({'fixed_omega': math.inf}, 'fixed_omega=inf', id='omega-infinite'),
        pytest.param({'info_scale': 0.}, 'info_scale=0', id='info-scale-zero'),
        pytest.param({'info_scale': -2.}, 'info_scale=-2', id='info-scale-negative'),
        pytest.param({'safe_gate': False, 'lower_bound': -5.}, 'lower_bound=-5', id='bound-without-safe-gate'),
        pytest.param({'lower_bound': -5.5}, 'lower_bound=-5.5', id='bound-too-low'),
        pytest.param({'lower_bound': 0.}, 'lower_bound=0', id='bound-zero'),
        pytest.param({'lower_bound': 1.}, 'lower_bound=1', id='bound-positive'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**options)


def test_bad_mask():
    with pytest.raises(ValueError, match=r'attention_mask.*\[2, 5, 5\]'):
        make_layer()(make_input(2, 5), attention_mask=torch.ones(2, 5, 5))


@pytest.mark.parametrize('use_cache', [False, True], ids=['read', 'write'])
def test_cache_needs_layer_idx(use_cache):
    layer = make_layer(layer_idx=None)
    layer(make_input(2, 5))
    with pytest.raises(ValueError, match='layer_idx'):
        layer(make_input(2, 5), past_key_values=Cache(), use_cache=use_cache)


# ---- one result from every form


@pytest.mark.parametrize(
    ('grad', 'T', 'mode', 'expected'),
    [
        pytest.param(True, 1, 'chunk', 'chunk_kdn', id='training-short'),
        pytest.param(True, 65, 'fused_recurrent', 'chunk_kdn', id='training-long-recurrent'),
        pytest.param(False, 1, 'chunk', 'fused_recurrent_kdn', id='decoding'),
        pytest.param(False, 64, 'chunk', 'fused_recurrent_kdn', id='short-prompt'),
        pytest.param(False, 65, 'chunk', 'chunk_kdn', id='prompt'),
        pytest.param(False, 65, 'fused_recurrent', 'fused_recurrent_kdn', id='prompt-recurrent'),
    ],
)
def test_choice_of_form(monkeypatch, grad, T, mode, expected):
    called = []
    for name in ('chunk_kdn', 'fused_recurrent_kdn'):
        def record(fn, name, **kwargs):
            called.append(name)
            return fn(**kwargs)

        monkeypatch.setattr(kdn_module, name, functools.partial(record, getattr(kdn_module, name), name))
    with torch.set_grad_enabled(grad):
        make_layer(mode=mode)(make_input(1, T))
    assert called == [expected]


@pytest.mark.parametrize('options', FEW_LAYERS)
@torch.no_grad()
def test_modes_agree(options):
    x, caches = make_input(2, 100), [Cache(), Cache()]
    o, o_recurrent = (
        make_layer(mode=mode, **options)(x, past_key_values=cache, use_cache=True)[0]
        for mode, cache in zip(('chunk', 'fused_recurrent'), caches, strict=True)
    )
    assert_close(o_recurrent, o, 1e-5, 'o')
    for name, want, got in zip(('memory', 'covariance'), *(cache[0]['recurrent_state'] for cache in caches), strict=True):
        assert_close(got, want, 1e-5, name)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('options', FEW_LAYERS)
def test_packed_sequences(options, grad):
    lens = (5, 1, 64, 0, 70, 3)
    layer, x = make_layer(**options), make_input(1, sum(lens))
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0)
    with torch.set_grad_enabled(grad):
        packed = layer(x, cu_seqlens=cu_seqlens)[0]
        separate = torch.cat([layer(piece)[0] for piece in x.split(lens, 1) if piece.shape[1]], 1)
        assert rel(layer(x)[0], separate) > 0.1
    assert_close(packed, separate, 1e-5, 'o')


@pytest.mark.parametrize('T', [20, 80])
@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('options', FEW_LAYERS)
def test_padding(options, side, grad, T):
    """Of a prompt; one more token of every sequence then continues from its last real token, on either side."""
    layer, x, cache = make_layer(**options), make_input(3, T + 1), Cache()
    mask = torch.ones(3, T)
    for row, pad in ((0, 7), (2, T - 1)):
        mask[row, slice(pad) if side == 'left' else slice(T - pad, None)] = 0
    with torch.set_grad_enabled(grad):
        o = layer(x[:, :T], attention_mask=mask, past_key_values=cache, use_cache=True)[0]
        next_mask = torch.cat((mask, torch.ones(3, 1)), 1)
        o_next = layer(x[:, T:], attention_mask=next_mask, past_key_values=cache, use_cache=True)[0]
        assert not o[mask == 0].any()
        for row in range(3):
            alone = layer(torch.cat((x[row, :T][mask[row] == 1], x[row, T:])).unsqueeze(0))[0]
            assert_close(torch.cat((o[row, mask[row] == 1], o_next[row])), alone[0], 1e-5, f'o of row {row}')


PIECES = [pytest.param(pieces, id='-'.join(map(str, pieces))) for pieces in [(1, 3, 64, 65), (65, 64, 3, 1), (3, 1, 1, 65, 1)]]


@pytest.mark.parametrize('pieces', PIECES)
@pytest.mark.parametrize('options', FEW_LAYERS)
@torch.no_grad()
def test_pieces(options, pieces):
    layer, x, cache, whole_cache = make_layer(**options), make_input(2, sum(pieces)), Cache(), Cache()
    whole = layer(x, past_key_values=whole_cache, use_cache=True)[0]
    outputs = [layer(piece, past_key_values=cache, use_cache=True)[0] for piece in x.split(pieces, 1)]
    for i, (got, want) in enumerate(zip(outputs, whole.split(pieces, 1), strict=True)):
        assert_close(got, want, 1e-5, f'o of piece {i}')
    for name, got, want in zip(
        ('memory', 'covariance'), cache[0]['recurrent_state'], whole_cache[0]['recurrent_state'], strict=True,
    ):
        assert got.dtype == torch.float32
        assert_close(got, want, 1e-5, name)
    assert cache.get_seq_length() == whole_cache.get_seq_length() == sum(pieces)
    assert rel(layer(x.split(pieces, 1)[-1])[0], outputs[-1]) > 0.05, 'the cache makes no difference'


@pytest.mark.parametrize('options', FEW_LAYERS)
def test_gradient_through_pieces(options):
    layer, x, pieces = make_layer(**options), make_input(2, 72), (3, 65, 1, 3)

    def in_pieces(x):
        cache = Cache()
        return torch.cat([layer(piece, past_key_values=cache, use_cache=True)[0] for piece in x.split(pieces, 1)], 1)

    check_gradients(gradients(layer, x, in_pieces), gradients(layer, x, lambda x: layer(x)[0]))


@pytest.mark.parametrize('options', FEW_LAYERS)
@torch.no_grad()
def test_left_padding_in_pieces(options):
    """A first piece that is all padding in one row, then in no row, with a mask of all tokens so far."""
    layer, x, cache, pieces = make_layer(**options), make_input(3, 80), Cache(), (5, 2, 70, 1, 2)
    mask = torch.ones(3, 80, dtype=torch.long)
    mask[0, :6] = mask[1, :2] = 0
    outputs, end = [], 0
    for piece in x.split(pieces, 1):
        end += piece.shape[1]
        outputs.append(layer(piece, attention_mask=mask[:, :end].clone(), past_key_values=cache, use_cache=True)[0])
    o = torch.cat(outputs, 1)
    for row in range(3):
        alone = layer(x[row:row + 1, mask[row] == 1])[0]
        assert_close(o[row, mask[row] == 1], alone[0], 1e-5, f'o of row {row}')


@pytest.mark.parametrize('T', [1, 5, 70])
@pytest.mark.parametrize('options', FEW_LAYERS)
@torch.no_grad()
def test_reading_a_cache_leaves_it_unchanged(options, T):
    layer, x, cache = make_layer(**options), make_input(2, 9 + T), Cache()
    layer(x[:, :9], past_key_values=cache, use_cache=True)
    before = copy.deepcopy(cache)
    o = layer(x[:, 9:], past_key_values=cache, use_cache=False)[0]
    assert_close(o, layer(x)[0][:, 9:], 1e-5, 'o')
    assert cache.get_seq_length() == 9
    for name in ('recurrent_state', 'conv_state'):
        for got, want in zip(cache[0][name] or (), before[0][name] or (), strict=True):
            assert torch.equal(got, want), f'{name} has changed'


@torch.no_grad()
def test_a_piece_of_padding_only():
    layer, x, cache = make_layer(), make_input(2, 9), Cache()
    layer(x[:, :4], past_key_values=cache, use_cache=True)
    o = layer(torch.randn(2, 3, 32), attention_mask=torch.zeros(2, 3), past_key_values=cache, use_cache=True)[0]
    assert o.shape == (2, 3, 32) and not o.any()
    o = layer(x[:, 4:], past_key_values=cache, use_cache=True)[0]
    assert_close(o, layer(x)[0][:, 4:], 1e-5, 'o')


@pytest.mark.parametrize(('dtype', 'expected'), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=str)
@pytest.mark.parametrize('options', [{'fixed_r': 0.1}, {'fixed_omega': 0.1}, {'learn_info_scale': True, 'fixed_omega': 0.1}])
def test_variances_are_in_fp32_or_float64(options, dtype, expected):
    layer = make_layer(**options).to(dtype)
    noise = layer.noise(make_input(1, 5).to(dtype))
    assert noise['omega'].dtype == noise['r'].dtype == layer.prior_covariance().dtype == expected
    if 'fixed_omega' in options:
        assert (noise['omega'] == 0.1).all()
    if 'learn_info_scale' in options:
        assert layer.information_scale().dtype == expected


@pytest.mark.parametrize('options', [{'lower_bound': -0.5}, {'use_short_conv': False}])
def test_filter_inputs(options):
    """Of options that no model here has; the others are tested on models."""
    layer, x = make_layer(randomize=False, **options), make_input(1, 20)
    with torch.no_grad():
        layer.dt_bias.uniform_(-4, 2)
        want = naive_recurrent_kdn(
            **layer.filter_inputs(x),
            v=x.new_zeros(1, 20, 2, 1),
            initial_cov=layer.prior_covariance(),
            output_uncertainty=True,
        )[-1]
        got = layer(x, output_uncertainty=True)[1]
    assert_close(got.read_variance, want.read_variance, 1e-5)
