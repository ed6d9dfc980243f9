"""Shares helpers of the tests of writer and reader: a small artifact, and the content of its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from widepack_artifacts import strict_json
from widepack_artifacts.entry import Dim, Entry, Input, OutputLeaf, Parameter
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest import Manifest, Member
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

PROGRAM = Program(
    weights=(Slot("w", "fc.weight", "shared", "float32[4,4]"),),
    inputs=(Slot("x", "x", "shared", "float32[B,4]"),),
    nodes=(Node("y", "aten.linear.default", (Ref("x"), Ref("w"))),),
    outputs=(Output(Ref("y"), "shared"),),
)


def manifest(member: str, note: str = "") -> Manifest:
    entry = Entry(
        inputs=(Input("x", "float32[B,4]"),),
        signature=[Parameter("x", "positional", {"leaf": 0})],
        outputs=(OutputLeaf("", "float32[B,4]", "stacked"),),
        result={"leaf": 0},
        dims={"B": Dim(1)},
        guards=(),
        fixed=[],
        member=[member],
        signatures=[0],
        wide=(),
    )
    return Manifest(
        members=(Member("a", "a.pt", "0" * 64, 1),),
        weights=(),
        entries={"forward": entry},
        provenance={"note": note},
    )


def build(path: Path, note: str = "", force: bool = False, weights: bytes = b"w" * 100) -> Manifest:
    with Writer(path, force) as writer:
        writer.file("weights", "safetensors", weights)
        program = writer.file("programs/member.forward", "json", strict_json.canonical(PROGRAM.to_json()))
        return writer.publish(manifest(program, note))


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(call: Callable[[], object], *words: str, kind: type[ArtifactError] = ArtifactError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"


def revise(path: Path, weights: bytes = b"v" * 3000) -> Manifest:
    """Updates an artifact with a changed copy of the weights file, one kept program and one new program."""
    reader = Reader(path)
    with Writer(path, force=True) as writer:
        (old,) = reader.weights_files()
        _, how = writer.revised(
            "weights",
            "safetensors",
            old,
            [(2, [memoryview(b"XY")]), (90, iter([memoryview(b"Z"), memoryview(b"")]))],
        )
        assert how in ("reflink", "kernel", "copy")
        writer.take(reader, reader.manifest.entries["forward"].member)
        writer.file("programs/more", "json", b"[1]")
        return writer.publish(replace(reader.manifest, provenance={"note": "revised"}))
