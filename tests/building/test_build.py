"""Tests builds: refusals of bad input, which leave no files, and every way to describe a call.

Also tests the record of a build, and that a build finds a wrong program.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from support import run
from torch import Tensor, nn

import cases
from widepack import build, load
from widepack.errors import (
    ArtifactError,
    CaptureError,
    CheckpointError,
    MemberMismatch,
    UsageError,
    VerificationError,
    WidepackError,
)
from widepack.ir.values import Stacked
from widepack.registry.registry import REGISTRY, Strategy
from widepack_artifacts import writer
from widepack_artifacts.folder import ArtifactExists
from widepack_artifacts.reader import Reader
from widepack_artifacts.stream import Stream

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, width, 3, padding=1)
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:  # [B, 2, 8]
        y = self.fc(torch.relu(self.conv(x)).mean(-1))
        return y if scale is None else y * scale


X = ["x=float32[B,2,8]"]


def save(folder: Path, make: Callable[[], nn.Module] = Net, count: int = 3) -> list[str]:
    return [str(path) for path in files_of(folder, [seeded(make, i) for i in range(count)])]


@pytest.fixture
def nets(tmp_path: Path) -> list[str]:
    return save(tmp_path)


def refused(error: type[WidepackError], folder: Path, paths: list[str], **changes: Any) -> str:
    """Checks that a build is refused and leaves the folder unchanged. Returns the message."""
    before = {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
    with pytest.raises(error) as caught:
        build(**{"checkpoints": paths, "out": folder / "e.wide", "model": Net, "inputs": X, **changes})
    assert {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")} == before
    assert caught.value.exit_code == (2 if issubclass(error, (UsageError, ArtifactExists)) else 1)
    message = str(caught.value)
    assert message
    assert "\n\n" not in message
    assert "Traceback" not in message
    return message


# Bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoints": []}, ["no checkpoints"]),
        ({"model": None}, ["no model", "--model"]),
        ({"model": "no_such_package:make"}, ["no_such_package"]),
        ({"model": "cases.mlp:modle"}, ["cases.mlp has no 'modle'; did you mean model?"]),
        ({"model": "torch.nn"}, ["pkg.mod:factory"]),
        ({"model": "nowhere.py:make"}, ["no file nowhere.py"]),
        ({"model": lambda: 3}, ["a factory returns a torch.nn.Module"]),
        ({"model": Net, "model_args": {"depth": 3}}, ["depth", "width"]),
        ({"inputs": None}, ["no inputs", "--input"]),
        ({"sample": (torch.zeros(2, 2, 8),)}, ["inputs and sample are both given"]),
        ({"inputs": ["x=flaot32[B,2,8]"]}, ["flaot32", "float32", "^"]),
        ({"inputs": ["x=float32[B,2,8"]}, ["^"]),
        ({"inputs": ["x"]}, ["^"]),
        ({"inputs": [*X, "T=2..9"]}, ["no input has the dim T", "the dims are B", "^"]),
        ({"inputs": [*X, "B=1..1"]}, ["B can have one size only", "^"]),
        ({"strategy": "fastest"}, ["unknown strategy 'fastest'", "known:", "loop", "wide"]),
        ({"strategy": ["wide", "loop"]}, ["exclude each other"]),
        ({"targets": ("cpu", "tpu")}, ["unknown target 'tpu'", "cuda"]),
        ({"share": "all"}, ["share='all'", "auto, none"]),
        ({"names": ["a", "b"]}, ["3 checkpoints and 2 names"]),
        ({"names": ["a", "b", "a"]}, ["must differ", "a is given twice"]),
    ],
)
def test_invalid_arguments_are_refused(
    change: dict[str, Any], words: list[str], nets: list[str], tmp_path: Path
) -> None:
    message = refused(UsageError, tmp_path, nets, **change)
    assert all(word in message for word in words), message


class Pickled:
    pass


def _missing(path: Path) -> None:
    path.unlink()


def _text(path: Path) -> None:
    path.write_text("accuracy 0.93\n")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_missing, ["there is no such file"]),
        (lambda p: p.write_bytes(p.read_bytes()[:-700]), ["truncated"]),
        (_text, ["text"]),
        (lambda p: p.write_bytes(pickle.dumps({"net": Pickled()})), ["state_dict()"]),
        (lambda p: torch.save(Net(), p), ["state_dict()"]),
        (_folder, ["folder"]),
        (lambda p: p.write_bytes(b""), ["empty"]),
    ],
)
def test_files_that_are_not_checkpoints_are_refused(
    spoil: Callable[[Path], object], words: list[str], nets: list[str], tmp_path: Path
) -> None:
    spoil(Path(nets[1]))
    message = refused(CheckpointError, tmp_path, nets)
    assert all(word in message for word in ("m1.pt", *words)), message


def test_one_error_names_all_bad_files(nets: list[str], tmp_path: Path) -> None:
    _text(Path(nets[0]))
    _missing(Path(nets[2]))
    message = refused(CheckpointError, tmp_path, nets)
    assert "m0.pt" in message and "m2.pt" in message


def test_one_error_names_all_other_architectures(nets: list[str], tmp_path: Path) -> None:
    torch.save(Net(8).state_dict(), nets[1])
    torch.save({k: v for k, v in Net().state_dict().items() if k != "fc.bias"}, nets[2])
    message = refused(MemberMismatch, tmp_path, nets)
    for word in ("m1.pt", "fc.weight is [3, 8] float32", "m2.pt", "lacks fc.bias"):
        assert word in message, message


def test_the_model_of_other_checkpoints(nets: list[str], tmp_path: Path) -> None:
    other = {"model": cases.load("mlp").model, "inputs": ["input=float32[B,64]"]}
    assert "conv.weight" in refused(MemberMismatch, tmp_path, nets, **other)


@pytest.mark.parametrize("force", [False, True])
def test_existing_paths_are_not_overwritten(force: bool, nets: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "notes", tmp_path / "file", Path(nets[0])):
        assert str(out) in refused(ArtifactExists, tmp_path, nets, out=out, force=force)


def test_a_build_without_enough_space_is_refused(
    nets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "free_bytes", lambda path: 100)
    message = refused(ArtifactError, tmp_path, nets, out=tmp_path / "deep" / "e.wide")
    assert "bytes are to be written, 100 are free" in message


@pytest.mark.extended
def test_no_space_during_a_build(nets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(nets, tmp_path / "e.wide", model=Net, inputs=X, **QUICK)
    finish = Stream.finish
    seen = []

    def full(self: Stream) -> str:
        seen.append(1)
        if len(seen) == 3:
            raise OSError(28, "No space left on device")
        return finish(self)

    monkeypatch.setattr(Stream, "finish", full)
    assert "No space left" in refused(ArtifactError, tmp_path, nets, force=True, **QUICK)
    monkeypatch.undo()
    load(tmp_path / "e.wide")(torch.zeros(1, 2, 8))


# Models that cannot be captured or would give wrong answers


def test_inputs_that_forward_does_not_take(nets: list[str], tmp_path: Path) -> None:
    message = refused(CaptureError, tmp_path, nets, inputs=["y=float32[B,2,8]"])
    assert "Net.forward" in message and "y" in message
    assert "test_build.py" in refused(CaptureError, tmp_path, nets, inputs=["x=float32[B,3,8]"])


class Branch(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.sum() > 0:
            return super().forward(x)
        return super().forward(-x)


def test_a_branch_on_values(tmp_path: Path) -> None:
    message = refused(CaptureError, tmp_path, save(tmp_path, Branch), model=Branch)
    assert "branches on the values of a tensor at test_build.py" in message


class Drawn(Net):
    """A module with a Python number that differs between members and is in no checkpoint."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        Drawn.count += 1
        self.slope = 0.1 * Drawn.count

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.slope


def test_a_python_constant_that_differs_by_member(tmp_path: Path) -> None:
    message = refused(VerificationError, tmp_path, save(tmp_path, Drawn), model=Drawn)
    for word in ("the captured program gives other answers than the members", "member m", "not a weight"):
        assert word in message


class Mutates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.seen += 1
        return super().forward(x) + self.seen


def test_a_buffer_that_eval_changes(tmp_path: Path) -> None:
    message = refused(CaptureError, tmp_path, save(tmp_path, Mutates), model=Mutates)
    assert "changes seen when forward runs in eval mode" in message
    assert "--state seen" in message


# Ways to build


def assert_members_answer(
    path: Path,
    make: Callable[[], nn.Module],
    count: int = 3,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Checks that the artifact answers as each member alone."""
    ens = load(path)
    args = (torch.randn(5, 2, 8),) if args is None else args
    y = ens(*args, **(kwargs or {}))
    assert len(y) == count
    for i in range(count):
        member = seeded(make, i)
        torch.testing.assert_close(y[i], run(member, args, kwargs or {}), rtol=1e-4, atol=1e-5)
        assert set(ens.state_dict(i)) == set(member.state_dict())
        assert all(torch.equal(v, member.state_dict()[k]) for k, v in ens.state_dict(i).items())


@pytest.mark.extended
def test_a_sample_instead_of_specs(nets: list[str], tmp_path: Path) -> None:
    build(nets, tmp_path / "a.wide", model=Net, sample=(torch.randn(4, 2, 8),), **QUICK)
    assert_members_answer(tmp_path / "a.wide", Net)
    build(
        nets,
        tmp_path / "b.wide",
        model=Net,
        sample_kwargs={"x": torch.randn(4, 2, 8)},
        dynamic={"x": {0: "N", 2: "L"}},
        **QUICK,
    )
    assert Reader(tmp_path / "b.wide").manifest.entries["forward"].inputs[0].type == "float32[N,2,L]"
    assert_members_answer(tmp_path / "b.wide", Net, args=(torch.randn(3, 2, 11),))
    build(nets, tmp_path / "c.wide", model=Net, sample=(torch.randn(4, 2, 8),), dynamic={}, **QUICK)
    assert Reader(tmp_path / "c.wide").manifest.entries["forward"].inputs[0].type == "float32[4,2,8]"
    assert_members_answer(tmp_path / "c.wide", Net, args=(torch.randn(4, 2, 8),))
    scale = torch.rand(5, 3)
    build(
        nets,
        tmp_path / "d.wide",
        model=Net,
        sample=(torch.randn(4, 2, 8),),
        sample_kwargs={"scale": torch.rand(4, 3)},
        **QUICK,
    )
    assert_members_answer(tmp_path / "d.wide", Net, args=(torch.randn(5, 2, 8),), kwargs={"scale": scale})


def test_fixed_sizes_and_one_member(nets: list[str], tmp_path: Path) -> None:
    build(nets[:1], tmp_path / "e.wide", model=Net, inputs=["x=float32[7,2,8]"], **QUICK)
    assert_members_answer(tmp_path / "e.wide", Net, 1, args=(torch.randn(7, 2, 8),))


def test_names_and_shares(nets: list[str], tmp_path: Path) -> None:
    state = torch.load(nets[0])
    for path in nets:
        torch.save({**torch.load(path), "conv.weight": state["conv.weight"]}, path)
    report = build(nets, tmp_path / "a.wide", model=Net, inputs=X, names=["red", "green", "blue"], **QUICK)
    assert report.members == load(tmp_path / "a.wide").members == ("red", "green", "blue")
    assert report.weights["shared"] == state["conv.weight"].numel() * 4
    none = build(nets, tmp_path / "b.wide", model=Net, inputs=X, share="none", **QUICK)
    assert none.weights["shared"] == 0
    assert none.weights["stacked"] == report.weights["stacked"] + 3 * report.weights["shared"]
    x = torch.randn(2, 2, 8)
    torch.testing.assert_close(
        load(tmp_path / "a.wide")(x), load(tmp_path / "b.wide")(x), rtol=1e-4, atol=1e-5
    )
    assert load(tmp_path / "a.wide")["green"].name == "green"


def test_equal_members_are_all_shared(nets: list[str], tmp_path: Path) -> None:
    report = build([nets[0], nets[0]], tmp_path / "e.wide", model=Net, inputs=X, names=["a", "b"], **QUICK)
    assert report.weights["stacked"] == 0
    x = torch.randn(3, 2, 8)
    y = load(tmp_path / "e.wide")(x)
    assert y.shape == (2, 3, 3)
    torch.testing.assert_close(y[1], run(seeded(Net, 0), (x,), {}), rtol=1e-4, atol=1e-5)


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    "strategy", ["auto", "wide", "loop", "sequential", ["wide", "sequential"], ["bmm", "grouped"]]
)
def test_strategies(strategy: Any, nets: list[str], tmp_path: Path) -> None:
    report = build(nets, tmp_path / "e.wide", model=Net, inputs=X, strategy=strategy, **QUICK)
    assert_members_answer(tmp_path / "e.wide", Net)
    if strategy == "loop":
        assert set(report.strategies) <= {"loop", "once"}
        assert report.wide_share == 0.0
    if strategy == "wide":
        assert report.wide_share == 1.0
    if "sequential" in strategy:  # a loop over the members is the same, without joining the results
        assert report.strategies["sequential" if "wide" in strategy else "loop"] > 0


def test_a_dry_run_writes_nothing(nets: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    report = build(nets, tmp_path / "e.wide", model=Net, inputs=X, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    real = build(nets, tmp_path / "e.wide", model=Net, inputs=X)
    for field in ("weights", "kinds", "strategies", "wide_share"):
        assert getattr(report, field) == getattr(real, field), field
    assert real.to_json()["digest"] == Reader(tmp_path / "e.wide").manifest.digest


def test_force_replaces(nets: list[str], tmp_path: Path) -> None:
    out = tmp_path / "e.wide"
    first = build(nets, out, model=Net, inputs=X, **QUICK)
    assert "force" in refused(ArtifactExists, tmp_path, nets, **QUICK)
    assert Reader(out).manifest.digest == first.digest
    open_before = load(out)
    second = build(nets[:2], out, model=Net, inputs=X, force=True, **QUICK)
    assert second.digest != first.digest
    assert len(load(out)) == 2
    # a loaded artifact stays usable after it is replaced
    assert open_before(torch.zeros(1, 2, 8)).shape == (3, 1, 3)
    assert {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} == {
        "manifest.json",
        *Reader(out).manifest.files,
    }


def test_progress_and_seconds(nets: list[str], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = build(
        nets, tmp_path / "e.wide", model=Net, inputs=X, progress=lambda *row: told.append(row), **QUICK
    )
    stages = list(dict.fromkeys(row[0] for row in told))
    assert stages == list(report.seconds)
    assert {"read", "capture", "lower", "verify", "export", "publish"} <= set(stages)
    assert all(0 <= done <= total for _, done, total in told)


# Weights of every kind


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    report = build(
        save(tmp_path, Tied), tmp_path / "e.wide", model=Tied, inputs=["ids=int64[B,3]:0..10"], **QUICK
    )
    assert report.weights == {"shared": 0, "stacked": 3 * 11 * 4 * 4, "ragged": 0}
    assert_members_answer(tmp_path / "e.wide", Tied, args=(torch.randint(0, 11, (4, 3)),))
    (weight,) = Reader(tmp_path / "e.wide").manifest.weights
    assert {weight.name, *weight.aliases} == {"embed.weight", "head.weight"}


class Constants(Net):
    """A module with a buffer that no checkpoint has, a tensor in a plain attribute, and a literal.

    It also has a buffer of integers and a weight that forward does not read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("order", torch.randperm(3))
        self.freqs = [torch.arange(3) * 0.5]
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x * self.window)[:, self.order]
        return y + torch.cos(self.freqs[0]) + torch.tensor([1.0, 2.0, 3.0])


def test_buffers_and_constants(tmp_path: Path) -> None:
    build(save(tmp_path, Constants), tmp_path / "e.wide", model=Constants, inputs=X, **QUICK)
    assert_members_answer(tmp_path / "e.wide", Constants)
    rows = {w.name: w for w in Reader(tmp_path / "e.wide").manifest.weights}
    assert {n: rows[n].role for n in ("window", "order", "unused")} == {
        "window": "constant",
        "order": "buffer",
        "unused": "parameter",
    }
    assert rows["window"].kind == rows["freqs.0"].kind == "shared"


class OwnConstants(Net):
    """A module with non-persistent buffers that the factory computes from the weights of each checkpoint."""

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        mean = torch.zeros(2, 1) if state_dict is None else state_dict["conv.weight"].mean((0, 2))[:, None]
        self.register_buffer("mean", mean, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x - self.mean)


def test_constants_that_differ_between_members(tmp_path: Path) -> None:
    paths = save(tmp_path, OwnConstants)
    build(paths, tmp_path / "e.wide", model=OwnConstants, inputs=X, **QUICK)
    row = next(w for w in Reader(tmp_path / "e.wide").manifest.weights if w.name == "mean")
    assert (row.kind, row.role) == ("stacked", "constant")
    ens, x = load(tmp_path / "e.wide"), torch.randn(4, 2, 8)
    y = ens(x)
    for i, path in enumerate(paths):
        state = torch.load(path)
        member = OwnConstants(state_dict=state).eval()
        member.load_state_dict(state)
        torch.testing.assert_close(y[i], run(member, (x,), {}), rtol=1e-4, atol=1e-5)
        assert "mean" not in ens.state_dict(i)


# The record, and wrong programs that it finds


def test_the_record_of_every_member_and_output(nets: list[str], tmp_path: Path) -> None:
    report = build(nets, tmp_path / "e.wide", model=Net, inputs=X)
    manifest = Reader(tmp_path / "e.wide").manifest
    record = manifest.verification
    assert record == report.verification
    assert record["truth"] == "float64"
    assert any("B=5" in call for call in record["calls"])
    assert {key.partition(".")[0] for key in record["wide"]} == {"shared", "each"}
    for outputs in [record["capture"], *record["wide"].values()]:
        assert len(outputs) == 1
        for row in outputs:
            assert set(row["members"]) == {"m0", "m1", "m2"}
            assert row["samples"] >= 64
            assert row["scale"] > 0
            for found in row["members"].values():
                assert 0 <= found["rms"] <= found["max"] <= 4 * row["own_max"] + 4 * row["eps"] * row["scale"]
    for key in ("widepack", "torch", "python", "date", "model", "strategy", "seconds"):
        assert key in manifest.provenance, key
    assert [m.name for m in manifest.members] == ["m0", "m1", "m2"]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("op", "node"),
    [("aten.conv1d.default", "conv1d"), ("aten.linear.default", "linear"), ("aten.relu.default", "relu")],
)
def test_a_wrong_lowering_is_caught_and_found(
    op: str, node: str, nets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every strategy of one op has an error of a thousandth for all members."""

    def wrong(rule: Any) -> Any:
        def off(w: Any, *args: Any, **kwargs: Any) -> Any:
            return Stacked(w.call("mul.Scalar", rule(w, *args, **kwargs).value, 1.001))

        return off

    for name, strategy in list(REGISTRY[op].strategies.items()):
        monkeypatch.setitem(
            REGISTRY[op].strategies, name, Strategy(name, wrong(strategy.rule), strategy.when, strategy.note)
        )
    message = refused(VerificationError, tmp_path, nets, strategy="wide", **QUICK)
    names = "|".join(REGISTRY[op].strategies)
    for pattern in (
        rf"first wrong node: {node} \({op}, strategy ({names})",
        r"test_build\.py|from ",
        "largest error",
        "--strategy loop",
    ):
        assert re.search(pattern, message), message
    # the solution that the message names
    build(nets, tmp_path / "loop.wide", model=Net, inputs=X, strategy="loop", **QUICK)
    assert_members_answer(tmp_path / "loop.wide", Net)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": torch.randn(2, 8)}, "inputs has a Tensor; it is a list of texts"),
        ({"inputs": (torch.randn(2, 8),)}, "Tensors of one call are given as sample"),
        ({"inputs": {"forward": [torch.randn(2, 8)]}}, "inputs has a Tensor"),
        ({"sample": torch.randn(4, 2, 8).numpy()}, "sample is a ndarray; give a tensor"),
        ({"sample": {"x": torch.randn(4, 2, 8)}}, "keys x; give inputs by name as sample_kwargs"),
        ({"inputs": X, "out": None}, "out is a NoneType; give the folder to write"),
        ({"inputs": X, "out": "s3://bucket/e.wide"}, "out is the URL 's3://bucket/e.wide'"),
        ({"inputs": X, "checkpoints": ["https://host/a.pt"]}, "copy it to a local path first"),
        ({"inputs": X, "checkpoints": [nn.Linear(1, 1)]}, r"fuse takes these: widepack.fuse\(models"),
        ({"inputs": X, "checkpoints": (nn.Linear(1, 1) for _ in range(2))}, "modules in memory"),
    ],
)
def test_arguments_of_other_kinds(nets: list[str], tmp_path: Path, given: Any, message: str) -> None:
    arguments = {"checkpoints": nets, "out": tmp_path / "e.wide", "model": Net, **QUICK, **given}
    with pytest.raises(UsageError, match=message):
        build(**arguments)
