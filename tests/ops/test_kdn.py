# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""`chunk_kdn` and `fused_recurrent_kdn` on CPU tensors against the token loop in float64."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, rel
from kdn_cases import COVARIANCES, CU_SEQLENS, as_double, check, cut_sequences, make_inputs, run, weights
from torch.utils._python_dispatch import TorchDispatchMode

from fla_kdn.ops.kdn import chunk_kdn, fused_recurrent_kdn, naive_chunk_kdn, naive_recurrent_kdn

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# what a sum over all tokens collects is less exact in fp32; bf16 rounds what goes out in the type of q, k and v
SUMS = {'dinitial_cov': 1e-5, 'dinfo_scale': 1e-5, 'dA_log': 1e-5, 'ddt_bias': 1e-5}
TOLERANCE = {
    torch.float64: {'other': 1e-12},
    torch.float32: {'other': 2e-6, **SUMS},
    torch.bfloat16: {'o': 3e-3, 'dq': 3e-3, 'dk': 3e-3, 'dv': 3e-3, 'other': 2e-6, **SUMS},
}
CASES = [
    pytest.param(*case, id='B{}-T{}-H{}-HV{}-K{}-V{}'.format(*case))
    for case in [
        (2, 1, 2, 2, 8, 8),
        (2, 15, 2, 4, 12, 6),
        (1, 17, 1, 2, 9, 16),
        (2, 63, 2, 2, 8, 5),
        (1, 64, 2, 2, 7, 8),
        (2, 65, 1, 3, 10, 6),
        (1, 127, 2, 2, 24, 10),
        (1, 1000, 1, 2, 8, 12),
    ]
]
TOKENS = ('q', 'k', 'v', 'g', 'omega', 'r')


def check_chunk(inputs, dtype=torch.float64, **options):
    return check(chunk_kdn, naive_recurrent_kdn, inputs, TOLERANCE[dtype], **options)


def check_fused(inputs, dtype=torch.float64, **options):
    return check(fused_recurrent_kdn, naive_recurrent_kdn, inputs, TOLERANCE[dtype], grads=False, **options)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize(('B', 'T', 'H', 'HV', 'K', 'V'), CASES)
def test_chunk(B, T, H, HV, K, V, covariance, dtype):
    inputs = make_inputs(covariance, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    got = check_chunk(inputs, dtype, covariance=covariance)
    assert got['o'].dtype == dtype
    assert got['final_state'].dtype == got['final_cov'].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize(('B', 'T', 'H', 'HV', 'K', 'V'), CASES[:-1])
def test_fused_recurrent(B, T, H, HV, K, V, covariance, dtype):
    inputs = make_inputs(covariance, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    got = check_fused(inputs, dtype, covariance=covariance)
    assert got['o'].dtype == dtype
    assert got['final_state'].dtype == got['final_cov'].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gates_noises_and_prior_in_bf16_or_double(covariance, dtype):
    """Inputs other than q, k and v in a type of their own."""
    inputs = make_inputs(covariance, T=70, dtype=torch.float32, gate=True)
    inputs |= {name: inputs[name].to(dtype) for name in ('g', 'omega', 'r', 'A_log', 'dt_bias', 'info_scale')}
    rounded = dict.fromkeys(('dg', 'domega', 'dr', 'dA_log', 'ddt_bias', 'dinfo_scale'), 4e-3)
    tol = TOLERANCE[torch.float32] | (rounded if dtype == torch.bfloat16 else {})
    got = check(chunk_kdn, naive_recurrent_kdn, inputs, tol, covariance=covariance, use_gate_in_kernel=True)
    assert got['domega'].dtype == dtype


@pytest.mark.parametrize('int_dtype', [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_varlen(covariance, dtype, int_dtype):
    inputs = make_inputs(covariance, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1, HV=4, dtype=dtype)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=int_dtype)
    check_chunk(inputs, dtype, covariance=covariance, cu_seqlens=cu_seqlens)
    check_fused(inputs, dtype, covariance=covariance, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize('prior', [True, False], ids=['prior', 'carried'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_varlen_many_sequences(covariance, prior):
    lens = torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0))
    lens[17] = 130
    cu_seqlens = F.pad(lens.cumsum(0), (1, 0))
    inputs = make_inputs(covariance, B=1, T=int(cu_seqlens[-1]), N=60, prior=prior, K=4, V=3)
    check_chunk(inputs, covariance=covariance, cu_seqlens=cu_seqlens)
    check_fused(inputs, covariance=covariance, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_cu_seqlens_on_the_cpu_as_well(covariance):
    inputs = make_inputs(covariance, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1)
    cu_seqlens = torch.tensor(CU_SEQLENS)
    for fn in (chunk_kdn, fused_recurrent_kdn):
        one, two = (run(fn, inputs, grads=False, covariance=covariance, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cpu)
                    for cpu in (None, cu_seqlens))
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_state_v_first(covariance, varlen):
    arguments, _ = cut_sequences(covariance, varlen, torch.float64, state_v_first=True)
    got = check_chunk(**arguments)
    assert got['final_state'].is_contiguous()
    check_fused(**arguments)
    k_first = arguments['inputs'] | {'initial_state': arguments['inputs']['initial_state'].mT}
    other = run(chunk_kdn, grads=False, **{**arguments, 'inputs': k_first, 'state_v_first': False})
    assert_close(got['o'], other['o'], 1e-14, 'o')
    assert_close(got['final_state'], other['final_state'].mT, 1e-14, 'final_state')


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize(('options', 'changes'), [
    pytest.param({'use_qk_l2norm_in_kernel': True}, {}, id='l2norm'),
    pytest.param({'use_gate_in_kernel': True}, {'gate': True}, id='gate'),
    pytest.param({'use_gate_in_kernel': True}, {'gate': True, 'dt_bias': None}, id='gate-no-bias'),
    pytest.param({'safe_gate': True}, {'decay': 20.}, id='safe'),
    pytest.param({'safe_gate': True, 'lower_bound': -0.2}, {}, id='safe-bound'),
    pytest.param({'use_gate_in_kernel': True, 'safe_gate': True, 'lower_bound': -1.}, {'gate': True}, id='gate-safe'),
    pytest.param({'scale': 0.3}, {}, id='scale'),
    pytest.param({'info_scale': 2.5}, {'info_scale': None}, id='info-scale-float'),
    pytest.param({}, {'info_scale': None}, id='info-scale-default'),
    pytest.param({}, {'prior': True}, id='prior'),
    pytest.param({}, {'prior': True, 'HV': 4, 'H': 1}, id='prior-grouped'),
    pytest.param({}, {'initial_cov': None}, id='no-prior'),
    pytest.param({}, {'initial_state': None}, id='no-state'),
    pytest.param({}, {'initial_state': None, 'initial_cov': None, 'info_scale': None}, id='nothing-carried'),
])
def test_options(options, changes, covariance, dtype):
    shape = {name: changes[name] for name in ('gate', 'prior', 'H', 'HV') if name in changes}
    inputs = make_inputs(covariance, T=70, dtype=dtype, **shape)
    inputs['g'] *= changes.get('decay', 1)
    inputs = {name: x for name, x in inputs.items() if changes.get(name, x) is not None}
    check_chunk(inputs, dtype, covariance=covariance, **options)
    check_fused(inputs, dtype, covariance=covariance, **options)


@pytest.mark.parametrize('gate', [False, True], ids=['decay', 'gate'])
@pytest.mark.parametrize('lower_bound', [None, -0.5])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, naive_recurrent_kdn, naive_chunk_kdn])
def test_safe_gate_has_no_gradient_where_it_floors(fn, covariance, lower_bound, gate):
    inputs = make_inputs(covariance, T=40, gate=gate)
    inputs['g'] = 4 * inputs['g'] + 6 if gate else 40 * inputs['g']
    floor = -5 if lower_bound is None else lower_bound
    g = inputs['g']
    if gate:
        g = -inputs['A_log'].exp()[:, None] * F.softplus(g + inputs['dt_bias'].view(2, 8))
    floored = g < floor
    assert 0.01 < floored.double().mean() < 0.99
    got = run(fn, inputs, covariance=covariance, use_gate_in_kernel=gate, safe_gate=True, lower_bound=lower_bound)
    assert got['dg'][floored].eq(0).all()
    assert got['dg'][~floored].ne(0).all()
    inputs = {name: x for name, x in inputs.items() if name not in ('A_log', 'dt_bias')} | {'g': g.clamp(min=floor)}
    assert_close(got['o'], run(fn, inputs, covariance=covariance)['o'], 1e-13, 'o')


def strided(x):
    """The same values with a gap after each of the last axis, which comes first in memory."""
    return torch.stack((x, x + 1), -1).movedim(-2, 0).contiguous().movedim(0, -2)[..., 0]


def before_nan(x):
    """The same values at the start of a longer buffer of NaN."""
    return torch.cat((x.flatten(), x.new_full((x.numel() + 5000,), math.nan)))[:x.numel()].view(x.shape)


@pytest.mark.parametrize('present', [strided, before_nan])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
def test_memory_around_the_inputs(varlen, covariance, present):
    arguments, _ = cut_sequences(covariance, varlen, torch.float64)
    if present is strided:
        assert not any(present(x).is_contiguous() for x in arguments['inputs'].values())
    for fn, grads in ((chunk_kdn, True), (fused_recurrent_kdn, False)):
        check(fn, naive_recurrent_kdn, tol=1e-12, grads=grads, present=present, **arguments)


@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_uninitialised_memory_is_not_read(covariance, varlen):
    """Deterministic algorithms fill every fresh buffer with NaN."""
    arguments, _ = cut_sequences(covariance, varlen, torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        check_chunk(**arguments)
        check_fused(**arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('state_v_first', [False, True], ids=['k-first', 'v-first'])
@pytest.mark.parametrize('cu_seqlens', [None, [0, 0, 0]], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn, naive_recurrent_kdn, naive_chunk_kdn])
def test_no_tokens(fn, covariance, cu_seqlens, state_v_first):
    inputs = make_inputs(covariance, B=2 if cu_seqlens is None else 1, T=0, N=2, dtype=torch.float32)
    if state_v_first:
        inputs['initial_state'] = inputs['initial_state'].mT.contiguous()
    options = {'covariance': covariance, 'state_v_first': state_v_first, 'output_final_state': True}
    if cu_seqlens is not None:
        options['cu_seqlens'] = torch.tensor(cu_seqlens)
    o, S, p = fn(**inputs, **options)
    assert o.shape == inputs['v'].shape
    assert torch.equal(S, inputs['initial_state'])
    assert torch.equal(p, inputs['initial_cov'])
    given = {x.data_ptr() for x in (inputs['v'], inputs['initial_state'], inputs['initial_cov']) if x.numel()}
    if fn in (chunk_kdn, fused_recurrent_kdn):
        assert not given & {S.data_ptr(), p.data_ptr()}, 'to write to what is returned would change the arguments'
    fresh = {name: inputs[name] for name in TOKENS}
    o, S, p = fn(**fresh, **options)
    assert torch.equal(S, torch.zeros_like(inputs['initial_state']))
    assert torch.equal(p, torch.ones_like(inputs['initial_cov']))
    assert fn(**fresh, **options | {'output_final_state': False})[1:] == (None, None)


@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn, naive_recurrent_kdn, naive_chunk_kdn])
def test_no_tokens_in_bf16(fn):
    inputs = {name: x for name, x in make_inputs(T=0, dtype=torch.bfloat16).items() if name in TOKENS}
    o, S, p = fn(**inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and S.dtype == p.dtype == torch.float32


@pytest.mark.parametrize(('omega', 'r'), [(1., 1e-20), (100., 1e-18)])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_next_to_no_noise(covariance, omega, r):
    """What a token adds to the precision is near 1e20, whose square is beyond the range of fp32."""
    inputs = make_inputs(covariance, T=200, dtype=torch.float32)
    inputs |= {'omega': torch.full_like(inputs['omega'], omega), 'r': torch.full_like(inputs['r'], r)}
    results = [fn(**inputs, covariance=covariance, output_final_state=True) for fn in (chunk_kdn, naive_recurrent_kdn)]
    for name, got, want in zip('oSp', *results, strict=True):
        assert_close(got, want, 1e-4, name)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_final_covariance_keeps_no_tokens(covariance):
    p = chunk_kdn(**make_inputs(covariance, T=70, dtype=torch.float32), covariance=covariance, output_final_state=True)[2]
    assert p.untyped_storage().nbytes() == p.numel() * p.element_size()


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn, naive_recurrent_kdn])
def test_no_rows(fn, covariance):
    inputs = make_inputs(covariance, B=0, T=20, N=0, dtype=torch.float32)
    outputs = fn(**inputs, covariance=covariance, output_final_state=True)
    for x, name in zip(outputs, ('v', 'initial_state', 'initial_cov'), strict=True):
        assert x.shape == inputs[name].shape, name


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_decoding_token_by_token(fn, covariance, dtype):
    inputs = make_inputs(covariance, T=40, dtype=dtype)
    options = {'use_qk_l2norm_in_kernel': True, 'covariance': covariance}
    want = run(naive_recurrent_kdn, as_double(inputs), grads=False, **options)
    outputs = []
    for t in range(-1, 40):
        # a prompt of 20 tokens, then one token at a time
        if 0 <= t < 20:
            continue
        tokens = {name: inputs[name][:, :20] if t < 0 else inputs[name][:, t:t + 1] for name in TOKENS}
        got = run(chunk_kdn if t < 0 else fn, inputs | tokens, grads=False, **options)
        inputs |= {'initial_state': got['final_state'], 'initial_cov': got['final_cov']}
        outputs.append(got['o'])
    assert_close(torch.cat(outputs, 1), want['o'], 3e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]['other'], 'o')
    for name in ('final_state', 'final_cov'):
        assert_close(got[name], want[name], TOLERANCE[dtype]['other'], name)


@pytest.mark.parametrize('state_v_first', [False, True], ids=['k-first', 'v-first'])
@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_carried_state_and_covariance_continue_a_sequence(fn, covariance, varlen, state_v_first):
    whole, pieces = cut_sequences(covariance, varlen, torch.float64, state_v_first=state_v_first)
    want = run(naive_recurrent_kdn, grads=False, **whole)
    state = {}
    for piece, where in pieces:
        got = run(fn, grads=False, **{**piece, 'inputs': piece['inputs'] | state})
        assert_close(got['o'], want['o'][:, where], 1e-12, 'o')
        state = {'initial_state': got['final_state'], 'initial_cov': got['final_cov']}
    assert_close(got['final_state'], want['final_state'], 1e-12, 'final_state')
    assert_close(got['final_cov'], want['final_cov'], 1e-12, 'final_cov')


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradients_pass_from_one_piece_to_the_next(covariance):
    whole, pieces = cut_sequences(covariance, False, torch.float64)
    want = run(naive_recurrent_kdn, **whole)
    leaves = {name: x.clone().requires_grad_() for name, x in whole['inputs'].items()}
    state, outputs = {}, []
    for _, where in pieces:
        piece = {name: x[:, where] if name in TOKENS else x for name, x in leaves.items()}
        o, S, p = chunk_kdn(**piece | state, covariance=covariance, output_final_state=True)
        state = {'initial_state': S, 'initial_cov': p}
        outputs.append(o)
    loss = sum((x * weights(x.shape, seed)).sum() for seed, x in enumerate((torch.cat(outputs, 1), S, p)))
    for (name, x), dx in zip(leaves.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
        assert_close(dx, want[f'd{name}'], 1e-12, f'd{name} of {list(x.shape)}')


def unit(x):
    return F.normalize(x, dim=-1)


EDGES = {
    'no-noise-floor': lambda x: x | {'omega': 0 * x['omega'], 'g': x['g'] - 0.3},
    'no-noise-no-decay': lambda x: x | {'omega': 0 * x['omega'], 'g': 0 * x['g']},
    'no-prior-variance': lambda x: x | {'initial_cov': 0 * x['initial_cov']},
    'nothing-uncertain': lambda x: x | {'initial_cov': 0 * x['initial_cov'], 'omega': 0 * x['omega']},
    'zero-keys': lambda x: x | {'k': 0 * x['k'], 'g': 0.1 * x['g']},
    'zero-keys-at-times': lambda x: x | {'k': x['k'] * (torch.arange(x['k'].shape[1]) % 3 > 0)[:, None, None]},
    'repeated-keys-small-r': lambda x: x | {'k': unit(x['k'][:, :1].expand_as(x['k'])), 'r': 0 * x['r'] + 0.01},
    'huge-info-scale': lambda x: x | {'info_scale': 1e8 * x['info_scale']},
    'tiny-info-scale': lambda x: x | {'info_scale': 1e-8 * x['info_scale']},
    'strong-decay': lambda x: x | {'g': x['g'] * (1 + 100 * (x['g'] < -0.2))},
    'alpha-zero-at-times': lambda x: x | {'g': x['g'].where(torch.arange(x['g'].shape[1])[:, None, None] % 20 > 0, -1000.)},
    'large-noise': lambda x: x | {'omega': 1e4 * x['omega']},
    'large-r': lambda x: x | {'r': 1e3 * x['r'], 'g': 0.1 * x['g']},
}


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('edge', EDGES)
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_edges(covariance, edge, dtype):
    inputs = {name: x.to(dtype) for name, x in EDGES[edge](make_inputs(covariance, T=80)).items()}
    fp32 = {'domega': 5e-5, 'dinitial_cov': 1e-4, 'dinfo_scale': 1e-5, 'other': 5e-6}
    tol = fp32 if dtype == torch.float32 else {'other': 1e-11}
    if edge == 'no-noise-floor':
        # the sum of terms of the order of 1/phat, up to 1e12, that cancel
        tol['domega'] = 0.03 if dtype == torch.float32 else 1e-9
    check(chunk_kdn, naive_recurrent_kdn, inputs, tol, covariance=covariance)
    check(fused_recurrent_kdn, naive_recurrent_kdn, inputs, tol, grads=False, covariance=covariance)


def regime(name, covariance, T=300, H=2, K=16, V=16):
    """The regimes of the design: as initialised, as after training, and as bad as one could train to."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(covariance, B=1, T=T, H=H, HV=H, K=K, V=V, prior=True)
    del inputs['info_scale']
    shape, noise = inputs['q'].shape, torch.randn(inputs['omega'].shape, generator=generator, dtype=torch.float64)

    def sparse(density):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return unit(x * (torch.rand(shape, generator=generator) < density) + 1e-3 * x.roll(1, 1))

    if name == 'initialised':
        step = (torch.rand(H, K, generator=generator, dtype=torch.float64) * math.log(100) + math.log(1e-3)).exp()
        return inputs | {
            'q': unit(inputs['q']),
            'k': unit(inputs['k']),
            'g': -4 * F.softplus(0.5 * inputs['q'] + step + (-torch.expm1(-step)).log()),
            'omega': F.softplus(0.1 * noise),
            'r': 0.01 + inputs['r'],
            'initial_cov': torch.ones_like(inputs['initial_cov']),
        }
    density, omega, r, prior = {
        'trained': (0.1, 1e-3 * (0.5 * noise).exp(), 0.02, 1.),
        'adversarial': (0.05, F.softplus(2 * noise - 12), 0.0101, 10.),
    }[name]
    return inputs | {
        'q': sparse(density),
        'k': sparse(density),
        'g': 1e-3 * inputs['g'],
        'omega': omega,
        'r': torch.full_like(inputs['r'], r),
        'initial_cov': torch.full_like(inputs['initial_cov'], prior),
    }


@pytest.mark.parametrize('name', ['initialised', 'trained', 'adversarial'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_regimes_in_fp32(covariance, name):
    inputs = {key: x.float() for key, x in regime(name, covariance).items()}
    tol = {'dinitial_cov': 3e-4, 'other': 2e-6}
    check(chunk_kdn, naive_recurrent_kdn, inputs, tol, covariance=covariance)
    check(fused_recurrent_kdn, naive_recurrent_kdn, inputs, tol, grads=False, covariance=covariance)


@pytest.mark.parametrize('name', ['initialised', 'trained', 'adversarial'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_regimes_in_bf16(covariance, name):
    inputs = {key: x.float() for key, x in regime(name, covariance).items()}
    inputs |= {key: inputs[key].bfloat16() for key in ('q', 'k', 'v')}
    tol = TOLERANCE[torch.bfloat16] | {'dinitial_cov': 3e-4}
    check(chunk_kdn, naive_recurrent_kdn, inputs, tol, covariance=covariance)


@pytest.mark.parametrize('P', [1, 17, 64, 100, 128])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_the_future_does_not_reach_the_past(fn, covariance, P):
    inputs = make_inputs(covariance, T=150, dtype=torch.float32)
    before = run(fn, inputs, grads=False, covariance=covariance)['o']
    other = make_inputs(covariance, T=150, dtype=torch.float32, seed=1)
    for name in TOKENS:
        other[name][:, :P] = inputs[name][:, :P]
    other |= {name: x for name, x in inputs.items() if name not in TOKENS}
    for name, factor in (('k', 1.), ('k', 1e3), ('v', 1e20)):
        other[name][:, P:] *= factor
        after = run(fn, other, grads=False, covariance=covariance)['o']
        assert torch.equal(after[:, :P], before[:, :P])
        assert not torch.equal(after[:, P:], before[:, P:])
    # a strong decay of a later token may change how the products of all chunks are rounded, but no more
    other['g'][:, P:] = -100
    after = run(fn, other, grads=False, covariance=covariance)['o']
    assert_close(after[:, :P], before[:, :P], 1e-6, 'o before')


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradients_do_not_come_from_the_past(covariance):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(covariance, T=150).items()}
    o, _, _ = chunk_kdn(**inputs, covariance=covariance)
    grads = torch.autograd.grad(o[:, :100].sum(), [inputs[name] for name in TOKENS])
    for name, dx in zip(TOKENS, grads, strict=True):
        assert dx[:, 100:].eq(0).all(), name
        assert dx[:, :100].ne(0).any(), name


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_a_row_of_a_batch_is_that_row_alone(covariance):
    inputs = make_inputs(covariance, B=3, T=100, dtype=torch.float32)
    inputs['g'][1] *= 200
    together = run(chunk_kdn, inputs, covariance=covariance)
    for b in range(3):
        one = {name: x if name == 'info_scale' else x[b:b + 1] for name, x in inputs.items()}
        alone = run(chunk_kdn, one, grads=False, covariance=covariance)
        for name, x in alone.items():
            assert_close(together[name][b:b + 1], x, 1e-6, f'{name} of row {b}')


@pytest.mark.parametrize('dtype', DTYPES[1:], ids=str)
@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_two_runs_are_bitwise_equal(covariance, varlen, dtype):
    arguments, _ = cut_sequences(covariance, varlen, dtype)
    one, two = (run(chunk_kdn, **arguments) for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, two[name]), name


class Operations(TorchDispatchMode):
    """Counts what PyTorch executes, and the bytes of the largest result."""

    def __init__(self):
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.count += 1
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def operations(fn, T, cu_seqlens=None, grads=True, **kwargs):
    N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = make_inputs(kwargs['covariance'], B=1, T=T, N=N, dtype=torch.float32)
    with Operations() as seen:
        run(fn, inputs, grads=grads, cu_seqlens=cu_seqlens, **kwargs)
    return seen


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_operations_grow_with_chunks_not_with_tokens(covariance):
    for fn, grads, a_chunk in ((chunk_kdn, True, 80), (fused_recurrent_kdn, False, 40)):
        short, long = (operations(fn, T, grads=grads, covariance=covariance).count for T in (256, 4096))
        assert long - short <= a_chunk * (4096 - 256) / 64


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_memory_grows_with_tokens_not_with_the_longest_sequence(covariance):
    """One long sequence among many of one token: padding all of them to its length would cost 20 times as much."""
    cu_seqlens = F.pad(torch.tensor([2048] + 63 * [1]).cumsum(0), (1, 0))
    packed = operations(chunk_kdn, int(cu_seqlens[-1]), cu_seqlens=cu_seqlens, covariance=covariance)
    dense = operations(chunk_kdn, 2048 + 63 * 64, covariance=covariance)
    assert packed.largest <= 1.1 * dense.largest


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_autocast_changes_nothing(fn, covariance):
    inputs = make_inputs(covariance, T=70, dtype=torch.float32)
    options = {'grads': fn is chunk_kdn, 'covariance': covariance, 'use_qk_l2norm_in_kernel': True}
    want = run(fn, inputs, **options)
    # the backward outside, as PyTorch asks for, and inside
    outside = run(torch.autocast('cpu', torch.bfloat16)(fn), inputs, **options)
    inside = torch.autocast('cpu', torch.bfloat16)(run)(fn, inputs, **options)
    for name, x in want.items():
        assert torch.equal(outside[name], x) and torch.equal(inside[name], x), name


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_without_gradients(covariance, mode):
    inputs = make_inputs(covariance, T=70)
    want = run(chunk_kdn, inputs, covariance=covariance)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    for fn in (chunk_kdn, fused_recurrent_kdn):
        with mode():
            got = fn(**leaves, covariance=covariance, output_final_state=True)
        for name, x in zip(('o', 'final_state', 'final_cov'), got, strict=True):
            assert not x.requires_grad
            assert_close(x, want[name], 1e-13, name)


def test_fused_recurrent_has_no_gradient():
    inputs = {name: x.requires_grad_() for name, x in make_inputs(T=5).items()}
    assert not any(x.requires_grad for x in fused_recurrent_kdn(**inputs, output_final_state=True))


@pytest.mark.parametrize('name', [*TOKENS, 'initial_state', 'initial_cov', 'info_scale', 'A_log', 'dt_bias'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradient_of_one_input_only(covariance, name):
    inputs = make_inputs(covariance, T=70, gate=True)
    options = {'covariance': covariance, 'use_gate_in_kernel': True}
    want = run(chunk_kdn, inputs, **options)[f'd{name}']
    inputs[name].requires_grad_()
    outputs = chunk_kdn(**inputs, output_final_state=True, **options)
    loss = sum((x * weights(x.shape, seed)).sum() for seed, x in enumerate(outputs))
    assert_close(torch.autograd.grad(loss, inputs[name])[0], want, 1e-14, f'd{name}')


@pytest.mark.parametrize('output', [0, 1, 2], ids=['o', 'final_state', 'final_cov'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradient_from_one_output_only(covariance, output):
    inputs, grads = make_inputs(covariance, T=70), []
    for fn in (chunk_kdn, naive_recurrent_kdn):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        x = fn(**leaves, covariance=covariance, output_final_state=True)[output]
        grads.append(torch.autograd.grad((x * weights(x.shape, 0)).sum(), list(leaves.values()), allow_unused=True))
    for name, got, want in zip(inputs, *grads, strict=True):
        if want is None:
            assert got is None or got.eq(0).all(), f'd{name}'
        else:
            assert_close(got, want, 1e-12, f'd{name}')


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradient_of_gradients(covariance):
    inputs = make_inputs(covariance, B=1, T=4, H=1, HV=1, K=2, V=2)
    fn = functools.partial(chunk_kdn, covariance=covariance, output_final_state=True)
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradgradcheck(lambda *x: fn(**dict(zip(inputs, x, strict=True))), leaves)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_euler_identities_on_a_long_sequence(covariance):
    inputs = make_inputs(covariance, B=1, T=3000)
    x = inputs | run(chunk_kdn, inputs, covariance=covariance)
    products = {name: x[name] * x[f'd{name}'] for name in ('k', 'v', 'omega', 'r', 'initial_cov')}
    final = x['final_cov'] * weights(x['final_cov'].shape, 2)
    variances = sum(products[name].sum() for name in ('omega', 'r', 'initial_cov'))
    assert_close(variances, final.sum(), 1e-9, 'E1')
    assert_close(products['k'].sum(-1) + products['v'].sum(-1), -2 * products['r'], 1e-10, 'E2')


def test_inputs_are_not_changed():
    for covariance in COVARIANCES:
        inputs = make_inputs(covariance, T=70, gate=True, dtype=torch.float32)
        kept = {name: x.clone() for name, x in inputs.items()}
        for fn in (chunk_kdn, fused_recurrent_kdn):
            fn(**inputs, covariance=covariance, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, safe_gate=True)
        assert all(torch.equal(x, kept[name]) for name, x in inputs.items())


def test_torch_compile():
    """The op stays out of the graph; code around it compiles."""
    inputs = {name: x.requires_grad_() for name, x in make_inputs(T=10, dtype=torch.float32).items()}

    def loss(q, **kwargs):
        return chunk_kdn(2 * q, **kwargs)[0].square().sum()

    want = torch.autograd.grad(loss(**inputs), inputs['q'])[0]
    got = torch.autograd.grad(torch.compile(loss, backend='aot_eager')(**inputs), inputs['q'])[0]
    assert rel(got, want) <= 1e-6
