"""Holds an exported member, and matches its states: how new values leave the program, and for which input.

A buffer that is a state is copied before the member runs and read afterwards. So the program has the old
value as an input and the new value as an output, and it writes to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.nn.modules.module import register_module_buffer_registration_hook

from widepack_artifacts.tree import leaves as leaves_of

from ..errors import CaptureError
from ..ir.encoding import type_of
from ..ir.guards import InputLeaf
from ..ir.torch_internals import buffers_of
from ..spec.entries import callable_of, method_of
from ..spec.state import BUFFER, CHANGED, OUTPUT, CarriedState, StateRequest, matching, under
from .call import MemberCall
from .derivatives import with_autograd
from .exported import tensor_inputs
from .named_fields import known_forms

_KEEPS = "a state keeps its dtype and shape from call to call"


@dataclass(frozen=True)
class ExportedMember:
    """A member and its export by torch.export.

    program: the export. make: makes a fresh member. call: the example call. entry: the exported method.
    prefix: what stands before the names of weights in the export.
    """

    program: torch.export.ExportedProgram
    module: nn.Module
    make: Callable[[], nn.Module]
    call: MemberCall
    entry: str
    prefix: str

    @property
    def name(self) -> str:
        """The member's class."""
        return type(self.module).__name__

    @property
    def mode(self) -> str:
        """The member's mode, for messages."""
        return "train" if self.module.training else "eval"

    def own(self, target: object) -> str:
        """Returns the member's name of a weight in the export."""
        return str(target).removeprefix(self.prefix)


class NewValue(NamedTuple):
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
        answer = known_answer(callable_of(member, entry))
        answer = answer if not derivatives else with_autograd(answer)

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
    the input leaves under it. outputs: requested name -> the output that is its new value, or "".
    """

    buffers: tuple[str, ...] = ()
    leaves: tuple[int, ...] = ()
    inputs: Mapping[str, dict[int, str]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def new_values(self) -> int:
        """The number of values that the export returns beside the result."""
        return len(self.buffers) + len(self.leaves)


def states_of_entry(
    module: nn.Module, call: MemberCall, entry: str, states: Sequence[StateRequest]
) -> StateRequests:
    """Returns the requested states that this entry has, as buffers or as inputs of a call.

    Raises: CaptureError.
    """
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    member = type(module).__name__
    names: list[str] = []
    leaves: list[int] = []
    under_name: dict[str, dict[int, str]] = {}
    for request in states:
        name = request.name
        here = {i: leaf.name for i, leaf in enumerate(call.leaves) if under(name, leaf.name)}
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
    if names or under_name:
        _check_signature(member, call, entry, {i for here in under_name.values() for i in here})
    outputs = {request.name: request.output for request in states}
    return StateRequests(tuple(names), tuple(sorted(leaves)), under_name, outputs)


def _check_signature(member: str, call: MemberCall, entry: str, states: set[int]) -> None:
    """Refuses a state that is a part of an input, and an input called `state` beside states. Raises:
    CaptureError.

    states: numbers of the inputs that are states.
    """
    for parameter in call.signature:
        leaves = set(leaves_of(parameter.tree))
        if leaves & states and not leaves <= states:
            parts = ", ".join(call.leaves[i].name for i in sorted(leaves & states))
            raise CaptureError(
                f"state {parts} is a part of the input {parameter.name} of {entry}; a call leaves out the "
                f"whole of it: write --state {parameter.name}"
            )
        if parameter.name == "state" and not (leaves and leaves <= states):
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


@dataclass
class ExportedStates:
    """The states of an exported member.

    method: `Class.method` of the member, for messages. outputs: (name, type) of all outputs: those of the
    result, then the states that are in no result. leaves: the inputs for buffers among the states. kept: the
    places of states that are in no result among the export's tensor outputs. unchanged: requested buffers
    that the entry does not change.
    """

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


def carried_by(
    member: ExportedMember,
    requests: StateRequests,
    outputs: Sequence[tuple[str, str]],
    new_values: Sequence[NewValue],
) -> ExportedStates:
    """Matches every state of an exported member with its new value. Raises: CaptureError.

    outputs: (name, type) of the result's leaves. new_values: what `StatefulWrapper` returns beside it.
    """
    matched = ExportedStates(f"{member.name}.{member.entry}", list(outputs))
    _match_buffers(member, dict(zip(requests.buffers, new_values)), matched)
    changed = dict(zip(requests.leaves, new_values[len(requests.buffers) :]))
    nodes = tensor_inputs(member.program)
    in_place = {i for i, new in changed.items() if not _copy_of(new.node, nodes[i])}
    for name, leaves in requests.inputs.items():
        output = requests.outputs[name]
        pairs = matching(name, output or name, leaves, {i: n for i, (n, _) in enumerate(outputs)})
        # leaves that stay as they are go with those that are written to
        new = {} if pairs or in_place.isdisjoint(leaves) else changed
        for i, leaf in leaves.items():
            type_ = member.call.leaves[i].type
            if i in pairs:
                new_type = outputs[pairs[i]][1]
                if new_type != type_:
                    raise CaptureError(
                        f"state {leaf} is {type_} and comes out of {matched.method} as {new_type}; "
                        f"{_KEEPS}. A value that grows is an ordinary input and output"
                    )
                matched.states.append(CarriedState(leaf, i, pairs[i], OUTPUT))
            elif i in new:
                matched.add_new(leaf, i, type_, new[i], CHANGED)
            else:
                raise CaptureError(_no_output(matched.method, outputs, name, output, leaf, type_))
    places = [s.output for s in matched.states]
    if twice := [s.name for s in matched.states if places.count(s.output) > 1]:
        raise CaptureError(
            f"states {', '.join(twice)} come out of {matched.method} as one output; each needs its own: name "
            f"another output, --state {twice[-1]}=NAME"
        )
    return matched


def _match_buffers(
    member: ExportedMember, new_values: Mapping[str, NewValue], matched: ExportedStates
) -> None:
    """Matches the buffers among the states with their new values."""
    by_name = {n.name: n for n in member.program.graph.nodes}
    nodes = {
        member.own(s.target): by_name[s.arg.name]
        for s in member.program.graph_signature.input_specs
        if s.kind is InputKind.BUFFER
    }
    buffers = dict(member.module.named_buffers(remove_duplicate=False))
    for name, new in new_values.items():
        before = nodes.get(name)
        if new.node is None:
            raise CaptureError(f"state {name}: {matched.method} leaves no tensor in it; {_KEEPS}")
        if _copy_of(new.node, before):
            matched.unchanged.append(name)
            if not _is_read(before, new.node):
                continue
        type_ = type_of(buffers[name])
        matched.leaves.append(InputLeaf(name, type_, buffers[name].detach(), {}))
        number = len(member.call.leaves) + len(matched.leaves) - 1
        matched.add_new(name, number, type_, new, BUFFER)


def _no_output(
    method: str, outputs: Sequence[tuple[str, str]], name: str, output: str, leaf: str, type_: str
) -> str:
    """The message for an input leaf of a state that has no new value."""
    rows = [f"{n} {t}" for n, t in outputs]
    fitting = [n for n, t in outputs if t == type_]
    also = "" if output else " and does not change this input in place"
    return (
        f"state {leaf}: {method} has no output called {(output or name) + leaf[len(name) :]}{also}; its "
        f"outputs are {', '.join(rows) or 'none'}: name the one that is the new value of {leaf}, {type_}, "
        f"for example --state {name}={fitting[0] if len(fitting) == 1 else 'OUTPUT'}"
    )


_COPY = torch.ops.aten.clone.default


def _copy_of(node: fx.Node | None, source: fx.Node | None) -> bool:
    """Whether a node is the unchanged value, or the copy of it that `StatefulWrapper` makes."""
    return node is not None and (node is source or (node.target is _COPY and node.args[0] is source))


def _is_read(source: fx.Node | None, copy: fx.Node) -> bool:
    """Whether any node reads a value or its copy, other than the output of the export."""
    users = {*(source.users if source is not None else ()), *copy.users}
    return any(u is not copy and u.op != "output" for u in users)
