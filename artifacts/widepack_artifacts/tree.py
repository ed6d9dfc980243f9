"""Checks and builds trees: the structure of inputs and outputs, with tensor leaves as numbers.

The forms are `{"leaf": 0}`, `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, tree], ...]}`,
`{"output": [name, [[key, tree], ...]]}` (a dataclass or mapping class, for example ModelOutput of
transformers), `{"const": value}` (None, bool, int, float, str). Leaves are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import DRIVES, ArtifactError

Tree = dict[str, Any]
MAX_NAME = 1_000
"""The limit of characters in a key or in the name of a class."""
_FORMS = ("leaf", "tuple", "list", "dict", "output", "const")


def check(tree: Any, leaves: int, depth: int = 0) -> None:
    """Refuses a value that is not a tree over `leaves` leaves. Raises: ArtifactError."""
    if depth > 32 or not isinstance(tree, dict) or len(tree) != 1:
        raise ArtifactError(f"tree: {str(tree)[:60]!r} is not a tree; known forms: {', '.join(_FORMS)}")
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
        raise ArtifactError(
            f"tree: {str(tree)[:60]!r} is not a tree over {leaves} leaves; known forms: {', '.join(_FORMS)}"
        )
    if not isinstance(rows, list):
        raise ArtifactError("tree: a dict is a list of [key, tree]")
    seen: set[str | int] = set()
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or type(row[0]) not in (str, int):
            raise ArtifactError(
                "tree: a dict is a list of [key, tree], its keys are strings or integers; "
                f"got {str(row)[:60]!r}"
            )
        if row[0] in seen:
            raise ArtifactError(f"tree: the key {str(row[0])[:60]!r} occurs twice in one dict")
        if isinstance(row[0], str):
            _check_name(row[0], "a key")
        seen.add(row[0])
        check(row[1], leaves, depth + 1)


def _check_name(name: str, what: str) -> None:
    if len(name) > MAX_NAME or DRIVES.search(name) or "\n" in name or "\t" in name:
        raise ArtifactError(
            f"tree: {what} has at most {MAX_NAME} characters, without control characters and marks of text "
            f"direction; got {name[:60]!r}"
        )


def build(tree: Tree, leaves: list[Any], output: Callable[[str, list[tuple[str, Any]]], Any]) -> Any:
    """Returns the tree with its leaves.

    `output(class name, [(key, value), ...])` makes the mapping classes.
    """
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


def taken(tree: Tree, value: Any) -> dict[int, Any]:
    """Returns the leaves of a value that `build` made, by number."""
    ((form, inner),) = tree.items()
    if form == "leaf":
        return {inner: value}
    if form == "const":
        return {}
    found: dict[int, Any] = {}
    if form in ("tuple", "list"):
        for part, one in zip(inner, value):
            found.update(taken(part, one))
        return found
    rows = inner if form == "dict" else inner[1]
    by_key = isinstance(value, Mapping)
    for place, (key, part) in enumerate(rows):
        found.update(taken(part, value[key] if by_key else value[place]))
    return found


def paths(tree: Tree, prefix: str = "") -> dict[int, str]:
    """Returns each leaf's path, for example `logits` or `boxes.0`.

    A tree of one leaf has the prefix as its path.
    """
    ((form, value),) = tree.items()
    if form == "leaf":
        return {value: prefix}
    if form == "const":
        return {}
    rows = list(enumerate(value)) if form in ("tuple", "list") else value[1] if form == "output" else value
    names: dict[int, str] = {}
    for key, part in rows:
        names.update(paths(part, f"{prefix}.{key}" if prefix else str(key)))
    return names


def leaves(tree: Tree) -> list[int]:
    """Returns the numbers of the leaves in the order of the tree.

    A leaf that occurs twice is listed twice.
    """
    ((form, value),) = tree.items()
    if form == "leaf":
        return [value]
    if form == "const":
        return []
    numbers: list[int] = []
    for part in (
        value if form in ("tuple", "list") else (t for _, t in (value[1] if form == "output" else value))
    ):
        numbers += leaves(part)
    return numbers


def numbers(tree: Tree) -> list[Any]:
    """Returns the literals of a tree, in order."""
    ((form, value),) = tree.items()
    if form == "const":
        return [value]
    rows = (
        value
        if form in ("tuple", "list")
        else []
        if form == "leaf"
        else [t for _, t in (value if form == "dict" else value[1])]
    )
    return [n for t in rows for n in numbers(t)]


def has_fields(tree: Tree) -> bool:
    """Returns whether a tree has an object with named fields."""
    ((form, value),) = tree.items()
    if form == "output":
        return True
    rows = value if form in ("tuple", "list") else [t for _, t in value] if form == "dict" else []
    return any(map(has_fields, rows))
