"""Makes the JSON document of `widepack analyze`: formulas, and numbers where sizes are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from widepack_artifacts.costs import Costs
from widepack_artifacts.formulas import Number

from .cost_groups import Group
from .cost_times import Roofline


def document(
    costs: Costs,
    found: Sequence[Group],
    by: str,
    values: Mapping[str, Number] | None,
    roofline: Roofline | None,
) -> dict[str, Any]:
    """Returns the document. found: the groups of rows. by: what a group is. values: of names in formulas.
    roofline: gives the times on a device.
    """
    return {
        "costs": costs.to_json(),
        "lower_bound": costs.lower_bound,
        "at": None if values is None else _numbers(values),
        "numbers": None if values is None else _numbers(costs.at(values)),
        "device": None if roofline is None else _device(costs, roofline),
        "by": by,
        "groups": [_group(g, costs, values, roofline) for g in found],
    }


def _device(costs: Costs, roofline: Roofline) -> dict[str, Any]:
    device = roofline.device
    return {
        "name": device.name,
        "flop_per_s": device.flops[costs.dtype],
        "bytes_per_s": device.bandwidth,
        "source": device.source,
        "least_s": roofline.time(costs.rows).seconds,
    }


def _group(
    group: Group, costs: Costs, values: Mapping[str, Number] | None, roofline: Roofline | None
) -> dict[str, Any]:
    time = None if roofline is None else roofline.time(group.rows)
    return {
        "label": group.label,
        "class": group.class_name,
        "depth": group.depth,
        "repeats": group.repeats,
        "costs": {measure: list(pair) for measure, pair in group.costs().items()},
        "numbers": None if values is None else _numbers(group.numbers(costs, values)),
        "least_s": None if time is None else time.seconds,
        "bound_by": None if time is None else time.bound,
    }


def _numbers(values: Mapping[str, Number]) -> dict[str, int | float]:
    return {name: n if isinstance(n, int) else float(n) for name, n in values.items()}
