"""Reads private parts of loaded models. No other test file names them, so that a change of them changes only
this file.
"""

from __future__ import annotations

from widepack.inference.binder import Binder
from widepack.inference.entry import WideEntry
from widepack.inference.model import WideModel
from widepack.inference.open_artifact import OpenArtifact
from widepack.system.gate import Gate

WRITE_CHANGES = "_put"
"""The method of `WeightChanges` that writes or restores weights."""


def callers_inside(gate: Gate) -> dict[int, bool]:
    """Returns the threads that are inside a gate."""
    return gate._inside


def artifact_of(ens: WideModel) -> OpenArtifact:
    """Returns the open artifact of a loaded model."""
    return ens._artifact


def binder_of(entry: WideEntry) -> Binder:
    """Returns the object that binds the calls of an entry."""
    return entry._binder


def remembered_calls(entry: WideEntry) -> int:
    """Returns the number of call shapes that an entry has stored as checked."""
    return len(entry._seen)


def prologue_bytes(ens: WideModel) -> int:
    """Returns the bytes of derived weights that a loaded model has in memory."""
    return artifact_of(ens).limits.derived_bytes
