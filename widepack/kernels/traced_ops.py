"""Registers functions in the place of ops with torch, so that a compiler meets ops only.

torch.compile follows the Python that a graph calls, and refuses some of it (`sorted` over strides). An op
that is registered here is one node of its graph. Its function runs afterwards, when torch replaces ops by
simpler ones on fake tensors, as plain Python. So the compiler fuses the op with its neighbors, and a
derivative exists if the function has one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from .library import LIBRARY

_LOCK = threading.Lock()
_MADE: dict[str, Any] = {}


def traced_op(prefix: str, op: Any, function: Callable[..., Any]) -> Any:
    """Returns an op of the namespace `widepack` that calls a function.

    Args:
        prefix: What the function adds to the op: the name of the new op begins with it. Two functions for one
            op need two of them.
        op: The op that the function computes. The new op has its schema.
        function: Takes the op's arguments.

    Returns:
        The op. A second call with this prefix and op returns the same one.
    """
    space, _, schema = str(op._schema).partition("::")
    name, _, rest = schema.partition("(")
    own = f"{prefix}_{space}_{name.replace('.', '_')}"
    with _LOCK:
        if own not in _MADE:
            LIBRARY.define(f"{own}({rest}")
            LIBRARY.impl(own, function, "CompositeImplicitAutograd")
            _MADE[own] = getattr(torch.ops.widepack, own).default
        return _MADE[own]


def opaque(prefix: str, op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that compilers take for an op; other callers call it without torch's dispatcher.

    Args:
        prefix: As for `traced_op`.
        op: As for `traced_op`.
        function: As for `traced_op`.

    Returns:
        The function.
    """
    compiled = traced_op(prefix, op, function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        return function(*args, **kwargs)

    return run
