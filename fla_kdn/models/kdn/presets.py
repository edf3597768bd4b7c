# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shapes of models by name: `kdn-SIZE-COVARIANCE`, and `kdn-swa-SIZE-COVARIANCE`, in which every other layer is attention.

Those of 1.3b are the published ones.
"""

from __future__ import annotations

SIZES = {
    'tiny': {'hidden_size': 64, 'num_hidden_layers': 2, 'num_heads': 2, 'head_dim': 32, 'vocab_size': 264},
    '0.1b': {'hidden_size': 768, 'num_hidden_layers': 12, 'num_heads': 6, 'head_dim': 128, 'vocab_size': 32000},
    '0.4b': {'hidden_size': 1536, 'num_hidden_layers': 12, 'num_heads': 12, 'head_dim': 128, 'vocab_size': 32000},
    '750m': {'hidden_size': 2176, 'num_hidden_layers': 12, 'num_heads': 17, 'head_dim': 128, 'vocab_size': 32000},
    '1.3b': {'hidden_size': 2304, 'num_hidden_layers': 18, 'num_heads': 18, 'head_dim': 128, 'vocab_size': 32000},
}
# Width of the MLPs, which makes up for the mixer, in multiples of 8: other widths are slow on a GPU. Parameters without
# embeddings, KDA's included, differ by 0.025 % (1.3b) and 0.028 % (750m). A step of the width is worth more in smaller models;
# these are the nearest, 0.07 % (0.4b), 0.12 % (0.1b) and 1.6 % (tiny) apart.
_WIDTHS = {
    'kdn-{}-isotropic': {'tiny': 176, '0.1b': 2440, '0.4b': 5024, '750m': 6512, '1.3b': 7208},
    'kdn-{}-diagonal': {'tiny': 152, '0.1b': 2352, '0.4b': 4944, '750m': 6432, '1.3b': 7128},
    'kdn-swa-{}-isotropic': {'tiny': 200, '0.1b': 2528, '0.4b': 5120, '750m': 6608, '1.3b': 7304},
    'kdn-swa-{}-diagonal': {'tiny': 192, '0.1b': 2488, '0.4b': 5080, '750m': 6568, '1.3b': 7264},
}


def _make_presets() -> dict[str, dict]:
    presets = {}
    for size, fields in SIZES.items():
        for kind, widths in _WIDTHS.items():
            preset = {**fields, 'covariance': kind.rpartition('-')[2], 'intermediate_size': widths[size]}
            if 'swa' in kind:
                # every other layer, the second one first
                layers = list(range(1, fields['num_hidden_layers'], 2))
                window_size = 64 if size == 'tiny' else 2048
                preset['attn'] = {'layers': layers, 'num_heads': fields['num_heads'], 'window_size': window_size}
            presets[kind.format(size)] = preset
    return presets


PRESETS = _make_presets()
