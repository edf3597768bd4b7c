# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from einops import rearrange
from fla.layers.utils import repad_hidden_states, unpad_hidden_states
from fla.modules import FusedRMSNormGated, ShortConvolution
from torch.nn import functional as F

from fla_kdn.layers.utils import check_mask, get_layer_cache, update_layer_cache
from fla_kdn.ops.kdn import KDNUncertainty, chunk_kdn, fused_recurrent_kdn
from fla_kdn.ops.kdn.chunk import predicted_covariance
from fla_kdn.ops.kdn.inputs import (
    COVARIANCES,
    LOWER_BOUND,
    check_cu_seqlens,
    compute_dtype,
    l2norm,
    log_decay,
    noise,
)

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.processing_utils import Unpack

# longest prompt, in tokens, that inference hands to the token-by-token kernel
MAX_RECURRENT_LENGTH = 64


def check_options(
    mode: str,
    covariance: str,
    info_scale: float | None,
    r_min: float,
    fixed_r: float | None,
    fixed_omega: float | None,
    safe_gate: bool,
    lower_bound: float | None,
    head_dim: int,
    expand_v: float,
    num_heads: int,
    num_v_heads: int,
) -> None:
    """Raise a `ValueError` for options of a KDN layer, or of the config of a model, that do not go together."""
    if mode not in ('chunk', 'fused_recurrent'):
        raise ValueError(f"mode={mode!r} must be 'chunk' or 'fused_recurrent'.")
    if covariance not in COVARIANCES:
        raise ValueError(f'covariance={covariance!r} must be one of {COVARIANCES}.')
    for name, value in {'info_scale': info_scale, 'r_min': r_min, 'fixed_r': fixed_r}.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f'{name}={value} must be positive and finite.')
    if fixed_omega is not None and not 0 <= fixed_omega < math.inf:
        raise ValueError(f'fixed_omega={fixed_omega} must be finite and not negative.')
    if lower_bound is not None and not safe_gate:
        raise ValueError(f'lower_bound={lower_bound} is the floor of the log decay under safe_gate=True; got safe_gate=False.')
    if lower_bound is not None and not LOWER_BOUND <= lower_bound < 0:
        raise ValueError(f'lower_bound={lower_bound} must be in the safe range [{LOWER_BOUND:g}, 0).')
    if not math.isclose(head_dim * expand_v, round(head_dim * expand_v), rel_tol=1e-5):
        raise ValueError(f'expand_v={expand_v} times head_dim={head_dim} must be an integer, got {head_dim * expand_v}.')
    if num_heads < 1:
        raise ValueError(f'num_heads={num_heads} must be positive.')
    if num_v_heads < num_heads or num_v_heads % num_heads != 0:
        raise ValueError(f'num_v_heads={num_v_heads} must be a multiple of num_heads={num_heads}.')


class KalmanDeltaNet(nn.Module):
    """
    Kalman Delta Network (KDN) layer.

    A linear-attention memory written by a Kalman gain: it tracks how uncertain it is (`covariance`), and that and the
    observation noise of a token decide how strongly the token writes. See `fla_kdn/ops/kdn/README.md`.

    It mirrors Kimi Delta Attention (KDA) without KDA's `b_proj`. In its place stand the observation noise
    `r = r_min + softplus(r_proj(x))`, the process noise `omega = softplus(omega_proj(x))` and a prior covariance of each head,
    `1 / (0.1 + softplus(prior_precision))`.

    Each layer contains around ``hidden_size * key_dim * 2 + hidden_size * value_dim * 2`` parameters
    (q/k projections + v/o projections), plus the low-rank f_proj, g_proj and (diagonal) omega_proj.

    Args:
        hidden_size (int, Optional):
            The hidden size of the input. Default: 2048.
        expand_v (float, Optional):
            The expansion ratio for the value dimension. Default: 1.0.
        head_dim (int, Optional):
            The dimension of each head. Default: 128.
        num_heads (int, Optional):
            The number of heads. Default: 16.
        num_v_heads (int, Optional):
            The number of heads for the value projection, equal to `num_heads` if `None`.
            GVA (Grouped Value Attention) is applied if `num_v_heads` > `num_heads`,
            where `num_v_heads` must be divisible by `num_heads`. Default: `None`.
        mode (str, Optional):
            Which KDN kernel to use for long inputs without gradient: `chunk` or `fused_recurrent`.
            Training uses `chunk`, inputs of at most 64 tokens in inference `fused_recurrent`. Default: `chunk`.
        covariance (str, Optional):
            `diagonal`, an uncertainty for each key channel, or `isotropic`, one for each head. Default: `diagonal`.
        info_scale (float, Optional):
            Factor of the information that a token adds to the precision; `head_dim` if `None`. Default: `None`.
        learn_info_scale (bool, Optional):
            Whether `info_scale` is learned for each value head, starting from the given value. Default: `False`.
        r_min (float, Optional):
            Smallest observation noise variance. Default: 0.01.
        fixed_r (float, Optional):
            A constant observation noise variance in place of the projected one. Default: `None`.
        fixed_omega (float, Optional):
            A constant process noise variance in place of the projected one. Default: `None`.
        use_short_conv (bool, Optional):
            Whether to use short convolutions. Default: `True`.
        conv_size (int, Optional):
            The kernel size of the short convolution, only used when `use_short_conv` is `True`. Default: 4.
        conv_bias (bool, Optional):
            Whether to use bias in the short convolution, only used when `use_short_conv` is `True`. Default: `False`.
        safe_gate (bool, Optional):
            Whether to floor the log decay of a token at `lower_bound`, which allows faster kernels. Default: `True`.
        lower_bound (float, Optional):
            The floor, in `[-5, 0)`; -5 if `None`. Default: `None`.
        layer_idx (int, Optional):
            The index of the layer. Default: None.
        norm_eps (float, Optional):
            The epsilon value for the normalization layer. Default: 1e-5.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = 'chunk',
        covariance: str = 'diagonal',
        info_scale: float | None = None,
        learn_info_scale: bool = False,
        r_min: float = 0.01,
        fixed_r: float | None = None,
        fixed_omega: float | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        safe_gate: bool = True,
        lower_bound: float | None = None,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> KalmanDeltaNet:
        super().__init__()

        self.mode = mode
        self.covariance = covariance
        self.info_scale = info_scale
        self.learn_info_scale = learn_info_scale
        self.r_min = r_min
        self.fixed_r = fixed_r
        self.fixed_omega = fixed_omega
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.hidden_size = hidden_size
        self.expand_v = expand_v

        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias

        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads if num_v_heads is not None else num_heads

        self.head_k_dim = head_dim
        self.head_v_dim = round(head_dim * expand_v)
        self.key_dim = self.num_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.gate_dim = self.num_v_heads * self.head_k_dim
        self.layer_idx = layer_idx

        check_options(
            mode=mode,
            covariance=covariance,
            info_scale=info_scale,
            r_min=r_min,
            fixed_r=fixed_r,
            fixed_omega=fixed_omega,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            head_dim=head_dim,
            expand_v=expand_v,
            num_heads=num_heads,
            num_v_heads=self.num_v_heads,
        )

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)

        if use_short_conv:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                ShortConvolution(hidden_size=dim, kernel_size=conv_size, bias=conv_bias, activation='silu')
                for dim in (self.key_dim, self.key_dim, self.value_dim)
            )

        # decay of each value head and key channel
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.gate_dim, bias=False),
        )
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.gate_dim, dtype=torch.float32))

        self.r_proj = nn.Linear(hidden_size, self.num_v_heads, bias=True) if fixed_r is None else None
        if fixed_omega is not None:
            self.omega_proj = None
        elif covariance == 'isotropic':
            self.omega_proj = nn.Linear(hidden_size, self.num_v_heads, bias=True)
        else:
            self.omega_proj = nn.Sequential(
                nn.Linear(hidden_size, self.head_v_dim, bias=False),
                nn.Linear(self.head_v_dim, self.gate_dim, bias=True),
            )
            self.omega_proj[-1]._is_zero_init = True
        self.prior_precision = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        if learn_info_scale:
            self.log_info_scale = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))

        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.value_dim, bias=True),
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, activation='sigmoid', eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise what is not drawn as other projections are; parameters loaded by transformers keep their values."""
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
        values = {
            self.A_log: torch.empty_like(self.A_log).uniform_(1, 16).log(),
            # inverse softplus
            self.dt_bias: dt + (-torch.expm1(-dt)).log(),
            # a prior covariance of 1
            self.prior_precision: torch.full_like(self.prior_precision, math.log(math.expm1(0.9))),
        }
        if self.learn_info_scale:
            scale = self.head_k_dim if self.info_scale is None else self.info_scale
            values[self.log_info_scale] = torch.full_like(self.log_info_scale, math.log(scale))
        for parameter in values:
            parameter._no_weight_decay = True
        if self.r_proj is not None:
            values[self.r_proj.bias] = torch.zeros_like(self.r_proj.bias)
        if self.omega_proj is not None:
            # a process noise of softplus(0) for every token, which training then tells apart
            last = self.omega_proj[-1] if self.covariance == 'diagonal' else self.omega_proj
            values[last.bias] = torch.zeros_like(last.bias)
            if self.covariance == 'diagonal':
                values[last.weight] = torch.zeros_like(last.weight)
        for parameter, value in values.items():
            if not getattr(parameter, '_is_hf_initialized', False):
                parameter.copy_(value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.Tensor, KDNUncertainty | None, Cache | None]:
        """
        FLA's layer interface.

        Args:
            output_uncertainty (bool | str, Optional):
                Among the keywords; as that of :func:`chunk_kdn`. The second return is then what is known of each token,
                `[batch_size, seq_len, num_v_heads]`, 0 for padding. Default: `False`.
        """
        batch_size, q_len, _ = hidden_states.shape
        if torch.is_grad_enabled():
            mode = 'chunk'
        elif q_len <= MAX_RECURRENT_LENGTH:
            mode = 'fused_recurrent'
        else:
            mode = self.mode

        last_state = get_layer_cache(self, past_key_values) or {}

        cu_seqlens = kwargs.get('cu_seqlens')
        check_cu_seqlens(cu_seqlens, batch_size, q_len)
        check_mask(attention_mask, batch_size, q_len)
        # a cache has a row for each packed sequence, as long as the longest
        num_tokens = int(cu_seqlens.diff().max()) if use_cache and cu_seqlens is not None else q_len
        hidden_states, indices, cu_seqlens = unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, q_len)

        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.use_short_conv:
            conv_state = last_state.get('conv_state') or (None, None, None)
            if not use_cache:
                # a convolution of one token shifts its state in place
                conv_state = [None if x is None else x.clone() for x in conv_state]
            # three calls: in a comprehension the compiler would give up on the whole function
            options = {'output_final_state': use_cache, 'cu_seqlens': cu_seqlens}
            q, conv_q = self.q_conv1d(x=q, cache=conv_state[0], **options)
            k, conv_k = self.k_conv1d(x=k, cache=conv_state[1], **options)
            v, conv_v = self.v_conv1d(x=v, cache=conv_state[2], **options)
            conv_state = (conv_q, conv_k, conv_v)
        else:
            q, k, v, conv_state = F.silu(q), F.silu(k), F.silu(v), None

        q, k = (rearrange(x, '... (h d) -> ... h d', d=self.head_k_dim) for x in (q, k))
        v = rearrange(v, '... (h d) -> ... h d', d=self.head_v_dim)
        g = rearrange(self.f_proj(hidden_states), '... (h d) -> ... h d', d=self.head_k_dim)
        noise_arguments = self.noise(hidden_states)

        memory, cov = last_state.get('recurrent_state') or (None, self.prior_covariance())
        kdn = chunk_kdn if mode == 'chunk' else fused_recurrent_kdn
        o, memory, cov, *uncertainty = kdn(
            q=q,
            k=k,
            v=v,
            g=g,
            **noise_arguments,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=memory,
            initial_cov=cov,
            output_final_state=use_cache,
            covariance=self.covariance,
            info_scale=self.information_scale(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=self.safe_gate,
            lower_bound=self.lower_bound,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            output_uncertainty=kwargs.get('output_uncertainty', False),
        )
        if use_cache:
            update_layer_cache(
                self,
                past_key_values,
                recurrent_state=(memory, cov),
                conv_state=conv_state,
                offset=num_tokens,
            )

        o = self.o_norm(o, rearrange(self.g_proj(hidden_states), '... (h d) -> ... h d', d=self.head_v_dim))
        o = self.o_proj(rearrange(o, 'b t h d -> b t (h d)'))
        o = repad_hidden_states(o, indices, batch_size, q_len)
        uncertainty = KDNUncertainty(*(
            None if x is None else repad_hidden_states(x, indices, batch_size, q_len) for x in uncertainty[0]
        )) if uncertainty else None

        return o, uncertainty, past_key_values

    def information_scale(self) -> torch.Tensor | float | None:
        """`[num_v_heads]` if it is learned."""
        return self.log_info_scale.to(compute_dtype(self.log_info_scale)).exp() if self.learn_info_scale else self.info_scale

    def prior_covariance(self) -> torch.Tensor:
        """Covariance before the first token, `[num_v_heads]`."""
        return 1 / (0.1 + F.softplus(self.prior_precision.to(compute_dtype(self.prior_precision))))

    def noise(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor | bool | float]:
        """Arguments of the op: omega `[B, T, num_v_heads, head_k_dim]` (diagonal) or `[B, T, num_v_heads]` (isotropic) and
        r `[B, T, num_v_heads]`; raw, for the kernels to activate, unless one of them is fixed."""
        tokens, dtype = hidden_states.shape[:2], compute_dtype(hidden_states)
        shape = (self.num_v_heads, self.head_k_dim) if self.covariance == 'diagonal' else (self.num_v_heads,)
        omega = None if self.omega_proj is None else self.omega_proj(hidden_states).unflatten(-1, shape)
        r = None if self.r_proj is None else self.r_proj(hidden_states)
        if omega is not None and r is not None:
            return {'omega': omega, 'r': r, 'use_noise_softplus_in_kernel': True, 'r_min': self.r_min}
        if omega is None:
            omega = hidden_states.new_full((*tokens, *shape), self.fixed_omega, dtype=dtype)
        else:
            omega = F.softplus(omega.to(dtype))
        if r is None:
            r = hidden_states.new_full((*tokens, self.num_v_heads), self.fixed_r, dtype=dtype)
        else:
            r = self.r_min + F.softplus(r.to(dtype))
        return {'omega': omega, 'r': r}

    def filter_inputs(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.LongTensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """For looking at a layer: q, k, g, omega and r as the equations of `naive.py` have them; fp32, in PyTorch."""
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        if self.use_short_conv:
            q, k = self.q_conv1d(x=q, cu_seqlens=cu_seqlens)[0], self.k_conv1d(x=k, cu_seqlens=cu_seqlens)[0]
        else:
            q, k = F.silu(q), F.silu(k)
        return self.activated_inputs(hidden_states, q, k)

    def activated_inputs(self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> dict[str, torch.Tensor]:
        """What :meth:`filter_inputs` returns, from `q` and `k` after their convolutions."""
        q, k = (l2norm(x.float().unflatten(-1, (-1, self.head_k_dim))) for x in (q, k))
        g = self.f_proj(hidden_states).float().unflatten(-1, (-1, self.head_k_dim))
        g = log_decay(g, self.A_log, self.dt_bias, self.safe_gate, self.lower_bound)
        parts = self.noise(hidden_states)
        omega, r = noise(parts.pop('omega').float(), parts.pop('r').float(), **parts)
        return {'q': q, 'k': k, 'g': g, 'omega': omega, 'r': r}

    def predicted_covariance(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.LongTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """For looking at a layer: Phat of each token `[B, T, num_v_heads, head_k_dim]` (diagonal) or `[B, T, num_v_heads, 1]`
        (isotropic), its squared key `[B, T, num_v_heads, head_k_dim]`, and :meth:`filter_inputs`; in fp32, no gradients."""
        inputs = self.filter_inputs(hidden_states, cu_seqlens)
        p_hat = predicted_covariance(
            **{name: x for name, x in inputs.items() if name != 'q'},
            initial_cov=self.prior_covariance(),
            covariance=self.covariance,
            info_scale=self.information_scale(),
            cu_seqlens=cu_seqlens,
        )
        k2 = inputs['k'].square().repeat_interleave(self.num_v_heads // self.num_heads, dim=2)
        return p_hat, k2, inputs
