# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""SwiGLU and PowGLU for CPU tensors, and the precision rule that all replacements follow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from fla.modules.activations import ops

from fla_kdn.backends.torch.registry import register_torch

if TYPE_CHECKING:
    from collections.abc import Callable


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Compute in fp32 as the kernels do; float64 stays, so that gradients can be checked numerically."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _powlu(x: torch.Tensor, power: float) -> torch.Tensor:
    # where x <= 0 the power sees 1: a NaN in the branch not taken would still reach the gradient
    pos = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, pos ** (power / (pos.sqrt() + 1)), x) * x.sigmoid()


def _glu_fwd(gate: Callable, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.shape == y.shape, f'shape mismatch x={x.shape} y={y.shape}'
    return (gate(upcast(x)) * upcast(y)).to(x.dtype)


def _glu_fwdbwd(
    gate: Callable,
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    use_weight: bool,
) -> tuple[torch.Tensor, ...]:
    assert x.shape == y.shape == g.shape, f'shape mismatch x={x.shape} y={y.shape} g={g.shape}'
    with torch.enable_grad():
        x_, y_ = (upcast(t.detach()).requires_grad_() for t in (x, y))
        z = gate(x_) * y_
    dx, dy = torch.autograd.grad(z, (x_, y_), g.to(z.dtype))
    grads = dx.to(x.dtype), dy.to(y.dtype)
    return (*grads, z.detach().to(x.dtype)) if use_weight else grads


@register_torch(ops.swiglu_fwd)
def swiglu_fwd(x: torch.Tensor, y: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    return _glu_fwd(F.silu, x, y)


@register_torch(ops.swiglu_fwdbwd)
def swiglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    return _glu_fwdbwd(F.silu, x, y, g, use_weight)


@register_torch(ops.swiglu_linear)
def swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # the fused autograd function binds its autocast handling to the GPU, which leaves its backward with mixed dtypes here
    return F.linear(ops.swiglu(x, y), weight, bias)


@register_torch(ops.powglu_fwd)
def powglu_fwd(x: torch.Tensor, y: torch.Tensor, power: float = 3.0, output_contiguous: bool = False) -> torch.Tensor:
    return _glu_fwd(partial(_powlu, power=power), x, y)


@register_torch(ops.powglu_fwdbwd)
def powglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    power: float = 3.0,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    return _glu_fwdbwd(partial(_powlu, power=power), x, y, g, use_weight)


@register_torch(ops.powglu_linear)
def powglu_linear(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    power: float = 3.0,
) -> torch.Tensor:
    return F.linear(ops.powglu(x, y, power), weight, bias)
