# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The mixers that the comparison itself wraps in a model."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close, rel

from benchmarks.compare.mixers import MIXERS, build_model, matched_config
from benchmarks.compare.models import ExactKalmanDeltaNet
from benchmarks.compare.settings import PRESETS, Backbone
from benchmarks.compare.train import loss_of, warm_up
from fla_kdn import KalmanDeltaNet

SIZES = {'hidden_size': 16, 'head_dim': 8, 'num_heads': 2, 'layer_idx': 0}
BACKBONE = Backbone(
    hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=16, intermediate_size=64, width_step=1, initializer_range=0.2,
)


def make_layers(one_hot: bool) -> list[KalmanDeltaNet]:
    """The exact filter, and both approximations without extra weight on evidence, of the same weights."""
    torch.manual_seed(0)
    exact, diagonal = ExactKalmanDeltaNet(**SIZES), KalmanDeltaNet(**SIZES, info_scale=1.0)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if one_hot:
            # each token is one key of each head, and the convolution passes it on as it is
            exact.k_proj.weight.copy_(5 * torch.eye(8).repeat(2, 2))
            exact.k_conv1d.weight.zero_()
            exact.k_conv1d.weight[:, 0, -1] = 1
    diagonal.load_state_dict(exact.state_dict())
    return [exact, diagonal]


def outputs_and_gradients(layer: KalmanDeltaNet) -> dict[str, torch.Tensor]:
    tokens = torch.eye(16)[torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(1))]
    o = layer(tokens)[0]
    (o * torch.randn(o.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {'o': o, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def test_exact_filter_is_the_diagonal_one_where_keys_do_not_overlap():
    exact, diagonal = map(outputs_and_gradients, make_layers(one_hot=True))
    for name, x in exact.items():
        # of keys that cannot turn, the gradient is noise
        if not name.startswith('k_'):
            assert_close(diagonal[name], x, 1e-4, name)


def test_exact_filter_is_another_where_keys_overlap():
    exact, diagonal = map(outputs_and_gradients, make_layers(one_hot=False))
    assert rel(diagonal['o'], exact['o']) > 1e-2


@pytest.mark.parametrize('mixer', [mixer for mixer in MIXERS if not MIXERS[mixer].needs_gpu])
@pytest.mark.parametrize('bf16', [False, True], ids=['fp32', 'bf16'])
def test_every_parameter_learns(mixer, bf16):
    model = build_model(matched_config(mixer, BACKBONE)[0], seed=0)
    with torch.no_grad():
        # some weights start at zero, and those before them have no gradient
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
        loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@torch.inference_mode()
@pytest.mark.parametrize('mixer', ['kdn-exact', 'attention', 'kdn-window'])
def test_decoding_goes_on_where_a_prompt_ended(mixer):
    model = build_model(matched_config(mixer, BACKBONE)[0], seed=0).eval()
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=tokens[:, :15], use_cache=True)
    logits = [output.logits]
    for token in tokens[:, 15:].split(1, dim=1):
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits)
    assert_close(torch.cat(logits, 1), model(input_ids=tokens, use_cache=False).logits, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('mixer', PRESETS['gpu'].mixers)
def test_first_steps_on_a_gpu(mixer):
    preset = PRESETS['gpu']
    config, _ = matched_config(mixer, preset.backbone)
    try:
        warm_up(config, [preset.tasks['noisy']], preset.bf16, torch.device('cuda'))
    except RuntimeError as error:
        if 'on Hopper GPUs produces incorrect results' in str(error):
            pytest.skip(str(error))
        raise
