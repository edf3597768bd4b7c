# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from fla.ops.utils.op import exp, exp2
from fla.utils import input_guard

from fla_kdn.ops.kdn.chunk import run_kdn
from fla_kdn.ops.kdn.gain_triton import FLOOR, key_row, log_decay_row, noise_row, pool
from fla_kdn.ops.kdn.inputs import LOWER_BOUND, num_sequences
from fla_kdn.ops.kdn.uncertainty import with_log_likelihood

if TYPE_CHECKING:
    from fla_kdn.ops.kdn.uncertainty import KDNResult


# no heuristics: evaluating them would cost a decoding step more time on the host than the kernel takes
@triton.jit(do_not_specialize=['s_var', 'T'])
def fused_recurrent_kdn_fwd_kernel(
    q,
    k,
    v,
    g,
    omega,
    r,
    mu,
    A_log,
    dt_bias,
    o,
    h0,
    p0,
    ht,
    pt,
    variances,
    s_var,
    squares,
    cu_seqlens,
    ssm_state_indices,
    info_scale,
    lower_bound,
    r_min,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    NV: tl.constexpr,
    ISOTROPIC: tl.constexpr,
    L2NORM: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NOISE_SOFTPLUS: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    PRIOR_OF_HEAD: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    HAS_MU: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_INDICES: tl.constexpr,
    STORE_VARIANCES: tl.constexpr,
    STORE_SQUARES: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Steps (1) to (7) of `naive.py` for one sequence and value head: memory and covariance together, in fp32.

    Each program computes the covariance for its own blocks of values. All blocks are one program's (`NV` = 1) where the
    covariance is updated in place, as nobody else may read it after it is written. If asked, also write strength, q^T P q and
    r + k^T Phat k of each token, `variances` [3, B, T, HV], `s_var` elements apart, and |e|^2 in every block of values,
    `squares` [B, T, HV, blocks].
    """
    pid = tl.program_id(0).to(tl.int64)
    i_v0, i_nh = pid % NV, pid // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    if IS_VARLEN:
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        T = (eos - bos).to(tl.int32)
    else:
        bos = i_n * T
    # a negative index is a free slot of the batch
    i_s = tl.load(ssm_state_indices + i_n).to(tl.int64) if USE_INDICES else i_n
    if i_s < 0:
        return

    o_k, o_c = tl.arange(0, BK), tl.arange(0, BC)
    m_k, m_c = o_k < K, o_c < C
    b_mu = tl.load(mu + i_hv).to(tl.float32) if HAS_MU else info_scale
    b_A = exp(tl.load(A_log + i_hv)) if USE_GATE else 1.
    b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32) if HAS_BIAS else 0.

    b_p = tl.full([BC], 1., dtype=tl.float32)
    for i_v in range(i_v0, tl.cdiv(V, BV), NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        if STATE_V_FIRST:
            o_h = (i_s * HV + i_hv) * K * V + o_k[:, None] + o_v[None, :] * K
        else:
            o_h = (i_s * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
        m_h = m_k[:, None] & m_v[None, :]
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
        if USE_INITIAL_STATE:
            b_h += tl.load(h0 + o_h, mask=m_h, other=0.).to(tl.float32)
        if not HAS_PRIOR:
            b_p = tl.full([BC], 1., dtype=tl.float32)
        elif PRIOR_OF_HEAD:
            b_p = tl.load(p0 + i_hv + o_c * 0).to(tl.float32)
        else:
            b_p = tl.load(p0 + (i_s * HV + i_hv) * C + o_c, mask=m_c, other=1.).to(tl.float32)

        p_q = q + (bos * H + i_h) * K + o_k
        p_k = k + (bos * H + i_h) * K + o_k
        p_g = g + (bos * HV + i_hv) * K + o_k
        p_omega = omega + (bos * HV + i_hv) * C + o_c
        p_r = r + bos * HV + i_hv
        p_v = v + (bos * HV + i_hv) * V + o_v
        p_o = o + (bos * HV + i_hv) * V + o_v
        if STORE_VARIANCES:
            p_var = variances + bos * HV + i_hv
        if STORE_SQUARES:
            p_sq = squares + (bos * HV + i_hv) * tl.cdiv(V, BV) + i_v
        for _ in range(0, T):
            b_k, _s = key_row(p_k, m_k, L2NORM)
            b_q, _s = key_row(p_q, m_k, L2NORM)
            b_g, _d = log_decay_row(p_g, b_A, b_bias, m_k, lower_bound, USE_GATE, SAFE_GATE)
            b_v = tl.load(p_v, mask=m_v, other=0.).to(tl.float32)
            b_omega, _d = noise_row(p_omega, m_c, 0., NOISE_SOFTPLUS)
            b_r, _d = noise_row(p_r, True, r_min, NOISE_SOFTPLUS)

            b_alpha = exp2(b_g)
            b_h = b_h * b_alpha[:, None]
            b_p = tl.maximum(pool(b_alpha * b_alpha, m_k, K, ISOTROPIC) * b_p + b_omega, FLOOR)
            b_pk = b_p * b_k
            b_n = tl.sum(b_pk * b_k, 0)
            b_e = b_v - tl.sum(b_h * b_k[:, None], 0)
            if STORE_SQUARES:
                tl.store(p_sq, tl.sum(tl.where(m_v, b_e * b_e, 0.), 0))
                p_sq += HV * tl.cdiv(V, BV)
            b_iv = 1. / (b_r + b_n)
            b_e = b_e * b_iv
            b_h += b_pk[:, None] * b_e[None, :]
            b_p = b_p / (1. + pool(b_k * b_k, m_k, K, ISOTROPIC) * (b_mu / b_r) * b_p)
            b_o = tl.sum(b_h * b_q[:, None], 0) * scale
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
            if STORE_VARIANCES:
                if i_v == 0:
                    tl.store(p_var, b_n * b_iv)
                    tl.store(p_var + s_var, tl.sum(b_p * b_q * b_q, 0))
                    tl.store(p_var + 2 * s_var, b_r + b_n)
                p_var += HV

            p_q += H * K
            p_k += H * K
            p_g += HV * K
            p_omega += HV * C
            p_r += HV
            p_v += HV * V
            p_o += HV * V
        if STORE_FINAL_STATE:
            tl.store(ht + o_h, b_h, mask=m_h)
    if STORE_FINAL_STATE and i_v0 == 0:
        tl.store(pt + (i_s * HV + i_hv) * C + o_c, b_p, mask=m_c)


# Triton's functions of integers cost some microseconds, which a decoding step would pay each time
@functools.cache
def block_sizes(K: int, V: int, C: int) -> tuple[int, int, int, int]:
    """Channels of keys, of values and of the covariance in a block, and number of blocks of values."""
    BV = min(32, triton.next_power_of_2(V))
    return triton.next_power_of_2(K), BV, triton.next_power_of_2(C), triton.cdiv(V, BV)


@input_guard(no_guard_contiguous=['initial_state', 'initial_cov', 'out'])
def fused_recurrent_kdn_fwd(
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
    inplace_final_state: bool = False,
    covariance: str = 'diagonal',
    info_scale: float | torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
    output_uncertainty: bool | str = False,
    out: torch.Tensor | None = None,
) -> KDNResult:
    """
    One kernel over all sequences and value heads, for serving: arguments as in :func:`chunk_kdn`, nothing is checked.

    Args:
        inplace_final_state (bool, Optional):
            Whether to write memory and covariance back to `initial_state` and a carried `initial_cov`. Default: `False`.
        ssm_state_indices (torch.Tensor, Optional):
            Row of each sequence in `initial_state` and `initial_cov`, `[N]`, which then hold a pool of states and are updated
            in place. A negative index skips the sequence, whose outputs stay as they were in `out`. Default: `None`.
        out (torch.Tensor, Optional):
            Where to write the outputs. Default: `None`.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    N = num_sequences(q, cu_seqlens)
    C = K if covariance == 'diagonal' else 1
    inplace_final_state = inplace_final_state or ssm_state_indices is not None
    ht = pt = None
    if inplace_final_state:
        assert initial_state is not None and initial_cov is not None and initial_cov.ndim > 1
        # a contiguous copy would be updated in their place
        assert initial_state.is_contiguous() and initial_cov.is_contiguous()
        ht, pt = initial_state, initial_cov
    else:
        initial_state, initial_cov = (None if x is None else x.contiguous() for x in (initial_state, initial_cov))
    if output_final_state and not inplace_final_state:
        ht = q.new_empty(N, HV, V, K, dtype=torch.float32) if state_v_first else q.new_empty(N, HV, K, V, dtype=torch.float32)
        pt = q.new_empty((N, HV, K) if covariance == 'diagonal' else (N, HV), dtype=torch.float32)
    if out is None:
        out = torch.empty_like(v)
    assert out.is_contiguous()
    BK, BV, BC, NB = block_sizes(K, V, C)
    NV = 1 if inplace_final_state else NB
    variances = squares = None
    if output_uncertainty:
        variances = q.new_empty(3, B, T, HV, dtype=torch.float32)
    if output_uncertainty == 'log_likelihood':
        squares = q.new_empty(B, T, HV, NB, dtype=torch.float32)
    has_mu = isinstance(info_scale, torch.Tensor)
    fused_recurrent_kdn_fwd_kernel[(NV * N * HV,)](
        q=q,
        k=k,
        v=v,
        g=g,
        omega=omega,
        r=r,
        mu=info_scale if has_mu else None,
        A_log=A_log,
        dt_bias=dt_bias,
        o=out,
        h0=initial_state,
        p0=initial_cov,
        ht=ht,
        pt=pt,
        variances=variances,
        s_var=B * T * HV,
        squares=squares,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=ssm_state_indices,
        info_scale=0. if has_mu else float(K if info_scale is None else info_scale),
        lower_bound=LOWER_BOUND if lower_bound is None else lower_bound,
        r_min=r_min,
        scale=K ** -0.5 if scale is None else scale,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        C=C,
        BK=BK,
        BV=BV,
        BC=BC,
        NV=NV,
        ISOTROPIC=covariance == 'isotropic',
        L2NORM=use_qk_l2norm_in_kernel,
        SAFE_GATE=safe_gate,
        NOISE_SOFTPLUS=use_noise_softplus_in_kernel,
        STATE_V_FIRST=state_v_first,
        PRIOR_OF_HEAD=initial_cov is not None and initial_cov.ndim == 1,
        USE_INITIAL_STATE=initial_state is not None,
        STORE_FINAL_STATE=ht is not None,
        HAS_PRIOR=initial_cov is not None,
        HAS_MU=has_mu,
        USE_GATE=A_log is not None,
        HAS_BIAS=dt_bias is not None,
        USE_INDICES=ssm_state_indices is not None,
        STORE_VARIANCES=variances is not None,
        STORE_SQUARES=squares is not None,
        IS_VARLEN=cu_seqlens is not None,
        num_warps=4,
    )
    if not output_uncertainty:
        return out, ht, pt
    squared_innovation = None if squares is None else squares.sum(-1)
    return out, ht, pt, with_log_likelihood(*variances.unbind(0), squared_innovation, V)


@torch.compiler.disable
@torch.no_grad()
def fused_recurrent_kdn(
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
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context=None,
    output_uncertainty: bool | str = False,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_noise_softplus_in_kernel: bool = False,
    r_min: float = 0.,
) -> KDNResult:
    """
    Kalman Delta Network, token by token; for decoding and short prompts. It has no gradient: train with :func:`chunk_kdn`.

    Arguments, returns and errors are those of :func:`chunk_kdn`.
    """
    return run_kdn(
        kernels=fused_recurrent_kdn_fwd,
        q=q,
        k=k,
        v=v,
        g=g,
        omega=omega,
        r=r,
        scale=scale,
        initial_state=initial_state,
        initial_cov=initial_cov,
        output_final_state=output_final_state,
        covariance=covariance,
        info_scale=info_scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        output_uncertainty=output_uncertainty,
        A_log=A_log,
        dt_bias=dt_bias,
        use_noise_softplus_in_kernel=use_noise_softplus_in_kernel,
        r_min=r_min,
    )
