# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The modes and options of `generate`: what it gives equals decoding without a cache, and what needs a rollback is refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import utils
from conftest import assert_close, rel
from fla.models.cache_utils import Cache
from transformers import CompileConfig, StaticCache
from utils import OPTIONS, greedy, make_ids, make_model

from fla_kdn.layers import Attention

WINDOW = OPTIONS['hybrid']['attn']['window_size']
ALL_KINDS = {
    **{name: OPTIONS[name] for name in ('diagonal', 'isotropic', 'hybrid')},
    'hybrid-no-window': {'num_hidden_layers': 3, 'attn': {**OPTIONS['hybrid']['attn'], 'window_size': None}},
}
KINDS = [pytest.param(options, id=name) for name, options in ALL_KINDS.items() if name != 'hybrid-no-window']
HYBRIDS = [pytest.param(options, id=name) for name, options in ALL_KINDS.items() if 'attn' in options]
NEW = 8
generate = functools.partial(utils.generate, max_new_tokens=NEW)
reference = functools.partial(utils.reference, num_tokens=NEW)


def left_padded(B: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask: 7 more of padding in each row, and none in the last."""
    pads = torch.tensor([*range(7, 7 * B, 7), 0])
    mask = (torch.arange(T) >= pads[:, None]).long()
    return make_ids(B, T) * mask, mask


@torch.no_grad()
def prefill(model, ids: torch.Tensor, **kwargs) -> Cache:
    return model(ids, use_cache=True, **kwargs).past_key_values


# ---- sampling, streaming, beams


@pytest.mark.parametrize('kept', [False, True], ids=['new-cache', 'kept-cache'])
@pytest.mark.parametrize('options', KINDS)
def test_several_samples_of_a_prompt(options, kept):
    """Of prompts with padding; a kept cache is repeated by its owner, as `generate` repeats only the prompts."""
    model, (ids, mask) = make_model(**options), left_padded(3, 20)

    def sample(**kwargs):
        torch.manual_seed(0)
        return generate(model, ids, attention_mask=mask, do_sample=True, top_k=20, num_return_sequences=3, **kwargs)

    cache = None
    if kept:
        cache = prefill(model, ids[:, :11], attention_mask=mask[:, :11])
        cache.batch_repeat_interleave(3)
    result = sample(cache=cache)
    assert torch.equal(result[:, :20], ids.repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in result}) == 9
    assert torch.equal(result, sample(use_cache=False))


class Streamer:
    """Keeps what it is given, and which tokens the model had seen by then."""

    def __init__(self):
        self.tokens, self.seen, self.calls, self.ended = [], [], 0, False

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens.clone())
        self.seen.append(self.calls)

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize('do_sample', [False, True], ids=['greedy', 'sampling'])
@pytest.mark.parametrize('options', KINDS)
def test_streamer(options, do_sample):
    """The prompt, then each token after the forward pass that gave it."""
    model, ids, streamer = make_model(**options), make_ids(1, 20), Streamer()

    def count(*_):
        streamer.calls += 1

    model.register_forward_hook(count)
    torch.manual_seed(0)
    result = generate(model, ids, do_sample=do_sample, streamer=streamer)
    assert streamer.ended and torch.equal(streamer.tokens[0], ids)
    assert [tokens.numel() for tokens in streamer.tokens[1:]] == [1] * NEW
    assert streamer.seen == list(range(NEW + 1))
    assert torch.equal(torch.cat([tokens.flatten() for tokens in streamer.tokens]), result[0])
    if not do_sample:
        assert torch.equal(result, reference(model, ids))


@pytest.mark.parametrize('padded', [False, True], ids=['full', 'padded'])
@pytest.mark.parametrize('options', HYBRIDS)
def test_reordering_moves_the_keys(options, padded):
    """A row that another beam takes over goes on with that beam's keys, values and positions as with its memory."""
    model, (ids, mask), order = make_model(**options), left_padded(3, 20), torch.tensor([2, 0, 0])
    kwargs = {'attention_mask': mask} if padded else {}
    cache, more = prefill(model, ids, **kwargs), make_ids(3, 4, seed=1)
    before = [layer.state['attn_state'] for layer in cache.layers]
    cache.reorder_cache(order)
    for layer, state in zip(model.model.layers, before, strict=True):
        if isinstance(layer.attn, Attention):
            assert all(map(torch.equal, cache[layer.attn.layer_idx]['attn_state'], (x[order] for x in state)))
    mask = F.pad(mask[order], (0, 4), value=1)
    if not padded:
        mask = torch.ones_like(mask)
    with torch.no_grad():
        logits = model(more, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        for row, valid in enumerate(mask.bool()):
            full = model(torch.cat((ids[order], more), 1)[row, valid][None]).logits
            assert_close(logits[row:row + 1], full[:, -4:], 1e-5, f'logits of row {row}')


def test_beam_search_of_a_hybrid_without_a_window():
    model, (ids, mask) = make_model(**ALL_KINDS['hybrid-no-window']), left_padded(2, 20)
    result = generate(model, ids, attention_mask=mask, num_beams=4)
    assert torch.equal(result, generate(model, ids, attention_mask=mask, num_beams=4, use_cache=False))
    assert not torch.equal(result, generate(model, ids, attention_mask=mask)), 'beam search is greedy here'


@pytest.mark.parametrize('options', KINDS)
def test_guidance(options):
    """The unconditional half, from the last token of the prompt on, has a cache of its own."""
    model, ids, scale = make_model(**options), make_ids(1, 20), 1.5
    expected = ids
    with torch.no_grad():
        for _ in range(NEW):
            with_prompt, without = (
                model(x, use_cache=False).logits[:, -1].log_softmax(-1) for x in (expected, expected[:, 19:]))
            expected = torch.cat((expected, (without + scale * (with_prompt - without)).argmax(-1, keepdim=True)), 1)
    assert not torch.equal(expected, greedy(model, ids, NEW)), 'guidance makes no difference'
    assert torch.equal(generate(model, ids, guidance_scale=scale), expected)


# ---- what cannot be done


@pytest.mark.parametrize('mode', ['assistant', 'prompt-lookup', 'early-exit', 'contrastive', 'contrastive-from-the-hub'])
@pytest.mark.parametrize('options', KINDS)
def test_modes_that_roll_back(monkeypatch, options, mode):
    """A memory cannot forget a rejected token: refused before a token is read, and before code of the Hub is."""
    model, calls = make_model(**options), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(type(model), 'load_custom_generate', lambda *_, **__: pytest.fail('asks the Hub for code'))
    kwargs = {
        'assistant': {'assistant_model': make_model(**options)},
        'prompt-lookup': {'prompt_lookup_num_tokens': 3},
        'early-exit': {'assistant_early_exit': 1},
        'contrastive': {'penalty_alpha': 0.6, 'top_k': 4},
        'contrastive-from-the-hub': {'penalty_alpha': 0.6, 'top_k': 4, 'trust_remote_code': True},
    }[mode]
    message = dict.fromkeys(('contrastive', 'contrastive-from-the-hub'), 'contrastive search')
    with pytest.raises(ValueError, match=message.get(mode, 'not supported with stateful models')):
        generate(model, make_ids(1, 20), **kwargs)
    assert not calls
    assert torch.equal(generate(model, make_ids(1, 20)), reference(model, make_ids(1, 20)))


@pytest.mark.parametrize('options', KINDS)
def test_crop(options):
    """To fewer tokens than were seen; what does not shorten does nothing. The cache is whole afterwards."""
    model, ids = make_model(**options), make_ids(2, 20)
    cache = prefill(model, ids[:, :14])
    for length in (13, 1, -1, -5):
        with pytest.raises(NotImplementedError, match='(?i)roll'):
            cache.crop(length)
    for length in (14, 100):
        cache.crop(length)
    assert [cache.get_seq_length(i) for i in range(len(cache))] == [14] * model.config.num_hidden_layers
    assert torch.equal(generate(model, ids, cache), reference(model, ids))


@pytest.mark.parametrize('implementation', ['static', 'offloaded_static', 'dynamic', 'offloaded', 'quantized'])
@pytest.mark.parametrize('options', KINDS)
def test_cache_implementations_are_ignored(options, implementation):
    """The states have a fixed size anyway; transformers says so in a warning, once."""
    model, ids = make_model(**options), make_ids(2, 20)
    output = generate(model, ids, cache_implementation=implementation, return_dict_in_generate=True)
    assert torch.equal(output.sequences, reference(model, ids))
    assert type(output.past_key_values) is Cache


@pytest.mark.parametrize('options', KINDS)
def test_static_shapes(options):
    """A static cache is refused, and so is a paged one; a request to compile is passed over."""
    model, ids = make_model(**options), make_ids(2, 20)
    with pytest.raises(TypeError, match='FLA cache'):
        generate(model, ids, StaticCache(config=model.config, max_cache_len=40))
    # the last is of transformers before 5.23
    with pytest.raises((NotImplementedError, ValueError, AttributeError)):
        generate(model, ids, cache_implementation='paged')
    for config in (CompileConfig(), CompileConfig(dynamic=True)):
        config._compile_all_devices = True
        torch._dynamo.utils.counters.clear()
        for cache in (None, Cache()):
            assert torch.equal(generate(model, ids, cache, compile_config=copy.copy(config)), reference(model, ids))
        assert not torch._dynamo.utils.counters['frames']


# ---- prompts in parts


@pytest.mark.parametrize('passed', ['all', 'new'], ids=['all-tokens', 'new-tokens'])
@pytest.mark.parametrize('options', KINDS)
def test_chat(options, passed):
    """Three turns of two rows that differ in length: padding on the left of a turn is in the middle of the sequence."""
    model, cache = make_model(**options), Cache()
    ids, mask = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)
    contexts = [torch.zeros(1, 0, dtype=torch.long) for _ in range(2)]
    for turn, lengths in enumerate([(5, 12), (9, 1), (2, 4)]):
        T, said = max(lengths), make_ids(2, max(lengths), seed=turn)
        said_mask = (torch.arange(T) >= T - torch.tensor(lengths)[:, None]).long()
        ids, mask = torch.cat((ids, said * said_mask), 1), torch.cat((mask, said_mask), 1)
        # the last answered token is not in the cache yet
        start = cache.get_seq_length() if passed == 'new' else 0
        result = generate(model, ids[:, start:], cache, attention_mask=mask)
        assert torch.equal(result[:, :-NEW], ids[:, start:])
        for row, length in enumerate(lengths):
            contexts[row] = reference(model, torch.cat((contexts[row], said[row:row + 1, T - length:]), 1))
            assert torch.equal(result[row, -NEW:], contexts[row][0, -NEW:]), f'turn {turn}, row {row}'
        ids, mask = torch.cat((ids, result[:, -NEW:]), 1), F.pad(mask, (0, NEW), value=1)
        assert cache.get_seq_length() == ids.shape[1] - 1


@pytest.mark.parametrize('size', [1, 7, 100])
@pytest.mark.parametrize('options', KINDS)
def test_prompt_in_chunks(options, size):
    """`prefill_chunk_size` asks for a cache to fill."""
    model, (ids, mask) = make_model(**options), left_padded(3, 20)
    result = generate(model, ids, Cache(), attention_mask=mask, prefill_chunk_size=size)
    for row, valid in enumerate(mask.bool()):
        assert torch.equal(result[row, -NEW:], reference(model, ids[row, valid][None])[0, -NEW:])


@pytest.mark.parametrize('options', KINDS)
def test_shortest_prompts(options):
    """One token: given, behind padding, as an embedding, or the first of every sequence where no prompt is given."""
    model, token = make_model(**options), torch.tensor([[7]])
    expected = reference(model, token)
    assert torch.equal(generate(model, token), expected)
    assert torch.equal(generate(model, bos_token_id=7), expected)
    padded, mask = F.pad(token, (5, 0)), F.pad(torch.ones_like(token), (5, 0))
    assert torch.equal(generate(model, padded, attention_mask=mask)[:, 5:], expected)
    embeds = model.get_input_embeddings()(token)
    assert torch.equal(generate(model, inputs_embeds=embeds), expected[:, 1:])
    assert torch.equal(generate(model, token, Cache()), expected)


# ---- the cache


@pytest.mark.parametrize('options', KINDS)
def test_with_and_without_cache(options):
    """Tokens, logits and hidden states of each step; and no cache where none is used."""
    model, (ids, mask) = make_model(**options), left_padded(3, 20)
    kwargs = {'output_logits': True, 'output_hidden_states': True, 'return_dict_in_generate': True}
    outputs = [generate(model, ids, attention_mask=mask, use_cache=use_cache, **kwargs) for use_cache in (True, False)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(outputs[0].sequences, greedy(model, ids, NEW, attention_mask=mask))
    assert outputs[0].past_key_values.get_seq_length() == 20 + NEW - 1 and outputs[1].past_key_values is None
    for step in range(NEW):
        assert_close(outputs[0].logits[step], outputs[1].logits[step], 1e-5, f'logits of step {step}')
        states = [torch.stack([x[:, -1] for x in output.hidden_states[step]]) for output in outputs]
        assert_close(*states, 1e-5, f'hidden states of step {step}')
    assert rel(outputs[0].logits[1], outputs[0].logits[0]) > 1e-1


@pytest.mark.parametrize('options', [pytest.param(options, id=name) for name, options in ALL_KINDS.items()])
def test_size_of_the_cache(options):
    """Of a memory it stays, and of keys is at most the window; nothing longer is kept alive behind a view."""
    model, ids, sizes = make_model(**options), make_ids(2, 10), {}
    expected = reference(model, ids, num_tokens=50)
    for num_tokens in (1, 10, 50):
        output = generate(model, ids, max_new_tokens=num_tokens, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected[:, :10 + num_tokens])
        cache, T = output.past_key_values, 9 + num_tokens
        assert cache.get_seq_length() == T
        sizes[num_tokens] = 0
        for layer in model.model.layers:
            state = cache[layer.attn.layer_idx]
            assert (state['attn_state'] is not None) == isinstance(layer.attn, Attention) == (state['recurrent_state'] is None)
            tensors = [x for part in state.values() if part is not None for x in part]
            if isinstance(layer.attn, Attention):
                length = T if layer.attn.window_size is None else min(T, WINDOW)
                assert [x.shape[:2] for x in tensors] == [(2, length)] * 2
            kept = [(x.untyped_storage().nbytes(), x.numel() * x.element_size()) for x in tensors]
            assert all(a <= b for a, b in kept), kept
            sizes[num_tokens] += sum(b for _, b in kept)
    assert (sizes[1] == sizes[10] == sizes[50]) == (options is not ALL_KINDS['hybrid-no-window'])
