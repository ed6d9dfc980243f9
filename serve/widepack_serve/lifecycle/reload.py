"""Finds out which artifact is at a path."""

from __future__ import annotations

from widepack_artifacts.reader import Reader


def digest_of(path: str) -> str:
    """Returns the digest of the artifact at a path.

    Raises: ArtifactError for anything else.
    """
    return Reader(path).manifest.digest
