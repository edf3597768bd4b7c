# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from fla.models.generation_utils import FLAGenerationMixin
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel, get_attention
from fla.modules import GatedMLP as KDNMLP
from fla.modules import RMSNorm
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_kdn.layers.kdn import KalmanDeltaNet
from fla_kdn.models.compat import accept_cache_argument
from fla_kdn.models.kdn.configuration_kdn import KDNConfig

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.processing_utils import Unpack


class KDNBlock(GradientCheckpointingLayer):
    def __init__(self, config: KDNConfig, layer_idx: int):
        super().__init__()

        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
        self.attn = get_attention(config=config, layer_idx=layer_idx)
        if self.attn is None:
            self.attn = KalmanDeltaNet(
                hidden_size=config.hidden_size,
                expand_v=config.expand_v,
                head_dim=config.head_dim,
                num_heads=config.num_heads,
                num_v_heads=config.num_v_heads,
                mode=config.attn_mode,
                covariance=config.covariance,
                info_scale=config.info_scale,
                learn_info_scale=config.learn_info_scale,
                r_min=config.r_min,
                fixed_r=config.fixed_r,
                fixed_omega=config.fixed_omega,
                use_short_conv=config.use_short_conv,
                conv_size=config.conv_size,
                conv_bias=config.conv_bias,
                safe_gate=config.safe_gate,
                lower_bound=config.lower_bound,
                layer_idx=layer_idx,
                norm_eps=config.norm_eps,
            )
        self.mlp_norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
        self.mlp = KDNMLP(
            hidden_size=config.hidden_size,
            hidden_ratio=config.hidden_ratio,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            fuse_swiglu=config.fuse_swiglu,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        attnres_states: None = None,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.Tensor, torch.Tensor | None, Cache | None, None]:
        residual = hidden_states
        hidden_states = self.attn_norm(hidden_states)
        hidden_states, attentions, past_key_values = self.attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            **kwargs,
        )
        if self.config.fuse_norm:
            hidden_states, residual = self.mlp_norm(hidden_states, residual, True)
        else:
            hidden_states = residual + hidden_states
            residual = hidden_states
            hidden_states = self.mlp_norm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states, **kwargs)

        # the fourth is for FLA's attention residuals, which KDN does not have
        return hidden_states, attentions, past_key_values, None


class KDNPreTrainedModel(FLAPreTrainedModel):
    config_class = KDNConfig
    base_model_prefix = 'model'
    supports_gradient_checkpointing = True
    _no_split_modules = ['KDNBlock']
    _supports_cache_class = True

    def _init_weights(self, module: nn.Module, **kwargs) -> None:
        super()._init_weights(module, **kwargs)
        if getattr(module, '_is_zero_init', False):
            nn.init.zeros_(module.weight)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = 'AutoModel') -> None:
        """Nothing to do: see :meth:`KDNConfig.save_pretrained`."""


class KDNModel(KDNPreTrainedModel, FLAModel):
    use_attnres = False

    def __init__(self, config: KDNConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([KDNBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)

        self.gradient_checkpointing = False

        self.post_init()

    forward = accept_cache_argument(FLAModel.forward)


class KDNForCausalLM(KDNPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):
    _tied_weights_keys = {'lm_head.weight': 'model.embeddings.weight'}

    def __init__(self, config: KDNConfig):
        super().__init__(config)
        self.model = KDNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion = None

        self.post_init()

    forward = accept_cache_argument(FLAForCausalLM.forward)
