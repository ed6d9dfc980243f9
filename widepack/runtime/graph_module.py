"""Running a program: our own form -> a flat fx graph -> one Python function.

The graph takes its weights as arguments, calls ops only, and frees each value after its last use. Text from a file never reaches the generated code: values
get names of our own, ops are objects, and keywords are names of the op's own schema.
"""

from __future__ import annotations

import linecache
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from ..ir import ops
from ..ir.encoding import decode
from ..errors import ArtifactError
from ..ir.kinds import weights_only
from ..system.threads import spread

Function = Callable[..., Any]
_inference_mode: Callable[[bool], AbstractContextManager[Any]] = getattr(
    torch._C, "_InferenceMode", torch.inference_mode
)  # the bare guard: 3 us a call, not 7


class Loop(nn.Module):
    """A loop region: the body once a member, results written into preallocated `[N, ...]`. workers: how many members at once, each on a thread of its own; 0 for one after the other."""

    def __init__(self, body: Program, members: int, device: torch.device, workers: int = 0) -> None:
        super().__init__()
        self.run = graph_module(body, device).forward
        drawn = any(torch.Tag.nondeterministic_seeded in getattr(ops.resolve(n.op), "tags", ()) for n in body.nodes if n.body is None)
        self.workers = workers if device.type == "cpu" and members > 1 and not drawn else 0  # members draw their numbers in order
        self.members = members
        self.split = [s.kind != "shared" for s in body.inputs]
        self.kinds = [o.kind for o in body.outputs]

    def forward(self, *args: Any) -> list[Any]:
        """args: a value for each input of the body: shared ones as they are, stacked ones `[N, ...]` or a list of N, ragged ones a list of N."""
        own = [(a.unbind(0) if isinstance(a, torch.Tensor) else a) if s else None for a, s in zip(args, self.split)]
        if torch.is_grad_enabled():
            return self._differentiable(args, own)
        outs: list[Any] = [None if kind == "stacked" else [None] * self.members for kind in self.kinds]
        lock = threading.Lock()

        def member(i: int) -> None:
            given = [a if o is None else o[i] for a, o in zip(args, own)]
            for k, (value, kind) in enumerate(zip(self.run(*given), self.kinds)):
                if kind == "stacked" and outs[k] is None:
                    with lock:
                        if outs[k] is None:
                            outs[k] = torch.empty((self.members, *value.shape), dtype=value.dtype, device=value.device)
                outs[k][i] = value

        if self.workers > 1:
            spread(member, self.members, self.workers)
        else:
            for i in range(self.members):
                member(i)
        return outs

    def _differentiable(self, args: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The same without writes, each of which autograd would copy all results for. own: the members' parts of what is one a member."""
        made = [self.run(*(a if o is None else o[i] for a, o in zip(args, own))) for i in range(self.members)]
        return [torch.stack(values) if kind == "stacked" else list(values) for values, kind in zip(zip(*made), self.kinds)]


def graph_module(program: Program, device: torch.device, workers: int = 0) -> fx.GraphModule:
    """The program as a flat GraphModule: weights first, then inputs, in the program's order; gives a tuple of output values. workers: of its loops."""
    graph = fx.Graph()
    root = nn.Module()
    at: dict[str, fx.Node] = {}
    for i, slot in enumerate((*program.weights, *program.inputs)):
        at[slot.name] = graph.placeholder(f"{'w' if i < len(program.weights) else 'x'}{i}")
    for i, node in enumerate(program.nodes):
        args = decode(substitute(node.args, at.__getitem__), device)
        if node.body is not None:
            root.add_module(f"loop{i}", Loop(node.body, program.members, device, workers))
            at[node.name] = graph.call_module(f"loop{i}", tuple(args))
            continue
        known = {a for a, _, _ in ops.arguments(node.op)}
        unknown = set(node.kwargs) - known
        if unknown:
            raise ArtifactError(f"program: node {node.name} gives {node.op} the keyword {sorted(unknown)[0]!r}, which it does not have")
        made = graph.call_function(ops.function(node.op), tuple(args), decode(substitute(node.kwargs, at.__getitem__), device))
        at[node.name] = made
    graph.output(tuple(substitute(o.value, at.__getitem__) for o in program.outputs))
    module = fx.GraphModule(root, graph)
    weakref.finalize(module, _forget, module.forward.__code__.co_filename)
    return module


def _forget(file: str) -> None:
    """Drop the source of a graph that is gone: torch keeps it for tracebacks as long as the process lives."""
    linecache.cache.pop(file, None)
    kept = getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", None)
    if isinstance(kept, dict):
        kept.pop(file, None)


def evaluate(program: Program, given: Sequence[Any], device: torch.device) -> list[Any]:
    """The outputs of a program that runs once: what its function would give, without making one. given: its weights, then its inputs."""
    at: dict[str, Any] = {s.name: v for s, v in zip((*program.weights, *program.inputs), given, strict=True)}
    for node in program.nodes:
        args = decode(substitute(node.args, at.__getitem__), device)
        if node.body is not None:
            at[node.name] = Loop(node.body, program.members, device)(*args)
        else:
            at[node.name] = ops.function(node.op)(*args, **decode(substitute(node.kwargs, at.__getitem__), device))
    return [substitute(o.value, at.__getitem__) for o in program.outputs]


@dataclass(frozen=True)
class Split:
    """A program in two: the prologue makes `names` from weights, the main program takes them in place of weights."""

    prologue: Program
    main: Program
    names: tuple[str, ...]


def split(program: Program) -> Split:
    """Part the nodes that depend on weights alone from the rest."""
    early = weights_only(program)
    first = tuple(n for n in program.nodes if n.name in early)
    rest = tuple(n for n in program.nodes if n.name not in early)
    read = {r for n in rest for r in refs((n.args, n.kwargs))} | {r for o in program.outputs for r in refs(o.value)}
    names = tuple(n for n in [*(s.name for s in program.weights), *(n.name for n in first)] if n in read)
    slots = {s.name: s for s in program.weights}
    from widepack_artifacts.program import Output, Slot

    prologue = replace(program, inputs=(), nodes=_as_needed(first, names), outputs=tuple(Output(Ref(n), "shared") for n in names))
    main = replace(program, weights=tuple(slots.get(n, Slot(n, "", "shared", "")) for n in names), nodes=rest)
    return Split(prologue, main, names)


def _as_needed(nodes: Sequence[Node], names: Sequence[str]) -> tuple[Node, ...]:
    """The nodes in an order in which what leads to a result stands before it alone: what is in between is freed before the next result is begun. What leads to none
    comes last: a program that cannot run is told so."""
    by_name = {n.name: n for n in nodes}
    order: dict[str, Node] = {}
    for name in names:
        waiting = [name]
        while waiting:
            node = by_name.get(waiting[-1])
            before = [] if node is None or node.name in order else [r for r in refs((node.args, node.kwargs)) if r in by_name and r not in order]
            if before:
                waiting += before
                continue
            waiting.pop()
            if node is not None:
                order.setdefault(node.name, node)
    return (*order.values(), *(n for n in nodes if n.name not in order))


def needed(program: Program, names: Sequence[str]) -> list[Node]:
    """The nodes that these values need, in order."""
    live = set(names)
    kept = []
    for node in reversed(program.nodes):
        if node.name in live:
            kept.append(node)
            live.update(refs((node.args, node.kwargs)))
    return kept[::-1]


class Executable:
    """A program bound to its weights on a device: `run(inputs)` gives its output values.

    weights: a value for each weight's source name: a tensor, or a list of N for a Ragged one. prologue: run weights-only nodes once, now. workers: of its loops.
    main, given: what is left after the prologue and its weights' values: what a backend takes. `use` puts a backend's function in the place of the flat graph.
    prologue: what made `given`, by `names`; None without one.
    """

    def __init__(self, program: Program, weights: Mapping[str, Any], device: torch.device, *, prologue: bool = True, workers: int = 0) -> None:
        given = [weights[s.source] for s in program.weights]
        self.prologue: Program | None = None
        self.names = tuple(s.name for s in program.weights)
        if prologue:
            parts = split(program)
            with torch.inference_mode():
                given = list(graph_module(parts.prologue, device).forward(*given))
            program, self.prologue, self.names = parts.main, parts.prologue, parts.names
        self.device = device
        self.main, self.given = program, given
        self.program, self.weights = _lists(program, given)
        self.workers = workers
        self.forward: Function = graph_module(self.program, device, workers).forward
        self.call: Function = self.eager
        self._own()
        if device.type == "cuda":  # threads call on streams of their own, which do not wait for what this one's has copied and made
            torch.cuda.current_stream(device).synchronize()

    def _own(self) -> None:
        self._owned = frozenset({storage(t) for w in self.weights for t in (w if isinstance(w, (list, tuple)) else [w])} - {0})

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """For each of `given` the names of the weights that it is, or is made of."""
        found = {s.name: frozenset([s.source]) for s in (self.prologue or self.main).weights}
        for node in self.prologue.nodes if self.prologue else ():
            found[node.name] = frozenset().union(*(found[r] for r in refs((node.args, node.kwargs))))
        return tuple(found[name] for name in self.names)

    @property
    def eager(self) -> Function:
        """The flat graph over its weights: inputs -> outputs."""
        return partial(self.forward, *self.weights)

    def use(self, call: Function) -> None:
        """Run this from now on. call: inputs -> outputs."""
        self.call = call

    def exchange(self, values: Mapping[int, Any]) -> None:
        """Other values in the place of some of `given`, for the flat graph from the next call on."""
        for number, value in values.items():
            self.given[number] = value
        self.weights = _lists(self.main, self.given)[1]
        self.call = self.eager
        self._own()

    def run(self, *inputs: Any) -> list[Any]:
        """The outputs, in memory that the caller may write into."""
        with _inference_mode(True):
            found = list(self.call(*inputs))
            given = [x.untyped_storage().data_ptr() for x in inputs]
            for i, value in enumerate(found):
                if type(value) is not torch.Tensor or (at := value.untyped_storage().data_ptr()) in self._owned or at in given:
                    found[i] = _free(value, {*self._owned, *given})
        return found

    def run_for_autograd(self, *inputs: Any) -> list[Any]:
        """The same, in tensors that a later call with gradients may read."""
        with torch.no_grad():
            taken = {*self._owned, *(x.untyped_storage().data_ptr() for x in inputs)}
            return [_free(value, taken) for value in self.call(*inputs)]


def _free(value: Any, taken: Set[int]) -> Any:
    """An output that the caller may write into: one that lies in the memory of a weight or an input is copied."""
    if isinstance(value, list):
        return [_free(v, taken) for v in value]
    return _copy(value) if isinstance(value, torch.Tensor) and storage(value) in taken else value


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy. On a CPU by `cat`: in megabytes the time of `clone` hangs on how two addresses lie to each other, and is longer."""
    return torch.cat((value,)) if value.device.type == "cpu" and value.ndim and value.is_contiguous() else value.clone()


def storage(value: Any) -> int:
    """Where a tensor's memory begins; 0 for what is none, or has none that can be read (a packed weight)."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.layout is torch.strided else 0


def _lists(program: Program, given: list[Any]) -> tuple[Program, list[Any]]:
    """Weights that loop regions take apart are taken apart once, here, and not at every call (the `list` form)."""
    at = {s.name: i for i, s in enumerate(program.weights)}
    slots, values, nodes = list(program.weights), list(given), []
    for node in program.nodes:
        if node.body is None:
            nodes.append(node)
            continue
        args = list(node.args)
        for k, (slot, arg) in enumerate(zip(node.body.inputs, args)):
            if slot.kind == "stacked" and isinstance(arg, Ref) and arg.name in at:
                name = f"{arg.name}__members"
                if name not in at:
                    at[name] = len(slots)
                    slots.append(replace(program.weights[at[arg.name]], name=name))
                    values.append(list(values[at[arg.name]].unbind(0)))
                args[k] = Ref(name)
        nodes.append(replace(node, args=tuple(args)))
    return replace(program, weights=tuple(slots), nodes=tuple(nodes)), values


def unroll(program: Program) -> Program:
    """The program with every loop written out once a member: its ATen decomposition, for readers that do not know loops."""
    if not any(n.body for n in program.nodes):
        return program
    nodes: list[Node] = []
    lists: dict[str, list[Any]] = {}  # a value that is a list of N: its N parts

    def part(arg: Any, kind: str, i: int, name: str) -> Any:
        if kind == "shared":
            return arg
        if isinstance(arg, Ref) and arg.name in lists:
            return lists[arg.name][i]
        if not isinstance(arg, Ref):
            return arg[i]
        if kind == "ragged":
            nodes.append(Node(name, "operator.getitem", (arg, i)))
        else:
            nodes.append(Node(name, "aten.select.int", (arg, 0, i)))
        return Ref(name)

    for node in program.nodes:
        if node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in lists:
            made = lists[node.args[0].name][node.args[1]]
            if isinstance(made, list):
                lists[node.name] = made
            else:
                nodes.append(Node(node.name, "aten.alias.default", (made,), out=node.out, member=node.member))
            continue
        if node.body is None:
            nodes.append(node)
            continue
        outs: list[list[Any]] = [[] for _ in node.body.outputs]
        for i in range(program.members):
            at = {s.name: part(a, s.kind, i, f"{node.name}_{s.name}_{i}") for s, a in zip(node.body.inputs, node.args)}
            for inner in node.body.nodes:
                name = f"{node.name}_{inner.name}_{i}"
                nodes.append(replace(inner, name=name, args=substitute(inner.args, at.__getitem__), kwargs=substitute(inner.kwargs, at.__getitem__)))
                at[inner.name] = Ref(name)
            for k, o in enumerate(node.body.outputs):
                outs[k].append(substitute(o.value, at.__getitem__))
        parts: list[Any] = []
        for k, o in enumerate(node.body.outputs):
            if o.kind == "stacked":
                nodes.append(Node(f"{node.name}_stack_{k}", "aten.stack.default", (outs[k],)))
                parts.append(Ref(f"{node.name}_stack_{k}"))
            else:
                parts.append(outs[k])
        lists[node.name] = parts
    outputs = tuple(replace(o, value=lists[o.value.name]) if isinstance(o.value, Ref) and o.value.name in lists else o for o in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)
