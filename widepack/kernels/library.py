"""Registers widepack's own ops with torch, and keeps their functions for calls without the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("widepack", "DEF")  # type: ignore[no-untyped-call]
"""Holds the ops of the namespace `widepack`. They exist as long as it does."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The function of each op, by a name such as `widepack.linear.default`."""
DIFFERENTIABLE: set[str] = set()
"""The ops that have a derivative."""
INTEGER_ANSWERS: set[str] = set()
"""The ops whose answers are integers: they need no derivative, and run inside transforms of `torch.func`."""


def define(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    check: Callable[..., None],
) -> None:
    """Defines an op of the namespace `widepack`.

    Args:
        schema: The op's schema, as `torch.library` takes it.
        function: Computes the op.
        fake: Returns an answer of the right sizes, or None if `function` works on fake tensors too.
        check: Checks the operands before `function` runs. It raises OperandError.
    """

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"widepack::{name}", fake, lib=LIBRARY)
    FUNCTIONS[f"widepack.{name}.default"] = checked


def differentiate(name: str, keep: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Gives an op a derivative.

    Args:
        name: The op's name.
        keep: Keeps in a context what the backward pass needs of the inputs and the output.
        backward: Returns the gradients of the inputs from those of the outputs.
    """
    torch.library.register_autograd(f"widepack::{name}", backward, setup_context=keep, lib=LIBRARY)
    overload = getattr(torch.ops.widepack, name).default
    FUNCTIONS[f"widepack.{name}.default"] = overload  # through the dispatcher, which records the derivative
    DIFFERENTIABLE.add(f"widepack.{name}.default")


def answer_integers(name: str, over_members: Callable[..., Any]) -> None:
    """Says that an op's answers are integers, so that it stays in programs that have gradients.

    Args:
        name: The op's name.
        over_members: Computes the op inside `torch.vmap`, as `torch.library.register_vmap` takes it.
    """
    torch.library.register_vmap(f"widepack::{name}", over_members, lib=LIBRARY)
    INTEGER_ANSWERS.add(f"widepack.{name}.default")
