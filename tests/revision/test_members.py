"""Members that come and go: what `update`, `append` and `drop` make is what a build from the same checkpoints makes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor, nn

import widepack
from widepack.planning import plan_cache
from widepack.verification import answers as verify
from widepack import ReviseReport, append, build, drop, load, update
from widepack.verification.tolerance import Wrong
from widepack.errors import ArtifactError, CheckpointError, MemberMismatch, UsageError, VerificationError, WidepackError
from widepack.planning.plan import Plan
from widepack.revision.weights import shard_size
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest, WideProgram
from widepack_artifacts.writer import Reader, Writer
from widepack_artifacts.weights import Weights
from widepack_cli.main import cli
from widepack_cli.shared.revision import lines

SPECS: dict[str, Any] = {"inputs": ["x=float32[B,6]"], "targets": ("cpu",), "pt2": False}


class Net(nn.Module):
    """A trunk, a norm with a buffer, a tied weight, a literal, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.trunk.weight
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.again(self.trunk(x).relu()))
        return self.head(hidden) * torch.tensor([1.0, 2.0, 3.0])


def member(make: Callable[[], nn.Module], seed: int, trunk: int = 0) -> nn.Module:
    """A member of its own, but for its trunk."""
    torch.manual_seed(seed + 10)
    net = make().eval()
    for name, p in net.state_dict().items():
        if p.is_floating_point():
            with torch.no_grad():
                torch.manual_seed(trunk if name.startswith(("trunk", "again")) else 100 * seed + len(name))
                p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "var" in name else 0.0)).abs_() if "var" in name else p.copy_(torch.randn_like(p) * 0.3)
    return net


def save(folder: Path, nets: Sequence[nn.Module], stem: str = "m") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{i}.pt" for i in range(len(nets))]
    for path, net in zip(paths, nets):
        torch.save(net.state_dict(), path)
    return paths


@pytest.fixture(scope="module")
def nets() -> list[nn.Module]:
    """Five members of one trunk, and a sixth of another."""
    return [*(member(Net, i) for i in range(5)), member(Net, 5, trunk=7)]


@pytest.fixture(scope="module")
def paths(nets: list[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save(tmp_path_factory.mktemp("ckpts"), nets)


Scratch = Callable[..., Path]


@pytest.fixture(scope="module")
def scratch(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """`scratch(0, 3, 2)` is the artifact that a build makes of these; `whole=True`: with programs of torch.export, and for CUDA too."""
    folder = tmp_path_factory.mktemp("scratch")

    def made(*order: int, whole: bool = False) -> Path:
        out = folder / f"{'-'.join(map(str, order))}{'-whole' if whole else ''}.wide"
        if not out.exists():
            build([paths[i] for i in order], out, model=Net, **(SPECS | {"pt2": True, "targets": ("cpu", "cuda")} if whole else SPECS))
        return out

    return made


@pytest.fixture
def three(scratch: Scratch) -> Path:
    """The artifact of the first three."""
    return scratch(0, 1, 2)


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "e.wide"))


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def whole(path: Path) -> Manifest:
    """The manifest of an artifact whose files are those that it names, bit for bit, and whose probe passes."""
    reader = Reader(path)
    reader.check_hashes()
    assert set(content(path)) == {*reader.manifest.files, "manifest.json"}
    load(path, verify="hashes").probe()
    return reader.manifest


def names_of(manifest: Manifest, but: Sequence[str] = ("probe", ".pt2")) -> set[str]:
    """The files of an artifact by their contents' hashes, but for those that hold drawn inputs or a time."""
    return {name for name in manifest.files if not any(b in name for b in but)}


def same(path: Path, scratch: Path, call: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Hold an artifact to one that was built: table, programs and weights by their hashes, state dicts and answers by their bits."""
    found, wanted = whole(path), whole(scratch)
    assert names_of(found) == names_of(wanted)
    assert found.weights == wanted.weights
    assert {n: (e.signatures, e.outputs, sorted(e.pt2)) for n, e in found.entries.items()} == {
        n: (e.signatures, e.outputs, sorted(e.pt2)) for n, e in wanted.entries.items()
    }
    assert [(m.sha256, m.bytes) for m in found.members] == [(m.sha256, m.bytes) for m in wanted.members]
    mine, theirs = load(path), load(scratch)
    for i in range(len(theirs)):
        own, other = mine.state_dict(i), theirs.state_dict(i)
        assert list(own) == list(other)
        assert all(torch.equal(own[k], other[k]) for k in own)
    if call:
        many = [torch.stack([a * (1 + i) for i in range(len(theirs))]) for a in call]
        for a, b in ((mine(*call), theirs(*call)), (mine.each(*many), theirs.each(*many))):
            assert all(torch.equal(p, q) for p, q in zip(a, b))


def own(path: Path, nets: Sequence[nn.Module], x: Tensor) -> None:
    """Hold an artifact to the members' own modules."""
    with torch.no_grad():
        for got, net in zip(load(path)(x), nets, strict=True):
            torch.testing.assert_close(got, net(x), rtol=1e-4, atol=1e-5)


X = torch.linspace(-2, 2, 24).reshape(4, 6)


def test_update(copy: Path, three: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch) -> None:
    before = Reader(copy).manifest
    report = update(copy, {1: paths[3]})
    same(copy, scratch(0, 3, 2), (X,))
    own(copy, [nets[0], nets[3], nets[2]], X)
    after = Reader(copy).manifest
    assert (report.did, report.kinds, report.lowered, report.left_out, report.members) == ("update", [], [], [], ("m0", "m1", "m2"))
    assert report.written in ("reflink", "kernel", "copy")
    assert (report.before, report.digest) == (before.digest, after.digest) and before.digest != after.digest
    assert after.members[1].source == str(paths[3]) and after.members[0] == before.members[0]
    gone = {n for n in before.files if n not in after.files}
    assert {n.partition("-")[0] for n in gone} == {"weights", "probe"}, "programs stay"
    (history,) = after.provenance["history"]
    assert history["did"] == "update" and history["from"] == before.digest
    assert history["members"] == [{"member": "m1", "source": str(paths[3]), "sha256": after.members[1].sha256, "left": str(paths[1])}]
    assert {k: v for k, v in after.provenance.items() if k != "history"} == before.provenance
    assert after.verification["capture"] == before.verification["capture"]
    assert set(after.verification["wide"]) == set(before.verification["wide"])
    assert set(after.verification["wide"]["shared.0"][0]["members"]) == {"m0", "m1", "m2"}
    update(copy, {"m1": paths[1], 0: paths[0]})
    same(copy, three, (X,))
    assert [h["did"] for h in Reader(copy).manifest.provenance["history"]] == ["update", "update"]


def test_a_shared_weight_that_splits(copy: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch) -> None:
    report = update(copy, {2: paths[5]})
    kinds = {k["weight"]: (k["was"], k["kind"], k["before"], k["after"]) for k in report.kinds}
    assert kinds["trunk.weight"] == ("shared", "stacked", 144, 3 * 144)
    assert set(kinds) == {"trunk.weight", "trunk.bias"}
    assert (report.lowered, report.written) == (["forward"], "streamed")
    same(copy, scratch(0, 1, 5), (X,))
    own(copy, [nets[0], nets[1], nets[5]], X)
    # and back: a stacked weight stays stacked, whatever it holds
    assert update(copy, {2: paths[2]}).kinds == []
    assert {w.name: w.kind for w in Reader(copy).manifest.weights}["trunk.weight"] == "stacked"
    own(copy, nets[:3], X)


def test_what_no_program_reads_may_differ(copy: Path, paths: list[Path], tmp_path: Path) -> None:
    state = torch.load(paths[0], weights_only=True)
    state["norm.num_batches_tracked"] += 5
    torch.save(state, tmp_path / "longer.pt")
    measured(copy)
    report = update(copy, {0: tmp_path / "longer.pt"})
    assert [k["weight"] for k in report.kinds] == ["norm.num_batches_tracked"]
    assert (report.lowered, report.left_out, report.written) == ([], [], "streamed")
    whole(copy)
    assert load(copy).state_dict(0)["norm.num_batches_tracked"] == 5 and load(copy).state_dict(1)["norm.num_batches_tracked"] == 0


def test_all_members_change_a_shared_weight_at_once(copy: Path, tmp_path: Path) -> None:
    others = [member(Net, i, trunk=9) for i in range(3)]
    report = update(copy, dict(enumerate(save(tmp_path / "others", others))))
    assert report.kinds == [] and report.lowered == [] and report.written != "streamed"
    whole(copy)
    own(copy, others, X)
    assert torch.equal(load(copy).state_dict(0)["trunk.weight"], others[1].get_parameter("trunk.weight"))


def test_append_and_drop(copy: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch) -> None:
    report = append(copy, paths[3:5], names="a, b")
    assert (report.did, report.members, report.lowered) == ("append", ("m0", "m1", "m2", "a", "b"), ["forward"])
    same(copy, scratch(0, 1, 2, 3, 4), (X,))
    own(copy, nets[:5], X)
    report = drop(copy, ["a", 0])
    assert (report.did, report.members) == ("drop", ("m1", "m2", "b"))
    assert report.changed == [{"member": "m0", "left": str(paths[0])}, {"member": "a", "left": str(paths[3])}]
    whole(copy)
    own(copy, [nets[1], nets[2], nets[4]], X)
    drop(copy, [0, 1])
    assert len(load(copy)) == 1
    own(copy, [nets[4]], X)
    refused(lambda: drop(copy, [0]), UsageError, "all 1 members", "at least one")


@pytest.mark.slow
def test_with_programs_for_others(paths: list[Path], nets: list[nn.Module], scratch: Scratch, tmp_path: Path) -> None:
    path = Path(shutil.copytree(scratch(0, 1, 2, whole=True), tmp_path / "e.wide"))
    update(path, {1: paths[3]})
    same(path, scratch(0, 3, 2, whole=True), (X,))
    append(path, [paths[1]], names=["one"])
    same(path, scratch(0, 3, 2, 1, whole=True), (X,))
    drop(path, [1])
    same(path, scratch(0, 2, 1, whole=True), (X,))
    update(path, {0: paths[5]})
    own(path, [nets[5], nets[2], nets[1]], X)
    held = Weights(Reader(path).weights_files())
    exported = next(n for n in Reader(path).manifest.files if ".shared-" in n and n.endswith(".pt2"))
    module = torch.export.load(path / exported).module()
    module.load_state_dict({k: held.get(k) for k in module.state_dict()}, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(module(X), load(path)(X))


def refused(call: Callable[[], object], kind: type[WidepackError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"
    assert "\n\n" not in str(caught.value)


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


def test_errors_leave_what_was(three: Path, paths: list[Path], tmp_path: Path) -> None:
    wrong = save(tmp_path / "wrong", [member(Other, 0)])[0]
    missing = tmp_path / "missing.pt"
    torch.save({k: v for k, v in member(Net, 0).state_dict().items() if k != "head.bias"}, missing)
    half = tmp_path / "half.pt"
    torch.save({k: v.half() if v.is_floating_point() else v for k, v in member(Net, 0).state_dict().items()}, half)
    before = content(three)
    refused(lambda: update(three, {0: wrong}), MemberMismatch, str(wrong), "head.weight", "[4, 6]", "[3, 6]")
    refused(lambda: update(three, {0: missing}), MemberMismatch, "lacks head.bias")
    refused(lambda: update(three, {0: half}), MemberMismatch, "float16")
    refused(lambda: append(three, [wrong], names=["w"]), MemberMismatch, "head.weight")
    refused(lambda: update(three, {3: paths[3]}), UsageError, "member 3 of 3")
    refused(lambda: update(three, {"m9": paths[3]}), UsageError, "no member is called 'm9'; the members are m0, m1, m2")
    refused(lambda: update(three, {"m1": paths[3], 1: paths[4]}), UsageError, "named twice: m1")
    refused(lambda: update(three, {}), UsageError, "names no member")
    refused(lambda: update(three, {True: paths[3]}), UsageError, "bool")
    refused(lambda: update(three, [paths[3]]), UsageError, "list")  # type: ignore[arg-type]
    refused(lambda: append(three, []), UsageError, "no checkpoints", "widepack append")
    refused(lambda: append(three, [paths[3], None]), UsageError, "checkpoint 1 is a NoneType; give the path of a file or folder")  # type: ignore[list-item]
    refused(lambda: update(three, {1: None}), UsageError, "the checkpoint of member 1 is a NoneType")  # type: ignore[dict-item]
    refused(lambda: update(three, {"m1": ""}), UsageError, "the checkpoint of member 'm1' is an empty text")
    refused(lambda: drop(three, 2.5), UsageError, "members is a float; give a list")  # type: ignore[arg-type]
    no_path: Any = None
    refused(lambda: update(no_path, {0: paths[0]}), UsageError, "path is a NoneType; give the artifact's folder")
    refused(lambda: append(no_path, [paths[3]]), UsageError, "path is a NoneType")
    refused(lambda: drop("", [0]), UsageError, "path is an empty text")
    refused(lambda: update(three, {0: paths[3]}, out=3), UsageError, "out is a int")  # type: ignore[arg-type]
    refused(lambda: update(three, {0: paths[3]}, out=three / "inside" / "in.wide"), ArtifactError, "lies in the artifact", "give another path")
    refused(lambda: build(paths[:2], three / "in.wide", model=Net, **SPECS), ArtifactError, "lies in the artifact")
    refused(lambda: append(three, [paths[1]]), UsageError, "m1: a member", "is called so already")
    refused(lambda: append(three, paths[3:5], names=["a", "a"]), UsageError, "a is given twice")
    refused(lambda: append(three, paths[3:5], names=["a"]), UsageError, "2 checkpoints and 1 names")
    refused(lambda: update(three, {0: tmp_path / "none.pt"}), CheckpointError, "there is no such file")
    refused(lambda: drop(three, ["m0", 1, "m2"]), UsageError, "all 3 members")
    refused(lambda: drop(three, []), UsageError, "names no member")
    refused(lambda: drop(three, "m0"), UsageError, "give a list")
    refused(lambda: update(three, {0: paths[0]}, model_args={"width": 3}), UsageError, "no model")
    refused(lambda: drop(three, [0], out=three), ArtifactError, "is an artifact already")
    calls: list[Callable[[Path], object]] = [lambda p: update(p, {0: paths[0]}), lambda p: append(p, [paths[3]]), lambda p: drop(p, [0])]
    for call in calls:
        refused(lambda: call(tmp_path / "none.wide"), ArtifactError, "there is nothing")  # noqa: B023
    assert not (tmp_path / "none.wide").exists()
    assert content(three) == before


def test_what_is_damaged_gets_no_new_hash(copy: Path, paths: list[Path]) -> None:
    (weights,) = Reader(copy).weights_files()
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    before = content(copy)
    for call in (lambda: update(copy, {0: paths[3]}), lambda: append(copy, [paths[3]]), lambda: drop(copy, [0])):
        refused(call, ArtifactError, weights.name, "was written")
    assert content(copy) == before


@pytest.mark.slow
def test_another_artifact(three: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path) -> None:
    before, out = content(three), tmp_path / "deep" / "o.wide"
    update(three, {0: paths[4]}, out=out)
    own(out, [nets[4], nets[1], nets[2]], X)
    refused(lambda: drop(three, [0], out=out), ArtifactError, "is an artifact already")
    drop(three, [0], out=out, force=True)
    own(out, nets[1:3], X)
    whole(out)
    assert content(three) == before
    damaged = Path(shutil.copytree(three, tmp_path / "damaged.wide"))
    name = next(n for n in Reader(three).manifest.files if "member." in n)
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-1] + b"?")
    refused(lambda: update(damaged, {0: paths[4]}, out=tmp_path / "p.wide"), ArtifactError, name, "not what was written")
    assert not (tmp_path / "p.wide").exists()


class Heads(nn.Module):
    """A head of the member's own size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.head = nn.Linear(6, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu())


def heads(state_dict: Mapping[str, Tensor]) -> Heads:
    return Heads(len(state_dict["head.bias"]))


@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ragged(built: bool, tmp_path: Path) -> None:
    nets = [member(lambda size=size: Heads(size), i) for i, size in enumerate([2, 3, 2, 3, 5])]  # type: ignore[misc]
    paths = save(tmp_path, nets)
    build(paths[:3], tmp_path / "e.wide", model=heads, **SPECS)

    def held(*order: int) -> None:
        found = whole(tmp_path / "e.wide")
        own(tmp_path / "e.wide", [nets[i] for i in order], X)
        if built and len(set(order)) == len(order):
            build([paths[i] for i in order], tmp_path / "s.wide", model=heads, force=True, **SPECS)
            assert names_of(found) == names_of(Reader(tmp_path / "s.wide").manifest)

    report = update(tmp_path / "e.wide", {0: paths[3]})
    assert (report.lowered, report.written) == (["forward"], "streamed")
    held(3, 1, 2)
    assert update(tmp_path / "e.wide", {1: paths[3]}).written != "streamed"  # another member of those shapes
    held(3, 3, 2)
    update(tmp_path / "e.wide", {1: paths[1]})
    append(tmp_path / "e.wide", [paths[0]], names=["new"])
    held(3, 1, 2, 0)
    refused(lambda: append(tmp_path / "e.wide", [paths[4]]), MemberMismatch, "2 different sets of shapes", "build the artifact again")
    if not built:
        return
    report = drop(tmp_path / "e.wide", ["m2", "new"])
    assert {(k["weight"], k["was"], k["kind"]) for k in report.kinds} == {("head.weight", "ragged", "stacked"), ("head.bias", "ragged", "stacked")}
    held(3, 1)
    assert len(Reader(tmp_path / "e.wide").manifest.entries["forward"].member) == 1


class Two(nn.Module):
    """Two methods over one set of weights, and a buffer that one of them changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.head = nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(4))

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        self.seen = self.seen * 0.5 + hidden.mean(0)
        return hidden + self.seen

    def decode(self, z: Tensor) -> Tensor:
        return self.head(z)


@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_entries_and_state(built: bool, tmp_path: Path) -> None:
    nets = [member(Two, i) for i in range(3)] + [member(Two, 3, trunk=5)]
    paths = save(tmp_path, nets)
    specs: dict[str, Any] = {"entries": ["encode", "decode"], "state": ["seen"], "targets": ("cpu",), "pt2": built}
    specs["inputs"] = {"encode": ["x=float32[B,6]"], "decode": ["z=float32[B,4]"]}
    build(paths[:2], tmp_path / "e.wide", model=Two, **specs)
    programs = {n for n in Reader(tmp_path / "e.wide").manifest.files if "decode" in n}

    def held(*order: int) -> None:
        if built:
            build([paths[i] for i in order], tmp_path / "s.wide", model=Two, force=True, **specs)
            same(tmp_path / "e.wide", tmp_path / "s.wide")
        whole(tmp_path / "e.wide")
        ens = load(tmp_path / "e.wide")
        state = ens.state()
        for net, i in zip([nets[i] for i in order], range(len(order)), strict=True):
            assert torch.equal(state["seen"][i], net.get_buffer("seen"))
        first, state = ens.encode(X, state=state)
        second, _ = ens.encode(X + 1, state=state)
        for k, i in enumerate(order):
            alone = Two().eval()
            alone.load_state_dict(nets[i].state_dict())
            with torch.no_grad():
                torch.testing.assert_close(first[k], alone.encode(X), rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(second[k], alone.encode(X + 1), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(ens.decode(first[0])[1], nets[order[1]].decode(first[0]), rtol=1e-4, atol=1e-5)

    assert update(tmp_path / "e.wide", {1: paths[2]}).lowered == []
    held(0, 2)
    report = update(tmp_path / "e.wide", {1: paths[3]})
    assert report.lowered == ["encode"], "decode reads no weight of another kind"
    assert programs <= set(Reader(tmp_path / "e.wide").manifest.files)
    held(0, 3)
    if not built:
        return
    assert append(tmp_path / "e.wide", [paths[1]], names=["one"]).lowered == ["decode", "encode"]
    held(0, 3, 1)


class Table(nn.Module):
    """Integers without bounds: what they mean is in the example alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4)

    def forward(self, ids: Tensor, w: Tensor) -> Tensor:
        return (self.rows(ids) * w.unsqueeze(-1)).sum(1)


@pytest.mark.slow
def test_the_probe_keeps_its_inputs(tmp_path: Path) -> None:
    nets = [member(Table, i) for i in range(4)]
    paths = save(tmp_path, nets)
    ids, w = torch.arange(20).reshape(5, 4) % 5, torch.randn(5, 4)
    build(paths[:2], tmp_path / "e.wide", model=Table, sample=(ids, w), dynamic={"ids": {0: "B"}, "w": {0: "B"}}, targets=("cpu",), pt2=False)
    before = _probe(tmp_path / "e.wide")
    update(tmp_path / "e.wide", {0: paths[2]})
    after = _probe(tmp_path / "e.wide")
    assert {k: v.tolist() for k, v in before.items() if ".x" in k} == {k: v.tolist() for k, v in after.items() if ".x" in k}
    assert torch.equal(before["shared.y0.1"], after["shared.y0.1"]) and not torch.equal(before["shared.y0.0"], after["shared.y0.0"])
    append(tmp_path / "e.wide", [paths[3]])
    drop(tmp_path / "e.wide", [0])
    last = _probe(tmp_path / "e.wide")
    assert torch.equal(last["each.x0"][0], before["each.x0"][1]) and torch.equal(last["each.x0"][1], before["each.x0"][0])
    with torch.no_grad():
        for got, net in zip(load(tmp_path / "e.wide")(ids, w), [nets[1], nets[3]], strict=True):
            torch.testing.assert_close(got, net(ids, w))


def _probe(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / Reader(path).manifest.probe)


class OwnConstant(nn.Module):
    """A tensor that no checkpoint holds, another one in each member."""

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.own = state_dict["head.bias"] * 2 if state_dict is not None else torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.own


def test_constants_of_the_members_own(tmp_path: Path) -> None:
    paths = save(tmp_path, [member(OwnConstant, i) for i in range(3)])
    build(paths[:2], tmp_path / "e.wide", model=OwnConstant, **SPECS)
    refused(lambda: update(tmp_path / "e.wide", {0: paths[2]}), MemberMismatch, "constants of their own (own)", "build the artifact again")
    drop(tmp_path / "e.wide", [0])
    whole(tmp_path / "e.wide")


def measured(path: Path, wrong: bool = False) -> None:
    """Give an artifact a plan that somebody measured on a machine of theirs: for the program that there is, or one that is wrong."""
    reader = Reader(path)
    entry = reader.manifest.entries["forward"]
    row = next(w for w in entry.wide if (w.device, w.pattern) == ("cpu", "shared"))
    plan = {**row.plan, "machine": "theirs", "threads": 2, "at": 8, "times_ms": {"wide": 1.0}}
    with Writer(path, force=True) as writer:
        writer.keep(reader.manifest.files)
        program = reader.program(row.file)
        other = replace(program, nodes=tuple(replace(n, op="aten.tanh.default") if n.op == "aten.relu.default" else n for n in program.nodes))
        assert other != program
        file = writer.file("programs/cpu.forward.shared", "json", strict_json.canonical(other.to_json())) if wrong else row.file
        mine = WideProgram(row.device, row.pattern, file, row.batch, plan)
        writer.publish(replace(reader.manifest, entries={"forward": replace(entry, wide=(*entry.wide, mine))}))


def test_measured_plans(copy: Path, paths: list[Path]) -> None:
    measured(copy)
    report = update(copy, {0: paths[3]})
    assert report.left_out == [] and sum("machine" in w.plan for w in whole(copy).entries["forward"].wide) == 1
    report = append(copy, [paths[0]], names=["more"])
    assert len(report.left_out) == 1 and "theirs, 2 threads: measured with 3 members, and there are 4" in report.left_out[0]
    assert not any("machine" in w.plan for w in whole(copy).entries["forward"].wide)


def test_a_measured_plan_that_is_wrong(copy: Path, paths: list[Path]) -> None:
    measured(copy, wrong=True)
    report = update(copy, {0: paths[3]})
    assert len(report.left_out) == 1 and "theirs, 2 threads: the wide program (forward, shared) is wrong: output" in report.left_out[0]
    assert not any("machine" in w.plan for w in whole(copy).entries["forward"].wide) and report.lowered == []


def test_a_program_that_new_weights_make_wrong(copy: Path, paths: list[Path], nets: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """As packed convolutions may be, which add up in another order: plain ones are lowered then."""
    check, before = verify.check_wide, content(copy)
    refuse = [True]

    def once(*args: Any) -> None:
        check(*args)
        if refuse and refuse.pop():
            args[6][0].wide.append(Wrong("m0", "B=2", 1.0, 1.0, "made wrong"))

    monkeypatch.setattr(verify, "check_wide", once)
    report = update(copy, {0: paths[3]})
    assert report.lowered == ["forward"] and all(w.plan.get("plain") for w in whole(copy).entries["forward"].wide)
    own(copy, [nets[3], nets[1], nets[2]], X)
    before = content(copy)
    refuse.append(True)
    refused(
        lambda: update(copy, {0: paths[0]}),
        VerificationError,
        "is wrong: output output, member m0",
        "the program that was there",
        "Nothing was published",
    )
    assert content(copy) == before


def test_plans_in_the_users_cache(copy: Path, paths: list[Path]) -> None:
    entry = Reader(copy).manifest.entries["forward"]
    row = next(w for w in entry.wide if w.pattern == "each")
    plan = replace(Plan.from_json(row.plan), machine="here", threads=1)
    before = Reader(copy).manifest.digest
    plan_cache.keep(before, "forward", "each", "cpu", [(Reader(copy).program(row.file), plan)])
    report = update(copy, {0: paths[3]})
    ((_, found),) = plan_cache.find(report.digest, "forward", "each", "cpu")
    assert found == plan and report.left_out == [] and load(copy).plans("each") == [plan]
    report = drop(copy, [0])
    assert report.left_out == ["forward, each, cpu, kept in your cache: measured with 3 members, and there are 2"]
    assert plan_cache.find(report.digest, "forward", "each", "cpu") == []


@pytest.mark.slow
def test_an_artifact_that_is_replaced_while_another_is_made_of_it(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    count = 0

    def replaced_once(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += stage == "lower" and done == 0
        if stage == "lower" and done == 0 and count == 1:
            append(copy, [paths[4]], names=["more"])  # other programs: those that were there are gone

    report = update(copy, {0: paths[3]}, out=copy.with_name("o.wide"), progress=replaced_once)
    assert count == 2 and report.members == ("m0", "m1", "m2", "more")
    own(copy.with_name("o.wide"), [nets[3], nets[1], nets[2], nets[4]], X)


class Changed(Net):
    """The same names and shapes, and another program."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_the_newcomers_own_module(copy: Path, paths: list[Path]) -> None:
    before = content(copy)
    refused(
        lambda: update(copy, {1: paths[3]}, model=Changed), VerificationError, "the captured program does not give the members' own answers", "m1"
    )
    assert content(copy) == before
    report = update(copy, {1: paths[3]}, model=Net)
    assert report.asked == ["m1"]
    record = Reader(copy).manifest.verification
    assert set(record["capture_again"][0]["members"]) == {"m1"}

    def heard() -> list[set[str]]:
        return [set(row["members"]) for row in Reader(copy).manifest.verification.get("capture_again", [])]

    update(copy, {2: paths[4]}, model=Net)
    assert heard() == [{"m1"}, {"m2"}]  # what was found before holds for a member that is still there
    update(copy, {1: paths[0]})
    assert heard() == [{"m2"}]
    drop(copy, ["m2"])
    assert heard() == []


def test_weights_files_stay_of_their_size(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    def files() -> list[int]:
        return [sum(t.numel() * 4 for t in load_file(p).values()) for p in Reader(copy).weights_files()]

    assert len(files()) == 1
    report = update(copy, {1: paths[3]}, max_shard_size="400")
    assert report.written == "streamed" and len(files()) > 1 and max(files()) <= 400
    own(copy, [nets[0], nets[3], nets[2]], X)
    assert update(copy, {1: paths[1]}).written != "streamed" and max(files()) <= 400
    update(copy, {0: paths[5]})  # which splits the trunk
    assert max(files()) <= 3 * 6 * 6 * 4  # a weight is never divided
    append(copy, [paths[4]])
    assert len(files()) > 2 and sorted(files())[-2] <= 400
    own(copy, [nets[5], *nets[1:3], nets[4]], X)
    reader = Reader(copy)
    assert shard_size(reader) == 400
    reader.manifest = replace(reader.manifest, provenance={})  # as an earlier version wrote it
    assert shard_size(reader) == max(p.stat().st_size for p in reader.weights_files())
    drop(copy, [0, 1, 2], max_shard_size="5GB")
    assert len(files()) == 1 and shard_size(Reader(copy)) == 5 * 10**9
    own(copy, [nets[4]], X)
    refused(lambda: drop(copy, [0], max_shard_size="lots"), UsageError, "size 'lots'", "5GB")


def test_members_whose_answers_are_no_numbers_are_named(paths: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.pt"
    torch.save({n: v * float("nan") if n == "head.weight" else v for n, v in torch.load(paths[0]).items()}, broken)
    path = tmp_path / "e.wide"
    built = build([broken, *paths[1:3]], path, model=Net, **SPECS)
    (row,) = built.not_finite
    assert row["entry"] == "forward" and row["member"] == "broken" and row["numbers"] == row["of"] > 0 and built.to_json()["not_finite"] == [row]
    report = update(path, {"broken": paths[3], "m2": broken})
    assert [r["member"] for r in report.not_finite] == ["m2"]
    (line,) = (text for text in lines(report) if text.startswith("not finite"))
    assert "member m2" in line and "NaN or inf" in line and "look at its weights" in line
    assert not update(path, {"m2": paths[4]}).not_finite


@pytest.mark.slow
def test_programs_come_with_their_own_module(tmp_path: Path) -> None:
    class Plain(nn.Sequential):
        pass

    def program(seed: int, path: Path, extra: bool = False) -> Path:
        torch.manual_seed(seed)
        net = Plain(nn.Linear(6, 4), nn.ReLU() if not extra else nn.Tanh(), nn.Linear(4, 2)).eval()
        torch.export.save(torch.export.export(net, (torch.randn(3, 6),), dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}]), path)
        return path

    paths = [program(i, tmp_path / f"p{i}.pt2") for i in range(3)]
    build(paths[:2], tmp_path / "e.wide", targets=("cpu",), pt2=False)
    assert update(tmp_path / "e.wide", {0: paths[2]}).asked == ["p0"]
    whole(tmp_path / "e.wide")
    own(tmp_path / "e.wide", [torch.export.load(p).module() for p in (paths[2], paths[1])], X)
    refused(lambda: append(tmp_path / "e.wide", [program(7, tmp_path / "q.pt2", True)]), VerificationError, "the captured program does not give")


def test_what_is_loaded_outlives_an_update(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    ens = load(copy)
    update(copy, {0: paths[5]})
    xs = torch.stack([X, X + 1, X + 2])
    with torch.no_grad():
        for i, got in enumerate(ens.each(xs)):  # a pattern that was not asked for before
            torch.testing.assert_close(got, nets[i](xs[i]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ens.member(1)(X), nets[1](X), rtol=1e-4, atol=1e-5)
    ens.probe()


def test_readers_during_updates(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    with torch.no_grad():
        right = [torch.stack([n(X) for n in (nets[k], nets[1], nets[2])]) for k in (0, 3)]
    stop, wrong, count = threading.Event(), [], 0

    def read() -> None:
        nonlocal count
        while not stop.is_set():
            try:
                got = load(copy, verify="hashes")(X)
                if not any(torch.allclose(got, r, rtol=1e-4, atol=1e-5) for r in right):
                    wrong.append("other answers")
            except Exception as e:  # noqa: BLE001  whatever a reader meets is wrong
                wrong.append(repr(e))
            count += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for k in range(2):
            update(copy, {0: paths[0 if k % 2 else 3]})
    finally:
        stop.set()
        reader.join()
    assert wrong == [] and count > 3


@contextmanager
def mounted(place: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size. Skips where nothing may be mounted."""
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("did", ["update", "append", "drop", "build"])
def test_a_disk_that_is_full(did: str, three: Path, paths: list[Path], tmp_path: Path) -> None:
    """More and more room, until it is enough: the old artifact bit for bit, or the new one."""
    size = sum(-(-len(data) // 4096) * 4 for data in content(three).values())  # kilobytes, in pages
    outcomes = set()
    for room in range(size + 4, 4 * size + 200, 8):
        with mounted(tmp_path / "disk", room):
            path = Path(shutil.copytree(three, tmp_path / "disk" / "e.wide"))
            before = content(path)
            try:
                if did == "update":
                    update(path, {1: paths[3]})
                elif did == "append":
                    append(path, [paths[3]])
                elif did == "drop":
                    drop(path, [0])
                else:
                    build(paths[1:4], path, model=Net, force=True, **SPECS)
                whole(path)
                outcomes.add("done")
            except ArtifactError as e:
                assert "No space left" in str(e) or "are free there" in str(e)
                assert content(path) == before
                outcomes.add("refused")
        if "done" in outcomes:
            break
    assert outcomes == {"done", "refused"}


@pytest.mark.slow
def test_media_that_cannot_be_written(three: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 4096):
        path = Path(shutil.copytree(three, tmp_path / "disk" / "e.wide"))
        before = content(path)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        refused(lambda: update(path, {0: paths[3]}), ArtifactError, "Read-only file system")
        own(path, nets[:3], X)
        update(path, {0: paths[3]}, out=tmp_path / "o.wide")
        own(tmp_path / "o.wide", [nets[3], nets[1], nets[2]], X)
        assert content(path) == before


SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "kills.py"


@pytest.mark.parametrize(
    "words", [["--kills", "10", "--only", "update", "--times", "1"], pytest.param(["--kills", "24", "--steps"], marks=pytest.mark.slow)]
)
def test_kills(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *words, "--out", str(tmp_path / "kills.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills.json").read_text())
    for part in [found[p] for p in ("random", "steps") if p in found]:
        assert part["damaged_or_missing"] == part["litter_left_by_the_next_writer"] == 0
    assert found["random"]["killed"] == found["kills"]
    assert "steps" not in found or found["steps"]["killed"] == found["steps"]["runs"] > 100


# The command line


def done(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(w) for w in words])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_commands(copy: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path) -> None:
    text = done("update", copy, "--member", "m1", paths[3], "--member", "2", paths[5])
    assert f"m1 is {paths[3]}, and was {paths[1]}" in text
    assert "trunk.weight is not equal in all members any more: shared 144 B -> stacked 432 B" in text
    assert "programs     lowered again" in text and f"now {Reader(copy).manifest.digest}" in text
    found = json.loads(done("append", copy, paths[0], "--names", "x", "--json"))
    assert found["members"] == ["m0", "m1", "m2", "x"] and set(found) == set(ReviseReport.__dataclass_fields__)
    text = done("drop", copy, "x", "0", "-o", tmp_path / "o.wide", "--max-shard-size", "100B")
    assert len(Reader(copy).weights_files()) == 1 < len(Reader(tmp_path / "o.wide").weights_files())
    assert f"dropped      m0, which was {paths[0]}" in text and "2 members: m1, m2" in text
    own(tmp_path / "o.wide", [nets[3], nets[5]], X)
    said = done("inspect", copy)
    assert "since then" in said and f" update: m1 is {paths[3]}, and was {paths[1]}" in said and f" append: x is {paths[0]}" in said
    assert " drop: without m0" in done("inspect", tmp_path / "o.wide")
    assert "bit for bit" in done("verify", tmp_path / "o.wide", paths[3], paths[5])
    assert "no member is called 'm9'" in done("update", copy, "--member", "m9", paths[3], code=2)
    assert "named twice" in done("update", copy, "--member", "m1", paths[3], "--member", "1", paths[4], code=2)
    assert "Missing option '--member'" in done("update", copy, code=2)
    assert "all 4 members" in done("drop", copy, "0", "1", "2", "x", code=2)
    assert "is called so already" in done("append", copy, paths[1], code=2)
    assert "there is nothing" in done("append", tmp_path / "none.wide", paths[1], code=1)


def test_at_the_top() -> None:
    assert {"update", "append", "drop", "ReviseReport"} <= set(widepack.__all__)
