# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The gain stage: from what a KDN token says (q, k, g, omega, r) to what KDA's memory kernels take (q', k', g', beta').

Diagonal KDN is KDA in whitened coordinates. With the predicted covariance phat_t and s_t = sqrt(phat_t),

    q'_t = s_t q_t    k'_t = s_t k_t    beta'_t = 1 / (r_t + |k'_t|^2)    g'_t = g_t + (log phat_{t-1} - log phat_t) / 2

KDA run on these gives the outputs of KDN, and the memory in the coordinates S' = S / s: S'_0 = S_0 / sqrt(p_0) goes in and
S_T = sqrt(phat_T) S'_T comes out (phat_0 stands for p_0). Isotropic KDN is KDA with beta'_t = bhat_t / (r_t + bhat_t |k_t|^2).

What is left is the covariance, a recurrence of Möbius maps for each channel:

    phat_t = a_t m_{t-1} phat_{t-1} + omega_t     m_t = 1 / (1 + u_t phat_t)     a_t = e^{2 g_t}     u_t = mu k_t^2 / r_t

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes, C = K (diagonal) or
1 (isotropic) channels of the covariance, NC chunks, BT chunk size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fla_kdn.ops.kdn.inputs import (
    MIN_COVARIANCE,
    compute_dtype,
    expand_cov,
    expand_info_scale,
    l2norm,
    log_decay,
    noise,
)
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE, ChunkLayout


class Gain(NamedTuple):
    """What the memory kernels take, and the covariance that comes out.

    Attributes:
        q, k (torch.Tensor):
            `[B, T, HV, K]` whitened (diagonal), or `[B, T, H, K]` (isotropic).
        g (torch.Tensor):
            Log decay of each token (natural log) of the whitened memory, `[B, T, HV, K]`.
        beta (torch.Tensor):
            `[B, T, HV]`.
        initial_scale, final_scale (torch.Tensor | None):
            `sqrt(p_0)` and `sqrt(phat_T)`, `[N, HV, K]`; `None` if isotropic.
        final_cov (torch.Tensor):
            Covariance after the last token, `[N, HV, K]` (diagonal) or `[N, HV]` (isotropic).
        variances (tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None):
            r, `k^T Phat k` and `q^T P q`, each `[B, T, HV]`, if asked for.
    """

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_scale: torch.Tensor | None
    final_scale: torch.Tensor | None
    final_cov: torch.Tensor
    variances: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


class CovarianceScan(torch.autograd.Function):
    """Predicted covariance phat `[B, T, HV, C]` of every token from `a, omega, u` `[B, T, HV, C]` and `p0` `[N, HV, C]`.

    Forward: the prefix maps of every chunk, N_t = [[a_t + omega_t u_{t-1}, omega_t], [u_{t-1}, 1]], are composed position by
    position, for all chunks at once; then p before each chunk, chunk by chunk; then phat of all tokens from there. The u
    before a chunk is in that p and not in the maps, where its square would come up before anything bounds it.
    Backward: Lam_t = p_t dL/dp_t obeys Lam_{t-1} = f_t (L_t + m_t Lam_t) with L_t = phat_t * (explicit dL/dphat_t) and
    f_t = a_t p_{t-1} / phat_t; an affine scan in reverse, with coefficients f_t m_t in [0, 1], in the same three steps.
    """

    @staticmethod
    def forward(ctx, a, omega, u, p0, cu_seqlens):
        layout = ChunkLayout(a, CHUNK_SIZE, cu_seqlens)
        u_prev = _shift(u, cu_seqlens)
        a_c, omega_c, u_c = (layout.pack(x).transpose(0, 1).contiguous() for x in (a, omega, u_prev))
        u_before, u_c[0] = u_c[0].clone(), 0
        # normalised by its last entry, which never falls below 1: three numbers for each map
        m00, m01, m10 = (torch.empty_like(a_c) for _ in range(3))
        x00, x01, x10 = torch.ones_like(a_c[:1]), torch.zeros_like(a_c[:1]), torch.zeros_like(a_c[:1])
        for i in range(layout.chunk_size):
            a_i, omega_i, u_i = a_c[i:i + 1], omega_c[i:i + 1], u_c[i:i + 1]
            x10 = torch.addcmul(x10, u_i, x00)
            x11 = 1 + u_i * x01
            x00 = torch.addcmul(a_i * x00, omega_i, x10).div_(x11)
            x01 = torch.addcmul(a_i * x01, omega_i, x11).div_(x11)
            x10 = x10 / x11
            m00[i:i + 1], m01[i:i + 1], m10[i:i + 1] = x00, x01, x10

        # of the last token so far; the first chunks have p0 before them, and u_before is 0
        p_hat, starts = layout.sort(p0), []
        for n, u_n, a00, a01, a10 in zip(
            layout.sizes, *(x.split(layout.sizes) for x in (u_before, m00[-1], m01[-1], m10[-1])), strict=True,
        ):
            p = p_hat[:n] / (1 + u_n * p_hat[:n])
            starts.append(p)
            p_hat = (a00 * p + a01) / (a10 * p + 1)
        starts = torch.cat([p0[:0], *starts])
        p_hat = layout.unpack(((m00 * starts + m01) / (m10 * starts + 1)).transpose(0, 1)).clamp(min=MIN_COVARIANCE)
        ctx.save_for_backward(a, u, p0, p_hat, cu_seqlens)
        ctx.layout = layout
        return p_hat

    @staticmethod
    def backward(ctx, dp_hat):
        a, u, p0, p_hat, cu_seqlens = ctx.saved_tensors
        layout = ctx.layout
        p = p_hat / (1 + u * p_hat)
        p_prev = _shift(p, cu_seqlens, p0)
        # no gradient passes where the floor holds
        free = p_hat > MIN_COVARIANCE
        f, m, L = a * p_prev / p_hat * free, p / p_hat, p_hat * dp_hat

        f_c, m_c, L_c = (layout.pack(x).transpose(0, 1).contiguous() for x in (f, m, L))
        # Lam_{t-1} = B_t + A_t Lam_end, from the end of the chunk
        A = (f_c * m_c).flip(0).cumprod(0).flip(0)
        B, b = torch.empty_like(A), torch.zeros_like(A[:1])
        for i in reversed(range(layout.chunk_size)):
            b = torch.addcmul(L_c[i:i + 1], m_c[i:i + 1], b).mul_(f_c[i:i + 1])
            B[i:i + 1] = b
        Lam, ends = p0[:0], []
        chunks = (layout.sizes, A[0].split(layout.sizes), B[0].split(layout.sizes))
        for n, A_0, B_0 in zip(*(x[::-1] for x in chunks), strict=True):
            # sequences that end with this chunk start from zero: dL/dp_T reaches the scan through phat_T
            Lam = torch.cat((Lam, p0.new_zeros(n - len(Lam), *p0.shape[1:])))
            ends.append(Lam)
            Lam = B_0 + A_0 * Lam
        ends = torch.cat([p0[:0], *ends[::-1]])
        after = torch.cat((B[1:] + A[1:] * ends, ends.unsqueeze(0)))
        Lam = layout.unpack(after.transpose(0, 1))

        eta = (dp_hat + m / p_hat * Lam) * free
        dp0 = _first(eta * a, cu_seqlens)
        return eta * p_prev, eta, -p * Lam, dp0, None


def _shift(x: torch.Tensor, cu_seqlens: torch.LongTensor | None, first: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[B, T, ...]` of the token before; `first` `[N, ...]`, or zero, at the start of each sequence."""
    if cu_seqlens is None:
        head = torch.zeros_like(x[:, :1]) if first is None else first.unsqueeze(1)
        return torch.cat((head, x[:, :-1]), 1)
    y = torch.cat((x[:, :1], x[:, :-1]), 1)
    starts, present = cu_seqlens[:-1].long(), cu_seqlens.diff() > 0
    y[0, starts[present]] = 0 if first is None else first[present]
    return y


def _first(x: torch.Tensor, cu_seqlens: torch.LongTensor | None) -> torch.Tensor:
    """Rows of `x` `[B, T, ...]` at the first token of each sequence, zero for an empty one."""
    if cu_seqlens is None:
        return x[:, 0]
    y, present = x.new_zeros(len(cu_seqlens) - 1, *x.shape[2:]), cu_seqlens.diff() > 0
    y[present] = x[0, cu_seqlens[:-1][present].long()]
    return y


def _last(x: torch.Tensor, cu_seqlens: torch.LongTensor | None, empty: torch.Tensor) -> torch.Tensor:
    """Rows of `x` `[B, T, ...]` at the last token of each sequence, that of `empty` `[N, ...]` for an empty one."""
    if cu_seqlens is None:
        # a view would keep all tokens in memory
        return x[:, -1].clone()
    present = (cu_seqlens.diff() > 0).view(-1, *[1] * (x.ndim - 2))
    return torch.where(present, x[0, (cu_seqlens[1:].long() - 1).clamp(min=0)], empty)


def scan_covariance(
    k2: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    mu: torch.Tensor,
    p0: torch.Tensor,
    covariance: str,
    cu_seqlens: torch.LongTensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """phat and u of every token, `[B, T, HV, C]`.

    Args:
        k2 (torch.Tensor): squares of the keys, `[B, T, HV, C]`; summed over the channels if isotropic.
        g, omega (torch.Tensor): log decays `[B, T, HV, K]` and process noise, as in :func:`chunk_kdn`.
        r, mu, p0 (torch.Tensor): `[B, T, HV, 1]`, `[HV, 1]` and `[N, HV, C]`.
    """
    a = (2 * g).exp()
    if covariance == 'isotropic':
        a, omega, mu = a.mean(-1, keepdim=True), omega.unsqueeze(-1), mu / g.shape[-1]
    u = mu * k2 / r
    return CovarianceScan.apply(a, omega, u, p0, cu_seqlens), u


def kdn_gain(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    initial_cov: torch.Tensor | None = None,
    covariance: str = 'diagonal',
    info_scale: float | torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
    output_variances: bool = False,
) -> Gain:
    """The gain stage in PyTorch, in fp32 (float64 if `q` is float64); the arguments are those of :func:`chunk_kdn`."""
    HV, dtype = g.shape[2], compute_dtype(q)
    p0 = expand_cov(initial_cov, covariance, q, HV, cu_seqlens)
    mu = expand_info_scale(info_scale, q, HV).unsqueeze(-1)
    q, k, g, omega, r = (x.to(dtype) for x in (q, k, g, omega, r))
    omega, r = noise(omega, r, use_noise_softplus_in_kernel, r_min)
    r = r.unsqueeze(-1)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    g = log_decay(g, A_log, dt_bias, safe_gate, lower_bound)

    if covariance == 'isotropic':
        norm = k.square().sum(-1, keepdim=True).repeat_interleave(HV // k.shape[2], dim=2)
        p_hat, u = scan_covariance(norm, g, omega, r, mu, p0, covariance, cu_seqlens)
        n = p_hat * norm
        beta = p_hat / (r + n)
        initial_scale = final_scale = None
    else:
        q, k = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))
        p_hat, u = scan_covariance(k.square(), g, omega, r, mu, p0, covariance, cu_seqlens)
        s = p_hat.sqrt()
        q, k = s * q, s * k
        n = k.square().sum(-1, keepdim=True)
        beta = 1 / (r + n)
        # the outputs do not depend on the coordinates of the first memory: what p0 does to S'_0 and to the first g' cancels
        log_cov, log_prior = p_hat.log(), p0.detach().clamp(min=MIN_COVARIANCE).log()
        g = g + (_shift(log_cov, cu_seqlens, log_prior) - log_cov) / 2
        initial_scale = (log_prior / 2).exp()
        final_scale = _last(s, cu_seqlens, initial_scale)
    m = 1 / (1 + u * p_hat)
    final_cov, variances = _last(m * p_hat, cu_seqlens, p0), None
    if output_variances:
        with torch.no_grad():
            # q is whitened if diagonal
            read = m * q.square() if covariance == 'diagonal' else m * p_hat * q.square().repeat_interleave(
                HV // q.shape[2], dim=2)
            variances = (r.squeeze(-1), n.squeeze(-1), read.sum(-1))
    if covariance == 'isotropic':
        final_cov = final_cov.squeeze(-1)
    return Gain(q, k, g, beta.squeeze(-1), initial_scale, final_scale, final_cov, variances)
