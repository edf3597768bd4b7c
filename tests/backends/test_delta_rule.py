# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""FLA's KDA and GatedDeltaNet on CPU tensors, against FLA's own loops and a float64 loop with all options and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.naive import naive_recurrent_kda

import fla_kdn  # noqa: F401
from fla_kdn.backends.torch import delta_rule as backend

KDA = [chunk_kda, fused_recurrent_kda]
GDN = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-3}
# sequences of 0, 3, 15, 0, 65, 64, 7 and 0 tokens
CU_SEQLENS = [0, 0, 3, 18, 18, 83, 147, 154, 154]


def parametrize_ops():
    return pytest.mark.parametrize('op', KDA + GDN, ids=lambda op: op.__name__)


def make_inputs(op, B=2, T=70, H=2, HV=4, K=8, V=6, N=None, dtype=torch.float64, seed=0):
    """`g` is a log decay, `beta` in (0, 1); both, and the state, in at least fp32."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    channels = (K,) if op in KDA else ()
    inputs = {
        'q': randn(B, T, H, K),
        'k': randn(B, T, H, K) / K ** 0.5,
        'v': randn(B, T, HV, V),
        'g': -0.2 * F.softplus(randn(B, T, HV, *channels)),
        'beta': randn(B, T, HV).sigmoid(),
        'initial_state': randn(N or B, HV, K, V),
    }
    gate = {'A_log': 0.5 * randn(HV), 'dt_bias': randn(HV * K if op in KDA else HV)}
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    inputs, gate = ({name: x.to(dtype if name in ('q', 'k', 'v') else kept) for name, x in d.items()} for d in (inputs, gate))
    return inputs, gate


def loop(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    state_v_first=False, cu_seqlens=None, A_log=None, dt_bias=None, chunk_size=None,
):
    """The gated delta rule, token by token, in float64."""
    HV, K = v.shape[2], q.shape[-1]
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
    if use_gate_in_kernel:
        if dt_bias is not None:
            g = g + dt_bias.view(HV, -1)
        if lower_bound is not None:
            g = lower_bound * ((1 if A_log is None else A_log.exp()[:, None]) * g).sigmoid()
        else:
            g = -A_log.exp()[:, None] * F.softplus(g)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    if cu_seqlens is None:
        sequences = [(n, slice(0, q.shape[1])) for n in range(len(q))]
    else:
        sequences = [(0, slice(start, end)) for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
    outputs, states = [], []
    for n, (row, tokens) in enumerate(sequences):
        S = q.new_zeros(HV, K, v.shape[-1]) if initial_state is None else initial_state[n]
        o = []
        for q_t, k_t, v_t, g_t, b_t in zip(*(x[row, tokens] for x in (q, k, v, g, beta)), strict=True):
            S = g_t.exp()[..., None] * S
            e = v_t - (k_t[..., None] * S).sum(-2)
            S = S + b_t[:, None, None] * k_t[..., None] * e[..., None, :]
            o.append((K ** -0.5 if scale is None else scale) * (q_t[..., None] * S).sum(-2))
        outputs.append(torch.stack(o) if o else v[row, tokens])
        states.append(S)
    o, S = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None], torch.stack(states)
    return o, S.mT if state_v_first else S


def run(fn, inputs, grads, options):
    leaves = {name: x.detach().clone().requires_grad_(grads) for name, x in inputs.items()}
    outputs = fn(**leaves, output_final_state=True, **options)
    results = dict(zip(('o', 'final_state'), outputs, strict=True))
    if grads:
        loss = 0
        for seed, x in enumerate(results.values()):
            weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            loss = loss + (x.double() * weight).sum()
        results |= zip((f'd{name}' for name in leaves), torch.autograd.grad(loss, list(leaves.values())), strict=True)
    return results


def check(op, inputs, tol, dg_tol=None, **options):
    """Outputs, and the gradients of ops that have them, against the loop on float64 copies."""
    grads = op in (chunk_kda, chunk_gated_delta_rule)
    got = run(op, inputs, grads, options)
    want = run(loop, {name: x.double() for name, x in inputs.items()}, grads, options)
    for name, x in got.items():
        bound = dg_tol if name == 'dg' and dg_tol else tol
        assert_close(x, want[name], max(bound, TOLERANCE[torch.bfloat16]) if x.dtype == torch.bfloat16 else bound, name)
    return got


@pytest.mark.parametrize('T', [1, 15, 63, 64, 65, 130])
@parametrize_ops()
def test_against_the_loops_of_fla(op, T):
    inputs, _ = make_inputs(op, T=T, H=2, HV=2, dtype=torch.float32)
    o, S = op(**inputs, output_final_state=True)
    naive = naive_recurrent_kda if op in KDA else naive_recurrent_gated_delta_rule
    want = naive(**inputs, output_final_state=True)
    assert_close(o, want[0], 2e-6, 'o')
    assert_close(S, want[1], 2e-6, 'final_state')


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('B', 'T', 'H', 'HV', 'K', 'V'), [
    pytest.param(*case, id='B{}-T{}-H{}-HV{}-K{}-V{}'.format(*case))
    for case in [
        (2, 1, 2, 2, 8, 8),
        (2, 17, 1, 3, 9, 4),
        (1, 64, 2, 2, 7, 8),
        (2, 65, 2, 4, 12, 6),
        (1, 200, 1, 1, 16, 24),
    ]
])
@parametrize_ops()
def test_shapes_and_types(op, B, T, H, HV, K, V, dtype):
    inputs, _ = make_inputs(op, B, T, H, HV, K, V, dtype=dtype)
    got = check(op, inputs, TOLERANCE[torch.float32 if dtype == torch.bfloat16 else dtype])
    assert got['o'].dtype == dtype
    assert got['final_state'].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@parametrize_ops()
def test_type_of_the_output(op):
    """FLA's chunked forms return that of q, its recurrent forms that of v."""
    inputs, _ = make_inputs(op, T=5, dtype=torch.float32)
    inputs['q'], inputs['k'] = inputs['q'].bfloat16(), inputs['k'].bfloat16()
    o, _ = op(**inputs)
    assert o.dtype == (torch.bfloat16 if op in (chunk_kda, chunk_gated_delta_rule) else torch.float32)


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('options', [
    pytest.param({'scale': 0.3}, id='scale'),
    pytest.param({'use_qk_l2norm_in_kernel': True}, id='l2norm'),
    pytest.param({'use_beta_sigmoid_in_kernel': True}, id='beta-sigmoid'),
    pytest.param(
        {'use_beta_sigmoid_in_kernel': True, 'allow_neg_eigval': True, 'use_qk_l2norm_in_kernel': True}, id='neg-eigval'),
    pytest.param({'state_v_first': True}, id='v-first'),
    pytest.param({'use_gate_in_kernel': True}, id='gate'),
    pytest.param({'use_gate_in_kernel': True, 'no': ['dt_bias']}, id='gate-no-bias'),
    pytest.param({'no': ['initial_state']}, id='no-state'),
])
@parametrize_ops()
def test_options(op, options, dtype):
    options = dict(options)
    inputs, gate = make_inputs(op, dtype=dtype)
    if options.get('state_v_first'):
        inputs['initial_state'] = inputs['initial_state'].mT
    if options.get('use_gate_in_kernel'):
        inputs |= gate | {'g': 10 * inputs['g'] + 1}
    if options.get('use_beta_sigmoid_in_kernel'):
        inputs['beta'] = inputs['beta'].logit()
    for name in options.pop('no', ()):
        del inputs[name]
    # FLA computes its gates in fp32
    check(op, inputs, 1e-5 if 'use_gate_in_kernel' in options else TOLERANCE[dtype], **options)


@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'no-bias'])
@pytest.mark.parametrize('scaled', [True, False], ids=['A', 'no-A'])
@pytest.mark.parametrize(('op', 'options'), [
    pytest.param(chunk_kda, {'safe_gate': True}, id='chunk-safe'),
    pytest.param(chunk_kda, {}, id='chunk'),
    pytest.param(fused_recurrent_kda, {}, id='recurrent'),
])
def test_lower_bound_gate(op, options, scaled, bias):
    inputs, gate = make_inputs(op)
    inputs['g'] = 10 * inputs['g'] + 1
    inputs |= {name: x for name, x in gate.items() if {'A_log': scaled, 'dt_bias': bias}[name]}
    check(op, inputs, 1e-5, use_gate_in_kernel=True, lower_bound=-3., **options)


@pytest.mark.parametrize('state_v_first', [False, True], ids=['k-first', 'v-first'])
@pytest.mark.parametrize('int_dtype', [torch.int32, torch.int64], ids=str)
@parametrize_ops()
def test_varlen(op, int_dtype, state_v_first):
    inputs, _ = make_inputs(op, B=1, T=CU_SEQLENS[-1], N=len(CU_SEQLENS) - 1)
    if state_v_first:
        inputs['initial_state'] = inputs['initial_state'].mT
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=int_dtype)
    got = check(op, inputs, 1e-12, cu_seqlens=cu_seqlens, state_v_first=state_v_first)
    for n in (0, 3, 7):
        assert torch.equal(got['final_state'][n], inputs['initial_state'][n])
    if op in (chunk_kda, chunk_gated_delta_rule):
        with_cpu = op(**inputs, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens, state_v_first=state_v_first)[0]
        assert torch.equal(with_cpu, got['o'])


@pytest.mark.parametrize(('op', 'chunk_size'), [
    (chunk_kda, 32), (chunk_kda, 64), (chunk_gated_delta_rule, 16), (chunk_gated_delta_rule, 32), (chunk_gated_delta_rule, 64),
])
def test_chunk_size(op, chunk_size):
    inputs, _ = make_inputs(op, T=100)
    check(op, inputs, 1e-12, chunk_size=chunk_size)


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('decay', [-2., -20., -1000.])
@pytest.mark.parametrize('where', ['at-times', 'from-a-token-on', 'everywhere'])
@parametrize_ops()
def test_strong_decay(op, where, decay, dtype):
    inputs, _ = make_inputs(op, T=150, dtype=dtype)
    g, t = inputs['g'], torch.arange(150).view(-1, *[1] * (inputs['g'].ndim - 2))
    strong = {
        'at-times': torch.rand(g.shape, generator=torch.Generator().manual_seed(0)) < 0.1,
        'from-a-token-on': (t >= 37).expand(g.shape),
        'everywhere': torch.ones_like(g, dtype=torch.bool),
    }[where]
    inputs['g'] = g.where(~strong, decay)
    # what has decayed everywhere leaves next to no gradient
    check(op, inputs, 1e-11 if dtype == torch.float64 else 5e-6, dg_tol=1e-5 if where == 'everywhere' else None)


@pytest.mark.parametrize('dtype', DTYPES[:2], ids=str)
@pytest.mark.parametrize('resets', [False, True], ids=['', 'resets'])
@pytest.mark.parametrize('spread', [0.1, 1.])
@parametrize_ops()
def test_decays_of_both_signs(op, spread, resets, dtype):
    """Whitened memories grow at times; the sum of the log decays stays bounded above."""
    inputs, _ = make_inputs(op, T=150, dtype=dtype)
    level = spread * torch.randn(inputs['g'].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs['g'] = (inputs['g'] + level - F.pad(level, (0, 0) * (level.ndim - 2) + (1, 0))[:, :-1]).to(dtype)
    if resets:
        inputs['g'][:, 10::30] = -60
    assert inputs['g'].gt(0).double().mean() > 0.1
    check(op, inputs, 1e-10 if dtype == torch.float64 else 1e-5, use_qk_l2norm_in_kernel=True)


def test_growth_of_one_channel_only():
    inputs, _ = make_inputs(chunk_kda, T=150)
    inputs['g'][..., 0] = 0.1
    check(chunk_kda, inputs, 1e-10, use_qk_l2norm_in_kernel=True)


def test_safe_gate_takes_any_decay():
    inputs, _ = make_inputs(chunk_kda, T=100)
    inputs['g'][:, ::3] = -30
    one, two = (chunk_kda(**inputs, safe_gate=safe)[0] for safe in (False, True))
    assert torch.equal(one, two)


@parametrize_ops()
def test_no_tokens(op):
    inputs, _ = make_inputs(op, T=0)
    o, S = op(**inputs, output_final_state=True)
    assert o.shape == inputs['v'].shape
    assert torch.equal(S, inputs['initial_state'])
    del inputs['initial_state']
    assert op(**inputs, output_final_state=True)[1].eq(0).all()


@parametrize_ops()
def test_no_final_state_unless_asked(op):
    inputs, _ = make_inputs(op, T=5)
    assert op(**inputs)[1] is None


@parametrize_ops()
def test_autocast_changes_nothing(op):
    inputs, _ = make_inputs(op, dtype=torch.float32)
    want = op(**inputs, output_final_state=True)
    with torch.autocast('cpu', torch.bfloat16):
        got = op(**inputs, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize('op', [chunk_kda, chunk_gated_delta_rule])
def test_backward_under_autocast_changes_nothing(op):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(op, dtype=torch.float32)[0].items()}
    o, _ = op(**inputs)
    want = torch.autograd.grad(o.sum(), inputs.values(), retain_graph=True)
    with torch.autocast('cpu', torch.bfloat16):
        got = torch.autograd.grad(o.sum(), inputs.values())
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_gated_delta_net_without_decay():
    inputs, _ = make_inputs(fused_recurrent_gated_delta_rule)
    zero = inputs | {'g': torch.zeros_like(inputs['g'])}
    del inputs['g']
    one, two = (fused_recurrent_gated_delta_rule(**x)[0] for x in (inputs, zero))
    assert torch.equal(one, two)


def test_recurrent_forms_have_no_gradient():
    inputs = {name: x.requires_grad_() for name, x in make_inputs(fused_recurrent_kda, T=5)[0].items()}
    assert not fused_recurrent_kda(**inputs)[0].requires_grad
    inputs = {name: x.requires_grad_() for name, x in make_inputs(fused_recurrent_gated_delta_rule, T=5)[0].items()}
    o, _ = fused_recurrent_gated_delta_rule(**inputs)
    with pytest.raises(NotImplementedError):
        o.sum().backward()


def test_recurrent_kda_writes_the_state_in_place():
    inputs, _ = make_inputs(fused_recurrent_kda, T=5)
    want = fused_recurrent_kda(**inputs, output_final_state=True)
    out = torch.zeros_like(inputs['v'])
    o, S = fused_recurrent_kda_fwd(**inputs, scale=8 ** -0.5, inplace_final_state=True, out=out)
    assert o is out
    assert S is inputs['initial_state']
    assert torch.equal(o, want[0])
    assert torch.equal(S, want[1])
    with pytest.raises(ValueError, match='needs an `initial_state`'):
        fused_recurrent_kda_fwd(**{name: x for name, x in inputs.items() if name != 'initial_state'})


@pytest.mark.filterwarnings('error::DeprecationWarning')
@parametrize_ops()
def test_former_name_of_state_v_first(op):
    inputs, _ = make_inputs(op, T=5)
    inputs['initial_state'] = inputs['initial_state'].mT
    with pytest.warns(DeprecationWarning, match='`transpose_state_layout` is deprecated'):
        old = op(**inputs, output_final_state=True, transpose_state_layout=True)
    new = op(**inputs, output_final_state=True, state_v_first=True)
    assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))
    with pytest.raises(ValueError, match='Cannot pass both'):
        op(**inputs, transpose_state_layout=True, state_v_first=True)


@parametrize_ops()
def test_bad_arguments(op):
    inputs, gate = make_inputs(op, T=6)
    packed, _ = make_inputs(op, B=1, T=6, N=2)
    three = torch.tensor([0, 2, 4, 6])
    for changes, match in [
        (inputs | {'cu_seqlens': torch.tensor([0, 3, 6])}, 'batch size is expected to be 1 rather than 2'),
        (packed | {'cu_seqlens': three}, '3 rather than 2'),
        (inputs | {'q': inputs['q'][:, :, :1]}, 'same (shape|number of heads)'),
        (inputs | {name: x[:, :, :3] for name, x in inputs.items() if name in ('v', 'g', 'beta')}
         | {'initial_state': inputs['initial_state'][:, :3]}, 'multiple'),
        (inputs | {'allow_neg_eigval': True}, '`allow_neg_eigval=True` requires'),
        (inputs | {'use_gate_in_kernel': True}, '`?A_log`? must be provided'),
    ]:
        with pytest.raises((ValueError, AssertionError), match=match):
            op(**changes)
    if op in (chunk_kda, chunk_gated_delta_rule):
        for chunk_size in (8, 48, 128):
            with pytest.raises(ValueError, match='`chunk_size` must be'):
                op(**inputs, chunk_size=chunk_size)
    if op is chunk_gated_delta_rule:
        with pytest.raises(DeprecationWarning, match='head_first'):
            op(**inputs, head_first=True)
    if op is chunk_kda:
        with pytest.raises(ValueError, match='`initial_state` must be in float32, got torch.bfloat16'):
            op(**inputs | {'initial_state': inputs['initial_state'].bfloat16()})
        for lower_bound in (None, -5.5, 0., math.nan):
            with pytest.raises(ValueError, match='`lower_bound` must be'):
                op(**inputs, **gate, use_gate_in_kernel=True, safe_gate=True, lower_bound=lower_bound)


@pytest.mark.parametrize('name', ['g', 'beta'])
@parametrize_ops()
def test_gates_need_their_own_heads(op, name):
    """One of H = 1 query heads must not spread over the value heads: a GPU would read past the end."""
    inputs, _ = make_inputs(op, T=6, H=1, HV=4)
    with pytest.raises((ValueError, AssertionError), match=f'`?{name}`? must have shape'):
        op(**inputs | {name: inputs[name][:, :, :1]})


@parametrize_ops()
def test_gates_have_the_rank_of_the_op(op):
    inputs, _ = make_inputs(op, T=6)
    g = inputs['g'][..., 0] if op in KDA else inputs['g'][..., None].expand(-1, -1, -1, 8)
    with pytest.raises((ValueError, AssertionError), match='`?g`? must have shape'):
        op(**inputs | {'g': g})


@pytest.mark.parametrize(('op', 'name', 'value'), [
    (chunk_kda, 'cp_context', object()),
    (chunk_kda, 'return_intermediate_states', True),
    (chunk_kda, 'use_graph', True),
    (chunk_gated_delta_rule, 'cp_context', object()),
    (fused_recurrent_gated_delta_rule, 'gk', torch.zeros(2, 6, 4, 8)),
    (fused_recurrent_gated_delta_rule, 'gv', torch.zeros(2, 6, 4, 6)),
    (fused_recurrent_kda, 'beta', torch.ones(2, 6, 4, 6)),
    (fused_recurrent_gated_delta_rule, 'beta', torch.ones(2, 6, 4, 6)),
    (fused_recurrent_kda_fwd, 'ssm_state_indices', torch.zeros(2, dtype=torch.long)),
    (fused_recurrent_kda_fwd, 'num_accepted_tokens', torch.ones(2, dtype=torch.long)),
], ids=lambda x: getattr(x, '__name__', x if isinstance(x, str) else ''))
def test_refused_features(op, name, value):
    inputs, _ = make_inputs(fused_recurrent_kda if op is fused_recurrent_kda_fwd else op, T=6)
    shown = 'beta_of_each_value_channel' if name == 'beta' else name
    with pytest.raises(NotImplementedError, match=f'Not supported for CPU tensors: {shown}'):
        op(**inputs | {name: value})


@pytest.fixture
def pytorch_is_not_used(monkeypatch):
    monkeypatch.setattr(backend, 'delta_rule', lambda **kwargs: pytest.fail('PyTorch was used'))


@parametrize_ops()
def test_environment_switch(op, monkeypatch, pytorch_is_not_used):
    """`FLA_TORCH=0` leaves the call to Triton, which cannot run on CPU tensors."""
    monkeypatch.setenv('FLA_TORCH', '0')
    inputs, _ = make_inputs(op, T=6, dtype=torch.float32)
    with pytest.raises((RuntimeError, ValueError)):
        op(**inputs)


@pytest.mark.parametrize('name', ['q', 'beta', 'initial_state'])
@parametrize_ops()
def test_one_tensor_elsewhere_leaves_the_call_to_triton(op, name, pytorch_is_not_used):
    inputs, _ = make_inputs(op, T=6, dtype=torch.float32)
    with pytest.raises((RuntimeError, ValueError)):
        op(**inputs | {name: inputs[name].to('meta')})
