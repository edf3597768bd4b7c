# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shared by the tests of evaluations: tiny models in folders, with a tokenizer of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fla.models import GatedDeltaNetConfig, KDAConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fla_kdn import KDNConfig

if TYPE_CHECKING:
    from pathlib import Path

MODELS = {
    'diagonal': (KDNConfig, {}),
    'isotropic': (KDNConfig, {'covariance': 'isotropic'}),
    'hybrid': (KDNConfig, {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 16}}),
    'kda': (KDAConfig, {}),
    'gated-deltanet': (GatedDeltaNetConfig, {}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(['<pad>', '<eos>', *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token='<pad>', eos_token='<eos>')


@torch.no_grad()
def make_model(name: str, vocab_size: int = 258) -> torch.nn.Module:
    """A model of two layers whose parameters are all off their initial values."""
    config_class, options = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=16,
        expand_v=1.0,
        intermediate_size=32,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=1 if vocab_size == 258 else None,
        max_position_embeddings=512,
        **options,
    ))
    for p in model.parameters():
        p += 0.2 * torch.randn_like(p)
    return model.eval()


def save(folder: Path, name: str) -> str:
    """The folder of such a model and of its tokenizer."""
    make_model(name).save_pretrained(folder / name)
    make_tokenizer().save_pretrained(folder / name)
    return str(folder / name)
