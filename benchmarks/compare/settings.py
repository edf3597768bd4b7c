# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Sizes of the comparison. Every mixer gets the same backbone, data, optimizer and number of parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backbone:
    """Shape of the models; `intermediate_size` is KDA's, the other mixers' follows from its number of parameters."""
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    # the width of the MLPs is a multiple of it
    width_step: int
    initializer_range: float
    vocab_size: int = 256


@dataclass(frozen=True)
class Training:
    """How long and how fast a task is trained."""
    steps: int
    # tokens of a step
    tokens: int
    learning_rate: float


@dataclass(frozen=True)
class Recall:
    """Key-value recall; keys are the tokens below `symbols`, values the next `symbols` tokens."""
    symbols: int
    # numbers of pairs in a sequence
    train_pairs: tuple[int, ...]
    eval_pairs: tuple[int, ...]
    eval_sequences: int


@dataclass(frozen=True)
class Preset:
    backbone: Backbone
    seq_len: int
    language: Training
    recall: Training
    recall_data: Recall
    device: str
    bf16: bool
    # speed: sequences decoded together, tokens of a timed block, blocks (and training steps) of which the median is taken
    decode_batch: int
    decode_tokens: int
    repeats: int


PRESETS = {
    'cpu': Preset(
        backbone=Backbone(
            hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32, intermediate_size=160, width_step=1,
            initializer_range=0.06,
        ),
        seq_len=256,
        language=Training(steps=400, tokens=2048, learning_rate=1e-2),
        recall=Training(steps=600, tokens=2048, learning_rate=2e-3),
        recall_data=Recall(symbols=64, train_pairs=(2, 4, 8, 16), eval_pairs=(4, 8, 16, 32, 64), eval_sequences=64),
        device='cpu',
        bf16=False,
        decode_batch=4,
        decode_tokens=16,
        repeats=7,
    ),
    'gpu': Preset(
        backbone=Backbone(
            hidden_size=512, num_hidden_layers=6, num_heads=4, head_dim=128, intermediate_size=1408, width_step=32,
            initializer_range=0.02,
        ),
        seq_len=1024,
        language=Training(steps=500, tokens=16384, learning_rate=1e-3),
        recall=Training(steps=2000, tokens=16384, learning_rate=1e-3),
        recall_data=Recall(
            symbols=128, train_pairs=(2, 4, 8, 16, 32, 64), eval_pairs=(8, 16, 32, 64, 128), eval_sequences=256,
        ),
        device='cuda',
        bf16=True,
        decode_batch=32,
        decode_tokens=64,
        repeats=15,
    ),
}
