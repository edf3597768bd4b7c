# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from .chunk import chunk_kdn
from .fused_recurrent import fused_recurrent_kdn
from .naive import naive_chunk_kdn, naive_recurrent_exact_kdn, naive_recurrent_kdn
from .uncertainty import KDNUncertainty

__all__ = [
    'KDNUncertainty',
    'chunk_kdn',
    'fused_recurrent_kdn',
    'naive_chunk_kdn',
    'naive_recurrent_exact_kdn',
    'naive_recurrent_kdn',
]
