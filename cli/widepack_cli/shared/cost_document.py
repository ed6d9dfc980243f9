"""Makes the JSON document of `widepack analyze`: formulas, and numbers where sizes are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from widepack_artifacts.costs import Costs
from widepack_artifacts.formulas import Number

from .cost_groups import Group


def document(
    costs: Costs, found: Sequence[Group], by: str, values: Mapping[str, Number] | None
) -> dict[str, Any]:
    """Returns the document. found: the groups of rows. by: what a group is. values: of names in formulas."""
    return {
        "costs": costs.to_json(),
        "lower_bound": costs.lower_bound,
        "at": None if values is None else _numbers(values),
        "numbers": None if values is None else _numbers(costs.at(values)),
        "by": by,
        "groups": [_group(g, costs, values) for g in found],
    }


def _group(group: Group, costs: Costs, values: Mapping[str, Number] | None) -> dict[str, Any]:
    return {
        "label": group.label,
        "class": group.class_name,
        "depth": group.depth,
        "repeats": group.repeats,
        "costs": {measure: list(pair) for measure, pair in group.costs().items()},
        "numbers": None if values is None else _numbers(group.numbers(costs, values)),
    }


def _numbers(values: Mapping[str, Number]) -> dict[str, int | float]:
    return {name: n if isinstance(n, int) else float(n) for name, n in values.items()}
