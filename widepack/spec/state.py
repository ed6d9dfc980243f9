"""Parses state requests. A state is a value that one call leaves for the next; the caller carries it.

| request | what it is | its new value |
|---|---|---|
| `cache` | a buffer that the member changes in eval mode | its value after the call |
| `h` | an input that the member changes in place | its value after the call |
| `h` | an input, where an output has the same name | that output |
| `h=1`, `h=state.hidden` | an input | the output of that name: positions and keys, joined by dots |

A name includes all leaves under it: `kv` names the inputs `kv.0` and `kv.1`. `decode:h=1` is for the entry
`decode` alone. Each state is an input and an output of the program, with one value for each member in every
pattern.
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
class StateRequest:
    """One `--state`. output: "" if none is named. entry: "" for all entries."""

    name: str
    output: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A state of one entry.

    input, output: the numbers of its leaves. how: `buffer`, `changed` (an input, in place) or `output`.
    """

    name: str
    input: int
    output: int
    how: str


def parse_states(texts: str | Sequence[str], entries: Sequence[str]) -> tuple[StateRequest, ...]:
    """Reads `cache`, `h=1`, `decode:h=state.hidden`. Raises: UsageError."""
    requests: list[StateRequest] = []
    for text in (texts,) if isinstance(texts, str) else texts:
        match = _FORM.match(text.strip()) if isinstance(text, str) else None
        if not match:
            raise UsageError(
                f"state {text!r}: write the name of a buffer or an input, --state cache;"
                " for an input with its output, --state h=h_new"
            )
        entry, name, output = match[1] or "", match[2], match[3] or ""
        if entry and entry not in entries:
            raise UsageError(
                f"state {text!r}: no entry is called {entry!r}; the entries are {', '.join(entries)}"
            )
        if any(a.name == name and (a.entry == entry or "" in (a.entry, entry)) for a in requests):
            raise UsageError(f"state {name} is given twice")
        requests.append(StateRequest(name, output, entry))
    return tuple(requests)


def under(name: str, leaf: str) -> bool:
    """Returns whether a leaf has this name or is under it: `kv` and `kv.0`."""
    return leaf == name or leaf.startswith(f"{name}.")


def matching(name: str, output: str, inputs: Mapping[int, str], outputs: Mapping[int, str]) -> dict[int, int]:
    """Returns the output leaf of each input leaf under `name`, matched by the rest of their names.

    An input leaf without an output leaf is left out.
    """
    by_name = {n: i for i, n in outputs.items()}
    matched = {}
    for i, leaf in inputs.items():
        if under(name, leaf) and (wanted := output + leaf[len(name) :]) in by_name:
            matched[i] = by_name[wanted]
    return matched


def without(tree: Tree, leaves: set[int]) -> Tree:
    """Returns a result without some leaves. A tuple or list with one remaining value becomes that value."""
    left = _without(tree, leaves)
    return {"const": None} if left is None else left


def _without(tree: Tree, leaves: set[int]) -> Tree | None:
    """Returns the tree without the leaves; None if nothing remains."""
    if not leaves & set(numbers_of(tree)):
        return tree
    ((form, value),) = tree.items()
    if form == "leaf":
        return None
    if form in ("tuple", "list"):
        parts = [p for t in value if (p := _without(t, leaves)) is not None]
        return None if not parts else parts[0] if len(parts) == 1 else {form: parts}
    rows = [
        [k, p] for k, t in (value[1] if form == "output" else value) if (p := _without(t, leaves)) is not None
    ]
    return None if not rows else {form: [value[0], rows]} if form == "output" else {form: rows}
