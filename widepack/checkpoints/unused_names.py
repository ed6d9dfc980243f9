"""Finds the names in checkpoint files that no member uses, such as an average beside the weights.

A file whose names are the model's behind a prefix may have other names beside them, which are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from .checkpoint import Checkpoint
from .state_dict import COUNTER


def unused_names(checkpoints: Iterable[Checkpoint], ignore: Sequence[str] = ()) -> dict[str, int]:
    """Returns how many names of files were left out, by patterns such as `model_ema.*`.

    Args:
        checkpoints: The members' checkpoints, under the model's names.
        ignore: Patterns of names that the user ignores, which do not count.
    """
    used: set[str] = set()
    unused: dict[str, None] = {}
    for checkpoint in checkpoints:
        ours, others = checkpoint.stored_names()
        used.update(ours)
        unused.update(dict.fromkeys(n for n in others if n != COUNTER and not _ignored(n, ignore)))
    heads = {".".join(parts[:i]) for parts in (n.split(".") for n in used) for i in range(1, len(parts))}
    counts: dict[str, int] = {}
    for name in unused:
        pattern = _pattern(name.split("."), heads)
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts


def _ignored(name: str, ignore: Sequence[str]) -> bool:
    parts = name.split(".")
    forms = [".".join(parts[i:]) for i in range(len(parts))]  # a pattern may leave out a prefix
    return any(fnmatchcase(form, pattern) for pattern in ignore for form in forms)


def _pattern(parts: Sequence[str], heads: set[str]) -> str:
    """Returns the shortest beginning of a name that no name in use has, with `.*`; or the name."""
    for i in range(1, len(parts)):
        if (head := ".".join(parts[:i])) not in heads:
            return f"{head}.*"
    return ".".join(parts)


def unused_text(unused: Mapping[str, int]) -> str:
    """Returns the patterns with their counts: `model_ema.* (5 names)`."""
    return ", ".join(f"{p} ({count} name{'s' if count > 1 else ''})" for p, count in unused.items())
