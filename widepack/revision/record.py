"""Publishes a record in the provenance of an artifact. Weights and programs stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer


def publish_record(path: str | PathLike[str], key: str, record: Mapping[str, Any], digest: str) -> str:
    """Publishes a record by one rename of the manifest, in the place of an older one.

    Args:
        path: The artifact.
        key: Of the provenance.
        record: The record.
        digest: The digest that the artifact must have.

    Returns: the new digest.

    Raises:
        ArtifactError: Another artifact was published in the meantime.
    """
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)  # the writer has the lock, so the artifact cannot change now
        writer.keep(reader.manifest.files)
        provenance = {**reader.manifest.provenance, key: dict(record)}
        return writer.publish(replace(reader.manifest, provenance=provenance)).digest
