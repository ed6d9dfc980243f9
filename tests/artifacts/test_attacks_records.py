"""Tests attacks 26 to 36 of ATTACKS.md: other files, hashes, false statements, and records."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import probe_with, refused
from forged import Forged, golden, node, ref
from support import fresh, must

from widepack import load
from widepack.errors import ArtifactError, ProbeError


@pytest.mark.extended
def test_native_and_python_files_in_the_folder_are_not_opened(tmp_path: Path) -> None:
    """Files outside the manifest are not opened, and no .pt2 or .so file with a correct name and hash."""
    forged = Forged()
    forged.files["programs/forward.shared-0000000000000000.pt2"] = (
        b"\x80\x04cos\nsystem\n(S'touch canary'\ntR."
    )
    forged.files["native-0000000000000000.so"] = b"\x7fELF" + b"\0" * 60
    forged.entry["pt2"] = {"shared": "programs/forward.shared-0000000000000000.pt2"}
    path = forged.save(tmp_path)
    (path / "programs" / "more.so").write_bytes(b"\x7fELF")
    (path / "sitecustomize.py").write_text("raise SystemExit('run')")
    for name in ("forward.shared", "more", "native"):
        for place in path.rglob(f"*{name}*"):
            place.chmod(0)
    script = (
        "import sys, widepack\nseen = []\n"
        "sys.addaudithook(lambda e, a: seen.append(str(a[0])) if e in ('open', 'ctypes.dlopen', "
        "'import') else None)\n"
        "widepack.load(sys.argv[1])\nprint([s for s in seen if s.endswith(('.pt2', '.so', "
        "'sitecustomize')) and 'forged' in s])"
    )
    assert must(fresh(script, path)).strip() == "[]"


@pytest.mark.parametrize("what", ["weights", "program", "probe", "manifest"])
def test_files_that_do_not_match_their_hashes(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "cache")
    )  # the cache of a user who has not loaded this artifact
    path = Forged().save(tmp_path)
    place = {
        "weights": next(path.glob("weights-*")),
        "probe": next(path.glob("probe-*")),
        "program": next((path / "programs").glob("cpu.*shared*")),
        "manifest": path / "manifest.json",
    }[what]
    data = bytearray(place.read_bytes())
    if what in ("program", "manifest"):
        data[data.index(b"stacked")] ^= 1
    else:
        data[-64:] = bytes(b ^ 0x40 for b in data[-64:])
    place.write_bytes(data)
    refused(path, "was changed or damaged" if what == "manifest" else "SHA-256", verify="hashes")
    if what == "weights":  # the sizes are right, but the probe fails
        refused(path, "probe", kind=ProbeError)


def test_an_artifact_with_another_digest_than_expected(tmp_path: Path) -> None:
    path = Forged().save(tmp_path)
    refused(path, "expected the artifact sha256:", expect="sha256:" + "0" * 64)


def test_a_wrong_number_of_members(tmp_path: Path) -> None:
    forged = Forged()
    forged.manifest["members"].pop()
    refused(forged.save(tmp_path / "fewer"), "signatures must name")
    forged.entry["signatures"].pop()
    refused(forged.save(tmp_path / "weights"), "differ from the manifest")
    forged = Forged()
    for program in forged.programs():
        program["members"] = 2**31 - 1
    refused(forged.save(tmp_path / "program"), "is for 2147483647 members, but 3 are loaded")
    forged = Forged()
    forged.manifest["members"] = [
        {"name": f"m{i}", "source": "", "sha256": "0" * 64, "bytes": 0} for i in range(70_000)
    ]
    refused(forged.save(tmp_path / "many"), "1 to 65536")


def test_a_member_program_of_another_entry(tmp_path: Path) -> None:
    """Only calls that fail, casts and single members read it."""
    forged = Forged()
    for program in forged.programs("programs/member."):
        program["inputs"] = [*program["inputs"], ["extra", "x2", "shared", "float32[B,6]"]]
    size, less = node("b", "aten.sym_size.int", ref("x"), 0), node("c", "operator.sub", ref("b"), 3)
    ens = load(forged.add(size, less, node("d", "operator.floordiv", 10, ref("c"))).save(tmp_path))
    assert ens(torch.zeros(2, 6)).shape[:2] == (3, 2)
    calls: list[Callable[[], Any]] = [
        lambda: ens(torch.zeros(3, 6)),
        lambda: ens.member(0),
        lambda: load(tmp_path / "forged.wide", dtype="float64"),
    ]
    for call in calls:
        with pytest.raises(ArtifactError, match=r"the member program .* has 2 inputs, but the entry has 1"):
            call()


def test_outputs_that_are_swapped_or_of_another_kind(tmp_path: Path) -> None:
    forged = Forged("entries")
    for program in forged.programs("programs/cpu.forward.shared"):
        program["outputs"].reverse()
    refused(forged.save(tmp_path / "swapped"), "probe", kind=ProbeError)
    for kind, words in (("ragged", "ragged"), ("shared", "probe")):
        forged = Forged()
        for program in forged.programs():
            program["outputs"][0][1] = kind
        refused(forged.save(tmp_path / kind), words)
    forged = Forged()
    for program in forged.programs():
        program["outputs"] = [[3, "stacked"]]
    refused(forged.save(tmp_path / "number"), "is not a tensor of 3 members")
    for program in forged.programs():
        program["outputs"] = []
    refused(forged.save(tmp_path / "none"), "has 0 outputs, but the entry has 1")


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"regions": 3},
        {"batch": ["x", None]},
        {"batch": []},
        {"choices": [1]},
        {"times_ms": {"a": "b"}},
        {"machine": 3, "threads": "many"},
        {"regions": [{"name": 1}]},
        {"at": [1]},
    ],
)
def test_plans_of_wrong_types(tmp_path: Path, plan: dict[str, Any]) -> None:
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"] = {**row["plan"], **plan} if plan else {}
    path = forged.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(path)
        except ArtifactError as e:
            assert "plan" in str(e)
            return
    assert set(plan) <= {"machine", "threads"}  # another machine's plan is not read


RECORD = {"output": "output", "own_max": 0.0, "own_rms": 0.0, "scale": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"wide": []},
        {"wide": {}},
        {"wide": {"shared.0": {}}},
        {"wide": {"shared.0": []}},
        {"wide": {"shared.0": [3]}},
        {"wide": {"shared.0": [{}]}},
        {"wide": {"shared.0": [{**RECORD, "own_max": "x"}]}},
        {"wide": {"shared.0": [{**RECORD, "scale": None}]}},
        {"wide": {"shared.0": [{**RECORD, "own_rms": -1}]}},
        {"wide": {"shared.0": [{**RECORD, "own_max": True}]}},
        {"wide": {"shared.0": [RECORD, RECORD]}},
    ],
)
def test_verification_records_of_wrong_types(tmp_path: Path, record: Any) -> None:
    forged = Forged()
    forged.manifest["verification"] = record
    refused(forged.save(tmp_path))


@pytest.mark.parametrize("entries", [3, [], {"encode": 3}, {"encode": {"wide": 3}}])
def test_verification_records_of_wrong_entries(tmp_path: Path, entries: Any) -> None:
    forged = Forged("entries")
    forged.manifest["verification"]["entries"] = entries
    refused(forged.save(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.pop("shared.x0"),
        lambda p: p.update({"shared.x0": torch.zeros(2, 7)}),
        lambda p: p.update({"shared.x0": torch.zeros(2, 6, dtype=torch.int64)}),
        lambda p: p.update({"shared.x0": torch.zeros(6)}),
        lambda p: p.pop("shared.y0.1"),
        lambda p: p.update({"shared.y0.1": torch.zeros(0, dtype=torch.float64)}),
        lambda p: p.update({"shared.y0.1": torch.zeros(2, 2, dtype=torch.float64)}),
        lambda p: p["shared.y0.1"].__setitem__(0, 0.0),
        lambda p: p["shared.y0.1"].__setitem__(0, -1.0),
        lambda p: p["shared.y0.1"].__setitem__(0, float("nan")),
        lambda p: p["shared.y0.1"].__setitem__(0, float("inf")),
        lambda p: p["shared.y0.1"].__setitem__(1, float("nan")),
        lambda p: p["shared.y0.1"].add_(1e-3),
    ],
)
def test_a_probe_with_missing_or_wrong_tensors(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    refused(probe_with(Forged(), change).save(tmp_path))


def test_verification_records_with_too_large_bounds(tmp_path: Path) -> None:
    """A reader accepts the bounds of a record if they fit the recorded answers.

    The writer of the answers also writes the bounds. Only a trusted digest protects against it.
    """
    figures: list[dict[str, float]] = [
        {"own_max": 1e30, "scale": 1e30},
        {"own_max": 1e30},
        {"own_rms": 1e30},
        {"scale": 1e30},
    ]
    for number, row in enumerate(figures):
        forged = Forged()
        for rows in forged.manifest["verification"]["wide"].values():
            rows[0].update(row)
        refused(forged.save(tmp_path / str(number)), "would accept wrong answers", kind=ProbeError)

    forged = probe_with(Forged(), lambda p: p["shared.y0.1"][1:].add_(1.0))
    for rows in forged.manifest["verification"]["wide"].values():
        rows[0]["own_max"] = 50 * rows[0]["scale"]
    load(forged.save(tmp_path))


@pytest.mark.parametrize("backend", ["aot", "onnxruntime", "compile", "os.system"])
def test_plans_that_name_a_backend(tmp_path: Path, backend: str) -> None:
    """Nothing is compiled or opened. A program that is not in the user's cache runs on `eager`, or as a small
    ONNX graph that the load writes of it.
    """
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"].update(backend=backend, workers=10**9, at=10**12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ens = load(forged.save(tmp_path))
    assert ens.backend == "eager" or backend == "onnxruntime"
    torch.testing.assert_close(ens(torch.ones(2, 6)), load(golden("mlp"))(torch.ones(2, 6)))
