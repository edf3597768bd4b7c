# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Inputs of KDN, and how one form of it is compared with another: outputs, and the gradient of every input.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from conftest import assert_close

if TYPE_CHECKING:
    from collections.abc import Callable

COVARIANCES = ['diagonal', 'isotropic']
# sequences of 0, 3, 15, 0, 65, 64, 7 and 0 tokens
CU_SEQLENS = [0, 0, 3, 18, 18, 83, 147, 154, 154]


def make_inputs(
    covariance: str = 'diagonal',
    B: int = 2,
    T: int = 40,
    H: int = 2,
    HV: int = 2,
    K: int = 8,
    V: int = 6,
    N: int | None = None,
    prior: bool = False,
    gate: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Every tensor that KDN takes: `q`, `k`, `v` in `dtype`, the others in at least fp32.

    `initial_cov` is carried over, or with `prior` one of each head; with `gate`, `g` is raw, beside `A_log` and `dt_bias`.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def slow(*shape):
        # from channels that forget within a chunk to some that remember several
        return 10 ** (-3 * rand(*shape))

    N = N or B
    channels = (K,) if covariance == 'diagonal' else ()
    inputs = {
        'q': randn(B, T, H, K),
        'k': randn(B, T, H, K) / K ** 0.5,
        'v': randn(B, T, HV, V),
        'g': 2 * randn(B, T, HV, K) - 3 if gate else -0.3 * rand(B, T, HV, K) * slow(HV, K),
        'omega': 0.3 * F.softplus(randn(B, T, HV, *channels) - 1) * slow(HV, *channels),
        'r': 0.05 + F.softplus(randn(B, T, HV) - 1),
        'initial_state': randn(N, HV, K, V),
        'initial_cov': 0.2 + rand(HV) if prior else 0.2 + rand(N, HV, *channels),
        'info_scale': 0.5 + 3 * rand(HV),
    }
    if gate:
        inputs |= {'A_log': 0.5 * randn(HV), 'dt_bias': randn(HV * K)}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.to(dtype if name in ('q', 'k', 'v') else state_dtype) for name, x in inputs.items()}


def as_double(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() for name, x in inputs.items()}


def run(
    fn: Callable,
    inputs: dict[str, torch.Tensor],
    grads: bool = True,
    present: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **options,
) -> dict[str, torch.Tensor]:
    """Outputs of `fn`, and the gradients of one random linear functional of all of them, by name.

    `present` changes how a tensor lies in memory before `fn` takes it.
    """
    leaves = {name: x.detach().clone().requires_grad_(grads) for name, x in inputs.items()}
    outputs = fn(**{name: present(x) for name, x in leaves.items()}, output_final_state=True, **options)
    results = dict(zip(('o', 'final_state', 'final_cov'), outputs, strict=True))
    if grads:
        loss = sum((x.double() * weights(x.shape, seed)).sum() for seed, x in enumerate(results.values()))
        results |= zip((f'd{name}' for name in leaves), torch.autograd.grad(loss, list(leaves.values())), strict=True)
    return results


def weights(shape: torch.Size, seed: int) -> torch.Tensor:
    """Random numbers that bf16 holds exactly: the same upstream gradient for outputs of every type."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def check(
    fn: Callable,
    ref: Callable,
    inputs: dict[str, torch.Tensor],
    tol: float | dict[str, float],
    grads: bool = True,
    present: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **options,
) -> dict[str, torch.Tensor]:
    """Compare `fn` on `inputs` with `ref` on float64 copies; `tol` may be a bound for each name and for `'other'` ones."""
    got = run(fn, inputs, grads, present, **options)
    want = run(ref, as_double(inputs), grads, **options)
    for name, x in got.items():
        assert_close(x, want[name], tol if isinstance(tol, float) else tol.get(name, tol['other']), name)
    return got


def cut_sequences(
    covariance: str,
    varlen: bool,
    dtype: torch.dtype,
    T: int = 70,
    state_v_first: bool = False,
) -> tuple[dict, list[tuple[dict, torch.Tensor]]]:
    """Arguments of :func:`run` for some sequences, then for three pieces of them, with the tokens of each piece.

    The pieces after the first need the `initial_state` and `initial_cov` that came out before. The second one is empty; with
    `varlen`, sequences are cut at different places.
    """
    bounds = CU_SEQLENS if varlen else [0, T]
    inputs = make_inputs(covariance, B=1 if varlen else 2, T=bounds[-1], N=len(bounds) - 1 if varlen else 2, dtype=dtype)
    if state_v_first:
        inputs['initial_state'] = inputs['initial_state'].mT
    tokens = ('q', 'k', 'v', 'g', 'omega', 'r')

    def piece(ranges):
        where = torch.cat([torch.arange(start, end) for start, end in ranges])
        options = {'covariance': covariance, 'state_v_first': state_v_first}
        if varlen:
            options['cu_seqlens'] = F.pad(torch.tensor([end - start for start, end in ranges]).cumsum(0), (1, 0))
        return {'inputs': inputs | {name: inputs[name][:, where] for name in tokens}, **options}, where

    sequences = list(zip(bounds, bounds[1:], strict=False))
    cuts = [start + (end - start) // 3 for start, end in sequences]
    first = [(start, cut) for (start, _), cut in zip(sequences, cuts, strict=True)]
    last = [(cut, end) for (_, end), cut in zip(sequences, cuts, strict=True)]
    return piece(sequences)[0], [piece(first), piece([(cut, cut) for cut in cuts]), piece(last)]
