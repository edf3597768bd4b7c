# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""A KDA model of FLA becomes a KDN model that starts from its weights, to be trained on:

    python -m fla_kdn.models.kdn.convert_from_kda SOURCE TARGET --covariance diagonal --text FILE

Copied, by name: all but `b_proj`, from which KDA has `beta = sigmoid(b)`, `b = b_proj(x)`. New, with a small constant s:

    r         r_min + softplus(r_proj(x)) ~ s e^{-b}             r_proj.weight = -b_proj.weight, bias log s; r_min = s / 100
    omega     softplus(omega_proj(x)) = s (1 - alpha^2 m)        last weight 0
    prior     1 / (0.1 + softplus(prior_precision)) = s

The write strength of a token is `k^T kappa = n / (r + n)`, `n = k^T P^ k`. Where the predicted covariance P^ is s and |k| = 1,
it is `s / (r + s)`: KDA's beta, but for the bend of softplus and r_min, together below 0.01 for |b| <= 4. A common factor of
r, omega and prior changes no gain, so s is free; 1e-3 keeps softplus near its exponential. (It also makes the prior nearly
fixed: a step of 1 in `prior_precision` changes it by 0.1%.)

omega holds P^ near s. A token with k^2 = 1 / K in each channel leaves of P^ the part
`m = 1 / (1 + info_scale / K beta / (1 - beta))`, `1 - beta` by default, and the decay leaves alpha^2 of that. From the
weights alone, beta is 1/2 and alpha the decay at `f_proj(x) = 0`. Given tokens, omega is then scaled, in three rounds, until
P^ has the mean s on the activations of the KDA model: for each channel, weighted by k^2 (diagonal), or for each head
(isotropic).

P^ still varies from token to token and, if diagonal, from channel to channel, which turns the gain away from k. So the logits
are near KDA's, not equal to them; nearest with tokens and `isotropic`. In models of two layers and on other tokens than those
of the fit, the largest difference between mean write strength and mean beta of a head, and the distance of the logits
relative to their norm:

                                      new parameters as
                                      initialised          from the weights     and tokens
                                      beta      logits     beta      logits     beta      logits
    random weights      diagonal      0.41      0.58       0.054     0.65       0.010     0.15
                        isotropic     0.42      0.30       0.069     0.056      0.009     0.021
    trained on text     diagonal      0.15      0.086      0.051     0.049      0.006     0.038
                        isotropic     0.15      0.048      0.054     0.010      0.008     0.006
    trained on recall   diagonal      0.32      0.42       0.041     0.23       0.001     0.19
                        isotropic     0.40      0.34       0.057     0.039      0.002     0.026

Token by token, the write strength of a head has a correlation with its beta of 0.92 or more.

The decay is KDA's with the floor of KDN's default, `safe_gate=True`: alpha is not below e^-5. This moves the logits of the
model trained on text, where 3% of the decays are below, by 0.0007; `convert_kda(..., safe_gate=False)` has none.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from fla_kdn.layers.kdn import KalmanDeltaNet
from fla_kdn.models.kdn.configuration_kdn import KDNConfig
from fla_kdn.models.kdn.modeling_kdn import KDNForCausalLM
from fla_kdn.ops.kdn.inputs import COVARIANCES, log_decay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fla.layers import KimiDeltaAttention
    from fla.models import KDAConfig, KDAForCausalLM
    from transformers import PreTrainedTokenizerBase

# s, the predicted covariance of a converted model
COVARIANCE = 1e-3
# rounds of scaling omega; what more of them change is below what the tokens do
ROUNDS = 3
# tokens of --text, in windows of this length
WINDOW, NUM_WINDOWS = 512, 8

# fields of a KDA config that a KDN config lacks or has in another sense, and what a config says of its model
DROPPED_FIELDS = (
    'allow_neg_eigval', 'safe_gate', 'lower_bound', 'attnres_block_size',
    'model_type', 'architectures', 'auto_map', 'transformers_version',
)
OPTIONS = ('covariance', 'info_scale', 'learn_info_scale', 'safe_gate', 'lower_bound')
# parameters of a KDN layer that a KDA layer lacks
NEW = ('r_proj.', 'omega_proj.', 'prior_precision', 'log_info_scale')


def convert_config(config: KDAConfig, **options) -> KDNConfig:
    """The config of the KDN model that a KDA model becomes; `options` are the fields of `KDNConfig` in `OPTIONS`."""
    if config.model_type != 'kda':
        raise ValueError(f"model_type={config.model_type!r} is not 'kda'.")
    if config.allow_neg_eigval:
        raise ValueError('allow_neg_eigval=True lets beta reach 2, a Kalman gain stays below 1.')
    for name in ('safe_gate', 'lower_bound'):
        if getattr(config, name) not in (None, False):
            raise ValueError(f'{name}={getattr(config, name)} is a gate function of KDA that KDN does not have.')
    if config.attnres_block_size is not None:
        raise ValueError(f'attnres_block_size={config.attnres_block_size}: KDN has no attention residuals.')
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f'{name} is not an option of the conversion, those are {OPTIONS}.')
    fields = {name: x for name, x in config.to_dict().items() if name not in DROPPED_FIELDS}
    return KDNConfig(**fields, r_min=COVARIANCE / 100, **options)


@torch.no_grad()
def convert_kda(
    model: KDAForCausalLM,
    covariance: str = 'diagonal',
    input_ids: torch.LongTensor | None = None,
    **options,
) -> KDNForCausalLM:
    """
    A new KDN model with the weights of a KDA model, on its device and in its types.

    Args:
        model (KDAForCausalLM):
            The KDA model; it is left as it is.
        covariance (str, Optional):
            `diagonal` or `isotropic`. Default: `diagonal`.
        input_ids (torch.LongTensor, Optional):
            Tokens `[B, T]` such as the model is for, without padding, on which the process noise is fitted; some hundred
            are enough, and the diagonal variant needs them to be near KDA. Default: `None`, from the weights alone.
        options:
            Those of :func:`convert_config`.
    """
    kdn = KDNForCausalLM(convert_config(model.config, covariance=covariance, **options)).to(model.device)
    state = {name: x for name, x in model.state_dict().items() if '.attn.b_proj.' not in name}
    for name, x in kdn.state_dict(keep_vars=True).items():
        if name in state:
            x.data = x.data.to(state[name].dtype)
    missing, unexpected = kdn.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.rpartition('.attn.')[2].startswith(NEW)]
    if missing or unexpected:
        raise ValueError(f'Parameters that only KDN has: {missing}; that only KDA has: {unexpected}.')
    kdn.generation_config = copy.deepcopy(model.generation_config)

    for old, new in zip(model.model.layers, kdn.model.layers, strict=True):
        if isinstance(new.attn, KalmanDeltaNet):
            _set_noise(old.attn, new.attn)
    if input_ids is not None:
        for _, kdn_layer, x in _layers(model, kdn, input_ids):
            _fit_omega(kdn_layer, x)
    return kdn.train(model.training)


def _set_noise(kda: KimiDeltaAttention, kdn: KalmanDeltaNet) -> None:
    """Give the new parameters of a layer their values, in the types of those that they stand beside."""
    for name, x in kdn.named_parameters():
        if name.startswith(NEW):
            x.data = x.data.to(kda.A_log.dtype if '.' not in name else kda.b_proj.weight.dtype)
    kdn.r_proj.weight.copy_(-kda.b_proj.weight)
    kdn.r_proj.bias.fill_(math.log(COVARIANCE))

    keep = 1 / (1 + _info_scale(kdn) / kdn.head_k_dim)
    f = kda.A_log.new_zeros(1, 1, kdn.num_v_heads, kdn.head_k_dim, dtype=torch.float32)
    a = (2 * log_decay(f, kda.A_log.float(), kda.dt_bias.float(), kdn.safe_gate, kdn.lower_bound)).exp()
    omega = COVARIANCE * (1 - _pool(kdn, a) * keep)
    last = _last_projection(kdn)
    last.weight.zero_()
    last.bias.copy_(_inverse_softplus(omega).flatten())

    # softplus is the identity here
    kdn.prior_precision.fill_(1 / COVARIANCE - 0.1)


def _fit_omega(kdn: KalmanDeltaNet, x: torch.Tensor) -> None:
    """Scale omega to a mean predicted covariance of s on the inputs `x` `[B, T, hidden_size]` of a layer."""
    bias = _last_projection(kdn).bias
    for _ in range(ROUNDS):
        p_hat, k2, _ = kdn.predicted_covariance(x)
        # a channel without keys has a mean, too
        k2 = _pool(kdn, k2.clamp(min=1e-12))
        mean = (k2 * p_hat).sum((0, 1)) / k2.sum((0, 1))
        omega = F.softplus(bias.float()) * COVARIANCE / mean.flatten()
        bias.copy_(_inverse_softplus(omega))


def _layers(
    model: KDAForCausalLM,
    kdn: KDNForCausalLM,
    input_ids: torch.LongTensor,
) -> Iterator[tuple[KimiDeltaAttention, KalmanDeltaNet, torch.Tensor]]:
    """KDA layers, the KDN layers in their place, and the inputs `[B, T, hidden_size]` of the former."""
    hidden_states = model.model(input_ids.to(model.device), use_cache=False, output_hidden_states=True).hidden_states
    for old, new, x in zip(model.model.layers, kdn.model.layers, hidden_states, strict=False):
        if isinstance(new.attn, KalmanDeltaNet):
            yield old.attn, new.attn, old.attn_norm(x)


@torch.no_grad()
def write_strengths(
    model: KDAForCausalLM,
    kdn: KDNForCausalLM,
    input_ids: torch.LongTensor,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Mean beta and mean write strength `k^T kappa` of each head, `[HV]`, on the activations of the KDA model, by layer."""
    means = {}
    for kda_layer, kdn_layer, x in _layers(model, kdn, input_ids):
        _, uncertainty, _ = kdn_layer(x, output_uncertainty=True)
        means[kdn_layer.layer_idx] = tuple(
            y.mean((0, 1)) for y in (kda_layer.b_proj(x).float().sigmoid(), uncertainty.write_strength)
        )
    return means


def _info_scale(kdn: KalmanDeltaNet) -> float:
    return kdn.head_k_dim if kdn.info_scale is None else kdn.info_scale


def _last_projection(kdn: KalmanDeltaNet) -> torch.nn.Linear:
    return kdn.omega_proj[-1] if kdn.covariance == 'diagonal' else kdn.omega_proj


def _pool(kdn: KalmanDeltaNet, x: torch.Tensor) -> torch.Tensor:
    return x if kdn.covariance == 'diagonal' else x.mean(-1, keepdim=True)


def _inverse_softplus(x: torch.Tensor) -> torch.Tensor:
    return x + (-torch.expm1(-x)).log()


def _read_tokens(path: str, tokenizer: PreTrainedTokenizerBase | None) -> torch.LongTensor:
    """The first tokens of a text file, `[windows, tokens of a window]`."""
    if tokenizer is None:
        raise ValueError('--text: SOURCE has no tokenizer')
    # more characters than the tokens have, less than a corpus
    with open(path, encoding='utf-8', errors='replace') as file:
        text = file.read(32 * NUM_WINDOWS * WINDOW)
    ids = tokenizer(text, return_tensors='pt').input_ids[0, :NUM_WINDOWS * WINDOW]
    if not len(ids):
        raise ValueError(f'--text: {path} holds no text')
    windows = max(1, len(ids) // WINDOW)
    return ids[:len(ids) // windows * windows].view(windows, -1)


def _report(model: KDAForCausalLM, kdn: KDNForCausalLM, input_ids: torch.LongTensor | None) -> str:
    """What was copied, dropped and new, and the write strengths on `input_ids`."""
    old, new = (dict(x.named_parameters()) for x in (model, kdn))
    rows = [('parameters', 'tensors', 'elements')]
    for name, parameters in {
        'copied': [new[name] for name in new if name in old],
        'dropped (b_proj)': [old[name] for name in old if name not in new],
        **{f'new ({part.rstrip(".")})': [new[name] for name in new if f'.attn.{part}' in name] for part in NEW},
    }.items():
        if parameters:
            rows.append((name, len(parameters), f'{sum(x.numel() for x in parameters):,}'))
    table = [f'{name:24}{tensors:>8}{elements:>14}' for name, tensors, elements in rows]
    if input_ids is not None:
        table += ['', f'{"layer":24}{"KDA beta":>10}{"KDN write strength":>20}{"largest difference of a head":>30}']
        for layer_idx, (beta, strength) in write_strengths(model, kdn, input_ids).items():
            difference = (strength - beta).abs().max()
            table.append(f'{layer_idx:<24}{beta.mean():>10.3f}{strength.mean():>20.3f}{difference:>30.3f}')
    return '\n'.join(table)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m fla_kdn.models.kdn.convert_from_kda',
        description='Convert a KDA model of FLA into a KDN model that starts from its weights.',
    )
    parser.add_argument('source', metavar='SOURCE', help='KDA model: a folder, or a name on the Hugging Face hub')
    parser.add_argument('target', metavar='TARGET', type=Path, help='new folder for the KDN model')
    parser.add_argument('--covariance', choices=COVARIANCES, default='diagonal', help='default: %(default)s')
    parser.add_argument('--text', metavar='FILE', help='text to fit the process noise on; the first 4,096 tokens are used')
    args = parser.parse_args(argv)
    try:
        if args.target.exists() and any(args.target.iterdir()):
            parser.error(f'TARGET: {args.target} is not empty')
        model = AutoModelForCausalLM.from_pretrained(args.source, dtype='auto').eval()
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.source)
        except (OSError, ValueError):
            tokenizer = None
        input_ids = None if args.text is None else _read_tokens(args.text, tokenizer)
        kdn = convert_kda(model, args.covariance, input_ids)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for part in (kdn, tokenizer):
        if part is not None:
            part.save_pretrained(args.target)
    sys.stdout.write(f'{_report(model, kdn, input_ids)}\n')


if __name__ == '__main__':
    main()
