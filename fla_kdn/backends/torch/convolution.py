# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Short causal depthwise convolution for CPU tensors.

Dimensions: B batch, T tokens, D channels, W taps, N sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.modules.causal_conv1d import ops

from fla_kdn.backends.torch.activation import upcast
from fla_kdn.backends.torch.registry import register_torch

_SILU = ('silu', 'swish')


def _lay_out(
    x: torch.Tensor,
    W: int,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, slice | torch.Tensor, slice | torch.Tensor, slice | torch.Tensor]:
    """Copy each sequence of `[B, T, D]` behind the W columns of its initial state, or zeros, into rows of one buffer.

    Besides the buffer, return what indexes its rows: `tokens`, which counts from row W, the tokens in the order of x;
    `first` and `last`, the W rows that hold the initial and the final state of each sequence.
    """
    B, T, D = x.shape
    if cu_seqlens is None:
        N, P = B, T + W
        tokens, first, last = slice(None), slice(W), slice(T, None)
    elif B != 1:
        raise ValueError(f'The batch size is expected to be 1 rather than {B} when using `cu_seqlens`.')
    else:
        N = len(cu_seqlens) - 1
        P = T + N * W
        n, t, w = (torch.arange(size, device=x.device) for size in (N, T, W))
        tokens = t + W * n.repeat_interleave(cu_seqlens.diff())
        first, last = ((ends + W * n)[:, None] + w for ends in (cu_seqlens[:-1], cu_seqlens[1:]))
    buf = x.new_zeros(B, P, D, dtype=torch.promote_types(x.dtype, torch.float32))
    buf[:, W:][:, tokens] = x.to(buf.dtype)
    if initial_state is not None:
        assert initial_state.shape == (N, D, W), f'expected states {(N, D, W)}, got {tuple(initial_state.shape)}'
        buf[:, first] = initial_state.to(buf.dtype).transpose(1, 2)
    return buf, tokens, first, last


def _windows(buf: torch.Tensor, W: int) -> list[torch.Tensor]:
    """The rows that tap w multiplies, for the outputs of row W and on."""
    return [buf[:, w + 1:buf.shape[1] - W + w + 1] for w in range(W)]


def _convolve(buf: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t] = sum_w taps[w] x[t - (W - 1) + w] + bias for row W and on."""
    y = torch.zeros_like(buf[:, len(taps):])
    for tap, rows in zip(taps, _windows(buf, len(taps)), strict=True):
        y.addcmul_(rows, tap)
    return y if bias is None else y + upcast(bias)


def _states(buf: torch.Tensor, rows: slice | torch.Tensor, W: int) -> torch.Tensor:
    return buf[:, rows].reshape(-1, W, buf.shape[-1]).transpose(1, 2).contiguous()


@register_torch(ops.causal_conv1d_fwd)
def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    W = weight.shape[1]
    buf, tokens, _, last = _lay_out(x.flatten(2), W, initial_state, cu_seqlens)
    y = _convolve(buf, upcast(weight).t().contiguous(), bias)[:, tokens]
    if activation in _SILU:
        y = F.silu(y)
    if residual is not None:
        y = y + residual.reshape(y.shape)
    return y.to(x.dtype).view(x.shape), _states(buf, last, W).to(x.dtype) if output_final_state else None


@register_torch(ops.causal_conv1d_bwd)
@torch.no_grad()
def causal_conv1d_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    dht: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    W = weight.shape[1]
    taps = upcast(weight).t().contiguous()
    buf, tokens, first, last = _lay_out(x.flatten(2), W, initial_state, cu_seqlens)
    dz = torch.zeros_like(buf[:, W:])
    dz[:, tokens] = dy.flatten(2).to(buf.dtype)
    if activation in _SILU:
        dz = torch.ops.aten.silu_backward(dz, _convolve(buf, taps, bias))
    dbuf = torch.zeros_like(buf)
    dw = torch.empty_like(taps)
    for w, (rows, drows) in enumerate(zip(_windows(buf, W), _windows(dbuf, W), strict=True)):
        drows.addcmul_(dz, taps[w])
        dw[w] = (dz * rows).sum((0, 1))
    if dht is not None:
        dbuf[:, last] += dht.to(buf.dtype).transpose(1, 2)
    return (
        dbuf[:, W:][:, tokens].to(x.dtype).reshape(x.shape),
        dw.t().to(weight.dtype),
        dz.sum((0, 1)).to(bias.dtype) if bias is not None else None,
        dy if residual is not None else None,
        _states(dbuf, first, W).to(initial_state.dtype) if initial_state is not None else None,
    )


@register_torch(ops.causal_conv1d_update)
def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per sequence, x of `[N, D]`, `[1, N, D]` or `[N, 1, D]`; `cache` `[N, D, W]` moves on in place."""
    window = torch.cat((cache[..., 1:], x.reshape(*cache.shape[:2], 1)), -1)
    cache.copy_(window)
    y = (upcast(window) * upcast(weight)).sum(-1)
    if bias is not None:
        y = y + upcast(bias)
    if activation in _SILU:
        y = F.silu(y)
    if residual is not None:
        y = y + residual.reshape(y.shape)
    return y.to(x.dtype).view(x.shape), cache
