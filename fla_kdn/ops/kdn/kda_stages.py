# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The stages of FLA's chunked KDA after the cumulation of the decay, under names that FLA 0.6 does not export.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes, BT chunk size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd

from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE

if TYPE_CHECKING:
    import torch


def kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gc: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    safe_gate: bool,
    cu_seqlens: torch.LongTensor | None,
    cu_seqlens_cpu: torch.LongTensor | None,
    chunk_indices: torch.LongTensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`o`, the final state, the matrices `Aqk`, `Akk` [B, T, HV, BT] for the backward, and what each token writes,
    `beta (v - k^T S)` [B, T, HV, V]; `gc` is cumulated, in log2."""
    w, u, _, kg, Aqk, Akk = chunk_kda_fwd_intra(
        q=q,
        k=k,
        v=v,
        gk=gc,
        beta=beta,
        scale=scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK_SIZE,
        chunk_indices=chunk_indices,
        safe_gate=safe_gate,
    )
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        k=kg,
        w=w,
        u=u,
        gk=gc,
        initial_state=initial_state,
        output_final_state=output_final_state,
        chunk_size=CHUNK_SIZE,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
    )
    o = chunk_gla_fwd_o_gk(
        q=q,
        v=v_new,
        g=gc,
        A=Aqk,
        h=h,
        scale=scale,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK_SIZE,
        chunk_indices=chunk_indices,
    )
    return o, final_state, Aqk, Akk, v_new


def kda_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gc: torch.Tensor,
    beta: torch.Tensor,
    Aqk: torch.Tensor,
    Akk: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    state_v_first: bool,
    safe_gate: bool,
    cu_seqlens: torch.LongTensor | None,
    chunk_indices: torch.LongTensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`dq`, `dk` (fp32, [B, T, HV, K]), `dv`, `dbeta` (fp32), the gradient of `gc` (fp32, that of natural logarithms, not yet
    summed over the chunk), and that of the initial state."""
    varlen = {'cu_seqlens': cu_seqlens, 'chunk_indices': chunk_indices}
    w, u, qg, kg = recompute_w_u_fwd(k=k, v=v, beta=beta, A=Akk, gk=gc, q=q, **varlen)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        k=kg,
        w=w,
        u=u,
        gk=gc,
        initial_state=initial_state,
        chunk_size=CHUNK_SIZE,
        state_v_first=state_v_first,
        **varlen,
    )
    dAqk, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=Aqk, scale=scale, chunk_size=CHUNK_SIZE, **varlen)
    dh, dh0, dv = chunk_gated_delta_rule_bwd_dhu(
        q=qg,
        k=kg,
        w=w,
        do=do,
        dv=dv,
        gk=gc,
        h0=initial_state,
        dht=dht,
        scale=scale,
        state_v_first=state_v_first,
        chunk_size=CHUNK_SIZE,
        **varlen,
    )
    dq, dk, dv, dbeta, dgc, dAkk = chunk_kda_bwd_wy_dqkg_fused(
        q=q,
        k=k,
        v=v,
        v_new=v_new,
        g=gc,
        beta=beta,
        A=Akk,
        h=h,
        do=do,
        dh=dh,
        dv=dv,
        scale=scale,
        state_v_first=state_v_first,
        chunk_size=CHUNK_SIZE,
        **varlen,
    )
    dq, dk, dbeta, dgc = chunk_kda_bwd_intra(
        q=q,
        k=k,
        g=gc,
        beta=beta,
        dAqk=dAqk,
        dAkk=dAkk,
        dq=dq,
        dk=dk,
        db=dbeta,
        dg=dgc,
        chunk_size=CHUNK_SIZE,
        safe_gate=safe_gate,
        **varlen,
    )
    return dq, dk, dv, dbeta, dgc, dh0
