"""Registers widepack's own ops with torch, and keeps their functions for calls without the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Ref, Tag

LIBRARY: Any = torch.library.Library("widepack", "DEF")  # type: ignore[no-untyped-call]
"""Holds the ops of the namespace `widepack`. They exist as long as it does."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The function of each op, by a name such as `widepack.linear.default`."""
DIFFERENTIABLE: set[str] = set()
"""The ops that have a derivative."""
INTEGER_ANSWERS: set[str] = set()
"""The ops whose answers are integers: they need no derivative, and run inside transforms of `torch.func`."""
ATEN_FORMS: dict[str, Callable[..., None]] = {}
"""What writes each op in ATen ops, by the same names: `write(new, members, *args, **kwargs)`."""

INT64 = {"dtype": Tag("dtype", "int64"), "device": Tag("device", "self")}
"""The options of a node that makes integers on the device of the program."""

F = TypeVar("F", bound=Callable[..., Any])
Backward = Callable[..., tuple[Any, ...]]


def own_op(schema: str, fake: Callable[..., Any] | None) -> Callable[[F], F]:
    """Defines an op of the namespace `widepack` by the function that it decorates.

    The function checks its operands first, and raises OperandError.

    Args:
        schema: The op's schema, as `torch.library` takes it.
        fake: Returns an answer of the right sizes, or None if the function works on fake tensors too.
    """
    name = schema.partition("(")[0]

    def decorate(function: F) -> F:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        if fake is not None:
            torch.library.register_fake(f"widepack::{name}", fake, lib=LIBRARY)
        FUNCTIONS[f"widepack.{name}.default"] = function
        return function

    return decorate


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


def differentiable_by(plain: Callable[..., tuple[Tensor, ...]], count: int) -> Callable[[Backward], Backward]:
    """Decorates a backward pass that writes in place, so that `create_graph=True` gives a right graph.

    With `create_graph`, autograd differentiates `plain` instead: slower, and with derivatives of any order.
    Without a graph of its own, the backward pass would give a second derivative of zero, silently.

    Args:
        plain: Computes the op's outputs that have derivatives: `plain(ctx, *inputs)`.
        count: The number of inputs, the first of the saved tensors.
    """

    def decorate(backward: Backward) -> Backward:
        def either(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            # new nodes of the graph, so that no derivative flows from one input to another
            inputs = [t if t is None else t.view_as(t) for t in ctx.saved_tensors[:count]]
            arrived = [(y, g) for y, g in zip(plain(ctx, *inputs), gradients) if g is not None]
            needed = ctx.needs_input_grad
            wanted = [t for t, is_needed in zip(inputs, needed) if is_needed and t is not None]
            if not arrived or not wanted:
                return (None,) * len(needed)
            ys, gs = zip(*arrived)
            grads = iter(torch.autograd.grad(ys, wanted, gs, create_graph=True, allow_unused=True))
            return tuple(next(grads) if is_needed else None for is_needed in needed)

        return either

    return decorate


def answer_integers(name: str, over_members: Callable[..., Any]) -> None:
    """Says that an op's answers are integers, so that it stays in programs that have gradients.

    Args:
        name: The op's name.
        over_members: Computes the op inside `torch.vmap`, as `torch.library.register_vmap` takes it.
    """
    torch.library.register_vmap(f"widepack::{name}", over_members, lib=LIBRARY)
    INTEGER_ANSWERS.add(f"widepack.{name}.default")


class NodeList:
    """Collects the ATen nodes that replace one node of widepack's own ops, named after it."""

    def __init__(self, node: Node, separator: str = "_") -> None:
        self.node, self.separator = node, separator
        self.nodes: list[Node] = []

    def add(self, op: str, *args: Any, suffix: str = "", **kwargs: Any) -> Ref:
        """Appends a node and returns its value."""
        name = f"{self.node.name}{self.separator}{suffix or len(self.nodes)}"
        self.nodes.append(Node(name, op, args, kwargs, "", self.node.source, self.node.member))
        return Ref(name)

    def product(self, x: Any, weight: Any, bias: Any, suffix: str = "product") -> Ref:
        """Appends the nodes of `x weight + bias`. x: `[N, R, I]`, weight: `[N, I, O]`, bias: `[N, O]`."""
        if bias is None:
            return self.add("aten.bmm.default", x, weight, suffix=suffix)
        added = self.add("aten.unsqueeze.default", bias, 1, suffix=f"{suffix}_bias")
        return self.add("aten.baddbmm.default", added, x, weight, suffix=suffix)

    def member_numbers(self, members: int) -> Ref:
        """Appends the nodes of the members' numbers, `[N, 1]`."""
        numbers = self.add("aten.arange.default", members, suffix="numbers", **INT64)
        return self.add("aten.unsqueeze.default", numbers, -1, suffix="first")

    def named_as_the_node(self) -> list[Node]:
        """Returns the nodes, the last of them under the name of the node that they replace."""
        *before, last = self.nodes
        return [*before, replace(last, name=self.node.name, out=self.node.out)]


def in_aten(*names: str) -> Callable[[F], F]:
    """Says that the decorated function writes ops in ATen ops, for readers that know no other ops.

    The function appends nodes to a `NodeList`. The last of them computes the answer.

    Args:
        *names: The ops' names in programs.
    """

    def decorate(write: F) -> F:
        ATEN_FORMS.update(dict.fromkeys(names, write))
        return write

    return decorate
