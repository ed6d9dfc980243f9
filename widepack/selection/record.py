"""Writes what was selected into the artifact."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

from ..inference.selection_record import KEY


def publish_record(path: str | PathLike[str], record: dict[str, Any], digest: str) -> str:
    """Publishes the record of a selection in an artifact. Weights and programs stay.

    Args:
        path: The artifact.
        record: The record.
        digest: The digest that the artifact must have.

    Returns: the new digest.

    Raises:
        ArtifactError: Another artifact was published in the meantime.
    """
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)  # the writer has the lock, so the artifact cannot change now
        writer.keep(reader.manifest.files)
        provenance = {**reader.manifest.provenance, KEY: record}
        return writer.publish(replace(reader.manifest, provenance=provenance)).digest
