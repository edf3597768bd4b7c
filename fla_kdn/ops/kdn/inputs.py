# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What every form of KDN does with its arguments before the recurrence: checks, and the activation of the decay.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F

COVARIANCES = ('diagonal', 'isotropic')
# smallest predicted covariance: without process noise a decaying one would reach zero, whose logarithm is not finite
MIN_COVARIANCE = 1e-12
# floor of the log decay under `safe_gate`: the bound of the kernels that it allows
LOWER_BOUND = -5.


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def num_sequences(q: torch.Tensor, cu_seqlens: torch.LongTensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """Log decay of each token from `g` `[B, T, HV, K]`: `-exp(A_log) * softplus(g + dt_bias)` if `A_log` is given, else `g`;
    under `safe_gate` not below `lower_bound`."""
    if A_log is not None:
        if dt_bias is not None:
            g = g + dt_bias.to(g.dtype).view(g.shape[2:])
        g = -A_log.to(g.dtype).exp().unsqueeze(-1) * F.softplus(g)
    if safe_gate:
        g = g.clamp(min=LOWER_BOUND if lower_bound is None else lower_bound)
    return g


def noise(
    omega: torch.Tensor,
    r: torch.Tensor,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variances of process and observation noise: as given, or `softplus(omega)` and `r_min + softplus(r)`."""
    return (F.softplus(omega), r_min + F.softplus(r)) if use_noise_softplus_in_kernel else (omega, r)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def expand_info_scale(info_scale: float | torch.Tensor | None, q: torch.Tensor, num_v_heads: int) -> torch.Tensor:
    """`info_scale` as a tensor `[HV]`; `None` is the size K of a key."""
    dtype = compute_dtype(q)
    if isinstance(info_scale, torch.Tensor):
        return info_scale.to(dtype)
    return torch.full((num_v_heads,), q.shape[-1] if info_scale is None else info_scale, dtype=dtype, device=q.device)


def expand_cov(
    initial_cov: torch.Tensor | None,
    covariance: str,
    q: torch.Tensor,
    num_v_heads: int,
    cu_seqlens: torch.LongTensor | None = None,
) -> torch.Tensor:
    """Covariance before the first token, `[N, HV, K]` (diagonal) or `[N, HV, 1]` (isotropic), from `initial_cov`: a prior of
    each head `[HV]`, one carried over, or `None`, a prior of 1."""
    N, K, dtype = num_sequences(q, cu_seqlens), q.shape[-1], compute_dtype(q)
    shape = (N, num_v_heads, K if covariance == 'diagonal' else 1)
    if initial_cov is None:
        return torch.ones(shape, dtype=dtype, device=q.device)
    p = initial_cov.to(dtype)
    if p.ndim == 1:
        return p.view(1, -1, 1).expand(shape)
    return p if covariance == 'diagonal' else p.unsqueeze(-1)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    initial_state: torch.Tensor | None,
    initial_cov: torch.Tensor | None,
    covariance: str,
    info_scale: float | torch.Tensor | None,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.LongTensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
    output_uncertainty: bool | str = False,
    scale: float | None = None,
    check_values: bool = False,
) -> None:
    """Raise a `ValueError` that names the argument, what it is and what was expected.

    Shapes and types are always checked. Values (finite, `omega >= 0`, `r > 0`, the contents of `cu_seqlens`) are checked for
    CPU tensors, on request, and everywhere under `FLA_KDN_DEBUG=1`: on a GPU each such check waits for the device.
    """
    if covariance not in COVARIANCES:
        raise ValueError(f'`covariance` must be one of {COVARIANCES}, got {covariance!r}.')
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f'`q` and `k` must have the same shape [B, T, H, K]; got {list(q.shape)} and {list(k.shape)}.')
    B, T, H, K = q.shape
    if v.ndim != 4 or v.shape[:2] != (B, T):
        raise ValueError(f'`v` must have shape [B, T, HV, V] with B={B} and T={T}; got {list(v.shape)}.')
    HV, V = v.shape[2:]
    if 0 in (H, K, HV, V):
        raise ValueError(f'Heads and their sizes must be positive; got `q` {list(q.shape)} and `v` {list(v.shape)}.')
    if HV % H != 0:
        raise ValueError(f'The number of value heads must be a multiple of the number of query heads; got HV={HV} and H={H}.')
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f'`q`, `k` and `v` must have one floating-point type; got {q.dtype}, {k.dtype} and {v.dtype}.')
    for name, x in {'g': g, 'omega': omega, 'r': r, 'A_log': A_log, 'dt_bias': dt_bias, 'info_scale': info_scale}.items():
        if isinstance(x, torch.Tensor) and not x.is_floating_point():
            raise ValueError(f'`{name}` must have a floating-point type, got {x.dtype}.')
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f'`scale` must be finite, got {scale}.')
    diagonal = covariance == 'diagonal'
    check_shape('g', g, (B, T, HV, K), '[B, T, HV, K]')
    if diagonal:
        check_shape('omega', omega, (B, T, HV, K), "[B, T, HV, K] (covariance='diagonal')")
    else:
        check_shape('omega', omega, (B, T, HV), "[B, T, HV] (covariance='isotropic')")
    check_shape('r', r, (B, T, HV), '[B, T, HV]')

    check_cu_seqlens(cu_seqlens, B, T, check_values)
    N = num_sequences(q, cu_seqlens)
    if initial_state is not None:
        if initial_state.shape[0] != N:
            raise ValueError(
                f'The number of initial states is expected to be equal to the number of input sequences, '
                f'i.e., {N} rather than {initial_state.shape[0]}.',
            )
        shape, names = ((N, HV, V, K), '[N, HV, V, K]') if state_v_first else ((N, HV, K, V), '[N, HV, K, V]')
        check_shape('initial_state', initial_state, shape, names)
        check_state_dtype('initial_state', initial_state, q)
    if initial_cov is not None:
        if initial_cov.ndim == 1:
            check_shape('initial_cov', initial_cov, (HV,), '[HV]')
        else:
            shape, names = ((N, HV, K), '[N, HV, K]') if diagonal else ((N, HV), '[N, HV]')
            check_shape('initial_cov', initial_cov, shape, f'[HV] or {names} (covariance={covariance!r})')
        check_state_dtype('initial_cov', initial_cov, q)

    if isinstance(info_scale, torch.Tensor):
        check_shape('info_scale', info_scale, (HV,), '[HV]')
    elif info_scale is not None and not 0 < info_scale < math.inf:
        raise ValueError(f'`info_scale` must be positive and finite, got {info_scale}.')
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError('`A_log` must be provided when `use_gate_in_kernel=True`.')
        check_shape('A_log', A_log, (HV,), '[HV]')
        if dt_bias is not None:
            check_shape('dt_bias', dt_bias, (HV * K,), '[HV * K]')
    elif A_log is not None or dt_bias is not None:
        raise ValueError('`A_log` and `dt_bias` are only used with `use_gate_in_kernel=True`.')
    if lower_bound is not None:
        if not safe_gate:
            raise ValueError('`lower_bound` is the floor of the log decay under `safe_gate=True`, but `safe_gate=False`.')
        if not LOWER_BOUND <= lower_bound < 0:
            raise ValueError(f'`lower_bound` must be in the safe range [{LOWER_BOUND:g}, 0), got {lower_bound}.')

    if output_uncertainty not in (False, True, 'log_likelihood'):
        raise ValueError(f"`output_uncertainty` must be False, True or 'log_likelihood', got {output_uncertainty!r}.")
    if not 0 <= r_min < math.inf:
        raise ValueError(f'`r_min` must be finite and not negative, got {r_min}.')
    if r_min > 0 and not use_noise_softplus_in_kernel:
        raise ValueError('`r_min` is only used with `use_noise_softplus_in_kernel=True`.')

    if check_values or _are_values_checked(q):
        _check_values(
            q, k, v, g, omega, r, initial_state, initial_cov, info_scale, A_log, dt_bias,
            noise_is_raw=use_noise_softplus_in_kernel,
        )


def check_cu_seqlens(cu_seqlens: torch.LongTensor | None, B: int, T: int, check_values: bool = False) -> None:
    """Raise a `ValueError` unless `cu_seqlens`, if given, divides one row of T tokens; values as in :func:`check_inputs`."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, torch.Tensor):
        raise ValueError(f'`cu_seqlens` must be a tensor of integers of shape [N+1], got {type(cu_seqlens).__name__}.')
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f'`cu_seqlens` must be integers of shape [N+1], N >= 1; got {cu_seqlens.dtype} {list(cu_seqlens.shape)}.',
        )
    if B != 1:
        raise ValueError(
            f'The batch size is expected to be 1 rather than {B} when using `cu_seqlens`. '
            f'Please flatten variable-length inputs before processing.',
        )
    if check_values or _are_values_checked(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != T or any(s > e for s, e in zip(bounds, bounds[1:], strict=False)):
            shown = bounds if len(bounds) <= 12 else f'{bounds[:6]} ... {bounds[-6:]}'
            raise ValueError(f'`cu_seqlens` must start at 0, never decrease and end at T={T}, got {shown}.')


def _are_values_checked(x: torch.Tensor) -> bool:
    return x.device.type == 'cpu' or os.environ.get('FLA_KDN_DEBUG') == '1'


def check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], names: str) -> None:
    if x.shape != shape:
        raise ValueError(f'`{name}` must have shape {names} = {list(shape)}, got {list(x.shape)}.')


def check_state_dtype(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, compute_dtype(q)):
        expected = 'float32 or float64' if q.dtype == torch.float64 else 'float32'
        raise ValueError(f'`{name}` must be in {expected}, got {x.dtype}.')


def _check_values(
    q, k, v, g, omega, r, initial_state, initial_cov, info_scale, A_log, dt_bias, noise_is_raw,
) -> None:
    others = {'initial_state': initial_state, 'initial_cov': initial_cov, 'A_log': A_log, 'dt_bias': dt_bias}
    for name, x in {'q': q, 'k': k, 'v': v, 'g': g, 'omega': omega, 'r': r, **others}.items():
        if x is not None and not x.isfinite().all():
            raise ValueError(f'`{name}` has values that are not finite (shape {list(x.shape)}).')
    for name, x in {'omega': None if noise_is_raw else omega, 'initial_cov': initial_cov}.items():
        if x is not None and (x < 0).any():
            raise ValueError(f'`{name}` must not be negative, got {x.min().item():.4g} (shape {list(x.shape)}).')
    if not noise_is_raw and not (r > 0).all():
        raise ValueError(f'`r` must be positive, got {r.min().item():.4g} (shape {list(r.shape)}).')
    if isinstance(info_scale, torch.Tensor) and not ((info_scale > 0) & info_scale.isfinite()).all():
        raise ValueError(f'`info_scale` must be positive and finite, got {info_scale.tolist()}.')
