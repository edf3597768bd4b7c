# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The models on a GPU in bf16, on Triton kernels and every attention kernel there is, against themselves in fp32 on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_close
from transformers.utils import is_flash_attn_2_available
from utils import CACHE, make_ids, make_model

from fla_kdn.layers import Attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')]

# heads of a size that the kernels take
SIZES = {'hidden_size': 128, 'num_heads': 2, 'head_dim': 64}
OPTIONS = {
    'diagonal': SIZES,
    'isotropic': {**SIZES, 'covariance': 'isotropic'},
    'hybrid': {
        **SIZES, 'num_hidden_layers': 3, 'attn': {'layers': [0, 2], 'num_heads': 4, 'num_kv_heads': 2, 'window_size': 100},
    },
}
NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
IMPLEMENTATIONS = [
    'sdpa', 'eager', 'flex_attention',
    pytest.param('flash_attention_2', marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason='needs flash-attn')),
]
CU_SEQLENS = torch.tensor([0, 0, 3, 303, 600], dtype=torch.int32)


def make_pair(**options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One model twice, with weights that bf16 holds: in fp32 on the CPU, in bf16 on the GPU."""
    model = make_model(**options).bfloat16().float()
    return model, copy.deepcopy(model).to('cuda', torch.bfloat16)


def left_padding(B: int, T: int) -> torch.Tensor:
    return (torch.arange(T) >= torch.tensor([[0], [T // 3]])[:B]).long()


@pytest.mark.parametrize('how', ['plain', 'padded', 'packed'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_logits_and_gradients(options, how):
    (model, on_gpu), ids = make_pair(**options), make_ids(1 if how == 'packed' else 2, 600)
    inputs = {'padded': {'attention_mask': left_padding(2, 600)}, 'packed': {'cu_seqlens': CU_SEQLENS}}.get(how, {})
    results = []
    for m, device in ((model, 'cpu'), (on_gpu, 'cuda')):
        logits = m(ids.to(device), **{name: x.to(device) for name, x in inputs.items()}).logits
        if how == 'padded':
            logits = logits * inputs['attention_mask'].to(device).unsqueeze(-1)
        logits.float().square().mean().backward()
        gradients = {name: p.grad.cpu().float() for name, p in m.named_parameters() if p.ndim > 1}
        results.append({'logits': logits.detach().cpu().float(), **gradients})
    want, got = results
    for name, x in want.items():
        assert_close(got[name], x, 5e-2 if name == 'logits' else 0.2, name)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@torch.no_grad()
def test_attention_kernels(implementation):
    (model, on_gpu), ids = make_pair(**OPTIONS['hybrid']), make_ids(2, 600)
    on_gpu.config._attn_implementation = implementation
    mask = left_padding(2, 600)
    for inputs in ({}, {'attention_mask': mask}, {'cu_seqlens': CU_SEQLENS}):
        x = ids[:1] if 'cu_seqlens' in inputs else ids
        want = model(x, **inputs).logits
        got = on_gpu(x.cuda(), **{name: y.cuda() for name, y in inputs.items()}).logits.cpu().float()
        keep = mask.bool() if 'attention_mask' in inputs else torch.ones_like(x, dtype=torch.bool)
        assert_close(got[keep], want[keep], 5e-2, f'logits with {list(inputs)}')


@pytest.mark.parametrize('padded', [False, True], ids=['full', 'left-padded'])
@pytest.mark.parametrize('options', NAMED_OPTIONS)
@torch.no_grad()
def test_cached_logits(options, padded):
    """A prompt of two pieces, then token after token."""
    model, on_gpu = make_pair(**options)
    pieces = (150, 70, *[1] * 20)
    ids, cache, logits, end = make_ids(2, sum(pieces)), None, [], 0
    mask = left_padding(2, sum(pieces)) if padded else None
    for piece in ids.cuda().split(pieces, 1):
        end += piece.shape[1]
        options = {} if cache is None else {CACHE: cache}
        output = on_gpu(piece, attention_mask=mask[:, :end].cuda() if padded else None, use_cache=True, **options)
        cache = output.past_key_values
        logits.append(output.logits.cpu().float())
    keep = mask.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    assert_close(torch.cat(logits, 1)[keep], model(ids, attention_mask=mask).logits[keep], 5e-2, 'logits')


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_generate(options):
    """With and without a cache in fp32, and in a batch as alone."""
    model, ids, mask = make_model(**options).cuda(), make_ids(2, 150).cuda(), left_padding(2, 150).cuda()
    kwargs = {'attention_mask': mask, 'max_new_tokens': 8, 'do_sample': False, 'pad_token_id': 0, 'output_scores': True,
              'return_dict_in_generate': True}
    cached, full = (torch.stack(model.generate(ids, use_cache=use_cache, **kwargs).scores[:2]) for use_cache in (True, False))
    assert_close(cached, full, 1e-2, 'scores')
    alone = model.generate(ids[1:, 50:], **{**kwargs, 'attention_mask': mask[1:, 50:]})
    assert_close(torch.stack(alone.scores[:2])[:, 0], cached[:, 1], 1e-2, 'scores alone')


@pytest.mark.parametrize('packed', [False, True], ids=['plain', 'packed'])
def test_memory_of_a_long_sequence(packed):
    """Of attention over a window: twice the tokens need twice the memory, without a mask of all pairs."""
    layer = Attention(hidden_size=256, num_heads=2, window_size=2048).to('cuda', torch.bfloat16)
    peaks = []
    for T in (16384, 32768):
        x = torch.randn(1, T, 256, device='cuda', dtype=torch.bfloat16, requires_grad=True)
        cu_seqlens = torch.tensor([0, 100, T // 2, T], device='cuda') if packed else None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x, cu_seqlens=cu_seqlens)[0].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.3 * peaks[0], peaks
    # all pairs in bf16 would need 2 GiB
    assert peaks[1] < 2 ** 30, peaks


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_compiled(options):
    _, model = make_pair(**options)
    ids = make_ids(2, 200).cuda()
    want = model(ids, labels=ids)
    got = torch.compile(model)(ids, labels=ids)
    assert_close(got.loss, want.loss, 1e-2, 'loss')
    got.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs a second GPU')
@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_second_device(options):
    model, ids = make_model(**options), make_ids(2, 150)
    want = model(ids, labels=ids)
    on_second = copy.deepcopy(model).to('cuda:1', torch.bfloat16)
    got = on_second(ids.to('cuda:1'), labels=ids.to('cuda:1'))
    assert_close(got.logits.cpu().float(), want.logits, 5e-2, 'logits')
    got.loss.backward()
    assert on_second.generate(ids.to('cuda:1'), max_new_tokens=3, do_sample=False, pad_token_id=0).device.index == 1
