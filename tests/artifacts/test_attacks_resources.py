"""Tests attacks 43 to 54 of ATTACKS.md: memory, work and time of a load, trees, and long names."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import SELF, W, X, looped, probe_with, refused, tensors, wide
from forged import Forged, golden, node, ref
from inside import prologue_bytes

import widepack
from widepack import load
from widepack.errors import ArtifactError, ProbeError, UsageError
from widepack.lowering import pattern_programs
from widepack.system.deadline import Deadline, over
from widepack_artifacts.file_identity import bytes_on_disk
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.weights import Weights


def entries_of(forged: Forged, count: int) -> Forged:
    """Returns an artifact that has the same entry `count` times and no probe."""
    forged.manifest.update(probe="", entries={f"e{i}": copy.deepcopy(forged.entry) for i in range(count)})
    return forged


def test_memory_of_the_prologues_of_many_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forged = Forged().add(
        node("b0", "aten.flatten.using_ints", W),
        node("b1", "aten.slice.Tensor", ref("b0"), 0, 0, 1),
        node("b2", "aten.repeat.default", ref("b1"), [1_500_000]),
        node("b3", "aten.flatten.using_ints", X),
        node("b4", "aten.slice.Tensor", ref("b3"), 0, 0, 1),
        node("b5", "aten.mul.Tensor", ref("b2"), ref("b4")),
    )
    path = entries_of(forged, 1).save(tmp_path / "one")
    load(path, limit=0.1)
    forged.manifest["entries"]["forward"] = forged.manifest["entries"]["e0"]
    path = entries_of(forged, 6).save(tmp_path / "many")
    first = refused(
        path,
        "would bring the memory of this load to",
        "in programs that are bound already",
        "load(limit=",
        limit=0.1,
    )
    assert (
        refused(path, "in programs that are bound already", limit=0.1) == first
    )  # programs that passed alone are recorded now
    ens = load(path, limit=1.0)
    assert prologue_bytes(ens) >= 6 * 4 * 1_500_000
    ens.close()
    assert prologue_bytes(ens) == 0


def test_a_repeated_load_is_refused_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored record of a program that passed includes its work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    step = [*wide(X, 2**10), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(30)]]
    path = entries_of(Forged().add(*step), 12).save(tmp_path)
    texts = {refused(path, "the work of this load", limit=0.05) for _ in range(4)}
    assert len(texts) == 1
    found = re.search(
        r"load to ([0-9.]+) s of a core; .* may take ([0-9.]+) s .*"
        r"load\(limit=([0-9.e+-]+)\) allows this much",
        texts.pop(),
    )
    assert found and float(found[1]) > float(found[2])


def test_holes_and_unread_weights_do_not_raise_the_budget(tmp_path: Path) -> None:
    """A hole in a sparse file and a weight that no program reads do not raise the budget."""
    big = 2**24

    def forge(count: int, read: bool = False) -> Path:
        def longer(data: bytes) -> bytes:
            length = struct.unpack("<Q", data[:8])[0]
            found, body = json.loads(data[8 : 8 + length]), data[8 + length :]
            found["more"] = {"dtype": "U8", "shape": [big], "data_offsets": [len(body), len(body) + big]}
            return tensors(found, body + b"\1" * big)

        forged = (
            Forged().change("weights-", longer).add(node("a", "aten.zeros.default", [count], device=SELF))
        )
        forged.manifest["weights"].append(
            {
                "name": "more",
                "kind": "shared",
                "dtype": "uint8",
                "shape": [big],
                "role": "buffer",
                "aliases": [],
            }
        )
        for program in forged.programs() if read else []:
            program["weights"].append(["more", "more", "shared", f"uint8[{big}]"])
        return forged.save(tmp_path / f"{count} {read}")

    load(forge(1_000_000, read=True), limit=0.01)  # 4 MB; every load may take 2.7 MB
    refused(forge(1_000_000), "may take 2.7 MB", limit=0.01)
    path = forge(1_000_000 + 1, read=True)
    place = next(path.glob("weights-*"))
    size = place.stat().st_size
    os.truncate(place, size - big)
    os.truncate(place, size)
    if place.stat().st_blocks * 512 > big // 2:
        pytest.skip("this file system has no holes")
    assert bytes_on_disk(place) < 10_000 + size - big
    refused(path, "may take 2.7 MB", limit=0.01)


def test_many_and_repeated_names_in_a_header(tmp_path: Path) -> None:
    def forge(names: list[Any], many: int = 10) -> Path:
        rows: dict[str, Any] = {
            f"z{i}": {"dtype": "F64", "shape": [0, 2], "data_offsets": [0, 0]} for i in range(many)
        }
        place = tmp_path / "weights.safetensors"
        place.write_bytes(tensors({**rows, "__metadata__": {"complex128": json.dumps(names)}}))
        return place

    start = time.process_time()
    assert len(Weights([forge([f"z{i}" for i in range(6_000)], 6_000)])) == 6_000
    assert time.process_time() - start < 1
    for names, words in (
        (["z1", "z2", "z1"], "names 'z1' twice"),
        (["gone"], "not stored as pairs"),
        ([3], "not stored as pairs"),
    ):
        with pytest.raises(ArtifactError, match=words):
            Weights([forge(names)])


def test_a_long_key_above_many_leaves(tmp_path: Path) -> None:
    """The path of a leaf has all keys above it. A reader builds no paths, and keys have a limit."""
    many = 20_000
    for length, words in (
        (1_000_000, "at most 1000 characters"),
        (1000, "has 1 outputs, but the entry has 20000"),
    ):
        forged = Forged()
        shape: Any = {"tuple": [{"leaf": i} for i in range(many)]}
        for _ in range(1 if length > 1000 else 30):
            shape = {"dict": [["k" * length, shape]]}
        forged.entry["outputs"] = [{**forged.entry["outputs"][0], "name": ""}] * many
        forged.entry["result"] = shape
        refused(forged.save(tmp_path / str(length)), words)


def test_a_long_name_of_a_ragged_weight_with_many_members(tmp_path: Path) -> None:
    many = 60_000
    rows = [Weight(f"{i}" + "w" * 990, "ragged", "bool", [[]] * many, "buffer") for i in range(12)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(row.bytes(many) for row in rows) == 12 * many
    with pytest.raises(ArtifactError, match="differ from the manifest(?s:.*)and more") as caught:
        Weights([golden("mlp") / next(n for n in Forged().files if n.startswith("weights-"))]).check(
            rows, many
        )
    assert len(str(caught.value)) < 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    for other in ("@0", "@1"):  # the second of two members' tensors, and no third
        for where in ("name", "aliases"):
            forged = Forged("ragged")
            row = next(w for w in forged.manifest["weights"] if w["kind"] == "ragged")
            one = next(w for w in forged.manifest["weights"] if w["kind"] != "ragged")
            one[where] = row["name"] + other if where == "name" else [row["name"] + other]
            refused(forged.save(tmp_path / f"{other}{where}"), "occurs twice", "ragged weight")
    one["aliases"] = [row["name"] + "@2", row["name"] + "@01"]
    load(forged.save(tmp_path / "free"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"signature": [["x", "positional", {"tuple": [{"leaf": 0}, {"leaf": 0}]}, False]]},
            "each of the 1 input leaves once",
        ),
        ({"result": {"dict": [["k", {"leaf": 0}], ["k", {"const": 7}]]}}, "the key 'k' occurs twice"),
        ({"result": {"output": ["A", [[1, {"leaf": 0}], [1, {"const": 7}]]]}}, "the key '1' occurs twice"),
        ({"result": {"dict": [[True, {"leaf": 0}], [1, {"const": 7}]]}}, "keys are strings or integers"),
        ({"result": {"output": ["A\x1b[31m", [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"output": ["A\u202e", [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"output": ["A" * 1001, [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"dict": [["k\x1b]0;x\x07", {"leaf": 0}]]}}, "a key has"),
        ({"result": {"dict": [["k\u2066", {"leaf": 0}]]}}, "a key has"),
        ({"result": {"dict": [["k\n", {"leaf": 0}]]}}, "a key has"),
    ],
)
def test_trees_with_repeated_leaves_keys_or_control_characters(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    forged = Forged()
    forged.entry.update(change)
    refused(forged.save(tmp_path), words)


def test_long_names_in_error_messages(tmp_path: Path) -> None:
    long = "n" * 1000
    changes: list[Callable[[Forged], object]] = [
        lambda f: f.entry.update(guards=[{"expr": "Q" * 100_000, "source": ""}]),
        lambda f: f.entry["dims"].update(
            {f"d{i}": f.entry["dims"]["B"] for i in range(10_000)}, **{"a b" * 10_000: f.entry["dims"]["B"]}
        ),
        lambda f: f.entry.update(dims={f"d{i}": f.entry["dims"]["B"] for i in range(10_000)}),
        lambda f: [m.update(name=long) for m in f.manifest["members"]],
        lambda f: f.manifest["weights"][0].update(name=long, kind="gone"),
        lambda f: f.manifest["files"].update(
            {f"x{i}-{'0' * 16}.bin": {"bytes": 1, "sha256": "0" * 64} for i in range(1000)}
        ),
    ]
    for i, change in enumerate(changes):
        forged = Forged()
        change(forged)
        refused(forged.save(tmp_path / str(i)))  # `refused` checks the length of the error


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.__setitem__(0, 0.0),
        lambda p: p.__setitem__(0, float("nan")),
        lambda p: p.__setitem__(0, float("inf")),
        lambda p: p.__setitem__(0, 1e300),
        lambda p: p.__setitem__(0, 1.5),
        lambda p: p[:0],
        lambda p: p[None],
        lambda p: p[0],
        lambda p: p[:-1],
        lambda p: p.to(torch.int64),
        lambda p: p.to(torch.complex64),
    ],
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_recorded_answers_of_wrong_forms_in_another_dtype(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor | None], dtype: str | None
) -> None:
    def change_answer(p: dict[str, torch.Tensor]) -> None:
        changed = change(p["shared.y0.0"])
        p["shared.y0.0"] = p["shared.y0.0"] if changed is None else changed.contiguous()

    refused(probe_with(Forged(), change_answer).save(tmp_path), "probe: ", kind=ProbeError, dtype=dtype)


def test_many_entries_that_are_lowered_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries share one deadline, and equal programs are lowered once."""
    forged = Forged()
    forged.entry["wide"] = []
    calls: list[int] = []
    original = pattern_programs.simplified
    monkeypatch.setattr(pattern_programs, "simplified", lambda *a: calls.append(1) or original(*a))  # type: ignore[func-returns-value]  # append() gives None
    ens = load(entries_of(forged, 20).save(tmp_path / "same"))
    assert len(calls) == 1
    x = torch.arange(12.0).reshape(2, 6)
    assert all(torch.equal(ens.entry(name)(x), load(golden("mlp"))(x)) for name in ("e0", "e19"))
    one = Deadline(1.0)
    for files, spent in ((["a"], 0.0), (["a"], 30.0), (["a", "b"], 30.0)):
        one.spent += spent
        with one.within(files, [10] * len(files)):
            assert not over()  # one file may take 65 s, both may take 70 s
    assert one.spent < 61
    one.spent += 10
    with one.within(["b"], [10]):
        assert over()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("how", ["slice", "part of a list", "reshape", "loop"])
def test_memory_that_a_small_view_keeps_alive(tmp_path: Path, how: str) -> None:
    """Twelve tensors of 48 MB stay in memory, because the last nodes read one number of each."""
    nodes = [node("f", "aten.flatten.using_ints", X), node("one", "aten.slice.Tensor", ref("f"), 0, 0, 1)]
    for i in range(12):
        big = node(f"big{i}", "aten.repeat.default", ref("one"), [12_000_000])
        if how == "slice":
            nodes += [big, node(f"v{i}", "aten.slice.Tensor", ref(f"big{i}"), 0, 0, 1)]
        elif how == "part of a list":
            nodes += [
                big,
                node(f"l{i}", "aten.split.Tensor", ref(f"big{i}"), 11_999_999),
                node(f"v{i}", "operator.getitem", ref(f"l{i}"), 1),
            ]
        elif how == "reshape":
            nodes += [
                big,
                node(f"s{i}", "aten.narrow.default", ref(f"big{i}"), 0, 5, 1),
                node(f"v{i}", "aten.reshape.default", ref(f"s{i}"), [1]),
            ]
        else:
            inner = [
                node("big", "aten.repeat.default", ref("a"), [12_000_000]),
                node("v", "aten.slice.Tensor", ref("big"), 0, 0, 1),
            ]
            loop = looped(inner, 1, members=3)
            nodes += [
                {**loop, "name": f"l{i}", "args": [ref("one")]},
                node(f"v{i}", "operator.getitem", ref(f"l{i}"), 0),
            ]
            nodes += [node(f"w{i}", "operator.getitem", ref(f"v{i}"), 0)]
    last = "w" if how == "loop" else "v"
    path = (
        Forged()
        .add(*nodes, node("all", "aten.cat.default", [ref(f"{last}{i}") for i in range(12)]))
        .save(tmp_path)
    )
    refused(path, "would bring the memory of this load to", "load(limit=")
    load(path, limit=10).close()


VIEWS = {
    "expand": lambda many: [
        node("u", "aten.unsqueeze.default", ref("o"), 1),
        node("v", "aten.expand.default", ref("u"), [3, many, -1, -1]),
    ],
    "as_strided": lambda many: [
        node("v", "aten.as_strided.default", ref("o"), [3, many, 4, 3], [0, 0, 0, 0])
    ],
}


@pytest.mark.parametrize("many", [10**8, 2**30])
@pytest.mark.parametrize("kind", VIEWS)
def test_outputs_that_are_larger_than_their_memory(tmp_path: Path, kind: str, many: int) -> None:
    """A view takes no memory, but reading all its values may make a copy."""
    forged = Forged()
    for program in forged.programs():
        last = program["outputs"][0][0]
        program["nodes"] += [node("o", "aten.alias.default", last), *VIEWS[kind](many)]
        program["outputs"][0][0] = ref("v")
    text = refused(forged.save(tmp_path))
    words = ("reading the outputs would bring the memory", "would bring the work of this load", "cannot run")
    assert any(w in text for w in words), text


def test_an_output_of_another_size_is_not_copied(tmp_path: Path) -> None:
    """The answer is refused even without a limit."""
    forged = Forged()
    for program in forged.programs():
        program["nodes"] += [
            node("o", "aten.alias.default", program["outputs"][0][0]),
            *VIEWS["expand"](2**30),
        ]
        program["outputs"][0][0] = ref("v")
    with pytest.raises(ProbeError, match="numbers, the artifact's answer is of another size"):
        load(forged.save(tmp_path), limit=None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"limit": 10**400}, "a number of 1329 bits is not a limit"),
        ({"limit": 1e300}, "is not a limit"),
        ({"expect": 5}, "give sha256: and 64 hex digits"),
        ({"expect": b"sha256:" + b"0" * 64}, "give sha256: and 64 hex digits"),
        ({"expect": "0" * 64}, "give sha256: and 64 hex digits"),
        ({"expect": "sha256:" + "AB" * 32}, "in lower case"),
        ({"expect": "x" * 100_000}, "is not a digest"),
    ],
)
def test_wrong_arguments_of_a_load_are_usage_errors(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    refused(Forged().save(tmp_path), words, kind=UsageError, **how)


@pytest.mark.parametrize("how", ["drop", "append", "export", "update"])
def test_member_programs_that_only_a_revision_runs(how: str, tmp_path: Path) -> None:
    """The wide programs are the golden ones, so that a load passes. The member program takes 8.6 GB."""
    forged = Forged().add(node("z", "aten.full.default", [2**31], 1.0, device=SELF), start="programs/member.")
    path, out = str(forged.save(tmp_path)), str(tmp_path / "out.wide")
    load(path)
    member = str(tmp_path / "m.pt")
    torch.save(load(path).state_dict(0), member)
    calls: dict[str, Callable[[], object]] = {
        "drop": lambda: widepack.drop(path, ["mlp-0"], out=out),
        "append": lambda: widepack.append(path, [member], out=out),
        "update": lambda: widepack.update(path, {0: member}, out=out),
        "export": lambda: widepack.export(path, str(tmp_path / "m.pt2"), to="pt2", member=0),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = r"node z \(aten.full.default\) would bring the memory of this run .* when one member runs$"
    with pytest.raises(ArtifactError, match=words):
        calls[how]()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20
    assert not Path(out).exists()
