# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Imported before FLA under `TRITON_INTERPRET=1`: its kernels then run on CPU tensors, in Triton's interpreter.

In fp32 only: the interpreter keeps bf16 as integers, and a dot of two such blocks multiplies the integers.
"""

from __future__ import annotations

import ast
import os

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

# CPU tensors go to the kernels, not to the PyTorch backend
os.environ['FLA_TORCH'] = '0'

# without it FLA takes a branch that does without; with it FLA binds the function before the interpreter has replaced it
if hasattr(tl, 'gather'):
    del tl.gather

# FLA asks for these dots on Triton 3.6, whose interpreter has not heard of them; it computes all of them in fp32
_options = interpreter.interpreter_builder.options
object.__setattr__(_options, 'allowed_dot_input_precisions', (*_options.allowed_dot_input_precisions, 'bf16x3'))


def first_config_only(init):
    """To choose between configurations an autotuner asks the driver for a clock, and there is no driver."""
    def __init__(self, fn, arg_names, configs, *args, **kwargs):
        init(self, fn, arg_names, list(configs)[:1], *args, **kwargs)

    return __init__


def index_from_one_element(patch):
    """Scalars are arrays of one element here, of which NumPy 2.4 no longer makes an integer."""
    def _patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, '__index__', lambda self: int(self.handle.data.item()))

    return _patch_lang_tensor


class LoopVariablesAreTensors(interpreter.ASTTransformer):
    """As in compiled kernels; the interpreter makes them integers, which have no `.to`."""

    def visit_For(self, node):
        self.generic_visit(node)
        function = getattr(node.iter, 'func', None)
        name = getattr(function, 'id', getattr(function, 'attr', None))
        if name == 'range' and isinstance(node.target, ast.Name):
            i = node.target.id
            node.body.insert(0, ast.parse(f'{i} = interpreter_semantic.to_tensor({i}, False)').body[0])
        return node


Autotuner.__init__ = first_config_only(Autotuner.__init__)
interpreter._patch_lang_tensor = index_from_one_element(interpreter._patch_lang_tensor)
interpreter.FunctionRewriter.ast_transformer = LoopVariablesAreTensors()
