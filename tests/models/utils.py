# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shared by the tests of models: tiny models, decoding without a cache, and code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn as nn
import transformers
from packaging.version import Version

from fla_kdn import KDNConfig, KDNForCausalLM

TESTS = Path(__file__).resolve().parents[1]
# the name of the cache in transformers
CACHE = 'cache' if Version(transformers.__version__) >= Version('5.24.dev0') else 'past_key_values'
OPTIONS = {
    'diagonal': {},
    'isotropic': {'covariance': 'isotropic'},
    'grouped-values': {'num_v_heads': 4, 'expand_v': 2},
    'unfused': {
        'num_v_heads': 4,
        'learn_info_scale': True,
        'tie_word_embeddings': True,
        'fuse_norm': False,
        'fuse_swiglu': False,
        'fuse_cross_entropy': False,
    },
    'hybrid': {
        'num_hidden_layers': 3,
        'attn': {'layers': [0, 2], 'num_heads': 4, 'num_kv_heads': 2, 'qkv_bias': True, 'window_size': 6},
    },
}


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its initial value: zeros, ones and small weights hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


# of a tiny model
SIZES = {
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_heads': 2,
    'head_dim': 8,
    'vocab_size': 50,
    'bos_token_id': None,
    'eos_token_id': None,
}


def make_config(**options) -> KDNConfig:
    return KDNConfig(**{**SIZES, **options})


def make_model(seed: int = 0, **options) -> KDNForCausalLM:
    """A tiny model in evaluation mode with random parameters."""
    torch.manual_seed(seed)
    return randomize(KDNForCausalLM(make_config(**options)), seed).eval()


def make_ids(B: int, T: int, seed: int = 0) -> torch.Tensor:
    """Tokens of `[B, T]`, never 0 or 49: of a padding token in a prompt `generate` infers a mask."""
    return torch.randint(1, 49, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(
    model: nn.Module,
    ids: torch.Tensor,
    num_tokens: int,
    attention_mask: torch.Tensor | None = None,
    context: int | None = None,
) -> torch.Tensor:
    """Greedy continuation of `ids`, without a cache; from only the last `context` tokens, if given."""
    for _ in range(num_tokens):
        start = 0 if context is None else -context
        mask = None if attention_mask is None else attention_mask[:, start:]
        logits = model(ids[:, start:], attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        if attention_mask is not None:
            attention_mask = torch.cat((attention_mask, attention_mask.new_ones(len(ids), 1)), 1)
    return ids


def generate(model: nn.Module, ids: torch.Tensor | None = None, cache=None, **kwargs):
    """Greedy unless told otherwise; `cache` under the name of it in this version of transformers."""
    if cache is not None:
        kwargs[CACHE] = cache
    return model.generate(ids, **{'do_sample': False, 'pad_token_id': 0, **kwargs})


def reference(model: nn.Module, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Greedy without a cache; it must depend on more than the last token."""
    expected = greedy(model, ids, num_tokens)
    assert not torch.equal(expected, greedy(model, ids, num_tokens, context=1)), 'no memory is needed for these tokens'
    return expected


def run_python(code: str, *args: str, **env: str) -> str:
    """Standard output of `code` in a new process, which finds this package and this file."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / 'models'), os.environ.get('PYTHONPATH', '')])
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path, **env},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
