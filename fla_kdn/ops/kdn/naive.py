# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Kalman Delta Networks, token by token and chunk by chunk, in plain PyTorch: the ground truth of every other form.

A memory `S` [K, V] is the mean, and `P` the covariance, of what a linear-Gaussian model believes after each token. Per token:

    (1) predict memory       S^_t = Diag(alpha_t) S_{t-1}                          alpha_t = e^{g_t}
    (2) predict covariance   P^_t = Diag(alpha_t) P_{t-1} Diag(alpha_t) + Omega_t
    (3) Kalman gain          kappa_t = P^_t k_t / (r_t + k_t^T P^_t k_t)
    (4) innovation           e_t = v_t - S^_t^T k_t
    (5) update memory        S_t = S^_t + kappa_t e_t^T
    (6) update covariance    P_t = (I - kappa_t k_t^T) P^_t                         exact
                             1 / p_t = 1 / p^_t + mu k_t^2 / r_t                    diagonal, P = Diag(p)
                             1 / b_t = 1 / b^_t + mu |k_t|^2 / (K r_t)              isotropic, P = b I
    (7) read                 o_t = scale S_t^T q_t

mu is `info_scale`. The isotropic variant is the diagonal one with `alpha^2` and `k^2` averaged over the channels.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes, BT chunk size.
Everything is computed in float64 if `q` is float64, else in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_kdn.ops.kdn.inputs import (
    MIN_COVARIANCE,
    check_inputs,
    check_shape,
    check_state_dtype,
    compute_dtype,
    expand_cov,
    expand_info_scale,
    l2norm,
    log_decay,
    noise,
    num_sequences,
)
from fla_kdn.ops.kdn.uncertainty import make_uncertainty

if TYPE_CHECKING:
    from fla_kdn.ops.kdn.uncertainty import KDNResult


def naive_recurrent_kdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_cov: torch.Tensor | None = None,
    output_final_state: bool = False,
    covariance: str = 'diagonal',
    info_scale: float | torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
    output_uncertainty: bool | str = False,
) -> KDNResult:
    """KDN as a loop over tokens, with the returns of :func:`chunk_kdn` and its arguments but those that only serve kernels,
    `cu_seqlens_cpu` and `cp_context`; the uncertainty, too, has gradients."""
    return _run(_recurrent, **locals())


def naive_chunk_kdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_cov: torch.Tensor | None = None,
    output_final_state: bool = False,
    covariance: str = 'diagonal',
    info_scale: float | torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
    output_uncertainty: bool | str = False,
    chunk_size: int = 64,
) -> KDNResult:
    """KDN chunk by chunk, with the arguments and returns of :func:`naive_recurrent_kdn`.

    The covariance of a chunk is a composition of Möbius maps, its memory update a WY form whose read key is `k` and whose
    write key is the gain `kappa`.
    """
    return _run(_chunk, **locals())


def naive_recurrent_exact_kdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_cov: torch.Tensor | None = None,
    output_final_state: bool = False,
    output_uncertainty: bool | str = False,
) -> KDNResult:
    """KDN with the full covariance: the exact Kalman filter, for small K.

    Args:
        q, k, v, g, omega, r (torch.Tensor):
            As in :func:`chunk_kdn` with `covariance='diagonal'`; `g` is the log decay itself.
        initial_state (torch.Tensor, Optional):
            Memory of shape `[B, HV, K, V]`. Default: `None`, zeros.
        initial_cov (torch.Tensor, Optional):
            Prior variance of each head `[HV]`, or a covariance `[B, HV, K, K]`. Default: `None`, the identity.

    Returns:
        `o` `[B, T, HV, V]`, if `output_final_state` the memory `[B, HV, K, V]` and the covariance `[B, HV, K, K]`, and if
        `output_uncertainty` a :class:`KDNUncertainty`.
    """
    full_cov = initial_cov is not None and initial_cov.ndim != 1
    check_inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        omega=omega,
        r=r,
        initial_state=initial_state,
        initial_cov=None if full_cov else initial_cov,
        covariance='diagonal',
        info_scale=None,
        use_gate_in_kernel=False,
        safe_gate=False,
        lower_bound=None,
        state_v_first=False,
        cu_seqlens=None,
        A_log=None,
        dt_bias=None,
        output_uncertainty=output_uncertainty,
        scale=scale,
        check_values=True,
    )
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if full_cov:
        check_shape('initial_cov', initial_cov, (B, HV, K, K), '[HV] or [B, HV, K, K]')
        check_state_dtype('initial_cov', initial_cov, q)
        if not initial_cov.isfinite().all() or (initial_cov.diagonal(dim1=-2, dim2=-1) < 0).any():
            raise ValueError('`initial_cov` must be finite, and its diagonal not negative.')
    dtype, o_dtype = compute_dtype(q), v.dtype
    scale = K ** -0.5 if scale is None else scale
    q, k = (x.to(dtype).repeat_interleave(HV // H, dim=2) for x in (q, k))
    v, g, omega, r = (x.to(dtype) for x in (v, g, omega, r))
    S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    P = initial_cov.to(dtype) if full_cov else torch.diag_embed(expand_cov(initial_cov, 'diagonal', q, HV))
    o, variances = [], []
    for t in range(T):
        alpha_t, k_t, q_t = g[:, t].exp(), k[:, t], q[:, t]
        S_hat = alpha_t[..., None] * S                                                        # (1)
        P_hat = alpha_t[..., None] * P * alpha_t[..., None, :] + torch.diag_embed(omega[:, t])  # (2)
        Pk = (P_hat * k_t[..., None, :]).sum(-1)
        n = (k_t * Pk).sum(-1)
        kappa = Pk / (r[:, t] + n).unsqueeze(-1)                                              # (3)
        e = v[:, t] - (k_t[..., None] * S_hat).sum(-2)                                        # (4)
        S = S_hat + kappa[..., None] * e[..., None, :]                                        # (5)
        P = P_hat - kappa[..., None] * Pk[..., None, :]                                       # (6)
        o.append(scale * (q_t[..., None] * S).sum(-2))                                        # (7)
        variances.append((n, torch.einsum('bhi,bhij,bhj->bh', q_t, P, q_t), e.square().sum(-1)))
    o = torch.stack(o, 1).to(o_dtype) if T else v.to(o_dtype)
    result = (o, S, P) if output_final_state else (o, None, None)
    if not output_uncertainty:
        return result
    n, read_variance, squared_innovation = (torch.stack(x, 1) for x in zip(*variances, strict=True)) if T else [r] * 3
    return *result, make_uncertainty(r, n, read_variance, squared_innovation, V, output_uncertainty)


def _recurrent(q, k, v, g, omega, r, S, p, mu, pool):
    """`q, k, g` [N, T, HV, K], `v` [N, T, HV, V], `omega` [N, T, HV, K or 1], `r` [N, T, HV, 1], `mu` [HV, 1].

    Besides outputs and final state return `k^T Phat k`, `q^T P q` and `|e|^2` [N, T, HV].
    """
    o, variances = [], []
    for t in range(q.shape[1]):
        q_t, k_t, r_t, alpha_t = q[:, t], k[:, t], r[:, t], g[:, t].exp()
        S_hat = alpha_t[..., None] * S                                                        # (1)
        p_hat = (pool(alpha_t.square()) * p + omega[:, t]).clamp(min=MIN_COVARIANCE)          # (2)
        n = (p_hat * k_t.square()).sum(-1, keepdim=True)
        kappa = p_hat * k_t / (r_t + n)                                                       # (3)
        e = v[:, t] - (k_t[..., None] * S_hat).sum(-2)                                        # (4)
        S = S_hat + kappa[..., None] * e[..., None, :]                                        # (5)
        p = p_hat / (1 + mu * pool(k_t.square()) / r_t * p_hat)                               # (6)
        o.append((q_t[..., None] * S).sum(-2))                                                # (7)
        variances.append((n.squeeze(-1), (p * q_t.square()).sum(-1), e.square().sum(-1)))
    if not o:
        return v, S, p, *[v[..., 0]] * 3
    return torch.stack(o, 1), S, p, *(torch.stack(x, 1) for x in zip(*variances, strict=True))


def _chunk(q, k, v, g, omega, r, S, p, mu, pool, chunk_size):
    if q.shape[1] == 0:
        return v, S, p, *[v[..., 0]] * 3
    o, variances = [], []
    a, u = pool(g.exp().square()), mu * pool(k.square()) / r
    u_prev = torch.cat((torch.zeros_like(u[:, :1]), u[:, :-1]), 1)
    p_hat = p
    for q_c, k_c, v_c, g_c, omega_c, r_c, a_c, u_c in zip(
        *(x.transpose(1, 2).split(chunk_size, dim=2) for x in (q, k, v, g, omega, r, a, u_prev)), strict=True,
    ):
        with torch.no_grad():
            floored = _predict(p_hat, a_c, omega_c, u_c) < MIN_COVARIANCE
        # the map of a token on the floor is constant
        a_c, omega_c, u_c = (x.masked_fill(floored, at) for x, at in ((a_c, 0), (omega_c, MIN_COVARIANCE), (u_c, 0)))
        p_hat_c = _predict(p_hat, a_c, omega_c, u_c)                                          # (2), (6)
        p_hat = p_hat_c[:, :, -1]
        n = (p_hat_c * k_c.square()).sum(-1, keepdim=True)
        kappa = p_hat_c * k_c / (r_c + n)                                                     # (3)

        # innovations of the chunk: e = (I + A)^{-1} (v - Diag(e^G) k S), A_ij = k_i^T Diag(e^{G_i - G_j}) kappa_j for j < i
        G = g_c.cumsum(2)
        causal = torch.ones(G.shape[2], G.shape[2], dtype=torch.bool, device=q.device).tril()
        decay = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(~causal[..., None], float('-inf')).exp()
        A_kk = torch.einsum('nhik,nhijk,nhjk->nhij', k_c, decay, kappa).tril(-1)
        A_qk = torch.einsum('nhik,nhijk,nhjk->nhij', q_c, decay, kappa)
        e = torch.linalg.solve_triangular(A_kk, v_c - (k_c * G.exp()) @ S, upper=False, unitriangular=True)   # (4)
        o.append(((q_c * G.exp()) @ S + A_qk @ e).transpose(1, 2))                            # (7)
        S = G[:, :, -1].exp().unsqueeze(-1) * S + (kappa * (G[:, :, -1:] - G).exp()).transpose(-1, -2) @ e    # (1), (5)
        p_c = p_hat_c / (1 + mu.unsqueeze(1) * pool(k_c.square()) / r_c * p_hat_c)            # (6)
        variances.append((n.squeeze(-1), (p_c * q_c.square()).sum(-1), e.square().sum(-1)))
    variances = (torch.cat(x, 2).transpose(1, 2) for x in zip(*variances, strict=True))
    return torch.cat(o, 1), S, p_c[:, :, -1], *variances


def _predict(p_hat, a, omega, u_prev):
    """phat of each token [N, HV, BT, C] from that of the token before the first one [N, HV, C], as products of Möbius maps.

    phat_t = N_t(phat_{t-1}) with N_t = [[a_t + omega_t u_{t-1}, omega_t], [u_{t-1}, 1]], where u_0 = 0 and phat_0 = p_0.
    """
    maps, M = [], torch.eye(2, dtype=p_hat.dtype, device=p_hat.device)
    for a_t, omega_t, u_t in zip(a.unbind(2), omega.unbind(2), u_prev.unbind(2), strict=True):
        N_t = torch.stack((a_t + omega_t * u_t, omega_t, u_t, torch.ones_like(u_t)), -1).unflatten(-1, (2, 2))
        M = N_t @ M
        # a map is the same after scaling, and its last entry never falls below 1
        M = M / M[..., 1:, 1:]
        maps.append(M)
    M, p_hat = torch.stack(maps, 2), p_hat.unsqueeze(2)
    return (M[..., 0, 0] * p_hat + M[..., 0, 1]) / (M[..., 1, 0] * p_hat + 1)


def _run(
    kernel, q, k, v, g, omega, r, scale, initial_state, initial_cov, output_final_state, covariance, info_scale,
    use_qk_l2norm_in_kernel, use_gate_in_kernel, safe_gate, lower_bound, state_v_first, cu_seqlens, A_log, dt_bias,
    use_noise_softplus_in_kernel, r_min, output_uncertainty, **kwargs,
):
    """Check and prepare the arguments, then run `kernel` on each sequence."""
    check_inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        omega=omega,
        r=r,
        initial_state=initial_state,
        initial_cov=initial_cov,
        covariance=covariance,
        info_scale=info_scale,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        use_noise_softplus_in_kernel=use_noise_softplus_in_kernel,
        r_min=r_min,
        output_uncertainty=output_uncertainty,
        scale=scale,
        check_values=True,
    )
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    dtype, o_dtype = compute_dtype(q), v.dtype
    p = expand_cov(initial_cov, covariance, q, HV, cu_seqlens)
    mu = expand_info_scale(info_scale, q, HV).unsqueeze(-1)
    if initial_state is None:
        S = q.new_zeros(num_sequences(q, cu_seqlens), HV, K, V, dtype=dtype)
    else:
        S = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(dtype)

    q, k, v, g, omega, r = (x.to(dtype) for x in (q, k, v, g, omega, r))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = log_decay(g, A_log, dt_bias, safe_gate, lower_bound)
    omega, r = noise(omega, r, use_noise_softplus_in_kernel, r_min)
    if covariance == 'isotropic':
        omega = omega.unsqueeze(-1)
    tokens = (q, k, v, g, omega, r.unsqueeze(-1))

    def pool(x):
        return x if covariance == 'diagonal' else x.mean(-1, keepdim=True)

    if cu_seqlens is None:
        o, S, p, *variances = kernel(*tokens, S, p, mu, pool, **kwargs)
    else:
        lens = cu_seqlens.diff().tolist()
        sequences = zip(*(x.split(lens, dim=1) for x in tokens), S.split(1), p.split(1), strict=True)
        results = [kernel(*sequence, mu, pool, **kwargs) for sequence in sequences]
        o, S, p, *variances = (
            torch.cat(x, dim) for x, dim in zip(zip(*results, strict=True), (1, 0, 0, 1, 1, 1), strict=True)
        )
    o = (o * (K ** -0.5 if scale is None else scale)).to(o_dtype)
    if output_final_state:
        S, p = S.transpose(-1, -2).contiguous() if state_v_first else S, p if covariance == 'diagonal' else p.squeeze(-1)
    else:
        S = p = None
    if not output_uncertainty:
        return o, S, p
    n, read_variance, squared_innovation = variances
    return o, S, p, make_uncertainty(r, n, read_variance, squared_innovation, V, output_uncertainty)
