"""Capture's part of state: what is exported so that a member's new values come out of it, and which of them belong to which input.

A buffer that is a state is copied before the member runs and read after it; so the program has the old value as an input and the new one as an output, and
nothing is written to.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.nn.modules.module import register_module_buffer_registration_hook

from widepack_artifacts.manifest import Parameter
from widepack_artifacts.tree import leaves as numbers_of

from ..ir.encoding import dtype_name
from .guards import Leaf
from ..spec.entries import method_of
from ..errors import CaptureError
from .results import known_forms
from ..spec.state import BUFFER, CHANGED, OUTPUT, Asked, Carried, matching, under


@dataclass(frozen=True)
class New:
    """A new value that `Traced` returns: its place among the export's tensor outputs, its node (None where it is no tensor), its type."""

    place: int
    node: fx.Node | None
    type: str


class Traced(nn.Module):
    """What is exported for an entry, with state, or where torch.export does not take the member's own forward: a module whose forward is the member's method,
    with its signature, in which the keywords given have the place of `**kwargs`; dataclasses are returned as `Fields`. Weights are named `member.<name>`.

    With state it returns (result, [new values]): of the buffers named, then of the tensor leaves of the call that are numbered. The member works on copies, so
    that what it keeps of an old value stays old, whether it writes into a buffer or puts another tensor in its place.
    """

    def __init__(
        self, member: nn.Module, entry: str, buffers: Sequence[str] = (), leaves: Collection[int] = (), keywords: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.member = member
        self.training = member.training
        method = method_of(member, entry)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not buffers and not leaves:
                return known_forms(method(*args, **kwargs))
            flat, shape = pytree.tree_flatten((args, kwargs))
            places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
            for i in leaves:
                flat[places[i]] = flat[places[i]].clone()
            args, kwargs = pytree.tree_unflatten(flat, shape)
            owners = [owner_of(member, name) for name in buffers]
            held = [module._buffers[name] for module, name in owners]
            for (module, name), value in zip(owners, held):
                module._buffers[name] = value.clone() if value is not None else None
            try:
                result = known_forms(method(*args, **kwargs))
                news = [module._buffers[name] for module, name in owners]
            finally:
                for (module, name), value in zip(owners, held):
                    module._buffers[name] = value
            return result, [*news, *(flat[places[i]] for i in sorted(leaves))]

        signature = inspect.signature(method)
        given = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
        named = [p for p in signature.parameters.values() if not keywords or p.kind is not p.VAR_KEYWORD]
        forward.__dict__["__signature__"] = signature.replace(parameters=[*named, *given])
        self.forward = forward


MEMBER = "member."  # before the names of a traced member's weights


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a buffer, and its name there: `layers.0.cache` -> (layers.0, cache)."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


@dataclass(frozen=True)
class Wanted:
    """States as far as they are known before the export. buffers: their names. leaves: numbers of inputs that may be changed in place. inputs: of each name
    asked for, the input leaves under it."""

    buffers: tuple[str, ...]
    leaves: tuple[int, ...]
    inputs: dict[str, dict[int, str]]


def wanted_of(module: nn.Module, inputs: Sequence[Leaf], signature: Sequence[Parameter], entry: str, states: Sequence[Asked]) -> Wanted:
    """What of the states asked for this entry has. inputs, signature: of a call. Raises: CaptureError."""
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    fixed = dict(module.named_parameters(remove_duplicate=False))
    names: list[str] = []
    leaves: list[int] = []
    found: dict[str, dict[int, str]] = {}
    for asked in states:
        here = {i: leaf.name for i, leaf in enumerate(inputs) if under(asked.name, leaf.name)}
        if asked.name in fixed:
            raise CaptureError(f"state {asked.name} is a parameter of {type(module).__name__}; a state is a buffer or an input")
        if asked.name in buffers and here:
            raise CaptureError(f"state {asked.name} is a buffer of {type(module).__name__} and an input of {entry}; give one of them another name")
        if asked.name in buffers:
            if asked.output:
                raise CaptureError(
                    f"state {asked.name}={asked.output}: {asked.name} is a buffer, and its new value is what {entry} leaves in it: write --state {asked.name}"
                )
            names.append(asked.name)
        elif here:
            found[asked.name] = here
            leaves += [] if asked.output else list(here)
    named = {i for here in found.values() for i in here}
    for parameter in signature:
        leaves_of = set(numbers_of(parameter.tree))
        if leaves_of & named and not leaves_of <= named:
            parts = ", ".join(inputs[i].name for i in sorted(leaves_of & named))
            raise CaptureError(
                f"state {parts} is a part of the input {parameter.name} of {entry}; a call leaves out the whole of it: write --state {parameter.name}"
            )
    if (names or found) and any(p.name == "state" and not (set(numbers_of(p.tree)) and set(numbers_of(p.tree)) <= named) for p in signature):
        raise CaptureError(
            f"{type(module).__name__}.{entry} has an input called state, which is what a call gives its state as: ens(x, state=...); give that input another name"
        )
    return Wanted(tuple(names), tuple(sorted(leaves)), found)


@contextmanager
def assignments(module: nn.Module) -> Iterator[set[str]]:
    """The names of the buffers in whose place the module puts another tensor while it runs; torch itself sees those of the root alone."""
    names = {id(part): name for name, part in module.named_modules()}
    found: set[str] = set()

    def note(part: nn.Module, name: str, value: Any) -> None:
        before = part._buffers.get(name)
        if id(part) in names and before is not None and before is not value:
            found.add(f"{names[id(part)]}.{name}".lstrip("."))

    handle = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@dataclass(frozen=True)
class Found:
    """The states of an export.

    leaves: of the buffers among them. outputs: (name, type) of all outputs: the result's, then those of states that are in no result, which have the places
    `kept` among the export's. unchanged: buffers asked for that the entry leaves as they are.
    """

    states: tuple[Carried, ...]
    leaves: tuple[Leaf, ...]
    outputs: tuple[tuple[str, str], ...]
    kept: tuple[int, ...]
    unchanged: tuple[str, ...]


def carried_by(
    exported: torch.export.ExportedProgram,
    module: nn.Module,
    inputs: Sequence[Leaf],
    entry: str,
    wanted: Wanted,
    asked: Sequence[Asked],
    outputs: Sequence[tuple[str, str]],
    news: Sequence[New],
    prefix: str,
) -> Found:
    """Match every state with its new value.

    outputs: (name, type) of the result's leaves. news: what `Traced` returns beside the result. prefix: before the names of weights. Raises: CaptureError.
    """
    who = f"{type(module).__name__}.{entry}"
    by_name = {n.name: n for n in exported.graph.nodes}
    held: dict[str, fx.Node] = {}
    tensors = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and spec.target is not None:
            held[spec.target.removeprefix(prefix)] = by_name[spec.arg.name]
        elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
            tensors.append(by_name[spec.arg.name])
    states: list[Carried] = []
    leaves: list[Leaf] = []
    unchanged: list[str] = []
    kept: list[int] = []
    made = list(outputs)
    buffers = dict(module.named_buffers(remove_duplicate=False))

    def add(name: str, at: int, type_: str, new: New, how: str) -> None:
        if new.type != type_:
            raise CaptureError(f"state {name} is {type_} and {who} makes it {new.type}; a state keeps its dtype and shape from call to call")
        states.append(Carried(name, at, len(made), how))
        kept.append(new.place)
        made.append((name, type_))

    for name, new in zip(wanted.buffers, news):
        before = held.get(name)
        if new.node is None:
            raise CaptureError(f"state {name}: {who} leaves no tensor in it; a state keeps its dtype and shape from call to call")
        if _copy_of(new.node, before):
            unchanged.append(name)
            if not _is_read(before, new.node):
                continue
        type_ = f"{dtype_name(buffers[name].dtype)}[{','.join(map(str, buffers[name].shape))}]"
        leaves.append(Leaf(name, type_, buffers[name].detach(), {}))
        add(name, len(inputs) + len(leaves) - 1, type_, new, BUFFER)
    changed = dict(zip(wanted.leaves, news[len(wanted.buffers) :]))
    named = {i: n for i, (n, _) in enumerate(outputs)}
    for name, under_it in wanted.inputs.items():
        one = next(a for a in asked if a.name == name)
        pairs = matching(name, one.output or name, under_it, named)
        written = not pairs and any(i in changed and not _copy_of(changed[i].node, tensors[i]) for i in under_it)
        for i, leaf in under_it.items():
            type_ = inputs[i].type
            if i in pairs:
                if outputs[pairs[i]][1] != type_:
                    raise CaptureError(
                        f"state {leaf} is {type_} and comes out of {who} as {outputs[pairs[i]][1]}; a state keeps its dtype and shape from call to call. "
                        f"A value that grows is an ordinary input and output"
                    )
                states.append(Carried(leaf, i, pairs[i], OUTPUT))
            elif written:  # one that stays as it is goes with those that are written to
                add(leaf, i, type_, changed[i], CHANGED)
            else:
                known = ", ".join(n for n in named.values()) or "none"
                raise CaptureError(
                    f"state {leaf}: {who} has no output called {(one.output or name) + leaf[len(name) :]}"
                    f"{'' if one.output else ' and does not change this input in place'}; its outputs are {known}: name the one that is the new value, --state {name}={next(iter(named.values()), 'h')}"
                )
    twice = [s.name for s in states if sum(o.output == s.output for o in states) > 1]
    if twice:
        raise CaptureError(f"states {', '.join(twice)} come out of {who} as one output; each needs its own")
    return Found(tuple(states), tuple(leaves), tuple(made), tuple(kept), tuple(unchanged))


_COPY = torch.ops.aten.clone.default


def _copy_of(node: fx.Node | None, source: fx.Node | None) -> bool:
    """Whether a node is a value as it came in, or the copy of it that `Traced` makes."""
    return node is not None and (node is source or (node.target is _COPY and node.args[0] is source))


def _is_read(source: fx.Node | None, copy: fx.Node) -> bool:
    """Whether anything but the export's own output reads a value or its copy."""
    users = {*(source.users if source is not None else ()), *copy.users}
    return any(u is not copy and u.op != "output" for u in users)
