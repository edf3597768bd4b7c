# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Mixers that FLA has as a layer alone, or that are only a reference, in the backbone of KDN's models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from einops import rearrange
from fla.layers import GatedDeltaNet2
from fla.layers.mamba2 import Mamba2
from fla.layers.utils import get_layer_cache, update_layer_cache
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fla_kdn import KalmanDeltaNet, KDNConfig, KDNForCausalLM
from fla_kdn.ops.kdn import naive_recurrent_exact_kdn
from fla_kdn.ops.kdn.inputs import l2norm, log_decay, noise

if TYPE_CHECKING:
    import torch

# the PyTorch form of FLA's Mamba-2 holds tokens x chunk x heads x state
MAMBA2_CHUNK = 32


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
        q, k = (l2norm(rearrange(x, '... (h d) -> ... h d', d=self.head_k_dim).float()) for x in (q, k))
        v = rearrange(v, '... (h d) -> ... h d', d=self.head_v_dim)
        g = rearrange(self.f_proj(hidden_states), '... (h d) -> ... h d', d=self.head_k_dim)
        g = log_decay(g.float(), self.A_log, self.dt_bias, self.safe_gate, self.lower_bound)
        raw = self.noise(hidden_states)
        omega, r = noise(raw.pop('omega').float(), raw.pop('r').float(), **raw)

        memory, cov = last_state.get('recurrent_state') or (None, self.prior_covariance())
        o, memory, cov = naive_recurrent_exact_kdn(
            q, k, v.float(), g, omega, r, initial_state=memory, initial_cov=cov, output_final_state=use_cache,
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


def make_exact_kdn(config: MixerConfig, layer_idx: int) -> ExactKalmanDeltaNet:
    return ExactKalmanDeltaNet(**sizes_of(config), layer_idx=layer_idx)


def make_gdn2(config: MixerConfig, layer_idx: int) -> GatedDeltaNet2:
    return GatedDeltaNet2(**sizes_of(config), layer_idx=layer_idx)


def make_mamba2(config: MixerConfig, layer_idx: int) -> Mamba2:
    """As many heads, and a state of the same size, as the other mixers have."""
    return Mamba2(
        hidden_size=config.hidden_size,
        expand=config.num_heads * config.head_dim / config.hidden_size,
        head_dim=config.head_dim,
        state_size=config.head_dim,
        chunk_size=MAMBA2_CHUNK,
        layer_idx=layer_idx,
        norm_eps=config.norm_eps,
    )


def sizes_of(config: MixerConfig) -> dict:
    return {name: getattr(config, name) for name in ('hidden_size', 'expand_v', 'head_dim', 'num_heads', 'norm_eps')}


LAYERS = {'kdn-exact': make_exact_kdn, 'gdn2': make_gdn2, 'mamba2': make_mamba2}


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


AutoConfig.register(MixerConfig.model_type, MixerConfig, exist_ok=True)
AutoModelForCausalLM.register(MixerConfig, MixerForCausalLM, exist_ok=True)
