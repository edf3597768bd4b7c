# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What the posterior over the memory says about each token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class KDNUncertainty(NamedTuple):
    """
    What a Kalman filter knows about each token besides its output; fp32 (on a CPU float64 for float64 inputs), `[B, T, HV]`.

    With the gain kappa, the predicted covariance Phat, the posterior covariance P and the innovation `e = v - k^T Shat` of the
    token (steps (2) to (6) of `naive.py`):

    Attributes:
        write_strength: `k^T kappa`, in (0, 1): the share of the innovation by which the read-out at k moves; KDA's beta.
        read_variance: `q^T P q`, variance of each channel of what is read, without `scale` (for that of `o`, times `scale^2`).
        innovation_variance: `r + k^T Phat k`, variance that is expected of each channel of e.
        log_likelihood: `log N(v; k^T Shat, innovation_variance)`, in nats, summed over the V channels; `None` unless
            `output_uncertainty='log_likelihood'`.

    They are exact for the full covariance (`naive_recurrent_exact_kdn`). The diagonal and the isotropic variant drop
    correlations, and `info_scale` above 1 counts evidence more than once: the order of the values means more than their size.
    """

    write_strength: torch.Tensor
    read_variance: torch.Tensor
    innovation_variance: torch.Tensor
    log_likelihood: torch.Tensor | None

    @property
    def key_variance(self) -> torch.Tensor:
        """`k^T Phat k`, variance of each channel of what the memory holds at the token's key before the token writes."""
        return self.write_strength * self.innovation_variance


# outputs, final memory and covariance, and with `output_uncertainty` what is known of the tokens
KDNResult = (
    tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, KDNUncertainty]
)


def make_uncertainty(
    noise: torch.Tensor,
    key_variance: torch.Tensor,
    read_variance: torch.Tensor,
    squared_innovation: torch.Tensor | None,
    head_v_dim: int,
    output_uncertainty: bool | str,
) -> KDNUncertainty:
    """From r, `k^T Phat k`, `q^T P q` and `|e|^2`, each `[B, T, HV]`."""
    innovation_variance = noise + key_variance
    if output_uncertainty != 'log_likelihood':
        squared_innovation = None
    return with_log_likelihood(
        key_variance / innovation_variance, read_variance, innovation_variance, squared_innovation, head_v_dim)


def with_log_likelihood(
    write_strength: torch.Tensor,
    read_variance: torch.Tensor,
    innovation_variance: torch.Tensor,
    squared_innovation: torch.Tensor | None,
    head_v_dim: int,
) -> KDNUncertainty:
    """The log-likelihood is that of an innovation with `|e|^2`, whose V channels have one variance; `None` without it."""
    log_likelihood = None
    if squared_innovation is not None:
        log_likelihood = -0.5 * (
            head_v_dim * (math.log(2 * math.pi) + innovation_variance.log()) + squared_innovation / innovation_variance)
    return KDNUncertainty(write_strength, read_variance, innovation_variance, log_likelihood)
