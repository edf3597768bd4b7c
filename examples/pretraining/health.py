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
from torch.nn import functional as F

from fla_kdn import KalmanDeltaNet
from fla_kdn.ops.kdn.gain import CovarianceScan
from fla_kdn.ops.kdn.inputs import LOWER_BOUND, expand_cov, expand_info_scale, l2norm, log_decay, noise

if TYPE_CHECKING:
    from torch import nn


def layer_health(layer: KalmanDeltaNet, x: torch.Tensor, cu_seqlens: torch.LongTensor | None = None) -> torch.Tensor:
    """
    Mean write strength, smallest and largest predicted covariance, and the share of decays at the floor, `[4]`, of a layer on
    its inputs `x` `[B, T, hidden_size]`.

    A token writes with the strength `k^T kappa = n / (r + n)`, `n = k^T P^ k`: that share of the error at its key it corrects.
    """
    k = layer.k_proj(x)
    k = layer.k_conv1d(x=k, cu_seqlens=cu_seqlens)[0] if layer.use_short_conv else F.silu(k)
    k = l2norm(k.float().unflatten(-1, (-1, layer.head_k_dim)))
    k2 = k.square().repeat_interleave(layer.num_v_heads // layer.num_heads, dim=2)
    g = layer.f_proj(x).float().unflatten(-1, (-1, layer.head_k_dim))
    g = log_decay(g, layer.A_log, layer.dt_bias)
    floor = LOWER_BOUND if layer.lower_bound is None else layer.lower_bound
    at_floor = (g <= floor).float().mean() if layer.safe_gate else g.new_zeros(())
    if layer.safe_gate:
        g = g.clamp(min=floor)
    parts = layer.noise(x)
    omega, r = noise(parts.pop('omega').float(), parts.pop('r').float(), **parts)
    r = r.unsqueeze(-1)
    mu = layer.log_info_scale.exp() if layer.learn_info_scale else layer.info_scale
    mu = expand_info_scale(mu, k, layer.num_v_heads).unsqueeze(-1)
    a, seen = (2 * g).exp(), mu * k2
    if layer.covariance == 'isotropic':
        a, seen, omega = a.mean(-1, keepdim=True), seen.mean(-1, keepdim=True), omega.unsqueeze(-1)
    p0 = expand_cov(layer.prior_covariance(), layer.covariance, k, layer.num_v_heads, cu_seqlens)
    p_hat = CovarianceScan.apply(a, omega, seen / r, p0, cu_seqlens)
    n = (p_hat * k2).sum(-1, keepdim=True)
    return torch.stack(((n / (r + n)).mean(), *p_hat.aminmax(), at_floor))


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
