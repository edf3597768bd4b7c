# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Cross entropy losses for CPU tensors: `[N, V]` logits, `[N]` targets, one vocabulary shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from fla.modules.fused_cross_entropy import ops
from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_bwd

from fla_kdn.backends.torch.activation import upcast
from fla_kdn.backends.torch.registry import register_torch, replace_on_cpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHARDED = 'Cross entropy on the CPU does not support a vocabulary sharded over ranks.'


def _transform(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    z = upcast(logits) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


@register_torch(ops.cross_entropy_fwd)
def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    N, V = logits.shape
    assert target.shape == (N,), f'expected targets {(N,)}, got {tuple(target.shape)}'
    if process_group is not None and torch.distributed.get_world_size(process_group) > 1:
        raise NotImplementedError(_SHARDED)
    z = _transform(logits, logit_scale, logit_softcapping)
    lse = z.logsumexp(-1)
    z_loss = lse_square_scale * lse.square()
    # -z[target], with an IndexError for a target that is neither a class nor ignored
    loss = (1 - label_smoothing) * F.nll_loss(z, target.long(), ignore_index=ignore_index, reduction='none')
    loss = loss + lse + z_loss
    if label_smoothing > 0:
        loss = loss - label_smoothing * z.mean(-1)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0.0), z_loss.masked_fill(ignored, 0.0), lse, V, 0


@register_torch(ops.cross_entropy_bwd)
@torch.no_grad()
def cross_entropy_bwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    total_classes: int | None = None,
    class_start_idx: int = 0,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """dz = dloss * (p (1 + 2 lse_square_scale lse) - (1 - label_smoothing) onehot(target) - label_smoothing / V)."""
    if class_start_idx != 0 or total_classes not in (None, logits.shape[1]):
        raise NotImplementedError(_SHARDED)
    z = _transform(logits, logit_scale, logit_softcapping)
    ignored = target == ignore_index
    # masked, not multiplied by zero: the mean over no targets has an infinite gradient
    dloss = dloss.masked_fill(ignored, 0.0) * logit_scale
    dlogits = (z - lse[:, None]).exp_()
    dlogits *= (dloss * (1 + 2 * lse_square_scale * lse))[:, None]
    if label_smoothing > 0:
        dlogits -= (label_smoothing / z.shape[1] * dloss)[:, None]
    index = target.long().masked_fill(ignored, 0)[:, None]
    dlogits.scatter_add_(1, index, ((label_smoothing - 1) * dloss)[:, None])
    if logit_softcapping is not None:
        dlogits *= 1 - (z / logit_softcapping).square()
    return logits.copy_(dlogits) if inplace_backward else dlogits.to(logits.dtype)


@register_torch(fused_linear_cross_entropy_bwd)
@torch.no_grad()
def scale_gradients(
    do: torch.Tensor,
    dx: torch.Tensor,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if grad is None else grad * do for grad in (dx, dw, db))


# the module asserts a GPU ahead of the dispatched functions
@replace_on_cpu(ops.FusedCrossEntropyLoss, 'forward')
def fused_cross_entropy_loss_forward(
    self: ops.FusedCrossEntropyLoss,
    input: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    losses = ops.cross_entropy_loss(
        logits=input,
        target=target,
        label_smoothing=self.label_smoothing,
        logit_scale=self.logit_scale,
        lse_square_scale=self.lse_square_scale,
        logit_softcapping=self.logit_softcapping,
        ignore_index=self.ignore_index,
        inplace_backward=self.inplace_backward,
        process_group=self.process_group,
    )
    if self.reduction != 'none':
        losses = [x.sum() for x in losses]
    if self.reduction == 'mean':
        total = (target != self.ignore_index).sum()
        losses = [x / total for x in losses]
    return tuple(losses) if self.return_z_loss else losses[0]
