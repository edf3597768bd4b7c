# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The mixers that are compared, in models of one shape and one size."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from fla.models import GatedDeltaNetConfig, KDAConfig
from transformers import AutoModelForCausalLM

from fla_kdn import KDNConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from benchmarks.compare.settings import Backbone

# KDA with the bounded gate that its faster kernels need; KDN's default is the same kernels
MIXERS = {
    'kdn-diagonal': (KDNConfig, {'covariance': 'diagonal'}),
    'kdn-isotropic': (KDNConfig, {'covariance': 'isotropic'}),
    'kda': (KDAConfig, {'safe_gate': True, 'lower_bound': -5.0}),
    'gated-deltanet': (GatedDeltaNetConfig, {}),
}

# models may differ in size by this much
SIZE_TOLERANCE = 0.01

# weights that all mixers have, of one shape, drawn from one distribution
SHARED_WEIGHTS = (
    'embeddings', 'lm_head', 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'q_conv1d', 'k_conv1d', 'v_conv1d',
)


def build_config(mixer: str, backbone: Backbone, intermediate_size: int) -> PreTrainedConfig:
    """Configuration of the model with this mixer and MLPs of this width."""
    config_class, options = MIXERS[mixer]
    return config_class(
        hidden_size=backbone.hidden_size,
        num_hidden_layers=backbone.num_hidden_layers,
        num_heads=backbone.num_heads,
        head_dim=backbone.head_dim,
        # keys and values of one width in all mixers
        expand_v=1.0,
        intermediate_size=intermediate_size,
        vocab_size=backbone.vocab_size,
        initializer_range=backbone.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )


def count_parameters(config: PreTrainedConfig) -> int:
    """Number of parameters, without allocating them."""
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def matched_config(mixer: str, backbone: Backbone) -> tuple[PreTrainedConfig, int]:
    """The configuration whose number of parameters is nearest to KDA's, and that number."""
    target = count_parameters(build_config('kda', backbone, backbone.intermediate_size))
    step = backbone.width_step
    one, two = (count_parameters(build_config(mixer, backbone, width)) for width in (step, 2 * step))
    # the number grows by the same with each step
    width = step * max(1, 1 + round((target - one) / (two - one)))
    config = build_config(mixer, backbone, width)
    parameters = count_parameters(config)
    if abs(parameters / target - 1) > SIZE_TOLERANCE:
        raise ValueError(f'{mixer}: no width of the MLPs gives {target:,} parameters within {SIZE_TOLERANCE:.0%}')
    return config, parameters


def build_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A fresh model. Weights that all mixers have are the same in all of them for one seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.split('.')[-2] in SHARED_WEIGHTS:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            torch.nn.init.normal_(parameter, std=config.initializer_range, generator=generator)
    return model
