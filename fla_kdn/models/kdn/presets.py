# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shapes of the published KDN runs, by name."""

from __future__ import annotations

_1_3B = {'hidden_size': 2304, 'num_hidden_layers': 18, 'num_heads': 18, 'head_dim': 128, 'vocab_size': 32000}
# every other layer, the second one first
_SWA = {'layers': list(range(1, 18, 2)), 'num_heads': 18, 'window_size': 2048}

# the width of the MLP makes up for the mixer: parameters without embeddings differ by less than 0.03 %
PRESETS = {
    'kdn-1.3b-isotropic': {**_1_3B, 'covariance': 'isotropic', 'intermediate_size': 7208},
    'kdn-1.3b-diagonal': {**_1_3B, 'covariance': 'diagonal', 'intermediate_size': 7128},
    'kdn-swa-1.3b-isotropic': {**_1_3B, 'covariance': 'isotropic', 'intermediate_size': 7304, 'attn': _SWA},
    'kdn-swa-1.3b-diagonal': {**_1_3B, 'covariance': 'diagonal', 'intermediate_size': 7264, 'attn': _SWA},
}
