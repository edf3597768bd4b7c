# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Every form of KDN refuses bad arguments with an error that names the argument."""

from __future__ import annotations

import math
import re

import pytest
import torch
from kdn_cases import COVARIANCES, make_inputs

from fla_kdn.ops.kdn import (
    chunk_kdn,
    fused_recurrent_kdn,
    naive_chunk_kdn,
    naive_recurrent_exact_kdn,
    naive_recurrent_kdn,
)

FORMS = [naive_recurrent_kdn, naive_chunk_kdn, chunk_kdn, fused_recurrent_kdn]
B, T, H, HV, K, V = 2, 6, 2, 4, 5, 3
AXES = {'q': 4, 'k': 4, 'v': 4, 'g': 4, 'r': 3, 'initial_state': 4, 'info_scale': 1}


@pytest.fixture(params=FORMS, ids=lambda fn: fn.__name__)
def refuses(request):
    """Call one form with some arguments changed, and expect an error."""
    def call(match, error=ValueError, covariance='diagonal', batch=B, tokens=T, **changes):
        inputs = make_inputs('isotropic' if covariance == 'isotropic' else 'diagonal', B=batch, T=tokens, H=H, HV=HV, K=K, V=V,
                             N=changes.pop('N', None), dtype=torch.float32)
        inputs |= {name: change(inputs[name]) if callable(change) else change for name, change in changes.items()}
        with pytest.raises(error, match=match):
            request.param(**inputs, covariance=covariance)

    return call


def test_valid_inputs_are_accepted():
    for covariance in COVARIANCES:
        inputs = make_inputs(covariance, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=torch.float32)
        for fn in FORMS:
            fn(**inputs, covariance=covariance)


@pytest.mark.parametrize('r_min', [-1., math.inf])
def test_r_min_is_finite(refuses, r_min):
    refuses('`r_min` must be finite', use_noise_softplus_in_kernel=True, r_min=r_min)


def test_r_min_goes_with_the_softplus(refuses):
    refuses('`r_min` is only used with', r_min=0.1)


def test_covariance_name(refuses):
    refuses("`covariance` must be one of .* got 'full'", covariance='full')


@pytest.mark.parametrize(('name', 'axis'), [(name, axis) for name, axes in AXES.items() for axis in range(axes)])
def test_shapes(refuses, name, axis):
    named = {('v', 2): '`g`', ('v', 3): '`initial_state`', ('initial_state', 0): 'number of initial states'}
    refuses(named.get((name, axis), f'`{name}`'), **{name: lambda x: torch.cat((x, x), axis)})


@pytest.mark.parametrize('name', AXES)
def test_number_of_axes(refuses, name):
    refuses(f'`{name}`', **{name: lambda x: x.unsqueeze(-1)})
    if name not in ('initial_state', 'info_scale'):
        refuses(f'`{name}`', **{name: lambda x: x[0]})


def test_q_and_k_of_one_shape(refuses):
    match = re.escape('`q` and `k` must have the same shape [B, T, H, K]; got [2, 6, 1, 5] and [2, 6, 2, 5]')
    refuses(match, q=lambda x: x[:, :, :1])


def test_grouped_values(refuses):
    refuses('value heads must be a multiple .* HV=4 and H=3', q=lambda x: x[:, :, [0, 0, 0]], k=lambda x: x[:, :, [0, 0, 0]])
    refuses('value heads must be a multiple .* HV=3 and H=2', v=lambda x: x[:, :, :3])


def test_omega_has_the_rank_of_the_covariance(refuses):
    refuses(r"`omega` must have shape \[B, T, HV, K\] \(covariance='diagonal'\) = \[2, 6, 4, 5\], got \[2, 6, 4\]",
            omega=lambda x: x[..., 0])
    refuses(r"`omega` must have shape \[B, T, HV\] \(covariance='isotropic'\) = \[2, 6, 4\], got \[2, 6, 4, 5\]",
            covariance='isotropic', omega=lambda x: x[..., None].expand(*x.shape, K))
    refuses(r'`omega` must have shape .* got \[2, 6, 2, 5\]', omega=lambda x: x[:, :, :2])


def test_initial_cov_has_the_rank_of_the_covariance(refuses):
    refuses(r"`initial_cov` must have shape \[HV\] or \[N, HV, K\] \(covariance='diagonal'\) = \[2, 4, 5\], got \[2, 4\]",
            initial_cov=lambda x: x[..., 0])
    refuses(r"`initial_cov` must have shape \[HV\] or \[N, HV\] \(covariance='isotropic'\) = \[2, 4\], got \[2, 4, 5\]",
            covariance='isotropic', initial_cov=lambda x: x[..., None].expand(*x.shape, K))
    refuses('`initial_cov` must have shape', initial_cov=lambda x: x[:1])
    refuses(r'`initial_cov` must have shape \[HV\] = \[4\], got \[2\]', initial_cov=torch.ones(H))


def test_one_floating_point_type(refuses):
    refuses('`q`, `k` and `v` must have one floating-point type', q=lambda x: x.bfloat16())
    refuses('`q`, `k` and `v` must have one floating-point type', v=lambda x: x.double())
    refuses('`q`, `k` and `v` must have one floating-point type', **{name: lambda x: x.long() for name in 'qkv'})


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize('name', ['g', 'omega', 'r', 'info_scale', 'A_log', 'dt_bias'])
def test_real_numbers(refuses, name, dtype):
    gate = {'use_gate_in_kernel': True, 'A_log': torch.zeros(HV), 'dt_bias': torch.zeros(HV * K)}
    changes = {**gate, name: (gate[name].to(dtype) if name in gate else lambda x: x.to(dtype))}
    refuses(f'`{name}` must have a floating-point type, got {dtype}', **changes)


@pytest.mark.parametrize('scale', [math.nan, math.inf])
def test_scale_is_finite(refuses, scale):
    refuses(f'`scale` must be finite, got {scale}', scale=scale)


@pytest.mark.parametrize('axis', [2, 3], ids=['heads', 'channels'])
def test_no_heads_or_channels(refuses, axis):
    match = 'Heads and their sizes must be positive'
    refuses(match, **{name: lambda x: x.narrow(axis, 0, 0) for name in 'qk'})
    refuses(match, v=lambda x: x.narrow(axis, 0, 0))


@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_cu_seqlens_cpu_goes_with_cu_seqlens(fn):
    with pytest.raises(ValueError, match='`cu_seqlens_cpu` is a copy of `cu_seqlens`'):
        fn(**make_inputs(B=1, T=T, dtype=torch.float32), cu_seqlens_cpu=torch.tensor([0, T]))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize('name', ['initial_state', 'initial_cov'])
def test_states_in_fp32(refuses, name, dtype):
    refuses(f'`{name}` must be in float32, got {dtype}', **{name: lambda x: x.to(dtype)})


def test_number_of_initial_states(refuses):
    refuses('number of initial states .* 2 rather than 3', initial_state=lambda x: x[[0, 1, 1]])
    refuses('number of initial states .* 3 rather than 2', batch=1, N=2, cu_seqlens=torch.tensor([0, 2, 4, 6]))


def test_state_v_first_shape(refuses):
    refuses(r'`initial_state` must have shape \[N, HV, V, K\] = \[2, 4, 3, 5\], got \[2, 4, 5, 3\]', state_v_first=True)
    refuses(r'`initial_state` must have shape \[N, HV, K, V\] = \[2, 4, 5, 3\], got \[2, 4, 3, 5\]',
            initial_state=lambda x: x.mT)


def test_varlen_needs_a_batch_of_one(refuses):
    refuses('batch size is expected to be 1 rather than 2', cu_seqlens=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize(('cu_seqlens', 'match'), [
    pytest.param([1, 3, 6], r'must start at 0, .* T=6, got \[1, 3, 6\]', id='start'),
    pytest.param([0, 4, 3, 6], r'must .* never decrease .* got \[0, 4, 3, 6\]', id='decreasing'),
    pytest.param([0, 3, 5], r'must .* end at T=6, got \[0, 3, 5\]', id='too-short'),
    pytest.param([0, 3, 7], r'must .* end at T=6, got \[0, 3, 7\]', id='too-long'),
    pytest.param([0], r'must be integers of shape \[N\+1\], N >= 1', id='no-sequence'),
    pytest.param([[0, 6]], r'must be integers of shape \[N\+1\]', id='matrix'),
    pytest.param([0., 6.], r'must be integers', id='float'),
    pytest.param([0, *range(20, 0, -1), 6], r'got \[0, 20, 19, 18, 17, 16\] \.\.\. \[5, 4, 3, 2, 1, 6\]', id='long'),
])
def test_cu_seqlens(refuses, cu_seqlens, match):
    refuses(f'`cu_seqlens` {match}' if match.startswith('must') else match, batch=1, cu_seqlens=torch.tensor(cu_seqlens),
            initial_state=None, initial_cov=None)


@pytest.mark.parametrize('value', [0, -1., math.nan, math.inf])
def test_info_scale_is_positive(refuses, value):
    refuses('`info_scale` must be positive and finite', info_scale=value)
    refuses('`info_scale` must be positive and finite', info_scale=lambda x: x.where(torch.arange(HV) > 0, value))


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'g', 'omega', 'r', 'initial_state', 'initial_cov'])
def test_values_are_finite(refuses, name, value):
    refuses(f'`{name}` has values that are not finite', **{name: lambda x: x.index_fill(-1, torch.tensor(1), value)})


@pytest.mark.parametrize('name', ['A_log', 'dt_bias'])
def test_gate_parameters_are_finite(refuses, name):
    gate = {'A_log': torch.zeros(HV), 'dt_bias': torch.zeros(HV * K)}
    gate[name][1] = math.nan
    refuses(f'`{name}` has values that are not finite', use_gate_in_kernel=True, **gate)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_noises_are_not_negative(refuses, covariance):
    def with_one(value):
        return lambda x: x.where(x < x.max(), value)

    for name in ('omega', 'initial_cov'):
        refuses(f'`{name}` must not be negative, got -0.25', covariance=covariance, **{name: with_one(-0.25)})
    for value in (0., -0.25):
        refuses(f'`r` must be positive, got {value:g}', covariance=covariance, r=with_one(value))


def test_gate_arguments(refuses):
    refuses('`A_log` must be provided', use_gate_in_kernel=True)
    refuses('`A_log` must be provided', use_gate_in_kernel=True, dt_bias=torch.zeros(HV * K))
    refuses('only used with `use_gate_in_kernel=True`', A_log=torch.zeros(HV))
    refuses('only used with `use_gate_in_kernel=True`', dt_bias=torch.zeros(HV * K))
    refuses(r'`A_log` must have shape \[HV\] = \[4\], got \[2\]', use_gate_in_kernel=True, A_log=torch.zeros(H))
    refuses(r'`dt_bias` must have shape \[HV \* K\] = \[20\], got \[4\]', use_gate_in_kernel=True, A_log=torch.zeros(HV),
            dt_bias=torch.zeros(HV))


@pytest.mark.parametrize('lower_bound', [-5.1, 0., 1., math.nan, -math.inf])
def test_lower_bound_is_in_the_safe_range(refuses, lower_bound):
    refuses(r'`lower_bound` must be in the safe range \[-5, 0\)', safe_gate=True, lower_bound=lower_bound)


def test_lower_bound_needs_safe_gate(refuses):
    refuses('`lower_bound` is the floor .* `safe_gate=False`', lower_bound=-3.)


def test_unknown_arguments(refuses):
    refuses('head_first', TypeError, head_first=True)
    refuses('beta', TypeError, beta=torch.ones(B, T, HV))


@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_what_is_not_implemented(fn):
    inputs = make_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V)
    with pytest.raises(NotImplementedError, match='Context parallelism'):
        fn(**inputs, cp_context=object())


def test_no_error_depends_on_the_tokens_being_there(refuses):
    """Nothing is skipped for an empty input."""
    refuses('`omega` must have shape', tokens=0, omega=lambda x: x[..., 0])
    refuses('`info_scale` must be positive', tokens=0, info_scale=-1.)


def test_exact_filter():
    inputs = make_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V)
    del inputs['info_scale']
    full = inputs | {'initial_cov': torch.diag_embed(inputs['initial_cov'])}
    naive_recurrent_exact_kdn(**full)
    for changes, match in [
        ({'omega': inputs['omega'][..., 0]}, '`omega` must have shape'),
        ({'omega': -inputs['omega']}, '`omega` must not be negative'),
        ({'r': 0 * inputs['r']}, '`r` must be positive'),
        ({'v': inputs['v'][:, :, :3]}, 'multiple of the number of query heads'),
        ({'initial_cov': full['initial_cov'][:1]}, r'`initial_cov` must have shape \[HV\] or \[B, HV, K, K\] = '),
        ({'initial_cov': full['initial_cov'][0]}, r'`initial_cov` must have shape \[HV\] or \[B, HV, K, K\] = '),
        ({'initial_cov': full['initial_cov'][..., :1]}, r'`initial_cov` must have shape \[HV\] or \[B, HV, K, K\] = '),
        ({'initial_cov': full['initial_cov'].bfloat16()}, '`initial_cov` must be in float32'),
        ({'initial_cov': full['initial_cov'].where(full['initial_cov'] != 0, math.nan)}, '`initial_cov` must be finite'),
        ({'initial_cov': -full['initial_cov']}, '`initial_cov` must be finite, and its diagonal not negative'),
        ({'initial_state': inputs['initial_state'][:1]}, 'number of initial states'),
    ]:
        with pytest.raises(ValueError, match=match):
            naive_recurrent_exact_kdn(**full | changes)
