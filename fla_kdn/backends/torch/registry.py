# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""PyTorch implementations of FLA's entry points for CPU tensors, registered in FLA's own backend registry.

They are chosen only when every tensor of a call lies on the CPU, so calls with GPU tensors run exactly as without them.
`FLA_TORCH=0` turns them off; it is read at each call.
"""

from __future__ import annotations

import functools

import torch
from fla.backends import BaseBackend, register


class TorchBackend(BaseBackend):
    backend_type = 'torch'
    env_var = 'FLA_TORCH'
    # ahead of the backends that FLA ships (0 and above): some of their verifiers do not look at the device
    priority = -1


def on_cpu(*args, **kwargs) -> tuple[bool, str | None]:
    """Verifier: accept a call whose tensors, those inside lists and tuples included, all lie on the CPU."""
    found = False
    for arg in (*args, *kwargs.values()):
        for x in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(x, torch.Tensor):
                if x.device.type != 'cpu':
                    return False, f'a tensor is on {x.device}, not on the CPU'
                found = True
    return found, None if found else 'the call has no tensors'


def register_torch(entry_point):
    """Decorator: make a function the implementation of a dispatched FLA function for CPU tensors."""
    return register(entry_point, backend=TorchBackend, verifier=on_cpu)


def replace_on_cpu(owner, name: str):
    """Decorator: the same for `owner.name`, a function of a module or a class that FLA does not dispatch."""
    original = getattr(owner, name)

    def decorator(implementation):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            chosen = TorchBackend().is_enabled() and on_cpu(*args, **kwargs)[0]
            return (implementation if chosen else original)(*args, **kwargs)

        setattr(owner, name, wrapper)
        return implementation

    return decorator
