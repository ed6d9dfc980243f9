"""Checks a program against a budget before it runs: an artifact may come from an untrusted source, and
loading it runs its prologue and its probe.

The walk runs a program on torch's meta device, where tensors have sizes and no memory. After each node it
compares the result, all live memory and the work so far with what the artifact's files justify. It stops at a
node whose result only values determine (`nonzero`, `item`): the program is then walked again with values, and
each node runs after its check. The walk knows no strategies and changes no program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, substitute

from ..errors import ArtifactError
from ..ir import limits, ops
from ..ir.encoding import decode
from ..ir.limits import LimitExceeded
from . import op_costs, value_sizes
from .budget import Budget, OverBudget
from .cost_terms import Cost
from .live_memory import LiveMemory, WalkedValue, last_uses
from .loop_values import describe, join_members, members_of
from .meta_values import meta_key, metas, run_on_meta

# Views whose result is never larger than their argument, whatever the strides are.
_SIZES_KEPT = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.view.dtype",
        "aten.reshape.default",
        "aten._reshape_alias.default",
    }
)


class NeedsValues(Exception):
    """The program cannot be walked on sizes alone."""


class Walk:
    """One walk of a program.

    name: the program in error messages. device: where it will run. values: also run each node after its
    check. peak: the most bytes that were live. kept: the bytes that the outputs of the last run keep in
    memory.
    """

    def __init__(self, budget: Budget, name: str, device: torch.device, *, values: bool = False) -> None:
        self.budget, self.name, self.device, self.values = budget, name, device, values
        self.peak = 0.0
        self.kept = 0.0
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
            if value_sizes.needs_values(node.op, args):
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
            if value_sizes.needs_values(node.op, args):
                raise NeedsValues(node.op)
            result = self._sized(node, sizes, named)
            return op_costs.cost(node.op, sizes, named, result), float(limits.size(result))
        except (ArtifactError, LimitExceeded):
            raise
        except Exception as e:
            bound = value_sizes.result_bytes(node.op, args, kwargs)
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
