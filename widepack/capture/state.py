"""Exports the states of a member: how new values leave the program, and which state belongs to which input.

A buffer that is a state is copied before the member runs and read afterwards. So the program has the old
value as an input and the new value as an output, and it writes to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.nn.modules.module import register_module_buffer_registration_hook

from widepack_artifacts.entry import Parameter
from widepack_artifacts.tree import leaves as numbers_of

from ..errors import CaptureError
from ..ir.encoding import type_of
from ..ir.guards import InputLeaf
from ..ir.torch_internals import buffers_of
from ..spec.entries import method_of
from ..spec.state import BUFFER, CHANGED, OUTPUT, CarriedState, StateRequest, matching, under
from .derivatives import with_autograd
from .results import known_forms

_KEEPS = "a state keeps its dtype and shape from call to call"


@dataclass(frozen=True)
class NewValue:
    """A new value that `StatefulWrapper` returns.

    place: its number among the export's tensor outputs. node: None where it is no tensor.
    """

    place: int
    node: fx.Node | None
    type: str


class StatefulWrapper(nn.Module):
    """The module that torch.export exports in place of a member with state, or with a forward that it does
    not take.

    Its forward is the member's method with the same signature, in which the given keywords replace
    `**kwargs`. Dataclasses are returned as `Fields`. Weights are named `member.<name>`.

    With state it returns (result, new values): those of the named buffers, then of the numbered tensor leaves
    of the call. The member works on copies. So what it keeps of an old value stays old, whether it writes
    into a buffer or puts another tensor in its place.

    derivatives: the method takes derivatives, so it runs with autograd on, and its results are detached.
    """

    def __init__(
        self,
        member: nn.Module,
        entry: str,
        buffers: Sequence[str] = (),
        leaves: Collection[int] = (),
        keywords: Collection[str] = (),
        derivatives: bool = False,
    ) -> None:
        super().__init__()
        self.member = member
        self.training = member.training
        method = method_of(member, entry)
        answer = known_answer(method) if not derivatives else with_autograd(known_answer(method))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not buffers and not leaves:
                return answer(*args, **kwargs)
            flat, shape = pytree.tree_flatten((args, kwargs))
            places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
            for i in leaves:
                flat[places[i]] = flat[places[i]].clone()
            args, kwargs = pytree.tree_unflatten(flat, shape)
            owners = [(buffers_of(module), name) for module, name in (owner_of(member, b) for b in buffers)]
            originals = [owned[name] for owned, name in owners]
            for (owned, name), value in zip(owners, originals):
                owned[name] = value.clone() if value is not None else None
            try:
                result = answer(*args, **kwargs)
                new_values = [owned[name] for owned, name in owners]
            finally:
                for (owned, name), value in zip(owners, originals):
                    owned[name] = value
            return result, [*new_values, *(flat[places[i]] for i in sorted(leaves))]

        signature = inspect.signature(method)
        replacing = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
        kept = [p for p in signature.parameters.values() if not keywords or p.kind is not p.VAR_KEYWORD]
        forward.__dict__["__signature__"] = signature.replace(parameters=[*kept, *replacing])
        self.forward = forward


def known_answer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method whose results have forms that torch.export knows."""
    return lambda *args, **kwargs: known_forms(method(*args, **kwargs))


MEMBER = "member."  # stands before the names of weights in an export of StatefulWrapper


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that has a buffer, and its name there: `layers.0.cache` -> (layers.0, cache)."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


@dataclass(frozen=True)
class StateRequests:
    """The requested states that an entry has, before the export.

    buffers: their names. leaves: numbers of inputs that may be changed in place. inputs: requested name ->
    the input leaves under it.
    """

    buffers: tuple[str, ...]
    leaves: tuple[int, ...]
    inputs: dict[str, dict[int, str]]


def states_of_entry(
    module: nn.Module,
    inputs: Sequence[InputLeaf],
    signature: Sequence[Parameter],
    entry: str,
    states: Sequence[StateRequest],
) -> StateRequests:
    """Returns the requested states that this entry has, as buffers or as inputs of a call.

    inputs, signature: those of the call. Raises: CaptureError.
    """
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    member = type(module).__name__
    names: list[str] = []
    leaves: list[int] = []
    under_name: dict[str, dict[int, str]] = {}
    for request in states:
        name = request.name
        here = {i: leaf.name for i, leaf in enumerate(inputs) if under(name, leaf.name)}
        if name in parameters:
            raise CaptureError(f"state {name} is a parameter of {member}; a state is a buffer or an input")
        if name in buffers and here:
            raise CaptureError(
                f"state {name} is a buffer of {member} and an input of {entry}; give one of them another name"
            )
        if name in buffers:
            if request.output:
                raise CaptureError(
                    f"state {name}={request.output}: {name} is a buffer, and its new value is what {entry} "
                    f"leaves in it: write --state {name}"
                )
            names.append(name)
        elif here:
            under_name[name] = here
            leaves += [] if request.output else list(here)
    numbers = {i for here in under_name.values() for i in here}
    _check_signature(member, inputs, signature, entry, numbers, bool(names or under_name))
    return StateRequests(tuple(names), tuple(sorted(leaves)), under_name)


def _check_signature(
    member: str,
    inputs: Sequence[InputLeaf],
    signature: Sequence[Parameter],
    entry: str,
    states: set[int],
    has_states: bool,
) -> None:
    """Refuses a state that is a part of an input, and an input called `state` beside states. Raises:
    CaptureError.

    states: numbers of the inputs that are states.
    """
    for parameter in signature:
        leaves = set(numbers_of(parameter.tree))
        if leaves & states and not leaves <= states:
            parts = ", ".join(inputs[i].name for i in sorted(leaves & states))
            raise CaptureError(
                f"state {parts} is a part of the input {parameter.name} of {entry}; a call leaves out the "
                f"whole of it: write --state {parameter.name}"
            )
        if has_states and parameter.name == "state" and not (leaves and leaves <= states):
            raise CaptureError(
                f"{member}.{entry} has an input called state, which is what a call gives its state as: "
                "ens(x, state=...); give that input another name"
            )


@contextmanager
def assignments(module: nn.Module) -> Iterator[set[str]]:
    """Records the names of buffers that the module replaces by another tensor, inside a with block.

    Torch itself notices only those of the root module.
    """
    names = {id(part): name for name, part in module.named_modules()}
    replaced: set[str] = set()

    def note(part: nn.Module, name: str, value: Any) -> None:
        before = buffers_of(part).get(name)
        if id(part) in names and before is not None and before is not value:
            replaced.add(f"{names[id(part)]}.{name}".lstrip("."))

    handle = register_module_buffer_registration_hook(note)
    try:
        yield replaced
    finally:
        handle.remove()


@dataclass(frozen=True)
class ExportedStates:
    """The states of an exported member.

    leaves: the inputs for buffers among the states. outputs: (name, type) of all outputs: those of the
    result, then the states that are in no result. kept: the places of the latter among the export's tensor
    outputs. unchanged: requested buffers that the entry does not change.
    """

    states: tuple[CarriedState, ...]
    leaves: tuple[InputLeaf, ...]
    outputs: tuple[tuple[str, str], ...]
    kept: tuple[int, ...]
    unchanged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StateMatching:
    """What is needed to match each state of an exported member with its new value.

    inputs: the tensors of the call. of_entry: the states that the entry has. requests: the states as the user
    wrote them. outputs: (name, type) of the result's leaves. new_values: what `StatefulWrapper` returns
    beside the result.
    prefix: what stands before the names of weights in the export.
    """

    exported: torch.export.ExportedProgram
    module: nn.Module
    inputs: Sequence[InputLeaf]
    entry: str
    of_entry: StateRequests
    requests: Sequence[StateRequest]
    outputs: Sequence[tuple[str, str]]
    new_values: Sequence[NewValue]
    prefix: str

    @property
    def method(self) -> str:
        """`Class.method` of the member, for messages."""
        return f"{type(self.module).__name__}.{self.entry}"

    def nodes(self) -> tuple[dict[str, fx.Node], list[fx.Node]]:
        """Returns the nodes of buffers, by name, and those of tensor inputs, in order."""
        by_name = {n.name: n for n in self.exported.graph.nodes}
        buffers: dict[str, fx.Node] = {}
        tensors: list[fx.Node] = []
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind is InputKind.BUFFER and spec.target is not None:
                buffers[spec.target.removeprefix(self.prefix)] = by_name[spec.arg.name]
            elif spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                tensors.append(by_name[spec.arg.name])
        return buffers, tensors


@dataclass
class _MatchedStates:
    """The states that are matched so far; `outputs` begins with those of the result."""

    method: str
    outputs: list[tuple[str, str]]
    states: list[CarriedState] = field(default_factory=list)
    leaves: list[InputLeaf] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def add_new(self, name: str, input_number: int, type_: str, new: NewValue, how: str) -> None:
        """Adds a state whose new value is in no result, so that the program gets an output for it."""
        if new.type != type_:
            raise CaptureError(f"state {name} is {type_} and {self.method} makes it {new.type}; {_KEEPS}")
        self.states.append(CarriedState(name, input_number, len(self.outputs), how))
        self.kept.append(new.place)
        self.outputs.append((name, type_))


def carried_by(task: StateMatching) -> ExportedStates:
    """Matches every state of an exported member with its new value. Raises: CaptureError."""
    buffer_nodes, input_nodes = task.nodes()
    matched = _MatchedStates(task.method, list(task.outputs))
    _match_buffers(task, buffer_nodes, matched)
    changed = dict(zip(task.of_entry.leaves, task.new_values[len(task.of_entry.buffers) :]))
    for name, leaves in task.of_entry.inputs.items():
        _match_input(task, name, leaves, changed, input_nodes, matched)
    states = matched.states
    twice = [s.name for s in states if sum(o.output == s.output for o in states) > 1]
    if twice:
        raise CaptureError(
            f"states {', '.join(twice)} come out of {task.method} as one output; each needs its own: name "
            f"another output, --state {twice[-1]}=NAME"
        )
    return ExportedStates(
        states=tuple(states),
        leaves=tuple(matched.leaves),
        outputs=tuple(matched.outputs),
        kept=tuple(matched.kept),
        unchanged=tuple(matched.unchanged),
    )


def _match_buffers(task: StateMatching, nodes: Mapping[str, fx.Node], matched: _MatchedStates) -> None:
    """Matches the buffers among the states. nodes: the buffers' nodes in the export."""
    buffers = dict(task.module.named_buffers(remove_duplicate=False))
    for name, new in zip(task.of_entry.buffers, task.new_values):
        before = nodes.get(name)
        if new.node is None:
            raise CaptureError(f"state {name}: {task.method} leaves no tensor in it; {_KEEPS}")
        if _copy_of(new.node, before):
            matched.unchanged.append(name)
            if not _is_read(before, new.node):
                continue
        type_ = type_of(buffers[name])
        matched.leaves.append(InputLeaf(name, type_, buffers[name].detach(), {}))
        matched.add_new(name, len(task.inputs) + len(matched.leaves) - 1, type_, new, BUFFER)


def _match_input(
    task: StateMatching,
    name: str,
    leaves: Mapping[int, str],
    changed: Mapping[int, NewValue],
    nodes: Sequence[fx.Node],
    matched: _MatchedStates,
) -> None:
    """Matches the input leaves under one requested name, with outputs of the result or with writes in place.

    leaves: number -> name. changed: new values of the inputs that may be written in place. nodes: of all
    inputs.
    """
    request = next(r for r in task.requests if r.name == name)
    output_names = {i: n for i, (n, _) in enumerate(task.outputs)}
    pairs = matching(name, request.output or name, leaves, output_names)
    in_place = not pairs and any(i in changed and not _copy_of(changed[i].node, nodes[i]) for i in leaves)
    for i, leaf in leaves.items():
        type_ = task.inputs[i].type
        if i in pairs:
            new_type = task.outputs[pairs[i]][1]
            if new_type != type_:
                raise CaptureError(
                    f"state {leaf} is {type_} and comes out of {task.method} as {new_type}; {_KEEPS}. "
                    "A value that grows is an ordinary input and output"
                )
            matched.states.append(CarriedState(leaf, i, pairs[i], OUTPUT))
        elif in_place:  # leaves that stay as they are go with those that are written to
            matched.add_new(leaf, i, type_, changed[i], CHANGED)
        else:
            rows = [f"{n} {t}" for n, t in task.outputs]
            fitting = [n for n, t in task.outputs if t == type_]
            also = "" if request.output else " and does not change this input in place"
            raise CaptureError(
                f"state {leaf}: {task.method} has no output called "
                f"{(request.output or name) + leaf[len(name) :]}{also}; its outputs are "
                f"{', '.join(rows) or 'none'}: name the one that is the new value of {leaf}, {type_}, for "
                f"example --state {name}={fitting[0] if len(fitting) == 1 else 'OUTPUT'}"
            )


_COPY = torch.ops.aten.clone.default


def _copy_of(node: fx.Node | None, source: fx.Node | None) -> bool:
    """Whether a node is the unchanged value, or the copy of it that `StatefulWrapper` makes."""
    return node is not None and (node is source or (node.target is _COPY and node.args[0] is source))


def _is_read(source: fx.Node | None, copy: fx.Node) -> bool:
    """Whether any node reads a value or its copy, other than the output of the export."""
    users = {*(source.users if source is not None else ()), *copy.users}
    return any(u is not copy and u.op != "output" for u in users)
