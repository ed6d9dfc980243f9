"""Captures members whose forward takes derivatives: `torch.autograd.grad`, `torch.func.grad`, `jacrev`, ...

The usual export records the ops above autograd. It does not see the ops of a backward pass, and takes their
results for constants. So such a member is exported a second time, below autograd: there the ops of forward
and backward are plain ATen ops. Names of weights, dynamic sizes, guards and source lines are the same.

A program that gives gradients needs to know what stops them. Below autograd a member's own `detach` looks as
those that autograd makes for its saved values. So what stops gradients is marked while the member runs, and
all other detaches are removed (`stops_marked`, `keep_marked_stops`).

Inside such an export, and wherever a member is run, no weight requires a gradient. Then autograd records
what forward itself asks for, and nothing else, although it is switched on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..ir.torch_internals import derivatives_taken, in_transform
from .exported import put_in_place

_SIGNS = (
    *("functorch tensor", "torch.autograd.grad", "has no attribute 'constant'"),
    "fake tensor in the exported program constant's list",  # results of ops that the export did not see
)
"""Parts of torch's messages."""
_INSIDE = ("_functorch/eager_transforms", "/autograd/__init__")
"""Parts of the files of torch.func and autograd, which the user's code calls."""


class UnseenResult(Exception):
    """An export took for a constant what ops computed that it did not see. line: the member's, of the op."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


def takes_derivatives(error: Exception) -> bool:
    """Whether an export failed because forward takes derivatives, or does what looks like it to torch."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inside = any(part in file for part in _INSIDE for file in files)
    return isinstance(error, UnseenResult) or inside or any(sign in str(error) for sign in _SIGNS)


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
            return pytree.tree_map(_detached, method(*args, **kwargs))

    return run


def _detached(value: Any) -> Any:
    # as an op: a call of the method counts as the member's own
    return torch.ops.aten.detach.default(value) if isinstance(value, Tensor) else value


@dataclass
class DerivativesTaken:
    """What a member did with derivatives while it was exported.

    taken: It took at least one. frees_graph: It freed what autograd recorded, so that nothing can flow back
    through its answers.
    """

    taken: bool = False
    frees_graph: bool = False


@contextmanager
def derivatives_watched() -> Iterator[DerivativesTaken]:
    """Records derivatives that code inside a with block takes."""
    found = DerivativesTaken()

    def report(retain_graph: bool) -> None:
        found.taken = True
        found.frees_graph = found.frees_graph or not retain_graph

    with derivatives_taken(report):
        yield found


_LIBRARY: Any = torch.library.Library("widepack_capture", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("stop_gradient(Tensor x) -> Tensor")
_LIBRARY.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("widepack_capture::stop_gradient", torch.empty_like, lib=_LIBRARY)
_DETACHES = frozenset([Tensor.detach, torch.detach, Tensor.data.__get__])  # type: ignore[attr-defined]


def _stopped(value: Any) -> Any:
    """Returns a tensor behind an op that marks that no gradient flows through it."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    if in_transform():
        return value.detach()
    with torch.no_grad():
        marked: Tensor = torch.ops.widepack_capture.stop_gradient.default(value)
    return marked


class _Stops(TorchFunctionMode):
    """Marks the results of `detach`, `data`, no_grad blocks, and derivatives without `create_graph`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DETACHES:
            return _stopped(args[0])
        result = func(*args, **kwargs)
        if func is torch.autograd.grad and not kwargs.get("create_graph"):
            return pytree.tree_map(_stopped, result)
        if not torch.is_grad_enabled():
            return pytree.tree_map(_stopped, result)
        return result


@contextmanager
def stops_marked(active: bool) -> Iterator[None]:
    """Marks what stops gradients in a member that is exported inside a with block, if `active`."""
    if not active:
        yield
        return
    with _Stops():
        yield


def keep_marked_stops(exported: torch.export.ExportedProgram) -> None:
    """Removes all detaches of an export, and makes detaches of the marks."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            put_in_place(exported, node, node.args[0])
    for node in graph.nodes:
        if node.target is torch.ops.widepack_capture.stop_gradient.default:
            node.target = torch.ops.aten.detach.default
    exported.graph_module.recompile()
