# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What a model says of each token: through layers, padding, packing, caches and `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conftest import assert_close
from utils import CACHE, OPTIONS, make_ids, make_model

from fla_kdn.layers import KalmanDeltaNet

if TYPE_CHECKING:
    from fla_kdn.ops.kdn import KDNUncertainty

NAMED_OPTIONS = [pytest.param(options, id=name) for name, options in OPTIONS.items()]
ASKED = 'log_likelihood'


def stacked(uncertainty: tuple[KDNUncertainty | None, ...]) -> torch.Tensor:
    """Of all layers that have some, `[layers, 4, B, T, HV]`."""
    return torch.stack([torch.stack(x) for x in uncertainty if x is not None])


def of(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return stacked(model(ids, output_uncertainty=ASKED, **kwargs).uncertainty)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_output(options):
    model, ids = make_model(**options), make_ids(2, 70)
    plain, output = model(ids, labels=ids), model(ids, labels=ids, output_uncertainty=ASKED)
    assert not hasattr(plain, 'uncertainty')
    assert torch.equal(output.loss, plain.loss) and torch.equal(output.logits, plain.logits)
    kinds = [isinstance(layer.attn, KalmanDeltaNet) for layer in model.model.layers]
    assert [x is not None for x in output.uncertainty] == kinds
    for x, layer in zip(output.uncertainty, model.model.layers, strict=True):
        if x is not None:
            assert all(y.shape == (2, 70, layer.attn.num_v_heads) and y.dtype == torch.float32 for y in x)
            assert x.write_strength.min() > 0 and x.write_strength.max() < 1
    assert model(ids, output_uncertainty=True).uncertainty[1].log_likelihood is None
    *_, last = model(ids, output_uncertainty=ASKED, return_dict=False)
    assert torch.equal(stacked(last), stacked(output.uncertainty))
    base = model.model(ids, output_uncertainty=ASKED)
    assert torch.equal(stacked(base.uncertainty), stacked(output.uncertainty))


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_training(options):
    """Also with gradient checkpoints, whose layers run twice."""
    model, ids = make_model(**options).train(), make_ids(2, 70)
    want = model(ids, labels=ids, output_uncertainty=ASKED)
    model.gradient_checkpointing_enable()
    got = model(ids, labels=ids, output_uncertainty=ASKED)
    got.loss.backward()
    assert len(got.uncertainty) == model.config.num_hidden_layers
    assert_close(stacked(got.uncertainty), stacked(want.uncertainty), 1e-6)
    assert not stacked(got.uncertainty).requires_grad


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_padding_and_packing(options):
    model, ids = make_model(**options), make_ids(3, 70)
    mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(1)) > 0.3
    padded = of(model, ids, attention_mask=mask)
    assert not padded[..., ~mask, :].any()
    rows = [of(model, x[valid][None])[:, :, 0] for x, valid in zip(ids, mask, strict=True)]
    for row, valid in enumerate(mask):
        assert_close(padded[:, :, row, valid], rows[row], 1e-5, f'row {row}')
    packed = of(model, ids[mask][None], cu_seqlens=torch.tensor([0, *mask.sum(1).cumsum(0)]))
    assert_close(packed[:, :, 0], torch.cat(rows, 2), 1e-5)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_pieces(options):
    model, ids, cache, parts = make_model(**options), make_ids(2, 75), None, []
    for piece in ids.split([66, 7, 1, 1], 1):
        with torch.no_grad():
            output = model(piece, use_cache=True, output_uncertainty=ASKED, **({} if cache is None else {CACHE: cache}))
        cache = output.past_key_values
        parts.append(stacked(output.uncertainty))
    assert_close(torch.cat(parts, 3), of(model, ids), 1e-5)


@pytest.mark.parametrize('options', NAMED_OPTIONS)
def test_generate(options):
    model, ids = make_model(**options), make_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    kwargs = {'attention_mask': mask, 'max_new_tokens': 6, 'do_sample': False, 'pad_token_id': 0}
    output = model.generate(ids, **kwargs, output_uncertainty=ASKED, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(ids, **kwargs))
    assert [x[1].write_strength.shape[1] for x in output.uncertainty] == [20, 1, 1, 1, 1, 1]
    # the last token is not in the memory yet
    full = of(model, output.sequences[:, :-1], attention_mask=torch.nn.functional.pad(mask, (0, 5), value=1))
    assert_close(torch.cat([stacked(x) for x in output.uncertainty], 3), full, 1e-5)
    assert not model._forward_hooks and not model.model._forward_hooks


def test_errors():
    model, ids = make_model(), make_ids(1, 9)
    for kwargs in ({}, {'return_dict_in_generate': True, 'num_beams': 2}):
        with pytest.raises(ValueError, match='`output_uncertainty` needs'):
            model.generate(ids, max_new_tokens=2, output_uncertainty=True, **kwargs)
    with pytest.raises(ValueError, match='`output_uncertainty` must be'):
        model(ids, output_uncertainty='all')
    assert not model.model._forward_hooks
