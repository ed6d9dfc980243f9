"""Tests that the JSON Schemas accept and refuse the same manifests and programs as the readers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from forged import GOLDEN, Forged
from jsonschema import Draft202012Validator
from support import Artifacts

from widepack_artifacts import strict_json
from widepack_artifacts.costs import read_documents
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.program import Program


@cache
def validator(name: str) -> Any:
    """Returns the validator of an installed schema."""
    text = (
        resources.files("widepack_artifacts")
        .joinpath("schemas")
        .joinpath(f"{name}.schema.json")
        .read_text(encoding="utf-8")
    )
    Draft202012Validator.check_schema(json.loads(text))
    return Draft202012Validator(json.loads(text))


def documents(artifact: Path) -> dict[str, Any]:
    return {
        p.relative_to(artifact).as_posix(): json.loads(p.read_text())
        for p in sorted(artifact.rglob("*.json"))
    }


def check(artifact: Path) -> None:
    for name, document in documents(artifact).items():
        kind = "program" if "/" in name else name.partition(".")[0].partition("-")[0]
        validator(kind).validate(document)


@pytest.mark.parametrize("artifact", sorted(GOLDEN.glob("*.wide")), ids=lambda p: p.stem)
def test_golden_artifacts_match_the_schemas(artifact: Path) -> None:
    check(artifact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "unet", "ragged_heads", "guard_pad"])
def test_new_artifacts_match_the_schemas(name: str, artifacts: Artifacts) -> None:
    check(artifacts(name))


MANIFEST: list[Callable[[Any], object]] = [
    lambda m: m.pop("probe"),
    lambda m: m.update(more=1),
    lambda m: m.update(format="widepack.artefact"),
    lambda m: m.update(version=[2, 0]),
    lambda m: m.update(version=[1]),
    lambda m: m.update(members=[]),
    lambda m: m["members"][0].update(bytes=-1),
    lambda m: m["members"][0].update(name="a\nb"),
    lambda m: m["members"][0].update(sha256="0" * 63),
    lambda m: m["weights"][0].update(kind="own"),
    lambda m: m["weights"][0].update(dtype="object"),
    lambda m: m["weights"][0].update(shape=[-1]),
    lambda m: m["weights"][0].update(shape=[1] * 65),
    lambda m: m["entries"]["forward"]["inputs"][0].update(type="float32[B,-1]"),
    lambda m: m["entries"]["forward"]["outputs"][0].update(kind="each"),
    lambda m: m["entries"]["forward"].update(result={"leaf": -1}),
    lambda m: m["entries"]["forward"].update(result={"leaf": 0, "list": []}),
    lambda m: m["entries"]["forward"].update(result={"dict": [[True, {"leaf": 0}]]}),
    lambda m: m["entries"]["forward"].update(result={"dict": [["k" * 1001, {"leaf": 0}]]}),
    lambda m: m["entries"]["forward"].update(result={"output": ["A\x1b[31m", [["k", {"leaf": 0}]]]}),
    lambda m: m["entries"]["forward"].update(result={"output": ["A", [["k\u202e", {"leaf": 0}]]]}),
    lambda m: m["entries"]["forward"].update(guards=[{"expr": ["pow", "B", 2], "source": ""}]),
    lambda m: m["entries"]["forward"].update(guards=[{"expr": ["not", "B", 2], "source": ""}]),
    lambda m: m["entries"]["forward"].update(literals=[[["gt", "w", None], ""]]),
    lambda m: m["entries"]["forward"].update(literals=[[["abs", "w", 1], ""]]),
    lambda m: m["entries"]["forward"].update(literals=[[["load", "w"], ""]]),
    lambda m: m["entries"]["forward"]["dims"].update({"B C": m["entries"]["forward"]["dims"]["B"]}),
    lambda m: m["entries"]["forward"]["wide"][0].update(device="CPU:0"),
    lambda m: m["entries"]["forward"]["wide"][0].update(batch=[1]),
    lambda m: m["entries"]["forward"]["wide"][0].update(file="../x-0123456789abcdef.json"),
    lambda m: m["entries"]["forward"].update(member=[]),
    lambda m: m["files"].update({"a/b-0123456789abcdef.json": {"bytes": 1, "sha256": "0" * 64}}),
    lambda m: m.update(digest="md5:0"),
]
FACTORED: list[Callable[[Any], object]] = [
    lambda m: m.update(factored={}),
    lambda m: m.update(factored=[]),
    lambda m: m["factored"].update(more=1),
    lambda m: m["factored"].update(weights=[]),
    lambda m: m["factored"].pop("corrections"),
    lambda m: m["factored"].update(corrections=None),
    lambda m: m["factored"].update(corrections="corrections.safetensors"),
    lambda m: m["factored"].update(corrections=m["probe"]),
    lambda m: m["factored"]["weights"][0].update(more=1),
    lambda m: m["factored"]["weights"][0].pop("aliases"),
    lambda m: m["factored"]["weights"][0].update(name=""),
    lambda m: m["factored"]["weights"][0].update(aliases=["a\nb"]),
    lambda m: m["factored"]["weights"][0].update(role="factor"),
    lambda m: m["factored"]["weights"][0].update(role="constant"),
    lambda m: m["factored"]["weights"][0].update(base=None),
    lambda m: m["factored"]["weights"][0].update(left=1),
    lambda m: m["factored"]["weights"][0].update(right=[]),
    lambda m: m["factored"]["weights"][0].update(scale=""),
    lambda m: m["factored"]["weights"][0].update(scale=None),
    lambda m: m["factored"]["weights"][0].update(ranks=[]),
    lambda m: m["factored"]["weights"][0].update(ranks=[1, -1, 1]),
    lambda m: m["factored"]["weights"][0].update(ranks=[1, 1.5, 1]),
    lambda m: m["factored"]["weights"][0].update(ranks=[1, True, 1]),
    lambda m: m["weights"][-1].update(role="factors"),
]
PROGRAM: list[Callable[[Any], object]] = [
    lambda p: p.pop("members"),
    lambda p: p.update(format="widepack.program/2"),
    lambda p: p.update(members=-1),
    lambda p: p["weights"][0].pop(),
    lambda p: p["inputs"][0].__setitem__(2, "own"),
    lambda p: p["nodes"][0].update(name="a b"),
    lambda p: p["nodes"][0].update(op="os.system"),
    lambda p: p["nodes"][0].update(args={"ref": "x"}),
    lambda p: p["nodes"][0].update(args=[{"ref": "x", "str": "y"}]),
    lambda p: p["nodes"][0].update(args=[{"float": "1.0"}]),
    lambda p: p["nodes"][0].update(args=["x"]),
    lambda p: p["nodes"][0].update(kwargs={"a b": 1}),
    lambda p: p["nodes"][0].update(body=copy.deepcopy(p)),
    lambda p: p["nodes"][0].update(more=1),
    lambda p: p["outputs"][0].append("stacked"),
]


COSTS: list[Callable[[Any], object]] = [
    lambda d: d.update(format="widepack.costs/3"),
    lambda d: d.pop("entries"),
    lambda d: d["entries"]["forward"].pop("peak"),
    lambda d: d["entries"]["forward"].update(more=1),
    lambda d: d["entries"]["forward"].update(peak="B.real"),
    lambda d: d["entries"]["forward"].update(peak=1),
    lambda d: d["entries"]["forward"].update(weights=["1"]),
    lambda d: d["entries"]["forward"].update(element_bytes=-1),
    lambda d: d["entries"]["forward"].update(dims={"B": [1]}),
    lambda d: d["entries"]["forward"]["totals"].update(speed=["1", "1"]),
    lambda d: d["entries"]["forward"]["rows"][0].pop(),
    lambda d: d["entries"]["forward"]["rows"][0][3].update(flops=["__import__('os')", "1"]),
    lambda d: d["entries"]["forward"].update(uncounted={"aten.mm": -1}),
]


@pytest.mark.parametrize("change", range(len(COSTS)))
def test_costs_are_refused_by_both(change: int, artifacts: Artifacts) -> None:
    document = next(d for n, d in documents(artifacts("mlp")).items() if n.startswith("costs-"))
    validator("costs").validate(document)
    COSTS[change](document)
    assert not validator("costs").is_valid(document)
    with pytest.raises(ArtifactError):
        read_documents(document)


def refused_by_both(document: Any) -> None:
    assert not validator("manifest").is_valid(document)
    if "digest" in document and document["digest"] != "md5:0":
        document["digest"] = strict_json.digest({k: v for k, v in document.items() if k != "digest"})
    with pytest.raises(ArtifactError):
        Manifest.from_json(document)


@pytest.mark.parametrize("number", range(len(MANIFEST)))
def test_schema_and_reader_refuse_the_same_manifests(number: int) -> None:
    document = Forged().manifest
    MANIFEST[number](document)
    refused_by_both(document)


@pytest.mark.parametrize("number", range(len(FACTORED)))
def test_schema_and_reader_refuse_the_same_factored_weights(number: int) -> None:
    document = Forged("fleet").manifest
    FACTORED[number](document)
    refused_by_both(document)


@pytest.mark.parametrize("corrections", ["", None])
def test_schema_and_reader_accept_the_same_factored_weights(corrections: str | None) -> None:
    document = Forged("fleet").manifest
    if corrections is not None:
        document["factored"]["corrections"] = corrections
    document["factored"]["weights"][0].update(role="buffer", aliases=["tied"], ranks=[0, 3, 1])
    document["digest"] = strict_json.digest({k: v for k, v in document.items() if k != "digest"})
    validator("manifest").validate(document)
    assert Manifest.from_json(document).to_json() == document


@pytest.mark.parametrize("number", range(len(PROGRAM)))
def test_schema_and_reader_refuse_the_same_programs(number: int) -> None:
    document = Forged().programs("programs/cpu.forward.shared")[0]
    PROGRAM[number](document)
    assert not validator("program").is_valid(document)
    with pytest.raises(ArtifactError):
        Program.from_json(document)
