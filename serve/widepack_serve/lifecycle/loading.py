"""Loads artifacts, and runs a first call of each model."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

import widepack
from widepack.errors import WidepackError
from widepack.inference.model import WideModel
from widepack.spec.entries import PATTERNS
from widepack_artifacts.reader import Reader

from ..catalog.catalog import served_artifact
from ..catalog.layout import EntryLayout, zeros
from ..catalog.outputs import Defaults
from ..catalog.served import ServedArtifact
from ..settings import Settings

log = logging.getLogger("widepack.serve")


def digest_of(path: str) -> str:
    """Returns the digest of the artifact at a path. Raises: ArtifactError for anything else."""
    return Reader(path).manifest.digest


def loaded(settings: Settings, path: str) -> WideModel:
    """Loads an artifact with the options of a server. Raises: WidepackError."""
    return widepack.load(
        path,
        device=settings.device,
        backend=settings.backend,
        dtype=settings.dtype,
        memory=settings.memory,
        weights=settings.weights,
        max_error=settings.max_error,
        graph=settings.graph,
        threads=settings.threads,
    )


def ready_artifact(name: str, model: WideModel, settings: Settings) -> ServedArtifact:
    """Describes a loaded model for the wire, and makes first calls, so that no request waits for programs.

    Raises: WidepackError.
    """
    artifact = served_artifact(
        name, model, Defaults(settings.outputs, settings.of, settings.dim, settings.calibrated)
    )
    for entry, reason in artifact.left_out.items():
        log.warning("entry %s of %s is not served: %s", entry, name, reason)
    for layout in artifact.layouts.values():
        if not layout.batch:
            log.info("%s: requests of %s do not share batches: %s", name, layout.entry.name, layout.reason)
        _warm(artifact, layout, settings.max_batch)
    return artifact


def _warm(artifact: ServedArtifact, layout: EntryLayout, max_batch: int) -> None:
    """Binds all programs, which `each` and padded rows of several members run too, and runs calls of zeros:
    with one row, with a full batch, and with the batch of each graph. A model may refuse the calls, which is
    no error.
    """
    if not layout.ragged:
        layout.entry.warmup(PATTERNS)
    for rows in _sizes(layout, max_batch):
        given = [x.to(artifact.model.device) for x in zeros(layout, rows, None)]
        args, kwargs, state = layout.entry.tensor_calls.arguments(given)
        try:
            if not state:
                layout.entry(*args, **kwargs)
            if layout.batch:
                members = len(artifact.members)
                layout.entry.route(*args, member=[i % members for i in range(rows)], **kwargs)
        except (WidepackError, torch.OutOfMemoryError) as e:
            log.info("%s: a first call with %d rows was refused: %s", artifact.name, rows, e)


def _sizes(layout: EntryLayout, max_batch: int) -> Iterator[int]:
    most = max_batch if layout.most_rows is None else min(max_batch, layout.most_rows)
    found = {layout.least_rows}
    if layout.batch and most > layout.least_rows:
        graphs = {size for use in layout.entry.graph_use() for size in use.sizes}
        found |= {most} | {size for size in graphs if layout.least_rows < size < most}
    yield from sorted(found)
