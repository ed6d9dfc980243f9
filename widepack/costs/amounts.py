"""Adds the kernels of a program up: rows by module, op and line, states of the memory, and what weights take.

An amount is a pair [shared, member] of sympy expressions over the dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Kind, Program, Slot, refs

from ..errors import WidepackError
from ..ir.fake_values import Fakes
from ..ir.kinds import kinds as kinds_of
from ..ir.kinds import weights_only
from ..ir.tensor_type import dtype_in, member_types, parse_slot
from ..spec.dtypes import dtype_of
from .counts import Kernel
from .expressions import ZERO, SizeSymbols
from .recorder import KernelRecorder, record

_FLOATING = ("float32", "float64", "float16", "bfloat16")
RowKey = tuple[str, str, str]
Amount = list[Any]


@dataclass
class Amounts:
    """What one call of a program takes.

    rows: by (module, op, line), each measure with its amount. states: of the memory, in order. weights,
    parameters: bytes and elements of all weights. uncounted: ops without a formula, with their calls.
    """

    symbols: SizeSymbols
    rows: dict[RowKey, dict[str, Amount]] = field(default_factory=dict)
    states: list[tuple[Any, Any]] = field(default_factory=list)
    weights: Amount = field(default_factory=lambda: [ZERO, ZERO])
    parameters: Amount = field(default_factory=lambda: [ZERO, ZERO])
    uncounted: dict[str, int] = field(default_factory=dict)


def member_amounts(
    program: Program,
    slots: Mapping[str, Kind],
    sizes: Mapping[str, int],
    modules: Mapping[str, str],
) -> Amounts:
    """Adds up a member program.

    slots: the kinds of its weights and inputs; they split every amount. Raises: LoweringError for a dim that
    an op fixes.
    """
    return _amounts(program, kinds_of(program, slots), sizes, modules, set())


def wide_amounts(
    programs: Mapping[int, Program], sizes: Mapping[str, int], modules: Mapping[str, str]
) -> Amounts:
    """Adds up the wide program of two numbers of members, and splits every amount by the line through both.

    programs: by the number of members, made by one plan. Nodes that depend on weights alone have
    run before.
    Raises: LoweringError; WidepackError if the two programs have different nodes.
    """
    found = []
    for program in programs.values():
        shared: dict[str, Kind] = {s.name: "shared" for s in (*program.weights, *program.inputs)}
        shared |= {n.name: "shared" for n in program.nodes}
        found.append(_amounts(program, shared, sizes, modules, weights_only(program)))
    (few, many), (first, second) = programs, found
    if list(first.rows) != list(second.rows) or len(first.states) != len(second.states):
        raise WidepackError(
            f"the programs for {few} and {many} members have different nodes, so their costs have no formula "
            "over the number of members"
        )

    def line(a: Any, b: Any) -> Amount:
        member = sympy.expand(b - a) / (many - few)
        return [sympy.expand(a - few * member), member]

    result = Amounts(first.symbols, uncounted=first.uncounted)
    for key, costs in first.rows.items():
        result.rows[key] = {m: line(pair[0], second.rows[key][m][0]) for m, pair in costs.items()}
    states: dict[Any, Any] = {}
    for (a, _), (b, _) in zip(first.states, second.states):
        states.setdefault((a, b), tuple(line(a, b)))
    result.states = list(states.values())
    result.weights = line(first.weights[0], second.weights[0])
    result.parameters = line(first.parameters[0], second.parameters[0])
    return result


def main_dtype(program: Program) -> str:
    """Returns the floating dtype that most weights have, else that of the inputs, else float32."""
    for slots in (program.weights, program.inputs):
        dtypes = [d for s in slots for t in member_types(s.type) if (d := dtype_in(t)) in _FLOATING]
        if dtypes:
            return max(dict.fromkeys(dtypes), key=dtypes.count)
    return "float32"


def _amounts(
    program: Program,
    kinds: Mapping[str, Kind],
    sizes: Mapping[str, int],
    modules: Mapping[str, str],
    early: set[str],
) -> Amounts:
    fakes = Fakes(sizes)
    amounts = Amounts(SizeSymbols(fakes.dims, dtype_of(main_dtype(program))))
    recorder = KernelRecorder(amounts.symbols)
    outputs = record(program, fakes, kinds, recorder, early - {s.name for s in program.weights})
    fakes.check()
    placed = _placed(program, modules)
    for kernel in recorder.kernels:
        _add_kernel(amounts, kernel, outputs, placed)
    amounts.states = [s for s in recorder.live.states() if amounts.symbols.is_known(s[0] + s[1])]
    for slot in program.weights:
        _add_weight(amounts, slot, kinds[slot.name] == "shared", program.members)
    return amounts


def _placed(program: Program, modules: Mapping[str, str]) -> dict[str, str]:
    """Returns the path of the module of each node, by its name. A node that a rewrite made has the module of
    a node that reads it.
    """
    placed: dict[str, str] = {}
    for node in reversed(program.nodes):
        of_body = _placed(node.body, modules) if node.body is not None else {}
        placed |= of_body
        path = modules.get(node.member or node.name) or modules.get(node.name)
        if path is None:
            path = placed.get(node.name, "")
        placed[node.name] = path
        for name in refs((node.args, node.kwargs)):
            placed.setdefault(name, path)
    return placed


def _add_kernel(amounts: Amounts, kernel: Kernel, outputs: set[int], modules: Mapping[str, str]) -> None:
    between = [ZERO, ZERO]
    for serial, size, shared in kernel.written:
        if serial not in outputs:
            between[0 if shared else 1] += size
    node = kernel.node
    row = amounts.rows.setdefault((modules.get(node.name, ""), kernel.op, node.source), {})
    for measure, pair in {**kernel.costs, "intermediates": between}.items():
        total = row.setdefault(measure, [ZERO, ZERO])
        for i in (0, 1):
            total[i] += pair[i] * kernel.times
    if not kernel.counted:
        amounts.uncounted[kernel.op] = amounts.uncounted.get(kernel.op, 0) + kernel.times


def _add_weight(amounts: Amounts, slot: Slot, shared: bool, members: int) -> None:
    """Adds the bytes and elements of a weight. members: of a wide program, whose weights have N parts."""
    copies = members if members and slot.kind == "stacked" else 1
    for type_ in member_types(slot.type):
        parsed = parse_slot(type_)
        count = sympy.Integer(copies)
        for n in parsed.numbers or ():
            count *= n
        at = 0 if shared else 1
        amounts.weights[at] += count * amounts.symbols.element(dtype_of(parsed.dtype), True)
        amounts.parameters[at] += count


def totals_of(rows: Iterable[Mapping[str, Amount]], measure: str) -> Amount:
    """Returns the sum of a measure over rows."""
    kept = [row[measure] for row in rows if measure in row]
    return [sympy.Add(*(pair[i] for pair in kept)) for i in (0, 1)]


class _Numbers(SizeSymbols):
    """Elements have the bytes of their dtypes, so that no count has a symbol."""

    def element(self, dtype: torch.dtype, weight: bool) -> Any:
        return sympy.Integer(dtype.itemsize)


def kernels_at(program: Program, sizes: Mapping[str, int], *, prologue: bool = True) -> list[Kernel]:
    """Returns the kernels of one call, in order. Their counts and sizes are numbers.

    Args:
        program: A wide program, or a member program.
        sizes: The size of each named dim.
        prologue: Leave out the nodes that depend on weights alone, as a loaded model does.

    Raises:
        RuntimeError: A size depends on values, or a guard does not hold at these sizes.
    """
    fakes = Fakes(sizes, static=True)
    symbols = _Numbers({}, dtype_of(main_dtype(program)))
    kinds: dict[str, Kind] = {s.name: "shared" for s in (*program.weights, *program.inputs)}
    kinds |= {n.name: "shared" for n in program.nodes}
    early = weights_only(program) - {s.name for s in program.weights} if prologue else set()
    recorder = KernelRecorder(symbols)
    record(program, fakes, kinds, recorder, early)
    return recorder.kernels
