# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Triton kernels of the gain stage; the formulas are those of `gain.py`.

Three kernels forward: `map` composes the Möbius maps of each chunk, `carry` runs through the chunks of a sequence, `apply`
replays each chunk from its start and writes what the memory kernels take. Three backward: `map` reduces each chunk to an
affine map, `carry` runs through the chunks in reverse, `apply` replays each in reverse and writes the gradients.
All scans are in fp32, in a fixed order.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes, C = K (diagonal) or 1
(isotropic) channels of the covariance, BT chunk size, NT chunks of a sequence (of all, if they are packed),
NC chunks of the whole batch, counted by `i_c`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.index import prepare_chunk_offsets
from fla.ops.utils.op import exp, exp2

from fla_kdn.ops.kdn.inputs import LOWER_BOUND, MIN_COVARIANCE
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE
from fla_kdn.ops.utils.fast_math import fast_log2, fast_rcp

FLOOR = tl.constexpr(MIN_COVARIANCE)
LOG2E = tl.constexpr(RCP_LN2)
LN2 = tl.constexpr(1. / RCP_LN2)
L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def chunk_place(cu_seqlens, chunk_indices, T, NT, HV: tl.constexpr, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Value head of this program, row of its chunk among those of the batch, the chunk's first token and number of tokens.

    Programs of the heads of one chunk are neighbours, as their rows are in memory.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_hv, i_c = pid % HV, pid // HV
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int64)
        i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    else:
        i_t = i_c % NT
        bos = i_c // NT * T
        eos = bos + T
    start = bos + i_t * BT
    return i_hv, i_c, start, tl.minimum(eos - start, BT).to(tl.int32)


@triton.jit
def log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE: tl.constexpr, SAFE_GATE: tl.constexpr):
    """Log2 decay of one token, and the derivative of the natural one to `g`, 0 where it is floored."""
    b_x = tl.load(p_g, mask=m_k, other=0.).to(tl.float32)
    if USE_GATE:
        b_x += b_bias
        b_e = exp2(-tl.abs(b_x) * LOG2E)
        b_g = -b_A * (tl.maximum(b_x, 0.) * LOG2E + fast_log2(1. + b_e))
        b_d = -b_A * tl.where(b_x < 0., b_e, 1.) * fast_rcp(1. + b_e)
    else:
        b_g = b_x * LOG2E
        b_d = tl.full(b_x.shape, 1., dtype=tl.float32)
    if SAFE_GATE:
        b_d = tl.where(b_g < lower_bound * LOG2E, 0., b_d)
        b_g = tl.maximum(b_g, lower_bound * LOG2E)
    return tl.where(m_k, b_g, 0.), b_d


@triton.jit
def noise_row(p_x, m_x, x_min, SOFTPLUS: tl.constexpr):
    """Noise variance of one token, and the derivative of its activation `x_min + softplus(x)`."""
    b_x = tl.load(p_x, mask=m_x, other=0.).to(tl.float32)
    if SOFTPLUS:
        b_e = exp2(-tl.abs(b_x) * LOG2E)
        # log(1 + e) by its series where e is small: a small variance keeps its digits
        b_l = tl.where(
            b_e < 1. / 16, b_e * (1. - b_e * (0.5 - b_e * (1. / 3. - b_e * 0.25))), fast_log2(1. + b_e) * LN2
        )
        return x_min + tl.maximum(b_x, 0.) + b_l, tl.where(b_x < 0., b_e, 1.) * fast_rcp(1. + b_e)
    else:
        return b_x, tl.full(b_x.shape, 1., dtype=tl.float32)


@triton.jit
def key_row(p_k, m_k, L2NORM: tl.constexpr):
    """One query or key, normalised if asked, and the factor that normalised it."""
    b_k = tl.load(p_k, mask=m_k, other=0.).to(tl.float32)
    if L2NORM:
        b_s = tl.rsqrt(tl.sum(b_k * b_k, 0) + L2NORM_EPS)
        b_k = b_k * b_s
    else:
        b_s = 1.
    return b_k, b_s


@triton.jit
def pool(b_x, m_k, K: tl.constexpr, ISOTROPIC: tl.constexpr):
    """The mean over channels, as one channel, if isotropic."""
    if ISOTROPIC:
        return tl.sum(tl.where(m_k, b_x, 0.), 0, keep_dims=True) / K
    else:
        return b_x


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'USE_GATE': lambda args: args['A_log'] is not None,
    'HAS_BIAS': lambda args: args['dt_bias'] is not None,
})
@triton.jit(do_not_specialize=['T', 'NT'])
def kdn_gain_fwd_kernel_map(
    k,
    g,
    omega,
    r,
    mu,
    A_log,
    dt_bias,
    maps,
    cu_seqlens,
    chunk_indices,
    lower_bound,
    r_min,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    ISOTROPIC: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NOISE_SOFTPLUS: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """phat at the chunk's last token from p before its first one: `(x00 p + x01) / (x10 p + 1)`; and u of the last token.

    A token maps by [[a, omega], [0, 1]] [[1, 0], [u_{t-1}, 1]]; x11, which never falls below 1, is divided out.
    """
    i_hv, i_c, start, n = chunk_place(cu_seqlens, chunk_indices, T, NT, HV, BT, IS_VARLEN)
    i_h = i_hv // (HV // H)

    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    m_k, m_c = o_k < K, o_c < C
    b_mu = tl.load(mu + i_hv).to(tl.float32)
    b_A = exp(tl.load(A_log + i_hv)) if USE_GATE else 1.
    b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32) if HAS_BIAS else 0.

    p_k = k + (start * H + i_h) * K + o_k
    p_g = g + (start * HV + i_hv) * K + o_k
    p_omega = omega + (start * HV + i_hv) * C + o_c
    p_r = r + start * HV + i_hv

    x00 = tl.full([BC], 1., dtype=tl.float32)
    x01 = tl.zeros([BC], dtype=tl.float32)
    x10 = tl.zeros([BC], dtype=tl.float32)
    b_u = tl.zeros([BC], dtype=tl.float32)
    for _ in range(0, n):
        b_k, _s = key_row(p_k, m_k, L2NORM)
        b_g, _d = log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE, SAFE_GATE)
        b_omega, b_do = noise_row(p_omega, m_c, 0., NOISE_SOFTPLUS)
        b_r, b_drr = noise_row(p_r, True, r_min, NOISE_SOFTPLUS)
        b_a = pool(exp2(2. * b_g), m_k, K, ISOTROPIC)

        x10 += b_u * x00
        x11 = 1. + b_u * x01
        b_d = fast_rcp(x11)
        x00 = (b_a * x00 + b_omega * x10) * b_d
        x01 = (b_a * x01 + b_omega * x11) * b_d
        x10 = x10 * b_d
        b_u = pool(b_k * b_k, m_k, K, ISOTROPIC) * (b_mu * fast_rcp(b_r))

        p_k += H * K
        p_g += HV * K
        p_omega += HV * C
        p_r += HV

    p_maps = maps + ((i_c * HV + i_hv) * 4) * C + o_c
    tl.store(p_maps, x00, mask=m_c)
    tl.store(p_maps + C, x01, mask=m_c)
    tl.store(p_maps + 2 * C, x10, mask=m_c)
    tl.store(p_maps + 3 * C, b_u, mask=m_c)


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
})
@triton.jit(do_not_specialize=['T', 'NT'])
def kdn_gain_fwd_kernel_carry(
    maps,
    p0,
    starts,
    pt,
    st,
    cu_seqlens,
    chunk_offsets,
    T,
    NT,
    HV: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """phat and p before every chunk (`starts` [NC, HV, 2, C]), p and sqrt(phat) of the last token (`pt`, `st` [N, HV, C])."""
    i_n, i_hv = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0).to(tl.int64) % HV
    if IS_VARLEN:
        i_c = tl.load(chunk_offsets + i_n).to(tl.int64)
        NT = (tl.load(chunk_offsets + i_n + 1).to(tl.int64) - i_c).to(tl.int32)
    else:
        i_c = i_n * NT

    o_c = tl.arange(0, BC)
    m_c = o_c < C
    b_p = tl.load(p0 + (i_n * HV + i_hv) * C + o_c, mask=m_c, other=1.).to(tl.float32)
    b_ph = b_p
    p_maps = maps + ((i_c * HV + i_hv) * 4) * C + o_c
    p_starts = starts + ((i_c * HV + i_hv) * 2) * C + o_c
    for i_t in tl.range(0, NT, num_stages=NUM_STAGES):
        o_m = i_t.to(tl.int64) * HV * C
        x00 = tl.load(p_maps + o_m * 4, mask=m_c, other=0.)
        x01 = tl.load(p_maps + o_m * 4 + C, mask=m_c, other=0.)
        x10 = tl.load(p_maps + o_m * 4 + 2 * C, mask=m_c, other=0.)
        b_u = tl.load(p_maps + o_m * 4 + 3 * C, mask=m_c, other=0.)
        tl.store(p_starts + o_m * 2, b_ph, mask=m_c)
        tl.store(p_starts + o_m * 2 + C, b_p, mask=m_c)
        b_ph = tl.maximum((x00 * b_p + x01) / (x10 * b_p + 1.), FLOOR)
        b_p = b_ph / (1. + b_u * b_ph)
    tl.store(pt + (i_n * HV + i_hv) * C + o_c, b_p, mask=m_c)
    tl.store(st + (i_n * HV + i_hv) * C + o_c, tl.sqrt(tl.maximum(b_ph, FLOOR)), mask=m_c)


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'USE_GATE': lambda args: args['A_log'] is not None,
    'HAS_BIAS': lambda args: args['dt_bias'] is not None,
    'STORE_QK': lambda args: args['q_new'] is not None,
    'STORE_VARIANCES': lambda args: args['variances'] is not None,
})
@triton.jit(do_not_specialize=['s_var', 'T', 'NT'])
def kdn_gain_fwd_kernel_apply(
    q,
    k,
    g,
    omega,
    r,
    mu,
    A_log,
    dt_bias,
    starts,
    q_new,
    k_new,
    gc,
    beta,
    ph,
    u,
    variances,
    s_var,
    cu_seqlens,
    chunk_indices,
    lower_bound,
    r_min,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    ISOTROPIC: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NOISE_SOFTPLUS: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_QK: tl.constexpr,
    STORE_VARIANCES: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """q', k', the log2 decay cumulated in the chunk, and beta'; isotropic: normalised q, k (once a key head), bhat and u.

    If asked, also write strength, q^T P q and r + k^T Phat k of each token, `variances` [3, B, T, HV], `s_var` elements apart.
    """
    i_hv, i_c, start, n = chunk_place(cu_seqlens, chunk_indices, T, NT, HV, BT, IS_VARLEN)
    i_h = i_hv // (HV // H)

    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    m_k, m_c = o_k < K, o_c < C
    b_mu = tl.load(mu + i_hv).to(tl.float32)
    b_A = exp(tl.load(A_log + i_hv)) if USE_GATE else 1.
    b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32) if HAS_BIAS else 0.

    p_q = q + (start * H + i_h) * K + o_k
    p_k = k + (start * H + i_h) * K + o_k
    p_g = g + (start * HV + i_hv) * K + o_k
    p_omega = omega + (start * HV + i_hv) * C + o_c
    p_r = r + start * HV + i_hv
    p_gc = gc + (start * HV + i_hv) * K + o_k
    p_beta = beta + start * HV + i_hv
    if ISOTROPIC:
        s_new = H * K
        p_ph = ph + start * HV + i_hv + o_c
        p_u = u + start * HV + i_hv + o_c
        m_new = o_k < tl.where(i_hv % (HV // H) == 0, K, 0)
        o_new = (start * H + i_h) * K + o_k
    else:
        s_new = HV * K
        m_new = m_k
        o_new = (start * HV + i_hv) * K + o_k
    if STORE_QK:
        p_q_new, p_k_new = q_new + o_new, k_new + o_new
    if STORE_VARIANCES:
        p_var = variances + start * HV + i_hv

    p_start = starts + ((i_c * HV + i_hv) * 2) * C + o_c
    b_lp = fast_log2(tl.maximum(tl.load(p_start, mask=m_c, other=1.), FLOOR))
    b_p = tl.load(p_start + C, mask=m_c, other=1.)
    b_gc = tl.zeros([BK], dtype=tl.float32)
    for _ in range(0, n):
        b_k, _s = key_row(p_k, m_k, L2NORM)
        b_g, _d = log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE, SAFE_GATE)
        b_omega, b_do = noise_row(p_omega, m_c, 0., NOISE_SOFTPLUS)
        b_r, b_drr = noise_row(p_r, True, r_min, NOISE_SOFTPLUS)

        b_a = pool(exp2(2. * b_g), m_k, K, ISOTROPIC)
        b_ph = tl.maximum(b_a * b_p + b_omega, FLOOR)
        b_gc += b_g
        b_u = pool(b_k * b_k, m_k, K, ISOTROPIC) * (b_mu * fast_rcp(b_r))
        b_m = fast_rcp(1. + b_u * b_ph)
        if ISOTROPIC:
            b_k = b_k.to(k.dtype.element_ty)
            if STORE_QK or STORE_VARIANCES:
                b_q, _s = key_row(p_q, m_k, L2NORM)
            if STORE_QK:
                tl.store(p_q_new, b_q.to(q_new.dtype.element_ty), mask=m_new)
                tl.store(p_k_new, b_k, mask=m_new)
            b_k = b_k.to(tl.float32)
            b_n = b_ph * tl.sum(b_k * b_k, 0)
            tl.store(p_gc, b_gc, mask=m_k)
            b_iv = fast_rcp(b_r + b_n)
            tl.store(p_beta + o_c, b_ph * b_iv)
            tl.store(p_ph, b_ph)
            tl.store(p_u, b_u)
            p_ph += HV
            p_u += HV
        else:
            b_q, _s = key_row(p_q, m_k, L2NORM)
            b_s = tl.sqrt(b_ph)
            b_kw = (b_k * b_s).to(k_new.dtype.element_ty)
            tl.store(p_q_new, (b_q * b_s).to(q_new.dtype.element_ty), mask=m_new)
            tl.store(p_k_new, b_kw, mask=m_new)
            tl.store(p_gc, b_gc + 0.5 * (b_lp - fast_log2(b_ph)), mask=m_k)
            b_kw = b_kw.to(tl.float32)
            b_n = tl.sum(b_kw * b_kw, 0)
            b_iv = fast_rcp(b_r + b_n)
            tl.store(p_beta, b_iv)
        b_p = b_m * b_ph
        if STORE_VARIANCES:
            if ISOTROPIC:
                tl.store(p_var + o_c, b_n * b_iv)
                tl.store(p_var + s_var + o_c, b_p * tl.sum(b_q * b_q, 0))
                tl.store(p_var + 2 * s_var + o_c, b_r + b_n)
            else:
                tl.store(p_var, b_n * b_iv)
                tl.store(p_var + s_var, tl.sum(b_p * b_q * b_q, 0))
                tl.store(p_var + 2 * s_var, b_r + b_n)
            p_var += HV

        p_q += H * K
        p_k += H * K
        p_g += HV * K
        p_omega += HV * C
        p_r += HV
        p_gc += HV * K
        p_beta += HV
        if STORE_QK:
            p_q_new += s_new
            p_k_new += s_new


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'USE_GATE': lambda args: args['A_log'] is not None,
    'HAS_BIAS': lambda args: args['dt_bias'] is not None,
})
@triton.jit(do_not_specialize=['T', 'NT'])
def kdn_gain_bwd_kernel_map(
    q,
    k,
    g,
    omega,
    r,
    mu,
    A_log,
    dt_bias,
    starts,
    beta,
    ph,
    u,
    dq,
    dk,
    dgc,
    dbeta,
    maps,
    cu_seqlens,
    chunk_indices,
    lower_bound,
    r_min,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    ISOTROPIC: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NOISE_SOFTPLUS: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Lam before the chunk as `A X + B`, where X is what is added to L of its last token; that token's m; sums of dG' and g.

    Lam_{t-1} = f_t (L_t + m_t Lam_t), composed in the order of the tokens.
    """
    i_hv, i_c, start, n = chunk_place(cu_seqlens, chunk_indices, T, NT, HV, BT, IS_VARLEN)
    i_h = i_hv // (HV // H)

    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    m_k, m_c = o_k < K, o_c < C
    p_r = r + start * HV + i_hv
    p_omega = omega + (start * HV + i_hv) * C + o_c
    p_beta = beta + start * HV + i_hv
    p_dbeta = dbeta + start * HV + i_hv
    if ISOTROPIC:
        p_ph, p_u = ph + start * HV + i_hv + o_c, u + start * HV + i_hv + o_c
    else:
        b_mu = tl.load(mu + i_hv).to(tl.float32)
        b_A = exp(tl.load(A_log + i_hv)) if USE_GATE else 1.
        b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32) if HAS_BIAS else 0.
        p_q = q + (start * H + i_h) * K + o_k
        p_k = k + (start * H + i_h) * K + o_k
        o_v = (start * HV + i_hv) * K + o_k
        p_g, p_dq, p_dk, p_dgc = g + o_v, dq + o_v, dk + o_v, dgc + o_v
        b_p = tl.load(starts + ((i_c * HV + i_hv) * 2 + 1) * C + o_c, mask=m_c, other=1.)

    b_ma = tl.full([BC], 1., dtype=tl.float32)
    b_mb = tl.zeros([BC], dtype=tl.float32)
    b_m = tl.full([BC], 1., dtype=tl.float32)
    b_sd = tl.zeros([BC], dtype=tl.float32)
    b_sg = tl.zeros([BC], dtype=tl.float32)
    for _ in range(0, n):
        b_omega, b_do = noise_row(p_omega, m_c, 0., NOISE_SOFTPLUS)
        b_r, b_drr = noise_row(p_r, True, r_min, NOISE_SOFTPLUS)
        b_beta, b_db = tl.load(p_beta), tl.load(p_dbeta).to(tl.float32)
        b_ma = b_ma * b_m
        if ISOTROPIC:
            b_ph = tl.load(p_ph)
            b_m = fast_rcp(1. + tl.load(p_u) * b_ph)
            b_ip = fast_rcp(b_ph)
            b_f = tl.where(b_ph > FLOOR, tl.maximum(1. - b_omega * b_ip, 0.), 0.)
            b_l = b_beta * b_beta * b_db * b_r * b_ip
            p_ph += HV
            p_u += HV
        else:
            b_k, _s = key_row(p_k, m_k, L2NORM)
            b_q, _s = key_row(p_q, m_k, L2NORM)
            b_g, _d = log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE, SAFE_GATE)
            b_ap = exp2(2. * b_g) * b_p
            b_ph = b_ap + b_omega
            b_f = tl.where(b_ph > FLOOR, b_ap * fast_rcp(b_ph), 0.)
            b_ph = tl.maximum(b_ph, FLOOR)
            b_s = tl.sqrt(b_ph)
            b_qw = (b_q * b_s).to(q.dtype.element_ty).to(tl.float32)
            b_kw = (b_k * b_s).to(k.dtype.element_ty).to(tl.float32)
            b_dgc = tl.load(p_dgc, mask=m_k, other=0.)
            b_l = 0.5 * (b_qw * tl.load(p_dq, mask=m_k, other=0.) + b_kw * tl.load(p_dk, mask=m_k, other=0.) - b_dgc)
            b_l -= b_kw * b_kw * (b_beta * b_beta * b_db)
            b_m = fast_rcp(1. + b_k * b_k * (b_mu * fast_rcp(b_r)) * b_ph)
            b_p = b_m * b_ph
            b_sd += b_dgc
            b_sg += b_g
            p_q += H * K
            p_k += H * K
            p_g += HV * K
            p_dq += HV * K
            p_dk += HV * K
            p_dgc += HV * K
        b_ma = b_ma * b_f
        b_mb += b_ma * b_l
        p_omega += HV * C
        p_r += HV
        p_beta += HV
        p_dbeta += HV

    p_maps = maps + ((i_c * HV + i_hv) * 5) * C + o_c
    tl.store(p_maps, b_ma, mask=m_c)
    tl.store(p_maps + C, b_mb, mask=m_c)
    tl.store(p_maps + 2 * C, b_m, mask=m_c)
    tl.store(p_maps + 3 * C, b_sd, mask=m_c)
    tl.store(p_maps + 4 * C, b_sg, mask=m_c)


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'HAS_DPT': lambda args: args['dpt'] is not None,
    'HAS_DST': lambda args: args['dst'] is not None,
})
@triton.jit(do_not_specialize=['T', 'NT'])
def kdn_gain_bwd_kernel_carry(
    maps,
    p0,
    pt,
    dpt,
    dst,
    ends,
    dp0,
    cu_seqlens,
    chunk_offsets,
    T,
    NT,
    HV: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_DPT: tl.constexpr,
    HAS_DST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Lam after every chunk and X (`ends` [NC, HV, 2, C]), and dp0 = Lam_0 / p_0.

    X = m Lam + (sum of dG' of the next chunk) / 2, as the gate of the next chunk starts from this chunk's last phat; at the
    end of a sequence `dst` = sum_v S_T dS_T takes that place, as the memory comes out scaled by sqrt(phat_T).
    """
    i_n, i_hv = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0).to(tl.int64) % HV
    if IS_VARLEN:
        i_c = tl.load(chunk_offsets + i_n).to(tl.int64)
        NT = (tl.load(chunk_offsets + i_n + 1).to(tl.int64) - i_c).to(tl.int32)
    else:
        i_c = i_n * NT

    o_c = tl.arange(0, BC)
    m_c = o_c < C
    o_n = (i_n * HV + i_hv) * C + o_c
    b_p0 = tl.load(p0 + o_n, mask=m_c, other=1.).to(tl.float32)
    b_lam = tl.zeros([BC], dtype=tl.float32)
    b_e = tl.zeros([BC], dtype=tl.float32)
    if HAS_DPT:
        b_lam += tl.load(pt + o_n, mask=m_c, other=0.) * tl.load(dpt + o_n, mask=m_c, other=0.).to(tl.float32)
    if HAS_DST:
        b_e += 0.5 * tl.load(dst + o_n, mask=m_c, other=0.).to(tl.float32)
    p_maps = maps + ((i_c * HV + i_hv) * 5) * C + o_c
    p_ends = ends + ((i_c * HV + i_hv) * 2) * C + o_c
    for i in tl.range(0, NT, num_stages=NUM_STAGES):
        o_m = (NT - 1 - i).to(tl.int64) * HV * C
        b_ma = tl.load(p_maps + o_m * 5, mask=m_c, other=0.)
        b_mb = tl.load(p_maps + o_m * 5 + C, mask=m_c, other=0.)
        b_m = tl.load(p_maps + o_m * 5 + 2 * C, mask=m_c, other=0.)
        b_sd = tl.load(p_maps + o_m * 5 + 3 * C, mask=m_c, other=0.)
        b_x = b_m * b_lam + b_e
        tl.store(p_ends + o_m * 2, b_lam, mask=m_c)
        tl.store(p_ends + o_m * 2 + C, b_x, mask=m_c)
        b_lam = b_ma * b_x + b_mb
        b_e = 0.5 * b_sd
    tl.store(dp0 + o_n, tl.where(b_p0 > 0., b_lam / b_p0, 0.), mask=m_c)


@triton.heuristics({
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'USE_GATE': lambda args: args['A_log'] is not None,
    'HAS_BIAS': lambda args: args['dt_bias'] is not None,
})
@triton.jit(do_not_specialize=['T', 'NT'])
def kdn_gain_bwd_kernel_apply(
    q,
    k,
    g,
    omega,
    r,
    mu,
    A_log,
    dt_bias,
    starts,
    maps,
    ends,
    gc,
    beta,
    ph,
    u,
    dq,
    dk,
    dgc,
    dbeta,
    dq_new,
    dk_new,
    dn,
    dg,
    domega,
    dr,
    dmu,
    dA,
    dbias,
    cu_seqlens,
    chunk_indices,
    lower_bound,
    r_min,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    ISOTROPIC: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NOISE_SOFTPLUS: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Gradients of a chunk's tokens, from the last to the first, and its part of those of mu, A_log and dt_bias.

    Diagonal: dq, dk of each value head, l2norm included. Isotropic: `dn`, the gradient of |k|^2 / 2, in their place.
    """
    i_hv, i_c, start, n = chunk_place(cu_seqlens, chunk_indices, T, NT, HV, BT, IS_VARLEN)
    i_h = i_hv // (HV // H)
    last = start + n - 1

    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    m_k, m_c = o_k < K, o_c < C
    b_mu = tl.load(mu + i_hv).to(tl.float32)
    b_A = exp(tl.load(A_log + i_hv)) if USE_GATE else 1.
    b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32) if HAS_BIAS else 0.

    o_r, o_v = last * HV + i_hv, (last * HV + i_hv) * K + o_k
    p_r, p_beta, p_dbeta, p_dr = r + o_r, beta + o_r, dbeta + o_r, dr + o_r
    p_omega, p_domega = omega + o_r * C + o_c, domega + o_r * C + o_c
    p_g, p_dgc, p_dg = g + o_v, dgc + o_v, dg + o_v
    if ISOTROPIC:
        p_ph, p_u, p_dn = ph + o_r + o_c, u + o_r + o_c, dn + o_r + o_c
    else:
        p_q = q + (last * H + i_h) * K + o_k
        p_k = k + (last * H + i_h) * K + o_k
        p_gc, p_dq, p_dk, p_dq_new, p_dk_new = gc + o_v, dq + o_v, dk + o_v, dq_new + o_v, dk_new + o_v
        b_ph0 = tl.maximum(tl.load(starts + ((i_c * HV + i_hv) * 2) * C + o_c, mask=m_c, other=1.), FLOOR)
        b_gs = tl.load(maps + ((i_c * HV + i_hv) * 5 + 4) * C + o_c, mask=m_c, other=0.)

    b_lam = tl.load(ends + ((i_c * HV + i_hv) * 2) * C + o_c, mask=m_c, other=0.)
    b_x = tl.load(ends + ((i_c * HV + i_hv) * 2 + 1) * C + o_c, mask=m_c, other=0.)
    b_dgs = tl.zeros([BK], dtype=tl.float32)
    b_dbias = tl.zeros([BK], dtype=tl.float32)
    b_dA = tl.zeros([BK], dtype=tl.float32)
    b_dmu = tl.zeros([BC], dtype=tl.float32)
    for i in range(0, n):
        b_g, b_d = log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE, SAFE_GATE)
        b_omega, b_do = noise_row(p_omega, m_c, 0., NOISE_SOFTPLUS)
        b_r, b_drr = noise_row(p_r, True, r_min, NOISE_SOFTPLUS)
        b_ir = fast_rcp(b_r)
        b_beta = tl.load(p_beta)
        b_db = b_beta * b_beta * tl.load(p_dbeta).to(tl.float32)
        b_dgc = tl.load(p_dgc, mask=m_k, other=0.)
        b_dgs += b_dgc
        if ISOTROPIC:
            b_ph = tl.load(p_ph)
            b_u = tl.load(p_u)
            b_ip = fast_rcp(b_ph)
            b_l = b_db * b_r * b_ip
        else:
            b_k, b_ks = key_row(p_k, m_k, L2NORM)
            b_q, b_qs = key_row(p_q, m_k, L2NORM)
            # phat from the two cumulated decays: G'_t = G_t + (log phat_start - log phat_t) / 2
            b_ph = b_ph0 * exp2(2. * (b_gs - tl.load(p_gc, mask=m_k, other=0.)))
            b_gs -= b_g
            b_ip = fast_rcp(b_ph)
            b_s = tl.sqrt(b_ph)
            b_dq, b_dk = tl.load(p_dq, mask=m_k, other=0.), tl.load(p_dk, mask=m_k, other=0.)
            b_qw = (b_q * b_s).to(q.dtype.element_ty).to(tl.float32)
            b_kw = (b_k * b_s).to(k.dtype.element_ty).to(tl.float32)
            b_l = 0.5 * (b_qw * b_dq + b_kw * b_dk - b_dgc) - b_kw * b_kw * b_db
            b_u = b_k * b_k * (b_mu * b_ir)
        b_m = fast_rcp(1. + b_u * b_ph)
        b_free = b_ph > FLOOR * 1.001
        b_h = b_l + tl.where(i == 0, b_x, b_m * b_lam)
        b_f = tl.where(b_free, tl.maximum(1. - b_omega * b_ip, 0.), 0.)
        # (1 - m) Lam, exact where m is close to 1
        b_ml = b_u * b_m * b_ph * b_lam
        b_dmu -= b_ml
        tl.store(p_domega, tl.where(b_free, b_h * b_ip * b_do, 0.).to(domega.dtype.element_ty), mask=m_c)
        if ISOTROPIC:
            b_e = exp2((b_g - tl.max(tl.where(m_k, b_g, float('-inf')), 0)) * 2.)
            b_w = b_e * fast_rcp(tl.sum(tl.where(m_k, b_e, 0.), 0, keep_dims=True))
            b_dg = b_dgs + 2. * b_w * b_f * b_h
            tl.store(p_dr + o_c, ((b_ml - b_l) * b_ir * b_drr).to(dr.dtype.element_ty))
            tl.store(p_dn, -b_db - b_mu / K * b_ir * b_m * b_ph * b_lam)
            p_ph -= HV
            p_u -= HV
            p_dn -= HV
        else:
            b_dg = b_dgs + 2. * b_f * b_h
            b_dq = b_s * b_dq
            b_dk = b_s * b_dk - 2. * b_k * (b_ph * b_db + (b_mu * b_ir) * b_m * b_ph * b_lam)
            if L2NORM:
                b_dq = b_qs * (b_dq - b_q * tl.sum(b_q * b_dq, 0))
                b_dk = b_ks * (b_dk - b_k * tl.sum(b_k * b_dk, 0))
            tl.store(p_dq_new, b_dq.to(dq_new.dtype.element_ty), mask=m_k)
            tl.store(p_dk_new, b_dk.to(dk_new.dtype.element_ty), mask=m_k)
            tl.store(p_dr, ((tl.sum(tl.where(m_c, b_ml, 0.), 0) * b_ir - b_db) * b_drr).to(dr.dtype.element_ty))
            p_q -= H * K
            p_k -= H * K
            p_gc -= HV * K
            p_dq -= HV * K
            p_dk -= HV * K
            p_dq_new -= HV * K
            p_dk_new -= HV * K
        tl.store(p_dg, (b_dg * b_d).to(dg.dtype.element_ty), mask=m_k)
        if USE_GATE:
            b_dA += tl.where(b_d == 0., 0., b_dg * b_g)
            b_dbias += b_dg * b_d
        b_lam = b_f * b_h
        p_g -= HV * K
        p_dgc -= HV * K
        p_dg -= HV * K
        p_omega -= HV * C
        p_domega -= HV * C
        p_r -= HV
        p_beta -= HV
        p_dbeta -= HV
        p_dr -= HV

    tl.store(dmu + i_c * HV + i_hv, tl.sum(tl.where(m_c, b_dmu, 0.), 0) / b_mu)
    if USE_GATE:
        tl.store(dA + i_c * HV + i_hv, tl.sum(tl.where(m_k, b_dA, 0.), 0) * LN2)
        if HAS_BIAS:
            tl.store(dbias + (i_c * HV + i_hv) * K + o_k, b_dbias, mask=m_k)


@triton.jit(do_not_specialize=['M'])
def kdn_gain_bwd_kernel_qk(
    q,
    k,
    dq,
    dk,
    dn,
    dq_new,
    dk_new,
    M,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Isotropic: dq and dk [M, K] of the given q and k, from those of the normalised ones and `dn` [M]."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    m_m = o_m < M
    m_mk = m_m[:, None] & (o_k < K)[None, :]
    o_mk = o_m[:, None] * K + o_k[None, :]
    b_q = tl.load(q + o_mk, mask=m_mk, other=0.).to(tl.float32)
    b_k = tl.load(k + o_mk, mask=m_mk, other=0.).to(tl.float32)
    b_dq = tl.load(dq + o_mk, mask=m_mk, other=0.).to(tl.float32)
    b_dk = tl.load(dk + o_mk, mask=m_mk, other=0.).to(tl.float32)
    b_dn = tl.load(dn + o_m, mask=m_m, other=0.)[:, None]
    if L2NORM:
        b_qs = tl.rsqrt(tl.sum(b_q * b_q, 1) + L2NORM_EPS)[:, None]
        b_ks = tl.rsqrt(tl.sum(b_k * b_k, 1) + L2NORM_EPS)[:, None]
        b_q, b_k = b_q * b_qs, b_k * b_ks
        b_dk += 2. * b_k * b_dn
        b_dq = b_qs * (b_dq - b_q * tl.sum(b_q * b_dq, 1)[:, None])
        b_dk = b_ks * (b_dk - b_k * tl.sum(b_k * b_dk, 1)[:, None])
    else:
        b_dk += 2. * b_k * b_dn
    tl.store(dq_new + o_mk, b_dq.to(dq_new.dtype.element_ty), mask=m_mk)
    tl.store(dk_new + o_mk, b_dk.to(dk_new.dtype.element_ty), mask=m_mk)


class GainArguments(NamedTuple):
    """What both directions of the gain stage are given; tensors as in :func:`chunk_kdn`, contiguous.

    `mu` [HV] and `p0` [N, HV, C] are expanded and in fp32; `A_log` is `None` unless the kernels activate `g`.
    """

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    omega: torch.Tensor
    r: torch.Tensor
    mu: torch.Tensor
    p0: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    cu_seqlens: torch.LongTensor | None
    chunk_indices: torch.LongTensor | None


class GainOptions(NamedTuple):
    isotropic: bool
    l2norm: bool
    safe_gate: bool
    lower_bound: float | None
    noise_softplus: bool
    r_min: float


class GainOutputs(NamedTuple):
    """`q`, `k`, `gc`, `beta` for the memory kernels, `starts` for the backward, `pt` and `st` = sqrt(phat) of the last token.

    `ph` and `u` (isotropic, else `None`) are each token's predicted variance and what it adds to the precision, [B, T, HV].
    `variances` [3, B, T, HV] are the first three fields of `KDNUncertainty`, if asked for.
    """

    q: torch.Tensor
    k: torch.Tensor
    gc: torch.Tensor
    beta: torch.Tensor
    starts: torch.Tensor
    pt: torch.Tensor
    st: torch.Tensor
    ph: torch.Tensor | None
    u: torch.Tensor | None
    variances: torch.Tensor | None


def _launch(args: GainArguments, options: GainOptions) -> tuple[int, dict, dict]:
    """Number of chunks, and the arguments of the kernels over chunks and of those over sequences."""
    (B, T, H, K), HV = args.q.shape, args.g.shape[2]
    C = 1 if options.isotropic else K
    BK, BC = triton.next_power_of_2(K), triton.next_power_of_2(C)
    varlen = args.cu_seqlens is not None
    NT = len(args.chunk_indices) if varlen else triton.cdiv(T, CHUNK_SIZE)
    over_chunks = {
        'mu': args.mu,
        'A_log': args.A_log,
        'dt_bias': args.dt_bias,
        'cu_seqlens': args.cu_seqlens,
        'chunk_indices': args.chunk_indices,
        'lower_bound': LOWER_BOUND if options.lower_bound is None else options.lower_bound,
        'r_min': options.r_min,
        'T': T,
        'NT': NT,
        'H': H,
        'HV': HV,
        'K': K,
        'C': C,
        'BT': CHUNK_SIZE,
        'BK': BK,
        'BC': BC,
        'ISOTROPIC': options.isotropic,
        'L2NORM': options.l2norm,
        'SAFE_GATE': options.safe_gate,
        'NOISE_SOFTPLUS': options.noise_softplus,
        'num_warps': max(1, BK // 128),
    }
    over_sequences = {
        'cu_seqlens': args.cu_seqlens,
        'chunk_offsets': prepare_chunk_offsets(args.cu_seqlens, CHUNK_SIZE) if varlen else None,
        'T': T,
        'NT': NT,
        'HV': HV,
        'C': C,
        'BC': BC,
        'NUM_STAGES': 4,
        'num_warps': 1,
    }
    return NT if varlen else B * NT, over_chunks, over_sequences


def kdn_gain_fwd(args: GainArguments, options: GainOptions, output_variances: bool = False) -> GainOutputs:
    q, k, g = args.q, args.k, args.g
    (B, T, _, K), HV, N = q.shape, g.shape[2], len(args.p0)
    NC, over_chunks, over_sequences = _launch(args, options)
    grid, C = (NC * HV,), over_chunks['C']
    maps = q.new_empty(NC, HV, 4, C, dtype=torch.float32)
    starts = q.new_empty(NC, HV, 2, C, dtype=torch.float32)
    pt, st = q.new_empty(2, N, HV, C, dtype=torch.float32)
    gc = torch.empty_like(g, dtype=torch.float32)
    beta = q.new_empty(B, T, HV, dtype=torch.float32)
    variances = q.new_empty(3, B, T, HV, dtype=torch.float32) if output_variances else None
    ph = u = None
    if options.isotropic:
        ph, u = torch.empty_like(beta), torch.empty_like(beta)
        q_new, k_new = (torch.empty_like(q), torch.empty_like(k)) if options.l2norm else (None, None)
    else:
        q_new, k_new = q.new_empty(2, B, T, HV, K)
    kdn_gain_fwd_kernel_map[grid](k=k, g=g, omega=args.omega, r=args.r, maps=maps, **over_chunks)
    kdn_gain_fwd_kernel_carry[(N * HV,)](maps=maps, p0=args.p0, starts=starts, pt=pt, st=st, **over_sequences)
    kdn_gain_fwd_kernel_apply[grid](
        q=q,
        k=k,
        g=g,
        omega=args.omega,
        r=args.r,
        starts=starts,
        q_new=q_new,
        k_new=k_new,
        gc=gc,
        beta=beta,
        ph=ph,
        u=u,
        variances=variances,
        s_var=B * T * HV,
        **over_chunks,
    )
    if q_new is None:
        q_new, k_new = q, k
    return GainOutputs(q_new, k_new, gc, beta, starts, pt, st, ph, u, variances)


def kdn_gain_bwd(
    args: GainArguments,
    options: GainOptions,
    outputs: GainOutputs,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dgc: torch.Tensor,
    dbeta: torch.Tensor,
    dpt: torch.Tensor | None,
    dst: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, g, omega, r, mu, p0, A_log and dt_bias.

    `dq`, `dk`, `dgc`, `dbeta` are in fp32, of each value head; `dgc` is that of natural logarithms, not summed over the chunk.
    `dpt` is the gradient of the final covariance, `dst` = sum_v S_T dS_T [N, HV, K] that of the scale of the final memory.
    """
    q, k, g, omega, r = args.q, args.k, args.g, args.omega, args.r
    (B, T, H, K), HV, N = q.shape, g.shape[2], len(args.p0)
    NC, over_chunks, over_sequences = _launch(args, options)
    grid, C = (NC * HV,), over_chunks['C']
    saved = {'starts': outputs.starts, 'beta': outputs.beta, 'ph': outputs.ph, 'u': outputs.u}
    inputs = {'q': q, 'k': k, 'g': g, 'omega': omega, 'r': r, 'dq': dq, 'dk': dk, 'dgc': dgc, 'dbeta': dbeta}
    maps = q.new_empty(NC, HV, 5, C, dtype=torch.float32)
    ends = q.new_empty(NC, HV, 2, C, dtype=torch.float32)
    dp0 = torch.empty_like(args.p0)
    kdn_gain_bwd_kernel_map[grid](maps=maps, **inputs, **saved, **over_chunks)
    kdn_gain_bwd_kernel_carry[(N * HV,)](
        maps=maps,
        p0=args.p0,
        pt=outputs.pt,
        dpt=dpt,
        dst=dst,
        ends=ends,
        dp0=dp0,
        **over_sequences,
    )
    dq_new = dk_new = dn = None
    if options.isotropic:
        dn = torch.empty_like(outputs.beta)
    else:
        # gradients of the value heads of a group are summed before they are rounded
        dq_new, dk_new = q.new_empty(2, B, T, HV, K, dtype=q.dtype if HV == H else torch.float32)
    dg, domega, dr = torch.empty_like(g), torch.empty_like(omega), torch.empty_like(r)
    dmu = q.new_empty(NC, HV, dtype=torch.float32)
    dA = torch.empty_like(dmu) if args.A_log is not None else None
    dbias = q.new_empty(NC, HV * K, dtype=torch.float32) if args.dt_bias is not None else None
    kdn_gain_bwd_kernel_apply[grid](
        maps=maps,
        ends=ends,
        gc=outputs.gc,
        dq_new=dq_new,
        dk_new=dk_new,
        dn=dn,
        dg=dg,
        domega=domega,
        dr=dr,
        dmu=dmu,
        dA=dA,
        dbias=dbias,
        **inputs,
        **saved,
        **over_chunks,
    )
    if options.isotropic:
        dq, dk, dn = (x if HV == H else x.unflatten(2, (H, HV // H)).sum(3) for x in (dq, dk, dn))
        dq_new, dk_new = torch.empty_like(q), torch.empty_like(k)
        M, BM = B * T * H, 16
        kdn_gain_bwd_kernel_qk[(triton.cdiv(M, BM),)](
            q=q,
            k=k,
            dq=dq,
            dk=dk,
            dn=dn,
            dq_new=dq_new,
            dk_new=dk_new,
            M=M,
            K=K,
            BM=BM,
            BK=over_chunks['BK'],
            L2NORM=options.l2norm,
            num_warps=4,
        )
    elif HV > H:
        dq_new, dk_new = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq_new, dk_new))
    dmu, dA, dbias = (None if x is None else x.sum(0) for x in (dmu, dA, dbias))
    return dq_new, dk_new, dg, domega, dr, dmu, dp0, dA, dbias
