# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Code file of a KDN checkpoint: `trust_remote_code=True` finds here the classes of the installed package."""

try:
    from fla_kdn.models.kdn import KDNConfig, KDNForCausalLM, KDNModel
except ModuleNotFoundError as error:
    if error.name != 'fla_kdn':
        raise
    raise ImportError('This checkpoint is a Kalman Delta Network; its code, the package fla_kdn, is not installed.') from error

__all__ = ['KDNConfig', 'KDNForCausalLM', 'KDNModel']
