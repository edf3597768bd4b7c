# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla_kdn.layers.utils import check_mask
from fla_kdn.ops.kdn.inputs import check_cu_seqlens

# what tells the borders of packed sequences, and transformers' further arguments for them
PACKING = ('cu_seqlens', 'cu_seq_lens_q', 'cu_seq_lens_k', 'max_length_q', 'max_length_k', 'position_ids')


def resolve_padding_and_packing(
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seq_lens_q: torch.LongTensor | None = None,
    position_ids: torch.LongTensor | None = None,
    has_past: bool = False,
) -> tuple[torch.Tensor | None, torch.LongTensor | None]:
    """
    Bring the ways in which callers mark padding and packed sequences to the two that the layers know.

    Args:
        tokens (torch.Tensor): token ids `[B, T]` or embeddings `[B, T, D]`.
        attention_mask (torch.Tensor, Optional): 0 for padding, `[B, S]`; the last `T` of the columns belong to `tokens`.
        cu_seqlens (torch.LongTensor, Optional): FLA's cumulated lengths of packed sequences, `[N+1]`; `B = 1`.
        cu_seq_lens_q (torch.LongTensor, Optional): the same under transformers' name.
        position_ids (torch.LongTensor, Optional): `[B, T]`, as padding-free collators give it; sequences begin where it does
            not go up by 1. Positions themselves are counted from the tokens.
        has_past (bool): whether the tokens continue others.

    Returns:
        The mask of the tokens `[B, T]`, `None` if there is no padding, and `cu_seqlens`, `None` if nothing is packed.
    """
    B, T = tokens.shape[:2]
    if cu_seqlens is None:
        cu_seqlens = cu_seq_lens_q
    elif cu_seq_lens_q is not None:
        raise ValueError('`cu_seqlens` and `cu_seq_lens_q` are two names of one argument: give one of them.')
    check_cu_seqlens(cu_seqlens, B, T)
    check_mask(attention_mask, B, T)
    if attention_mask is not None:
        attention_mask = attention_mask[:, -T:]
        ones = attention_mask == 1
        # one wait for the device
        is_full, is_mask = torch.stack((ones.all(), (ones | (attention_mask == 0)).all())).tolist()
        if not is_mask:
            raise ValueError(
                'attention_mask must be a 0-1 matrix (0 indicating padding), neither one that is added to scores nor numbers '
                'of documents, whose borders `cu_seqlens` or `position_ids` tell.',
            )
        if is_full:
            attention_mask = None
        elif cu_seqlens is not None:
            raise ValueError('attention_mask marks padding in a packed batch: leave out the padding, or `cu_seqlens`.')
    if cu_seqlens is not None:
        # FLA keeps what it derives from a tensor as long as the tensor lives, also after a change of its values
        cu_seqlens = cu_seqlens[:]
    elif position_ids is not None and T > 1:
        if position_ids.ndim != 2 or position_ids.shape[1] != T:
            raise ValueError(f'position_ids must have shape [batch_size, {T}], got {list(position_ids.shape)}.')
        if attention_mask is None:
            starts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=False)
        else:
            # positions of padding may be anything, those of tokens only go up
            positions = position_ids.masked_fill(attention_mask == 0, -1)
            starts = F.pad(positions[:, 1:] <= positions.cummax(1).values[:, :-1], (1, 0), value=False) & (attention_mask != 0)
        if starts.any():
            if B != 1 or attention_mask is not None or has_past:
                raise ValueError(
                    'position_ids restart within a row: sequences are packed into one row, without padding or a past; '
                    f'got {B} rows{"" if attention_mask is None else ", padding"}{", a past" if has_past else ""}.',
                )
            cu_seqlens = F.pad(starts[0].nonzero().flatten(), (1, 1))
            cu_seqlens[-1] = T
    return attention_mask, cu_seqlens
