"""Programs held to a budget before they run: what is loaded may come from a stranger, and a load runs the prologue and the probe of it.

A program is walked on torch's meta tensors, which have sizes and no memory: after every node its result, what is live beside it and the work so far are compared
with what the artifact's files justify. A node whose result only values tell (`nonzero`, `item`) stops that; the program is then walked once more, with values, each node run after it was
let through. Nothing here knows strategies, and no program is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, refs, substitute

from . import op_costs
from ..ir import ops
from ..ir.encoding import decode
from ..errors import ArtifactError
from .op_costs import Cost, Excess

META = torch.device("meta")
LEAST_BYTES = 256 * 2**20
"""Memory that the smallest artifact may take."""
LEAST_WORK = 4e9
"""Nanoseconds of one core, as op_costs.py counts them, that the smallest artifact may take."""
BYTES_FOR_WEIGHTS, BYTES_FOR_PROBE = 16, 1024
"""More of them, for every byte of the weights files and of the probe's."""
WORK_FOR_WEIGHTS, WORK_FOR_PROBE = 200.0, 10_000.0
_SIZES_KEPT = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.view.dtype", "aten.reshape.default", "aten._reshape_alias.default"})
"""Views whose result is no larger than what they view, whatever strides say."""


_RECURRENT = frozenset(f"aten.{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))


_GIVES_PARTS = frozenset({"operator.getitem"})


class NeedsValues(Exception):
    """A program that cannot be walked on sizes alone."""


@dataclass
class Budget:
    """What the programs of one load may take. bytes: live at one time. work: nanoseconds of one core. limit: how many times the usual. spent: work so far.

    held: bytes that the prologues of programs bound before have made, and that are still there.
    """

    bytes: float
    work: float
    limit: float = 1.0
    spent: float = 0.0
    held: float = 0.0

    @classmethod
    def of(cls, weights: int, probe: int, limit: float = 1.0) -> Budget:
        """weights, probe: bytes of these files."""
        memory = LEAST_BYTES + BYTES_FOR_WEIGHTS * weights + BYTES_FOR_PROBE * probe
        work = LEAST_WORK + WORK_FOR_WEIGHTS * weights + WORK_FOR_PROBE * probe
        return cls(memory * limit, work * limit, limit)

    def admit(self, said: str, work: float, memory: float) -> None:
        """said: what would bring the load's work and memory to these. Raises: ArtifactError where that is too much."""
        for what, wanted, allowed, write in (("memory", memory, self.bytes, _bytes), ("work", work, self.work, _seconds)):
            if wanted > allowed:
                there = f", {_bytes(self.held)} of it in programs that are bound already" if what == "memory" and self.held else ""
                one, other = _apart(wanted, allowed, write)
                raise ArtifactError(
                    f"{said} would bring the {what} of this load to {one}{there}; an artifact of these files may take {other} when it is loaded. "
                    f"Where you trust its makers: load(limit={2 * wanted / allowed * self.limit:.1g}) allows this much, a later node may ask for more, and limit=None allows anything"
                )


@dataclass(frozen=True)
class _Made:
    """What a node gives. bytes: of memory that it makes. room: bytes that it takes while it runs, beside. views: whether it may hold on to its arguments' memory."""

    value: Any
    bytes: float
    room: float = 0.0
    views: bool = False

    @classmethod
    def of(cls, op: str, value: Any, room: float, given: Any) -> _Made:
        """given: the arguments."""
        count = sum(1 for _ in op_costs.tensors(value))
        if op in _GIVES_PARTS or ops.only_views(op):
            return cls(value, count * op_costs.OBJECT, room, True)
        return cls(value, op_costs.size(value), room, ops.may_view(op) or bool(_memory(value) & _memory(given)))


class _Live:
    """Bytes that are live. Memory is so until the last value that may look at it has ended.

    held: bytes that are live outside. total: these, too.
    """

    def __init__(self, held: float) -> None:
        self.total = held
        self._makers: dict[str, frozenset[str]] = {}  # of each live value the nodes whose memory it may look at
        self._bytes: dict[str, float] = {}
        self._looked_at: dict[str, int] = {}  # by how many live values, of each node

    def add(self, node: Node, made: _Made) -> None:
        none: frozenset[str] = frozenset()
        seen = none.union(*(self._makers.get(r, none) for r in refs((node.args, node.kwargs)))) if made.views else none
        self._makers[node.name] = seen | {node.name}
        self._bytes[node.name] = made.bytes
        self.total += made.bytes
        for maker in self._makers[node.name]:
            self._looked_at[maker] = self._looked_at.get(maker, 0) + 1

    def end(self, name: str) -> None:
        """Nothing reads this value from here on."""
        for maker in self._makers.pop(name, ()):
            self._looked_at[maker] -= 1
            if not self._looked_at[maker]:
                del self._looked_at[maker]
                self.total -= self._bytes.pop(maker)


class Walk:
    """One walk of a program. said: names it in errors. device: where it is to run. values: run every node, too, after it was let through.

    peak: the most bytes that were live. kept: bytes that the last run's outputs hold on to.
    """

    def __init__(self, budget: Budget, said: str, device: torch.device, *, values: bool = False) -> None:
        self.budget, self.said, self.device, self.values = budget, said, device, values
        self.peak = 0.0
        self.kept = 0.0
        self._known: dict[Any, tuple[_Made, Cost]] = {}

    def run(self, program: Program, given: Sequence[Any], held: float = 0.0, *, read: bool = True) -> list[Any]:
        """The outputs, on meta or, with values, as they are. given: a value for each weight and input. held: bytes of them that this load has made. read: whether
        somebody reads the outputs as a whole.

        Raises: ArtifactError naming the node; NeedsValues.
        """
        with torch.inference_mode():
            outside = self.budget.held + held
            found = self._program(program, given if self.values else metas(list(given)), program.members, outside)
        if read:  # a view may show far more numbers than it holds, and who reads it, the probe first, may copy it
            shown = outside + self.kept + op_costs.size(found)
            self.peak = max(self.peak, shown)
            self.budget.admit(f"{self.said}: reading the outputs", self.budget.spent, shown)
        return found

    def _program(self, program: Program, given: Sequence[Any], members: int, held: float) -> list[Any]:
        """held: bytes that are live outside."""
        values = {slot.name: value for slot, value in zip((*program.weights, *program.inputs), given, strict=True)}
        live = _Live(held)
        for node, done in zip(program.nodes, _ends(program)):
            made = self._node(node, values, members, live.total)
            values[node.name] = made.value
            live.add(node, made)
            self._admit(node, self.budget.spent, live.total + made.room)
            for name in done:
                live.end(name)
                values.pop(name, None)
        self.kept = live.total - held
        return [substitute(o.value, values.__getitem__) for o in program.outputs]

    def _node(self, node: Node, values: Mapping[str, Any], members: int, held: float) -> _Made:
        """What a node gives."""
        args = list(substitute(node.args, values.__getitem__))
        if node.body is not None:
            return self._loop(node, args, members, held)
        kwargs = substitute(node.kwargs, values.__getitem__)
        try:
            return self._values(node, args, kwargs) if self.values else self._sizes(node, args, kwargs)
        except Excess as e:
            raise ArtifactError(f"{self._where(node)} {e}; load(limit=None) lifts all limits, for an artifact whose makers you trust") from None
        except (ArtifactError, NeedsValues):
            raise
        except Exception as e:  # torch refuses in many classes what no program of a build asks for
            raise ArtifactError(f"{self._where(node)} cannot run: {type(e).__name__}: {_first_line(e)}") from e

    def _sizes(self, node: Node, args: Any, kwargs: Any) -> _Made:
        key = _key((node.op, args, kwargs))
        if key not in self._known:
            op_costs.refuse_numbers(node.op, args, kwargs)
            if op_costs.told_by_values(node.op, args):
                raise NeedsValues(node.op)
            try:
                made = _meta(node.op, args, kwargs)
            except Exception as e:  # no meta kernel, or one that asks for more than the op does: values tell
                raise NeedsValues(f"{node.op}: {_first_line(e)}") from e
            cost = op_costs.cost(node.op, args, kwargs, made)
            self._known[key] = _Made.of(node.op, made, cost.room, [args, kwargs]), cost
        known, cost = self._known[key]
        self.budget.spent += cost.work
        return known

    def _values(self, node: Node, args: Any, kwargs: Any) -> _Made:
        op_costs.refuse_numbers(node.op, args, kwargs)
        sizes, named = metas(args), metas(kwargs)
        try:
            if op_costs.told_by_values(node.op, args):
                raise NeedsValues(node.op)
            made = _meta(node.op, sizes, named)
            cost, room = op_costs.cost(node.op, sizes, named, made), float(op_costs.size(made))
        except (ArtifactError, Excess):
            raise
        except Exception as e:
            told = op_costs.by_values(node.op, args, kwargs)
            if told is None and node.op in _SIZES_KEPT:
                told = float(op_costs.size(args))
            if told is None and not isinstance(e, (NeedsValues, NotImplementedError)) and "meta" not in str(e).lower():
                raise  # torch refuses the arguments
            if told is None:
                raise Excess(f"takes what cannot be told before it runs ({_first_line(e)})") from e
            cost, room = op_costs.cost_by_values(node.op, told, [args, kwargs]), told
        self.budget.spent += cost.work
        self._admit(node, self.budget.spent, room + cost.room)
        found = ops.function(node.op)(*decode(args, self.device), **decode(kwargs, self.device))
        return _Made.of(node.op, found, cost.room, [args, kwargs])

    def _loop(self, node: Node, args: list[Any], members: int, held: float) -> _Made:
        """A loop's results. Members of equal sizes are walked once, and their work counted for each."""
        body = node.body
        assert body is not None
        if members < 1:
            raise ArtifactError(f"{self._where(node)} is a loop in a program of {members} members")
        own: list[Any] = []
        for slot, arg in zip(body.inputs, decode(args, self.device)):
            parts = arg if slot.kind == "shared" else _parts(arg)
            if slot.kind != "shared" and (parts is None or len(parts) != members):
                raise ArtifactError(f"{self._where(node)} takes {_said(arg)} apart, which is not one for each of {members} members")
            own.append(parts)
        groups: dict[Any, list[int]] = {}
        for i in range(members):
            key = i if self.values else _key([p[i] for s, p in zip(body.inputs, own) if s.kind == "ragged" or isinstance(p, list)])
            groups.setdefault(key, []).append(i)
        outs: list[list[Any]] = [[None] * members for _ in body.outputs]
        taken = held
        for numbers in groups.values():
            before = self.budget.spent
            i = numbers[0]
            made = self._program(body, [p if s.kind == "shared" else p[i] for s, p in zip(body.inputs, own)], body.members, taken)
            self.budget.spent += (self.budget.spent - before) * (len(numbers) - 1)
            taken += self.kept * len(numbers)
            self._admit(node, self.budget.spent, taken)
            for k, value in enumerate(made):
                for j in numbers:
                    outs[k][j] = value
        joined = [_joined(values, o.kind, members, self.values) for values, o in zip(outs, body.outputs)]
        if any(o.kind == "ragged" for o in body.outputs):  # lists of what the members' own runs have made, or of parts of what they were given
            return _Made(joined, taken - held + op_costs.size(joined), views=True)
        return _Made(joined, op_costs.size(joined))

    def _admit(self, node: Node, work: float, memory: float) -> None:
        """Raises: ArtifactError where a budget is exceeded."""
        self.peak = max(self.peak, memory)
        self.budget.admit(self._where(node), work, memory)

    def _where(self, node: Node) -> str:
        return f"{self.said}: node {node.name[:80]} ({node.op}{f', from {node.source[:80]}' if node.source else ''})"


def drawn_size(program: Program, drawn: Collection[str] = ()) -> tuple[Node | None, bool]:
    """The first node whose result random numbers size, or memory that nothing has been written to: each run would have another. And whether any are drawn.

    drawn: inputs that random numbers are in.
    """
    found, any_drawn = set(drawn), False
    for node in program.nodes:
        reads = any(r in found for r in refs((node.args, node.kwargs)))
        if node.body is not None:
            inside = [s.name for s, a in zip(node.body.inputs, node.args) if any(r in found for r in refs(a))]
            wrong, draws = drawn_size(node.body, inside)
            if wrong is not None:
                return wrong, True
        else:
            if reads and ops.of_values(node.op):
                return node, True
            draws = not ops.pure(node.op, node.args, node.kwargs) or node.op.split(".")[1] in ("empty", "empty_like", "new_empty")
        any_drawn |= draws
        if reads or draws:
            found.add(node.name)
    return None, any_drawn


def metas(value: Any) -> Any:
    """A value with its tensors on meta."""
    if isinstance(value, torch.Tensor):
        if value.device == META:
            return value
        if value.layout is not torch.strided:
            return torch.empty(value.shape, dtype=value.dtype, device=META)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (list, tuple)):
        return [metas(v) for v in value]
    if isinstance(value, dict):
        return {k: metas(v) for k, v in value.items()}
    return value


def _meta(op: str, args: Any, kwargs: Any) -> Any:
    """The op's result on meta. What makes a tensor from nothing would make it on the CPU."""
    named = decode(kwargs, META)
    if any(name == "device" for name, _, _ in ops.arguments(op)):
        named["device"] = META
    if op in _RECURRENT and (made := _recurrent(op, args, kwargs)) is not None:
        return made
    return ops.checked(op)(*decode(args, META), **named)


def _recurrent(op: str, args: Any, kwargs: Any) -> Any:
    """What a recurrent layer gives; torch's own way there is one step after the other. None: it will refuse its arguments."""
    given = ops.bind(op, tuple(args), dict(kwargs))
    x, h = given.get("input", given.get("data")), given.get("hx")
    states = h if isinstance(h, list) else [h]
    first = states[0] if states else None
    if not isinstance(x, torch.Tensor) or not x.dim() or not isinstance(first, torch.Tensor) or not first.dim():
        return None
    y = torch.empty([*x.shape[:-1], first.shape[-1] * (2 if given.get("bidirectional") else 1)], dtype=x.dtype, device=META)
    return (y, *states)


def _ends(program: Program) -> Iterator[list[str]]:
    """For each node the values that nothing reads after it."""
    last: dict[str, int] = {}
    for i, node in enumerate(program.nodes):
        last[node.name] = i
        for name in refs((node.args, node.kwargs)):
            last[name] = i
    for output in program.outputs:
        for name in refs(output.value):
            last.pop(name, None)
    ends: list[list[str]] = [[] for _ in program.nodes]
    for name, i in last.items():
        ends[i].append(name)
    return iter(ends)


def _memory(value: Any) -> set[int]:
    """The memory that the tensors of a value look at."""
    return {t.untyped_storage()._cdata for t in op_costs.tensors(value) if t.layout is torch.strided}


def _parts(value: Any) -> Sequence[Any] | None:
    """What a loop takes apart: a list as it is, a tensor as members that are equal in size."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    return _Members(value)


class _Members(Sequence[Any]):
    """A stacked tensor by members, each made when it is asked for."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __len__(self) -> int:
        return int(self.value.shape[0])

    def __getitem__(self, i: Any) -> Any:
        return self.value[i]


def _joined(values: list[Any], kind: str, members: int, real: bool) -> Any:
    if kind == "ragged":
        return values
    first = values[0]
    if not isinstance(first, torch.Tensor):
        raise ArtifactError(f"a loop's result is {_said(first)}, which cannot be stacked")
    if real:
        return torch.stack(values)
    return torch.empty((members, *first.shape), dtype=first.dtype, device=META)


def _key(value: Any) -> Any:
    """What a result on meta hangs on. Numbers of other types are other keys: True, 1 and 1.0 are equal in Python."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.is_conj()
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    if isinstance(value, float):
        return float, repr(value)  # NaN is not equal to itself
    return type(value), value


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0][:300] if lines else ""


def _bytes(count: float, digits: int = 1) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count:,.0f} bytes"


def _seconds(nanoseconds: float, digits: int = 0) -> str:
    return f"{nanoseconds / 1e9:,.{digits}f} s of a core"


def _apart(one: float, other: float, write: Callable[[float, int], str]) -> tuple[str, str]:
    """Two figures that differ, with as many digits as show it."""
    for digits in range(1, 10):
        said = write(one, digits), write(other, digits)
        if said[0] != said[1]:
            break
    return said
