# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shared by all tests: how an error is measured, one thread a process, untuned kernels, Triton's interpreter if asked for."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.autotuner import Autotuner

# small tensors, on the cores that xdist shares out
torch.set_num_threads(1)
if os.environ.get('TRITON_INTERPRET') == '1':
    sys.path.insert(0, str(Path(__file__).parent / 'ops'))
    import interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def first_configuration(monkeypatch):
    """Kernels run in the first of their configurations: on a GPU, to time all of them takes minutes for each shape."""
    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, 'prune_configs', lambda *args: prune(*args)[:1])
    monkeypatch.setattr(Autotuner, '_bench', lambda *args, **kwargs: [0.])


def rel(x: torch.Tensor, ref: torch.Tensor) -> float:
    """`||x - ref|| / ||ref||` in float64; infinite if it is not a number, or if `ref` is zero and `x` is not."""
    assert x.shape == ref.shape, f'shape {list(x.shape)}, expected {list(ref.shape)}'
    x, ref = x.detach().double(), ref.detach().double()
    error, norm = (x - ref).norm().item(), ref.norm().item()
    if error == 0:
        return 0.
    return error / norm if math.isfinite(error) and norm > 0 else math.inf


def assert_close(x: torch.Tensor, ref: torch.Tensor, tol: float, name: str = 'result') -> None:
    error = rel(x, ref)
    assert error <= tol, f'error of {name} is {error:.2e}, above {tol:.0e}; norm of the reference {ref.double().norm():.2e}'
