"""Trees of inputs and outputs as data: tuples, lists, dicts, None, literals and tensor leaves, by number.

`{"leaf": 0}`, `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, tree], ...]}`, `{"output": [name, [[key, tree], ...]]}` (a dataclass or mapping
class such as transformers' ModelOutput), `{"const": value}` (None, bool, int, float, str). Numbers of leaves run in order from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ArtifactError

Tree = dict[str, Any]
_FORMS = ("leaf", "tuple", "list", "dict", "output", "const")


def check(tree: Any, leaves: int, depth: int = 0) -> None:
    """Refuse what is no tree over `leaves` leaves. Raises: ArtifactError."""
    if depth > 32 or not isinstance(tree, dict) or len(tree) != 1:
        raise ArtifactError(f"tree: {str(tree)[:60]!r} is no tree; known forms: {', '.join(_FORMS)}")
    ((form, value),) = tree.items()
    if form == "leaf" and type(value) is int and 0 <= value < leaves:
        return
    if form == "const" and (value is None or isinstance(value, (bool, int, float, str))):
        return
    if form in ("tuple", "list") and isinstance(value, list):
        for part in value:
            check(part, leaves, depth + 1)
        return
    rows = value
    if form == "output" and isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        rows = value[1]
    elif form != "dict":
        raise ArtifactError(f"tree: {str(tree)[:60]!r} is no tree over {leaves} leaves; known forms: {', '.join(_FORMS)}")
    if not isinstance(rows, list):
        raise ArtifactError("tree: a dict is a list of [key, tree]")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], (str, int)):
            raise ArtifactError("tree: a dict is a list of [key, tree]")
        check(row[1], leaves, depth + 1)


def build(tree: Tree, leaves: list[Any], output: Callable[[str, list[tuple[str, Any]]], Any]) -> Any:
    """The tree with its leaves put in; `output(class name, [(key, value), ...])` makes the mapping classes."""
    ((form, value),) = tree.items()
    if form == "leaf":
        return leaves[value]
    if form == "const":
        return value
    if form == "tuple":
        return tuple(build(t, leaves, output) for t in value)
    if form == "list":
        return [build(t, leaves, output) for t in value]
    if form == "dict":
        return {k: build(t, leaves, output) for k, t in value}
    return output(value[0], [(k, build(t, leaves, output)) for k, t in value[1]])


def paths(tree: Tree, prefix: str = "") -> dict[int, str]:
    """Each leaf's name as a person writes it: `logits`, `boxes.0`; a lone leaf has the prefix, or an empty name."""
    ((form, value),) = tree.items()
    if form == "leaf":
        return {value: prefix}
    if form == "const":
        return {}
    rows = list(enumerate(value)) if form in ("tuple", "list") else value[1] if form == "output" else value
    found: dict[int, str] = {}
    for key, part in rows:
        found.update(paths(part, f"{prefix}.{key}" if prefix else str(key)))
    return found


def numbers(tree: Tree) -> list[Any]:
    """The literals of a tree, in order."""
    ((form, value),) = tree.items()
    if form == "const":
        return [value]
    rows = value if form in ("tuple", "list") else [] if form == "leaf" else [t for _, t in (value if form == "dict" else value[1])]
    return [n for t in rows for n in numbers(t)]
