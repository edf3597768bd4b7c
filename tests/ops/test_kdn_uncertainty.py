# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Write strength, variances and log-likelihood of each token: all forms of the op alike, and what they mean."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from conftest import assert_close, rel
from kdn_cases import COVARIANCES, CU_SEQLENS, make_inputs

from fla_kdn.ops.kdn import chunk_kdn, fused_recurrent_kdn, naive_chunk_kdn, naive_recurrent_exact_kdn, naive_recurrent_kdn

FIELDS = ('write_strength', 'read_variance', 'innovation_variance', 'log_likelihood')
FORMS = [naive_chunk_kdn, chunk_kdn, fused_recurrent_kdn]
CASES = {
    'plain': ({}, {}),
    'short': ({'T': 1}, {}),
    'grouped-values': ({'HV': 4}, {'scale': 2.}),
    'l2norm-gate': ({'gate': True, 'T': 70}, {'use_qk_l2norm_in_kernel': True, 'use_gate_in_kernel': True, 'safe_gate': True}),
    'raw-noise': ({'T': 70}, {'use_noise_softplus_in_kernel': True, 'r_min': 0.1}),
    'packed': ({'B': 1, 'T': CU_SEQLENS[-1], 'N': len(CU_SEQLENS) - 1}, {'cu_seqlens': torch.tensor(CU_SEQLENS)}),
}


def uncertainty(fn, inputs: dict[str, torch.Tensor], **options):
    return fn(**inputs, **options, output_uncertainty='log_likelihood')[-1]


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', FORMS, ids=lambda fn: fn.__name__)
def test_all_forms(fn, covariance, case):
    shape, options = CASES[case]
    inputs = make_inputs(covariance, **{'T': 40, **shape})
    want = uncertainty(naive_recurrent_kdn, inputs, covariance=covariance, **options)
    got = uncertainty(fn, inputs, covariance=covariance, **options)
    for name in (*FIELDS, 'key_variance'):
        x = getattr(got, name)
        assert x.shape == inputs['r'].shape and not (x.requires_grad and fn is not naive_chunk_kdn)
        assert_close(x, getattr(want, name), 1e-12, name)
    assert got.write_strength.min() > 0 and got.write_strength.max() < 1


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_definitions(covariance):
    """From the memory and the covariance that the op itself returns after every token."""
    inputs = make_inputs(covariance, T=6, H=2, HV=4)
    info_scale, K = inputs['info_scale'], inputs['k'].shape[-1]
    got = uncertainty(naive_recurrent_kdn, inputs, covariance=covariance, scale=3.)
    S, p = inputs['initial_state'], inputs['initial_cov']
    for t in range(6):
        token = {name: inputs[name][:, t:t + 1] for name in ('q', 'k', 'v', 'g', 'omega', 'r')}
        q, k = (token[name][:, 0].repeat_interleave(2, 1) for name in ('q', 'k'))
        alpha, omega, r = token['g'][:, 0].exp(), token['omega'][:, 0], token['r'][:, 0]
        if covariance == 'diagonal':
            p_hat = alpha.square() * p + omega
        else:
            p_hat = (alpha.square().mean(-1) * p + omega).unsqueeze(-1).expand(-1, -1, K)
        predicted = torch.einsum('bhk,bhkv->bhv', alpha * k, S)
        _, S, p = naive_recurrent_kdn(
            **token, initial_state=S, initial_cov=p, info_scale=info_scale, covariance=covariance, output_final_state=True)
        variance = r + (p_hat * k.square()).sum(-1)
        normal = torch.distributions.Normal(predicted, variance.sqrt().unsqueeze(-1))
        posterior = p if covariance == 'diagonal' else p.unsqueeze(-1)
        # kappa from what a token writes of its innovation
        written = torch.einsum('bhk,bhkv->bhv', k, S) - predicted
        values = {
            'write_strength': (written / (token['v'][:, 0] - predicted)).mean(-1),
            'read_variance': (posterior * q.square()).sum(-1),
            'innovation_variance': variance,
            'key_variance': (p_hat * k.square()).sum(-1),
            'log_likelihood': normal.log_prob(token['v'][:, 0]).sum(-1),
        }
        for name, want in values.items():
            assert_close(getattr(got, name)[:, t], want, 1e-9, f'{name} of token {t}')


@pytest.mark.parametrize('asked', [True, 'log_likelihood'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, *FORMS], ids=lambda fn: fn.__name__)
def test_nothing_else_changes(fn, covariance, asked):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(covariance, T=70, dtype=torch.float32).items()}
    options = {'covariance': covariance, 'output_final_state': True}
    want, (*got, extra) = fn(**inputs, **options), fn(**inputs, **options, output_uncertainty=asked)
    assert all(map(torch.equal, got, want))
    assert (extra.log_likelihood is None) == (asked is True)
    assert extra.write_strength.dtype == torch.float32
    if fn is not fused_recurrent_kdn:
        gradients = [torch.autograd.grad(x[0].sum(), list(inputs.values())[:6]) for x in (got, want)]
        assert all(map(torch.equal, *gradients))


def test_only_the_loops_have_gradients():
    inputs = {name: x.requires_grad_() for name, x in make_inputs(T=5).items()}
    for fn in (naive_recurrent_kdn, naive_chunk_kdn, chunk_kdn, fused_recurrent_kdn):
        got = uncertainty(fn, inputs)
        assert {x.requires_grad for x in got} == {fn in (naive_recurrent_kdn, naive_chunk_kdn)}
    small = {name: x.requires_grad_() for name, x in make_inputs(B=1, T=3, H=1, HV=1, K=3, V=3).items()}
    assert torch.autograd.gradcheck(
        lambda *x: tuple(uncertainty(naive_recurrent_kdn, dict(zip(small, x, strict=True)))), tuple(small.values()))


@pytest.mark.parametrize('fn', [naive_recurrent_kdn, *FORMS], ids=lambda fn: fn.__name__)
def test_no_tokens(fn):
    inputs = make_inputs(T=0)
    assert all(x.shape == (2, 0, 2) for x in uncertainty(fn, inputs))


@pytest.mark.parametrize('asked', ['likelihood', 2, None])
def test_errors(asked):
    for fn in (naive_recurrent_kdn, *FORMS):
        with pytest.raises(ValueError, match='`output_uncertainty` must be'):
            fn(**make_inputs(T=3), output_uncertainty=asked)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_bf16(covariance):
    inputs = make_inputs(covariance, T=70, dtype=torch.bfloat16)
    want = uncertainty(naive_recurrent_kdn, {name: x.double() for name, x in inputs.items()}, covariance=covariance)
    for fn in FORMS:
        for name, x in zip(FIELDS, uncertainty(fn, inputs, covariance=covariance), strict=True):
            assert x.dtype == torch.float32
            assert_close(x.double(), getattr(want, name), 1e-5, f'{name} of {fn.__name__}')


# ---- what they mean


def test_exact_where_channels_are_apart():
    """One channel, or one-hot keys: there is no correlation to drop."""
    for covariance in COVARIANCES:
        inputs = make_inputs(covariance, K=1, T=20)
        del inputs['initial_state'], inputs['info_scale'], inputs['initial_cov']
        got = uncertainty(naive_recurrent_kdn, inputs, covariance=covariance, info_scale=1.)
        if covariance == 'isotropic':
            inputs['omega'] = inputs['omega'].unsqueeze(-1)
        for name, want in zip(FIELDS, uncertainty(naive_recurrent_exact_kdn, inputs), strict=True):
            assert_close(getattr(got, name), want, 1e-12, f'{name}, {covariance}')
    inputs = make_inputs(T=20)
    del inputs['initial_state'], inputs['info_scale'], inputs['initial_cov']
    inputs['k'] = torch.eye(8, dtype=torch.float64)[torch.randint(8, (2, 20, 2))] * inputs['k'][..., :1]
    got = uncertainty(naive_recurrent_kdn, inputs, info_scale=1.)
    for name, want in zip(FIELDS, uncertainty(naive_recurrent_exact_kdn, inputs), strict=True):
        assert_close(getattr(got, name), want, 1e-12, name)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_repeated_keys_make_it_surer(covariance):
    """Without decay and process noise each repetition lowers the variance of what is read there, and the write strength."""
    inputs = make_inputs(covariance, T=30)
    inputs['k'] = inputs['k'][:, :1].expand_as(inputs['k'])
    inputs['q'], inputs['g'], inputs['omega'] = inputs['k'], torch.zeros_like(inputs['g']), torch.zeros_like(inputs['omega'])
    inputs['r'] = inputs['r'][:, :1].expand_as(inputs['r'])
    got = uncertainty(chunk_kdn, inputs, covariance=covariance)
    for name in ('read_variance', 'key_variance', 'write_strength', 'innovation_variance'):
        assert (getattr(got, name).diff(dim=1) < 0).all(), name


def test_keys_of_other_channels_stay_unknown():
    """One-hot keys without decay and process noise: the diagonal variant keeps the prior where nothing was written, the
    isotropic one knows no key better than another."""
    T, K = 12, 4
    seen = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 0, 0])
    asked = torch.eye(K, dtype=torch.float64)[:, None, None]
    inputs = {
        'k': torch.eye(K, dtype=torch.float64)[seen].expand(K, 1, T, K).transpose(1, 2),
        'v': torch.ones(K, T, 1, 2, dtype=torch.float64),
        'g': torch.zeros(K, T, 1, K, dtype=torch.float64),
        'r': torch.full((K, T, 1), 0.5, dtype=torch.float64),
    }
    for covariance in COVARIANCES:
        omega = torch.zeros(K, T, 1, *[K] * (covariance == 'diagonal'), dtype=torch.float64)
        _, S, p = chunk_kdn(
            **inputs, q=inputs['k'], omega=omega, info_scale=1., covariance=covariance, output_final_state=True)
        token = {name: x[:, :1] for name, x in inputs.items()} | {'q': asked, 'k': asked, 'omega': omega[:, :1]}
        got = fused_recurrent_kdn(
            **token, initial_state=S, initial_cov=p, info_scale=1., covariance=covariance, output_uncertainty=True)[-1]
        # of 8, 2, 2 and no observations of variance 0.5 after a prior of variance 1
        counts = torch.tensor([8., 2., 2., 0.]) if covariance == 'diagonal' else torch.full((K,), T / K)
        assert_close(got.key_variance.flatten(), 1 / (1 + counts.double() / 0.5), 1e-12, covariance)


@functools.cache
def simulated(K: int = 8, V: int = 4, B: int = 40, T: int = 150) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Values drawn from the linear-Gaussian model itself, and the true read-out of each query `[B, T, 1, V]`."""
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k = (randn(B, T, 1, K) / K ** 0.5 for _ in range(2))
    g = -0.05 * torch.rand(B, T, 1, K, generator=generator, dtype=torch.float64)
    omega, r = torch.full_like(g, 0.02), torch.full((B, T, 1), 0.3, dtype=torch.float64)
    S, v, true = randn(B, K, V), [], []
    for t in range(T):
        S = g[:, t, 0].exp().unsqueeze(-1) * S + omega[:, t, 0].sqrt().unsqueeze(-1) * randn(B, K, V)
        v.append(torch.einsum('bk,bkv->bv', k[:, t, 0], S) + r[:, t].sqrt() * randn(B, V))
        true.append(torch.einsum('bk,bkv->bv', q[:, t, 0], S))
    v, true = (torch.stack(x, 1).unsqueeze(2) for x in (v, true))
    return {'q': q, 'k': k, 'v': v, 'g': g, 'omega': omega, 'r': r}, true


def calibration(fn, covariance: str | None = None, **options) -> tuple[float, float]:
    """Mean squared z-score of what is read, and of innovations; 1 if the variances are right."""
    inputs, true = simulated()
    if covariance is not None:
        options['covariance'] = covariance
        if covariance == 'isotropic':
            inputs = inputs | {'omega': inputs['omega'].mean(-1)}
    o, _, _, got = fn(**inputs, scale=1., output_uncertainty='log_likelihood', **options)
    V = o.shape[-1]
    innovation = -2 * got.log_likelihood - V * (math.log(2 * math.pi) + got.innovation_variance.log())
    read = (o - true).square().sum(-1) / got.read_variance
    # after the start, where the prior is forgotten
    return float(read[:, 50:].mean() / V), float(innovation[:, 50:].mean() / V)


def test_calibration_of_the_exact_filter():
    """Data from the model: z-scores of variance 1, within the sampling error of 40 sequences of 100 tokens."""
    read, innovation = calibration(naive_recurrent_exact_kdn)
    assert abs(read - 1) < 0.06 and abs(innovation - 1) < 0.04


@pytest.mark.parametrize(('covariance', 'info_scale', 'read', 'innovation'), [
    ('diagonal', 1., 1.18, 1.06), ('diagonal', 8., 3.10, 1.35), ('isotropic', 1., 1.23, 1.07), ('isotropic', 8., 3.58, 1.39),
])
def test_calibration_of_the_approximations(covariance, info_scale, read, innovation):
    """How far they are off where keys overlap: evidence is counted for each channel as if it were of that channel alone."""
    got = calibration(chunk_kdn, covariance=covariance, info_scale=info_scale)
    assert got == pytest.approx((read, innovation), rel=0.1)


def test_likelihood_tells_noise_from_signal():
    """Values of another sequence are less likely than its own."""
    inputs, _ = simulated()
    own = uncertainty(chunk_kdn, inputs).log_likelihood
    other = uncertainty(chunk_kdn, inputs | {'v': inputs['v'].roll(1, 0)}).log_likelihood
    assert own.mean() - other.mean() > 0.3
    assert rel(own, other) > 1e-2
