"""What callers name: artifacts and checkpoints by path, members by number or by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError

_SHOWN = 20


def path_of(path: Any, what: str = "path", wanted: str = "the artifact's folder") -> str | os.PathLike[str]:
    """A path that a caller gives. what: the argument, wanted: what it has to be, for messages. Raises: UsageError for what is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{what} is a {type(path).__name__}; give {wanted}")
    if not os.fspath(path):
        raise UsageError(f"{what} is an empty text; give {wanted}")
    return path


def checkpoint_of(path: Any, what: str = "checkpoint") -> str | os.PathLike[str]:
    """The path of a checkpoint. Raises: UsageError for what is no path."""
    return path_of(path, what, "the path of a file or folder")


def number_of(names: Sequence[str], member: Any) -> int:
    """The number of one member. names: of all members, in order. Raises: UsageError."""
    if isinstance(member, bool) or not isinstance(member, (int, str)):
        raise UsageError(f"member {member!r} is a {type(member).__name__}; members are named by number or by name")
    if isinstance(member, str):
        if member not in names:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise UsageError(f"no member is called {member!r}; the members are {shown}, or 0 to {len(names) - 1}")
        return names.index(member)
    if not 0 <= member < len(names):
        raise UsageError(f"member {member} of {len(names)}; members are numbered from 0")
    return member


def number_in(names: Sequence[str], word: str) -> int:
    """The number of the member that a word names: its name, or its number where no member is called so. Raises: UsageError."""
    return number_of(names, int(word) if word not in names and word.isascii() and word.isdecimal() else word)


def numbers_of(names: Sequence[str], members: Any) -> list[int]:
    """The numbers of the members that are named. names: of all members, in order. members: numbers and names. Raises: UsageError."""
    if isinstance(members, (str, int)):
        raise UsageError(f"members is {members!r}; give a list, for example [{members!r}]")
    try:
        named = list(members)
    except TypeError:
        raise UsageError(f"members is a {type(members).__name__}; give a list of numbers and names") from None
    if not named:
        raise UsageError(f"members names no member; the members are {', '.join(names[:_SHOWN])}")
    found = [number_of(names, m) for m in named]
    if len(set(found)) != len(found):
        raise UsageError(f"a member is named twice: {', '.join(sorted({names[i] for i in found if found.count(i) > 1}))}")
    return found
