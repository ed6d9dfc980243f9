"""Names the format and its versions, and refuses versions that this package cannot read."""

from __future__ import annotations

from typing import Any

from .fields import manifest_error

FORMAT = "widepack.artifact"
VERSION = (1, 5)
"""The newest version that this package reads. A writer writes the lowest version that an artifact needs."""


def check_version(data: Any) -> None:
    """Refuses a document of another format or version.

    This is the first check of a manifest, because a change of a later version must not look like damage.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise manifest_error(f'this is not a widepack manifest: the key "format" should be {FORMAT!r}')
    version = data.get("version")
    if not (
        isinstance(version, list)
        and len(version) == 2
        and all(type(v) is int and 0 <= v < 2**31 for v in version)
    ):
        raise manifest_error(f"version: expected two numbers such as [1, 0], got {str(version)[:40]}")
    if tuple(version) > VERSION:
        raise manifest_error(
            f"format {version[0]}.{version[1]} is newer than {VERSION[0]}.{VERSION[1]}, "
            "the newest that this widepack reads; update widepack"
        )
    if tuple(version) < (1, 0):
        raise manifest_error(
            f"format {version[0]}.{version[1]} was never published; build the artifact again"
        )
