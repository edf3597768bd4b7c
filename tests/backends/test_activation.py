# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fla.modules import GatedMLP
from fla.modules.activations.ops import (
    powglu,
    powglu_fwdbwd,
    powglu_linear,
    swiglu,
    swiglu_fwdbwd,
    swiglu_linear,
)

import fla_kdn.backends.torch.activation  # noqa: F401

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def powlu_ref(x):
    """Element by element; swish where x <= 0."""
    gates = [t ** (3.0 / (t.sqrt() + 1)) if t > 0 else t for t in x.flatten()]
    return torch.stack(gates).view(x.shape) * x.sigmoid()


GATES = {'swish': (F.silu, swiglu, swiglu_linear), 'powlu': (powlu_ref, powglu, powglu_linear)}


def check(fn, ref, *inputs):
    """Outputs and the gradient of every input against those of `ref` on float64 copies."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    copies = [x.detach().double().requires_grad_() for x in inputs]
    out, want = fn(*inputs), ref(*copies)
    dout = torch.randn_like(out)
    results = (out, *torch.autograd.grad(out, inputs, dout)), (want, *torch.autograd.grad(want, copies, dout.double()))
    tol = TOLERANCE[inputs[0].dtype]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)
    assert out.dtype == inputs[0].dtype


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('act', GATES)
def test_gated_unit(act, dtype):
    torch.manual_seed(0)
    gate, glu, glu_linear = GATES[act]
    x, y, weight, bias = (torch.randn(*s, dtype=dtype) for s in ((2, 5, 8), (2, 5, 8), (6, 8), (6,)))
    check(glu, lambda x, y: gate(x) * y, x, y)
    check(glu_linear, lambda x, y, w, b: F.linear(gate(x) * y, w, b), x, y, weight, bias)
    # both halves of one projection, each a view with the stride of the whole
    check(lambda xy: glu(*xy.chunk(2, -1)), lambda xy: gate(xy[..., :8]) * xy[..., 8:], torch.randn(2, 5, 16, dtype=dtype))
    check(lambda x, y: glu(x.mT, y.mT), lambda x, y: (gate(x) * y).mT, x, y)


@pytest.mark.parametrize(('glu', 'fwdbwd'), [(swiglu, swiglu_fwdbwd), (powglu, powglu_fwdbwd)])
def test_backward_recomputes_the_output(glu, fwdbwd):
    x, y, g = torch.randn(3, 2, 8)
    assert len(fwdbwd(x, y, g)) == 2
    torch.testing.assert_close(fwdbwd(x, y, g, use_weight=True)[2], glu(x, y))


@pytest.mark.parametrize('act', GATES)
def test_gradient_is_finite_at_and_around_zero(act):
    x = torch.tensor([-30.0, -1e-30, -0.0, 0.0, 1e-30, 30.0], requires_grad=True)
    dx, = torch.autograd.grad(GATES[act][1](x, torch.ones_like(x)).sum(), x)
    assert dx.isfinite().all()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('fuse_swiglu', [True, False])
@pytest.mark.parametrize('act', GATES)
def test_gated_mlp(act, fuse_swiglu, dtype):
    torch.manual_seed(0)
    mlp = GatedMLP(8, intermediate_size=12, hidden_act=act, fuse_swiglu=fuse_swiglu).to(dtype)
    names = [name for name, _ in mlp.named_parameters()]
    assert names == ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight']
    check(
        lambda x, *params: torch.func.functional_call(mlp, dict(zip(names, params, strict=True)), (x,)),
        lambda x, gate, up, down: (GATES[act][0](x @ gate.t()) * (x @ up.t())) @ down.t(),
        torch.randn(2, 5, 8, dtype=dtype), *mlp.parameters(),
    )


@pytest.mark.parametrize('act', GATES)
def test_autocast(act):
    """Fused and unfused agree under CPU autocast, with gradients in the dtype of the parameters."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    mlps = [GatedMLP(8, intermediate_size=12, hidden_act=act, fuse_swiglu=fused) for fused in (True, False)]
    mlps[1].load_state_dict(mlps[0].state_dict())
    results = []
    for mlp in mlps:
        with torch.autocast('cpu', torch.bfloat16):
            out = mlp(x)
        out.float().square().sum().backward()
        assert out.dtype == torch.bfloat16
        results.append((out, *[p.grad for p in mlp.parameters()]))
    torch.testing.assert_close(*results)


def test_shape_mismatch():
    with pytest.raises(AssertionError, match='shape mismatch'):
        swiglu(torch.randn(2, 8), torch.randn(1, 8))
