# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Gated delta rule in PyTorch, chunk by chunk: the memory of KDA (decay of each key channel) and GatedDeltaNet (of each head).

    S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - k_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale S_t^T q_t

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes, NC chunks, BT chunk size.
G is the decay cumulated inside a chunk (natural log).
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from fla.backends import register
from fla.ops.gated_delta_rule import fused_recurrent as gdn_fused_recurrent
from fla.ops.kda.chunk import chunk_kda
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

from fla_kdn.backends.torch.registry import TorchBackend, on_cpu, register_torch, replace_on_cpu
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE, ChunkLayout

# smallest block whose decays are formed pair by pair; with log decays floored at -5 a block of 8 spans 35, and none is
MIN_BLOCK = 8
# a block whose log decay spans at most this much is computed as a product of two factors e^{G_i - R} e^{R - G_j}
MAX_SPAN = 40.


class MatMul(torch.autograd.Function):
    """`a @ b` whose gradients have its precision in a backward pass run under autocast too.

    The gradient of a decay is a small difference of large products, which factors rounded to bf16 would not leave.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type='cpu')
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type='cpu')
    def backward(ctx, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return (do @ b.mT).sum_to_size(a.shape), (a.mT @ do).sum_to_size(b.shape)


class SolveUnitLower(torch.autograd.Function):
    """`X = (I + A)^{-1} B` for a strictly lower triangular `A`, with gradients as `MatMul` has them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type='cpu')
    def forward(ctx, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        X = torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True)
        ctx.save_for_backward(A, X)
        return X

    @staticmethod
    @torch.amp.custom_bwd(device_type='cpu')
    def backward(ctx, dX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        A, X = ctx.saved_tensors
        dB = torch.linalg.solve_triangular(A.mT, dX, upper=True, unitriangular=True)
        return -(dB @ X.mT).tril(-1), dB


matmul, solve_unit_lower = MatMul.apply, SolveUnitLower.apply


def _decayed_scores(qk: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """`A[..., i, j] = sum_d qk_id k_jd e^{G_id - G_jd}` for `j <= i`, 0 above; all [.., NC, HV, BT, K]."""
    BT = G.shape[-2]
    BC = BT

    def blocks(x):
        return x.unflatten(-2, (BT // BC, BC))

    def fits():
        Gs = blocks(G.detach())
        return bool((Gs.amax(-2) - Gs.amin(-2)).le(MAX_SPAN).all())

    while not (factored := fits()) and BC > MIN_BLOCK:
        BC //= 2

    causal = torch.ones(BC, BC, dtype=torch.bool, device=G.device).tril()
    Gs, ks = blocks(G), blocks(k)
    # any reference cancels in the product; the first row's keeps the left factor, and that of earlier blocks, in range
    R = Gs[..., :1, :].detach()
    left = blocks(qk) * (Gs - R).to(k.dtype).exp()
    if factored:
        diagonal = matmul(left, (ks * (R - Gs).to(k.dtype).exp()).mT)
    else:
        # masked before exp: above the diagonal the decay would be a growth, and inf * 0 gives NaN gradients
        decay = (Gs.unsqueeze(-2) - Gs.unsqueeze(-3)).to(k.dtype).masked_fill(~causal.unsqueeze(-1), float('-inf')).exp()
        diagonal = matmul(blocks(qk).unsqueeze(-2), (decay * ks.unsqueeze(-3)).mT).squeeze(-2)
    diagonal = diagonal.masked_fill(~causal, 0)
    rows = []
    for i in range(BT // BC):
        start = i * BC
        right = k[..., :start, :] * (R[..., i, :, :] - G[..., :start, :]).to(k.dtype).exp()
        row = torch.cat((matmul(left[..., i, :, :], right.mT), diagonal[..., i, :, :]), -1)
        rows.append(F.pad(row, (0, BT - start - BC)))
    return torch.cat(rows, -2)


def _chunk_scores(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The decayed products `A_qk` (with the diagonal) and `A_kk` (without), `[NC, HV, BT, BT]`."""
    if G.shape[-1] == 1:
        causal = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).tril()
        decay = (G - G.transpose(-1, -2)).to(k.dtype).masked_fill(~causal, float('-inf')).exp()
        A_qk, A_kk = matmul(torch.stack((q, k)), k.mT) * decay
    else:
        A_qk, A_kk = _decayed_scores(torch.stack((q, k)), k, G)
    return A_qk, A_kk.tril(-1)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    decay_per_channel: bool,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    output_writes: bool = False,
    o_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gated delta rule with the arguments of `chunk_kda`; `g` is `[B, T, HV, K]`, or `[B, T, HV]` unless `decay_per_channel`.

    Computes in fp32 (float64 if `q` is float64, but for the gates of `use_gate_in_kernel`, which are FLA's) and returns `o` in
    `o_dtype`, by default the type of `v`, the state in fp32 (float64); if `output_writes` also
    `beta_t (v_t - k_t^T Diag(e^{g_t}) S_{t-1})` `[B, T, HV, V]`.
    """
    H, K, HV, V = *q.shape[2:], *v.shape[2:]
    if q.shape != k.shape:
        raise ValueError(f'`q` and `k` must have the same shape; got {list(q.shape)} and {list(k.shape)}.')
    if HV % H != 0:
        raise ValueError(f'The number of value heads must be a multiple of the number of query heads; got HV={HV} and H={H}.')
    shape = (*q.shape[:2], HV)
    for name, x, expected in (('g', g, (*shape, K) if decay_per_channel else shape), ('beta', beta, shape)):
        if x.shape != expected:
            raise ValueError(f'`{name}` must have shape {list(expected)}, got {list(x.shape)}.')
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f'The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`. '
            f'Please flatten variable-length inputs before processing.',
        )
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None and initial_state.shape[0] != N:
        raise ValueError(f'The number of initial states is expected to be {N} rather than {initial_state.shape[0]}.')
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError('`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.')
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError('`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set.')

    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        o_dtype, scale = o_dtype or v.dtype, K ** -0.5 if scale is None else scale
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        g = g if decay_per_channel else g.unsqueeze(-1)
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        if use_beta_sigmoid_in_kernel:
            beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        if use_gate_in_kernel:
            gate = naive_kda_gate if lower_bound is None else functools.partial(
                naive_kda_lowerbound_gate, lower_bound=lower_bound)
            g = gate(g, A_log, dt_bias)
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q * scale, k))

        layout = ChunkLayout(q, chunk_size, cu_seqlens)
        # [NC, HV, BT, *]
        q, k, v, g, beta = (layout.pack(x).transpose(1, 2) for x in (q, k, v, g, beta.unsqueeze(-1)))
        # in float64: the difference of two large cumulated decays would lose the digits of tokens close to each other
        G = g.double().cumsum(-2)
        A_qk, A_kk = _chunk_scores(q, k, G)
        # WY form: [u, w] = (I + beta A_kk)^{-1} beta [v, k e^G]
        decay, last = G.to(dtype).exp(), G[..., -1:, :]
        u, w = solve_unit_lower(beta * A_kk, beta * torch.cat((v, k * decay), -1)).split((V, K), -1)
        k_end = (k * (last - G).to(dtype).exp()).transpose(-1, -2)
        decay_end = last.to(dtype).exp().transpose(-1, -2)

        if initial_state is None:
            S = q.new_zeros(N, HV, K, V)
        else:
            S = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(dtype)
        S = layout.sort(S)
        states, finished, v_new = [], [], []
        chunks = (x.split(layout.sizes) for x in (u, w, k_end, decay_end))
        for n, u_i, w_i, k_i, d_i in zip(layout.sizes, *chunks, strict=True):
            finished.append(S[n:])
            S = S[:n]
            states.append(S)
            v_new.append(u_i - matmul(w_i, S))
            S = S * d_i + matmul(k_i, v_new[-1])
        # the empty slices stand for T = 0, where there is no chunk
        v_new = torch.cat([v[:0], *v_new])
        o = matmul(q * decay, torch.cat([S[:0], *states])) + matmul(A_qk, v_new)
        o = layout.unpack(o.transpose(1, 2)).to(o_dtype)
        if output_final_state:
            S = layout.unsort(torch.cat([S, *finished[::-1]]))
            S = S.transpose(-1, -2).contiguous() if state_v_first else S
        else:
            S = None
        return (o, S, layout.unpack(v_new.transpose(1, 2))) if output_writes else (o, S)


def _state_v_first(state_v_first: bool, kwargs: dict) -> bool:
    """FLA's former name of `state_v_first`, as the replaced functions take it."""
    if 'transpose_state_layout' not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError('Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.')
    warnings.warn('`transpose_state_layout` is deprecated and renamed to `state_v_first`.', DeprecationWarning, stacklevel=3)
    return kwargs['transpose_state_layout']


def _chunk_size(kwargs: dict, allowed: tuple[int, ...]) -> int:
    chunk_size = kwargs.get('chunk_size', CHUNK_SIZE)
    if chunk_size not in allowed:
        raise ValueError(f'`chunk_size` must be one of {allowed}, got {chunk_size}.')
    return chunk_size


def _refuse(**features) -> None:
    if given := [name for name, value in features.items() if value is not None and value is not False]:
        raise NotImplementedError(f'Not supported for CPU tensors: {", ".join(given)}.')


@register_torch(chunk_kda)
def chunk_kda_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_kda` for CPU tensors. `safe_gate` changes nothing beyond its gate: the PyTorch form is exact for every decay."""
    _refuse(return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f'`lower_bound` must be in the safe range [-5, 0) when `safe_gate=True`, got {lower_bound}.')
    if initial_state is not None and initial_state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f'`initial_state` must be in float32, got {initial_state.dtype}.')
    return delta_rule(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        decay_per_channel=True,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=_state_v_first(state_v_first, kwargs),
        cu_seqlens=cu_seqlens,
        A_log=kwargs.get('A_log'),
        dt_bias=kwargs.get('dt_bias'),
        chunk_size=_chunk_size(kwargs, (32, 64)),
        o_dtype=q.dtype,
    )


@register('kda', verifier=on_cpu)
class KDATorchBackend(TorchBackend):

    @staticmethod
    def fused_recurrent_kda_fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        scale: float | None = None,
        output_final_state: bool = False,
        inplace_final_state: bool = True,
        state_v_first: bool = False,
        cu_seqlens: torch.LongTensor | None = None,
        ssm_state_indices: torch.Tensor | None = None,
        num_accepted_tokens: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        out: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _refuse(
            ssm_state_indices=ssm_state_indices,
            num_accepted_tokens=num_accepted_tokens,
            beta_of_each_value_channel=beta.ndim == v.ndim,
        )
        if inplace_final_state and initial_state is None:
            raise ValueError('`inplace_final_state` needs an `initial_state` to write to.')
        with torch.no_grad():
            o, final_state = delta_rule(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                decay_per_channel=True,
                scale=scale,
                initial_state=initial_state,
                output_final_state=output_final_state or inplace_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_gate_in_kernel=use_gate_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                lower_bound=lower_bound,
                state_v_first=state_v_first,
                cu_seqlens=cu_seqlens,
                A_log=A_log,
                dt_bias=dt_bias,
            )
            if inplace_final_state:
                final_state = initial_state.copy_(final_state)
            return o if out is None else out.copy_(o), final_state


@register('gated_delta_rule', verifier=on_cpu)
class GatedDeltaRuleTorchBackend(TorchBackend):

    @staticmethod
    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.LongTensor | None = None,
        cu_seqlens_cpu: torch.LongTensor | None = None,
        chunk_indices: torch.LongTensor | None = None,
        cp_context=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _refuse(cp_context=cp_context)
        if 'head_first' in kwargs:
            raise DeprecationWarning('`head_first` is no argument any more: inputs are `[B, T, H, ...]`.')
        return delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            decay_per_channel=False,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=kwargs.get('use_gate_in_kernel', False),
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=_state_v_first(state_v_first, kwargs),
            cu_seqlens=cu_seqlens,
            A_log=kwargs.get('A_log'),
            dt_bias=kwargs.get('dt_bias'),
            chunk_size=_chunk_size(kwargs, (16, 32, 64)),
            o_dtype=q.dtype,
        )


@replace_on_cpu(gdn_fused_recurrent, 'fused_recurrent_gated_delta_rule_fwd')
def fused_recurrent_gated_delta_rule_fwd_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _refuse(gk=gk, gv=gv, beta_of_each_value_channel=beta.ndim == v.ndim)
    return delta_rule(
        q=q,
        k=k,
        v=v,
        g=v.new_zeros(v.shape[:3]) if g is None else g,
        beta=beta,
        decay_per_channel=False,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=A_log is not None,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
