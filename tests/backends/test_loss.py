# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from fla.modules.fused_cross_entropy.ops import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_loss
from fla.modules.l2warp import l2_warp

import fla_kdn.backends.torch.loss  # noqa: F401

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
OPTIONS = [
    {},
    {'label_smoothing': 0.1},
    {'logit_scale': 0.7},
    {'logit_softcapping': 2.0},
    {'lse_square_scale': 1e-2},
    {'ignore_index': 3},
    {'label_smoothing': 0.2, 'logit_scale': -1.5, 'logit_softcapping': 3.0, 'lse_square_scale': 0.1, 'ignore_index': 0},
]


def loss_ref(
    logits,
    target,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    logit_softcapping=None,
    ignore_index=-100,
):
    """The distance to smoothed one-hot targets, token by token; also its z-loss."""
    z = logits * logit_scale
    z = z if logit_softcapping is None else logit_softcapping * (z / logit_softcapping).tanh()
    rows = [i for i, t in enumerate(target.tolist()) if t != ignore_index]
    loss, z_loss = z.new_zeros(len(target)), z.new_zeros(len(target))
    onehot = F.one_hot(target[rows], z.shape[-1]).to(z)
    goal = (1 - label_smoothing) * onehot + label_smoothing / z.shape[-1]
    z_loss[rows] = lse_square_scale * z[rows].exp().sum(-1).log() ** 2
    loss[rows] = -(goal * z[rows].log_softmax(-1)).sum(-1) + z_loss[rows]
    return loss, z_loss


def reduce_ref(loss, target, reduction, ignore_index=-100):
    if reduction == 'mean':
        return loss.sum() / (target != ignore_index).sum()
    return loss.sum() if reduction == 'sum' else loss


def close(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def random_target(N, V, ignore_index=-100):
    target = torch.randint(V, (N,))
    target[::4] = ignore_index
    return target


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('options', OPTIONS, ids=lambda options: '-'.join(options) or 'plain')
def test_cross_entropy(options, reduction, dtype):
    torch.manual_seed(0)
    N, V = 12, 7
    logits = (2 * torch.randn(N, V, dtype=dtype)).requires_grad_()
    copy = logits.detach().double().requires_grad_()
    target = random_target(N, V, options.get('ignore_index', -100))
    criterion = FusedCrossEntropyLoss(reduction=reduction, return_z_loss=True, **options)

    loss, z_loss = criterion(logits, target)
    ref, z_ref = (reduce_ref(x, target, reduction, criterion.ignore_index) for x in loss_ref(copy, target, **options))
    dloss = torch.randn_like(loss)
    grads = torch.autograd.grad(loss, logits, dloss)
    close((loss, z_loss, *grads), (ref, z_ref, *torch.autograd.grad(ref, copy, dloss.double())), dtype)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not z_loss.requires_grad

    criterion.return_z_loss = False
    assert criterion(logits, target.int()).equal(loss)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('options', [x for x in OPTIONS if 'lse_square_scale' not in x], ids=lambda options: '-'.join(options))
def test_linear_cross_entropy(options, reduction, dtype):
    torch.manual_seed(0)
    B, T, D, V = 2, 9, 8, 24
    inputs = [torch.randn(*s, dtype=dtype) for s in ((B, T, D), (V, D), (V,))]
    inputs = [x.requires_grad_() for x in inputs]
    copies = [x.detach().double().requires_grad_() for x in inputs]
    target = random_target(B * T, V, options.get('ignore_index', -100)).view(B, T)
    criterion = FusedLinearCrossEntropyLoss(reduction=reduction, num_chunks=3, **options)

    loss = criterion(inputs[0], target, *inputs[1:])
    x, weight, bias = copies
    ref, _ = loss_ref((x @ weight.t() + bias).flatten(0, 1), target.flatten(), **options)
    ref = reduce_ref(ref, target, reduction, criterion.ignore_index)
    # FLA stores the gradients before it knows that of the loss, then scales them
    grads = torch.autograd.grad(loss, inputs, torch.tensor(0.5))
    close((loss, *grads), (ref, *torch.autograd.grad(ref, copies, torch.tensor(0.5).double())), dtype)
    assert loss.dtype == torch.float32


def test_linear_cross_entropy_with_l2warp():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    target = random_target(6, 24)[None]
    loss = FusedLinearCrossEntropyLoss(use_l2warp=True, l2_penalty_factor=0.1)(x, target, weight)
    logits = F.linear(x, weight)
    ref = l2_warp(F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits, 0.1)
    for got, want in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(ref, (x, weight)), strict=True):
        torch.testing.assert_close(got, want)


def test_repeated_backward():
    """The kernels scale the stored gradients in place, so that a second backward with a loss scale is wrong."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    loss = 3 * FusedLinearCrossEntropyLoss()(x, random_target(6, 24)[None], weight)
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_autocast():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    target = random_target(6, 24)
    results = []
    for fused in (True, False):
        with torch.autocast('cpu', torch.bfloat16):
            loss = (
                FusedLinearCrossEntropyLoss()(x, target[None], weight)
                if fused
                else FusedCrossEntropyLoss()(F.linear(x, weight).flatten(0, 1), target)
            )
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_inplace_backward():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 5), random_target(6, 5)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    inner = logits.clone().requires_grad_()
    overwritten = inner * 1
    FusedCrossEntropyLoss(inplace_backward=True)(overwritten, target).backward()
    torch.testing.assert_close(inner.grad, leaf.grad)
    torch.testing.assert_close(overwritten, leaf.grad)


def test_no_targets():
    """The mean over no targets is NaN, as in PyTorch, but never its gradient; the linear form returns 0, as FLA does."""
    logits, target = torch.randn(4, 5, requires_grad=True), torch.full((4,), -100)
    loss = FusedCrossEntropyLoss()(logits, target)
    assert loss.isnan()
    assert torch.autograd.grad(loss, logits)[0].eq(0).all()
    assert FusedCrossEntropyLoss(reduction='sum')(logits, target).item() == 0

    x, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    loss = FusedLinearCrossEntropyLoss()(x, target[None], weight)
    assert loss.item() == 0
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, (x, weight)))
    assert cross_entropy_loss(torch.randn(0, 5), target[:0])[0].shape == (0,)


@pytest.mark.parametrize('bad', [5, 100, -1])
def test_target_out_of_range(bad):
    logits, target = torch.randn(4, 5), torch.tensor([0, -100, bad, 4])
    with pytest.raises(IndexError, match=f'Target {bad} is out of bounds'):
        FusedCrossEntropyLoss()(logits, target)
    with pytest.raises(IndexError, match=f'Target {bad} is out of bounds'):
        FusedLinearCrossEntropyLoss()(torch.randn(1, 4, 8), target[None], torch.randn(5, 8))


def test_sharded_vocabulary_is_refused(monkeypatch):
    logits, target = torch.randn(2, 5), torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match='sharded over ranks'):
        cross_entropy_bwd(logits, target, logits.logsumexp(-1), torch.ones(2), total_classes=10, class_start_idx=5)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda group=None: 2)
    with pytest.raises(NotImplementedError, match='sharded over ranks'):
        cross_entropy_fwd(logits, target, process_group=object())


def test_device_check_is_kept(monkeypatch):
    """FLA's own assertion answers what is not wholly on the CPU, and everything once the backend is off."""
    criterion, logits, target = FusedCrossEntropyLoss(), torch.randn(2, 5), torch.tensor([0, 1])
    for args in ((logits.to('meta'), target), (logits, target.to('meta'))):
        with pytest.raises(AssertionError, match='Only support CUDA'):
            criterion(*args)
    criterion(logits, target)
    monkeypatch.setenv('FLA_TORCH', '0')
    with pytest.raises(AssertionError, match='Only support CUDA'):
        criterion(logits, target)
