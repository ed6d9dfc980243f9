"""State: values that one call leaves for the next, carried by the caller.

| asked for | what it is | its new value |
|---|---|---|
| `cache` | a buffer that the member changes in eval mode | what the member left in it |
| `h` | an input that the member changes in place | what it left there |
| `h` | an input, where an output has the same name | that output |
| `h=1`, `h=state.hidden` | an input | the output of that name: a number for a place in a tuple, keys and numbers joined by dots |

A name holds for all that is under it: `kv` for the inputs `kv.0`, `kv.1`. `decode:h=1` is asked of the entry `decode` alone. Each is an input and an output of
the program, one a member whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from widepack_artifacts.tree import Tree
from widepack_artifacts.tree import leaves as numbers_of

from ..errors import UsageError

BUFFER, CHANGED, OUTPUT = "buffer", "changed", "output"
_FORM = re.compile(r"(?:([A-Za-z_]\w*):)?([^\s=:]+)(?:=([^\s=:]+))?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Asked:
    """What `--state` names. output: "" where none is given. entry: "" for every entry."""

    name: str
    output: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Carried:
    """A state of one entry. input, output: numbers of its leaves. how: `buffer`, `changed` (an input, in place) or `output`."""

    name: str
    input: int
    output: int
    how: str


def parse_states(texts: str | Sequence[str], entries: Sequence[str]) -> tuple[Asked, ...]:
    """Read `cache`, `h=1`, `decode:h=state.hidden`. Raises: UsageError."""
    asked: list[Asked] = []
    for text in (texts,) if isinstance(texts, str) else texts:
        found = _FORM.match(text.strip()) if isinstance(text, str) else None
        if not found:
            raise UsageError(f"state {text!r}: write the name of a buffer or an input, --state cache; for an input with its output, --state h=h_new")
        entry, name, output = found[1] or "", found[2], found[3] or ""
        if entry and entry not in entries:
            raise UsageError(f"state {text!r}: no entry is called {entry!r}; the entries are {', '.join(entries)}")
        if any(a.name == name and (a.entry == entry or "" in (a.entry, entry)) for a in asked):
            raise UsageError(f"state {name} is given twice")
        asked.append(Asked(name, output, entry))
    return tuple(asked)


def under(name: str, leaf: str) -> bool:
    """Whether a leaf is what the name says, or under it: `kv` and `kv.0`."""
    return leaf == name or leaf.startswith(f"{name}.")


def matching(name: str, output: str, inputs: Mapping[int, str], outputs: Mapping[int, str]) -> dict[int, int]:
    """The output leaf of each input leaf under `name`, by what stands behind the names; an input without one is left out."""
    by_name = {n: i for i, n in outputs.items()}
    found = {}
    for i, leaf in inputs.items():
        if under(name, leaf) and (wanted := output + leaf[len(name) :]) in by_name:
            found[i] = by_name[wanted]
    return found


def without(tree: Tree, leaves: set[int]) -> Tree:
    """A result without some leaves: they leave their tuple, list or dict; of a tuple or list of which one value is left, that value."""
    left = _without(tree, leaves)
    return {"const": None} if left is None else left


def _without(tree: Tree, leaves: set[int]) -> Tree | None:
    """None where nothing is left of what held such leaves alone."""
    if not leaves & set(numbers_of(tree)):
        return tree
    ((form, value),) = tree.items()
    if form == "leaf":
        return None
    if form in ("tuple", "list"):
        parts = [p for t in value if (p := _without(t, leaves)) is not None]
        return None if not parts else parts[0] if len(parts) == 1 else {form: parts}
    rows = [[k, p] for k, t in (value[1] if form == "output" else value) if (p := _without(t, leaves)) is not None]
    return None if not rows else {form: [value[0], rows]} if form == "output" else {form: rows}
