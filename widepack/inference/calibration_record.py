"""Reads and writes the calibration that `widepack evaluate --save` records in an artifact.

The record is in the provenance, under `calibration`. `load` checks its form and its bounds. It counts only
for all members of the artifact, and only while they are the checkpoints that it was fitted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widepack_artifacts import strict_json
from widepack_artifacts.fields import manifest_error, read_choice, read_free_object
from widepack_artifacts.manifest import Manifest

from ..errors import UsageError
from ..ir.tensor_type import tensor_type
from ..reduction.calibration import BOUNDS, OF, TEMPERATURE, VARIANCE, Calibration

CALIBRATION = "calibration"
"""The key of the provenance."""
_WHERE = f"provenance: {CALIBRATION}"
AGAIN = "fit it again: widepack evaluate --calibrate --save"


def calibration_record(manifest: Manifest, entry: str, calibration: Calibration) -> dict[str, Any]:
    """Returns the record for the provenance, without figures for people.

    manifest: of the artifact. entry: that the calibration is of.
    """
    return {
        "kind": calibration.kind,
        "value": calibration.value,
        "entry": entry,
        "output": calibration.output,
        "of": calibration.of,
        "dim": calibration.dim,
        "checkpoints": _checkpoints(manifest),
    }


def read_calibration(manifest: Manifest) -> tuple[str, Calibration] | None:
    """Returns the entry and the recorded calibration; None without a record.

    Raises: ArtifactError for a record that no evaluation writes.
    """
    if CALIBRATION not in manifest.provenance:
        return None
    row = read_free_object(manifest.provenance[CALIBRATION], _WHERE)
    if missing := [
        k for k in ("kind", "value", "entry", "output", "of", "dim", "checkpoints") if k not in row
    ]:
        raise manifest_error(f"{_WHERE}: {', '.join(missing)} missing")
    kind = read_choice(row["kind"], (TEMPERATURE, VARIANCE), f"{_WHERE}: kind")
    least, most = BOUNDS[kind]
    value = row["value"]
    if type(value) not in (int, float) or not least <= value <= most:  # false for NaN
        raise manifest_error(f"{_WHERE}: a {kind} is from {least:g} to {most:g}, got {str(value)[:40]}")
    if row["of"] not in OF[kind]:
        raise manifest_error(f"{_WHERE}: of: {str(row['of'])[:40]!r} does not fit a {kind}")
    name = read_choice(row["entry"], tuple(manifest.entries), f"{_WHERE}: entry")
    outputs = {o.name: o.type for o in manifest.entries[name].outputs}
    output = read_choice(row["output"], tuple(outputs), f"{_WHERE}: output")
    parsed = tensor_type(outputs[output])
    rank, dim = len(parsed.sizes) if parsed is not None else 0, row["dim"]
    if type(dim) is not int or not 0 <= dim < max(rank, kind == VARIANCE):
        raise manifest_error(f"{_WHERE}: dim: {str(dim)[:40]} is no dim of the output {output[:80]}")
    return name, Calibration(kind, float(value), output, row["of"], dim, rank)


def calibration_of(manifest: Manifest, entry: str, members: Sequence[str]) -> Calibration:
    """Returns the calibration of an entry of a loaded model. members: the names of the loaded ones.

    Raises: UsageError if there is none, or if it is of other members.
    """
    found = read_calibration(manifest)
    if found is None:
        raise UsageError(
            "calibrated=True: this artifact records no calibration; fit one on data with targets: widepack "
            "evaluate --calibrate --save, or leave calibrated= out"
        )
    name, calibration = found
    if name != entry:
        raise UsageError(f"calibrated=True: the calibration is of the entry {name}, and this is {entry}")
    if tuple(members) != tuple(m.name for m in manifest.members):
        raise UsageError(
            f"calibrated=True: the calibration is of all {len(manifest.members)} members in their order, and "
            f"{len(members)} are loaded; load without members="
        )
    if manifest.provenance[CALIBRATION]["checkpoints"] != _checkpoints(manifest):
        raise UsageError(
            f"calibrated=True: the calibration was fitted for other checkpoints of these members; {AGAIN}"
        )
    return calibration


def _checkpoints(manifest: Manifest) -> str:
    """Returns what identifies the members: a digest of their names and the hashes of their checkpoints."""
    return strict_json.digest([[m.name, m.sha256] for m in manifest.members])
