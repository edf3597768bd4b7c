# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The plain PyTorch forms of KDN, the ground truth of the others, against Bayes' rule, closed forms and FLA's delta rules."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda.naive import naive_recurrent_kda
from kdn_cases import COVARIANCES, CU_SEQLENS, check, cut_sequences, make_inputs, run, weights

from fla_kdn.ops.kdn import naive_chunk_kdn, naive_recurrent_exact_kdn, naive_recurrent_kdn

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
    ]
]


@pytest.mark.parametrize('chunk_size', [16, 64])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize(('B', 'T', 'H', 'HV', 'K', 'V'), CASES)
def test_chunk_matches_recurrent(B, T, H, HV, K, V, covariance, chunk_size):
    inputs = make_inputs(covariance, B=B, T=T, H=H, HV=HV, K=K, V=V)
    fn = functools.partial(naive_chunk_kdn, chunk_size=chunk_size)
    check(fn, naive_recurrent_kdn, inputs, 1e-13, covariance=covariance)


@pytest.mark.parametrize('chunk_size', [16, 64])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_chunk_matches_recurrent_varlen(covariance, chunk_size):
    inputs = make_inputs(covariance, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1, H=1)
    fn = functools.partial(naive_chunk_kdn, chunk_size=chunk_size)
    check(fn, naive_recurrent_kdn, inputs, 1e-13, covariance=covariance, cu_seqlens=torch.tensor(CU_SEQLENS))


@pytest.mark.parametrize('noise_from', [100, 60], ids=['floor-to-the-end', 'noise-after-the-floor'])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_chunk_matches_recurrent_on_the_covariance_floor(covariance, noise_from):
    """No gradient passes a token whose covariance is floored, inside a chunk as well."""
    inputs = make_inputs(covariance, T=100)
    inputs['g'] -= 0.3
    inputs['omega'][:, :noise_from] = 0
    inputs['omega'][:, noise_from + 1::2] = 0
    check(naive_chunk_kdn, naive_recurrent_kdn, inputs, 1e-10, covariance=covariance)


@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_varlen_is_each_sequence_alone(fn, covariance):
    inputs = make_inputs(covariance, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1)
    together = run(fn, inputs, grads=False, covariance=covariance, cu_seqlens=torch.tensor(CU_SEQLENS))
    for n, (start, end) in enumerate(zip(CU_SEQLENS, CU_SEQLENS[1:], strict=False)):
        one = {name: x[:, start:end] if name in 'q k v g omega r' else x for name, x in inputs.items()}
        one |= {name: inputs[name][n:n + 1] for name in ('initial_state', 'initial_cov')}
        alone = run(fn, one, grads=False, covariance=covariance)
        assert_close(together['o'][:, start:end], alone['o'], 1e-14, f'o of sequence {n}')
        for name in ('final_state', 'final_cov'):
            assert_close(together[name][n:n + 1], alone[name], 1e-14, f'{name} of sequence {n}')


@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_empty_sequence_returns_what_was_carried(fn, covariance):
    inputs = make_inputs(covariance, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1)
    result = run(fn, inputs, grads=False, covariance=covariance, cu_seqlens=torch.tensor(CU_SEQLENS))
    for n in (0, 3, 7):
        assert torch.equal(result['final_state'][n], inputs['initial_state'][n])
        assert torch.equal(result['final_cov'][n], inputs['initial_cov'][n])


def one_step(mu=1., **kwargs):
    inputs = make_inputs(T=1, **kwargs)
    inputs['info_scale'] = torch.full_like(inputs['info_scale'], mu)
    k, v, r, p0, S0 = (inputs[name].squeeze(1) for name in ('k', 'v', 'r', 'initial_cov', 'initial_state'))
    alpha, omega = inputs['g'].squeeze(1).exp(), inputs['omega'].squeeze(1)
    return inputs, alpha, k, v, r[..., None], omega, p0, S0


def test_diagonal_step_is_the_exact_posterior_of_a_diagonal_prior():
    inputs, alpha, k, v, r, omega, p0, S0 = one_step()
    result = run(naive_recurrent_kdn, inputs, grads=False, scale=1.)
    p_hat = alpha.square() * p0 + omega
    precision = torch.diag_embed(1 / p_hat) + k[..., None] * k[..., None, :] / r[..., None]
    evidence = alpha[..., None] * S0 / p_hat[..., None] + k[..., None] * v[..., None, :] / r[..., None]
    posterior = torch.linalg.inv(precision) @ evidence
    assert_close(result['final_state'], posterior, 1e-13, 'posterior mean')
    assert_close(result['o'].squeeze(1), (inputs['q'].squeeze(1)[..., None] * posterior).sum(-2), 1e-13, 'o')


@pytest.mark.parametrize('mu', [1., 3.5])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_a_token_adds_info_scale_times_its_information_to_the_precision(covariance, mu):
    inputs, alpha, k, _, r, omega, p0, _ = one_step(covariance=covariance, mu=mu)
    result = run(naive_recurrent_kdn, inputs, grads=False, covariance=covariance)
    if covariance == 'diagonal':
        precision = 1 / (alpha.square() * p0 + omega) + mu * k.square() / r
    else:
        precision = 1 / (alpha.square().mean(-1) * p0 + omega) + mu * k.square().mean(-1) / r[..., 0]
    assert_close(1 / result['final_cov'], precision, 1e-14, 'precision')


@pytest.mark.parametrize('HV', [2, 4])
def test_first_step_of_diagonal_is_that_of_the_exact_filter(HV):
    inputs = make_inputs(T=1, HV=HV, prior=True)
    inputs['info_scale'] = torch.ones(HV, dtype=torch.float64)
    result = run(naive_recurrent_kdn, inputs, grads=False)
    del inputs['info_scale']
    exact = run(naive_recurrent_exact_kdn, inputs, grads=False)
    assert_close(result['o'], exact['o'], 1e-13, 'o')
    assert_close(result['final_state'], exact['final_state'], 1e-13, 'final_state')
    # the carried variances are those of the channels with all others known
    assert_close(1 / result['final_cov'], torch.linalg.inv(exact['final_cov']).diagonal(dim1=-2, dim2=-1), 1e-12, 'precision')


def test_exact_filter_in_bf16():
    inputs = make_inputs(T=5, dtype=torch.bfloat16) | {'initial_cov': None}
    del inputs['info_scale']
    o, S, P = naive_recurrent_exact_kdn(**inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and S.dtype == P.dtype == torch.float32


def test_isotropic_is_diagonal_for_keys_of_one_channel():
    inputs = make_inputs('diagonal', T=40, K=1)
    diagonal = run(naive_recurrent_kdn, inputs)
    inputs |= {name: inputs[name].squeeze(-1) for name in ('omega', 'initial_cov')}
    isotropic = run(naive_recurrent_kdn, inputs, covariance='isotropic')
    for name, x in diagonal.items():
        x = x.squeeze(-1) if name in ('final_cov', 'domega', 'dinitial_cov') else x
        assert_close(isotropic[name], x, 1e-13, name)


@pytest.mark.parametrize('T', [1, 40])
def test_diagonal_is_exact_for_one_hot_keys(T):
    inputs = make_inputs(T=T)
    inputs['k'] = F.one_hot(torch.randint(8, inputs['k'].shape[:3]), 8) * (0.5 + inputs['k'][..., :1].abs())
    inputs['info_scale'] = torch.ones(2, dtype=torch.float64)
    result = run(naive_recurrent_kdn, inputs, grads=False)
    del inputs['info_scale']
    inputs['initial_cov'] = torch.diag_embed(inputs['initial_cov'])
    exact = run(naive_recurrent_exact_kdn, inputs, grads=False)
    assert_close(result['o'], exact['o'], 1e-13, 'o')
    assert_close(result['final_state'], exact['final_state'], 1e-13, 'final_state')
    assert_close(torch.diag_embed(result['final_cov']), exact['final_cov'], 1e-13, 'final_cov')


def exact_inputs(T, HV=2):
    inputs = make_inputs(T=T, HV=HV, K=4, V=3)
    del inputs['info_scale']
    A = weights((2, HV, 4, 4), seed=9)
    return inputs | {'initial_cov': A @ A.mT + 0.1 * torch.eye(4)}


def test_exact_filter_is_ridge_regression_if_nothing_changes():
    """Without decay and process noise, a prior and all tokens seen so far give the posterior in closed form."""
    inputs = exact_inputs(T=12, HV=4)
    inputs['g'], inputs['omega'] = torch.zeros_like(inputs['g']), torch.zeros_like(inputs['omega'])
    result = run(naive_recurrent_exact_kdn, inputs, grads=False, scale=1.)
    q, k = (inputs[name].repeat_interleave(2, dim=2) for name in ('q', 'k'))
    prior = torch.linalg.inv(inputs['initial_cov'])
    for t in range(12):
        X, y, w = (x[:, :t + 1].transpose(1, 2) for x in (k, inputs['v'], 1 / inputs['r'].unsqueeze(-1)))
        cov = torch.linalg.inv(prior + X.mT @ (w * X))
        mean = cov @ (prior @ inputs['initial_state'] + X.mT @ (w * y))
        assert_close(result['o'][:, t], (q[:, t, ..., None] * mean).sum(-2), 1e-11, f'o of token {t}')
    assert_close(result['final_state'], mean, 1e-11, 'final_state')
    assert_close(result['final_cov'], cov, 1e-11, 'final_cov')


def test_exact_filter_is_the_conditional_of_the_joint_gaussian():
    """Memory, process noise and observations of all tokens as one Gaussian vector; then condition on the observations."""
    T, K = 7, 4
    inputs = exact_inputs(T)
    result = run(naive_recurrent_exact_kdn, inputs, grads=False)
    alpha = inputs['g'].exp()
    for b, h in ((0, 0), (1, 1)):
        # memory after token t = Phi_t x, with x = (memory at the start, noise of token 1, ..., noise of token T)
        cov_x = torch.block_diag(inputs['initial_cov'][b, h], *inputs['omega'][b, :, h].diag_embed())
        mean_x = torch.cat([inputs['initial_state'][b, h], torch.zeros(T * K, 3, dtype=torch.float64)])
        Phi, rows = torch.eye((T + 1) * K, dtype=torch.float64)[:K], []
        for t in range(T):
            Phi = alpha[b, t, h, :, None] * Phi
            Phi[:, (t + 1) * K:(t + 2) * K] += torch.eye(K)
            rows.append(inputs['k'][b, t, h] @ Phi)
        C = torch.stack(rows)
        cov_v = C @ cov_x @ C.mT + inputs['r'][b, :, h].diag()
        gain = Phi @ cov_x @ C.mT @ torch.linalg.inv(cov_v)
        mean = Phi @ mean_x + gain @ (inputs['v'][b, :, h] - C @ mean_x)
        cov = Phi @ cov_x @ Phi.mT - gain @ C @ cov_x @ Phi.mT
        assert_close(result['final_state'][b, h], mean, 1e-11, 'final_state')
        assert_close(result['final_cov'][b, h], cov, 1e-11, 'final_cov')


def surrogate(g, beta, k, mu, covariance):
    """`omega` and `r` that keep the predicted covariance at 1 and so make `beta` the gain."""
    r = 1 / beta - k.square().sum(-1)
    if covariance == 'diagonal':
        a, u = g.exp().square(), mu * k.square() / r.unsqueeze(-1)
    else:
        a, u = g.exp().square().mean(-1), mu * k.square().mean(-1) / r
    p_prev = torch.cat([torch.ones_like(u[:, :1]), 1 / (1 + u[:, :-1])], 1)
    return 1 - a * p_prev, r


@pytest.mark.parametrize('mu', [0.3, None], ids=['mu0.3', 'mu-default'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('model', ['delta_net', 'gated_delta_net', 'kda'])
def test_fixed_gain_reduces_to(model, covariance, mu):
    B, T, H, K = 2, 50, 2, 8
    inputs = make_inputs(B=B, T=T, H=H, HV=H, K=K)
    q, k, v, S0 = inputs['q'], F.normalize(inputs['k'], dim=-1), inputs['v'], inputs['initial_state']
    beta = 0.02 + 0.96 * torch.rand(B, T, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    g = {'delta_net': torch.zeros_like(inputs['g']), 'gated_delta_net': inputs['g'][..., :1].expand_as(inputs['g'])}
    g = g.get(model, inputs['g'])
    if model == 'kda':
        o, S = naive_recurrent_kda(q, k, v, g, beta, initial_state=S0, output_final_state=True)
    elif model == 'gated_delta_net':
        o, S = naive_recurrent_gated_delta_rule(q, k, v, beta, g[..., 0], initial_state=S0, output_final_state=True)
    else:
        o, S = delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), initial_state=S0)
        o = o.transpose(1, 2)
    omega, r = surrogate(g, beta, k, K if mu is None else mu, covariance)
    result = naive_recurrent_kdn(
        q, k, v, g, omega, r, initial_state=S0, output_final_state=True, covariance=covariance, info_scale=mu)
    # FLA computes these in fp32
    assert_close(result[0], o, 1e-6, 'o')
    assert_close(result[1], S, 1e-6, 'final_state')


def test_reduction_to_kda_with_grouped_values():
    inputs = make_inputs(T=30, H=2, HV=4)
    q, k, v, g, S0 = inputs['q'], F.normalize(inputs['k'], dim=-1), inputs['v'], inputs['g'], inputs['initial_state']
    beta = inputs['r'].sigmoid()
    o, S = naive_recurrent_kda(q, k, v, g, beta, scale=0.7, initial_state=S0, output_final_state=True)
    omega, r = surrogate(g, beta, k.repeat_interleave(2, dim=2), 1.5, 'diagonal')
    result = naive_recurrent_kdn(q, k, v, g, omega, r, 0.7, initial_state=S0, output_final_state=True, info_scale=1.5)
    assert_close(result[0], o, 1e-6, 'o')
    assert_close(result[1], S, 1e-6, 'final_state')


@pytest.mark.parametrize('state_v_first', [False, True], ids=['k-first', 'v-first'])
@pytest.mark.parametrize('varlen', [False, True], ids=['dense', 'varlen'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
def test_carried_state_and_covariance_continue_a_sequence(fn, covariance, varlen, state_v_first):
    whole, pieces = cut_sequences(covariance, varlen, dtype=torch.float64, state_v_first=state_v_first)
    want = run(fn, grads=False, **whole)
    state = {}
    for piece, where in pieces:
        got = run(fn, grads=False, **{**piece, 'inputs': piece['inputs'] | state})
        assert_close(got['o'], want['o'][:, where], 1e-13, 'o')
        state = {'initial_state': got['final_state'], 'initial_cov': got['final_cov']}
    assert_close(got['final_state'], want['final_state'], 1e-13, 'final_state')
    assert_close(got['final_cov'], want['final_cov'], 1e-13, 'final_cov')


def test_carried_state_and_covariance_continue_the_exact_filter():
    inputs = exact_inputs(T=20)
    want = run(naive_recurrent_exact_kdn, inputs, grads=False)
    for start, end in ((0, 7), (7, 7), (7, 20)):
        piece = {name: x[:, start:end] if x.shape[1] == 20 else x for name, x in inputs.items()}
        got = run(naive_recurrent_exact_kdn, piece, grads=False)
        assert_close(got['o'], want['o'][:, start:end], 1e-13, 'o')
        inputs |= {'initial_state': got['final_state'], 'initial_cov': got['final_cov']}
    assert_close(got['final_state'], want['final_state'], 1e-13, 'final_state')
    assert_close(got['final_cov'], want['final_cov'], 1e-13, 'final_cov')


OPTIONS = {'use_qk_l2norm_in_kernel': True, 'use_gate_in_kernel': True, 'safe_gate': True, 'lower_bound': -1.}


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
def test_options_do_what_they_say(fn, covariance):
    inputs = make_inputs(covariance, T=20, gate=True)
    got = run(fn, inputs, covariance=covariance, scale=0.3, state_v_first=False, **OPTIONS)

    def by_hand(q, k, g, A_log, dt_bias, **kwargs):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = -A_log.exp()[:, None] * (1 + (g + dt_bias.view(2, 8)).exp()).log()
        return fn(q=0.3 * q, k=k, g=torch.where(g > -1, g, -1.), **kwargs)

    want = run(by_hand, inputs, covariance=covariance, scale=1.)
    for name, x in want.items():
        assert_close(got[name], x, 1e-12, name)
    inputs['initial_state'] = inputs['initial_state'].mT
    v_first = run(fn, inputs, grads=False, covariance=covariance, scale=0.3, state_v_first=True, **OPTIONS)
    assert torch.equal(v_first['final_state'], got['final_state'].mT)
    assert torch.equal(v_first['o'], got['o'])


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
def test_defaults(fn, covariance):
    """Scale 1/sqrt(K), no memory, a prior of 1, `info_scale` K, no final state."""
    inputs = make_inputs(covariance, T=20)
    tokens = {name: inputs[name] for name in ('q', 'k', 'v', 'g', 'omega', 'r')}
    o, *final = fn(**tokens, covariance=covariance)
    assert final == [None, None]
    inputs['initial_state'] = torch.zeros_like(inputs['initial_state'])
    inputs['initial_cov'] = torch.ones_like(inputs['initial_cov'])
    inputs['info_scale'] = torch.full_like(inputs['info_scale'], 8)
    assert_close(o, fn(**inputs, covariance=covariance, scale=8 ** -0.5)[0], 1e-14, 'o')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
def test_low_precision_inputs_are_computed_in_fp32(fn, dtype):
    inputs = make_inputs(T=20, dtype=dtype)
    tol = {'other': 2e-6} if dtype == torch.float32 else {'o': 3e-3, 'dq': 3e-3, 'dk': 3e-3, 'dv': 3e-3, 'other': 2e-6}
    got = check(fn, fn, inputs, tol)
    assert got['o'].dtype == dtype
    assert got['final_state'].dtype == got['final_cov'].dtype == torch.float32


@pytest.mark.parametrize('prior', [True, False], ids=['prior', 'carried'])
@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('chunk_size', [None, 2], ids=['recurrent', 'chunk'])
def test_gradcheck(chunk_size, covariance, prior):
    fn = functools.partial(naive_chunk_kdn, chunk_size=chunk_size) if chunk_size else naive_recurrent_kdn
    inputs = make_inputs(covariance, B=1, T=5, H=1, HV=2, K=3, V=2, gate=True, prior=prior)

    def outputs(*tensors):
        named = dict(zip(inputs, tensors, strict=True))
        return fn(
            **named, covariance=covariance, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs.values()])


@pytest.mark.parametrize('covariance', COVARIANCES)
@pytest.mark.parametrize('fn', [naive_recurrent_kdn, naive_chunk_kdn])
def test_euler_identities(fn, covariance):
    """Scalings that change nothing, or a result in a known way, tie the gradients together: E1 to E3 of the derivation."""
    inputs = make_inputs(covariance, T=70)
    x = inputs | run(fn, inputs, covariance=covariance)
    dcov, dstate = weights(x['final_cov'].shape, 2), weights(x['final_state'].shape, 1)
    diagonal = covariance == 'diagonal'

    def product(name):
        return x[name] * x[f'd{name}']

    def tokens(y):
        return y.sum(1)

    def channels(y):
        return y.sum(-1) if diagonal else y

    # E1: all variances times c
    terms = [channels(product('initial_cov')), channels(tokens(product('omega'))), tokens(product('r'))]
    assert_close(sum(terms), channels(x['final_cov'] * dcov), 1e-12, 'E1')
    # E2: keys and values of a token times c, its observation noise times c^2
    assert_close(product('k').sum(-1) + product('v').sum(-1), -2 * product('r'), 1e-12, 'E2')
    if diagonal:
        # E3: the units of a channel
        variances = product('initial_cov') + tokens(product('omega')) - x['final_cov'] * dcov
        states = (product('initial_state') - x['final_state'] * dstate).sum(-1)
        assert_close(2 * variances + states, tokens(product('k') + product('q')), 1e-12, 'E3')


def log_growth(key, covariance, T=160):
    """Growth a token of the memory for cyclic shifts of a key and values of zero, over the second half of 2T tokens."""
    K = len(key)
    key = F.normalize(torch.tensor(key, dtype=torch.float64), dim=0)
    k = torch.stack([key.roll(-(t % K)) for t in range(2 * T)])[None, :, None]
    g, v, r = torch.zeros_like(k), torch.zeros(1, 2 * T, 1, K, dtype=torch.float64), torch.full(k.shape[:3], 0.01).double()
    fn = functools.partial(naive_recurrent_kdn, covariance=covariance, info_scale=1.)
    fn, shape = (naive_recurrent_exact_kdn, k.shape) if covariance == 'exact' else (fn, k.shape)
    omega = torch.ones(k.shape[:3] if covariance == 'isotropic' else shape, dtype=torch.float64)
    state, norms = {'initial_state': torch.eye(K, dtype=torch.float64)[None, None]}, []
    for half in (slice(0, T), slice(T, 2 * T)):
        _, S, P = fn(*(x[:, half] for x in (k, k, v, g, omega, r)), output_final_state=True, **state)
        state = {'initial_state': S, 'initial_cov': P}
        norms.append(S.norm())
    return ((norms[1] / norms[0]).log() / T).item()


@pytest.mark.parametrize(('key', 'rate'), [
    pytest.param((0.5865, -0.81, 0.), 0.041, id='K3'),
    pytest.param((-0.447, 0.80, 0.39, 0., 0., 0., 0., 0.), 0.276, id='K8'),
])
def test_diagonal_grows_on_cyclic_keys_where_the_others_contract(key, rate):
    """The known limit of the method: with r far below omega and no decay, the diagonal memory is not stable."""
    assert log_growth(key, 'diagonal') == pytest.approx(rate, abs=1e-3)
    assert log_growth(key, 'isotropic') < 0
    assert log_growth(key, 'exact') < 0
