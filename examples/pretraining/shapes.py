# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shapes of the runs, by name, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fla.models import KDAConfig
from transformers import AutoConfig, AutoModelForCausalLM

from fla_kdn import KDNConfig
from fla_kdn.models.kdn.presets import PRESETS as KDN_PRESETS
from fla_kdn.models.kdn.presets import SIZES
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# width of KDA's MLPs; see those of KDN
KDA_WIDTHS = {'tiny': 176, '0.1b': 2440, '0.4b': 5032, '750m': 6520, '1.3b': 7216}
# tokens of the paper's runs
BUDGETS = {'750m': 50e9, '1.3b': 100e9}

# dense bf16 FLOPs a second, by a part of the device's name
PEAK_FLOPS = {'B200': 2250e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'MI300X': 1307e12}

GIB = 2 ** 30


PRESETS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    **{name: (KDNConfig, fields) for name, fields in KDN_PRESETS.items()},
    **{f'kda-{size}': (KDAConfig, {**SIZES[size], 'intermediate_size': width}) for size, width in KDA_WIDTHS.items()},
}


def make_config(model: str, overrides: dict | None = None) -> PreTrainedConfig:
    """The config of a preset, or of a file (or folder) with a config of any registered model; `overrides` are fields of it."""
    if model in PRESETS:
        config_class, fields = PRESETS[model]
        config = config_class(**fields)
    elif Path(model).exists():
        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ValueError(f'--model: {model!r} has no config that transformers can read: {error}') from None
        config_class, fields = type(config), config.to_dict()
    else:
        raise ValueError(f'--model: {model!r} is neither a file with a config nor a preset; presets: {", ".join(PRESETS)}.')
    if not overrides:
        return config
    if unknown := [name for name in overrides if not hasattr(config, name)]:
        raise ValueError(f'--config_overrides: {config_class.__name__} has no {", ".join(unknown)}.')
    try:
        # built again, for its checks to see them
        return config_class.from_dict({**fields, **overrides})
    except TypeError as error:
        raise ValueError(f'--config_overrides {overrides}: {error}') from None


def token_budget(model: str) -> int | None:
    """Tokens that a preset is trained on in the paper."""
    return next((int(tokens) for size, tokens in BUDGETS.items() if model in PRESETS and f'-{size}' in model), None)


def peak_flops() -> float | None:
    """FLOPs that this device can do in a second, in bf16; `None` if not known."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without its weights."""
    with torch.device('meta'):
        return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class Costs:
    """What a model costs; see :func:`costs`.

    Attributes:
        parameters (int): all parameters.
        non_embedding (int): parameters but those of the embedding and of an untied head.
        state_bytes (int): what decoding keeps of a sequence: memories and covariances in fp32, the rest in bf16.
        flops_per_token (float): forward and backward.
        block (int): parameters of the largest block.
        activations (int): bytes that the blocks keep of a token for backward.
        block_activations (int): of these, the largest block's.
        block_inputs (int): bytes of a token at the inputs of all blocks, which activation checkpointing keeps.
        logits (int): bytes of a token's logits.
    """

    parameters: int
    non_embedding: int
    state_bytes: int
    flops_per_token: float
    block: int
    activations: int
    block_activations: int
    block_inputs: int
    logits: int

    def memory(self, rows: int, gpus: int, parallel: str, checkpointing: bool, accumulates: bool) -> float:
        """
        Estimated bytes on each GPU in training, with bf16 autocast; `rows` are the tokens of a micro-batch.

        Weights, gradients and both moments of AdamW are fp32, 16 bytes a parameter, in equal shares under FSDP. FSDP also
        has embedding, head and two blocks whole, and whole gradients where a step has more than one micro-batch; DDP has
        buckets of gradients. Autocast's bf16 weights live from forward to backward.
        """
        N, embedding = self.parameters, self.parameters - self.non_embedding
        if gpus == 1:
            weights = 16 * N
        elif parallel == 'ddp':
            weights = 20 * N
        else:
            weights = 16 * N / gpus + 4 * (embedding + 2 * self.block) + (4 * N if accumulates else 0)
        kept = self.block_inputs + self.block_activations if checkpointing else self.activations
        return weights + 2 * (self.block if checkpointing else N) + rows * (kept + self.logits)


def costs(model: nn.Module, seq_len: int) -> Costs:
    """
    Costs of a model, which may be on the meta device, on sequences of `seq_len` = T tokens.

    FLOPs of a token, forward and backward:

        6 N                       a multiply and an add, three times, for each of the N parameters but those of an
                                  embedding that is not also the head
        18 HV K V                 a layer with HV memories of K x V: it reads the memory for the error and for the output
                                  and writes it, each 2 K V
        12 H K mean(visible)      softmax attention: scores and sums over the visible tokens, min(t, window) for token t

    What chunks do beyond the recurrence, and what activation checkpointing does twice, are not counted.

    Bytes of a token that are kept for backward, under bf16 autocast, as the kernels save them: 12 D + 4 F in each block of
    width D with an MLP of width F; 4 (2 H K + HV V) around the convolutions, 12 HV K for decay, noise and whitened keys,
    4 HV BT inside chunks and 6 HV V for gate and norm in a layer with memories; 12 D in one with attention.
    """
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    used = parameters - (embedding.numel() if head is not embedding else 0)
    flops, state = 6 * used, 0
    for module in model.modules():
        flops += mixer_flops(module, seq_len)
        state += mixer_state_bytes(module)
    blocks = list(_blocks(model))
    activations = [_activation_bytes(block, config.hidden_size) for block in blocks] or [0]
    return Costs(
        parameters=parameters,
        non_embedding=used - head.numel(),
        state_bytes=state,
        flops_per_token=flops,
        block=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
        activations=sum(activations),
        block_activations=max(activations),
        block_inputs=4 * config.hidden_size * len(blocks),
        # bf16, and accelerate's copy in fp32
        logits=6 * config.vocab_size,
    )


def is_covered(model: nn.Module) -> bool:
    """Whether :func:`costs` knows the blocks of a model, and not only its parameters."""
    mixers = [block.attn for block in _blocks(model)]
    return bool(mixers) and all(_has_memory(mixer) or _is_attention(mixer) for mixer in mixers)


def _has_memory(module: nn.Module) -> bool:
    return hasattr(module, 'head_k_dim') and hasattr(module, 'head_v_dim')


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, 'window_size') and hasattr(module, 'num_kv_heads')


def _memories(module: nn.Module) -> int:
    return getattr(module, 'num_v_heads', None) or module.num_heads


def mixer_flops(module: nn.Module, seq_len: int) -> float:
    """FLOPs of a token, forward and backward, in a mixer besides its projections; 0 for other modules."""
    if _has_memory(module):
        return 18 * _memories(module) * module.head_k_dim * module.head_v_dim
    if _is_attention(module):
        window = min(module.window_size or seq_len, seq_len)
        visible = window - window * (window - 1) / (2 * seq_len)
        return 12 * module.num_heads * module.head_dim * visible
    return 0


def mixer_state_bytes(module: nn.Module) -> int:
    """What a mixer keeps of a sequence while it decodes; 0 for other modules, and for attention without a window."""
    if _has_memory(module):
        HV, K, V = _memories(module), module.head_k_dim, module.head_v_dim
        size = 4 * HV * K * V
        if hasattr(module, 'covariance'):
            size += 4 * HV * (K if module.covariance == 'diagonal' else 1)
        if getattr(module, 'use_short_conv', False):
            size += 2 * module.conv_size * (2 * module.key_dim + module.value_dim)
        return size
    if _is_attention(module) and module.window_size is not None:
        return 2 * 2 * module.window_size * module.kv_dim
    return 0


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if hasattr(module, 'attn') and hasattr(module, 'mlp'))


def _activation_bytes(block: nn.Module, hidden_size: int) -> int:
    """Bytes that a block keeps of a token for backward; see :func:`costs`."""
    size = 12 * hidden_size + 4 * getattr(block.mlp, 'intermediate_size', 0)
    mixer = block.attn
    if not _has_memory(mixer):
        return size + 12 * hidden_size
    HV, K, V = _memories(mixer), mixer.head_k_dim, mixer.head_v_dim
    return size + 4 * (2 * mixer.key_dim + mixer.value_dim) + 12 * HV * K + 4 * HV * CHUNK_SIZE + 6 * HV * V


def count(number: float) -> str:
    """Three digits and a unit."""
    for unit, size in (('P', 1e15), ('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if number >= size:
            return f'{number / size:.{max(0, 2 - int(math.log10(number / size)))}f} {unit}'
    return f'{number:g} '
