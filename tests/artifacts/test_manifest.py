"""Tests that a manifest reads back equal, and that invalid manifests are refused."""

from __future__ import annotations

import copy
import json
import re
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack_artifacts import strict_json
from widepack_artifacts.entry import Dim, Entry, Guard, Input, OutputLeaf, Parameter
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.file_list import File, file_name
from widepack_artifacts.manifest import Manifest, Member
from widepack_artifacts.manifest_weights import ITEM_BYTES, Weight
from widepack_artifacts.wide_program import WideProgram

Json = dict[str, Any]
HASH = "0123456789abcdef" * 4
PROGRAM = f"programs/member.forward-{HASH[:16]}.json"
WIDE = f"programs/cpu.forward.shared-{HASH[:16]}.json"
FILES = {PROGRAM: File(10, HASH), WIDE: File(20, HASH), f"weights-{HASH[:16]}.safetensors": File(2**40, HASH)}


def example() -> Manifest:
    """Returns a manifest with a value in every field."""
    entry = Entry(
        inputs=(Input("x", "float32[B,3,32*H,7]"), Input("opts.ids", "int64[B]", 0, 99)),
        signature=[
            Parameter("x", "positional", {"leaf": 0}),
            Parameter("opts", "keyword", {"dict": [["ids", {"leaf": 1}], ["k", {"const": 2}]]}, True),
        ],
        outputs=(
            OutputLeaf("logits", "float32[B,10]", "stacked"),
            OutputLeaf("boxes.0", "float32[B,4]", "shared"),
        ),
        result={"output": ["Result", [["logits", {"leaf": 0}], ["boxes", {"tuple": [{"leaf": 1}]}]]]},
        dims={"B": Dim(1), "H": Dim(1, 16, "net.py:12 in forward")},
        guards=(Guard(["eq", ["mod", "H", 2], 0], "net.py:13 in forward"),),
        fixed=["the last size of x is 7: net.py:14"],
        member=[PROGRAM],
        signatures=[0, 0],
        wide=(WideProgram("cpu", "shared", WIDE, (1, None), {"regions": []}),),
        pt2={},
    )
    return Manifest(
        members=(Member("a", "runs/a.pt", HASH, 123), Member("b", "runs/b.pt", HASH, 123)),
        weights=(
            Weight("fc.weight", "stacked", "float32", [10, 4], "parameter", ["head.weight"]),
            Weight("pos", "shared", "bfloat16", [], "buffer"),
            Weight("head", "ragged", "float64", [[3, 4], [5, 4]], "parameter"),
        ),
        entries={"forward": entry},
        verification={"worst": 1e-7},
        provenance={"torch": "2.13.0"},
    ).sealed(FILES)


def edited(edit: Callable[[Json], object]) -> bytes:
    """Returns the bytes of the example after an edit, with a corrected digest."""
    data = copy.deepcopy(example().to_json())
    edit(data)
    data["digest"] = strict_json.digest({k: v for k, v in data.items() if k != "digest"})
    return json.dumps(data).encode()


def entry_of(data: Json) -> Json:
    found: Json = data["entries"]["forward"]
    return found


def refused(data: bytes, *words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_bytes(data)
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 1000


def test_reads_back_what_was_written() -> None:
    assert Manifest.from_bytes(example().to_bytes()) == example()
    assert Manifest.from_bytes(edited(lambda d: None)) == example(), "the layout of the JSON has no meaning"


def test_the_digest_is_stable_and_depends_on_every_field() -> None:
    assert example().sealed(dict(reversed(FILES.items()))).digest == example().digest
    assert replace(example(), provenance={"torch": "2.12.0"}).sealed(FILES).digest != example().digest


def test_weight_knows_its_tensors() -> None:
    stacked, shared, ragged = example().weights
    assert stacked.tensors(2) == {"fc.weight": [2, 10, 4]} and stacked.bytes(2) == 2 * 10 * 4 * 4
    assert shared.tensors(2) == {"pos": []} and shared.bytes(2) == 2
    assert ragged.tensors(2) == {"head@0": [3, 4], "head@1": [5, 4]} and ragged.bytes(2) == 8 * 8 * 4
    assert stacked.of(1) == [10, 4] and ragged.of(1) == [5, 4]


def in_parts(document: Json, members: object) -> None:
    document["version"] = [1, 3]
    entry_of(document)["wide"][0]["members"] = members


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(surprise=1), ["unknown surprise", "known: format, version"]),
        (lambda d: d.pop("weights"), ["weights missing"]),
        (lambda d: d.update(format="zip"), ["not a widepack manifest"]),
        (lambda d: d.update(version=[1]), ["version", "[1, 0]"]),
        (lambda d: d.update(version=[True, 0]), ["version"]),
        (lambda d: d.update(version=[0, 9]), ["0.9 was never published"]),
        (lambda d: d.update(version=[1, 6]), ["1.6 is newer than 1.5", "update widepack"]),
        (lambda d: d.update(members=[]), ["0 members"]),
        (lambda d: d.update(members={}), ["members: expected a list"]),
        (lambda d: d["members"][1].update(name="a"), ["'a' occurs twice"]),
        (lambda d: d["members"][1].update(name="\x1b[2J"), ["members[1]: name", "control"]),
        (lambda d: d["members"][1].update(name=""), ["members[1]: name"]),
        (lambda d: d["members"][1].update(source="\x1b]0;"), ["members[1]: source"]),
        (lambda d: d["members"][1].update(sha256=HASH.upper()), ["members[1]", "64 hex"]),
        (lambda d: d["members"][1].update(bytes=-1), ["members[1]: bytes"]),
        (lambda d: d["members"][1].update(bytes=1.0), ["members[1]: bytes"]),
        (
            lambda d: d["weights"][0].update(kind="wide"),
            ["fc.weight", "'wide' is unknown", "shared, stacked, ragged"],
        ),
        (lambda d: d["weights"][0].update(dtype="object"), ["fc.weight", "'object' is unknown"]),
        (lambda d: d["weights"][0].update(shape=[2**62, 2]), ["fc.weight", "64 bits"]),
        (lambda d: d["weights"][0].update(shape=[1] * 65), ["fc.weight", "65 dims"]),
        (lambda d: d["weights"][0].update(shape=[-1]), ["fc.weight", "shape[0]"]),
        (lambda d: d["weights"][0].update(shape=[True]), ["fc.weight", "shape[0]"]),
        (lambda d: d["weights"][0].update(name="pos"), ["'pos' occurs twice"]),
        (lambda d: d["weights"][0].update(name="head@1"), ["'head@1' occurs twice"]),
        (lambda d: d["weights"][0].update(aliases=["pos"]), ["'pos' occurs twice"]),
        (lambda d: d["weights"][2].update(shape=[[3, 4]]), ["head", "each of the 2 members"]),
        (lambda d: d["weights"][2].update(shape=[[3, 4], [5]]), ["head", "one rank"]),
        (lambda d: d.update(entries={}), ["at least one"]),
        (lambda d: d["entries"].update({"a b": entry_of(d)}), ["'a b' is not a valid name of an entry"]),
        (lambda d: d.update(probe="probe.safetensors"), ["probe", "not in the list of files"]),
        (lambda d: d.update(probe=PROGRAM + "x"), ["probe"]),
        (lambda d: d.update(state="x"), ["state"]),
        (lambda d: d.update(provenance=[]), ["provenance: expected an object"]),
        (lambda d: entry_of(d)["inputs"][0].update(type="float32[B,Q]"), ["names the dim 'Q'", "B, H"]),
        (lambda d: entry_of(d)["inputs"][0].update(type="float32[B,H*2]"), ["is not a type"]),
        (lambda d: entry_of(d)["inputs"][0].update(type="float32"), ["is not a type"]),
        (lambda d: entry_of(d)["inputs"][1].update(name="x"), ["inputs: the name 'x' occurs twice"]),
        (lambda d: entry_of(d)["inputs"][1].update(low=3, high=2), ["3..2"]),
        (lambda d: entry_of(d)["inputs"][1].update(low="0"), ["low", "integer"]),
        (lambda d: entry_of(d)["signature"].pop(), ["each of the 2 input leaves once"]),
        (
            lambda d: entry_of(d)["signature"][1].__setitem__(2, {"leaf": 0}),
            ["each of the 2 input leaves once"],
        ),
        (
            lambda d: entry_of(d)["signature"][0].__setitem__(1, "var"),
            ["'var' is unknown", "positional, keyword"],
        ),
        (lambda d: entry_of(d)["signature"][0].__setitem__(2, {"code": "x"}), ["is not a tree"]),
        (lambda d: entry_of(d).update(result={"leaf": 0}), ["all 2 output leaves"]),
        (lambda d: entry_of(d)["outputs"][0].update(kind="both"), ["'both' is unknown"]),
        (
            lambda d: entry_of(d)["dims"].update({"a-b": entry_of(d)["dims"]["B"]}),
            ["'a-b' is not a valid name of a dim"],
        ),
        (lambda d: entry_of(d)["dims"]["H"].update(max=0), ["from 1 to 0 is empty"]),
        (lambda d: entry_of(d)["guards"][0].update(expr=["exec", "H", 1]), ["is not an expression"]),
        (lambda d: entry_of(d)["guards"][0].update(expr=["le", "Q", 1]), ["'Q' is not one of B, H"]),
        (lambda d: entry_of(d)["member"].append("programs/none.json"), ["not in the list of files"]),
        (lambda d: entry_of(d).update(member=[]), ["signatures must name"]),
        (lambda d: entry_of(d).update(signatures=[0]), ["each of the 2 members"]),
        (lambda d: entry_of(d).update(signatures=[0, 1]), ["one of the 1 member programs"]),
        (lambda d: entry_of(d)["wide"][0].update(device="../cpu"), ["not a kind of device"]),
        (lambda d: entry_of(d)["wide"][0].update(pattern="all"), ["'all' is unknown", "shared, each"]),
        (lambda d: entry_of(d)["wide"][0].update(batch=[8, 1]), ["from 8 to 1"]),
        (lambda d: entry_of(d)["wide"][0].update(file="../../etc/passwd"), ["not in the list of files"]),
        (lambda d: entry_of(d)["wide"][0].update(members=[0, 1]), ["unknown members"]),
        (lambda d: in_parts(d, [0, 2]), ["2 members from number 0 are not a part of the 2 members"]),
        (lambda d: in_parts(d, [1, 2]), ["2 members from number 1 are not a part"]),
        (lambda d: in_parts(d, [0, 0]), ["expected [first, count]"]),
        (lambda d: in_parts(d, [2**62, 2**62]), ["are not a part"]),
        (lambda d: in_parts(d, [-1, 1]), ["wide[0]: members[0]"]),
        (lambda d: in_parts(d, [1]), ["expected [first, count]"]),
        (lambda d: in_parts(d, {}), ["members: expected a list"]),
        (lambda d: entry_of(d)["pt2"].update({"none": PROGRAM}), ["'none' is unknown"]),
    ],
)
def test_invalid_values_are_refused(edit: Callable[[Json], object], words: list[str]) -> None:
    refused(edited(edit), *words)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "programs/../x",
        "programs//x",
        "a/b/x",
        "other/x",
        "C:\\x",
        ".tmp",
        "x\n",
        "-x",
        "é",
        "a" * 200,
    ],
)
def test_refuses_names_outside_the_folder(name: str) -> None:
    odd = f"{name}-{HASH[:16]}.json"
    refused(
        edited(lambda d: d["files"].update({odd: {"bytes": 1, "sha256": HASH}})), "is not a valid file name"
    )


def test_refuses_a_name_without_its_hash() -> None:
    refused(
        edited(lambda d: d["files"].update({"x-0000000000000000.json": {"bytes": 1, "sha256": HASH}})),
        "must contain 0123456789abcdef",
    )
    with pytest.raises(ArtifactError, match="not a valid file name"):
        file_name("../x", "json", HASH)


def test_digest_is_checked() -> None:
    data = example().to_json()
    data["provenance"]["torch"] = "2.12.0"
    refused(json.dumps(data).encode(), "its digest is sha256:", "changed or damaged")
    refused(json.dumps({**data, "digest": 3}).encode(), "digest: expected sha256:")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[]", "not a widepack manifest"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"x": {"b": 1, "c": 2, "b": 1}}', "'b' occurs twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "outside float64"),
        (b'{"a": ' + b"9" * 19 + b"}", "outside 64 bits"),
        (b'{"a": -' + b"9" * 100_000 + b"}", "outside 64 bits"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested over 200 deep"),
        (b"[" * 1_000_000, "nested over 200 deep"),
        (b'{"a":' * 1_000_000, "nested over 200 deep"),
        (b'{"a": 1} x', "not JSON"),
        (b"\x80\x04\x95", "not JSON"),
        (b'{"a": "\\ud800"}', "not valid Unicode"),
        (b'{"a": "\\uDFFF\\uD800"}', "not valid Unicode"),
        (b'{"\\udC00": 1}', "not valid Unicode"),
        (b'{"a": "\\ud83d\\ude00"}', "not a widepack manifest"),
    ],
)
def test_invalid_json_is_refused(data: bytes, words: str) -> None:
    refused(data, words)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not valid Unicode"):
        replace(example(), provenance={"file": "\udcff"}).sealed(FILES)
    data = example().to_json()
    data["provenance"] = {"file": "\ud800"}
    refused(json.dumps(data).encode(), "not valid Unicode")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda v: st.lists(v) | st.dictionaries(st.text(string.ascii_letters), v),
        max_leaves=20,
    )
)
def test_canonical_json_reads_back(value: Any) -> None:
    data = strict_json.canonical(value)
    assert strict_json.parse(data, "x") == value
    assert strict_json.canonical(strict_json.parse(data, "x")) == data


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["shared", "stacked", "ragged"]),
            st.sampled_from(list(ITEM_BYTES)),
            st.lists(st.integers(0, 9), max_size=4),
        ),
        max_size=5,
    )
)
def test_weight_tables_read_back(rows: list[tuple[str, str, list[int]]]) -> None:
    table = tuple(
        Weight(f"w{i}", kind, dtype, [shape, shape] if kind == "ragged" else list(shape), "parameter")
        for i, (kind, dtype, shape) in enumerate(rows)
    )
    manifest = replace(example(), weights=table).sealed(FILES)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@given(st.data())
def test_no_edit_of_the_bytes_passes(data: st.DataObject) -> None:
    """A change of any byte is refused or gives an equal manifest, for example a changed space."""
    raw = bytearray(example().to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        found = Manifest.from_bytes(bytes(raw))
    except ArtifactError:
        return
    assert found == example()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=5), v, max_size=4),
    )
)
def test_no_value_raises_another_exception(value: Any) -> None:
    for key in example().to_json():
        try:
            Manifest.from_bytes(edited(lambda d, key=key: d.update({key: value})))  # type: ignore[misc]  # mypy knows no default in a lambda
        except ArtifactError as e:
            assert re.search(r"\w", str(e))


def test_imports_no_torch() -> None:
    code = (
        "import sys, widepack_artifacts, widepack_artifacts.reader, widepack_artifacts.writer; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'safetensors', 'widepack')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
