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
from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

import fla_kdn.backends.torch.convolution  # noqa: F401

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}
LENGTHS = [None, [7, 2, 1, 6], [0, 5, 0, 0, 1, 3, 0], [0, 0]]


def conv_ref(x, weight, bias, residual, state, activation, lengths):
    """Every window of every sequence times the weight; also the last W columns of each sequence behind its state."""
    D, W = weight.shape
    sequences = x.unbind(0) if lengths is None else x[0].split(lengths)
    y, states = [], []
    for n, seq in enumerate(sequences):
        columns = torch.cat((x.new_zeros(D, W) if state is None else state[n], seq.t()), -1)
        states.append(columns[:, -W:])
        y.append((columns.unfold(-1, W, 1)[:, 1:] * weight[:, None]).sum(-1).t())
    y = torch.stack(y) if lengths is None else torch.cat(y)[None]
    y = y if bias is None else y + bias
    y = y if activation is None else F.silu(y)
    return y if residual is None else y + residual, torch.stack(states)


def cumulate(lengths, dtype=torch.long):
    return None if lengths is None else F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).to(dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('W', 'activation'), [(4, 'silu'), (3, None), (1, 'swish')])
@pytest.mark.parametrize('given', ['', 'bias state', 'bias residual state'])
@pytest.mark.parametrize('lengths', LENGTHS, ids=str)
def test_causal_conv1d(lengths, given, W, activation, dtype):
    torch.manual_seed(0)
    B, T, D = (2, 9, 6) if lengths is None else (1, sum(lengths), 6)
    N = B if lengths is None else len(lengths)
    inputs = {'x': torch.randn(B, T, D, dtype=dtype), 'weight': torch.randn(D, W, dtype=dtype)}
    for name, shape in (('bias', (D,)), ('residual', (B, T, D)), ('state', (N, D, W))):
        if name in given:
            inputs[name] = torch.randn(*shape, dtype=dtype)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    copies = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}

    out = causal_conv1d(
        inputs['x'],
        inputs['weight'],
        inputs.get('bias'),
        inputs.get('residual'),
        inputs.get('state'),
        output_final_state=True,
        activation=activation,
        cu_seqlens=cumulate(lengths, torch.int32),
    )
    ref = conv_ref(
        copies['x'],
        copies['weight'],
        copies.get('bias'),
        copies.get('residual'),
        copies.get('state'),
        activation,
        lengths,
    )
    dout = [torch.randn_like(o) for o in out]
    grads = torch.autograd.grad(out, list(inputs.values()), dout)
    ref_grads = torch.autograd.grad(ref, list(copies.values()), [d.double() for d in dout], materialize_grads=True)
    for name, got, want in zip(('y', 'state', *inputs), (*out, *grads), (*ref, *ref_grads), strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=lambda m, name=name: f'{name}: {m}')
    assert out[0].dtype == out[1].dtype == dtype


def test_unused_output_state():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(4, 3)
    y, state = causal_conv1d(x, weight)
    assert state is None
    grad, = torch.autograd.grad(y.sum(), x)
    ref, = torch.autograd.grad(conv_ref(x, weight, None, None, None, None, None)[0].sum(), x)
    torch.testing.assert_close(grad, ref)


@pytest.mark.parametrize('lengths', LENGTHS[:3], ids=str)
def test_layouts(lengths):
    """Trailing head dimensions, and inputs and gradients that are views with strides of their own."""
    torch.manual_seed(0)
    B, T, H, D, W = (2, 9, 2, 3, 4) if lengths is None else (1, sum(lengths), 2, 3, 4)
    weight = torch.randn(H * D, W, requires_grad=True)
    packed = torch.randn(B, T, 3, H * D, requires_grad=True)
    x = packed[:, :, 1]
    assert not x.is_contiguous()
    heads = x.unflatten(-1, (H, D))
    residual = torch.randn(B, T, H, D)
    cu_seqlens = cumulate(lengths)
    dy = torch.randn(B, H, T, D).transpose(1, 2)

    ref, _ = conv_ref(x, weight, None, residual.flatten(2), None, 'silu', lengths)
    ref_grads = torch.autograd.grad(ref, (packed, weight), dy.flatten(2), retain_graph=True)
    for inputs, dout in (((x, residual.flatten(2)), dy.flatten(2)), ((heads, residual), dy)):
        y, _ = causal_conv1d(inputs[0], weight, residual=inputs[1], activation='silu', cu_seqlens=cu_seqlens)
        assert y.shape == inputs[0].shape
        torch.testing.assert_close(y.flatten(2) if y.ndim == 4 else y, ref)
        torch.testing.assert_close(torch.autograd.grad(y, (packed, weight), dout, retain_graph=True), ref_grads)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('bias', 'activation'), [(False, 'silu'), (True, None)])
@pytest.mark.parametrize('prefill', [0, 1, 2, 6])
@torch.no_grad()
def test_cached_steps_equal_the_full_convolution(prefill, bias, activation, dtype):
    torch.manual_seed(0)
    B, T, D, W = 3, 10, 8, 4
    conv = ShortConvolution(D, W, bias=bias, activation=activation).to(dtype)
    x, residual = torch.randn(B, T, D, dtype=dtype), torch.randn(B, T, D, dtype=dtype)
    full, state = conv(x, residual=residual, output_final_state=True)

    steps, cache = [], None
    if prefill > 0:
        y, cache = conv(x[:, :prefill], residual=residual[:, :prefill], output_final_state=True)
        steps.append(y)
    for t in range(prefill, T):
        previous = cache
        y, cache = conv(x[:, t:t + 1], residual=residual[:, t:t + 1], cache=cache, output_final_state=True)
        assert previous is None or cache is previous
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), full)
    torch.testing.assert_close(cache, state)


@torch.no_grad()
def test_packed_step():
    """One token for each packed sequence takes the in-place path; other lengths, empty ones included, return a new state."""
    torch.manual_seed(0)
    N, D, W = 3, 8, 4
    conv = ShortConvolution(D, W)
    x, cache = torch.randn(1, N, D), torch.randn(N, D, W)
    weight = conv.weight.squeeze(1)
    for lengths in ([1, 1, 1], [0, 3, 0]):
        ref, state = conv_ref(x, weight, None, None, cache, 'silu', lengths)
        given = cache.clone()
        y, new = conv(x, cache=given, cu_seqlens=cumulate(lengths), output_final_state=True)
        torch.testing.assert_close(y, ref)
        torch.testing.assert_close(new, state)
        assert (new is given) == (lengths == [1, 1, 1])


@torch.no_grad()
def test_update_layouts():
    torch.manual_seed(0)
    N, H, D, W = 3, 2, 4, 4
    weight, cache = torch.randn(H * D, W), torch.randn(N, H * D, W)
    x = torch.randn(N, H * D)
    ref, state = conv_ref(x[:, None], weight, None, None, cache, None, None)
    for view in (x, x[None], x[:, None], x.view(N, 1, H, D)):
        given = cache.clone()
        y, returned = causal_conv1d_update(view, given, weight=weight)
        assert y.shape == view.shape
        assert returned is given
        torch.testing.assert_close(y.reshape(N, 1, -1), ref)
        torch.testing.assert_close(given, state)


def test_batch_of_no_tokens():
    state = torch.randn(2, 3, 4, requires_grad=True)
    y, final = causal_conv1d(torch.randn(2, 0, 3), torch.randn(3, 4), initial_state=state, output_final_state=True)
    assert y.shape == (2, 0, 3)
    assert final.equal(state)
    assert torch.autograd.grad(final.sum(), state)[0].eq(1).all()


def test_linear_in_the_number_of_sequences():
    """A batch of many short sequences costs what its tokens cost: no quadratic mask, no buffer of the longest sequence."""
    T, D = 4096, 4
    lengths = [T // 2, *[1] * (T // 2)]
    x, conv = torch.randn(1, T, D), ShortConvolution(D, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        conv(x, cu_seqlens=cumulate(lengths))[0].sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 64 * T * D * 4
    assert len(profile.events()) < 500


def test_rejects_bad_input():
    x, weight = torch.randn(2, 4, 3), torch.randn(3, 4)
    with pytest.raises(ValueError, match='batch size is expected to be 1 rather than 2'):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4, 8]))
    with pytest.raises(AssertionError, match=r'expected states \(2, 3, 4\)'):
        causal_conv1d(x, weight, initial_state=torch.zeros(1, 3, 4))
    with pytest.raises(RuntimeError):
        causal_conv1d_update(x, torch.zeros(2, 3, 4), weight=weight)
