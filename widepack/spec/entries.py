"""Entries: methods of the member, each a program of its own over the same weights.

| what a user gives | with one entry | with several |
|---|---|---|
| input specs | `x=float32[B,3]` | `encode:x=float32[B,3]` for one of them; without a name for every one (specs.py) |
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
"""Of calls, those that an artifact has programs for: inputs that all members share, or one each; what is mixed is lowered when it is called."""


def entry_names(entries: str | Sequence[str] | None, taken: Collection[str]) -> tuple[str, ...]:
    """The entries of a build; `forward` alone where none is named. taken: names that a loaded model needs for itself. Raises: UsageError."""
    names = (FORWARD,) if entries is None else (entries,) if isinstance(entries, str) else tuple(entries)
    if not names:
        raise UsageError("entries is empty; name at least one method, or leave it out for forward")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise UsageError(f"entry {name!r} is no name of a method")
        if names.count(name) > 1:
            raise UsageError(f"entry {name} is given twice")
        if name in taken:
            raise UsageError(
                f"entry {name}: a loaded model has {name!r} for itself, so that ens.{name}(...) would not be the member's; "
                f"give the module a method of another name that calls it"
            )
    return names


def method_of(module: nn.Module, entry: str) -> Callable[..., Any]:
    """The module's method of this name. Raises: UsageError naming the public methods."""
    known = methods(type(module))
    if entry not in known:
        close = get_close_matches(entry, known, n=1)
        raise UsageError(
            f"entry {entry}: {type(module).__name__} has no public method of this name{f', did you mean {close[0]}?' if close else ';'} "
            f"its public methods are {', '.join(known)}"
        )
    found: Callable[..., Any] = getattr(module, entry)
    return found


def methods(kind: type) -> list[str]:
    """`forward`, and the public methods of a model's class that are not those of every nn.Module."""
    own = [n for n in dir(kind) if not n.startswith("_") and not hasattr(nn.Module, n) and inspect.isroutine(getattr(kind, n))]
    return [FORWARD, *own]


def of_entry(value: Any, entry: str, entries: Sequence[str], what: str) -> Any:
    """One entry's part of `sample`, `sample_kwargs` or `dynamic`, which `what` names. Raises: UsageError."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value and all(k in entries and (what == "sample" or isinstance(v, Mapping)) for k, v in value.items()):
        return value.get(entry)
    if len(entries) == 1:
        return value
    given = f"a dict with the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    raise UsageError(f"{what} is {given}; with the entries {', '.join(entries)} it is a dict with a key for each of them")
