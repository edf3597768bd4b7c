# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The mixers that the comparison itself wraps in a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import assert_close, rel
from fla.layers.mamba2 import Mamba2
from transformers import AutoModelForCausalLM

from benchmarks.compare.mixers import MIXERS, build_model, matched_config
from benchmarks.compare.models import ExactKalmanDeltaNet, MatmulMamba2
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


@pytest.mark.parametrize('tokens', [3, 8, 37])
def test_mamba2_of_matrix_products_is_that_of_fla(tokens):
    """Output, states and gradients of FLA's PyTorch form, which holds all products of chunks and states."""
    def run(forward):
        torch.manual_seed(0)
        # strong writes and long memories, lest the residual path be all that is compared
        layer = MatmulMamba2(
            hidden_size=32, expand=1, head_dim=16, state_size=16, dt_min=1., dt_max=2., A_init_range=(0.01, 0.5), chunk_size=8,
        )
        # FLA's are kernels for GPUs
        layer.rmsnorm, layer.act = False, torch.nn.functional.silu
        with torch.no_grad():
            layer.in_proj.weight.mul_(3)
            layer.D.zero_()
        x = torch.randn(2, tokens, 32, requires_grad=True)
        o, conv_state, state = forward(layer, x, use_cache=True)
        o.square().sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters() if not name.startswith('norm')}
        return {'o': o, 'conv_state': conv_state, 'state': state, 'x': x.grad, **grads}

    expected = run(Mamba2.torch_forward)
    for name, x in run(MatmulMamba2.torch_forward).items():
        assert_close(x, expected[name], 1e-5, name)


def test_convolutions_before_unnormalised_keys_are_not_drawn_small(tmp_path):
    for mixer, small in (('attention', False), ('mamba2', False), ('gdn2', True)):
        model = build_model(matched_config(mixer, BACKBONE)[0], seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], x) for name, x in model.state_dict().items())
        config, _ = matched_config(mixer, replace(BACKBONE, initializer_range=0.01))
        convolutions = [x for x in build_model(config, seed=0).modules() if isinstance(x, torch.nn.Conv1d)]
        assert convolutions and all((x.weight.std() < 0.02) == small for x in convolutions)


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
