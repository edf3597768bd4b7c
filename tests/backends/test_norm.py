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
from fla.modules import (
    FusedLayerNormGated,
    FusedRMSNormGated,
    FusedRMSNormSwishGateLinear,
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    RMSNorm,
)
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import layer_norm, rms_norm

import fla_kdn.backends.torch.norm  # noqa: F401
from fla_kdn.backends.torch.registry import on_cpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}
GATES = {'swish': F.silu, 'silu': F.silu, 'sigmoid': torch.sigmoid}
EPS = 1e-5


def check(fn, ref, *inputs, tol=None):
    """Outputs and the gradient of every input against those of `ref` on float64 copies."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    copies = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for f, args in ((fn, inputs), (ref, copies)):
        out = f(*args)
        out = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(0)
        dout = [torch.randn(o.shape, generator=generator).to(inputs[0].dtype).to(o.dtype) for o in out]
        results.append((*out, *torch.autograd.grad(out, args, dout)))
    tol = tol or TOLERANCE[inputs[0].dtype]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)
    return results[0]


def parametrize(module, *args, dtype, **kwargs):
    """A module with random parameters, and those parameters."""
    module = module(*args, eps=EPS, **kwargs).to(dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p, mean=0.5)
    return module, list(module.parameters())


def call(module, params, *args, **kwargs):
    """Run the module on the tensors `params` in place of its own parameters."""
    names = [name for name, _ in module.named_parameters()]
    return torch.func.functional_call(module, dict(zip(names, params, strict=True)), args, kwargs)


def norm_ref(x, weight=None, bias=None, residual=None, num_groups=1, is_rms_norm=False):
    h = x if residual is None else x + residual
    y = h.unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        y = y - y.mean(-1, keepdim=True)
    y = (y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), h


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('residual', [None, 'residual', 'prenorm', 'fp32'])
@pytest.mark.parametrize(('module', 'args', 'kwargs', 'options'), [
    pytest.param(RMSNorm, (24,), {}, {'is_rms_norm': True}, id='rms'),
    pytest.param(RMSNorm, (24,), {'elementwise_affine': False}, {'is_rms_norm': True}, id='rms-plain'),
    pytest.param(LayerNorm, (24,), {'bias': True}, {}, id='layer'),
    pytest.param(GroupNorm, (3, 24), {'bias': True}, {'num_groups': 3}, id='group'),
    pytest.param(GroupNorm, (3, 24), {'is_rms_norm': True}, {'num_groups': 3, 'is_rms_norm': True}, id='group-rms'),
])
def test_norm(module, args, kwargs, options, residual, dtype):
    torch.manual_seed(0)
    norm, params = parametrize(module, *args, dtype=dtype, **kwargs)
    x, r = torch.randn(2, 5, 24, dtype=dtype), torch.randn(2, 5, 24, dtype=dtype)
    streams = (x, r) if residual in ('residual', 'prenorm') else (x,)
    prenorm = residual in ('prenorm', 'fp32')

    def fn(*inputs):
        streams_, params_ = inputs[:len(streams)], inputs[len(streams):]
        return call(norm, params_, *streams_, prenorm=prenorm, residual_in_fp32=residual == 'fp32')

    def ref(*inputs):
        streams_, params_ = inputs[:len(streams)], inputs[len(streams):]
        outputs = norm_ref(streams_[0], *params_, residual=None if len(streams) == 1 else streams_[1], **options)
        return outputs if prenorm else outputs[0]

    # a residual stream kept in fp32 rounds float64 inputs
    tol = max(TOLERANCE[dtype], TOLERANCE[torch.float32]) if residual == 'fp32' else None
    out = check(fn, ref, *streams, *params, tol=tol)
    assert out[0].dtype == dtype
    if prenorm:
        assert out[1].dtype == (torch.float32 if residual == 'fp32' else dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('activation', GATES)
@pytest.mark.parametrize('prenorm', [False, True])
@pytest.mark.parametrize(('module', 'kwargs'), [(FusedRMSNormGated, {}), (FusedLayerNormGated, {'bias': True})])
def test_gated_norm(module, kwargs, prenorm, activation, dtype):
    torch.manual_seed(0)
    norm, params = parametrize(module, 16, activation=activation, dtype=dtype, **kwargs)
    x, g, r = (torch.randn(2, 3, 4, 16, dtype=dtype) for _ in range(3))

    def ref(x, g, r, *params):
        y, h = norm_ref(x, *params, residual=r, is_rms_norm=module is FusedRMSNormGated)
        y = y * GATES[activation](g)
        return (y, h) if prenorm else y

    out = check(lambda x, g, r, *params: call(norm, params, x, g, residual=r, prenorm=prenorm), ref, x, g, r, *params)
    assert out[0].dtype == dtype


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_norm_linear(dtype):
    """The backward of these recomputes the norm's output."""
    torch.manual_seed(0)
    x, g, w, b = (torch.randn(*s, dtype=dtype) for s in ((2, 5, 12), (2, 5, 12), (7, 12), (7,)))
    norm, params = parametrize(GroupNormLinear, 2, 12, bias=True, dtype=dtype)
    check(
        lambda x, w, b, *params: call(norm, params, x, w, b),
        lambda x, w, b, *params: norm_ref(x, *params, num_groups=2)[0] @ w.t() + b,
        x, w, b, *params,
    )
    gated, params = parametrize(FusedRMSNormSwishGateLinear, 12, dtype=dtype)
    check(
        lambda x, g, w, b, *params: call(gated, params, x, g, w, b),
        lambda x, g, w, b, *params: (norm_ref(x, *params, is_rms_norm=True)[0] * GATES['swish'](g)) @ w.t() + b,
        x, g, w, b, *params,
    )


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_l2norm(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 16, dtype=dtype)
    check(lambda x: l2norm(x, eps=1e-6), lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), x)
    assert l2norm(x).dtype == dtype
    assert l2norm(x, output_dtype=torch.float32).dtype == torch.float32


def test_norm_of_no_tokens():
    norm = RMSNorm(8)
    x = torch.randn(1, 0, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape
    assert norm.weight.grad.eq(0).all()


def test_norm_rejects_mismatched_shapes():
    x = torch.randn(4, 8)
    with pytest.raises(AssertionError, match=r'expected shape \(8,\), got \(4,\)'):
        rms_norm(x, torch.ones(4), None)
    with pytest.raises(AssertionError, match=r'expected shape \(8,\), got \(1,\)'):
        layer_norm(x, torch.ones(8), torch.zeros(1))


def test_backward_builds_no_graph():
    """A second derivative has to fail: it would take the saved statistics as constants."""
    x = torch.randn(4, 8, requires_grad=True)
    dx, = torch.autograd.grad(RMSNorm(8)(x).square().sum(), x, create_graph=True)
    assert not dx.requires_grad


def test_verifier_requires_every_tensor_on_the_cpu():
    here, elsewhere = torch.zeros(2), torch.zeros(2, device='meta')
    assert on_cpu(here, None, 1.0, 'swish', [here, None], bias=here) == (True, None)
    for args, kwargs in [
        ((here, elsewhere), {}),
        ((here,), {'cu_seqlens_cpu': elsewhere}),
        ((here, [here, elsewhere]), {}),
        ((here,), {'residuals': (here, elsewhere)}),
    ]:
        accepted, reason = on_cpu(*args, **kwargs)
        assert not accepted
        assert 'meta' in reason
    assert not on_cpu(None, 1.0)[0]


def test_environment_switch(monkeypatch):
    """`FLA_TORCH=0` leaves the call to Triton, which cannot run on a CPU tensor."""
    norm, x = RMSNorm(8), torch.randn(2, 8)
    norm(x)
    monkeypatch.setenv('FLA_TORCH', '0')
    with pytest.raises((RuntimeError, ValueError)):
        norm(x)
    monkeypatch.setenv('FLA_TORCH', '1')
    norm(x)
