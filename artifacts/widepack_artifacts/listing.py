"""Lists names and findings in messages: the first ones, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable


def some(texts: Iterable[object], most: int = 8, between: str = ", ") -> str:
    """Returns the first of many texts: `a, b, c and 17 more`. It never ends in `and 1 more`.

    Args:
        texts: The texts.
        most: How many of them, or one more.
        between: What is between two, such as `; ` or a line break.
    """
    found = [str(text) for text in texts]
    if len(found) <= most + 1:
        return between.join(found)
    last = f"and {len(found) - most} more"
    return f"{between.join(found[:most])}{' ' if between == ', ' else between}{last}"
