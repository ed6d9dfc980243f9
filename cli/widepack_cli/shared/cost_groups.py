"""Groups the rows of costs by layer, class, op or line, and folds layers that repeat. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from widepack_artifacts.costs import MEASURES, CostRow, Costs, Pair, added
from widepack_artifacts.formulas import Number

WAYS = ("layer", "class", "op", "line")
Key = tuple[tuple[str, str], ...]


@dataclass
class Group:
    """Some rows of costs. label: what they have in common. depth: of a layer in the tree of layers.

    paths: the paths of its layers; more than one if the layer repeats.
    """

    label: str
    class_name: str = ""
    depth: int = 0
    rows: list[CostRow] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """How often the layer occurs."""
        return max(1, len(self.paths))

    def costs(self) -> dict[str, Pair]:
        """Returns the sum of each measure that is not zero, as a pair of formulas."""
        measures = [m for m in MEASURES if any(m in r.costs for r in self.rows)]
        return {m: added(r.costs[m] for r in self.rows if m in r.costs) for m in measures}

    def numbers(self, costs: Costs, values: Mapping[str, Number]) -> dict[str, Number]:
        """Returns the sum of each measure at these values."""
        found: dict[str, Number] = dict.fromkeys(MEASURES, 0)
        for row in self.rows:
            for measure, pair in row.costs.items():
                found[measure] += costs.evaluate(pair, values)
        return found


def groups(costs: Costs, by: str) -> list[Group]:
    """Returns the groups in the order of the program. A layer has the rows of all layers inside it.

    by: one of `WAYS`.
    """
    if by == "layer":
        return _layers(costs)
    found: dict[str, Group] = {}
    for row in costs.rows:
        label = {"class": costs.classes.get(row.module, ""), "op": row.op, "line": row.source}[by] or "-"
        found.setdefault(label, Group(label)).rows.append(row)
    return list(found.values())


def _layers(costs: Costs) -> list[Group]:
    """Returns the tree of layers; layers that differ in numbers of their paths alone are one group."""
    root = Group(costs.model or "model", costs.classes.get("", ""))
    tree: dict[Key, Group] = {(): root}
    for row in costs.rows:
        root.rows.append(row)
        for key, path in _ancestors(row.module, costs.classes):
            group = tree.setdefault(key, Group(_folded(path), costs.classes.get(path, ""), len(key)))
            group.rows.append(row)
            group.paths[path] = None
    for group in tree.values():
        if len(group.paths) == 1:
            group.label = next(iter(group.paths))
    return [tree[key] for key in _in_order(tree)]


def _in_order(tree: Mapping[Key, Group]) -> list[Key]:
    """Returns the keys of a tree so that each layer is followed by those inside it, in the order of the
    program.
    """
    inside: dict[Key, list[Key]] = {}
    for key in tree:
        if key:
            inside.setdefault(key[:-1], []).append(key)
    order: list[Key] = []
    waiting: list[Key] = [()]
    while waiting:
        key = waiting.pop()
        order.append(key)
        waiting += reversed(inside.get(key, []))
    return order


def _ancestors(path: str, classes: Mapping[str, str]) -> list[tuple[Key, str]]:
    """Returns the layers around a path and itself, outermost first: the key in the tree, and the path.

    A container that is in no stack of calls, such as a ModuleList, has no class; its name joins the next one.
    """
    found: list[tuple[Key, str]] = []
    key: Key = ()
    parts = path.split(".") if path else []
    start = 0
    for end in range(1, len(parts) + 1):
        here = ".".join(parts[:end])
        if here not in classes and end < len(parts):
            continue
        key = (*key, (_folded(".".join(parts[start:end])), classes.get(here, "")))
        found.append((key, here))
        start = end
    return found


def _folded(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
