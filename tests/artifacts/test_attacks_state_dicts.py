"""Tests attacks on what an artifact says of state dicts: versions, extra state, and patterns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import refused
from forged import Forged
from safetensors.torch import save as to_bytes

from widepack import load
from widepack.errors import ArtifactError

EXTRA = "extra-0000000000000000.safetensors"
RECORD = {
    "versions": {"": {"version": 2}},
    "extra": EXTRA,
    "verbatim": True,
    "verbatim_bare": True,
    "copies": True,
    "ignored": [],
    "left_out": [],
}


def forged(rows: Any, tensors: dict[str, torch.Tensor] | None = None, **record: Any) -> Forged:
    found = Forged("mlp")
    data = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    document = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found.files[EXTRA] = to_bytes({"json": document, **(tensors or {})})
    found.manifest.update(version=[1, 5], state_dicts={**RECORD, **record})
    return found


def members() -> int:
    return len(Forged("mlp").manifest["members"])


def test_an_honest_record(tmp_path: Path) -> None:
    rows = [{"_extra_state": {"dict": [["a", {"tensor": "0"}]]}}] * members()
    path = forged(rows, {"0": torch.ones(2)}).save(tmp_path)
    state: Any = load(path).state_dict(1)
    assert torch.equal(state["_extra_state"]["a"], torch.ones(2))
    assert vars(state)["_metadata"] == {"": {"version": 2}}


RECORDS: list[tuple[Callable[[Any], object], str]] = [
    (lambda r: r.update(more=1), "unknown more"),
    (lambda r: r.pop("verbatim"), "verbatim missing"),
    (lambda r: r.update(verbatim=1), "expected true or false"),
    (lambda r: r.pop("copies"), "copies missing"),
    (lambda r: r.update(copies=None), "expected true or false"),
    (lambda r: r.update(versions=[]), "expected an object"),
    (lambda r: r.update(versions={"a\x1b[31m": {}}), "versions"),
    (lambda r: r.update(versions={"": {"version": [1]}}), "numbers and texts"),
    (lambda r: r.update(versions={"": {"assign_to_params_buffers": True}}), "numbers and texts"),
    (lambda r: r.update(versions={"": {str(i): 1 for i in range(30)}}), "numbers and texts"),
    (lambda r: r.update(versions={"": {"version": "\x1b[31m"}}), "control characters"),
    (lambda r: r.update(extra="../../etc/passwd"), "not in the list of files"),
    (lambda r: r.update(extra=None), "not in the list of files"),
    (lambda r: r.update(ignored=["a\nb"]), "expected a name"),
    (lambda r: r.update(left_out=[1]), "left_out"),
]


@pytest.mark.parametrize(("change", "words"), RECORDS)
def test_records_of_state_dicts_of_wrong_forms(
    tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    found = forged([{}] * members())
    change(found.manifest["state_dicts"])
    refused(found.save(tmp_path), words)


def test_another_file_as_extra_state(tmp_path: Path) -> None:
    found = forged([{}] * members())
    found.manifest["state_dicts"]["extra"] = found.manifest["probe"]
    refused(found.save(tmp_path), "is not a file extra-")


def test_a_record_in_an_older_format(tmp_path: Path) -> None:
    found = forged([{}] * members())
    found.manifest["version"] = [1, 4]
    refused(found.save(tmp_path), "unknown state_dicts")


DEEP: Any = 0
for _ in range(60):
    DEEP = {"list": [DEEP]}
VALUES: list[Any] = [
    {"code": "os.system"},
    {"object": ["posix", "system"]},
    {"list": 1},
    {"list": [], "more": 1},
    [1],
    {"dict": [["a"]]},
    {"dict": [[{"list": []}, 1]]},
    {"set": [{"list": []}]},
    {"bytes": "not base64!"},
    {"int": "1" * 5000},
    {"int": "x"},
    {"float": "1e999"},
    {"size": [-1]},
    {"size": ["x"]},
    {"dtype": "load"},
    {"dtype": "__class__"},
    {"tensor": "missing"},
    {"tensor": 0},
    DEEP,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: str(v)[:40])
def test_extra_states_that_are_not_data(tmp_path: Path, value: Any) -> None:
    path = forged([{"_extra_state": value}] * members()).save(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        load(path).state_dict(0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("rows", [b"{", b"[1, 2, 3]", b"[]", b"{}", b"[" * 5000 + b"]" * 5000])
def test_documents_of_extra_states_of_wrong_forms(tmp_path: Path, rows: bytes) -> None:
    path = forged(rows).save(tmp_path)
    with pytest.raises(ArtifactError):
        load(path).state_dict(0)


def test_a_document_of_extra_states_that_is_no_bytes(tmp_path: Path) -> None:
    found = forged([{}] * members())
    found.files[EXTRA] = to_bytes({"json": torch.ones(2, 2)})
    with pytest.raises(ArtifactError, match="not bytes"):
        load(found.save(tmp_path)).state_dict(0)
