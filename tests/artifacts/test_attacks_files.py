"""Tests attacks 1 to 8 of ATTACKS.md: file names, links, JSON documents and safetensors headers."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from attacks import refused, tensors
from forged import Forged

from widepack import load
from widepack.errors import ArtifactError
from widepack_artifacts import header, strict_json
from widepack_artifacts.weights import Weights

F32 = {"dtype": "float32"}


def test_unchanged_forged_artifacts_load(tmp_path: Path) -> None:
    for name in ("mlp", "conv", "ragged", "entries", "state"):
        load(Forged(name).save(tmp_path / name))


@pytest.mark.parametrize(
    "name",
    [
        "../weights-{}.safetensors",
        "/etc/weights-{}.safetensors",
        "programs/../../x-{}.json",
        "programs/a/b-{}.json",
        "a..b-{}.json",
        "-{}.json",
    ],
)
def test_file_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    forged = Forged()
    forged.manifest["files"][name.format("0" * 16)] = {"bytes": 1, "sha256": "0" * 64}
    refused(forged.save(tmp_path), "is not a valid file name")


@pytest.mark.parametrize("what", ["manifest.json", "weights", "program", "programs", "pipe", "folder"])
def test_links_pipes_and_folders_instead_of_files(tmp_path: Path, what: str) -> None:
    path = Forged().save(tmp_path)
    place = {
        "manifest.json": path / "manifest.json",
        "programs": path / "programs",
        "program": next((path / "programs").glob("cpu.*shared*")),
    }.get(what, next(path.glob("weights-*")))
    aside = tmp_path / "aside"
    place.rename(aside)
    if what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    else:
        place.symlink_to(aside)
    for verify in ("sizes", "hashes", "off"):
        refused(path, "a link or special file", verify=verify)


@pytest.mark.parametrize("which", ["manifest.json", "program"])
def test_a_key_that_occurs_twice(tmp_path: Path, which: str) -> None:
    if which == "manifest.json":
        path = Forged().save(tmp_path)
        place = path / which
        place.write_bytes(place.read_bytes().replace(b'"probe":', b'"probe": "", "probe":', 1))
        refused(path, "the key 'probe' occurs twice")
        return
    text = json.dumps(Forged().programs()[0]).replace('"nodes"', '"nodes": [], "nodes"', 1)
    with pytest.raises(ArtifactError, match="the key 'nodes' occurs twice"):
        strict_json.parse(text.encode(), "program")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 100_000, '{"a":' * 300 + "1" + "}" * 300]
)
def test_deeply_nested_documents(text: str) -> None:
    with pytest.raises(ArtifactError, match="nested over 200 deep|not JSON"):
        strict_json.parse(text.encode(), "manifest")


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10_000_000,
        "9223372036854775808",
        "-9223372036854775809",
        "1e400",
        "1" * 500 + ".5",
        "NaN",
        "Infinity",
        "-Infinity",
    ],
)
def test_numbers_outside_int64_and_float64(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ArtifactError, match="outside|not JSON"):
        strict_json.parse(f"[{text}]".encode(), "manifest")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b'"\\ud800"', b"\xef\xbb\xbf{}", b'{"a":"\xed\xa0\x80"}', b"", b"\x00" * 100]
)
def test_documents_that_are_not_utf8(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        strict_json.parse(data, "manifest")


def test_documents_with_too_many_values() -> None:
    with pytest.raises(ArtifactError, match="over 8,000,000 values"):
        strict_json.parse(b"[" + b"[]," * 8_000_000 + b"0]", "program")


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensors({}, length=2**63), "not a whole safetensors file"),
        (tensors({"a": ROW}), "not a whole safetensors file"),
        (tensors({"a": {**ROW, "data_offsets": [0, 2**62]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": {**ROW, "data_offsets": [-8, 0]}}, b"\0" * 8), "not a pair of positions"),
        (tensors({"a": {**ROW, "data_offsets": [8, 0]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": ROW, "b": ROW}, b"\0" * 8), "two tensors over each other"),
        (
            tensors({"a": ROW, "b": {**ROW, "data_offsets": [4, 12]}}, b"\0" * 12),
            "two tensors over each other",
        ),
        (tensors({"a": {**ROW, "data_offsets": [4, 12]}}, b"\0" * 12), "a hole"),
        (tensors({"a": {**ROW, "shape": [2**62, 2**62]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": {**ROW, "shape": [-1, -2]}}, b"\0" * 8), "not a list of up to"),
        (tensors({"a": {**ROW, "shape": [True, 2]}}, b"\0" * 8), "not a list of up to"),
        (tensors({"a": {**ROW, "shape": [1] * 70}}, b"\0" * 8), "not a list of up to"),
        (tensors({"a": {**ROW, "dtype": "O"}}, b"\0" * 8), "the dtype 'O' is unknown"),
        (tensors({"a": {**ROW, "pickle": 1}}, b"\0" * 8), "expected dtype, shape and data_offsets"),
        (tensors({"a": ROW, "__metadata__": {"a": 1}}, b"\0" * 8), "not an object of texts"),
        (tensors(b'{"a": %s, "a": %s}' % ((json.dumps(ROW).encode(),) * 2), b"\0" * 8), "occurs twice"),
        (tensors(b"[" * 1000 + b"]" * 1000, b"\0" * 8), "nested"),
    ],
)
def test_wrong_extents_of_tensors(tmp_path: Path, data: bytes, words: str) -> None:
    place = tmp_path / "weights.safetensors"
    place.write_bytes(data)
    for opened in (lambda: header.read(place), lambda: Weights([place])):
        with pytest.raises(ArtifactError, match=re.escape(words)):
            opened()
    path = Forged().change("weights-", lambda _: data).save(tmp_path)
    refused(path, words)
