"""Members of an artifact, named by number or by name."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import UsageError


def numbers_of(names: Sequence[str], members: Sequence[int | str]) -> list[int]:
    """The numbers of the members that are named. names: of all members, in order. Raises: UsageError."""
    if isinstance(members, (str, int)):
        raise UsageError(f"members is {members!r}; give a list, for example [{members!r}]")
    if not members:
        raise UsageError(f"members names no member; the members are {', '.join(names[:20])}")
    found = []
    for m in members:
        if isinstance(m, bool) or not isinstance(m, (int, str)):
            raise UsageError(f"member {m!r} is a {type(m).__name__}; members are named by number or by name")
        if isinstance(m, str) and m not in names:
            raise UsageError(f"no member is called {m!r}; the members are {', '.join(names[:20])}")
        if not isinstance(m, str) and not 0 <= m < len(names):
            raise UsageError(f"member {m} of {len(names)}; members are numbered from 0")
        found.append(names.index(m) if isinstance(m, str) else m)
    if len(set(found)) != len(found):
        raise UsageError(f"a member is named twice: {', '.join(sorted({names[i] for i in found if found.count(i) > 1}))}")
    return found
