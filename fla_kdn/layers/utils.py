# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import torch
from fla.layers import utils

# not compiled: a graph that knows the index of its layer would serve no other
get_layer_cache = torch.compiler.disable(utils.get_layer_cache)
update_layer_cache = torch.compiler.disable(utils.update_layer_cache)


def check_mask(attention_mask: torch.Tensor | None, batch_size: int, seq_len: int) -> None:
    """Raise a `ValueError` unless the mask is a matrix for at least the last `seq_len` tokens of `batch_size` rows."""
    if attention_mask is None:
        return
    shape = attention_mask.shape
    if len(shape) != 2 or shape[0] != batch_size or shape[1] < seq_len:
        raise ValueError(
            f'attention_mask must be a 0-1 matrix of shape [batch_size, seq_len] (0 indicating padding) for at least the '
            f'{seq_len} tokens of {batch_size} rows, got shape {list(shape)}.',
        )
