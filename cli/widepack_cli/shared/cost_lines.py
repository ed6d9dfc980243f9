"""Writes costs as lines of text: totals as formulas and numbers, then a table of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from widepack_artifacts import guards
from widepack_artifacts.costs import MASKED, Costs, Pair
from widepack_artifacts.formulas import Number
from widepack_bench.text import columns, duration, plural, size

from .cost_groups import Group
from .cost_times import LeastTime, Roofline

_WIDTH = 88  # characters of a formula in a table
_SHORT = 44
_TITLES = {
    "flops": "FLOP",
    MASKED: "FLOP that masks forbid",
    "ops": "other operations",
    "weights": "weights",
    "weights_read": "weights read",
    "acts_read": "activations read",
    "acts_written": "activations written",
    "intermediates": "intermediates",
    "peak": "peak of activations",
    "kernels": "kernels",
}
_COUNTS = ("flops", MASKED, "ops", "kernels")


def title(costs: Costs, subject: str, entry: str) -> list[str]:
    """Returns what the model is, and where its formulas hold."""
    shared, member = costs.parameters
    counted = f"{_number(member)} parameters a member" + (
        f", {_number(shared)} that all share" if shared != "0" else ""
    )
    named = "" if entry == "forward" else f", entry {entry}"
    first = f"{subject}: {costs.model}{named}, {costs.dtype}, {counted}"
    conditions = [costs.domain(), *map(guards.text, costs.guards)]
    return [first, f"holds for {'; '.join(filter(None, conditions)) or 'every call'}"]


def totals(costs: Costs, values: Mapping[str, Number] | None) -> list[str]:
    """Returns the totals, one a line: the formula over N members and, where values are given, the number.

    What masks forbid has a line if they forbid anything.
    """
    numbers = costs.at(values) if values is not None else {}
    sign = ">= " if costs.lower_bound else ""
    rows = []
    for measure, name in _TITLES.items():
        if measure == MASKED and MASKED not in costs.totals:
            continue
        text = {"weights": joined(costs.weights, costs.members), "peak": costs.peak}.get(measure)
        if text is None:
            text = joined(costs.totals.get(measure, ("0", "0")), costs.members)
        bound = "" if measure in ("weights", "peak") else sign
        row = [name, bound + quantity(measure, numbers[measure])] if numbers else [name]
        rows.append([*row, _cut(("" if numbers else bound) + text, _WIDTH)])
    return columns([["a call", *(["number"] if numbers else []), "formula"], *rows])


def table(
    costs: Costs,
    found: Sequence[Group],
    values: Mapping[str, Number] | None,
    by: str,
    roofline: Roofline | None = None,
) -> list[str]:
    """Returns the table of groups: numbers where values are given, else formulas.

    roofline: gives the times on a device.
    """
    layers = by == "layer"
    head = [by, *(["class", "n"] if layers else [])]
    names = [[_label(g), *([g.class_name, str(g.repeats)] if layers else [])] for g in found]
    if values is None:
        rows = [_formula_cells(g.costs(), costs.members) for g in found]
        return columns([[*head, "FLOP", "weights read"], *([*n, *r] for n, r in zip(names, rows))])
    whole = max(costs.at(values)["flops"], 1)
    cells = []
    for group in found:
        n = group.numbers(costs, values)
        share = f"{float(100 * n['flops'] / whole):.1f}"
        cells.append(
            [
                f"{n['flops']:,}",
                share,
                quantity("weights_read", n["weights_read"]),
                quantity("acts_read", n["acts_read"] + n["acts_written"]),
                f"{n['kernels']:,}",
                *([] if roofline is None else _time_cells(roofline.time(group.rows))),
            ]
        )
    titles = [*head, "FLOP", "%", "weights read", "activations read and written", "kernels"]
    titles += [] if roofline is None else ["least time", "bound by"]
    return columns([titles, *([*n, *c] for n, c in zip(names, cells))])


def device_lines(costs: Costs, roofline: Roofline) -> list[str]:
    """Returns the limits of a device and the least time of a call on it."""
    device, whole = roofline.device, roofline.time(costs.rows)
    compute, bandwidth = device.flops[costs.dtype] / 1e12, device.bandwidth / 1e9
    share = 100 * whole.compute / whole.seconds if whole.seconds else 0.0
    return [
        f"{device.name}: {compute:,.3g} TFLOP/s in {costs.dtype}, {bandwidth:,.4g} GB/s, {device.source}",
        f"a call takes at least {duration(1000 * whole.seconds)}: kernels that compute bounds take "
        f"{share:.0f}%, kernels that bytes bound {100 - share:.0f}%",
    ]


def _time_cells(time: LeastTime) -> list[str]:
    return [duration(1000 * time.seconds) if time.seconds else "0", time.bound if time.seconds else ""]


def uncounted(costs: Costs) -> list[str]:
    """Returns which ops have no formula; no lines if all have one."""
    if not costs.uncounted:
        return []
    ops = ", ".join(f"{op} ({plural(n, 'call')})" for op, n in costs.uncounted.items())
    return [
        f"not counted: {ops}",
        "Totals with >= leave them out. @widepack.primitives.formula gives an op its formula.",
    ]


def joined(pair: Pair, members: str) -> str:
    """Returns `shared + N*(member)` as one formula."""
    shared, member = pair
    if member == "0":
        return shared
    each = f"{members}*({member})" if " " in member else f"{members}*{member}"
    return each if shared == "0" else f"{shared} + {each}"


def quantity(measure: str, number: Number) -> str:
    """Formats a number of a measure: counts with all digits, bytes with three."""
    if measure in _COUNTS or isinstance(number, Fraction):
        return f"{number:,}" if isinstance(number, int) else f"{float(number):,.1f}"
    return size(number)


def _formula_cells(costs: Mapping[str, Pair], members: str) -> list[str]:
    return [_cut(joined(costs.get(m, ("0", "0")), members), _SHORT) for m in ("flops", "weights_read")]


def _label(group: Group) -> str:
    return "  " * group.depth + group.label


def _number(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
