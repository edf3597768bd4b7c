# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from fla_kdn.layers.utils import check_mask, get_layer_cache, update_layer_cache
from fla_kdn.ops.kdn.inputs import check_cu_seqlens

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.processing_utils import Unpack

# number of a padding token: after every query, so that no token sees it
PADDING = 2 ** 30
# shortest block of queries that attends to its window at once
MIN_BLOCK = 256
# SDPA's backends but cuDNN's
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _select(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens of each row of `x` `[B, T, ...]` in `order` `[B, T]`."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand(*order.shape, *x.shape[2:]))


class Attention(nn.Module):
    """
    Causal softmax attention with rotary positions, optionally over a sliding window.

    The parameters are those of FLA's `Attention`, which needs flash-attn; this one runs through transformers' attention
    interface: the config's `attn_implementation`, `sdpa` by default, chooses the kernel. Time and memory are linear in the
    length of the sequence where there is a window, and so is the cache bounded by it.

    Args:
        hidden_size (int, Optional):
            The hidden size of the input. Default: 2048.
        num_heads (int, Optional):
            The number of query heads. Default: 32.
        num_kv_heads (int, Optional):
            The number of key and value heads, equal to `num_heads` if `None`. Default: `None`.
        qkv_bias (bool, Optional):
            Whether the query, key and value projections have a bias. Default: `False`.
        window_size (int, Optional):
            The number of tokens that a token sees, itself included; all before it if `None`. Default: `None`.
        rope_theta (float, Optional):
            The base of the rotary frequencies. Default: 10000.
        layer_idx (int, Optional):
            The index of the layer. Default: `None`.
        config (PreTrainedConfig, Optional):
            The config of the model, read for its `attn_implementation`. Default: `None`.
    """

    is_causal = True

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.,
        layer_idx: int | None = None,
        config: PreTrainedConfig | None = None,
    ) -> Attention:
        super().__init__()

        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads if num_kv_heads is not None else num_heads
        self.qkv_bias = qkv_bias
        self.window_size = window_size
        self.rope_theta = rope_theta
        self.layer_idx = layer_idx
        self.config = config

        if hidden_size % num_heads != 0 or hidden_size // num_heads % 2 != 0:
            raise ValueError(f'hidden_size={hidden_size} must be an even multiple of num_heads={num_heads}.')
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f'num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}.')
        if window_size is not None and window_size < 1:
            raise ValueError(f'window_size={window_size} must be positive.')
        self.num_key_value_groups = num_heads // self.num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = self.num_kv_heads * self.head_dim

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.Tensor, torch.Tensor | None, Cache | None]:
        B, T, _ = hidden_states.shape
        cu_seqlens = kwargs.get('cu_seqlens')
        check_cu_seqlens(cu_seqlens, B, T)
        check_mask(attention_mask, B, T)
        last_state = (get_layer_cache(self, past_key_values) or {}).get('attn_state')
        if cu_seqlens is not None and last_state is None:
            return self.attend_packed(hidden_states, cu_seqlens, past_key_values if use_cache else None), None, past_key_values
        if cu_seqlens is not None:
            # the cache has a row for each sequence
            lens = cu_seqlens.diff()
            index = torch.arange(int(lens.max()), device=hidden_states.device)
            mask = index >= len(index) - lens[:, None]
            rows = hidden_states.new_zeros(*mask.shape, self.hidden_size)
            rows[mask] = hidden_states[0]
            rows, _, _ = self.forward(rows, mask, past_key_values, use_cache)
            return rows[mask].unsqueeze(0), None, past_key_values

        # numbers of the tokens: of one row for all as long as none has had padding
        past = 0 if last_state is None else past_key_values.get_seq_length(self.layer_idx)
        tokens = torch.arange(past, past + T, device=hidden_states.device)[None]
        k_past, v_past, past_tokens = (*(last_state or ()), None, None, None)[:3]
        padded = attention_mask is not None or past_tokens is not None
        if padded and last_state is not None and past_tokens is None:
            past_tokens = torch.arange(past - k_past.shape[1], past, device=hidden_states.device).expand(B, -1)
        if attention_mask is not None:
            # padding moves to the left, wherever it was: the last of a row are then its last tokens, for window and cache
            attention_mask = attention_mask[:, -T:].bool()
            order = attention_mask.int().argsort(dim=1, stable=True)
            hidden_states, attention_mask = _select(hidden_states, order), _select(attention_mask, order)
            # a weight of 0 does not undo a NaN
            hidden_states = hidden_states.masked_fill(~attention_mask.unsqueeze(-1), 0)
        if padded:
            tokens = tokens.expand(B, -1) - past if attention_mask is None else attention_mask.cumsum(1) - 1
            if past_tokens is not None:
                # the last token of a row stands last; a row may have had only padding
                last = past_tokens[:, -1:]
                tokens = tokens + torch.where(last == PADDING, 0, last + 1)
        q, k, v = self.project(hidden_states, tokens)
        if attention_mask is not None:
            tokens = tokens.masked_fill(~attention_mask, PADDING)

        k_tokens = tokens
        if last_state is not None:
            # without the token that falls out of the window of every new one
            start = 0 if self.window_size is None else max(0, k_past.shape[1] - self.window_size + 1)
            k, v = torch.cat((k_past[:, start:], k), 1), torch.cat((v_past[:, start:], v), 1)
            if padded:
                k_tokens = torch.cat((past_tokens[:, start:], tokens), 1)
            else:
                k_tokens = torch.arange(past + T - k.shape[1], past + T, device=tokens.device)[None]
            if attention_mask is not None:
                key_order = (k_tokens != PADDING).int().argsort(dim=1, stable=True)
                k, v, k_tokens = (_select(x, key_order) for x in (k, v, k_tokens))
        if use_cache:
            self.store(past_key_values, T, k, v, k_tokens if padded else None)

        if self.implementation_takes_lengths():
            mask = (k_tokens != PADDING).int() if padded else None
            o = self.kernel(q, k, v, attention_mask=mask, sliding_window=self.window_size)
        elif T == 1 and not padded:
            # the keys are those of the window
            o = self.kernel(q, k, v, attention_mask=None)
        else:
            o = self.attend_in_blocks(q, k, v, tokens, k_tokens, in_order=not padded and last_state is None)
        o = self.o_proj(o)
        if attention_mask is not None:
            o = _select(o, order.argsort(dim=1))
        return o, None, past_key_values

    def attend_packed(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        past_key_values: Cache | None,
    ) -> torch.Tensor:
        """Attention inside each sequence of a packed input `[1, T, hidden_size]`, kept in an empty cache if there is one."""
        T = hidden_states.shape[1]
        index = torch.arange(T, device=hidden_states.device)
        sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
        q, k, v = self.project(hidden_states, (index - cu_seqlens[sequence])[None])
        if self.implementation_takes_lengths():
            lens = cu_seqlens.int()
            lengths = {'cu_seq_lens_q': lens, 'cu_seq_lens_k': lens, 'max_length_q': T, 'max_length_k': T}
            o = self.kernel(q, k, v, attention_mask=None, sliding_window=self.window_size, **lengths)
        else:
            # so far apart that no window reaches from one into another
            tokens = (index + sequence * (T if self.window_size is None else self.window_size))[None]
            o = self.attend_in_blocks(q, k, v, tokens, tokens, in_order=False)
        if past_key_values is not None:
            # a row for each sequence, with padding on the left
            starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
            longest = int(cu_seqlens.diff().max())
            size = longest if self.window_size is None else min(longest, self.window_size)
            index = ends - size + torch.arange(size, device=ends.device)
            tokens = (index - starts).masked_fill(index < starts, PADDING)
            index = index.clamp(min=0)
            self.store(past_key_values, longest, k[0, index], v[0, index], tokens)
        return self.o_proj(o)

    def store(
        self,
        past_key_values: Cache | None,
        num_tokens: int,
        k: torch.Tensor,
        v: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        """Keep the last keys and values, and the numbers of their tokens unless these just end at the sequence's length."""
        state = update_layer_cache(
            self,
            past_key_values,
            offset=num_tokens,
            cache_kwargs={'window_size': self.window_size},
        )
        if state is not None:
            # FLA's cache would join keys by their place in the input; these are joined by token
            surplus = 0 if self.window_size is None else max(0, k.shape[1] - self.window_size)
            state['attn_state'] = tuple(
                x[:, surplus:].clone() if surplus else x for x in (k, v, tokens) if x is not None
            )

    def project(self, hidden_states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[B, T, num_heads, head_dim]`, and keys and values `[B, T, num_kv_heads, head_dim]`; the first two are
        rotated by the numbers of their tokens `[B or 1, T]`."""
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        channels = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        angles = tokens.unsqueeze(-1) * self.rope_theta ** (-channels / self.head_dim)
        angles = torch.cat((angles, angles), -1)
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
        return q_rotated.to(q.dtype), k_rotated.to(k.dtype), v

    def attend_in_blocks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_tokens: torch.Tensor,
        k_tokens: torch.Tensor,
        in_order: bool,
    ) -> torch.Tensor:
        """
        Attention by a kernel that takes a mask; where there is a window, of one block of queries after another.

        Args:
            q (torch.Tensor): queries `[B, T, num_heads, head_dim]`, of the last tokens of the keys.
            k, v (torch.Tensor): keys and values `[B, S, num_kv_heads, head_dim]`, `S >= T`.
            q_tokens, k_tokens (torch.Tensor): numbers of the tokens `[B or 1, T]` and `[B or 1, S]`; a token sees those of the
                last `window_size` numbers up to its own.
            in_order (bool): whether `S = T` and the numbers are 0 to `T - 1`.

        Returns:
            `[B, T, hidden_size]`.
        """
        B, T, S = *q.shape[:2], k.shape[1]
        window, block = (S, T) if self.window_size is None else (self.window_size, max(self.window_size, MIN_BLOCK))
        past = tuple(x[:, :S - T] for x in (k, v, k_tokens))
        keys = zip(*(x[:, S - T:].split(block, 1) for x in (k, v, k_tokens)), strict=True)
        outputs, biases = [], {}
        for q_i, q_tokens_i, present in zip(q.split(block, 1), q_tokens.split(block, 1), keys, strict=True):
            k_i, v_i, k_tokens_i = (torch.cat((x[:, -window:], y), 1) for x, y in zip(past, present, strict=True))
            past = present
            # of a sequence in order all blocks but the first look alike
            shape = (q_i.shape[1], k_i.shape[1]) if in_order else None
            if in_order and self.implementation() == 'sdpa' and shape[0] == shape[1] <= window:
                # SDPA's own causal mask, which its fastest kernels ask for
                bias = None
            elif (bias := biases.get(shape)) is None:
                distance = q_tokens_i.unsqueeze(-1) - k_tokens_i.unsqueeze(-2)
                visible = (distance >= 0) & (distance < window)
                bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
                bias = bias.unsqueeze(1).expand(B, -1, -1, -1)
                if in_order:
                    biases[shape] = bias
            outputs.append(self.kernel(q_i, k_i, v_i, attention_mask=bias))
        return torch.cat(outputs, 1)

    def implementation(self) -> str:
        return getattr(self.config, '_attn_implementation', None) or 'sdpa'

    def implementation_takes_lengths(self) -> bool:
        return is_flash_attention_requested(requested_attention_implementation=self.implementation())

    def kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs) -> torch.Tensor:
        if q.numel() == 0:
            return q.flatten(-2)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation(), eager_attention_forward)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # with a mask over 64 more keys than a multiple of 128, cuDNN makes NaNs of the gradients of queries whose scores are
        # all far below 0 (PyTorch 2.11 to 2.13, https://github.com/pytorch/pytorch/issues/196678)
        fails = kwargs['attention_mask'] is not None and k.shape[2] % 128 == 64 and torch.is_grad_enabled()
        with sdpa_kernel(BACKENDS) if fails else nullcontext():
            return attention(self, q, k, v, dropout=0., scaling=self.head_dim ** -0.5, **kwargs)[0].flatten(-2)
