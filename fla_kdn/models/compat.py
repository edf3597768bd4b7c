# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What depends on the version of transformers or of FLA and not on KDN."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from fla.models.generation_utils import FLAGenerationMixin

if TYPE_CHECKING:
    from collections.abc import Callable


def accept_cache_argument(forward: Callable) -> Callable:
    """Let a `forward` that reads `past_key_values` take the cache as `cache`, too.

    transformers passes it under that name from 5.24 on. FLA's models swallow it among other keywords and then decode from an
    empty state, silently.
    """
    @functools.wraps(forward)
    def wrapper(self, *args, cache=None, **kwargs):
        if cache is not None:
            if kwargs.get('past_key_values') is not None:
                raise ValueError('You cannot specify both `cache` and `past_key_values`: they are two names of one argument.')
            kwargs['past_key_values'] = cache
        return forward(self, *args, **kwargs)

    return declare_arguments(wrapper, ('cache',))


def declare_arguments(function: Callable, names: tuple[str, ...]) -> Callable:
    """Show keywords that `function` takes among others in its signature.

    By that `generate` tells arguments from typing errors, and `Trainer` which columns of a data set to keep.
    """
    signature = inspect.signature(function)
    *parameters, kwargs = signature.parameters.values()
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    function.__signature__ = signature.replace(parameters=[*parameters, kwargs])
    return function


def fix_fla_generation() -> None:
    """Make `generate` of FLA's own models right under transformers 5.24 and later (see :func:`accept_cache_argument`).

    It changes FLA's generation mixin for the whole process: who compares with FLA's models calls it, importing does not.
    """
    prepare = FLAGenerationMixin.prepare_inputs_for_generation
    if hasattr(prepare, '_cache_renamed'):
        return

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        if 'cache' in inputs:
            inputs['past_key_values'] = inputs.pop('cache')
        return inputs

    declare_arguments(prepare_inputs_for_generation, ('cache',))
    prepare_inputs_for_generation._cache_renamed = True
    FLAGenerationMixin.prepare_inputs_for_generation = prepare_inputs_for_generation
