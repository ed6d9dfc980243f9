"""Tests attack 108 of ATTACKS.md: a calibration that no evaluation writes, or that was fitted for others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import refused
from forged import Forged

from widepack import load
from widepack.errors import UsageError
from widepack_artifacts import strict_json

TEMPERATURE = {"kind": "temperature", "value": 2.0, "entry": "forward", "of": "softmax", "dim": 1}


def calibrated(**changes: Any) -> Forged:
    """Returns an artifact with the record of a temperature, which was changed. A key of None is left out."""
    forged = Forged()
    members = [[m["name"], m["sha256"]] for m in forged.manifest["members"]]
    record = {
        **TEMPERATURE,
        "output": forged.entry["outputs"][0]["name"],
        "checkpoints": strict_json.digest(members),
        **changes,
    }
    forged.manifest["provenance"]["calibration"] = {k: v for k, v in record.items() if v is not None}
    return forged


def test_an_honest_record(tmp_path: Path) -> None:
    ens = load(calibrated().save(tmp_path))
    x = torch.randn(3, 6)
    p = ens.mean(x, of="softmax")
    torch.testing.assert_close(ens.mean(x, of="softmax", calibrated=True), (p.log() / 2).softmax(1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "other"}, "kind: 'other' is unknown"),
        ({"kind": "variance"}, "of: 'softmax' does not fit a variance"),
        ({"value": 0}, "a temperature is from 0.01 to 100, got 0"),
        ({"value": -2.0}, "a temperature is from 0.01 to 100"),
        ({"value": 1e-300}, "a temperature is from 0.01 to 100"),
        ({"value": 10**18}, "a temperature is from 0.01 to 100"),
        ({"value": True}, "a temperature is from 0.01 to 100"),
        ({"value": "2"}, "a temperature is from 0.01 to 100"),
        ({"value": [2.0]}, "a temperature is from 0.01 to 100"),
        ({"value": None}, "value missing"),
        ({"kind": "variance", "value": 1e9}, "a variance is from 1e-08 to 1e"),
        ({"of": "sigmoid"}, "of: 'sigmoid' does not fit"),
        ({"of": ["softmax"]}, "does not fit a temperature"),
        ({"of": {}}, "does not fit a temperature"),
        ({"entry": "encode"}, "entry: 'encode' is unknown"),
        ({"entry": ["forward"]}, "is unknown; known: forward"),
        ({"output": "none"}, "output: 'none' is unknown"),
        ({"output": 0}, "output: '0' is unknown"),
        ({"dim": 2}, "dim: 2 is no dim of the output"),
        ({"dim": -1}, "dim: -1 is no dim of the output"),
        ({"dim": 1.0}, "dim: 1.0 is no dim of the output"),
        ({"dim": True}, "dim: True is no dim of the output"),
        ({"checkpoints": None}, "checkpoints missing"),
    ],
)
def test_records_of_a_calibration_of_wrong_forms(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(calibrated(**changes).save(tmp_path), words)


@pytest.mark.parametrize("record", [[], 3, "temperature", None])
def test_calibrations_that_are_no_records(record: Any, tmp_path: Path) -> None:
    forged = Forged()
    forged.manifest["provenance"]["calibration"] = record
    refused(forged.save(tmp_path), "provenance: calibration: expected an object")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_does_not_have(value: float, tmp_path: Path) -> None:
    forged = calibrated()
    forged.manifest["provenance"]["calibration"]["value"] = 12345.5
    path = forged.save(tmp_path)
    text = (path / "manifest.json").read_text(encoding="utf-8")
    word = "NaN" if math.isnan(value) else "Infinity"
    (path / "manifest.json").write_text(text.replace("12345.5", word), encoding="utf-8")
    refused(path, word)


@pytest.mark.parametrize("checkpoints", ["sha256:" + "0" * 64, 3, {}])
def test_a_calibration_of_other_checkpoints(checkpoints: Any, tmp_path: Path) -> None:
    ens = load(calibrated(checkpoints=checkpoints).save(tmp_path))
    with pytest.raises(UsageError, match="fitted for other checkpoints of these members; fit it again"):
        ens.mean(torch.randn(3, 6), of="softmax", calibrated=True)
    assert ens.mean(torch.randn(3, 6), of="softmax").isfinite().all()
