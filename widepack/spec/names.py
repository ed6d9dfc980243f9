"""Checks the names that callers give: paths of artifacts and checkpoints, numbers and names of members."""

from __future__ import annotations

import csv
import numbers
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widepack_artifacts.errors import some

from ..errors import UsageError

_SHOWN = 20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def path_of(path: Any, what: str = "path", wanted: str = "the artifact's folder") -> str | os.PathLike[str]:
    """Checks and returns a path.

    what: the name of the argument; wanted: what it must be; both for messages. Raises: UsageError.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{what} is a {type(path).__name__}; give {wanted}")
    if not os.fspath(path):
        raise UsageError(f"{what} is an empty text; give {wanted}")
    if isinstance(path, str) and _URL.match(path):
        raise UsageError(
            f"{what} is the URL {path[:200]!r}, and only local files are read and written; copy it to a local"
            f" path first, or from there afterwards, and give {wanted}"
        )
    return path


def checkpoint_of(path: Any, what: str = "checkpoint") -> str | os.PathLike[str]:
    """Checks and returns the path of a checkpoint. Raises: UsageError."""
    return path_of(path, what, "the path of a file or folder")


def number_of(names: Sequence[str], member: Any) -> int:
    """Returns the number of one member.

    names: of all members, in order. member: its name, or its number, of NumPy too. Raises: UsageError.
    """
    number = whole_number(member)
    if number is None and not isinstance(member, str):
        raise UsageError(
            f"member {member!r} is a {type(member).__name__}; members are named by number or by name"
        )
    if number is None:
        if member not in names:
            shown = some(names, _SHOWN)
            raise UsageError(
                f"no member is called {member!r}; the members are {shown}, or 0 to {len(names) - 1}"
            )
        return names.index(member)
    if not 0 <= number < len(names):
        raise UsageError(f"there is no member {number}; there are {len(names)}, numbered from 0")
    return number


def whole_number(value: Any) -> int | None:
    """Returns a whole number of Python or NumPy; None for another value, a bool too."""
    return int(value) if not isinstance(value, bool) and isinstance(value, numbers.Integral) else None


def number_in(names: Sequence[str], word: str) -> int:
    """Returns the number of the member that a word names, by its name or its number. Raises: UsageError."""
    return number_of(names, int(word) if word not in names and word.isascii() and word.isdecimal() else word)


def numbers_of(names: Sequence[str], members: Any) -> list[int]:
    """Returns the numbers of members.

    names: of all members, in order. members: numbers and names. Raises: UsageError.
    """
    if isinstance(members, (str, int)):
        raise UsageError(f"members is {members!r}; give a list, for example [{members!r}]")
    try:
        named = list(members)
    except TypeError:
        raise UsageError(f"members is a {type(members).__name__}; give a list of numbers and names") from None
    if not named:
        raise UsageError(f"members is empty; the members are {some(names, _SHOWN)}")
    member_numbers = [number_of(names, m) for m in named]
    if len(set(member_numbers)) != len(member_numbers):
        twice = ", ".join(sorted({names[i] for i in member_numbers if member_numbers.count(i) > 1}))
        raise UsageError(f"a member is named twice: {twice}")
    return member_numbers


def read_names(names: str | Path | Sequence[str], count: int) -> list[str]:
    """Reads the names of the members.

    names: a list, a text `A,B,...`, or the path of a file with one name on each line. count: the number of
    members.
    Raises: UsageError for a wrong number of names, a name that is not printable text, and a name that is used
    twice.
    """
    names = str(names) if isinstance(names, Path) else names
    if isinstance(names, str) and "," not in names and os.path.isfile(names):
        try:
            member_names = [
                line.strip()
                for line in Path(names).read_text(encoding="utf-8-sig").splitlines()
                if line.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"names: {names} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    else:
        member_names = (
            [name.strip() for name in names.split(",")]
            if isinstance(names, str)
            else [str(name) for name in names]
        )
    if len(member_names) != count:
        no_file = (
            f", and there is no file {names}"
            if isinstance(names, str) and "," not in names and not os.path.isfile(names)
            else ""
        )
        raise UsageError(
            f"{count} checkpoints and {len(member_names)} names; every member needs one checkpoint and one "
            f"name{no_file}"
        )
    for name in member_names:
        if not name or len(name) > 1000 or not name.isprintable():
            raise UsageError(
                f"names: {name[:60]!r} is not a name; a name is printable text of 1 to 1000 characters"
            )
    refuse_duplicates(member_names)
    return member_names


def refuse_duplicates(names: Sequence[str]) -> None:
    """Raises UsageError if two members have one name."""
    if len(set(names)) < len(names):
        twice = ", ".join(sorted(n for n, times in Counter(names).items() if times > 1))
        raise UsageError(f"the members' names must differ: {twice} is given twice")


def text_of_names(names: Sequence[str]) -> str:
    """Returns the text of which `names_in` reads names."""
    return ",".join(f'"{n}"' if "," in n else n for n in names)


def names_in(text: str, what: str) -> list[str]:
    """Returns the names of a text such as `a,b,"c,d"`: a name in quotes may have commas.

    Args:
        text: The names.
        what: What they name, for messages.

    Raises:
        UsageError: A quote has no end.
    """
    if text.count('"') % 2:
        raise UsageError(f'{what} are {text!r:.60}, where a quote has no end; write a,"b,c",d')
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
