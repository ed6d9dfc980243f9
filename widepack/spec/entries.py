"""Finds the entries of a build: methods of the member that become programs over the same weights.

| what a user gives | with one entry | with several |
|---|---|---|
| input specs | `x=float32[B,3]` | `encode:x=float32[B,3]` for one entry; without a name for all |
| `sample`, `sample_kwargs`, `dynamic` | as the method takes them | `{entry: as the method takes them}` |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from ..errors import UsageError

FORWARD = "forward"
PATTERNS = ("shared", "each")
"""The patterns that an artifact has programs for. Mixed patterns are lowered when they are first called."""


def entry_names(entries: str | Sequence[str] | None, taken: Collection[str]) -> tuple[str, ...]:
    """Returns the entries of a build; default `forward`.

    taken: names that a loaded model itself uses. Raises: UsageError.
    """
    names = (FORWARD,) if entries is None else (entries,) if isinstance(entries, str) else tuple(entries)
    if not names:
        raise UsageError("entries is empty; name at least one method, or leave it out for forward")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise UsageError(f"entry {name!r} is not the name of a method")
        if names.count(name) > 1:
            raise UsageError(f"entry {name} is given twice")
        if name in taken:
            raise UsageError(
                f"entry {name}: a loaded model itself has {name!r}, so ens.{name}(...) would not call the "
                "member's; give the module a method of another name that calls it"
            )
    return names


def method_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """Returns the module's method of this name. Raises: UsageError that names the public methods."""
    known = methods(type(module))
    if entry not in known:
        close = get_close_matches(entry, known, n=1)
        guess = f", did you mean {close[0]}?" if close else ";"
        raise UsageError(
            f"entry {entry}: {type(module).__name__} has no public method of this name{guess}"
            f" its public methods are {', '.join(known)}"
        )
    method: Callable[..., Any] = getattr(module, entry)
    return method


def callable_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """Returns what a user calls: for forward the module itself, which has hooks. Raises: UsageError."""
    return module if entry == FORWARD else method_of(module, entry)


def methods(kind: type) -> list[str]:
    """Returns `forward`, and the public methods of a class that nn.Module does not have."""
    own = [
        n
        for n in dir(kind)
        if not n.startswith("_") and not hasattr(nn.Module, n) and inspect.isroutine(getattr(kind, n))
    ]
    return [FORWARD, *own]


def of_entry(value: Any, entry: str, entries: Sequence[str], what: str) -> Any:
    """Returns one entry's part of `sample`, `sample_kwargs` or `dynamic`. what: its name.

    Raises: UsageError.
    """
    if value is None:
        return None
    if (
        isinstance(value, Mapping)
        and value
        and all(k in entries and (what == "sample" or isinstance(v, Mapping)) for k, v in value.items())
    ):
        return value.get(entry)
    if len(entries) == 1:
        return value
    given = (
        f"a dict with the keys {', '.join(map(str, value))}"
        if isinstance(value, Mapping)
        else f"a {type(value).__name__}"
    )
    raise UsageError(
        f"{what} is {given}; with the entries {', '.join(entries)} it is a dict with a key for each of them"
    )
