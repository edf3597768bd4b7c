# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from fla.models.cache_utils import Cache
from fla.models.configuration_utils import get_attention_spec
from fla.models.generation_utils import FLAGenerationMixin
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel
from fla.modules import GatedMLP, RMSNorm
from fla.modules.activations import powglu, swiglu
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fla_kdn.layers.attn import Attention
from fla_kdn.layers.kdn import KalmanDeltaNet
from fla_kdn.models.compat import accept_cache_argument, declare_arguments
from fla_kdn.models.kdn.configuration_kdn import KDNConfig
from fla_kdn.models.kdn.model_card import TAGS, make_model_card
from fla_kdn.models.optim import whole_shape
from fla_kdn.models.packing import PACKING, resolve_padding_and_packing

if TYPE_CHECKING:
    from transformers.generation import GenerationConfig
    from transformers.processing_utils import Unpack

    from fla_kdn.ops.kdn import KDNUncertainty


def is_plain(linear: nn.Module) -> bool:
    """Whether a weight may be used past its module: not one with an adapter, or with a hook, that brings it to memory, say."""
    return type(linear) is nn.Linear and not (
        hasattr(linear, '_hf_hook') or linear._forward_hooks or linear._forward_pre_hooks)


def cast_once(x: torch.Tensor) -> torch.Tensor:
    """`x` as autocast has it: each projection would make a copy of its own, and keep it for backward."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


class KDNMLP(GatedMLP):

    def forward(self, x: torch.Tensor, **kwargs: Unpack[dict]) -> torch.Tensor:
        if is_plain(self.down_proj):
            return super().forward(x, **kwargs)
        gate, y = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, y) if self.hidden_act == 'swish' else powglu(gate, y, self.powglu_power))


@dataclass
class KDNModelOutputWithPast(BaseModelOutputWithPast):
    """With `output_uncertainty`: what is known of each token in every layer, `None` for layers of attention."""

    uncertainty: tuple[KDNUncertainty | None, ...] | None = None


@dataclass
class KDNCausalLMOutputWithPast(CausalLMOutputWithPast):
    """With `output_uncertainty`: what is known of each token in every layer, `None` for layers of attention."""

    uncertainty: tuple[KDNUncertainty | None, ...] | None = None


class KDNBlock(GradientCheckpointingLayer):
    def __init__(self, config: KDNConfig, layer_idx: int):
        super().__init__()

        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
        attention = get_attention_spec(config.attn, layer_idx=layer_idx)
        if attention is not None:
            self.attn = Attention(
                hidden_size=config.hidden_size,
                num_heads=attention['num_heads'],
                num_kv_heads=attention['num_kv_heads'],
                qkv_bias=attention['qkv_bias'],
                window_size=attention['window_size'],
                rope_theta=attention['rope_theta'],
                layer_idx=layer_idx,
                config=config,
            )
        else:
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
        uncertainties: deque[KDNUncertainty | None] | None = None,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.Tensor, None, Cache | None, None]:
        residual = hidden_states
        hidden_states, uncertainty, past_key_values = self.attn(
            hidden_states=cast_once(self.attn_norm(hidden_states)),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            **kwargs,
        )
        if uncertainties is not None:
            uncertainties.append(uncertainty)
        if self.config.fuse_norm:
            hidden_states, residual = self.mlp_norm(hidden_states, residual, True)
        else:
            hidden_states = residual + hidden_states
            residual = hidden_states
            hidden_states = self.mlp_norm(hidden_states)
        hidden_states = residual + self.mlp(cast_once(hidden_states), **kwargs)

        # the fourth is for FLA's attention residuals, which KDN does not have
        return hidden_states, None, past_key_values, None


class KDNPreTrainedModel(FLAPreTrainedModel):
    config_class = KDNConfig
    base_model_prefix = 'model'
    supports_gradient_checkpointing = True
    _no_split_modules = ['KDNBlock']
    _supports_cache_class = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

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
        self.add_model_tags(TAGS)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([KDNBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)

        self.gradient_checkpointing = False

        self.post_init()

    @accept_cache_argument
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: torch.LongTensor | None = None,
        cu_seq_lens_q: torch.LongTensor | None = None,
        cu_seq_lens_k: torch.LongTensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        position_ids: torch.LongTensor | None = None,
        output_uncertainty: bool | str = False,
        uncertainties: deque[KDNUncertainty | None] | None = None,
        **kwargs: Unpack[dict],
    ) -> tuple | KDNModelOutputWithPast:
        """
        FLA's forward pass; `output_uncertainty` is that of :func:`chunk_kdn`, and `uncertainties` what to append it to:
        no list, of which accelerate and FSDP hand copies to the blocks.

        Sequences may be packed into one row, their borders given by FLA's `cu_seqlens`, by transformers' `cu_seq_lens_q`, or
        by `position_ids` that restart; transformers' other names for padding-free batches are accepted and say nothing more.
        """
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            raise TypeError(
                f'The cache must be an FLA cache, `fla.models.cache_utils.Cache`, got {type(past_key_values).__name__}; '
                'of states alone, `Cache.from_legacy_cache(states, seen_tokens=...)` makes one.',
            )
        if (tokens := input_ids if inputs_embeds is None else inputs_embeds) is not None:
            attention_mask, cu_seqlens = resolve_padding_and_packing(
                tokens,
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                cu_seq_lens_q=cu_seq_lens_q,
                position_ids=position_ids,
                has_past=past_key_values is not None and past_key_values.get_seq_length() > 0,
            )
        if output_uncertainty and uncertainties is None:
            uncertainties = deque()
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            cu_seqlens=cu_seqlens,
            output_uncertainty=output_uncertainty,
            uncertainties=uncertainties,
            **kwargs,
        )
        if uncertainties is None:
            return outputs
        # not those of a second run for gradient checkpoints
        uncertainties = tuple(uncertainties)
        if isinstance(outputs, tuple):
            return *outputs, uncertainties
        return KDNModelOutputWithPast(**outputs, uncertainty=uncertainties)


class KDNForCausalLM(KDNPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):
    _tied_weights_keys = {'lm_head.weight': 'model.embeddings.weight'}

    def __init__(self, config: KDNConfig):
        super().__init__(config)
        self.add_model_tags(TAGS)
        self.model = KDNModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion = None

        self.post_init()

    @functools.partial(declare_arguments, names=PACKING)
    @accept_cache_argument
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        output_uncertainty: bool | str = False,
        **kwargs: Unpack[dict],
    ) -> tuple | KDNCausalLMOutputWithPast:
        """FLA's forward pass, with :meth:`KDNModel.forward` as the base model's."""
        uncertainties = deque() if output_uncertainty else None
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            logits_to_keep=logits_to_keep,
            num_items_in_batch=num_items_in_batch,
            output_uncertainty=output_uncertainty,
            uncertainties=uncertainties,
            **kwargs,
        )
        if uncertainties is None or isinstance(outputs, tuple):
            return outputs
        # FLA makes its output of the fields it knows
        return KDNCausalLMOutputWithPast(**outputs, uncertainty=tuple(uncertainties))

    # compiled, a graph would end in logits and a view of them, which PyTorch's cache of graphs brings back with wrong shapes
    @torch.compiler.disable
    def _compute_logits_and_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor | None = 0,
        *,
        num_items_in_batch: int | torch.Tensor | None = None,
        fuse_linear_cross_entropy: bool | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not is_plain(self.lm_head):
            fuse_linear_cross_entropy = False
        elif fuse_linear_cross_entropy is None:
            fuse_linear_cross_entropy = self.config.fuse_linear_cross_entropy
        is_fused = fuse_linear_cross_entropy or self.config.fuse_cross_entropy
        share = None
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        if labels is not None and self.criterion is None:
            targets = (labels[..., 1:] != -100).sum()
            if (self.config.use_l2warp or not is_fused) and targets > 0:
                # FLA's l2warp is scaled for the mean over the targets; PyTorch's loss has the type of the logits, and a sum is
                # beyond the range of fp16
                if num_items_in_batch is not None:
                    share = targets / num_items_in_batch.to(targets.device)
                num_items_in_batch = None
            elif num_items_in_batch is None:
                # a batch without a target has the loss 0, where a mean would be 0 / 0
                num_items_in_batch = targets.clamp(min=1)
        loss, logits = super()._compute_logits_and_loss(
            hidden_states,
            labels,
            logits_to_keep,
            num_items_in_batch=num_items_in_batch,
            fuse_linear_cross_entropy=fuse_linear_cross_entropy,
            **kwargs,
        )
        return (loss if share is None else loss * share.to(loss.device)), logits

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **kwargs) -> None:
        card = Path(save_directory, 'README.md')
        if is_main_process and not card.exists():
            card.parent.mkdir(parents=True, exist_ok=True)
            parameters = sum(math.prod(whole_shape(p)) for p in self.parameters())
            make_model_card(self.config, parameters).save(card)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        output_uncertainty: bool | str = False,
        **kwargs,
    ):
        """transformers' `generate`. With `output_uncertainty` and `return_dict_in_generate` the output has a further field,
        `uncertainty`: that of each forward pass over the sequence, the first of which reads the prompt, or a piece of it."""
        config = self.generation_config if generation_config is None else generation_config

        def option(name):
            return kwargs.get(name, getattr(config, name, None))

        if option('penalty_alpha'):
            raise ValueError('`penalty_alpha` asks for contrastive search, which takes tokens back; a memory cannot.')
        for name in PACKING:
            if kwargs.get(name) is not None:
                raise ValueError(f'{name}: `generate` continues rows, whose positions it counts itself.')
        if not output_uncertainty:
            return super().generate(inputs, generation_config, *args, **kwargs)
        if not option('return_dict_in_generate') or (option('num_beams') or 1) > 1:
            raise ValueError('`output_uncertainty` needs `return_dict_in_generate=True`, and one beam.')
        steps = []

        def keep(*args):
            # logits processors call the model, too
            if (uncertainty := getattr(args[-1], 'uncertainty', None)) is not None:
                steps.append(uncertainty)

        handle = self.register_forward_hook(keep)
        try:
            output = super().generate(
                inputs, generation_config, *args, output_uncertainty=output_uncertainty, **kwargs)
        finally:
            handle.remove()
        output['uncertainty'] = tuple(steps)
        return output
