# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from fla.layers.utils import get_layer_cache, update_layer_cache
from fla.ops.utils.index import prepare_lens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.processing_utils import Unpack

# position of a padding token: after every query, so that no token sees it
PADDING = 2 ** 30
# shortest block of queries that attends to its window at once
MIN_BLOCK = 256


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
        cu_seqlens = kwargs.get('cu_seqlens')
        last_state = (get_layer_cache(self, past_key_values) or {}).get('attn_state')
        if cu_seqlens is not None:
            if past_key_values is None or (last_state is None and not use_cache):
                return self.o_proj(self.attend_packed(hidden_states, cu_seqlens)), None, past_key_values
            # a cache has a row for each sequence
            lens = prepare_lens(cu_seqlens)
            tokens = torch.arange(int(lens.max()), device=hidden_states.device)
            mask = tokens >= len(tokens) - lens[:, None]
            rows = hidden_states.new_zeros(*mask.shape, self.hidden_size)
            rows[mask] = hidden_states[0]
            rows, _, past_key_values = self.forward(rows, mask, past_key_values, use_cache)
            return rows[mask].unsqueeze(0), None, past_key_values

        q_len = hidden_states.shape[1]
        if attention_mask is None:
            new_tokens = torch.arange(q_len, device=hidden_states.device).expand(hidden_states.shape[:2])
        else:
            if attention_mask.ndim != 2 or attention_mask.shape[1] < q_len:
                raise ValueError(
                    f'attention_mask must be a 0-1 matrix of shape [batch_size, seq_len] (0 indicating padding) for at least '
                    f'the {q_len} tokens of the input, got shape {list(attention_mask.shape)}.',
                )
            # padding moves to the left, wherever it was: the last of a row are then its last tokens, for window and cache
            attention_mask = attention_mask[:, -q_len:].bool()
            order = attention_mask.int().argsort(dim=1, stable=True)
            hidden_states, attention_mask = _select(hidden_states, order), _select(attention_mask, order)
            # a weight of 0 does not undo a NaN
            hidden_states = hidden_states.masked_fill(~attention_mask.unsqueeze(-1), 0)
            new_tokens = attention_mask.cumsum(1) - 1
        if last_state is not None:
            # the last token of a row stands last; a row may have had only padding
            last = last_state[2][:, -1:]
            new_tokens = new_tokens + torch.where(last == PADDING, 0, last + 1)
        if attention_mask is not None:
            new_tokens = new_tokens.masked_fill(~attention_mask, PADDING)

        q, k, v = self.project(hidden_states, new_tokens.masked_fill(new_tokens == PADDING, 0))
        key_tokens = new_tokens
        if last_state is not None:
            if self.window_size is not None:
                # the token that falls out of the window of every new one
                last_state = (x[:, max(0, x.shape[1] - self.window_size + 1):] for x in last_state)
            k, v, key_tokens = (torch.cat(x, 1) for x in zip(last_state, (k, v, key_tokens), strict=True))
            if attention_mask is not None:
                key_order = (key_tokens != PADDING).int().argsort(dim=1, stable=True)
                k, v, key_tokens = (_select(x, key_order) for x in (k, v, key_tokens))
        if use_cache:
            state = update_layer_cache(
                self,
                past_key_values,
                offset=q_len,
                cache_kwargs={'window_size': self.window_size},
            )
            if state is not None:
                # FLA's cache would join keys by their place in the input; these are joined by token
                surplus = 0 if self.window_size is None else max(0, k.shape[1] - self.window_size)
                state['attn_state'] = tuple(x[:, surplus:].clone() if surplus else x for x in (k, v, key_tokens))

        flash = {'attention_mask': None if attention_mask is None and last_state is None else (key_tokens != PADDING).int()}
        in_order = attention_mask is None and last_state is None
        o = self.o_proj(self.attend(q, k, v, new_tokens, key_tokens, in_order, flash))
        if attention_mask is not None:
            o = _select(o, order.argsort(dim=1))
        return o, None, past_key_values

    def attend_packed(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Attention inside each sequence of a packed input `[1, T, hidden_size]`; the same shape, before `o_proj`."""
        T = hidden_states.shape[1]
        index = torch.arange(T, device=hidden_states.device)
        sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
        q, k, v = self.project(hidden_states, (index - cu_seqlens[sequence])[None])
        lens = cu_seqlens.int()
        flash = {'attention_mask': None, 'cu_seq_lens_q': lens, 'cu_seq_lens_k': lens, 'max_length_q': T, 'max_length_k': T}
        # for the mask, so far apart that no window reaches from one into another
        tokens = (index + sequence * (T if self.window_size is None else self.window_size))[None]
        return self.attend(q, k, v, tokens, tokens, False, flash)

    def project(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries `[B, T, num_heads, head_dim]` and keys, and values, `[B, T, num_kv_heads, head_dim]`."""
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        channels = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        angles = positions.unsqueeze(-1) * self.rope_theta ** (-channels / self.head_dim)
        angles = torch.cat((angles, angles), -1)
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
        return q_rotated.to(q.dtype), k_rotated.to(k.dtype), v

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_tokens: torch.Tensor,
        k_tokens: torch.Tensor,
        in_order: bool,
        flash: dict[str, torch.Tensor | int | None],
    ) -> torch.Tensor:
        """
        Attention of queries that are the last tokens of the keys; block after block where there is a window.

        Args:
            q (torch.Tensor): queries `[B, T, num_heads, head_dim]`.
            k, v (torch.Tensor): keys and values `[B, S, num_kv_heads, head_dim]`, `S >= T`.
            q_tokens, k_tokens (torch.Tensor): numbers of the tokens `[B or 1, T]` and `[B or 1, S]`; a token sees those of the
                last `window_size` numbers up to its own. `PADDING` for padding.
            in_order (bool): whether `S = T` and the numbers are 0 to `T - 1`.
            flash (dict): arguments for flash attention, which takes lengths in place of a mask.

        Returns:
            `[B, T, hidden_size]`.
        """
        B, T, S = *q.shape[:2], k.shape[1]
        implementation = getattr(self.config, '_attn_implementation', None) or 'sdpa'
        if is_flash_attention_requested(requested_attention_implementation=implementation):
            return self._attend(implementation, q, k, v, sliding_window=self.window_size, **flash)

        window, block = (S, T) if self.window_size is None else (self.window_size, max(self.window_size, MIN_BLOCK))
        past = tuple(x[:, :S - T] for x in (k, v, k_tokens))
        keys = zip(*(x[:, S - T:].split(block, 1) for x in (k, v, k_tokens)), strict=True)
        outputs, biases = [], {}
        for q_i, q_tokens_i, present in zip(q.split(block, 1), q_tokens.split(block, 1), keys, strict=True):
            k_i, v_i, k_tokens_i = (torch.cat((x[:, -window:], y), 1) for x, y in zip(past, present, strict=True))
            past = present
            if in_order and implementation == 'sdpa' and k_i.shape[1] == q_i.shape[1] <= window:
                # SDPA's own causal mask, which its fastest kernels ask for
                bias = None
            else:
                # of a sequence in order all blocks but the first look alike
                shape = (q_i.shape[1], k_i.shape[1])
                bias = biases.get(shape) if in_order else None
                if bias is None:
                    distance = q_tokens_i.unsqueeze(-1) - k_tokens_i.unsqueeze(-2)
                    visible = (distance >= 0) & (distance < window)
                    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
                    bias = biases[shape] = bias.unsqueeze(1).expand(B, -1, -1, -1)
            outputs.append(self._attend(implementation, q_i, k_i, v_i, attention_mask=bias))
        return torch.cat(outputs, 1)

    def _attend(self, implementation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs) -> torch.Tensor:
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(self, q, k, v, dropout=0., scaling=self.head_dim ** -0.5, **kwargs)[0].flatten(-2)
