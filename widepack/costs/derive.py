"""Derives the costs of a program: one row for each op of a module, totals, and the peak.

The kinds of the values split every measure of a member program: what only Shared values take is paid once,
everything else for each member. So the number of members is a symbol without running anything for N members.
A wide program is made for two numbers of members, and every measure is a line through both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from widepack_artifacts.costs import MASKED, MEASURES, CostRow, Costs, Pair
from widepack_artifacts.guards import of_small_sizes
from widepack_artifacts.program import Kind, Program

from ..spec.dtypes import dtype_of
from .amounts import Amounts, main_dtype, member_amounts, totals_of, wide_amounts


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known of a model beside its program.

    sizes: an example size of each dim, at least 2, at which the guards hold. model: its name. dims: the least
    and largest size of each dim; default any size. guards: conditions on the dims. modules: the path of the
    module of each node of the member program. classes: the class of each module, by its path.
    """

    sizes: Mapping[str, int]
    model: str = ""
    dims: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    guards: Iterable[Any] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)


def derive(program: Program, slots: Mapping[str, Kind], facts: ModelFacts) -> Costs:
    """Derives the costs of a member program.

    Args:
        program: The member program.
        slots: The kinds of weights and inputs, by name.
        facts: What is known of the model beside its program.

    Returns:
        The costs as a document of formulas.

    Raises:
        LoweringError: An op fixes a dim to a number.
        WidepackError: A size has no formula.
    """
    found = member_amounts(program, slots, facts.sizes, facts.modules)
    return _document(found, main_dtype(program), facts)


def derive_wide(programs: Mapping[int, Program], facts: ModelFacts) -> Costs:
    """Derives the costs of a wide program for any number of members.

    Args:
        programs: The wide programs for two numbers of members, made by one plan.
        facts: What is known of the model beside its program.

    Returns:
        The costs as a document of formulas.

    Raises:
        LoweringError: An op fixes a dim to a number.
        WidepackError: A size has no formula, or the two programs have different nodes.
    """
    found = wide_amounts(programs, facts.sizes, facts.modules)
    return _document(found, main_dtype(next(iter(programs.values()))), facts)


def _document(found: Amounts, dtype: str, facts: ModelFacts) -> Costs:
    symbols = found.symbols
    members = "members" if "N" in facts.sizes else "N"
    count = sympy.Symbol(members, integer=True, positive=True)

    def texts(pair: list[Any]) -> Pair:
        return symbols.text(sympy.expand(pair[0])), symbols.text(sympy.expand(pair[1]))

    def rows() -> Iterator[CostRow]:
        for (path, op, source), costs in found.rows.items():
            pairs = {m: texts(costs[m]) for m in MEASURES if m in costs}
            yield CostRow(path, op, source, {m: t for m, t in pairs.items() if t != ("0", "0")})

    totals = {m: texts(totals_of(found.rows.values(), m)) for m in MEASURES}
    if totals[MASKED] == ("0", "0"):
        del totals[MASKED]
    return Costs(
        model=facts.model,
        torch=torch.__version__.partition("+")[0],
        dtype=dtype,
        element_bytes=dtype_of(dtype).itemsize,
        members=members,
        dims={d: facts.dims.get(d, (1, None)) for d in facts.sizes},
        guards=tuple(g for g in facts.guards if not of_small_sizes(g)),
        weights=texts(found.weights),
        parameters=texts(found.parameters),
        modules=dict(facts.modules),
        classes=dict(facts.classes),
        rows=tuple(rows()),
        totals=totals,
        peak=symbols.longest(s + count * m for s, m in found.states),
        uncounted=found.uncounted,
    )
