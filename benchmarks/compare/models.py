# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Mixers that FLA has as a layer alone, or that are only a reference, in the backbone of KDN's models."""

from __future__ import annotations

import torch
import torch.nn as nn
from einops import rearrange
from fla.layers import GatedDeltaNet2
from fla.layers.mamba2 import Mamba2
from fla.layers.utils import get_layer_cache, update_layer_cache
from fla.modules import ShortConvolution
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fla_kdn import KalmanDeltaNet, KDNConfig, KDNForCausalLM
from fla_kdn.layers.attn import Attention
from fla_kdn.ops.kdn import naive_recurrent_exact_kdn

MAMBA2_CHUNK = 64


class ExactKalmanDeltaNet(KalmanDeltaNet):
    """`KalmanDeltaNet` with the full covariance, token by token: for small keys and short sequences, without padding."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        last_state = get_layer_cache(self, past_key_values) or {}
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        (q, conv_q), (k, conv_k), (v, conv_v) = (
            conv(x=x, cache=cache, output_final_state=use_cache)
            for conv, x, cache in zip(convolutions, (q, k, v), last_state.get('conv_state') or [None] * 3, strict=True)
        )
        v = rearrange(v, '... (h d) -> ... h d', d=self.head_v_dim)

        memory, cov = last_state.get('recurrent_state') or (None, self.prior_covariance())
        o, memory, cov = naive_recurrent_exact_kdn(
            **self.activated_inputs(hidden_states, q, k),
            v=v.float(),
            initial_state=memory,
            initial_cov=cov,
            output_final_state=use_cache,
        )
        if use_cache:
            update_layer_cache(
                self,
                past_key_values,
                recurrent_state=(memory, cov),
                conv_state=(conv_q, conv_k, conv_v),
                offset=hidden_states.shape[1],
            )
        o = self.o_norm(o.to(v.dtype), rearrange(self.g_proj(hidden_states), '... (h d) -> ... h d', d=self.head_v_dim))
        return self.o_proj(rearrange(o, 'b t h d -> b t (h d)')), None, past_key_values


class ConvolvedLinear(nn.Linear):
    """A projection and a short convolution; `state` is the convolution's, before and after a call."""

    def __init__(self, in_features: int, out_features: int, conv_size: int):
        super().__init__(in_features, out_features, bias=False)
        self.conv1d = ShortConvolution(out_features, conv_size)
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.state = self.conv1d(x=super().forward(x), cache=self.state, output_final_state=not self.training)
        return x


class ConvolvedAttention(Attention):
    """Softmax attention with the other mixers' short convolutions on queries, keys and values; without padding."""

    def __init__(self, conv_size: int, **kwargs):
        super().__init__(**kwargs)
        self.q_proj, self.k_proj, self.v_proj = (
            ConvolvedLinear(x.in_features, x.out_features, conv_size) for x in (self.q_proj, self.k_proj, self.v_proj)
        )

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        states = (get_layer_cache(self, past_key_values) or {}).get('conv_state') or [None] * len(projections)
        for projection, state in zip(projections, states, strict=True):
            projection.state = state
        outputs = super().forward(hidden_states, attention_mask, past_key_values, use_cache, **kwargs)
        if use_cache:
            get_layer_cache(self, past_key_values)['conv_state'] = tuple(x.state for x in projections)
        return outputs


class MatmulMamba2(Mamba2):
    """FLA's Mamba-2, of one group, whose PyTorch form is made of matrix products: faster, and fit for long sequences."""

    def torch_forward(self, input_states: torch.Tensor, last_state=None, use_cache=False, attention_mask=None):
        if last_state is not None:
            return super().torch_forward(input_states, last_state, use_cache, attention_mask)
        size = self.intermediate_size
        gate, xBC, dt = self.in_proj(input_states).split([size, self.conv_dim, self.num_heads], dim=-1)
        xBC = xBC.transpose(1, 2)
        # the last inputs of the convolution
        conv_state = F.pad(xBC, (self.conv_kernel_size - xBC.shape[-1], 0)) if use_cache else None
        xBC = self.act(self.conv1d(xBC)[..., :input_states.shape[1]]).transpose(1, 2)
        with torch.autocast(xBC.device.type, enabled=False):
            x, B, C = xBC.float().split([size, self.ssm_state_size, self.ssm_state_size], dim=-1)
            x, dt = x.unflatten(-1, (self.num_heads, -1)), F.softplus(dt.float() + self.dt_bias.float())
            y, state = scan_in_chunks(x * dt.unsqueeze(-1), -self.A_log.float().exp() * dt, B, C, self.chunk_size)
            y = (y + self._get_D(expand_to_head_dim=True) * x).flatten(-2)
        y = self.norm(y, gate) if self.rmsnorm else y * self.act(gate)
        return self.out_proj(y.to(input_states.dtype)), conv_state, state


def scan_in_chunks(
    x: torch.Tensor, g: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`S_t = exp(g_t) S_{t-1} + x_t B_t^T`, `y_t = S_t C_t`: `y` like `x` `[N, T, H, P]` and the last `S` `[N, H, P, K]`.

    `g` is `[N, T, H]`, `B` and `C`, which all heads share, `[N, T, K]`.
    """
    T = x.shape[1]
    padding = -T % chunk_size
    x, g, B, C = (
        F.pad(z, (0, 0) * (z.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk_size)) for z in (x, g, B, C)
    )
    # decay since the start of a chunk [N, chunks, H, tokens], since the start of the sequence [N, H, chunks + 1]
    g = g.cumsum(2).transpose(2, 3)
    total = F.pad(g[..., -1].transpose(1, 2).cumsum(-1), (1, 0))
    inside = torch.einsum('nclk,ncsk,nchls->nchls', C, B, decay_between(g, g, diagonal=0))
    y = torch.einsum('nchls,ncshp->nclhp', inside, x)
    # what each chunk adds to the state at its end, and the states at the starts of chunks and at the end
    added = torch.einsum('nchs,ncshp,ncsk->nchpk', (g[..., -1:] - g).exp(), x, B)
    states = torch.einsum('nhcz,nzhpk->nchpk', decay_between(total, total[..., 1:], diagonal=-1), added)
    y = y + torch.einsum('nclk,nchpk,nchl->nclhp', C, states[:, :-1], g.exp())
    return y.flatten(1, 2)[:, :T], states[:, -1]


def decay_between(end: torch.Tensor, start: torch.Tensor, diagonal: int) -> torch.Tensor:
    """`exp(end_i - start_j)`, zero above a diagonal."""
    difference = end.unsqueeze(-1) - start.unsqueeze(-2)
    return difference.masked_fill(difference.new_ones(difference.shape[-2:]).tril(diagonal) == 0, -torch.inf).exp()


def make_exact_kdn(config: MixerConfig, layer_idx: int) -> ExactKalmanDeltaNet:
    return ExactKalmanDeltaNet(**sizes_of(config), layer_idx=layer_idx)


def make_gdn2(config: MixerConfig, layer_idx: int) -> GatedDeltaNet2:
    return GatedDeltaNet2(**sizes_of(config), layer_idx=layer_idx)


def make_attention(config: MixerConfig, layer_idx: int) -> ConvolvedAttention:
    """Heads of the same size as the other mixers have."""
    return ConvolvedAttention(
        conv_size=config.conv_size,
        hidden_size=config.hidden_size,
        num_heads=config.hidden_size // config.head_dim,
        layer_idx=layer_idx,
        config=config,
    )


def make_mamba2(config: MixerConfig, layer_idx: int) -> MatmulMamba2:
    """As many heads, and a state of the same size, as the other mixers have.

    Memories start as long, and writes as strong, as KDA's: few heads that start with Mamba-2's own decay of 1 to 16, and with
    its steps of 0.001 to 0.1, learn next to nothing in a short training.
    """
    return MatmulMamba2(
        hidden_size=config.hidden_size,
        expand=config.num_heads * config.head_dim / config.hidden_size,
        head_dim=config.head_dim,
        state_size=config.head_dim,
        A_init_range=(0.01, 0.2),
        dt_min=0.1,
        dt_max=1.0,
        chunk_size=MAMBA2_CHUNK,
        layer_idx=layer_idx,
        norm_eps=config.norm_eps,
    )


def sizes_of(config: MixerConfig) -> dict:
    return {name: getattr(config, name) for name in ('hidden_size', 'expand_v', 'head_dim', 'num_heads', 'norm_eps')}


LAYERS = {'kdn-exact': make_exact_kdn, 'gdn2': make_gdn2, 'mamba2': make_mamba2, 'attention': make_attention}
# these do not normalise keys: drawn as small as other weights, their convolutions would silence them for hundreds of steps
OWN_CONVOLUTIONS = ('mamba2', 'attention')


class MixerConfig(KDNConfig):
    """The configuration of KDN's backbone with one of `LAYERS`; KDN's own code file would load KDN."""
    model_type = 'compare-mixer'
    save_pretrained = PreTrainedConfig.save_pretrained

    def __init__(self, mixer: str = 'kdn-exact', **kwargs):
        self.mixer = mixer
        super().__init__(**kwargs)


class MixerForCausalLM(KDNForCausalLM):
    """KDN's backbone with the mixer of its configuration."""
    config_class = MixerConfig
    save_pretrained = PreTrainedModel.save_pretrained

    def __init__(self, config: MixerConfig):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.attn = LAYERS[config.mixer](config, i)
        self.post_init()
        if config.mixer in OWN_CONVOLUTIONS:
            for convolution in (x for x in self.modules() if isinstance(x, nn.Conv1d)):
                convolution.reset_parameters()


AutoConfig.register(MixerConfig.model_type, MixerConfig, exist_ok=True)
AutoModelForCausalLM.register(MixerConfig, MixerForCausalLM, exist_ok=True)
