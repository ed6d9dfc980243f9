"""The root of widepack's exceptions and the one that the format itself raises.

The whole tree is drawn in `widepack.errors`; only what the format needs stands here, because this shelf imports nothing of widepack.
"""


class WidepackError(Exception):
    """Anything that widepack refuses: one paragraph that names what, where, both sides and the way out."""

    exit_code = 1


class ArtifactError(WidepackError):
    """An artifact that is damaged, incomplete, of an unknown version, or not what it says."""
