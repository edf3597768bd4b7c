# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The mixers that are compared, in models of one shape and one size."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from fla.models import GatedDeltaNetConfig, KDAConfig, PrecondKDAConfig
from transformers import AutoModelForCausalLM

from benchmarks.compare.models import MixerConfig
from fla_kdn import KDNConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

    from benchmarks.compare.settings import Backbone


@dataclass(frozen=True)
class Mixer:
    """How a mixer is called, its model's configuration and options, and how it is drawn."""
    label: str
    config_class: type[PreTrainedConfig]
    options: Callable[[Backbone], dict]
    color: str
    marker: str
    needs_gpu: bool = False


def windows(backbone: Backbone) -> dict:
    """Softmax attention in every second layer, over a window shorter than the sequences, with heads of the same size."""
    layers, heads = list(range(1, backbone.num_hidden_layers, 2)), backbone.hidden_size // backbone.head_dim
    return {'attn': {'layers': layers, 'num_heads': heads, 'window_size': 64}}


def variants(covariance: str, label: str, colors: tuple[str, ...]) -> Iterator[tuple[str, Mixer]]:
    """KDN with one option changed; K is `head_dim`, and info_scale = K the default."""
    options = {
        'mu-1': ('μ = 1', lambda backbone: {'info_scale': 1.0}),
        'mu-sqrtK': ('μ = √K', lambda backbone: {'info_scale': math.sqrt(backbone.head_dim)}),
        'mu-4K': ('μ = 4K', lambda backbone: {'info_scale': 4.0 * backbone.head_dim}),
        'mu-learned': ('μ learned', lambda backbone: {'learn_info_scale': True}),
        'r-1': ('r = 1', lambda backbone: {'fixed_r': 1.0}),
        'r-1-omega-1': ('r = ω = 1', lambda backbone: {'fixed_r': 1.0, 'fixed_omega': 1.0}),
    }
    for (name, (change, make)), color, marker in zip(options.items(), colors, 'v^<>PX', strict=True):
        mixer = Mixer(
            f'{label}, {change}', KDNConfig, lambda x, make=make: {'covariance': covariance, **make(x)}, color, marker,
        )
        yield f'kdn-{covariance}-{name}', mixer


MIXERS = {
    'kdn-diagonal': Mixer('KDN diagonal', KDNConfig, lambda backbone: {'covariance': 'diagonal'}, '#3b7dd8', 'o'),
    'kdn-isotropic': Mixer('KDN isotropic', KDNConfig, lambda backbone: {'covariance': 'isotropic'}, '#2aa198', 's'),
    # with the bounded gate that its faster kernels need; KDN's default is the same kernels
    'kda': Mixer('KDA', KDAConfig, lambda backbone: {'safe_gate': True, 'lower_bound': -5.0}, '#e08a1e', 'D'),
    'gated-deltanet': Mixer('Gated DeltaNet', GatedDeltaNetConfig, lambda backbone: {}, '#a65fb5', '^'),
    'gdn2': Mixer('GDN-2', MixerConfig, lambda backbone: {'mixer': 'gdn2'}, '#d6455d', 'v', needs_gpu=True),
    'precond-kda': Mixer('Preconditioned KDA', PrecondKDAConfig, lambda backbone: {}, '#8a5a2b', '<', needs_gpu=True),
    'mamba2': Mixer('Mamba-2', MixerConfig, lambda backbone: {'mixer': 'mamba2'}, '#7f8c1f', '>', needs_gpu=True),
    'attention': Mixer('Softmax attention', MixerConfig, lambda backbone: {'mixer': 'attention'}, '#7a7f87', 'P'),
    'kdn-window': Mixer('KDN diagonal + window', KDNConfig, windows, '#5b4fd6', 'X'),
    'kdn-exact': Mixer('KDN exact', MixerConfig, lambda backbone: {'mixer': 'kdn-exact'}, '#c2188f', '*'),
    **dict(variants('diagonal', 'Diagonal', ('#9ec5f5', '#6aa5ea', '#1e4f96', '#7d5fd3', '#c05299', '#8c2f5c'))),
    **dict(variants('isotropic', 'Isotropic', ('#9adbd3', '#57c1b5', '#14655d', '#6a9a3a', '#c9a227', '#8c6d0f'))),
}

# models may differ in size by this much
SIZE_TOLERANCE = 0.01

# weights that all mixers have, of one shape, drawn from one distribution
SHARED_WEIGHTS = (
    'embeddings', 'lm_head', 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'q_conv1d', 'k_conv1d', 'v_conv1d',
)


def build_config(mixer: str, backbone: Backbone, intermediate_size: int) -> PreTrainedConfig:
    """Configuration of the model with this mixer and MLPs of this width."""
    return MIXERS[mixer].config_class(
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
        **MIXERS[mixer].options(backbone),
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
