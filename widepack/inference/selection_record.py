"""Reads and writes what a selection recorded in an artifact: weights of members, and a cascade.

The record is in the provenance, under `selection`. It counts only while the members are the checkpoints that
it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.manifest import Manifest

from ..errors import ArtifactError, UsageError
from .cascade import CascadeSettings, check_weights

KEY = "selection"
"""The key of the provenance."""
_AGAIN = "run `widepack select` again"


@dataclass(frozen=True)
class SelectionRecord:
    """What a selection recorded.

    Attributes:
        entry: The entry that it is for.
        weights: The weight of each selected member, by name.
        cascade: How the cascade runs; None if it saves nothing.
    """

    entry: str
    weights: Mapping[str, float]
    cascade: CascadeSettings | None


def record_of(
    manifest: Manifest,
    entry: str,
    weights: Sequence[float],
    cascade: CascadeSettings | None,
    text: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the record for the provenance.

    Args:
        manifest: Of the artifact.
        entry: The entry.
        weights: Of all members; those of 0 are not selected.
        cascade: How the cascade runs.
        text: Figures for people.
    """
    names = [m.name for m in manifest.members]
    found: dict[str, Any] = {
        "entry": entry,
        "checkpoints": {m.name: m.sha256 for m in manifest.members},
        "weights": {name: w for name, w in zip(names, weights) if w},
        **text,
    }
    if cascade is not None:
        found["cascade"] = {
            "order": [names[i] for i in cascade.order],
            "stages": list(cascade.stages),
            "until": cascade.until,
            "of": cascade.of,
            "dim": cascade.dim,
            "output": cascade.output,
        }
    return found


def read_record(manifest: Manifest) -> SelectionRecord:
    """Returns what a selection recorded.

    Raises: UsageError if nothing is recorded, or if members have changed since; ArtifactError if the record
    does not have the form that a selection writes.
    """
    found = manifest.provenance.get(KEY)
    if found is None:
        raise UsageError(
            "this artifact records no selection; run `widepack select` with a validation file, or give"
            " first= and until="
        )
    try:
        known = {m.name: m.sha256 for m in manifest.members}
        names = list(known)
        weights = {str(n): float(w) for n, w in found["weights"].items()}
        check_weights([*weights.values()])
        before = {str(n): str(sha) for n, sha in found["checkpoints"].items()}
        cascade = None
        if (row := found.get("cascade")) is not None:
            order = [str(n) for n in row["order"]]
            if all(n in known for n in order):
                cascade = CascadeSettings(
                    tuple(names.index(n) for n in order),
                    tuple(weights[n] for n in order),
                    tuple(int(s) for s in row["stages"]),
                    float(row["until"]),
                    str(row["of"]),
                    int(row["dim"]),
                    row["output"]
                    if row["output"] is None or isinstance(row["output"], int)
                    else str(row["output"]),
                )
        entry = str(found["entry"])
    except UsageError as error:
        raise ArtifactError(f"provenance: {KEY}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"provenance: {KEY} does not have the form that a selection writes") from error
    for name in weights:
        if known.get(name) != before.get(name):
            raise UsageError(
                f"the selection was made for another checkpoint of member {name[:80]}, or for a member that"
                f" is not here any more; {_AGAIN}"
            )
    return SelectionRecord(entry, weights, cascade)
