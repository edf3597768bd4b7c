# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""How sequences are cut into chunks for the scans in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fla_kdn.ops.utils.chunk_layout import ChunkLayout


def numbered(B, T):
    """Every entry different, and none zero."""
    return torch.arange(1, B * T * 3 + 1).view(B, T, 3)


def cumulated(lens):
    return F.pad(torch.tensor(lens, dtype=torch.long).cumsum(0), (1, 0))


def chunks_by_hand(x, chunk_size, lens=None):
    """Chunks in the order of the scan, their number at each step, and the order of the sequences."""
    sequences = list(x) if lens is None else list(x[0].split(lens))
    BT = min(chunk_size, max([1, *(1 << (len(s) - 1).bit_length() for s in sequences if len(s))]))
    cut = [[F.pad(c, (0, 0, 0, BT - len(c))) for c in s.split(BT) if len(c)] for s in sequences]
    order = sorted(range(len(cut)), key=lambda n: -len(cut[n]))
    steps = [[cut[n][i] for n in order if i < len(cut[n])] for i in range(max([0, *map(len, cut)]))]
    return [c for step in steps for c in step], [len(step) for step in steps], order, BT


def check(layout, x, chunk_size, lens=None):
    chunks, sizes, order, BT = chunks_by_hand(x, chunk_size, lens)
    assert layout.chunk_size == BT
    assert layout.sizes == sizes
    y = layout.pack(x)
    assert torch.equal(y, torch.stack(chunks) if chunks else x.new_zeros(0, BT, *x.shape[2:]))
    assert torch.equal(layout.unpack(y), x)
    rows = torch.arange(len(order))
    assert torch.equal(layout.sort(rows), torch.tensor(order, dtype=torch.long))
    assert torch.equal(layout.unsort(layout.sort(rows)), rows)


@pytest.mark.parametrize('chunk_size', [16, 64])
@pytest.mark.parametrize('T', [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize('B', [1, 3])
def test_dense(B, T, chunk_size):
    x = numbered(B, T)
    check(ChunkLayout(x, chunk_size), x, chunk_size)


@pytest.mark.parametrize('int_dtype', [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize('lens', [
    pytest.param([5], id='one'),
    pytest.param([0], id='one-empty'),
    pytest.param([0, 0, 0], id='all-empty'),
    pytest.param([0, 3, 0, 40, 17, 0], id='some-empty'),
    pytest.param([16, 16, 16], id='full-chunks'),
    pytest.param([1, 1, 1, 1], id='single-tokens'),
    pytest.param([1, 20, 40, 60], id='longest-last'),
    pytest.param([17, 31, 18], id='equal-number-of-chunks'),
])
def test_varlen(lens, int_dtype):
    x = numbered(1, sum(lens))
    check(ChunkLayout(x, 16, cumulated(lens).to(int_dtype)), x, 16, lens)


def test_random_lengths():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lens = torch.randint(0, 70, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator)
        lens = (lens * (torch.rand(len(lens), generator=generator) < 0.7)).tolist()
        chunk_size = 1 << int(torch.randint(0, 7, (), generator=generator))
        x = numbered(1, sum(lens))
        check(ChunkLayout(x, chunk_size, cumulated(lens)), x, chunk_size, lens)


def test_sequences_of_one_number_of_chunks_keep_their_order():
    layout = ChunkLayout(numbered(1, 60), 16, cumulated([10, 40, 5, 0, 5]))
    assert layout.order.tolist() == [1, 0, 2, 4, 3]


def test_a_scan_over_chunks_meets_each_sequence_in_order():
    lens = [5, 40, 0, 16, 33]
    x = numbered(1, sum(lens))[..., :1]
    layout = ChunkLayout(x, 16, cumulated(lens))
    total, ended = layout.sort(torch.zeros(5, 1, dtype=torch.long)), []
    for n, chunk in zip(layout.sizes, layout.pack(x).split(layout.sizes), strict=True):
        ended.append(total[n:])
        total = 2 * total[:n] + chunk.sum(1)
    total = layout.unsort(torch.cat([total, *ended[::-1]]))
    for got, sequence in zip(total, x[0].split(lens), strict=True):
        want = 0
        for chunk in sequence.split(16):
            want = 2 * want + chunk.sum()
        assert got == want


def test_padding_is_at_most_one_chunk_for_each_sequence():
    lens = [1000] + 50 * [1]
    layout = ChunkLayout(numbered(1, sum(lens)), 64, cumulated(lens))
    assert layout.num_chunks == 16 + 50


def test_gradients_pass_through():
    lens = [3, 0, 20]
    for cu_seqlens in (None, cumulated(lens)):
        x = torch.randn(1, 23, 3, dtype=torch.float64, requires_grad=True)
        layout = ChunkLayout(x, 16, cu_seqlens)
        weight = torch.randn(layout.pack(x).shape, dtype=torch.float64)
        dx, = torch.autograd.grad((layout.pack(x) * weight).sum(), x)
        assert torch.equal(dx, layout.unpack(weight))
        y = weight.requires_grad_()
        dy, = torch.autograd.grad((layout.unpack(y) * x.detach()).sum(), y)
        assert torch.equal(dy, layout.pack(x.detach()))
