# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Kalman Delta Networks for flash-linear-attention.

Importing the package registers KDN with AutoConfig, AutoModel and AutoModelForCausalLM, beside FLA's own models, and lets
FLA's modules take CPU tensors.
"""

import fla  # noqa: F401

from fla_kdn import backends  # noqa: F401
from fla_kdn.layers import KalmanDeltaNet
from fla_kdn.models import KDNConfig, KDNForCausalLM, KDNModel

__version__ = '0.1.0'

__all__ = [
    'KDNConfig',
    'KDNForCausalLM',
    'KDNModel',
    'KalmanDeltaNet',
]
