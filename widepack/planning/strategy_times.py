"""Predicts the time of every strategy of every node, by running the strategies on meta tensors.

The walk goes through the member program in order, as lowering does. At each node it runs every strategy that
may be chosen, adds up the times of the calls that it writes, and goes on with the value of one of them. So
the copies that a strategy needs for the memory order of its input are counted. What depends on weights only
runs once at load, and takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Program, Slot, refs, substitute

from ..ir import ops
from ..ir.encoding import decode, iter_arguments, map_arguments
from ..ir.fake_values import refuse_call
from ..ir.kinds import weights_only
from ..ir.limits import tensors as tensors_in
from ..ir.tensor_type import parse_slot
from ..ir.torch_internals import memory_id
from ..ir.values import Ragged, Shared, Stacked, Value
from ..kernel_times.call_time import NOTHING, CallTime
from ..kernel_times.model import TimeModel
from ..registry.registry import family_of, strategies_of
from ..registry.writer import Writer, unwrap, wide_items
from ..runtime.meta_values import META, meta_key
from ..spec.dtypes import dtype_of
from ..system import deadline
from .apply_choice import apply_choice, runs_once

PACKED_NUMBER = 4
"""The most bytes of a packed number: 16-bit dtypes may be packed in float32."""


@dataclass(frozen=True)
class WeightForm:
    """A form of a weight that is made at load: the op that makes it, its sizes, strides and bytes."""

    op: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class NodeTimes:
    """The strategies of a node with their times, in the order in which they are tried; the chosen one.

    first: the strategy that lowering takes without a plan; None if that depends on the kind of device.
    forms: the forms of weights that each strategy makes at load.
    family: of the op, as `widepack primitives` lists it.
    """

    times: Mapping[str, CallTime]
    chosen: str
    first: str | None
    family: str = ""
    forms: Mapping[str, frozenset[WeightForm]] = field(default_factory=dict)

    @property
    def time(self) -> CallTime:
        return self.times[self.chosen]


@dataclass(frozen=True)
class ProgramTimes:
    """The times of a program. nodes: of each node that runs at a call, in order. results: the outputs."""

    nodes: Mapping[str, NodeTimes]
    results: tuple[torch.Tensor, ...]

    @property
    def total(self) -> CallTime:
        """The time of a call: host and device work at once, over all nodes."""
        return sum((times.time for times in self.nodes.values()), NOTHING)

    @property
    def strategies(self) -> dict[str, str]:
        """The chosen strategies by node."""
        return {name: times.chosen for name, times in self.nodes.items()}


@dataclass(frozen=True)
class NodeRuns:
    """The runs of a node by each strategy that may be chosen, in the order in which they are tried.

    values, times: the wide value and the time of each. forms: the forms of weights that each makes at load.
    first: the strategy that lowering takes by itself; None if that depends on the kind of device.
    """

    values: Mapping[str, Any]
    times: Mapping[str, CallTime]
    forms: Mapping[str, frozenset[WeightForm]]
    first: str | None


Choose = Callable[[Node, NodeRuns], str]
"""Chooses a strategy from the runs of those that apply, in the order in which they are tried."""


class TimedCalls:
    """Runs ops on torch's meta device, and times them. Equal calls are run once."""

    def __init__(self, model: TimeModel) -> None:
        self._model = model
        self._known: dict[Any, tuple[Any, CallTime, set[WeightForm]]] = {}

    def timed(
        self, op: str, args: list[Any], kwargs: dict[str, Any], weights: set[int]
    ) -> tuple[Any, CallTime, set[WeightForm]]:
        """Returns the result of a call, its time, and its results in new memory.

        weights: the memory of weights among the arguments.
        """
        read = [memory_id(t) for t in tensors_in([args, kwargs])]
        try:
            own = tuple(number in weights for number in read)
            key = (op, own, meta_key(args), meta_key(kwargs))
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that has no hash
            key = None
        if deadline.limited():  # the program is of a file that nobody has checked yet
            refuse_call(op, args, kwargs)
        result, time = self._model.call(op, args, kwargs, weights)
        found = result, time, {_form(op, t) for t in tensors_in(result) if memory_id(t) not in read}
        if key is not None:
            self._known[key] = found
        return found


class TimedWriter(Writer):
    """Runs ops on torch's meta device, and adds up the times of the calls.

    Args:
        members: N.
        model: The device.
        left_out: The nodes of the member program that run in a loop always. Nodes that read them are left out
            too.
        untried: The names of strategies that are tried only where no other is possible.
        calls: The calls that were timed before, also by others.

    Attributes:
        spent: The time of the calls since it was last set.
        made: The forms of weights that were made since it was last set.
        prologue: The wide values of a member program that exist before a call, by name.
    """

    def __init__(
        self,
        members: int,
        model: TimeModel,
        left_out: Collection[str] = (),
        untried: Collection[str] = (),
        calls: TimedCalls | None = None,
    ) -> None:
        super().__init__(members, model.device)
        self.model, self.left_out = model, left_out
        self.spent = NOTHING
        self.made: set[WeightForm] = set()
        self.prologue: dict[str, Any] = {}
        self._untried = untried
        self._calls = calls or TimedCalls(model)
        self._early: dict[int, Value] = {}
        self._runs: dict[Any, NodeRuns] = {}

    def tensor(self, type_: str, sizes: Mapping[str, int], members: int) -> Value:
        """Returns a new value of a type such as `float32[B,3]`. members: of its member axis; 0 for none."""
        slot = parse_slot(type_)
        shape = [members] * bool(members) + list(slot.shape(sizes))
        return Value(None, torch.empty(shape, dtype=dtype_of(slot.dtype), device=META))

    def mark_early(self, value: Value) -> Value:
        """Marks a value that exists before the call: a weight, or what depends on weights only."""
        self._early[id(value)] = value
        return value

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        given = [a for a in iter_arguments([args, kwargs]) if isinstance(a, Value)]
        weights = {memory_id(x) for a in given if id(a) in self._early for x in tensors_in(a.fake)}
        result, time, new = self._calls.timed(op, list(unwrap(args)), unwrap(kwargs), weights)
        value = Value(None, result)
        if all(id(a) in self._early for a in given) and ops.pure(op, args, kwargs):
            self.made |= new
            return self.mark_early(value)
        self.spent += time
        return value

    def runs_of(self, node: Node, args: Any, kwargs: Any, fixed: str | None, training: bool) -> NodeRuns:
        """Runs a node by each strategy that may be chosen. Equal nodes are run once.

        Args:
            node: The node of the member program.
            args: Its wide values and literals.
            kwargs: The same, by name.
            fixed: The strategy that is decided already, or None.
            training: Whether only strategies with derivatives are possible.
        """
        key = self._node_key(node, args, kwargs, fixed)
        if key is not None and key in self._runs:
            return self._runs[key]
        self.op = node.op
        fits = [s for s in strategies_of(node.op).values() if s.when(self, *args, **kwargs)]
        names: Sequence[str | None] = [fixed]
        if fixed is None and not runs_once(node, args, kwargs):
            tried = [s.name for s in fits if not s.on_request and (s.derivative or not training)]
            names = [name for name in tried if name not in self._untried] or [*tried] or names
        values, times, forms = {}, {}, {}
        for name in names:
            self.spent, self.made = NOTHING, set()
            value, used = apply_choice(self, node, args, kwargs, name)
            values[used], times[used], forms[used] = value, self.spent, frozenset(self.made)
        found = NodeRuns(values, times, forms, self._first(node, args, kwargs))
        if key is not None:
            self._runs[key] = found
        return found

    def _first(self, node: Node, args: Any, kwargs: Any) -> str | None:
        """Returns the strategy that lowering takes by itself; None if it depends on the kind of device."""
        if runs_once(node, args, kwargs):
            return "once"
        known = strategies_of(node.op).values()
        names = []
        for device in ("cpu", "cuda"):
            writer = Writer(self.members, device)
            writer.op = node.op
            first = next((s.name for s in known if s.when(writer, *args, **kwargs)), "sequential")
            names.append(first)
        return names[0] if names[0] == names[1] else None

    def _node_key(self, node: Node, args: Any, kwargs: Any, fixed: str | None) -> Any:
        """Returns what the runs of a node depend on; None if that is more than sizes and kinds."""
        kinds = []
        for x in wide_items([args, kwargs]):
            whole = isinstance(x, Stacked) and (x.factors is not None or x.gathered is not None)
            if whole or isinstance(x, Ragged) or not isinstance(x.value, Value):
                return None
            kinds.append((type(x), id(x.value) in self._early))
        pure = ops.pure(node.op, node.args, node.kwargs)
        try:
            key = (
                node.op,
                pure,
                fixed,
                tuple(kinds),
                meta_key(_tensors_of(args)),
                meta_key(_tensors_of(kwargs)),
            )
            hash(key)
        except TypeError:  # an argument that has no hash
            return None
        return key


def _form(op: str, value: torch.Tensor) -> WeightForm:
    number = PACKED_NUMBER if op.startswith("widepack.pack_") else value.element_size()
    return WeightForm(op, tuple(value.shape), value.stride(), value.numel() * number)


def _tensors_of(args: Any) -> Any:
    """Returns arguments with tensors in place of wide values."""
    return map_arguments(
        args, lambda a: unwrap([a.value])[0] if isinstance(a, (Shared, Stacked)) else a, as_lists=True
    )


@torch.no_grad()
def walk(
    program: Program,
    slots: Mapping[str, Kind],
    sizes: Mapping[str, int],
    writer: TimedWriter,
    fixed: Mapping[str, str],
    choose: Choose,
    training: bool = False,
) -> ProgramTimes:
    """Returns the times of a program.

    Args:
        program: The member program.
        slots: The kinds of its weights and inputs. Ragged values, and nodes that read them, are left out.
        sizes: The size of each dim.
        writer: Runs the strategies. It may serve several walks through one program.
        fixed: The strategies of nodes that are decided already.
        choose: Chooses the strategies of other nodes.
        training: Whether only strategies with derivatives are possible.

    Raises:
        LoweringError, RuntimeError, ValueError, IndexError, TypeError: A strategy cannot run at these sizes.
    """
    early: set[str] = set() if training else weights_only(program)
    values = dict(writer.prologue)
    for slot in (*program.weights, *program.inputs):
        if slot.name not in values and slots[slot.name] != "ragged":
            values[slot.name] = _slot_value(writer, slot, slots[slot.name], sizes, slot.name in early)
    found: dict[str, NodeTimes] = {}
    for node in program.nodes:
        if node.name in writer.prologue or node.name in writer.left_out:
            continue
        if any(r not in values for r in refs((node.args, node.kwargs))):
            continue
        args, kwargs = (
            decode(substitute(a, values.__getitem__), META) for a in (list(node.args), node.kwargs)
        )
        if node.op == "operator.getitem" and isinstance(args[0], tuple):
            values[node.name] = args[0][args[1]]
            continue
        values[node.name], times = _node_times(
            writer, node, args, kwargs, fixed.get(node.name), choose, training
        )
        if node.name not in early:
            found[node.name] = times
    writer.prologue = {name: value for name, value in values.items() if name in early}
    known = [o.value for o in program.outputs if all(r in values for r in refs(o.value))]
    outputs = [substitute(o, values.__getitem__) for o in known]
    results = tensors_in([unwrap(x.value) for x in wide_items(outputs) if not isinstance(x, Ragged)])
    return ProgramTimes(found, tuple(results))


def _slot_value(
    writer: TimedWriter, slot: Slot, kind: Kind, sizes: Mapping[str, int], early: bool
) -> Shared | Stacked:
    """Returns the wide value of a weight or an input."""
    value = writer.tensor(slot.type, sizes, writer.members if kind == "stacked" else 0)
    if early:
        writer.mark_early(value)
    return Stacked(value) if kind == "stacked" else Shared(value)


def _node_times(
    writer: TimedWriter,
    node: Node,
    args: Any,
    kwargs: Any,
    fixed: str | None,
    choose: Choose,
    training: bool,
) -> tuple[Any, NodeTimes]:
    """Runs the strategies of a node. Returns the value of the chosen one, and the times.

    fixed: the strategy that is decided already, or None.
    """
    runs = writer.runs_of(node, args, kwargs, fixed, training)
    chosen = choose(node, runs) if len(runs.times) > 1 else next(iter(runs.times))
    return runs.values[chosen], NodeTimes(runs.times, chosen, runs.first, family_of(node.op), runs.forms)
