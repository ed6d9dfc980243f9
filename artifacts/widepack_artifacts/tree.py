"""Trees of inputs and outputs as data: tuples, lists, dicts, None, literals and tensor leaves, by number.

`{"leaf": 0}`, `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, tree], ...]}`, `{"output": [name, [[key, tree], ...]]}` (a dataclass or mapping
class such as transformers' ModelOutput), `{"const": value}` (None, bool, int, float, str). Numbers of leaves run in order from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import DRIVES, ArtifactError

Tree = dict[str, Any]
MAX_NAME = 1_000
"""Characters of a key, or of the name of a class."""
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
        _check_name(value[0], "the name of a class")
        rows = value[1]
    elif form != "dict":
        raise ArtifactError(f"tree: {str(tree)[:60]!r} is no tree over {leaves} leaves; known forms: {', '.join(_FORMS)}")
    if not isinstance(rows, list):
        raise ArtifactError("tree: a dict is a list of [key, tree]")
    seen: set[str | int] = set()
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or type(row[0]) not in (str, int):
            raise ArtifactError(f"tree: a dict is a list of [key, tree], its keys are strings or integers; got {str(row)[:60]!r}")
        if row[0] in seen:
            raise ArtifactError(f"tree: the key {str(row[0])[:60]!r} stands twice in one dict")
        if isinstance(row[0], str):
            _check_name(row[0], "a key")
        seen.add(row[0])
        check(row[1], leaves, depth + 1)


def _check_name(name: str, what: str) -> None:
    if len(name) > MAX_NAME or DRIVES.search(name) or "\n" in name or "\t" in name:
        raise ArtifactError(
            f"tree: {what} has at most {MAX_NAME} characters, none of which drives a terminal or turns the direction of text; got {name[:60]!r}"
        )


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


def leaves(tree: Tree) -> list[int]:
    """The numbers of the leaves as they stand in the tree, one that stands twice twice."""
    ((form, value),) = tree.items()
    if form == "leaf":
        return [value]
    if form == "const":
        return []
    found: list[int] = []
    for part in value if form in ("tuple", "list") else (t for _, t in (value[1] if form == "output" else value)):
        found += leaves(part)
    return found


def numbers(tree: Tree) -> list[Any]:
    """The literals of a tree, in order."""
    ((form, value),) = tree.items()
    if form == "const":
        return [value]
    rows = value if form in ("tuple", "list") else [] if form == "leaf" else [t for _, t in (value if form == "dict" else value[1])]
    return [n for t in rows for n in numbers(t)]
