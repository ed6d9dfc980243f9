"""Captures members whose forward takes derivatives: `torch.autograd.grad`, `torch.func.grad`, `jacrev`, ...

The usual export records the ops above autograd. It does not see the ops of a backward pass, and takes their
results for constants. So such a member is exported a second time, below autograd: there the ops of forward
and backward are plain ATen ops. Names of weights, dynamic sizes, guards and source lines are the same.

Inside such an export, and wherever a member is run, no weight requires a gradient. Then autograd records
what forward itself asks for, and nothing else, although it is switched on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

FAKE_CONSTANT = "fake tensor in the exported program constant's list"
"""A part of torch's message where an export has lifted results of ops that it did not see."""
_TRANSFORMS = ("functorch tensor", "torch.autograd.grad", "has no attribute 'constant'")


def takes_derivatives(error: Exception) -> bool:
    """Whether an export failed because forward takes derivatives, or does what looks like it to torch."""
    text = str(error)
    return FAKE_CONSTANT in text or any(word in text for word in _TRANSFORMS) or _differentiates(error)


def _differentiates(error: Exception) -> bool:
    """Whether an export failed inside torch.func or autograd, called by the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        "_functorch/eager_transforms" in f.filename or "/autograd/__init__" in f.filename for f in frames
    )


@contextmanager
def weights_fixed(module: nn.Module) -> Iterator[None]:
    """Runs a module inside a with block: its parameters require no gradients, and autograd is on.

    Forward can take derivatives by its inputs. Other ops record nothing, as under `torch.no_grad`.
    """
    training = [p for p in module.parameters() if p.requires_grad]
    for parameter in training:
        parameter.requires_grad_(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter in training:
            parameter.requires_grad_(True)


def with_autograd(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that runs with autograd on, and whose results are detached."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            result = method(*args, **kwargs)
        return pytree.tree_map(_detached, result)

    return run


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
