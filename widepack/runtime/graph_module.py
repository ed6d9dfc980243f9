"""Turns a program into a flat fx graph, with `loop` regions as modules, and that into one Python function.

The graph takes its weights as arguments, calls only ops, and frees each value after its last use. No text of
a file reaches the generated code: values get new names, ops are objects, and keywords are checked against the
op's schema.
"""

from __future__ import annotations

import linecache
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from widepack_artifacts.program import Node, Program, Ref, Tag, refs, substitute

from ..errors import ArtifactError
from ..ir import ops
from ..ir.encoding import decode, iter_arguments
from ..ir.torch_internals import forget_source
from ..system.threads import spread
from .in_place_writes import in_place_writes, write_part

Function = Callable[..., Any]


class Loop(nn.Module):
    """A loop region: runs the body for each member and writes the results into a preallocated `[N, ...]`.

    workers: the number of members that run at once, each on its own thread; 0 for one after the other.
    streamed: the number of a result that is not collected. The first argument of the loop is then a function
    that takes each member's number and its part of that result; the result itself is None.
    """

    def __init__(
        self,
        body: Program,
        members: int,
        device: torch.device,
        workers: int = 0,
        *,
        checks: ops.Checks = "all",
        in_place: bool = False,
        direct: bool = False,
        streamed: int | None = None,
    ) -> None:
        super().__init__()
        self.streamed = streamed
        self.run = graph_module(body, device, checks=checks, in_place=in_place, direct=direct).forward
        drawn = any(
            torch.Tag.nondeterministic_seeded in getattr(ops.resolve(n.op), "tags", ())
            for n in body.nodes
            if n.body is None
        )
        self.workers = (
            workers if device.type == "cpu" and members > 1 and not drawn else 0
        )  # random numbers are drawn in the order of the members
        self.members = members
        self.split = [s.kind != "shared" for s in body.inputs]
        self.kinds = [o.kind for o in body.outputs]

    def forward(self, *args: Any) -> list[Any]:
        """Runs the loop.

        args: for each input of the body one value, or `[N, ...]` or a list of N for values of the members.
        """
        take: Function | None = None
        if self.streamed is not None:
            take, *args = args  # type: ignore[assignment]
        parts = [
            (a.unbind(0) if isinstance(a, torch.Tensor) else a) if s else None
            for a, s in zip(args, self.split)
        ]
        if torch.is_grad_enabled() and take is None:
            return self._differentiable(args, parts)
        outs: list[Any] = [None if kind == "stacked" else [None] * self.members for kind in self.kinds]
        lock = threading.Lock()

        def member(i: int) -> None:
            given = [a if o is None else o[i] for a, o in zip(args, parts)]
            for k, (value, kind) in enumerate(zip(self.run(*given), self.kinds)):
                if k == self.streamed and take is not None:
                    take(i, value)
                    continue
                if kind == "stacked" and outs[k] is None:
                    with lock:
                        if outs[k] is None:
                            outs[k] = torch.empty(
                                (self.members, *value.shape), dtype=value.dtype, device=value.device
                            )
                outs[k][i] = value

        if self.workers > 1:
            spread(member, self.members, self.workers)
        else:
            for i in range(self.members):
                member(i)
        return outs

    def _differentiable(self, args: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
        """Runs the loop without writes, for each of which autograd would copy all results.

        parts: the members' parts of each argument.
        """
        made = [
            self.run(*(a if o is None else o[i] for a, o in zip(args, parts))) for i in range(self.members)
        ]
        return [
            torch.stack(values) if kind == "stacked" else list(values)
            for values, kind in zip(zip(*made), self.kinds)
        ]


def graph_module(
    program: Program,
    device: torch.device,
    workers: int = 0,
    *,
    checks: ops.Checks = "all",
    in_place: bool = False,
    direct: bool = False,
    streamed: tuple[str, int] | None = None,
    input_names: Sequence[str] | None = None,
) -> fx.GraphModule:
    """A program as a flat GraphModule.

    It takes the weights, then the inputs, and returns a tuple of outputs. workers: of its loops. checks:
    which checks of operands run before ops: those of values cannot be traced. in_place: whether
    writes overwrite values that nothing reads any more. direct: whether it calls public functions of torch in
    the place of ops, which is faster, and not for graphs that are traced or read. streamed: the name of a
    loop and the number of a result that it does not collect: the graph then takes a function before the
    weights, see `Loop`. input_names: what its inputs are called; no other value takes these names.
    """
    writes, inside = in_place_writes(program) if in_place else ({}, frozenset())
    graph = fx.Graph()
    root = nn.Module()
    at: dict[str, fx.Node] = {}
    take = graph.placeholder("take") if streamed is not None else None
    count = len(program.weights)
    names = [f"w{i}" for i in range(count)] + [f"x{count + i}" for i in range(len(program.inputs))]
    if input_names is not None:
        names = [f"_widepack_{name}" for name in names[:count]] + list(input_names)
    for slot, name in zip((*program.weights, *program.inputs), names, strict=True):
        at[slot.name] = graph.placeholder(name)
    for i, node in enumerate(program.nodes):
        if node.body is None:
            check_arguments(node)
        if node.name in inside:
            continue
        if node.name in writes:
            given = substitute(writes[node.name].arguments, at.__getitem__)
            at[node.name] = graph.call_function(write_part, decode(given, device))
            continue
        args = decode(substitute(node.args, at.__getitem__), device)
        if node.body is not None:
            number = streamed[1] if streamed is not None and streamed[0] == node.name else None
            loop = Loop(
                node.body,
                program.members,
                device,
                workers,
                checks=checks,
                in_place=in_place,
                direct=direct,
                streamed=number,
            )
            root.add_module(f"loop{i}", loop)
            at[node.name] = graph.call_module(f"loop{i}", (*([take] if number is not None else []), *args))
            continue
        keywords = decode(substitute(node.kwargs, at.__getitem__), device)
        called = ops.direct(node.op, keywords) if direct else ops.function(node.op, checks)
        at[node.name] = graph.call_function(called, tuple(args), keywords)
    graph.output(tuple(substitute(o.value, at.__getitem__) for o in program.outputs))
    module = fx.GraphModule(root, graph)
    weakref.finalize(module, _forget, module.forward.__code__.co_filename)
    return module


def _forget(file: str) -> None:
    """Removes the source of a deleted graph, which torch keeps for tracebacks until the process ends."""
    linecache.cache.pop(file, None)
    forget_source(file)


def evaluate(program: Program, given: Sequence[Any], device: torch.device) -> list[Any]:
    """Runs a program once, without making a function.

    given: its weights, then its inputs. Returns: its outputs.
    """
    at: dict[str, Any] = {s.name: v for s, v in zip((*program.weights, *program.inputs), given, strict=True)}
    for node in program.nodes:
        if node.body is None:
            check_arguments(node)
        at[node.name] = evaluate_node(node, at, program.members, device)
    return [substitute(o.value, at.__getitem__) for o in program.outputs]


def evaluate_node(node: Node, values: Mapping[str, Any], members: int, device: torch.device) -> Any:
    """Runs one node. values: those before it, by name. members: N of its program. Raises: the op's error."""
    args = decode(substitute(node.args, values.__getitem__), device)
    if node.body is not None:
        return Loop(node.body, members, device)(*args)
    return ops.function(node.op)(*args, **decode(substitute(node.kwargs, values.__getitem__), device))


_TEXT = re.compile(r"[A-Za-z0-9_ .,:>-]{0,1000}")
"""Texts of ops of torch: modes, equations of einsum. A compiler writes them into source code."""


def check_arguments(node: Node) -> None:
    """Checks the keywords of a node, and that a literal determines the type of its result.

    torch accepts any number as a dtype, and reads outside its tables. A dtype that a value determines could
    be a number at a call although it was a dtype at the load.

    Raises: ArtifactError.
    """
    unknown = set(node.kwargs) - {a for a, _, _ in ops.arguments(node.op)}
    if unknown:
        raise ArtifactError(
            f"program: node {node.name} passes the keyword {sorted(unknown)[0]!r} to {node.op}, which "
            "does not have it"
        )
    if node.op == "operator.getitem":
        _check_part(node)
    if node.op in ops.PYTHON:
        return
    for value in iter_arguments((node.args, node.kwargs)):
        text = value.name if isinstance(value, Tag) else value
        if isinstance(text, str) and not _TEXT.fullmatch(text):
            raise ArtifactError(
                f"program: node {node.name} ({node.op}) has the text {text!r:.60} as an argument; only "
                "letters, digits, spaces and _ . , : - > are allowed"
            )
    given = ops.bind(node.op, node.args, node.kwargs)
    for name in ops.enumerations(node.op) | ops.devices(node.op):
        value = given.get(name)
        if isinstance(value, Ref):
            raise ArtifactError(
                f"program: node {node.name} ({node.op}) has a value as {name}; only a literal is allowed"
            )
        if value is not None and not isinstance(value, Tag):
            raise ArtifactError(f"program: node {node.name} ({node.op}) has {value!r:.60} as {name}")


def _check_part(node: Node) -> None:
    """Checks that a part is one of a value, at a literal place: another part could have another type."""
    if len(node.args) != 2 or not isinstance(node.args[0], Ref):
        raise ArtifactError(f"program: node {node.name} ({node.op}) does not read a part of one value")
    if any(True for _ in refs(node.args[1])):
        raise ArtifactError(
            f"program: node {node.name} ({node.op}) has a value as index; only a literal is allowed"
        )
