"""Tests the attacks of ATTACKS.md on weights that are stored as a base and low-rank factors."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import refused, tensors
from forged import Forged
from safetensors.torch import load as read
from safetensors.torch import save

from widepack import load
from widepack.errors import ArtifactError

Edit = Callable[[Any], object]
NAME = "inner.weight"  # [32, 24] in one member, ranks 2, 1 and 3
HEADER = struct.Struct("<4sBBQQQQ32s")


def factored(manifest: Any) -> Any:
    """Returns the row of `inner.weight` among the factored weights."""
    (row,) = (w for w in manifest["factored"]["weights"] if w["name"] == NAME)
    return row


def row_of(manifest: Any, name: str) -> Any:
    """Returns a row of the table of stored weights."""
    (row,) = (w for w in manifest["weights"] if w["name"] == name)
    return row


def add(manifest: Any, name: str, kind: str = "shared", **more: Any) -> None:
    row = {"name": name, "kind": kind, "dtype": "float32", "shape": [1], "role": "factor", "aliases": []}
    manifest["weights"].append({**row, **more})


def drop(manifest: Any, name: str) -> None:
    manifest["weights"].remove(row_of(manifest, name))


def ragged(manifest: Any) -> None:
    """Adds a Ragged weight, one of whose tensors has the name of a factored weight."""
    add(manifest, "head", "ragged", role="buffer", shape=[[1]] * 3)
    factored(manifest).update(name="head@1")


Change = Callable[[dict[str, torch.Tensor]], object]
"""A change of the tensors of a corrections file."""

FORMS: dict[str, tuple[Edit, str]] = {
    "other rows": (lambda m: row_of(m, f"{NAME}@left").update(shape=[31, 3]), "the factors are [31, 3]"),
    "other columns": (lambda m: row_of(m, f"{NAME}@right").update(shape=[3, 25]), "[3, 25]"),
    "other ranks of both": (lambda m: row_of(m, f"{NAME}@right").update(shape=[2, 24]), "[2, 24]"),
    "three dims": (lambda m: row_of(m, f"{NAME}@left").update(shape=[32, 3, 1]), "[32, 3, 1]"),
    "no dims": (lambda m: row_of(m, f"{NAME}@right").update(shape=[]), "the factors are [32, 3] and []"),
    "rank 0": (
        lambda m: (
            row_of(m, f"{NAME}@left").update(shape=[32, 0]),
            row_of(m, f"{NAME}@right").update(shape=[0, 24]),
        ),
        "r from 1 to 24",
    ),
    "rank over the sizes": (
        lambda m: (
            row_of(m, f"{NAME}@left").update(shape=[32, 25]),
            row_of(m, f"{NAME}@right").update(shape=[25, 24]),
        ),
        "r from 1 to 24",
    ),
    "other dtypes of both": (lambda m: row_of(m, f"{NAME}@left").update(dtype="float64"), "one float"),
    "integers": (
        lambda m: [row_of(m, f"{NAME}@{p}").update(dtype="int32") for p in ("left", "right")],
        "one float",
    ),
    "complex base": (lambda m: row_of(m, f"{NAME}@base").update(dtype="complex64"), "the base is complex64"),
    "base of one dim": (lambda m: row_of(m, f"{NAME}@base").update(shape=[768]), "two dims or more"),
    "base of size 0": (lambda m: row_of(m, f"{NAME}@base").update(shape=[0, 24]), "none of them 0"),
    "stacked base": (lambda m: row_of(m, f"{NAME}@base").update(kind="stacked"), "is no shared weight"),
    "ragged base": (
        lambda m: row_of(m, f"{NAME}@base").update(kind="ragged", shape=[[32, 24]] * 3),
        "is no shared weight",
    ),
    "shared factor": (lambda m: row_of(m, f"{NAME}@left").update(kind="shared"), "is no stacked weight"),
    "parameter as base": (
        lambda m: row_of(m, f"{NAME}@base").update(role="parameter"),
        "no shared weight of role factor",
    ),
    "alias of a factor": (
        lambda m: row_of(m, f"{NAME}@base").update(aliases=["tied"]),
        "is no shared weight",
    ),
    "missing base": (lambda m: drop(m, f"{NAME}@base"), f"'{NAME}@base' is no shared weight"),
    "missing factor": (lambda m: factored(m).update(right="none"), "right: 'none' is no stacked weight"),
    "one factor twice": (lambda m: factored(m).update(right=f"{NAME}@left"), "occurs twice"),
    "base of two": (lambda m: factored(m).update(base="head.weight@base"), "occurs twice"),
    "one weight twice": (
        lambda m: m["factored"]["weights"].append(factored(m)),
        "occurs twice",
    ),
    "unused factor": (lambda m: add(m, "more"), "no weight has the factor 'more'"),
    "factor without the key": (lambda m: m.pop("factored"), "no key factored"),
    "ranks over r": (lambda m: factored(m).update(ranks=[2, 1, 4]), "3 numbers from 0 to 3"),
    "negative rank": (lambda m: factored(m).update(ranks=[2, 1, -1]), "ranks[2]"),
    "fewer ranks": (lambda m: factored(m).update(ranks=[2, 1]), "3 numbers from 0 to 3"),
    "more ranks": (lambda m: factored(m).update(ranks=[2, 1, 3, 1]), "3 numbers from 0 to 3"),
    "no ranks": (lambda m: factored(m).update(ranks=[]), "3 numbers from 0 to 3"),
    "no number": (lambda m: factored(m).update(ranks=[2, True, 1]), "ranks[1]"),
    "huge rank": (lambda m: factored(m).update(ranks=[2**62, 1, 1]), "3 numbers from 0 to 3"),
    "stored name": (lambda m: factored(m).update(name="inner.bias"), "'inner.bias' occurs twice"),
    "name of its base": (lambda m: factored(m).update(name=f"{NAME}@base"), "occurs twice"),
    "stored alias": (lambda m: row_of(m, "inner.bias").update(aliases=[NAME]), f"'{NAME}' occurs twice"),
    "alias that is stored": (lambda m: factored(m).update(aliases=["head.bias"]), "'head.bias' occurs twice"),
    "alias of its own": (lambda m: factored(m).update(aliases=[NAME]), f"'{NAME}' occurs twice"),
    "tensor of a ragged weight": (ragged, "a tensor of the ragged weight 'head'"),
    "a name that controls terminals": (lambda m: factored(m).update(name="\x1b[2J"), "control characters"),
    "role": (lambda m: factored(m).update(role="factor"), "'factor' is unknown"),
    "version 1.3": (lambda m: m.update(version=[1, 3]), "unknown factored"),
    "no weights": (lambda m: m["factored"].update(weights=[]), "without factored weights"),
    "bytes of the stored factors": (
        lambda m: row_of(m, f"{NAME}@left").update(shape=[2**62, 3]),
        "more bytes than 64 bits can count",
    ),
}


def scaled(manifest: Any, shape: list[int], kind: str = "stacked", **more: Any) -> None:
    """Gives a factored weight of [32, 24] a scale."""
    add(manifest, "scale", kind, shape=shape, **more)
    factored(manifest).update(scale="scale")


FORMS |= {
    "scale of other sizes": (lambda m: scaled(m, [24, 1]), "expected float32[32, 1] or float32[1, 24]"),
    "scale of one dim": (lambda m: scaled(m, [32]), "the scale is float32[32]"),
    "scale of another dtype": (lambda m: scaled(m, [32, 1], dtype="float64"), "the scale is float64"),
    "shared scale": (lambda m: scaled(m, [32, 1], "shared"), "scale: 'scale' is no stacked weight"),
    "missing scale": (lambda m: factored(m).update(scale="none"), "scale: 'none' is no stacked weight"),
    "scale without a name": (lambda m: factored(m).update(scale=""), "scale"),
    "a factor as scale": (lambda m: factored(m).update(scale=f"{NAME}@left"), "occurs twice"),
    "scale that no weight has": (lambda m: add(m, "scale", "stacked", shape=[32, 1]), "no weight has the"),
}


@pytest.mark.parametrize("what", FORMS)
def test_factors_that_do_not_fit(tmp_path: Path, what: str) -> None:
    forged = Forged("fleet")
    edit, words = FORMS[what]
    edit(forged.manifest)
    refused(forged.save(tmp_path), "manifest: ", words)


def test_factors_that_are_not_in_the_files(tmp_path: Path) -> None:
    forged = Forged("fleet")
    factored(forged.manifest).update(base="b", left="l", right="r")
    for part in ("base", "left", "right"):
        row_of(forged.manifest, f"{NAME}@{part}").update(name=part[0])
    refused(forged.save(tmp_path / "names"), "b: nothing in the files", f"{NAME}@base: float32")
    forged = Forged("fleet")
    row_of(forged.manifest, f"{NAME}@base").update(dtype="float64")
    refused(forged.save(tmp_path / "dtype"), f"{NAME}@base: float32[32, 24] in the files, float64")


def corrections(forged: Forged, change: Change) -> Forged:
    """Changes the tensors of the corrections file."""

    def how(data: bytes) -> bytes:
        found = read(data)
        change(found)
        return save(found)

    return forged.change("corrections-", how)


def renamed(name: str) -> Change:
    return lambda t: t.update({name: t[f"{NAME}@0"].clone()})


def replaced(how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda t: t.update({f"{NAME}@0": how(t[f"{NAME}@0"])})


NO_CORRECTIONS = ["", "x", "@", "@3", "@00", "@-1", "@+1", "@1 ", "@1_0", "@0x1", "@\u0661", "@9" + "9" * 20]
TENSORS: dict[str, tuple[Change, str]] = {
    **{n: (renamed(f"{NAME}{n}"), "of no member's factored weight") for n in NO_CORRECTIONS},
    "stored": (renamed("inner.bias@0"), "the correction 'inner.bias@0' is of no member's factored weight"),
    "base": (renamed(f"{NAME}@base@0"), "of no member's factored weight"),
    "int8": (replaced(lambda t: t.view(torch.int8)), "is int8["),
    "float32": (replaced(lambda t: torch.zeros(3)), "is float32[3]; expected bytes"),
    "two dims": (replaced(lambda t: t.unsqueeze(0)), "; expected bytes"),
    "no dims": (replaced(lambda t: t[0].clone()), "is uint8[]; expected bytes"),
    "empty": (replaced(lambda t: t[:0].clone()), "is uint8[0]; expected bytes"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_unknown_tensors_in_the_corrections(tmp_path: Path, what: str) -> None:
    change, words = TENSORS[what]
    refused(corrections(Forged("fleet"), change).save(tmp_path), words)


def test_a_corrections_file_that_is_none(tmp_path: Path) -> None:
    names: list[Any] = ["../x", "/etc/passwd", "corrections-0123456789abcdef.safetensors", None, 3, [], {}]
    listed = Forged("fleet").manifest["files"]
    names += [next(n for n in listed if n.startswith(start)) for start in ("weights", "probe", "programs")]
    for k, name in enumerate(names):
        forged = Forged("fleet")
        forged.manifest["factored"]["corrections"] = name
        refused(forged.save(tmp_path / str(k)), "factored: corrections: ")
    text = Forged("fleet")
    (stored,) = (n for n in text.files if n.startswith("corrections-"))
    text.documents[stored.replace(".safetensors", ".json")] = {}
    text.manifest["factored"]["corrections"] = stored.replace(".safetensors", ".json")
    refused(text.save(tmp_path / "json"), "is another kind of file")
    path = Forged("fleet").save(tmp_path / "missing")
    next(path.glob("corrections-*")).unlink()
    refused(path, "corrections-", "No such file")
    refused(path, "corrections-", "No such file", verify="off")
    for data in (b"", b"\0" * 7, b"\xff" * 64, tensors({}, length=2**63)):
        forged = Forged("fleet").change("corrections-", lambda _, data=data: data)  # type: ignore[misc]  # as above
        refused(forged.save(tmp_path / f"{len(data)}{data[:1].hex()}"), "not a whole safetensors file")


def packed(
    magic: bytes = b"wpcr",
    version: int = 1,
    size: int = 4,
    count: int = 768,
    streams: tuple[bytes, bytes, bytes] = (zlib.compress(b"\x79" * 154), b"", b""),
) -> bytes:
    """Returns a correction. Default: all differences are 0, and the hash is wrong."""
    return HEADER.pack(magic, version, size, count, *map(len, streams), bytes(32)) + b"".join(streams)


BOMB = zlib.compress(bytes(2**28), 9)
WRONG = {
    "a part of a header": (packed()[:69], "69 bytes; its header has 70"),
    "magic": (packed(magic=b"PK\3\4"), "it begins with 50 4b 03 04"),
    "version": (packed(version=2), "of a newer widepack, or damaged"),
    "size of an element": (packed(size=8), "of 768 elements of 8 bytes"),
    "number of elements": (packed(count=2**63), "of 9223372036854775808 elements"),
    "lengths": (packed()[:-1], "follow the header"),
    "huge lengths": (
        HEADER.pack(b"wpcr", 1, 4, 768, 2**64 - 1, 1, 0, bytes(32)) + packed()[HEADER.size :],
        "follow the header",
    ),
    "bomb of signs": (packed(streams=(BOMB[:5000], b"", b"")), "a stream of other than 154 bytes"),
    "bomb of sizes": (packed(streams=(zlib.compress(bytes(154)), BOMB[:5000], b"")), "other than 768 bytes"),
    "bomb of large": (
        packed(streams=(zlib.compress(bytes(154)), zlib.compress(b"\xff" * 768), BOMB[:5000])),
        "other than 6144 bytes",
    ),
    "whole bomb": (packed(streams=(BOMB, b"", b"")), "bytes for 768 elements"),
    "no zlib": (packed(streams=(b"\x80\x04cos\nsystem\n", b"", b"")), "not of zlib"),
    "signs": (packed(streams=(zlib.compress(b"\xf3" * 154), b"", b"")), "over 242"),
    "fewer signs": (packed(streams=(zlib.compress(bytes(10)), b"", b"")), "other than 154 bytes"),
    "no signs": (packed(streams=(b"", b"", b"")), "154 bytes"),
    "sizes without signs": (
        packed(streams=(zlib.compress(b"\x79" * 154), zlib.compress(b"\0"), b"")),
        "other than 0 bytes",
    ),
    "hash": (packed(), "another SHA-256 than it records"),
}


@pytest.mark.parametrize("what", WRONG)
def test_corrections_that_are_damaged_or_bombs(tmp_path: Path, what: str) -> None:
    """Only a member's own weights and answers read them."""
    data, words = WRONG[what]
    wrong = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    )
    path = corrections(Forged("fleet"), lambda t: t.update({f"{NAME}@1": wrong})).save(tmp_path)
    ens = load(path)
    assert ens(torch.zeros(2, 24)).shape == (3, 2, 24)
    assert torch.isfinite(ens.state_dict(0)[NAME]).all()
    for call in (lambda: ens.state_dict(1), lambda: ens.member(1)(torch.zeros(2, 24))):
        with pytest.raises(ArtifactError) as caught:
            call()
        assert (words in str(caught.value) and "member 1" in str(caught.value)) or "@1" in str(caught.value)


def test_corrections_of_other_members_and_weights(tmp_path: Path) -> None:
    def exchange(one: str, other: str) -> Change:
        return lambda t: t.update({one: t[other], other: t[one]})

    for k, other in enumerate((f"{NAME}@1", "head.weight@0")):
        path = corrections(Forged("fleet"), exchange(f"{NAME}@0", other)).save(tmp_path / str(k))
        with pytest.raises(
            ArtifactError, match=r"weight inner\.weight: .* member 0: it gives a weight of another"
        ):
            load(path).member(0)(torch.zeros(2, 24))
    forged = Forged("fleet")
    factored(forged.manifest).update(ranks=[1, 2, 3])
    with pytest.raises(ArtifactError, match="member 0: it gives a weight of another SHA-256"):
        load(forged.save(tmp_path / "ranks")).state_dict(0)


def test_programs_that_read_other_weights_than_theirs(tmp_path: Path) -> None:
    x = torch.zeros(2, 24)
    for k, source in enumerate((f"{NAME}@base", f"{NAME}@left", "none", f"{NAME}@0", "")):
        forged = Forged("fleet")
        for program in forged.programs("programs/member."):
            (slot,) = (s for s in program["weights"] if s[1] == NAME)
            slot[1] = source
        with pytest.raises(ArtifactError, match=r"which the manifest's table does not have|is no(t| ) "):
            load(forged.save(tmp_path / f"member{k}")).member(0)(x)
    for source in (NAME, f"{NAME}@0", "none"):
        forged = Forged("fleet")
        for program in forged.programs():
            (slot,) = (s for s in program["weights"] if s[1] == f"{NAME}@left")
            slot[1] = source
        refused(forged.save(tmp_path / f"wide-{source}"), "which the manifest's table does not have")
    forged = Forged("fleet")
    for program in forged.programs():
        left, right = (
            next(s for s in program["weights"] if s[1] == f"{NAME}@{p}") for p in ("left", "right")
        )
        left[1], right[1] = right[1], left[1]
    refused(forged.save(tmp_path / "exchanged"))


def test_a_state_that_begins_as_a_part_of_a_factored_weight(tmp_path: Path) -> None:
    for k, name in enumerate(("f", "total@base", "total@left")):
        forged = Forged("state")
        m = forged.manifest
        m["version"] = [1, 4]
        add(m, "total@base", shape=[4, 4])
        add(m, "total@left", "stacked", shape=[4, 1])
        add(m, "total@right", "stacked", shape=[1, 4])
        row = {"name": "f", "role": "buffer", "aliases": [], "base": "total@base", "left": "total@left"}
        m["factored"] = {"weights": [{**row, "right": "total@right", "ranks": [1, 1]}], "corrections": ""}
        (state,) = forged.entry["state"]
        shape = ("[4,4]", "[4,4]", "[4,1]")[k]
        forged.entry["inputs"][state["input"]]["type"] = f"float32{shape}"
        forged.entry["outputs"][state["output"]]["type"] = f"float32{shape}"
        state["initial"] = name
        refused(forged.save(tmp_path / str(k)), f"its initial weight '{name}' is not in the table")
