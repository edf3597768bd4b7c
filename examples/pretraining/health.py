# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""How the KDN layers of a model are doing: how strongly they write, how uncertain they are, whether they forget at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_kdn import KalmanDeltaNet
from fla_kdn.ops.kdn.inputs import LOWER_BOUND

if TYPE_CHECKING:
    from torch import nn


def layer_health(layer: KalmanDeltaNet, x: torch.Tensor, cu_seqlens: torch.LongTensor | None = None) -> torch.Tensor:
    """
    Mean write strength, smallest and largest predicted covariance, and the share of decays at the floor, `[4]`, of a layer on
    its inputs `x` `[B, T, hidden_size]`.

    A token writes with the strength `k^T kappa = n / (r + n)`, `n = k^T P^ k`: that share of the error at its key it corrects.
    """
    p_hat, k2, inputs = layer.predicted_covariance(x, cu_seqlens)
    n, g = (p_hat * k2).sum(-1), inputs['g']
    floor = LOWER_BOUND if layer.lower_bound is None else layer.lower_bound
    at_floor = (g <= floor).float().mean() if layer.safe_gate else g.new_zeros(())
    return torch.stack(((n / (inputs['r'] + n)).mean(), *p_hat.aminmax(), at_floor))


@torch.no_grad()
def measure_health(model: nn.Module, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> dict[str, float]:
    """What :func:`layer_health` says of all KDN layers of a model, on one forward pass; nothing if it has none."""
    layers, found = [module for module in model.modules() if isinstance(module, KalmanDeltaNet)], []
    if not layers:
        return {}

    def measure(layer: KalmanDeltaNet, args: tuple, kwargs: dict) -> None:
        found.append(layer_health(layer, kwargs['hidden_states'], kwargs.get('cu_seqlens')))

    hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    training = model.training
    try:
        extra = {} if cu_seqlens is None else {'cu_seqlens': cu_seqlens}
        model.eval()(input_ids=input_ids, use_cache=False, logits_to_keep=1, **extra)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    strengths, smallest, largest, at_floor = torch.stack(found).T
    means = torch.stack((strengths.mean(), smallest.min(), largest.max(), at_floor.mean()))
    names = ('write_strength', 'covariance_min', 'covariance_max', 'decay_floor_share')
    return {f'kdn_{name}': value for name, value in zip(names, means.tolist(), strict=True)}
