"""Defines the root of widepack's exceptions, and the error of the artifact format.

`widepack.errors` shows the whole tree. Only these two classes are here, because this package does not import
widepack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Control characters (C0 and C1) except tab and newline, and characters that change the direction of text.
# They could
# hide or forge the text around them.
DRIVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Returns a text from a file in a form that is safe for a terminal: control characters become escapes,
    `\\x1b`.
    """
    return DRIVES.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class WidepackError(Exception):
    """The root of widepack's errors: the message names what, where, both sides and the way out.

    Its text is `plain`, because it may quote an untrusted file.

    Example:
        >>> try:
        ...     ens = widepack.load("ens.wide")
        ... except widepack.WidepackError as e:
        ...     raise SystemExit(e.exit_code) from e
    """

    exit_code = 1

    def __str__(self) -> str:
        return plain(super().__str__())


class ArtifactError(WidepackError):
    """An artifact that is damaged, incomplete, inconsistent, or of an unknown version.

    Example:
        >>> try:
        ...     widepack.load("ckpts")
        ... except widepack.ArtifactError as e:
        ...     print(e)
    """


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
