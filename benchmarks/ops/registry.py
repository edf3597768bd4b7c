# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The ops that are timed, how their inputs are made, and the least that each must move and compute.

Dimensions: B batch, T tokens, H heads, D size of a key and of a value, L layers of a decoding step.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fla_kdn.ops.kdn.gain_triton import GainArguments, GainOptions, kdn_gain_bwd, kdn_gain_fwd
from fla_kdn.ops.utils.chunk_layout import CHUNK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Shape = tuple[int, int, int, int]

# a decoding step goes through as many layers, each with its own states: they come from memory, not from the L2 cache
LAYERS = 24
MODES = {'chunk': ('fwd', 'fwdbwd'), 'decode': ('eager', 'graph', 'graph in place'), 'gain': ('fwd', 'bwd')}
BASELINES = {'chunk': 'chunk_kda', 'decode': 'fused_recurrent_kda'}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of `shape_fn(B=, T=, H=, D=, L=)`: `transform` of standard normal numbers, in `dtype`."""
    shape_fn: Callable[..., tuple[int, ...]]
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class OpConfig:
    """An op to time: `func_name` (default: `name`) of the module `import_path`, called with `inputs` and `extra_kwargs`.

    `kind` decides how it is called (`MODES`); `flops` counts a forward's products of matrices, `None` where it has none.
    """
    name: str
    import_path: str
    inputs: dict[str, TensorSpec]
    func_name: str | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    kind: str = 'chunk'
    flops: Callable[[int, int, int, int], float] | None = None

    def load(self, suffix: str = '') -> Callable:
        return getattr(importlib.import_module(self.import_path), (self.func_name or self.name) + suffix)


def chunk_flops(B: int, T: int, H: int, D: int) -> float:
    """Per token and head: three products with the memory (to correct v, to update it, to read it), of 2 D^2 each; five with a
    triangular matrix of the chunk (q k^T, k k^T, w, u, and q k^T times v), of BT D each, as half of it is zero; an inverse."""
    return B * T * H * (6 * D**2 + 5 * CHUNK_SIZE * D + CHUNK_SIZE**2 / 3)


def attention_flops(B: int, T: int, H: int, D: int) -> float:
    """Two products of 2 D for each pair of tokens, half of which are masked."""
    return B * T * H * 2 * T * D


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def dims(sizes: str) -> Callable[..., tuple[int, ...]]:
    """`'B T H D'` as a shape function; letters without a space between are multiplied."""
    return lambda **size: tuple(math.prod(size[letter] for letter in part) for part in sizes.split())


def log_rate(x: torch.Tensor) -> torch.Tensor:
    """`A_log` as layers start it."""
    return torch.empty_like(x).uniform_(1, 16).log()


def gate_bias(x: torch.Tensor) -> torch.Tensor:
    """`dt_bias` as layers start it."""
    dt = torch.empty_like(x).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return dt + (-torch.expm1(-dt)).log()


def log_decay(x: torch.Tensor) -> torch.Tensor:
    """What the two make of `x` [B, T, H, ...], for ops whose layers activate the gate before they call them."""
    A = log_rate(x[0, 0].flatten(1)[:, 0] if x.ndim > 3 else x[0, 0]).exp()
    return -A.view(-1, *[1] * (x.ndim - 3)) * F.softplus(x + gate_bias(x[0, 0]))


def fp32(shape_fn: Callable, transform: Callable | None = None) -> TensorSpec:
    return TensorSpec(shape_fn, transform, torch.float32)


BTHD, BTH, HEADS = map(dims, ('B T H D', 'B T H', 'H'))
QK = {'q': TensorSpec(BTHD), 'k': TensorSpec(BTHD)}
QKV = {**QK, 'v': TensorSpec(BTHD)}
GATE = {'g': TensorSpec(BTHD), 'A_log': fp32(HEADS, log_rate), 'dt_bias': fp32(dims('HD'), gate_bias)}
BETA = {'beta': TensorSpec(BTH)}
# raw: the kernels activate it
R = {'r': TensorSpec(BTH)}
NOISE = {'diagonal': {'omega': TensorSpec(BTHD), **R}, 'isotropic': {'omega': TensorSpec(BTH), **R}}
R_MIN = 0.01
PRIOR = {'initial_cov': fp32(HEADS, F.softplus)}
STATE = {'initial_state': fp32(dims('L B H D D'))}
COV = {
    'diagonal': {'initial_cov': fp32(dims('L B H D'), F.softplus)},
    'isotropic': {'initial_cov': fp32(dims('L B H'), F.softplus)},
}
P0 = {'diagonal': fp32(dims('B H D'), F.softplus), 'isotropic': fp32(dims('B H 1'), F.softplus)}
GAIN_GRADS = {**dict.fromkeys(('dq', 'dk', 'dgc'), fp32(BTHD)), 'dbeta': fp32(BTH)}

IN_KERNEL = {'use_qk_l2norm_in_kernel': True, 'use_gate_in_kernel': True, 'state_v_first': True}
KDA = {**IN_KERNEL, 'use_beta_sigmoid_in_kernel': True}


def chunk(name: str, module: str, inputs: dict, func_name: str | None = None, flops: Callable = chunk_flops, **kwargs):
    return OpConfig(name, module, {**QKV, **inputs, 'do': TensorSpec(BTHD)}, func_name, kwargs, flops=flops)


def decode(name: str, module: str, inputs: dict, func_name: str | None = None, **kwargs):
    return OpConfig(name, module, {**QKV, **GATE, **inputs, **STATE, 'do': TensorSpec(BTHD)}, func_name, kwargs, 'decode')


def kdn_ops(suffix: str, covariance: str):
    """All of one covariance; `unbounded` is safe_gate=False, `uncertainty` returns that of each token too."""
    inputs = {**GATE, **NOISE[covariance], **PRIOR}
    kwargs = {**IN_KERNEL, 'covariance': covariance, 'use_noise_softplus_in_kernel': True, 'r_min': R_MIN}
    module = 'fla_kdn.ops.kdn'
    yield chunk(f'chunk_kdn{suffix}', module, inputs, 'chunk_kdn', **kwargs, safe_gate=True)
    told = {**kwargs, 'safe_gate': True, 'output_uncertainty': True}
    yield chunk(f'chunk_kdn{suffix}_uncertainty', module, inputs, 'chunk_kdn', **told)
    yield chunk(f'chunk_kdn{suffix}_unbounded', module, inputs, 'chunk_kdn', **kwargs, safe_gate=False)
    inputs = {**NOISE[covariance], **COV[covariance]}
    module, name = f'{module}.fused_recurrent', 'fused_recurrent_kdn'
    yield decode(f'{name}{suffix}', module, inputs, name, **kwargs, safe_gate=True)
    yield decode(f'{name}{suffix}_uncertainty', module, inputs, name, **told)
    inputs = {**QK, **GATE, **NOISE[covariance], 'mu': fp32(HEADS, F.softplus), 'p0': P0[covariance], **GAIN_GRADS}
    options = {'isotropic': covariance == 'isotropic', 'l2norm': True, 'safe_gate': True, 'lower_bound': None}
    options |= {'noise_softplus': True, 'r_min': R_MIN}
    yield OpConfig(f'kdn_gain{suffix}', 'fla_kdn.ops.kdn.gain_triton', inputs, 'kdn_gain', options, 'gain')


GDN2 = {'g': fp32(BTHD, log_decay), **dict.fromkeys('bw', TensorSpec(BTHD, torch.sigmoid))}
PRECOND = {
    'g': fp32(BTHD, log_decay),
    'g_atk': fp32(BTH, log_decay),
    **dict.fromkeys(('beta', 'beta_atk'), TensorSpec(BTH, torch.sigmoid)),
    'log_atk_scale': fp32(HEADS, lambda x: torch.full_like(x, -0.2)),
}
GDN = {'g': TensorSpec(BTH), **BETA, 'A_log': fp32(HEADS, log_rate), 'dt_bias': fp32(HEADS, gate_bias)}
OPS = {op.name: op for op in (
    *kdn_ops('', 'diagonal'),
    *kdn_ops('_isotropic', 'isotropic'),
    chunk('chunk_kda', 'fla.ops.kda', {**GATE, **BETA}, **KDA),
    chunk('chunk_kda_bounded', 'fla.ops.kda', {**GATE, **BETA}, 'chunk_kda', **KDA, safe_gate=True, lower_bound=-5.),
    chunk('chunk_gdn2', 'fla.ops.gdn2', GDN2, use_qk_l2norm_in_kernel=True),
    chunk('chunk_precond_kda', 'fla.ops.precond_kda', PRECOND, x=1.5, eps=1e-6),
    chunk('chunk_gated_delta_rule', 'fla.ops.gated_delta_rule', GDN, **KDA),
    chunk('flash_attention', __name__, {}, flops=attention_flops),
    decode('fused_recurrent_kda', 'fla.ops.kda.fused_recurrent', BETA, **KDA),
)}


def make_inputs(op: OpConfig, shape: Shape, device: str, shared: dict | None = None) -> dict[str, torch.Tensor]:
    """Inputs of `op`; those of the same name and description are taken from `shared`, so that ops get the same ones."""
    shared = {} if shared is None else shared
    size = {**dict(zip('BTHD', shape, strict=True)), 'L': LAYERS, '1': 1}
    for key in op.inputs.items():
        if key not in shared:
            name, spec = key
            x = torch.randn(spec.shape_fn(**size), device=device)
            x = (spec.transform(x) if spec.transform else x).to(spec.dtype)
            shared[key] = x.requires_grad_(op.kind == 'chunk' and name != 'do')
    return {key[0]: shared[key] for key in op.inputs.items()}


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


@dataclass(frozen=True)
class Work:
    """A call to time, of `layers` runs of the op, and the least that a run must move (each input read once, each output
    written once) and compute."""
    call: Callable[[], Any]
    bytes: int
    flops: float | None = None
    layers: int = 1


def make_work(op: OpConfig, shape: Shape, inputs: dict[str, torch.Tensor], mode: str) -> Work:
    """What `mode` of `op` runs; in `graph` modes, the call to capture."""
    return {'chunk': chunk_work, 'decode': decode_work, 'gain': gain_work}[op.kind](op, shape, dict(inputs), mode)


def chunk_work(op: OpConfig, shape: Shape, inputs: dict[str, torch.Tensor], mode: str) -> Work:
    do, func = inputs.pop('do'), op.load()
    leaves = list(inputs.values())

    def forward() -> torch.Tensor:
        o = func(**inputs, **op.extra_kwargs)
        return o if isinstance(o, torch.Tensor) else o[0]

    moved, flops = nbytes(leaves) + do.nbytes, op.flops(*shape)
    if mode == 'fwd':
        return Work(forward, moved, flops)
    # the backward reads the inputs and do and writes the inputs' gradients; it has two products for each of the forward's
    return Work(lambda: torch.autograd.grad(forward(), leaves, do), 2 * moved + nbytes(leaves), 3 * flops)


def decode_work(op: OpConfig, shape: Shape, inputs: dict[str, torch.Tensor], mode: str) -> Work:
    out = torch.empty_like(inputs.pop('do'))
    states = {name: inputs.pop(name) for name in ('initial_state', 'initial_cov') if name in inputs}
    kwargs, func = {**op.extra_kwargs, 'output_final_state': True}, op.load('' if mode == 'eager' else '_fwd')
    if mode != 'eager':
        kwargs |= {'inplace_final_state': mode == 'graph in place', 'out': out}
        # KDN's kernel takes no use_gate_in_kernel: it activates the gate if A_log is given
        kwargs = {name: x for name, x in kwargs.items() if name in inspect.signature(func).parameters}

    def step() -> None:
        for layer in range(LAYERS):
            func(**inputs, **{name: x[layer] for name, x in states.items()}, **kwargs)

    return Work(step, nbytes(inputs.values()) + out.nbytes + 2 * nbytes(states.values()) // LAYERS, layers=LAYERS)


def gain_work(op: OpConfig, shape: Shape, inputs: dict[str, torch.Tensor], mode: str) -> Work:
    grads = {name: inputs.pop(name) for name in GAIN_GRADS}
    args, options = GainArguments(**inputs, cu_seqlens=None, chunk_indices=None), GainOptions(**op.extra_kwargs)
    read = nbytes(inputs.values())
    if mode == 'fwd':
        # writes q and k in their own type, the cumulated decay and beta in fp32
        return Work(lambda: kdn_gain_fwd(args, options), read + nbytes(args[:2]) + 4 * (args.g.numel() + args.r.numel()))
    outputs = functools.cache(lambda: kdn_gain_fwd(args, options))
    call = functools.partial(kdn_gain_bwd, args, options, dpt=None, dst=None, **grads)
    return Work(lambda: call(outputs=outputs()), 2 * read + nbytes(grads.values()))
