# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from fla.ops.utils.index import prepare_chunk_indices
from fla.utils import autocast_custom_bwd, autocast_custom_fwd, input_guard
from torch.autograd.function import once_differentiable

# as a module: it needs `fla_kdn.ops` to be imported, too
import fla_kdn.backends.torch.delta_rule as delta_rule
from fla_kdn.backends.torch.registry import TorchBackend
from fla_kdn.ops.kdn.gain import kdn_gain, scan_covariance
from fla_kdn.ops.kdn.gain_triton import GainArguments, GainOptions, GainOutputs, kdn_gain_bwd, kdn_gain_fwd
from fla_kdn.ops.kdn.inputs import (
    MIN_COVARIANCE,
    check_inputs,
    compute_dtype,
    expand_cov,
    expand_info_scale,
    num_sequences,
)
from fla_kdn.ops.kdn.kda_stages import kda_bwd, kda_fwd
from fla_kdn.ops.kdn.uncertainty import make_uncertainty, with_log_likelihood
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from fla_kdn.ops.kdn.uncertainty import KDNResult


class ChunkKDNFunction(torch.autograd.Function):
    """Gain stage and KDA's chunk stages, in Triton."""

    @staticmethod
    @input_guard
    @autocast_custom_fwd
    def forward(
        ctx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        omega: torch.Tensor,
        r: torch.Tensor,
        mu: torch.Tensor,
        p0: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        scale: float,
        output_final_state: bool,
        isotropic: bool,
        use_qk_l2norm_in_kernel: bool,
        safe_gate: bool,
        lower_bound: float | None,
        state_v_first: bool,
        cu_seqlens: torch.LongTensor | None,
        cu_seqlens_cpu: torch.LongTensor | None,
        use_noise_softplus_in_kernel: bool,
        r_min: float,
        output_uncertainty: bool | str,
    ) -> tuple[torch.Tensor | None, ...]:
        chunk_indices = None
        if cu_seqlens is not None:
            chunk_indices = prepare_chunk_indices(cu_seqlens, CHUNK_SIZE, cu_seqlens_cpu=cu_seqlens_cpu)
        args = GainArguments(
            q=q,
            k=k,
            g=g,
            omega=omega,
            r=r,
            mu=mu,
            p0=p0,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices,
        )
        options = GainOptions(
            isotropic=isotropic,
            l2norm=use_qk_l2norm_in_kernel,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            noise_softplus=use_noise_softplus_in_kernel,
            r_min=r_min,
        )
        gain = kdn_gain_fwd(args, options, output_variances=bool(output_uncertainty))
        h0 = initial_state
        if h0 is not None and not isotropic:
            h0 = h0 / per_key(p0.clamp(min=MIN_COVARIANCE).sqrt(), state_v_first)
        o, ht, Aqk, Akk, writes = kda_fwd(
            q=gain.q,
            k=gain.k,
            v=v,
            gc=gain.gc,
            beta=gain.beta,
            scale=scale,
            initial_state=h0,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            safe_gate=safe_gate,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            chunk_indices=chunk_indices,
        )
        if ht is not None and not isotropic:
            ht = ht * per_key(gain.st, state_v_first)
        ctx.save_for_backward(*args, *gain, v, Aqk, Akk, h0, None if isotropic else ht)
        ctx.options = options
        ctx.scale = scale
        ctx.state_v_first = state_v_first
        squared_innovation = None
        if output_uncertainty == 'log_likelihood':
            # the memory takes in beta e
            squared_innovation = (torch.linalg.vector_norm(writes, dim=-1, dtype=torch.float32) / gain.beta).square()
        ctx.mark_non_differentiable(*(x for x in (gain.variances, squared_innovation) if x is not None))
        return o, ht, gain.pt, gain.variances, squared_innovation

    @staticmethod
    @once_differentiable
    @input_guard
    @autocast_custom_bwd
    def backward(ctx, do: torch.Tensor, dht: torch.Tensor | None, dpt: torch.Tensor | None, *_):
        saved = iter(ctx.saved_tensors)
        args = GainArguments(*islice(saved, len(GainArguments._fields)))
        gain = GainOutputs(*islice(saved, len(GainOutputs._fields)))
        v, Aqk, Akk, h0, ht = saved
        dst = None
        if dht is not None and not ctx.options.isotropic:
            dst = (ht * dht).sum(-2 if ctx.state_v_first else -1)
            dht = dht * per_key(gain.st, ctx.state_v_first)
        dq, dk, dv, dbeta, dgc, dh0 = kda_bwd(
            q=gain.q,
            k=gain.k,
            v=v,
            gc=gain.gc,
            beta=gain.beta,
            Aqk=Aqk,
            Akk=Akk,
            scale=ctx.scale,
            initial_state=h0,
            do=do,
            dht=dht,
            state_v_first=ctx.state_v_first,
            safe_gate=ctx.options.safe_gate,
            cu_seqlens=args.cu_seqlens,
            chunk_indices=args.chunk_indices,
        )
        dq, dk, dg, domega, dr, dmu, dp0, dA, dbias = kdn_gain_bwd(
            args,
            ctx.options,
            gain,
            dq=dq,
            dk=dk,
            dgc=dgc,
            dbeta=dbeta,
            dpt=dpt,
            dst=dst,
        )
        if dh0 is not None and not ctx.options.isotropic:
            dh0 = dh0 / per_key(args.p0.clamp(min=MIN_COVARIANCE).sqrt(), ctx.state_v_first)
        # none for scale and the options after it
        return (dq, dk, dv.to(v), dg, domega, dr, dmu, dp0, dA, dbias, dh0, *[None] * 12)


def chunk_kdn_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    initial_cov: torch.Tensor | None,
    output_final_state: bool,
    covariance: str,
    info_scale: float | torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.LongTensor | None,
    cu_seqlens_cpu: torch.LongTensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_noise_softplus_in_kernel: bool,
    r_min: float,
    output_uncertainty: bool | str,
) -> KDNResult:
    HV, isotropic = v.shape[2], covariance == 'isotropic'
    o, final_state, final_cov, variances, squared_innovation = ChunkKDNFunction.apply(
        q,
        k,
        v,
        g,
        omega,
        r,
        expand_info_scale(info_scale, q, HV),
        expand_cov(initial_cov, covariance, q, HV, cu_seqlens),
        A_log,
        dt_bias,
        initial_state,
        q.shape[-1] ** -0.5 if scale is None else scale,
        output_final_state,
        isotropic,
        use_qk_l2norm_in_kernel,
        safe_gate,
        lower_bound,
        state_v_first,
        cu_seqlens,
        cu_seqlens_cpu,
        use_noise_softplus_in_kernel,
        r_min,
        output_uncertainty,
    )
    uncertainty = []
    if output_uncertainty:
        uncertainty = [with_log_likelihood(*variances.unbind(0), squared_innovation, v.shape[-1])]
    if not output_final_state:
        return o, None, None, *uncertainty
    return o, final_state, final_cov.squeeze(-1) if isotropic else final_cov, *uncertainty


def runs_in_torch(x: torch.Tensor) -> bool:
    """Whether an op on `x` is done by PyTorch, and not by Triton kernels."""
    return x.device.type == 'cpu' and TorchBackend().is_enabled()


@torch.no_grad()
@input_guard
def predicted_covariance(
    k: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    initial_cov: torch.Tensor | None,
    covariance: str,
    info_scale: float | torch.Tensor | None,
    cu_seqlens: torch.LongTensor | None = None,
) -> torch.Tensor:
    """Phat of each token (step (2) of `naive.py`), `[B, T, HV, K]` (diagonal) or `[B, T, HV, 1]` (isotropic), in fp32 and
    without gradients; the arguments are those of :func:`chunk_kdn`, in fp32."""
    HV, isotropic = g.shape[2], covariance == 'isotropic'
    mu, p0 = expand_info_scale(info_scale, k, HV), expand_cov(initial_cov, covariance, k, HV, cu_seqlens)
    if runs_in_torch(k):
        k2 = k.square().sum(-1, keepdim=True) if isotropic else k.square()
        k2 = k2.repeat_interleave(HV // k.shape[2], dim=2)
        return scan_covariance(k2, g, omega, r.unsqueeze(-1), mu.unsqueeze(-1), p0, covariance, cu_seqlens)[0]
    args = GainArguments(
        # which is whitened to sqrt(phat)
        q=torch.ones_like(k),
        k=k,
        g=g,
        omega=omega,
        r=r,
        mu=mu,
        p0=p0.contiguous(),
        A_log=None,
        dt_bias=None,
        cu_seqlens=cu_seqlens,
        chunk_indices=None if cu_seqlens is None else prepare_chunk_indices(cu_seqlens, CHUNK_SIZE),
    )
    options = GainOptions(
        isotropic=isotropic, l2norm=False, safe_gate=False, lower_bound=None, noise_softplus=False, r_min=0.)
    gain = kdn_gain_fwd(args, options)
    return gain.ph.unsqueeze(-1) if isotropic else gain.q.square()


def per_key(s: torch.Tensor, state_v_first: bool) -> torch.Tensor:
    """`s` [N, HV, K] as a factor of a memory."""
    return s.unsqueeze(-2 if state_v_first else -1)


def run_kdn(
    kernels: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    omega: torch.Tensor,
    r: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    initial_cov: torch.Tensor | None,
    output_final_state: bool,
    covariance: str,
    info_scale: float | torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.LongTensor | None,
    cu_seqlens_cpu: torch.LongTensor | None,
    cp_context,
    output_uncertainty: bool | str,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_noise_softplus_in_kernel: bool,
    r_min: float,
) -> KDNResult:
    """Check the arguments, then run the Triton `kernels`, or, for CPU tensors, the gain stage in PyTorch and the delta rule on
    what it gives, in and out of its whitened coordinates."""
    if cp_context is not None:
        raise NotImplementedError('Context parallelism is not implemented for KDN.')
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        raise ValueError('`cu_seqlens_cpu` is a copy of `cu_seqlens`, which is not given.')
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
    )
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    if B == 0 or T == 0:
        nothing = r.new_empty(r.shape, dtype=compute_dtype(q))
        uncertainty = [make_uncertainty(*[nothing] * 4, V, output_uncertainty)] if output_uncertainty else []
        if not output_final_state:
            return v.clone(), None, None, *uncertainty
        if initial_state is None:
            N, shape = num_sequences(q, cu_seqlens), (V, K) if state_v_first else (K, V)
            initial_state = v.new_zeros(N, HV, *shape, dtype=compute_dtype(q))
        S, p = initial_state.to(compute_dtype(q), copy=True), expand_cov(initial_cov, covariance, q, HV, cu_seqlens).clone()
        return v.clone(), S, p if covariance == 'diagonal' else p.squeeze(-1), *uncertainty
    if not runs_in_torch(q):
        return kernels(
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
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
            use_noise_softplus_in_kernel=use_noise_softplus_in_kernel,
            r_min=r_min,
            output_uncertainty=output_uncertainty,
        )

    with torch.autocast(q.device.type, enabled=False):
        gain = kdn_gain(
            q=q,
            k=k,
            g=g,
            omega=omega,
            r=r,
            initial_cov=initial_cov,
            covariance=covariance,
            info_scale=info_scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            cu_seqlens=cu_seqlens,
            use_noise_softplus_in_kernel=use_noise_softplus_in_kernel,
            r_min=r_min,
            output_variances=bool(output_uncertainty),
        )
        if initial_state is not None and gain.initial_scale is not None:
            initial_state = initial_state / per_key(gain.initial_scale, state_v_first)
        o, final_state, *writes = delta_rule.delta_rule(
            q=gain.q,
            k=gain.k,
            v=v,
            g=gain.g,
            beta=gain.beta,
            decay_per_channel=True,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            output_writes=output_uncertainty == 'log_likelihood',
        )
        final_cov, uncertainty = None, []
        if output_final_state:
            final_cov = gain.final_cov
            if gain.final_scale is not None:
                final_state = final_state * per_key(gain.final_scale, state_v_first)
        if output_uncertainty:
            with torch.no_grad():
                # the memory takes in beta e
                squared_innovation = (writes[0] / gain.beta.unsqueeze(-1)).square().sum(-1) if writes else None
                uncertainty = [make_uncertainty(*gain.variances, squared_innovation, V, output_uncertainty)]
    return o, final_state, final_cov, *uncertainty


@torch.compiler.disable
def chunk_kdn(
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
    r"""
    Kalman Delta Network, chunk by chunk; for training. The recurrence is at the top of `naive.py`.

    Args:
        q (torch.Tensor):
            Queries of shape `[B, T, H, K]`.
        k (torch.Tensor):
            Keys of shape `[B, T, H, K]`.
        v (torch.Tensor):
            Values of shape `[B, T, HV, V]`. Grouped values if `HV > H`; `HV` must be a multiple of `H`.
        g (torch.Tensor):
            Log decay of each token (natural log, not cumulated) of shape `[B, T, HV, K]`; raw if `use_gate_in_kernel`.
        omega (torch.Tensor):
            Process noise variance, >= 0, of shape `[B, T, HV, K]` (diagonal) or `[B, T, HV]` (isotropic, mean over channels).
        r (torch.Tensor):
            Observation noise variance, > 0, of shape `[B, T, HV]`.
        scale (float, Optional):
            Factor of the outputs. Default: `None`, `1 / sqrt(K)`.
        initial_state (torch.Tensor, Optional):
            Memory before the first token, fp32, `[N, HV, K, V]` for `N` sequences. Default: `None`, zeros.
        initial_cov (torch.Tensor, Optional):
            Covariance before the first token, fp32: a prior of each head `[HV]`, or one carried over, `[N, HV, K]` (diagonal)
            or `[N, HV]` (isotropic). On a GPU a gradient is left out where it is 0. Default: `None`, a prior of 1.
        output_final_state (bool, Optional):
            Whether to return memory and covariance after the last token. Given to the next call as `initial_state` and
            `initial_cov`, they continue the sequence. Default: `False`.
        covariance (str, Optional):
            `'diagonal'`, an uncertainty for each key channel, or `'isotropic'`, one for each head. Default: `'diagonal'`.
        info_scale (float | torch.Tensor, Optional):
            Factor mu > 0 of the information that a token adds to the precision; a tensor `[HV]` receives a gradient.
            Default: `None`, `K`.
        use_qk_l2norm_in_kernel (bool, Optional):
            Whether to L2-normalise `q` and `k`. Default: `False`.
        use_gate_in_kernel (bool, Optional):
            Whether the log decay is `-exp(A_log) * softplus(g + dt_bias)`. Default: `False`.
        safe_gate (bool, Optional):
            Whether to floor the log decay of each token at `lower_bound` (with a zero gradient where it is floored), which
            allows faster kernels. Default: `False`.
        lower_bound (float, Optional):
            The floor, in `[-5, 0)`; only with `safe_gate`. Default: `None`, -5.
        state_v_first (bool, Optional):
            Whether memories are `[N, HV, V, K]`. Default: `False`.
        cu_seqlens (torch.LongTensor, Optional):
            Cumulative lengths `[N+1]` of sequences, some possibly empty, packed in a batch of 1. Default: `None`.
        cu_seqlens_cpu (torch.LongTensor, Optional):
            The same on the CPU, which spares a synchronisation with the device. Default: `None`.
        cp_context (FLACPContext, Optional):
            Context parallelism: not implemented.
        output_uncertainty (bool | str, Optional):
            Whether to return a :class:`KDNUncertainty`; `'log_likelihood'` for that of the values, too. Default: `False`.
        A_log (torch.Tensor, Optional):
            `[HV]`, required if `use_gate_in_kernel`.
        dt_bias (torch.Tensor, Optional):
            `[HV * K]`, added to `g` if `use_gate_in_kernel`.
        use_noise_softplus_in_kernel (bool, Optional):
            Whether `omega` and `r` are raw: the variances are `softplus(omega)` and `r_min + softplus(r)`. Default: `False`.
        r_min (float, Optional):
            Smallest observation noise variance; only with `use_noise_softplus_in_kernel`. Default: 0.

    Returns:
        o (torch.Tensor):
            Outputs of shape `[B, T, HV, V]`, in the type of `v`.
        final_state (torch.Tensor | None):
            Memory after the last token, in the layout of `initial_state`, fp32 (on a CPU float64 for float64 inputs);
            `None` unless `output_final_state`.
        final_cov (torch.Tensor | None):
            Covariance after the last token, `[N, HV, K]` or `[N, HV]`, in the same type; `None` unless `output_final_state`.
        uncertainty (KDNUncertainty):
            Write strength, variances and log-likelihood of each token; only if `output_uncertainty`. They have no gradient,
            unlike those of `naive_recurrent_kdn`.

    Raises:
        ValueError: if an argument has a wrong shape, type or value. Values (NaN, `omega < 0`, `r <= 0`, the contents of
            `cu_seqlens`) are checked for CPU tensors and, as it costs a synchronisation, on a GPU only if `FLA_KDN_DEBUG=1`.

    Examples::
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from fla_kdn.ops.kdn import chunk_kdn
        >>> B, T, H, K, V = 2, 256, 4, 64, 64
        >>> q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
        >>> v = torch.randn(B, T, H, V)
        >>> g = F.logsigmoid(torch.randn(B, T, H, K))
        >>> omega = F.softplus(torch.randn(B, T, H, K))
        >>> r = 0.01 + F.softplus(torch.randn(B, T, H))
        >>> o, state, cov = chunk_kdn(q, k, v, g, omega, r, use_qk_l2norm_in_kernel=True, output_final_state=True)
    """
    return run_kdn(
        kernels=partial(chunk_kdn_triton, cu_seqlens_cpu=cu_seqlens_cpu),
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
