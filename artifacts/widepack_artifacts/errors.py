"""The root of widepack's exceptions and the one that the format itself raises.

The whole tree is drawn in `widepack.errors`; only what the format needs stands here, because this shelf imports nothing of widepack.
"""

from __future__ import annotations

import re

# C0 and C1 but for tab and newline, and what turns the direction of text: it could hide or forge what stands around it.
DRIVES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """A text from a file as it may go to a terminal: characters that could drive it are written out, `\\x1b`."""
    return DRIVES.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class WidepackError(Exception):
    """Anything that widepack refuses: one paragraph that names what, where, both sides and the way out. Its text is `plain`, whatever a file has put into it."""

    exit_code = 1

    def __str__(self) -> str:
        return plain(super().__str__())


class ArtifactError(WidepackError):
    """An artifact that is damaged, incomplete, of an unknown version, or not what it says."""
