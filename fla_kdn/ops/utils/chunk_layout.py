# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Chunks of equal- or variable-length sequences, for scans over chunks written in PyTorch.

Dimensions: B batch, T tokens, N sequences (B, or len(cu_seqlens) - 1), BT tokens of a chunk, NC chunks of all sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# tokens of a chunk, of the kernels too
CHUNK_SIZE = 64


class ChunkLayout:
    """Cut every sequence into chunks of `chunk_size` tokens, the last one padded with zeros.

    Sequences are sorted by their number of chunks, longest first, and chunks by their place in the sequence: first all first
    chunks, then all second ones. So step `i` of a scan over chunks reads the next `sizes[i]` chunks, a contiguous slice, and
    they belong to the first `sizes[i]` sequences of the sorted order. The cost is that of the tokens and at most one padded
    chunk for each sequence, however unequal the lengths are.

    Args:
        x (torch.Tensor):
            A tensor `[B, T, ...]` that tells batch, tokens and device.
        chunk_size (int):
            Tokens of a chunk; a power of two. It is lowered where even the longest sequence is shorter.
        cu_seqlens (torch.LongTensor, Optional):
            Cumulative sequence lengths `[N+1]`, with `B = 1`. Default: `None`, `B` sequences of `T` tokens.
    """

    def __init__(self, x: torch.Tensor, chunk_size: int, cu_seqlens: torch.LongTensor | None = None):
        self.batch, self.length = x.shape[:2]
        if cu_seqlens is None:
            lens = torch.full((self.batch,), self.length)
        else:
            bounds = cu_seqlens.cpu().long()
            lens = bounds.diff()
        longest = int(lens.max()) if len(lens) else 0
        self.chunk_size = BT = min(chunk_size, 1 << max(longest - 1, 0).bit_length())
        chunks = (lens + BT - 1) // BT
        self.num_chunks = int(chunks.sum())
        # sizes[i] = number of sequences with more than i chunks
        ended = torch.searchsorted(chunks.sort().values, torch.arange(-(-longest // BT)), right=True)
        self.sizes = (len(lens) - ended).tolist()

        self.order = self.rank = self.slots = None
        if cu_seqlens is not None:
            order = chunks.argsort(descending=True, stable=True)
            rank = order.argsort()
            offsets = F.pad(torch.tensor(self.sizes, dtype=torch.long).cumsum(0), (1, 0))
            seq = torch.arange(len(lens)).repeat_interleave(lens)
            pos = torch.arange(self.length) - bounds[:-1][seq]
            # the place of each token among the NC * BT
            slots = (offsets[pos // BT] + rank[seq]) * BT + pos % BT
            self.order, self.rank, self.slots = (i.to(x.device) for i in (order, rank, slots))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` -> `[NC, BT, ...]`."""
        BT = self.chunk_size
        if self.slots is not None:
            y = x.new_zeros(self.num_chunks * BT, *x.shape[2:]).index_copy(0, self.slots, x[0])
            return y.view(self.num_chunks, BT, *x.shape[2:])
        if pad := -self.length % BT:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad))
        return x.unflatten(1, (len(self.sizes), BT)).transpose(0, 1).flatten(0, 1)

    def unpack(self, y: torch.Tensor) -> torch.Tensor:
        """`[NC, BT, ...]` -> `[B, T, ...]`."""
        if self.slots is not None:
            return y.flatten(0, 1).index_select(0, self.slots).unsqueeze(0)
        return y.unflatten(0, (len(self.sizes), self.batch)).transpose(0, 1).flatten(1, 2)[:, :self.length]

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[N, ...]`, one for each sequence, into the order of the scan."""
        return x if self.order is None else x.index_select(0, self.order)

    def unsort(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[N, ...]` back into the order of the sequences."""
        return x if self.rank is None else x.index_select(0, self.rank)
