# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The Triton kernels of KDN: on a GPU in bf16, or under `TRITON_INTERPRET=1` on the CPU, in fp32 and at small sizes."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, rel
from fla.ops.kda import chunk_kda
from fla.ops.utils.index import prepare_chunk_indices
from kdn_cases import COVARIANCES, CU_SEQLENS, as_double, make_inputs, run, weights
from test_kdn import EDGES, TOKENS, regime, strided

from fla_kdn.backends.torch.registry import TorchBackend
from fla_kdn.ops.kdn import chunk_kdn, fused_recurrent_kdn, naive_recurrent_kdn
from fla_kdn.ops.kdn.chunk import predicted_covariance
from fla_kdn.ops.kdn.fused_recurrent import fused_recurrent_kdn_fwd
from fla_kdn.ops.kdn.gain import CovarianceScan, kdn_gain
from fla_kdn.ops.kdn.gain_triton import LOG2E, GainArguments, GainOptions, kdn_gain_bwd, kdn_gain_fwd
from fla_kdn.ops.kdn.inputs import expand_cov, expand_info_scale
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
GPU = not INTERPRETED and torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
pytestmark = [] if INTERPRETED else [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason='needs a GPU, or TRITON_INTERPRET=1'),
]
gpu_only = pytest.mark.skipif(not GPU, reason='needs a GPU')
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason='in fp32, and so in the interpreter')

# one shape for most tests, as every other one is compiled anew
SHAPE = {'H': 1, 'HV': 2, 'K': 12, 'V': 20} if INTERPRETED else {'H': 4, 'HV': 4, 'K': 128, 'V': 128}
T = 66 if INTERPRETED else 256
SHORT = 20 if INTERPRETED else T
if INTERPRETED:
    TOLERANCE = {'dg': 5e-5, 'domega': 5e-5, 'other': 1e-5}
    FUSED_TOLERANCE = {'other': 2e-6}
else:
    # a value of each head is a sum over all tokens and channels, of either sign
    sums = dict.fromkeys(('dinfo_scale', 'dinitial_cov', 'dA_log', 'ddt_bias'), 1e-1)
    TOLERANCE = {'o': 1e-2, 'final_state': 1e-2, 'final_cov': 1e-5, 'domega': 3e-2, **sums, 'other': 2e-2}
    FUSED_TOLERANCE = {'o': 3e-3, 'other': 1e-5}
FP32 = {'ddt_bias': 1e-5, 'dA_log': 1e-5, 'domega': 5e-5, 'dg': 5e-5, 'dinfo_scale': 5e-5, 'other': 1e-5}


def on_device(fn, device=DEVICE, present=lambda x: x):
    """`fn` from CPU tensors to CPU tensors, by way of the device; `present` changes how its arguments lie in memory there."""
    def wrapped(**arguments):
        outputs = fn(**{
            name: present(x.to(device)) if isinstance(x, torch.Tensor) and not name.endswith('_cpu') else x
            for name, x in arguments.items()
        })
        return tuple(None if x is None else x.cpu() for x in outputs)

    return wrapped


def compare(got, want, tol):
    errors = {name: rel(x, want[name]) for name, x in got.items()}
    above = [name for name, error in errors.items() if not error <= tol.get(name, tol['other'])]
    assert not above, f'{above} of ' + ', '.join(f'{name} {error:.1e}' for name, error in errors.items())
    return errors


def check(fn, inputs, tol=None, grads=None, present=lambda x: x, **options):
    """Compare `fn` on `inputs` with the token loop on float64 copies."""
    grads = fn is chunk_kdn if grads is None else grads
    got = run(on_device(fn, present=present), inputs, grads, **options)
    want = run(on_device(naive_recurrent_kdn), as_double(inputs), grads, **options)
    compare(got, want, tol or (TOLERANCE if fn is chunk_kdn else FUSED_TOLERANCE))
    return got


def cumulated(lens):
    return F.pad(torch.tensor(lens).cumsum(0), (1, 0))


def raw_noise(inputs):
    """The same variances, for the kernels to activate with `r_min` = 0.05."""
    return inputs | {name: x + (-torch.expm1(-x)).log() for name, x in (('omega', inputs['omega']), ('r', inputs['r'] - 0.05))}


NOISE = {'use_noise_softplus_in_kernel': True, 'r_min': 0.05}


# against KDA


def kda_loop(q, k, v, g, beta, initial_state, output_final_state):
    S, o, scale = initial_state, [], q.shape[-1] ** -0.5
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        S = g_t.exp().unsqueeze(-1) * S
        e = beta_t.unsqueeze(-1) * (v_t - (k_t.unsqueeze(-1) * S).sum(-2))
        S = S + k_t.unsqueeze(-1) * e.unsqueeze(-2)
        o.append(scale * (q_t.unsqueeze(-1) * S).sum(-2))
    return torch.stack(o, 1), S, S.new_zeros(1)


def kda_errors(inputs, safe_gate):
    """Errors of FLA's KDA on the data of KDN, with a random strength of each update."""
    inputs = {name: inputs[name] for name in ('q', 'k', 'v', 'g', 'initial_state')}
    shape = inputs['v'].shape[:3]
    inputs['beta'] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).sigmoid()

    def kda(**arguments):
        o, S = chunk_kda(**arguments, safe_gate=safe_gate)
        return o, S, S.new_zeros(1)

    got, want = run(on_device(kda), inputs), run(on_device(kda_loop), as_double(inputs))
    return {name: rel(x, want[name]) for name, x in got.items()}


@pytest.mark.parametrize('safe_gate', [True, False], ids=['safe', 'any-decay'])
@pytest.mark.parametrize('name', ['initialised', 'trained', 'adversarial'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_regimes(covariance, name, safe_gate, record_property):
    """As exact as KDA on the same data, up to what the whitened keys lose where the covariance spans many orders."""
    shape = {'T': 33, 'H': 1, 'K': 16, 'V': 16} if INTERPRETED else {'T': 256, 'H': 4, 'K': 128, 'V': 128}
    inputs = {key: x.float() for key, x in regime(name, covariance, **shape).items()}
    inputs |= {key: inputs[key].to(DTYPE) for key in ('q', 'k', 'v')}
    inputs['g'] = inputs['g'].clamp(min=-5)
    options = {'covariance': covariance, 'safe_gate': safe_gate}
    got = run(on_device(chunk_kdn), inputs, **options)
    want = run(on_device(naive_recurrent_kdn), as_double(inputs), **options)
    errors, kda = {key: rel(x, want[key]) for key, x in got.items()}, kda_errors(inputs, safe_gate)
    record_property('errors', ' '.join(f'{key} {error:.1e}' for key, error in errors.items()))
    record_property('errors of KDA', ' '.join(f'{key} {error:.1e}' for key, error in kda.items()))
    limits = {'o': 1e-2, 'final_cov': 3e-5, 'domega': 3e-2, 'dr': 3e-2, 'dinitial_cov': 1e-1, 'other': 2e-2}
    if INTERPRETED:
        limits = {'dg': 1e-3, 'domega': 1e-3, 'dinitial_cov': 1e-3, 'other': 1e-4}
    else:
        ratios = {'other': 1.5}
        if name == 'trained' and covariance == 'diagonal':
            ratios |= {'o': 1.7, 'dk': 2.}
        if name == 'adversarial':
            limits |= {'domega': 1e-1, 'dr': 1e-1}
            ratios = {'dk': 3.5, 'other': 2.} if covariance == 'diagonal' else ratios
        limits |= {key: min(limits.get(key, limits['other']), ratios.get(key, ratios['other']) * kda[key])
                   for key in ('o', 'dq', 'dk', 'dv', 'dg')}
    above = [key for key, error in errors.items() if not error <= limits.get(key, limits['other'])]
    assert not above, f'{above}: ' + ', '.join(f'{key} {error:.1e} ({kda.get(key, 0):.1e})' for key, error in errors.items())


# the gain stage alone, in fp32


def cumulate(g, cu_seqlens):
    """Sums of log decays from the start of each chunk."""
    lens = [g.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return torch.cat([chunk.cumsum(1) for x in g.split(lens, 1) for chunk in x.split(CHUNK_SIZE, 1)], 1)


def gain_arguments(inputs, covariance, cu_seqlens=None):
    x = {name: x.to(DEVICE) for name, x in inputs.items()}
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    return GainArguments(
        q=x['q'],
        k=x['k'],
        g=x['g'],
        omega=x['omega'],
        r=x['r'],
        mu=expand_info_scale(x.get('info_scale'), x['q'], x['g'].shape[2]),
        p0=expand_cov(x['initial_cov'], covariance, x['q'], x['g'].shape[2], cu_seqlens).contiguous(),
        A_log=x.get('A_log'),
        dt_bias=x.get('dt_bias'),
        cu_seqlens=cu_seqlens,
        chunk_indices=None if cu_seqlens is None else prepare_chunk_indices(cu_seqlens, CHUNK_SIZE),
    )


def gain_options(covariance, l2norm=False, safe_gate=False, lower_bound=None, noise=False):
    return GainOptions(
        isotropic=covariance == 'isotropic',
        l2norm=l2norm,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        noise_softplus=noise,
        r_min=NOISE['r_min'] if noise else 0.,
    )


def check_gain(inputs, covariance, tol, cu_seqlens=None, final=True, **options):
    """Outputs, and the gradients of a random linear functional of them, in Triton and in PyTorch."""
    inputs = {name: x for name, x in inputs.items() if name not in ('v', 'initial_state')}
    isotropic, HV = covariance == 'isotropic', inputs['g'].shape[2]
    options = gain_options(covariance, **options)
    args = gain_arguments(inputs, covariance, cu_seqlens)
    outputs = kdn_gain_fwd(args, options)

    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    ref = kdn_gain(
        **leaves,
        covariance=covariance,
        use_qk_l2norm_in_kernel=options.l2norm,
        use_noise_softplus_in_kernel=options.noise_softplus,
        r_min=options.r_min,
        safe_gate=options.safe_gate,
        lower_bound=options.lower_bound,
        cu_seqlens=cu_seqlens,
    )
    want = {'q': ref.q, 'k': ref.k, 'gc': cumulate(ref.g, cu_seqlens), 'beta': ref.beta, 'pt': ref.final_cov}
    got = {'q': outputs.q, 'k': outputs.k, 'gc': outputs.gc / LOG2E.value, 'beta': outputs.beta, 'pt': outputs.pt}
    got['pt'] = got['pt'].squeeze(-1) if isotropic else got['pt']
    if not isotropic:
        want['st'], got['st'] = ref.final_scale, outputs.st
    results = {name: x.cpu() for name, x in got.items()}

    if isotropic:
        # gradients come back for every value head
        want |= {name: want[name].repeat_interleave(HV // want[name].shape[2], 2) for name in ('q', 'k')}
    upstream = {name: weights(x.shape, seed) for seed, (name, x) in enumerate(want.items())}
    if not final:
        del upstream['pt']
        upstream.pop('st', None)
    loss = sum((want[name] * dx).sum() for name, dx in upstream.items())
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    dx = {name: x.float().to(DEVICE) for name, x in upstream.items()}
    dst = outputs.st * dx['st'] if 'st' in dx else None
    names = ('q', 'k', 'g', 'omega', 'r', 'info_scale', 'p0', 'A_log', 'dt_bias')
    got = kdn_gain_bwd(args, options, outputs, dx['q'], dx['k'], dx['gc'], dx['beta'], dx.get('pt'), dst)
    got = {name: x.cpu() for name, x in zip(names, got, strict=True) if x is not None}
    p0 = inputs['initial_cov'].requires_grad_()
    expanded = expand_cov(p0, covariance, inputs['q'], HV, cu_seqlens)
    got['initial_cov'] = torch.autograd.grad(expanded, p0, got.pop('p0'))[0]
    results |= {f'd{name}': got[name] for name in inputs}

    want |= {'q': ref.q, 'k': ref.k} | {f'd{name}': x for name, x in grads.items()}
    compare(results, want, tol)
    return results, args


MANY = [1, 0, 2, 66, 0, 0, 16, 15, 0]
GAIN_CASES = {
    'T1-prior': {'T': 1, 'K': 8, 'prior': True},
    'T15-l2norm': {'T': 15, 'K': 12, 'l2norm': True},
    # where what is added to a norm counts
    'T16-small-l2norm': {'T': 16, 'K': 8, 'l2norm': True, 'small': True},
    'T17-grouped-gate': {'T': 17, 'H': 2, 'HV': 4, 'K': 8, 'gate': True},
    'T63-gate-safe-noise': {'T': 63, 'H': 1, 'K': 12, 'gate': True, 'safe_gate': True, 'lower_bound': -0.5, 'noise': True},
    'T64-grouped-l2norm-gate': {'T': 64, 'B': 1, 'H': 1, 'HV': 3, 'K': 8, 'l2norm': True, 'gate': True, 'bias': False},
    'T65-safe-prior': {'T': 65, 'H': 1, 'K': 12, 'safe_gate': True, 'lower_bound': -0.1, 'prior': True},
    'T127-no-final': {'T': 127, 'B': 1, 'H': 1, 'K': 12, 'final': False},
    'T129': {'T': 129, 'B': 1, 'H': 1, 'K': 8},
    'varlen': {'lens': MANY, 'H': 1, 'K': 12, 'l2norm': True, 'gate': True, 'safe_gate': True, 'lower_bound': -0.5},
    'varlen-prior-noise': {'lens': MANY[::-1], 'H': 1, 'K': 8, 'prior': True, 'noise': True},
}


@pytest.mark.parametrize('case', GAIN_CASES if INTERPRETED else ['T63-gate-safe-noise', 'T64-grouped-l2norm-gate', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gain(covariance, case):
    options = dict(GAIN_CASES[case])
    shape = {name: options.pop(name) for name in ('B', 'T', 'H', 'HV', 'K', 'prior', 'gate') if name in options}
    lens = options.pop('lens', None)
    if lens is not None:
        options['cu_seqlens'] = cumulated(lens)
        shape |= {'T': sum(lens), 'N': len(lens)}
    shape = {'B': 1 if lens else 2, 'H': 2, 'HV': shape.get('H', 2), **shape}
    inputs = make_inputs(covariance, dtype=torch.float32, **shape)
    if options.get('noise'):
        inputs = raw_noise(inputs)
    if not options.pop('bias', True):
        del inputs['dt_bias']
    if options.pop('small', False):
        inputs |= {name: 1e-3 * inputs[name] for name in ('q', 'k')}
    results, args = check_gain(inputs, covariance, FP32, **options)
    if options.get('safe_gate'):
        assert 0 < results['dg'].eq(0).double().mean() < 0.9
    if lens is not None:
        empty = torch.tensor(lens) == 0
        assert torch.equal(results['pt'][empty], (args.p0.squeeze(-1) if covariance == 'isotropic' else args.p0).cpu()[empty])


@interpreted_only
@pytest.mark.parametrize('edge', EDGES)
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gain_edges(covariance, edge):
    inputs = {name: x.float() for name, x in EDGES[edge](make_inputs(covariance, B=1, T=80, H=1, HV=1)).items()}
    # in reverse phat comes from a difference of cumulated decays, here of some thousands
    alpha_zero = {'gc': 1e-6, 'beta': 1e-6, 'pt': 1e-6, 'dinfo_scale': 1e-2, 'other': 2e-3}
    # the share of p in phat, of the order of 1e-8, comes from 1 - omega / phat
    tol = {'alpha-zero-at-times': alpha_zero, 'huge-info-scale': FP32 | {'dinfo_scale': 5e-2}}.get(edge, FP32)
    if (inputs['initial_cov'] == 0).all():
        # a gradient that the kernels leave out
        tol = tol | {'dinitial_cov': math.inf}
    check_gain(inputs, covariance, tol)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_covariance_of_a_long_sequence(covariance):
    """Without decay, nearly without noise and with few keys nothing is forgotten, rounding errors included."""
    T = 130 if INTERPRETED else 32768
    shape = {'H': 1, 'HV': 1, 'K': 8, 'V': 16} if INTERPRETED else SHAPE
    inputs = make_inputs(covariance, B=1, T=T, **shape, dtype=DTYPE)
    inputs['g'] *= 1e-3
    inputs['g'][..., ::2] = 0
    inputs['omega'] *= 1e-4
    inputs['k'][:, torch.arange(T) % 4 > 0] = 0
    got = run(on_device(chunk_kdn), inputs, covariance=covariance, safe_gate=True, scale=1.)
    for name, x in got.items():
        assert x.isfinite().all(), name

    args = gain_arguments(inputs, covariance)
    starts = kdn_gain_fwd(args, gain_options(covariance)).starts[:, :, 0].cpu().double()
    k, g, omega, r, mu, p0 = (x.double() for x in (args.k, args.g, args.omega, args.r, args.mu, args.p0))
    a, u = (2 * g).exp(), mu.unsqueeze(-1) * k.square() / r.unsqueeze(-1)
    if covariance == 'isotropic':
        a, u, omega = a.mean(-1, keepdim=True), u.mean(-1, keepdim=True), omega.unsqueeze(-1)
    phat = CovarianceScan.apply(a, omega, u, p0, None)
    want = torch.cat((p0, phat[0, CHUNK_SIZE - 1:T - 1:CHUNK_SIZE]))
    assert ((starts - want.cpu()) / want.cpu()).abs().max() <= 5e-4
    last = (phat / (1 + u * phat))[:, -1].cpu().view(got['final_cov'].shape)
    assert ((got['final_cov'] - last) / last).abs().max() <= 5e-4


@pytest.mark.parametrize('case', ['dense', 'varlen-grouped'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_predicted_covariance(covariance, case):
    """Against its recurrence, token by token in float64."""
    shape, lens = {'H': 1, 'HV': 2, 'K': 12}, [T]
    if case == 'dense':
        inputs = make_inputs(covariance, B=1, T=T, **shape | {'HV': 1}, dtype=torch.float32)
        cu_seqlens = None
    else:
        lens = [17, 0, 65, 1]
        inputs = make_inputs(covariance, B=1, T=sum(lens), **shape, prior=True, dtype=torch.float32)
        cu_seqlens = cumulated(lens)
    inputs = {name: x for name, x in inputs.items() if name not in ('q', 'v', 'initial_state')}
    arguments = {name: x.to(DEVICE) for name, x in inputs.items()}
    if cu_seqlens is not None:
        arguments['cu_seqlens'] = cu_seqlens.to(DEVICE)
    got = predicted_covariance(**arguments, covariance=covariance).cpu()

    x = as_double(inputs)
    HV = x['g'].shape[2]
    a, k2 = (2 * x['g']).exp(), x['k'].square().repeat_interleave(HV // x['k'].shape[2], 2)
    omega, mu = x['omega'], x['info_scale'].view(-1, 1)
    if covariance == 'isotropic':
        a, k2, omega = a.mean(-1, keepdim=True), k2.mean(-1, keepdim=True), omega.unsqueeze(-1)
    want, t = [], 0
    for n, tokens in enumerate(lens):
        p = x['initial_cov'].view(HV, 1) if case != 'dense' else x['initial_cov'][n].view(HV, -1)
        for _ in range(tokens):
            p_hat = a[0, t] * p + omega[0, t]
            p = p_hat / (1 + mu * k2[0, t] / x['r'][0, t].unsqueeze(-1) * p_hat)
            want.append(p_hat)
            t += 1
    assert got.shape == a.shape
    assert_close(got, torch.stack(want).unsqueeze(0), 2e-6)


# chunks


CHUNK_CASES = {
    'dense': {'T': T, 'B': 2, 'safe_gate': True},
    'any-decay': {'T': 33},
    'T1': {'T': 1, 'safe_gate': True, 'prior': True},
    'grouped-gate': {
        'T': 67, 'shape': {'H': 2, 'HV': 4, 'K': 64, 'V': 96}, 'small': {'H': 1, 'HV': 2, 'K': 8, 'V': 16},
        'gate': True, 'l2norm': True, 'safe_gate': True, 'lower_bound': -1., 'noise': True,
    },
    'varlen-v-first': {'lens': True, 'v_first': True, 'safe_gate': True, 'l2norm': True},
    'K100': {'T': 130, 'shape': {'H': 2, 'HV': 2, 'K': 100, 'V': 100}, 'gpu': True, 'v_first': True, 'gate': True},
}


@pytest.mark.parametrize('case', [case for case, options in CHUNK_CASES.items() if GPU or 'gpu' not in options])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_chunk(covariance, case):
    case = {'B': 1, 'gate': False, 'prior': False, 'l2norm': False, 'v_first': False, **CHUNK_CASES[case]}
    shape = case.get('small' if INTERPRETED else 'shape', SHAPE)
    N, options = case['B'], {'safe_gate': case.get('safe_gate', False), 'lower_bound': case.get('lower_bound')}
    if case.get('lens'):
        lens = [0, 3, 15, 0, 65, 0] if INTERPRETED else torch.tensor(CU_SEQLENS).diff().tolist() + 20 * [1, 0, 7, 2]
        options['cu_seqlens'], case['T'], N = cumulated(lens), sum(lens), len(lens)
    inputs = make_inputs(
        covariance, B=case['B'], T=case['T'], N=N, gate=case['gate'], prior=case['prior'], dtype=DTYPE, **shape,
    )
    if case['v_first']:
        inputs['initial_state'] = inputs['initial_state'].mT.contiguous()
    if case.get('noise'):
        inputs, options = raw_noise(inputs), options | NOISE
    got = check(
        chunk_kdn,
        inputs,
        covariance=covariance,
        use_qk_l2norm_in_kernel=case['l2norm'],
        use_gate_in_kernel=case['gate'],
        state_v_first=case['v_first'],
        **options,
    )
    assert got['o'].dtype == DTYPE
    assert got['final_state'].dtype == got['final_cov'].dtype == torch.float32


@pytest.mark.parametrize('edge', ['zero-keys', 'no-noise-no-decay', 'repeated-keys-small-r'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_edges(covariance, edge):
    inputs = EDGES[edge](make_inputs(covariance, B=1, T=T, **SHAPE, dtype=torch.float32))
    inputs |= {name: inputs[name].to(DTYPE) for name in ('q', 'k', 'v')}
    tol = TOLERANCE | dict.fromkeys(('domega', 'dinitial_cov', 'dinfo_scale'), 1e-3 if INTERPRETED else 1e-1)
    if edge == 'repeated-keys-small-r' and not INTERPRETED:
        # a repeated key reads back what it wrote: what is left to learn, and its gradient, is a difference of equals in bf16
        tol |= {'dv': 5e-2, 'dr': 5e-2, 'dinitial_cov': 3e-1}
    check(chunk_kdn, inputs, tol, covariance=covariance, safe_gate=True)
    check(fused_recurrent_kdn, inputs, covariance=covariance, safe_gate=True)


@gpu_only
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_other_types(covariance, dtype):
    inputs = make_inputs(covariance, T=100, H=2, HV=2, K=64, V=64, dtype=dtype)
    check(chunk_kdn, inputs, {'o': 3e-3, 'domega': 2e-2, 'other': 1e-2}, covariance=covariance, safe_gate=True)
    check(fused_recurrent_kdn, inputs, {'o': 1e-3, 'other': 1e-5}, covariance=covariance, safe_gate=True)


def euler(inputs, covariance, **options):
    """What is left of three sums that are zero for every loss, relative to the norm of what they sum (0 if not diagonal).

    E1, of a head: all variances times c. E2, of a token and head: keys and values times c, r times c^2. E3, of a channel: its
    coordinate times c.
    """
    got = run(on_device(chunk_kdn), inputs, covariance=covariance, **options)
    x = {name: (inputs[name].double() * got[f'd{name}'].double()) for name in inputs}
    state, cov = (got[name].double() * weights(got[name].shape, seed) for seed, name in ((1, 'final_state'), (2, 'final_cov')))

    def left(*terms):
        """Each term is a sign and products, all axes after the shape of the identity summed."""
        total = sum(sign * products.sum(-1) for sign, products in terms)
        return total.norm() / sum(products.square().sum() for _, products in terms).sqrt()

    by_head = [
        (1, x['initial_cov'].flatten(2) if covariance == 'diagonal' else x['initial_cov'].unsqueeze(-1)),
        (1, x['omega'].transpose(1, 2).flatten(2)),
        (1, x['r'].transpose(1, 2)),
        (-1, cov.flatten(2) if covariance == 'diagonal' else cov.unsqueeze(-1)),
    ]
    by_token = [(1, x['k']), (1, x['v']), (2, x['r'].unsqueeze(-1))]
    if covariance == 'isotropic':
        return left(*by_head), left(*by_token), 0
    by_channel = [
        (2, x['initial_cov'].unsqueeze(-1)),
        (-2, cov.unsqueeze(-1)),
        (2, x['omega'].permute(0, 2, 3, 1)),
        (-1, x['k'].permute(0, 2, 3, 1)),
        (-1, x['q'].permute(0, 2, 3, 1)),
        (1, x['initial_state']),
        (-1, state),
    ]
    return left(*by_head), left(*by_token), left(*by_channel)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_euler_identities(covariance, record_property):
    """Of long sequences, without a reference."""
    B, T, H = (1, 100, 1) if INTERPRETED else (4, 4096, 4)
    inputs = make_inputs(covariance, B=B, T=T, **SHAPE | {'H': H, 'HV': H}, dtype=DTYPE)
    left = euler(inputs, covariance, safe_gate=True)
    record_property('left', ' '.join(f'{x:.1e}' for x in left))
    limits = (1e-5, 1e-5, 1e-5) if INTERPRETED else (2e-2, 2e-2, 3e-2)
    assert all(x <= limit for x, limit in zip(left, limits, strict=True)), left


@pytest.mark.parametrize('P', [37, 64])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_the_future_does_not_reach_the_past(fn, covariance, P):
    options = {'covariance': covariance, 'safe_gate': True}
    inputs, other = (make_inputs(covariance, B=1, T=70, **SHAPE, dtype=DTYPE, seed=seed) for seed in range(2))
    for name in TOKENS:
        other[name][:, P:] *= {'k': 100, 'g': 50, 'v': 1e10}.get(name, 1)
        other[name][:, :P] = inputs[name][:, :P]
    before, after = (run(on_device(fn), inputs | {name: x[name] for name in TOKENS}, grads=False, **options)['o']
                     for x in (inputs, other))
    assert torch.equal(after[:, :P], before[:, :P])
    assert not torch.equal(after[:, P], before[:, P])


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_gradients_do_not_come_from_the_past(covariance):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(covariance, B=1, T=70, **SHAPE, dtype=DTYPE).items()}
    o, _, _ = on_device(chunk_kdn)(**inputs, covariance=covariance, safe_gate=True)
    grads = torch.autograd.grad(o[:, :37].double().sum(), [inputs[name] for name in TOKENS])
    for name, dx in zip(TOKENS, grads, strict=True):
        assert dx[:, 37:].eq(0).all(), name
        assert dx[:, :37].ne(0).any(), name


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_two_runs_are_bitwise_equal(covariance):
    inputs = make_inputs(covariance, B=1, T=SHORT, **SHAPE, dtype=DTYPE)
    one, two = (run(on_device(chunk_kdn), inputs, covariance=covariance, safe_gate=True) for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, two[name]), name


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_a_row_of_a_batch_is_that_row_alone(covariance):
    inputs = make_inputs(covariance, B=3, T=T, **SHAPE, dtype=DTYPE)
    together = run(on_device(chunk_kdn), inputs, grads=False, covariance=covariance, safe_gate=True)
    for b in range(3):
        one = {name: x if name == 'info_scale' else x[b:b + 1] for name, x in inputs.items()}
        alone = run(on_device(chunk_kdn), one, grads=False, covariance=covariance, safe_gate=True)
        compare({name: x[b:b + 1] for name, x in together.items()}, alone, {'o': 4e-3, 'final_state': 4e-3, 'other': 1e-6})


class Guard:
    """Fresh memory is NaN, between two pads of NaN that must stay so."""

    PAD = 4096

    def __init__(self, monkeypatch):
        self.buffers = []
        for owner, name in ((torch, 'empty'), (torch, 'empty_like'), (torch.Tensor, 'new_empty')):
            monkeypatch.setattr(owner, name, self.guarded(getattr(owner, name)))

    def guarded(self, allocate):
        def wrapper(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return self.surround(x.fill_(math.nan)) if x.is_floating_point() and x.numel() else x

        return wrapper

    def surround(self, x):
        buffer = torch.full((x.numel() + 2 * self.PAD,), math.nan, dtype=x.dtype, device=x.device)
        self.buffers.append(buffer)
        return buffer[self.PAD:-self.PAD].view(x.shape).copy_(x)

    def check(self):
        assert self.buffers
        assert all(pad.isnan().all() for buffer in self.buffers for pad in (buffer[:self.PAD], buffer[-self.PAD:]))


@pytest.mark.parametrize('case', ['plain', 'varlen-grouped-raw-noise'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn], ids=lambda fn: fn.__name__)
def test_uncertainty(fn, covariance, case):
    """Against the token loop; outputs and gradients stay as they are without it, bitwise."""
    shape, options = {'B': 1, 'T': SHORT, **SHAPE}, {'covariance': covariance, 'use_qk_l2norm_in_kernel': True}
    if case != 'plain':
        options |= {'cu_seqlens': torch.tensor([0, 0, 3, 3, 69]), **NOISE}
        shape |= {'T': 69, 'N': 4, 'HV': 2 * shape['H']}
    inputs = make_inputs(dtype=DTYPE, **shape, covariance=covariance)
    if case != 'plain':
        inputs = raw_noise(inputs)
    grads = fn is chunk_kdn
    plain, kept = run(on_device(fn), inputs, grads, **options), {}

    def with_uncertainty(**arguments):
        *outputs, kept['got'] = fn(**arguments, output_uncertainty='log_likelihood')
        return outputs

    for name, x in run(on_device(with_uncertainty), inputs, grads, **options).items():
        assert torch.equal(x, plain[name]), name
    want = naive_recurrent_kdn(**as_double(inputs), **options, output_uncertainty='log_likelihood')[-1]
    # k is rounded to its type before its variance is taken, and innovations, which the values cancel in, to bf16
    tol = {'log_likelihood': 1e-5 if INTERPRETED else 2e-2, 'other': 1e-5 if INTERPRETED else 5e-3}
    compare({name: x.cpu() for name, x in kept['got']._asdict().items()}, want._asdict(), tol)
    assert not any(x.requires_grad for x in kept['got'])
    assert fn(**{name: x.to(DEVICE) for name, x in inputs.items()}, **{
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }, output_uncertainty=True)[-1].log_likelihood is None


@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_memory_around_inputs_and_outputs(covariance, varlen, monkeypatch):
    shape, options = {'B': 1, 'T': SHORT, **SHAPE}, {'covariance': covariance, 'safe_gate': True}
    if varlen:
        options['cu_seqlens'] = torch.tensor([0, 0, 3, 3, 69])
        shape |= {'T': 69, 'N': 4}
    inputs = make_inputs(dtype=DTYPE, covariance=covariance, **shape)
    fns = {chunk_kdn: True, fused_recurrent_kdn: False}
    want = [run(on_device(fn), inputs, grads, **options) for fn, grads in fns.items()]
    guard = Guard(monkeypatch)

    class Surround(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return guard.surround(x)

        @staticmethod
        def backward(ctx, dx):
            return dx

    def present(x):
        return Surround.apply(x) if x.is_floating_point() else x

    for (fn, grads), results in zip(fns.items(), want, strict=True):
        got = run(on_device(fn, present=present), inputs, grads, **options)
        assert len(guard.buffers) > len(inputs)
        guard.check()
        for name, x in got.items():
            assert torch.equal(x, results[name]), name


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_noncontiguous_inputs(covariance):
    inputs = make_inputs(covariance, B=1, T=SHORT, **SHAPE, dtype=DTYPE)
    options = {'covariance': covariance, 'safe_gate': True}
    for fn, grads in ((chunk_kdn, True), (fused_recurrent_kdn, False)):
        want = run(on_device(fn), inputs, grads, **options)
        got = run(on_device(fn, present=strided), inputs, grads, **options)
        for name, x in got.items():
            assert torch.equal(x, want[name]), name


def test_no_second_derivatives():
    """The PyTorch form has them; here a gradient of a gradient must not look like one."""
    inputs = {name: x.to(DEVICE).requires_grad_() for name, x in make_inputs(T=17, **SHAPE, dtype=DTYPE).items()}
    outputs = chunk_kdn(**inputs)
    gradients = torch.autograd.grad(outputs[0].float().square().sum(), list(inputs.values()), create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        sum(x.float().square().sum() for x in gradients).backward()


@pytest.mark.parametrize('cu_seqlens', [None, [0, 0, 0]], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_no_tokens(fn, covariance, cu_seqlens):
    inputs = make_inputs(covariance, B=1 if cu_seqlens else 2, T=0, N=2, **SHAPE, dtype=DTYPE)
    options = {'cu_seqlens': torch.tensor(cu_seqlens)} if cu_seqlens else {}
    o, S, p = on_device(fn)(**inputs, covariance=covariance, output_final_state=True, **options)
    assert o.shape == inputs['v'].shape
    assert torch.equal(S, inputs['initial_state'])
    assert torch.equal(p, inputs['initial_cov'])


@pytest.mark.parametrize('fn', [chunk_kdn, fused_recurrent_kdn])
def test_a_memory_that_grows_without_bound(fn):
    """Cyclic keys of three taps, r far below omega, no decay: the diagonal covariance lets the memory grow by e^0.28 a token.

    The kernels follow the token loop in that, up to numbers that fp32 does not hold.
    """
    T = 128 if INTERPRETED else 512
    inputs = make_inputs(B=1, T=T, **SHAPE, dtype=torch.float32)
    taps = F.pad(torch.tensor([-0.447, 0.80, 0.39]), (0, 5))
    keys = torch.stack([taps.roll(t) for t in range(T)]).view(1, T, 1, 8)
    inputs |= {
        'q': inputs['q'][:, :1].expand_as(inputs['q']).contiguous(),
        'k': F.pad(keys, (0, SHAPE['K'] - 8)).expand_as(inputs['k']).contiguous(),
        'v': 0 * inputs['v'],
        'g': 0 * inputs['g'],
        'omega': 0 * inputs['omega'] + 1,
        'r': 0 * inputs['r'] + 0.01,
        'initial_cov': 0 * inputs['initial_cov'] + 1,
        'info_scale': 0 * inputs['info_scale'] + 1,
    }
    inputs |= {name: inputs[name].to(DTYPE) for name in ('q', 'k', 'v')}
    got = run(on_device(fn), inputs, grads=False, safe_gate=True)['o'].double()
    want = run(on_device(naive_recurrent_kdn), as_double(inputs), grads=False)['o']
    size, got_size = (x[0].flatten(1).norm(dim=1) for x in (want, got))
    start, end = (32, T - 1) if INTERPRETED else (64, 255)
    growth, got_growth = ((x[end] / x[start]) ** (1 / (end - start)) for x in (size, got_size))
    assert 0.25 < growth.log() < 0.3
    assert abs(got_growth / growth - 1) <= 0.01
    # chunks that end below 1e30
    n = int((size < 1e30).sum()) // CHUNK_SIZE * CHUNK_SIZE
    assert n >= 128
    assert got[:, :n].isfinite().all()
    if not INTERPRETED:
        assert size[-1] > 1e50
        assert not (got_size[-1] < 1e30)


# tokens


FUSED_CASES = {
    'T1': {'T': 1, 'B': 3, 'H': 2, 'HV': 2, 'K': 8, 'V': 16},
    'grouped-v-first': {'T': 20, 'H': 1, 'HV': 2, 'K': 12, 'V': 70, 'v_first': True, 'gate': True, 'l2norm': True},
    'prior-float-scale': {
        'T': 20, 'B': 2, 'H': 2, 'HV': 2, 'K': 7, 'V': 40, 'prior': True, 'info_scale': 2.5, 'safe_gate': True, 'noise': True,
    },
    'nothing-carried': {'T': 5, 'B': 2, 'H': 1, 'HV': 3, 'K': 12, 'V': 5, 'fresh': True},
    'varlen': {'lens': [0, 15, 0, 6, 1, 0], 'H': 1, 'HV': 2, 'K': 12, 'V': 33, 'l2norm': True},
    'varlen-prior-v-first': {
        'lens': [3, 0, 18], 'H': 2, 'HV': 2, 'K': 8, 'V': 31, 'prior': True, 'gate': True, 'v_first': True,
        'safe_gate': True, 'lower_bound': -0.5,
    },
    'large': {'T': 70, 'B': 2, 'H': 2, 'HV': 4, 'K': 100, 'V': 200, 'gpu': True, 'gate': True, 'l2norm': True},
}


@pytest.mark.parametrize('case', [case for case, options in FUSED_CASES.items() if GPU or 'gpu' not in options])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_fused_recurrent(covariance, case):
    case = {'gate': False, 'prior': False, 'B': 1, **FUSED_CASES[case]}
    options = {'safe_gate': case.get('safe_gate', False), 'lower_bound': case.get('lower_bound')}
    shape = {name: case[name] for name in ('B', 'T', 'H', 'HV', 'K', 'V', 'prior', 'gate') if name in case}
    if 'lens' in case:
        options['cu_seqlens'] = cumulated(case['lens'])
        shape |= {'T': sum(case['lens']), 'N': len(case['lens'])}
    inputs = make_inputs(covariance, dtype=DTYPE, **shape)
    if case.get('v_first'):
        inputs['initial_state'] = inputs['initial_state'].mT.contiguous()
    if case.get('noise'):
        inputs, options = raw_noise(inputs), options | NOISE
    if 'info_scale' in case:
        del inputs['info_scale']
        options['info_scale'] = case['info_scale']
    if case.get('fresh'):
        for name in ('info_scale', 'initial_state', 'initial_cov'):
            del inputs[name]
    check(
        fused_recurrent_kdn,
        inputs,
        covariance=covariance,
        state_v_first=case.get('v_first', False),
        use_gate_in_kernel=case['gate'],
        use_qk_l2norm_in_kernel=case.get('l2norm', False),
        **options,
    )


@pytest.mark.parametrize('state_v_first', [False, True], ids=['k-first', 'v-first'])
@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_pool_of_states(covariance, varlen, state_v_first, monkeypatch):
    """States of a batch with a free slot, in scattered rows of a pool, updated in place; nothing else is touched."""
    lens = [3, 20, 0, 7] if varlen else 4 * [1]
    rows, kept = torch.tensor([4, -1, 0, 2]), torch.tensor([True, False, True, True])
    options = {'covariance': covariance, 'state_v_first': state_v_first, 'use_qk_l2norm_in_kernel': True}
    inputs = make_inputs(covariance, B=1 if varlen else 4, T=sum(lens) if varlen else 1, N=4, K=12, HV=4, V=40, dtype=DTYPE)
    if state_v_first:
        inputs['initial_state'] = inputs['initial_state'].mT.contiguous()
    want = run(naive_recurrent_kdn, as_double(inputs), grads=False, **options,
               cu_seqlens=cumulated(lens) if varlen else None)

    guard = Guard(monkeypatch)
    state, cov = (inputs.pop(name) for name in ('initial_state', 'initial_cov'))
    pools = [guard.surround(torch.full((6, *x.shape[1:]), 7., device=DEVICE)) for x in (state, cov)]
    for pool, x in zip(pools, (state, cov), strict=True):
        pool[rows[kept]] = x[kept].to(DEVICE)
    out = guard.surround(torch.full_like(inputs['v'], 7., device=DEVICE))
    o, S, p = fused_recurrent_kdn_fwd(
        **{name: x.to(DEVICE) for name, x in inputs.items()},
        initial_state=pools[0],
        initial_cov=pools[1],
        ssm_state_indices=rows.to(DEVICE),
        cu_seqlens=cumulated(lens).to(DEVICE) if varlen else None,
        out=out,
        **options,
    )
    assert (o.data_ptr(), S.data_ptr(), p.data_ptr()) == (out.data_ptr(), pools[0].data_ptr(), pools[1].data_ptr())
    guard.check()
    tokens = kept.repeat_interleave(torch.tensor(lens))
    o, want_o = ((x.cpu()[0] if varlen else x.cpu()[:, 0]) for x in (o, want['o']))
    got = {'o': o[tokens], 'final_state': S.cpu()[rows[kept]], 'final_cov': p.cpu()[rows[kept]]}
    compare(got, {'o': want_o[tokens]} | {name: want[name][kept] for name in ('final_state', 'final_cov')}, FUSED_TOLERANCE)
    assert o[~tokens].eq(7).all()
    for pool in pools:
        assert pool[[1, 3, 5]].eq(7).all()


@pytest.mark.parametrize('prior', [False, True], ids=['carried', 'prior'])
def test_states_in_place_without_a_pool(prior):
    inputs = {name: x.to(DEVICE) for name, x in make_inputs(T=3, V=40, dtype=DTYPE, prior=prior).items()}
    if prior:
        with pytest.raises(AssertionError):
            fused_recurrent_kdn_fwd(**inputs, inplace_final_state=True)
        return
    o, S, p = fused_recurrent_kdn_fwd(**inputs | {name: inputs[name].clone() for name in ('initial_state', 'initial_cov')},
                                      output_final_state=True)
    got_o, got_S, got_p = fused_recurrent_kdn_fwd(**inputs, inplace_final_state=True)
    assert got_S is inputs['initial_state']
    assert got_p is inputs['initial_cov']
    assert torch.equal(got_o, o)
    assert torch.equal(inputs['initial_state'], S)
    assert torch.equal(inputs['initial_cov'], p)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_decoding_token_by_token(covariance):
    """A step at a time gives what the chunks give, and, as all is fp32 in it, more exactly what the token loop gives."""
    T = 12 if INTERPRETED else 100
    inputs = make_inputs(covariance, T=T, **SHAPE, dtype=DTYPE)
    options = {'covariance': covariance, 'safe_gate': True, 'use_qk_l2norm_in_kernel': True}
    chunks = run(on_device(chunk_kdn), inputs, grads=False, **options)
    want = run(on_device(naive_recurrent_kdn), as_double(inputs), grads=False, **options)
    outputs = []
    for t in range(T):
        tokens = {name: inputs[name][:, t:t + 1] for name in TOKENS}
        got = run(on_device(fused_recurrent_kdn), inputs | tokens, grads=False, **options)
        inputs |= {'initial_state': got['final_state'], 'initial_cov': got['final_cov']}
        outputs.append(got['o'])
    got['o'] = torch.cat(outputs, 1)
    compare(got, want, FUSED_TOLERANCE)
    compare(got, chunks, {'final_cov': 1e-5, 'other': 1e-5 if INTERPRETED else 8e-3})


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_decoding_in_fp32(covariance):
    inputs = make_inputs(covariance, T=70, H=2, HV=2, K=64, V=64, dtype=torch.float32)
    options = {'covariance': covariance, 'safe_gate': True}
    chunks, tokens = (run(on_device(fn), inputs, grads=False, **options) for fn in (chunk_kdn, fused_recurrent_kdn))
    compare(tokens, chunks, {'other': 2e-3})


# on a GPU only


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_cuda_graph(covariance):
    """A decoding step, captured with one batch and replayed with another one."""
    def batch(seed):
        x = make_inputs(covariance, B=8, T=1, **SHAPE, dtype=DTYPE, seed=seed)
        x['ssm_state_indices'] = torch.randperm(8, generator=torch.Generator().manual_seed(seed)) - seed
        return {name: t.cuda() for name, t in x.items()}

    step = partial(fused_recurrent_kdn_fwd, covariance=covariance, use_qk_l2norm_in_kernel=True)
    static, other = batch(0), batch(1)
    out = torch.zeros_like(static['v'])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(**static, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**static, out=out)
    for name, x in static.items():
        x.copy_(other[name])
    out.zero_()
    graph.replay()
    o, S, p = step(**other, out=torch.zeros_like(out))
    assert out.ne(0).any()
    assert torch.equal(out, o)
    assert torch.equal(static['initial_state'], S)
    assert torch.equal(static['initial_cov'], p)


@gpu_only
@pytest.mark.parametrize('backend', ['eager', 'inductor'])
def test_torch_compile(backend):
    """The op stays out of the graph; code around it compiles."""
    inputs = make_inputs(B=1, T=T, **SHAPE, dtype=DTYPE)
    inputs = {name: x.cuda().requires_grad_() for name, x in inputs.items()}

    def loss(q, **kwargs):
        return chunk_kdn(2 * q, **kwargs, safe_gate=True)[0].float().square().sum()

    want = torch.autograd.grad(loss(**inputs), list(inputs.values()))
    got = torch.autograd.grad(torch.compile(loss, backend=backend)(**inputs), list(inputs.values()))
    for name, x, y in zip(inputs, got, want, strict=True):
        assert rel(x, y) <= 5e-3, name


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_autocast_changes_nothing(covariance):
    inputs, options = make_inputs(covariance, B=1, T=T, **SHAPE, dtype=DTYPE), {'covariance': covariance, 'safe_gate': True}
    for fn, grads in ((chunk_kdn, True), (fused_recurrent_kdn, False)):
        want = run(on_device(fn), inputs, grads, **options)
        # the backward outside, as PyTorch asks for
        got = run(on_device(torch.autocast('cuda', torch.bfloat16)(fn)), inputs, grads, **options)
        for name, x in want.items():
            assert torch.equal(got[name], x), name


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_values_are_checked_on_demand(covariance, monkeypatch):
    inputs = {name: x.cuda() for name, x in make_inputs(covariance, B=1, T=T, **SHAPE, dtype=DTYPE).items()}
    for fn in (chunk_kdn, fused_recurrent_kdn):
        for name, x in (('r', 0 * inputs['r']), ('omega', -inputs['omega']), ('k', inputs['k'] * math.nan)):
            monkeypatch.delenv('FLA_KDN_DEBUG', raising=False)
            fn(**inputs | {name: x}, covariance=covariance, safe_gate=True)
            monkeypatch.setenv('FLA_KDN_DEBUG', '1')
            with pytest.raises(ValueError, match=f'`{name}`'):
                fn(**inputs | {name: x}, covariance=covariance, safe_gate=True)


@gpu_only
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_nothing_waits_for_the_device(covariance, monkeypatch):
    monkeypatch.delenv('FLA_KDN_DEBUG', raising=False)
    inputs = make_inputs(covariance, B=1, T=T, **SHAPE, dtype=DTYPE)
    inputs = {name: x.cuda().requires_grad_() for name, x in inputs.items()}
    options = {'covariance': covariance, 'safe_gate': True, 'output_final_state': True}

    def step():
        fused_recurrent_kdn(**inputs, **options)
        outputs = chunk_kdn(**inputs, **options)
        torch.autograd.grad([x.float().sum() for x in outputs], list(inputs.values()))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@gpu_only
def test_kda_on_a_gpu_is_flas_own(monkeypatch):
    """The PyTorch implementations, registered for CPU tensors, are not chosen for others."""
    def get_implementation(self, name):
        raise LookupError(name)

    monkeypatch.setattr(TorchBackend, 'get_implementation', get_implementation)
    inputs = make_inputs(B=1, T=T, **SHAPE, dtype=DTYPE)
    inputs = {name: inputs[name] for name in ('q', 'k', 'v', 'g', 'initial_state')} | {'beta': inputs['r'].sigmoid()}
    o, _ = chunk_kda(**{name: x.cuda() for name, x in inputs.items()}, safe_gate=True)
    assert o.is_cuda
    assert o.isfinite().all()
    with pytest.raises(LookupError):
        chunk_kda(**inputs, safe_gate=True)


@pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason='needs two GPUs')
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_second_gpu(covariance):
    inputs, options = make_inputs(covariance, B=1, T=T, **SHAPE, dtype=DTYPE), {'covariance': covariance, 'safe_gate': True}
    for fn, grads in ((chunk_kdn, True), (fused_recurrent_kdn, False)):
        one, two = (run(on_device(fn, device), inputs, grads, **options) for device in ('cuda:0', 'cuda:1'))
        for name, x in one.items():
            assert torch.equal(x, two[name]), name
