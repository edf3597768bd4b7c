# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Layer, RMS, group and L2 norms, with and without an output gate, for CPU tensors.

Dimensions: T rows (tokens times groups), D features of a row, G groups.

A backward takes statistics that the forward kept as constants. It builds no graph, as the kernels do not: a second derivative
through it would be wrong.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.modules.norm import fused_norm_gate, l2norm, layernorm

from fla_kdn.backends.torch.activation import upcast
from fla_kdn.backends.torch.registry import register_torch


def _check_shapes(rows: list[torch.Tensor | None], params: list[torch.Tensor | None], num_groups: int = 1) -> None:
    T, D = rows[0].shape
    for x in rows:
        assert x is None or x.shape == (T, D), f'expected shape {(T, D)}, got {tuple(x.shape)}'
    for p in params:
        assert p is None or p.shape == (num_groups * D,), f'expected shape {(num_groups * D,)}, got {tuple(p.shape)}'


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int) -> torch.Tensor:
    # the G rows of a token are adjacent, so together they line up with the [G * D] parameters
    y = x.reshape(-1, num_groups * x.shape[1])
    y = y if weight is None else y * upcast(weight)
    y = y if bias is None else y + upcast(bias)
    return y.reshape(x.shape)


def _norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    residual_dtype: torch.dtype | None,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the norm of h = x + residual, the statistics of h, and h in the dtype to keep it in."""
    _check_shapes([x, residual], [weight, bias], num_groups)
    h = upcast(x)
    if residual is not None:
        h, residual_dtype = h + upcast(residual), residual.dtype
    h_out = x if residual is None and residual_dtype is None else h.to(residual_dtype)
    mean = None
    if not is_rms_norm:
        mean = h.mean(-1)
        h = h - mean[:, None]
    rstd = (h.square().mean(-1) + eps).rsqrt()
    return _affine(h * rstd[:, None], weight, bias, num_groups), mean, rstd, h_out


def _norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dres: torch.Tensor | None,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Return the gradients of h (`x` here), weight and bias, and the output before these two."""
    _check_shapes([x, dy, dres], [weight, bias], num_groups)
    xhat = (upcast(x) if mean is None else upcast(x) - mean[:, None]) * rstd[:, None]
    params = -1, num_groups * x.shape[1]
    dw = (dy * xhat).reshape(params).sum(0).to(weight.dtype) if weight is not None else None
    db = dy.reshape(params).sum(0).to(bias.dtype) if bias is not None else None
    dxhat = _affine(dy, weight, None, num_groups)
    dx = dxhat - xhat * (xhat * dxhat).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - dxhat.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    return dx if dres is None else dx + upcast(dres), dw, db, xhat


@register_torch(layernorm.layer_norm_fwd)
def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    y, *kept = _norm_fwd(x, weight, bias, eps, residual, residual_dtype, is_rms_norm, num_groups)
    return y.to(out_dtype or x.dtype), *kept


@register_torch(layernorm.layer_norm_bwd)
@torch.no_grad()
def layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    dres: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor | None, ...]:
    dx, dw, db, xhat = _norm_bwd(upcast(dy), x, weight, bias, mean, rstd, dres, num_groups)
    grads = dx.to(x_dtype or x.dtype), dw, db, dx.to(x.dtype) if has_residual else None
    return (*grads, _affine(xhat, weight, bias, num_groups).to(dy.dtype)) if recompute_output else grads


def _gate_fwd(g: torch.Tensor, activation: str) -> torch.Tensor:
    return g.sigmoid() if activation == 'sigmoid' else F.silu(g)


def _gate_bwd(dy: torch.Tensor, g: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == 'sigmoid':
        return torch.ops.aten.sigmoid_backward(dy, g.sigmoid())
    return torch.ops.aten.silu_backward(dy, g)


@register_torch(fused_norm_gate.layer_norm_gated_fwd)
def layer_norm_gated_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = 'swish',
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    _check_shapes([x, g], [])
    y, *kept = _norm_fwd(x, weight, bias, eps, residual, residual_dtype, is_rms_norm)
    return (y * _gate_fwd(upcast(g), activation)).to(out_dtype or x.dtype), *kept


@register_torch(fused_norm_gate.layer_norm_gated_bwd)
@torch.no_grad()
def layer_norm_gated_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = 'swish',
    eps: float = 1e-5,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    dresidual: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    _check_shapes([x, g, dy], [])
    gate, dz = _gate_fwd(upcast(g), activation), upcast(dy)
    dx, dw, db, xhat = _norm_bwd(dz * gate, x, weight, bias, mean, rstd, dresidual)
    y = _affine(xhat, weight, bias, 1)
    dg = _gate_bwd(dz * y, upcast(g), activation)
    grads = dx.to(x_dtype or x.dtype), dg.to(x_dtype or g.dtype), dw, db, dx.to(x.dtype) if has_residual else None
    return (*grads, (y * gate).to(dy.dtype)) if recompute_output else grads


@register_torch(l2norm.l2norm_fwd)
def l2norm_fwd(
    x: torch.Tensor,
    eps: float = 1e-6,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = (upcast(x).square().sum(-1) + eps).rsqrt()
    return (upcast(x) * rstd[..., None]).to(output_dtype or x.dtype), rstd


@register_torch(l2norm.l2norm_bwd)
@torch.no_grad()
def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    assert dy.shape == y.shape, f'expected shape {tuple(y.shape)}, got {tuple(dy.shape)}'
    yf, dyf = upcast(y), upcast(dy)
    return ((dyf - yf * (yf * dyf).sum(-1, keepdim=True)) * rstd[..., None]).to(y.dtype)
