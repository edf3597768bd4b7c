# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Which parameters of a model take weight decay, told by their names: loading drops FLA's mark `_no_weight_decay`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

# parameters of KDN and of FLA's other mixers, biases, and the weights of norms
NO_WEIGHT_DECAY = re.compile(r'(^|\.)(A_log|D|L|log_info_scale|prior_precision)$|bias$|norm\d*\.')


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter: ZeRO-3 empties it and keeps the shape."""
    return getattr(parameter, 'ds_shape', parameter.shape)


def _is_vector(parameter: nn.Parameter) -> bool:
    # FSDP 1 flattens parameters in place
    return len(whole_shape(parameter)) < 2 and not getattr(parameter, '_fsdp_flattened', False)


def no_weight_decay_names(model: nn.Module) -> set[str]:
    """Names, in `model.named_parameters()`, of the parameters that weight decay must leave alone.

    They are `A_log`, `dt_bias`, `D`, `L`, `prior_precision`, `log_info_scale`, the weights of norms, all biases and all other
    vectors, in KDN and in FLA's models, loaded or new, in wrappers and with adapters.
    """
    return {name for name, p in model.named_parameters() if NO_WEIGHT_DECAY.search(name) or _is_vector(p)}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters for a `torch.optim` optimizer: a group with `weight_decay`, and one without.

    Example::

        optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
    """
    undecayed = no_weight_decay_names(model)
    groups = [{'params': [], 'weight_decay': weight_decay}, {'params': [], 'weight_decay': 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name in undecayed]['params'].append(parameter)
    return groups


class DecayByNameMixin:
    """Lets a transformers `Trainer`, or TRL's, decay these parameters only.

    Unlike an optimizer passed to the trainer it works under FSDP, with adapters that the trainer adds, and with all
    optimizers and rates of `TrainingArguments`.

    Example::

        class KDNTrainer(DecayByNameMixin, Trainer):
            pass
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        undecayed = no_weight_decay_names(model)
        return [name for name, _ in model.named_parameters() if name not in undecayed]
