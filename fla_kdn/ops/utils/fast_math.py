# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Elementary functions at one instruction each, where Triton's own cost 8 (division) to 20 (logarithms) on NVIDIA GPUs.

Errors: 1 ulp of the reciprocal; 2^-22 of the logarithm, absolute between 1/2 and 2, relative elsewhere. Subnormals count as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice
from fla.utils import IS_NVIDIA

if IS_NVIDIA:
    @triton.jit
    def fast_log2(x):
        return tldevice.fast_log2f(x)

    @triton.jit
    def fast_rcp(x):
        return tldevice.fast_dividef(1., x)
else:
    @triton.jit
    def fast_log2(x):
        return tl.log2(x)

    @triton.jit
    def fast_rcp(x):
        return 1. / x
