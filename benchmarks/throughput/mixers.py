# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The mixers that are timed: as models of one size, and as layers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fla.layers.gdn2 import GatedDeltaNet2
from transformers import AutoModelForCausalLM

from examples.pretraining.shapes import PRESETS, SIZES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# preset of a size, and what differs from it; KDA's presets have the gate that is its layer's default
MODELS = {
    'kdn-diagonal': ('kdn-{}-diagonal', {}),
    'kdn-isotropic': ('kdn-{}-isotropic', {}),
    'kdn-swa-diagonal': ('kdn-swa-{}-diagonal', {}),
    'kda': ('kda-{}', {}),
    'kda-bounded': ('kda-{}', {'safe_gate': True, 'lower_bound': -5.0}),
    'attention': ('kdn-swa-{}-diagonal', {}),
}
# alone, the hybrid is its two kinds of layers; FLA has no model of GDN-2
LAYERS = ('kdn-diagonal', 'kdn-isotropic', 'kda', 'kda-bounded', 'gdn2', 'attention', 'window')
# between them they have all kernels
COMPILED = ('kdn-diagonal', 'kdn-isotropic', 'kda', 'kda-bounded', 'gdn2', 'attention')


def make_config(mixer: str, size: str, num_hidden_layers: int | None = None) -> PreTrainedConfig:
    """Configuration of the model, or of its first layers."""
    preset, options = MODELS[mixer]
    config_class, fields = PRESETS[preset.format(size)]
    fields = {**fields, **options}
    if mixer == 'attention':
        # softmax in place of the other half of the hybrid's layers too: the width of the MLPs grows by as much again
        fields['intermediate_size'] += fields['intermediate_size'] - PRESETS[f'kdn-{size}-diagonal'][1]['intermediate_size']
        fields['attn'] = {'layers': list(range(fields['num_hidden_layers'])), 'num_heads': fields['num_heads']}
    if num_hidden_layers is not None:
        fields['num_hidden_layers'] = num_hidden_layers
        if 'attn' in fields:
            layers = [layer for layer in fields['attn']['layers'] if layer < num_hidden_layers]
            fields['attn'] = {**fields['attn'], 'layers': layers} if layers else None
    return config_class(**fields)


def make_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_layer(mixer: str, size: str, device: torch.device) -> nn.Module:
    """A mixer of LAYERS in fp32, as it is in the model."""
    if mixer == 'gdn2':
        shape = SIZES[size]
        with device:
            return GatedDeltaNet2(shape['hidden_size'], head_dim=shape['head_dim'], num_heads=shape['num_heads'], layer_idx=0)
    # in the hybrid, the second layer is the first with a window
    config = make_config('kdn-swa-diagonal', size, 2) if mixer == 'window' else make_config(mixer, size, 1)
    return make_model(config, device).model.layers[-1].attn
