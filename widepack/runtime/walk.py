"""Checks a program against a budget before it runs: an artifact may come from an untrusted source, and
loading it runs its prologue and its probe.

The walk runs a program on torch's meta device, where tensors have sizes and no memory. After each node it
compares the result, all live memory and the work so far with what the artifact's files justify. It stops at a
node whose result only values determine (`nonzero`, `item`): the program is then walked again with values, and
each node runs after its check. The walk knows no strategies and changes no program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Program, refs, substitute

from ..errors import ArtifactError
from ..ir import limits, ops
from ..ir.encoding import decode
from ..ir.limits import LimitExceeded, integers, tensors
from ..ir.op_records import UNKNOWN_SIZE
from ..ir.torch_internals import memory_id
from . import op_costs
from .budget import Budget, OverBudget
from .meta_values import META, meta_key, metas, run_on_meta
from .op_costs import Cost, broadcast_count

# Views whose result is never larger than their argument, whatever the strides are.
_SIZES_KEPT = ops.full_names("view _unsafe_view view.dtype reshape _reshape_alias")


class NeedsValues(Exception):
    """The program cannot be walked on sizes alone."""


class Walk:
    """One walk of a program.

    name: the program in error messages. device: where it will run. values: also run each node after its
    check. random: nodes with random arguments, which are refused if values determine the size of the result.
    peak: the most bytes that were live. kept: the bytes that the outputs of the last run keep in memory.
    """

    def __init__(
        self,
        budget: Budget,
        name: str,
        device: torch.device,
        *,
        values: bool = False,
        random: Iterable[Node] = (),
    ) -> None:
        self.budget, self.name, self.device, self.values = budget, name, device, values
        self.peak = 0.0
        self.kept = 0.0
        self._random = {id(node): node for node in random}
        self._known: dict[Any, tuple[WalkedValue, Cost]] = {}

    def run(
        self, program: Program, given: Sequence[Any], made: float = 0.0, *, read: bool = True
    ) -> list[Any]:
        """Walks a program and returns its outputs: on the meta device, or with data if the walk has values.

        given: a value for each weight and input. made: the bytes of these that this load has made. read:
        whether the outputs are read as a whole afterwards. Raises: ArtifactError naming the node;
        NeedsValues.
        """
        with torch.inference_mode():
            outside = self.budget.resident + made
            outputs = self._program(
                program, given if self.values else metas(list(given)), program.members, outside
            )
        if read:  # a view may show far more numbers than its memory has, and reading it may copy them all
            shown = outside + self.kept + limits.size(outputs)
            self.peak = max(self.peak, shown)
            self.budget.admit(f"{self.name}: reading the outputs", self.budget.spent, shown)
        return outputs

    def _program(self, program: Program, given: Sequence[Any], members: int, outside: float) -> list[Any]:
        """Walks the nodes. outside: the bytes that are live outside the program."""
        slots = (*program.weights, *program.inputs)
        values = {slot.name: value for slot, value in zip(slots, given, strict=True)}
        live = LiveMemory(outside)
        for node, ended in zip(program.nodes, last_uses(program)):
            result = self._node(node, values, members, live.total)
            values[node.name] = result.value
            live.add(node, result)
            self._admit(node, self.budget.spent, live.total + result.room)
            for name in ended:
                live.end(name)
                values.pop(name, None)
        self.kept = live.total - outside
        return [substitute(o.value, values.__getitem__) for o in program.outputs]

    def _node(self, node: Node, values: Mapping[str, Any], members: int, live: float) -> WalkedValue:
        args = list(substitute(node.args, values.__getitem__))
        if node.body is not None:
            return self._loop(node, args, members, live)
        kwargs = substitute(node.kwargs, values.__getitem__)
        try:
            if self.values:
                return self._by_values(node, args, kwargs, live)
            return self._by_sizes(node, args, kwargs)
        except LimitExceeded as e:
            way_out = self.budget.way_out("load(limit=None) lifts all limits")
            raise OverBudget(f"{self._where(node)} {e}{way_out}") from None
        except (ArtifactError, NeedsValues):
            raise
        except Exception as e:  # torch has many classes of errors for arguments that no build writes
            raise ArtifactError(
                f"{self._where(node)} cannot run: {type(e).__name__}: {_first_line(e)}"
            ) from e

    def _by_sizes(self, node: Node, args: Any, kwargs: Any) -> WalkedValue:
        """The value of a node on the meta device.

        Equal calls are computed once, and their cost counts each time.
        """
        key = meta_key((node.op, args, kwargs))
        if key not in self._known:
            limits.refuse_numbers(node.op, args, kwargs)
            if needs_values(node.op, args):
                raise NeedsValues(node.op)
            try:
                result = self._sized(node, args, kwargs)
            except ArtifactError:
                raise
            except Exception as e:  # no meta kernel, or one that accepts less than the op
                raise NeedsValues(f"{node.op}: {_first_line(e)}") from e
            cost = op_costs.cost(node.op, args, kwargs, result)
            self._known[key] = WalkedValue.of(node.op, result, cost.room, [args, kwargs]), cost
        value, cost = self._known[key]
        self.budget.spent += cost.work
        return value

    def _by_values(self, node: Node, args: Any, kwargs: Any, live: float) -> WalkedValue:
        """The value of a node that runs, after its cost is known and admitted."""
        limits.refuse_numbers(node.op, args, kwargs)
        if id(node) in self._random and needs_values(node.op, args):
            raise LimitExceeded("has a result whose size depends on random numbers")
        cost, result_bytes = self._cost_before_run(node, args, kwargs)
        self.budget.spent += cost.work
        self._admit(node, self.budget.spent, live + result_bytes + cost.room)
        result = ops.function(node.op)(*decode(args, self.device), **decode(kwargs, self.device))
        return WalkedValue.of(node.op, result, cost.room, [args, kwargs])

    def _cost_before_run(self, node: Node, args: Any, kwargs: Any) -> tuple[Cost, float]:
        """The cost of a node and the bytes of its result: from sizes, else from values.

        Raises: LimitExceeded where neither tells.
        """
        sizes, named = metas(args), metas(kwargs)
        try:
            if needs_values(node.op, args):
                raise NeedsValues(node.op)
            result = self._sized(node, sizes, named)
            return op_costs.cost(node.op, sizes, named, result), float(limits.size(result))
        except (ArtifactError, LimitExceeded):
            raise
        except Exception as e:
            bound = result_bytes(node.op, args, kwargs)
            if bound is None and node.op in _SIZES_KEPT:
                bound = float(limits.size(args))
            if bound is not None:
                return op_costs.cost_by_values(node.op, bound, [args, kwargs]), bound
            if isinstance(e, (NeedsValues, NotImplementedError)) or "meta" in str(e).lower():
                raise LimitExceeded(
                    f"has a result whose size is not known before it runs ({_first_line(e)})"
                ) from e
            raise  # torch refuses the arguments

    def _sized(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The result of a node on the meta device. Its time counts. Raises: ArtifactError after too long."""
        start = time.thread_time()
        try:
            return run_on_meta(node.op, args, kwargs)
        finally:
            self.budget.add_walked(self._where(node), time.thread_time() - start)

    def _loop(self, node: Node, args: list[Any], members: int, live: float) -> WalkedValue:
        """The results of a loop.

        Members of equal sizes are walked once, and their work counts for each of them.
        """
        body = node.body
        assert body is not None
        parts = self._loop_parts(node, body, args, members)
        outs: list[list[Any]] = [[None] * members for _ in body.outputs]
        taken = live
        for numbers in self._equal_members(body, parts, members):
            before, i = self.budget.spent, numbers[0]
            member_inputs = [p if s.kind == "shared" else p[i] for s, p in zip(body.inputs, parts)]
            results = self._program(body, member_inputs, body.members, taken)
            self.budget.spent += (self.budget.spent - before) * (len(numbers) - 1)
            taken += self.kept * len(numbers)
            self._admit(node, self.budget.spent, taken)
            for k, value in enumerate(results):
                for j in numbers:
                    outs[k][j] = value
        joined = [join_members(values, o.kind, members, self.values) for values, o in zip(outs, body.outputs)]
        if any(o.kind == "ragged" for o in body.outputs):  # lists keep what the members made or were given
            return WalkedValue(joined, taken - live + limits.size(joined), views=True)
        return WalkedValue(joined, limits.size(joined))

    def _loop_parts(self, node: Node, body: Program, args: list[Any], members: int) -> list[Any]:
        """For each input of a loop its value, or the members' values. Raises: ArtifactError."""
        if members < 1:
            raise ArtifactError(f"{self._where(node)} is a loop in a program of {members} members")
        parts: list[Any] = []
        for slot, arg in zip(body.inputs, decode(args, self.device)):
            part = arg if slot.kind == "shared" else members_of(arg)
            if slot.kind != "shared" and (part is None or len(part) != members):
                raise ArtifactError(
                    f"{self._where(node)} splits {describe(arg)} by member, which is not one value for each "
                    f"of {members} members"
                )
            parts.append(part)
        return parts

    def _equal_members(self, body: Program, parts: list[Any], members: int) -> list[list[int]]:
        """Groups of members with arguments of equal sizes; with values each member is a group."""
        if self.values:
            return [[i] for i in range(members)]
        groups: dict[Any, list[int]] = {}
        for i in range(members):
            member_inputs = [
                p[i] for s, p in zip(body.inputs, parts) if s.kind == "ragged" or isinstance(p, list)
            ]
            groups.setdefault(meta_key(member_inputs), []).append(i)
        return list(groups.values())

    def _admit(self, node: Node, work: float, memory: float) -> None:
        """Raises: ArtifactError where the budget does not allow this."""
        self.peak = max(self.peak, memory)
        self.budget.admit(self._where(node), work, memory)

    def _where(self, node: Node) -> str:
        source = f", from {node.source[:80]}" if node.source else ""
        return f"{self.name}: node {node.name[:80]} ({node.op}{source})"


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0][:300] if lines else ""


_GIVES_PARTS = frozenset({"operator.getitem"})


@dataclass(frozen=True)
class WalkedValue:
    """The value of a node on a walk.

    bytes: the memory that the node makes. room: bytes that it takes beside that while it runs. views: whether
    the value may share the memory of an argument.
    """

    value: Any
    bytes: float
    room: float = 0.0
    views: bool = False

    @classmethod
    def of(cls, op: str, value: Any, room: float, args: Any) -> WalkedValue:
        """The value of an op. args: all its arguments."""
        tensors = sum(1 for _ in limits.tensors(value))
        if op in _GIVES_PARTS or ops.only_views(op):
            return cls(value, tensors * limits.OBJECT, room, True)
        shares = ops.may_view(op) or bool(_memories(value) & _memories(args))
        return cls(value, limits.size(value), room, shares)


class LiveMemory:
    """The bytes that are live. The memory of a node is live until the last value that may view it ends.

    outside: bytes that are live outside the program. total: all live bytes, with these.
    """

    def __init__(self, outside: float) -> None:
        self.total = outside
        self._bytes: dict[str, float] = {}
        self._bases: dict[str, set[str]] = {}  # for each node the values that its value may view
        # For each node 1 while its value is live, and 1 for each node in memory that may view it.
        self._holders: dict[str, int] = {}

    def add(self, node: Node, value: WalkedValue) -> None:
        """Adds the value of a node. It takes as long as the node has arguments, however long a chain of views
        is.
        """
        read = refs((node.args, node.kwargs)) if value.views else ()
        bases = {r for r in read if r in self._holders}
        for base in bases:
            self._holders[base] += 1
        self._bases[node.name], self._holders[node.name] = bases, 1
        self._bytes[node.name] = value.bytes
        self.total += value.bytes

    def end(self, name: str) -> None:
        """Removes a value that no later node reads."""
        ended = [name] if name in self._holders else []
        while ended:
            node = ended.pop()
            self._holders[node] -= 1
            if not self._holders[node]:
                del self._holders[node]
                self.total -= self._bytes.pop(node)
                ended.extend(self._bases.pop(node))


def last_uses(program: Program) -> Iterator[list[str]]:
    """Yields for each node the values that no later node and no output reads."""
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


def _memories(value: Any) -> set[int]:
    """The memories of the tensors of a value, as numbers."""
    return {memory_id(t) for t in limits.tensors(value) if t.layout is torch.strided}


class _LazyMembers(Sequence[Any]):
    """The members of a stacked tensor, each made on access."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __len__(self) -> int:
        return int(self.value.shape[0])

    def __getitem__(self, i: Any) -> Any:
        return self.value[i]


def members_of(value: Any) -> Sequence[Any] | None:
    """The members' parts of a loop's argument: a list as it is, a tensor along axis 0.

    None for a value without parts.
    """
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    return _LazyMembers(value)


def join_members(values: list[Any], kind: Kind, members: int, real: bool) -> Any:
    """One output of a loop from the members' results.

    real: whether these have data. Raises: ArtifactError.
    """
    if kind == "ragged":
        return values
    first = values[0]
    if not isinstance(first, torch.Tensor):
        raise ArtifactError(f"a loop has the result {describe(first)}, which cannot be stacked")
    if real:
        return torch.stack(values)
    return torch.empty((members, *first.shape), dtype=first.dtype, device=META)


def describe(value: Any) -> str:
    """A value in words: `float32[3, 4]`, `a list of 2`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")


_MASKS = (torch.bool, torch.uint8)
_SELECTIONS = ops.full_names("""
    masked_select _unique _unique2 unique_consecutive unique_dim unique_dim_consecutive
""")


def needs_values(op: str, args: Sequence[Any]) -> bool:
    """Whether only values determine the size of this call's result. Among indices only masks do."""
    if op == "aten.index.Tensor" and len(args) == 2:
        return any(t.dtype in _MASKS for t in tensors(args[1]))
    return ops.of_values(op)


def result_bytes(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The most bytes that a result may have whose size only values determine.

    Reads the values. None for any other op.
    """
    given = ops.bind(op, tuple(args), dict(kwargs))
    x = next(tensors(dict(given)), None)
    if x is None:
        return None
    name = op.rpartition(".")[0]
    if op == "aten.repeat_interleave.Tensor":
        return 8.0 * _total(x)
    if op == "aten.repeat_interleave.self_Tensor":
        return _repeated(x, given)
    if name in ("aten.nonzero", "aten.nonzero_numpy", "aten.argwhere") or op == "aten.where.default":
        return 8.0 * x.numel() * max(1, x.dim())
    if op in _SELECTIONS:
        return 3.0 * 16 * broadcast_count(given)
    if name in ("aten.index", "aten.index_put"):
        return _indexed(x, given)
    if name in UNKNOWN_SIZE:
        return 16.0 * broadcast_count(given)
    if name == "aten._local_scalar_dense":
        return 0.0
    return _by_numbers(name, x, given)


def _by_numbers(name: str, x: torch.Tensor, given: Mapping[str, Any]) -> float | None:
    """The bound for ops whose result is as large as a number among their arguments or in their tensor."""
    if name == "aten.bincount":
        return 8.0 * max(_largest(x) + 1, int(given.get("minlength", 0)))
    if name == "aten.one_hot":
        classes = given.get("num_classes", -1)
        return 8.0 * x.numel() * (classes if isinstance(classes, int) and classes >= 0 else _largest(x) + 1)
    if name == "aten.istft":
        lengths = [0, *integers(given.get("length")), *integers(given.get("n_fft"))]
        return 16.0 * x.numel() + 8.0 * max(lengths)
    if name == "aten.histogram":
        return 16.0 * (x.numel() + max([0, *integers(given.get("bins"))]))
    return None


def _repeated(x: torch.Tensor, given: Mapping[str, Any]) -> float | None:
    repeats, dim = given.get("repeats"), given.get("dim")
    if not isinstance(repeats, torch.Tensor):
        return None
    rows = x.numel() if not isinstance(dim, int) else int(x.shape[dim]) if -x.dim() <= dim < x.dim() else 1
    total = _total(repeats) * (rows if repeats.numel() == 1 else 1)
    return float(x.element_size() * total * (x.numel() // max(1, rows) if rows else 0)) + 8.0 * total


def _indexed(x: torch.Tensor, given: Mapping[str, Any]) -> float:
    indices = list(tensors(given.get("indices")))
    masks = [t for t in indices if t.dtype in _MASKS]
    others = [t for t in indices if t.dtype not in _MASKS]
    rows = max([int(t.count_nonzero()) for t in masks] + [t.numel() for t in others] + [1])
    if masks and len(indices) > 1:  # several indices may read one place more than once
        joint = math.prod(max(1, t.numel()) for t in others) if len(others) > 1 else rows
        return float(x.element_size() * max(rows, joint) * max(1, x.numel()))
    return float(x.element_size() * x.numel()) + 64.0 * rows


def _largest(x: torch.Tensor) -> int:
    return int(x.max()) if x.numel() and not x.dtype.is_floating_point and not x.dtype.is_complex else 0


def _total(x: torch.Tensor) -> int:
    if x.dtype.is_floating_point or x.dtype.is_complex or not x.numel():
        return 0
    return int(x.to(torch.float64).clamp_min(0).sum().clamp_max(2.0**62))
