"""`widepack.export`: ONNX files and torch.export programs of an artifact, run without widepack and held to the members alone.

What needs ONNX is skipped where the extra `onnx` is not installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from support import fresh, must
from widepack import ExportReport, build, export, load
from widepack.errors import ArtifactError, ArtifactExists, LoweringError, UsageError, VerificationError
from widepack_artifacts.writer import Reader, hold
from widepack_cli.main import cli

N = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Net(nn.Module):
    """A convolution under a batch norm, a frozen layer, attention over a dim T; outputs of every kind: two names of one value, an input, a weight, a Shared value."""

    scale: Tensor

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 8)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attends else None
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:  # [B, T, 4], [B, T]
        frozen = self.frozen(x)
        z = torch.relu(self.norm(self.conv(frozen.transpose(1, 2)))).transpose(1, 2)
        if self.attention is not None:
            z = z + self.attention(z, z, z, need_weights=False)[0]
        y = self.head(z) * self.scale * (ids > 2)[..., None]
        return {"y": y, "again": y, "x": x, "scale": self.scale, "frozen": frozen, "best": y.argmax(-1), "sure": y > 0}


class Head(nn.Module):
    """Heads of 2, 3 and 4 classes."""

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None, classes: int = 2) -> None:
        super().__init__()
        self.trunk, self.out = nn.Linear(4, 6), nn.Linear(6, classes if state_dict is None else state_dict["out.weight"].shape[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.trunk(x))
        return self.out(z), z


class Step(nn.Module):
    """A counter that changes, and a state that is given and comes back under one name."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        h = self.cell(x, h)
        self.steps += 1
        return {"y": h * self.steps, "h": h}


def saved(folder: Path, modules: Sequence[nn.Module]) -> list[str]:
    for i, module in enumerate(modules):
        torch.save(module.state_dict(), folder / f"m{i}.pt")
    return [str(folder / f"m{i}.pt") for i in range(len(modules))]


def made(kind: type[nn.Module], seed: int, **how: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind(**how).eval()
        with torch.no_grad():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if value.is_floating_point() and not name.startswith("frozen"):
                    value.add_(0.1 * torch.rand_like(value) + 0.05)
        for name, value in module.named_parameters():
            if name.startswith("frozen"):
                nn.init.constant_(value, 0.3)
    return module


NETS = [made(Net, i) for i in range(N)]
SMALL = [made(Net, i, attends=False) for i in range(N)]
HEADS = [made(Head, i, classes=2 + i) for i in range(N)]
STEPS = [made(Step, i) for i in range(N)]
NET: dict[str, Any] = {"model": Net, "inputs": ["x=float32[B,T,4]", "ids=int64[B,T]:0..6", "T=2..12"]}


def artifact_of(modules: Sequence[nn.Module], factory: pytest.TempPathFactory, **how: Any) -> Path:
    folder = factory.mktemp("forms")
    build(saved(folder, modules), folder / "e.wide", **{**QUICK, **how})
    return folder / "e.wide"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(NETS, tmp_path_factory, **NET)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(SMALL, tmp_path_factory, **NET, model_args={"attends": False})


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(HEADS, tmp_path_factory, model=Head, inputs=["x=float32[B,4]"])


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(STEPS, tmp_path_factory, model=Step, inputs=["x=float32[B,4]", "h=float32[B,6]"], state=["steps", "h"])


@pytest.fixture(scope="module")
def onnx() -> Any:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"an ONNX file is written with {package}: the extra onnx")
    return pytest.importorskip("onnx")


def call_of(batch: int, length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 4, generator=g), torch.randint(0, 7, (batch, length), generator=g)


def ran(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    """The outputs of an ONNX file, by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    return {o.name: torch.from_numpy(y) for o, y in zip(session.get_outputs(), found, strict=True)}


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ONNX


def test_an_onnx_file_answers_as_the_members(onnx: Any, net: Path, tmp_path: Path) -> None:
    report = export(net, tmp_path / "e.onnx")
    assert isinstance(report, ExportReport)
    assert report.inputs == ["x=float32[B,T,4]", "ids=int64[B,T]"]
    assert report.outputs == [
        "y=float32[3,B,T,5]",
        "again=float32[3,B,T,5]",
        "x_new=float32[3,B,T,4]",
        "scale=float32[3,5]",
        "frozen=float32[3,B,T,8]",
        "best=int64[3,B,T]",
        "sure=bool[3,B,T,5]",
    ]
    assert (report.written, report.why, report.opset, report.members) == ("wide", "", 20, ("m0", "m1", "m2"))
    assert (
        report.checked.startswith("ONNX Runtime") and "the probe; B = 5" in report.checked and "B = 1" in report.checked and "T = " in report.checked
    )
    assert report.unchecked == ["2 <= T <= 12", "ids in 0..6"]
    assert report.files == {"e.onnx": (tmp_path / "e.onnx").stat().st_size} and left(tmp_path) == {"e.onnx"}
    for batch, length in ((1, 5), (2, 3), (40, 12)):
        x, ids = call_of(batch, length, batch)
        found = ran(tmp_path / "e.onnx", x=x, ids=ids)
        for i, module in enumerate(NETS):
            wanted = module(x, ids)
            for name, value in wanted.items():
                same(found["x_new" if name == "x" else name][i], value.detach())
    model = onnx.load(str(tmp_path / "e.onnx"))
    assert [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input] == [["B", "T", 4], ["B", "T"]]
    names = {i.name for i in model.graph.initializer}
    assert {"head.weight", "head.bias", "frozen.weight"} <= names
    assert report.made > 0 and "norm.running_mean" not in names, "the batch norm went into the convolution"
    told = {p.key: p.value for p in model.metadata_props}
    assert told["widepack.artifact"] == Reader(net).manifest.digest == report.digest
    assert json.loads(told["widepack.checkpoints.alignment"]) == ["m0", "m1", "m2"]
    assert told["widepack.holds_where"] == "2 <= T <= 12; ids in 0..6" and "2 <= T <= 12" in model.doc_string
    assert model.producer_name == "widepack"
    assert str(Path(__file__).parent) not in (tmp_path / "e.onnx").read_bytes().decode("latin1"), "no place of the builder's files"


def test_each_member_sees_its_own_input_in_onnx(onnx: Any, net: Path, tmp_path: Path) -> None:
    report = export(net, tmp_path / "e.onnx", pattern="each", opset=18)
    assert report.inputs[0] == "x=float32[3,B,T,4]" and report.opset == 18
    assert {o.version for o in onnx.load(str(tmp_path / "e.onnx")).opset_import if not o.domain} == {18}
    given = [call_of(4, seed=i) for i in range(N)]
    found = ran(tmp_path / "e.onnx", x=torch.stack([x for x, _ in given]), ids=torch.stack([ids for _, ids in given]))
    for i, module in enumerate(NETS):
        same(found["y"][i], module(*given[i])["y"].detach())


def test_an_onnx_file_may_point_into_the_artifact(onnx: Any, small: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "below" / "e.wide"
    shutil.copytree(small, artifact)
    weights = next(p for p in artifact.iterdir() if p.name.startswith("weights-"))
    with pytest.raises(UsageError, match=r"other.*own folder or below it alone.*weights='inside', --self-contained"):
        (tmp_path / "other").mkdir()
        export(artifact, tmp_path / "other" / "e.onnx", weights="beside")
    assert left(tmp_path / "other") == set()
    x, ids = call_of(3)
    for out, location in ((tmp_path / "e.onnx", f"below/e.wide/{weights.name}"), (artifact / "e.onnx", weights.name)):
        report = export(artifact, out, weights="beside")
        assert report.made == 0 and "the probe" in report.checked
        model = onnx.load(str(out), load_external_data=False)
        points = [{e.key: e.value for e in i.external_data} for i in model.graph.initializer if i.external_data]
        assert {p["location"] for p in points} == {location} and len(points) == report.initializers
        found = ran(out, x=x, ids=ids)
        for i, module in enumerate(SMALL):
            same(found["y"][i], module(x, ids)["y"].detach())
    load(artifact, verify="hashes")  # the file that stands in it does no harm
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "below", moved / "below")
    shutil.copy(tmp_path / "e.onnx", moved / "e.onnx")
    same(ran(moved / "e.onnx", x=x, ids=ids)["y"][1], SMALL[1](x, ids)["y"].detach())
    with pytest.raises(LoweringError, match="in one piece.*write its weights inside"):
        export(moved / "below" / "e.wide", moved / "some.onnx", members=[0, 2], weights="beside")
    assert left(moved) == {"below", "e.onnx"}


def test_some_members_and_one_alone_in_onnx(onnx: Any, small: Path, tmp_path: Path) -> None:
    x, ids = call_of(6)
    report = export(small, tmp_path / "two.onnx", members=["m2", 0])
    assert report.members == ("m2", "m0") and report.outputs[0] == "y=float32[2,B,T,5]"
    found = ran(tmp_path / "two.onnx", x=x, ids=ids)
    same(found["y"][0], SMALL[2](x, ids)["y"].detach())
    same(found["y"][1], SMALL[0](x, ids)["y"].detach())
    shutil.copytree(small, tmp_path / "e.wide")
    for weights in ("inside", "beside"):
        one = export(tmp_path / "e.wide", tmp_path / f"{weights}.onnx", member="m1", weights=weights)
        assert (one.members, one.pattern, one.outputs[0]) == (("m1",), "", "y=float32[B,T,5]") and "the probe" in one.checked
        found = ran(tmp_path / f"{weights}.onnx", x=x, ids=ids)
        for name, value in SMALL[1](x, ids).items():
            same(found["x_new" if name == "x" else name], value.detach())


def states_of(onnx: Any, path: Path) -> dict[str, str]:
    """Which output is the new value of which input, as the file says it."""
    found: dict[str, str] = json.loads({p.key: p.value for p in onnx.load(path, load_external_data=False).metadata_props}["widepack.states"])
    return found


def test_ragged_outputs_and_states_in_onnx(onnx: Any, heads: Path, steps: Path, tmp_path: Path) -> None:
    report = export(heads, tmp_path / "heads.onnx")
    assert report.outputs == ["0@0=float32[B,2]", "0@1=float32[B,3]", "0@2=float32[B,4]", "1=float32[3,B,6]"]
    x = torch.randn(7, 4)
    found = ran(tmp_path / "heads.onnx", x=x)
    for i, module in enumerate(HEADS):
        out, z = module(x)
        same(found[f"0@{i}"], out.detach())
        same(found["1"][i], z.detach())
    report = export(steps, tmp_path / "steps.onnx")
    assert report.inputs == ["x=float32[B,4]", "h=float32[3,B,6]", "steps=int64[3]"]
    assert {o.partition("=")[0] for o in report.outputs} == {"y", "h_new", "steps_new"}
    assert states_of(onnx, tmp_path / "steps.onnx") == {"h": "h_new", "steps": "steps_new"}
    h, count = torch.zeros(3, 7, 6), torch.zeros(3, dtype=torch.int64)
    own, modules = [torch.zeros(7, 6)] * N, [made(Step, i) for i in range(N)]
    for t in range(3):
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(t))
        found = ran(tmp_path / "steps.onnx", x=x, h=h, steps=count)
        h, count = found["h_new"], found["steps_new"]
        for i, module in enumerate(modules):
            with torch.no_grad():
                wanted = module(x, own[i])
            own[i] = wanted["h"]
            same(found["y"][i], wanted["y"])


class Unnamed(nn.Module):
    """A state that comes back as the second of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h.sum(1), h


def test_a_state_that_comes_back_without_a_name(onnx: Any, tmp_path: Path) -> None:
    modules = [made(Unnamed, i) for i in range(N)]
    build(saved(tmp_path, modules), tmp_path / "e.wide", model=Unnamed, inputs=["x=float32[B,4]", "h=float32[B,6]"], state=["h=1"], **QUICK)
    report = export(tmp_path / "e.wide", tmp_path / "e.onnx")
    assert [o.partition("=")[0] for o in report.outputs] == ["0", "1"]
    assert states_of(onnx, tmp_path / "e.onnx") == {"h": "1"}
    x, h = torch.randn(5, 4), torch.randn(N, 5, 6)
    found = ran(tmp_path / "e.onnx", x=x, h=h)
    for i, module in enumerate(modules):
        same(found["1"][i], module(x, h[i])[1].detach())


class Chosen(nn.Module):
    """How many rows are summed is data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = self.fc(x[ids > 2])
        return y.relu().sum(0)


def test_sizes_that_are_data_in_onnx(onnx: Any, tmp_path: Path) -> None:
    modules = [made(Chosen, i) for i in range(N)]
    build(saved(tmp_path, modules), tmp_path / "e.wide", model=Chosen, inputs=["x=float32[B,4]", "ids=int64[B]:0..6"], **QUICK)
    assert export(tmp_path / "e.wide", tmp_path / "e.onnx").written == "wide"
    x, ids = torch.randn(9, 4), torch.arange(9)
    found = ran(tmp_path / "e.onnx", x=x, ids=ids)["output"]
    for i, module in enumerate(modules):
        same(found[i], module(x, ids).detach())


def test_weights_past_a_protobuf_message_stand_beside_it(onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widepack.exporters.onnx_file.INSIDE_BYTES", 100)
    report = export(small, tmp_path / "e.onnx")
    (data,) = (f for f in report.files if f.endswith(".data"))
    assert left(tmp_path) == {"e.onnx", data} and report.files[data] > 3 * 4 * 64
    x, ids = call_of(3)
    same(ran(tmp_path / "e.onnx", x=x, ids=ids)["y"][2], SMALL[2](x, ids)["y"].detach())
    again = export(small, tmp_path / "e.onnx", members=[0], force=True)
    assert data not in again.files and left(tmp_path) == set(again.files), "the earlier model's weights are gone with it"
    monkeypatch.setattr("widepack.exporters.onnx_file.hold", lambda *_: (_ for _ in ()).throw(VerificationError("wrong")))
    with pytest.raises(VerificationError):
        export(small, tmp_path / "other.onnx")
    assert left(tmp_path) == set(again.files)


def test_a_file_that_answers_wrongly_is_not_kept(onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widepack.exporters import onnx_file as form_onnx

    (tmp_path / "old.onnx").write_bytes(b"old")
    before = form_onnx._tensor
    monkeypatch.setattr(form_onnx, "_tensor", lambda weight, name: before(weight * 1.01 if name == "head.weight" else weight, name))
    for out in ("new.onnx", "old.onnx"):
        with pytest.raises(
            VerificationError, match=r"written as ONNX, does not answer as the artifact's members do: probe: output y of member 0 is off"
        ):
            export(small, tmp_path / out, force=True)
    assert left(tmp_path) == {"old.onnx"} and (tmp_path / "old.onnx").read_bytes() == b"old"


def test_what_onnx_cannot_say_wide_is_said_once_a_member(onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widepack.backends import onnx_model as onnx_files

    before, tried = onnx_files.onnx_model, []

    def stumbles(*args: Any) -> Any:
        tried.append(args)
        if len(tried) == 1:
            raise RuntimeError("no translation of aten.wide")
        return before(*args)

    monkeypatch.setattr("widepack.exporters.onnx_file.onnx_model", stumbles)
    report = export(small, tmp_path / "e.onnx")
    assert report.written == "loop" and "cannot be written as ONNX by torch" in report.why and "no translation of aten.wide" in report.why
    x, ids = call_of(3)
    same(ran(tmp_path / "e.onnx", x=x, ids=ids)["y"][2], SMALL[2](x, ids)["y"].detach())
    tried.clear()
    with pytest.raises(LoweringError, match="member m1 cannot be written as ONNX by torch.*no translation of aten.wide"):
        export(small, tmp_path / "one.onnx", member=1)
    assert left(tmp_path) == {"e.onnx"}


def test_without_onnx_runtime_nothing_is_checked_and_the_report_says_so(
    onnx: Any, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert export(heads, tmp_path / "e.onnx").checked.startswith("not checked: onnxruntime is not installed")


def test_the_command_writes_onnx(onnx: Any, net: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "e.onnx"), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["to"] == "onnx" and document["files"] == {"e.onnx": (tmp_path / "e.onnx").stat().st_size}
    again = CliRunner().invoke(cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "e.onnx")])
    assert again.exit_code == 2 and "exists; give another path, or force=True (--force)" in again.stderr
    done = CliRunner().invoke(cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "m1.onnx"), "--member", "m1"])
    assert done.exit_code == 0, done.output
    for words in (
        "member m1, entry forward, ONNX opset 20",
        "y=float32[B,T,5]",
        "checked  ONNX Runtime",
        "does not check that 2 <= T <= 12, ids in 0..6",
    ):
        assert words in done.stdout


# torch.export programs

ALONE = """
import sys, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("widepack"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
with torch.no_grad():
    for path in sys.argv[2:]:
        torch.save([torch.export.load(path).module()(*args) for args in torch.load(sys.argv[1])], path + ".out")
"""


def test_a_program_runs_without_widepack(heads: Path, tmp_path: Path) -> None:
    export(heads, tmp_path / "e.pt2", to="pt2", member="m1")
    x = torch.randn(7, 4)
    torch.save([(x,)], tmp_path / "calls.pt")
    must(fresh(ALONE, tmp_path / "calls.pt", tmp_path / "e.pt2"))
    ((y, z),) = torch.load(tmp_path / "e.pt2.out")
    with torch.no_grad():
        out, trunk = HEADS[1](x)
    same(y, out)
    same(z, trunk)


def test_programs_of_all_members_and_of_one(small: Path, tmp_path: Path) -> None:
    whole = export(small, tmp_path / "all.pt2", to="pt2")
    one = export(small, tmp_path / "one.pt2", to="pt2", member="m1")
    assert whole.checked.startswith(f"torch {torch.__version__}: the probe; B = 5") and whole.unchecked == ["ids in 0..6"]
    assert whole.inputs[0] == "x=float32[B,T,4]" and whole.outputs[0] == "y=float32[3,B,T,5]" and one.outputs[0] == "y=float32[B,T,5]"
    assert left(tmp_path) == {"all.pt2", "one.pt2"}
    many, single = (torch.export.load(tmp_path / name).module() for name in ("all.pt2", "one.pt2"))
    with torch.no_grad():
        for batch, length in ((1, 5), (2, 3), (40, 12)):
            x, ids = call_of(batch, length, batch)
            found, alone = many(x, ids), single(x, ids)
            for i, module in enumerate(SMALL):
                for name, value in module(x, ids).items():
                    same(found[name][i], value)
                    if i == 1:
                        same(alone[name], value)
        with pytest.raises(RuntimeError, match="to be <= 12, but got 13"):  # torch holds a call to the bounds of dims
            many(*call_of(2, 13))


@pytest.mark.slow
def test_programs_of_some_members_each_and_weightless(small: Path, tmp_path: Path) -> None:
    report = export(small, tmp_path / "two.pt2", to="pt2", members=[2, 0], pattern="each")
    assert report.inputs == ["x=float32[2,B,T,4]", "ids=int64[2,B,T]"]
    given = [call_of(4, seed=i) for i in range(2)]
    with torch.no_grad():
        found = torch.export.load(tmp_path / "two.pt2").module()(torch.stack([x for x, _ in given]), torch.stack([ids for _, ids in given]))
    for k, i in enumerate((2, 0)):
        same(found["y"][k], SMALL[i](*given[k])["y"].detach())
    bare = export(small, tmp_path / "bare.pt2", to="pt2", weights="none")
    assert bare.initializers > 5 and "the probe" in bare.checked
    loaded = torch.export.load(tmp_path / "bare.pt2")
    assert all(w.is_meta for w in loaded.state_dict.values()) and set(loaded.state_dict) <= {w.name for w in Reader(small).manifest.weights}


def test_programs_of_ragged_heads_and_states(heads: Path, steps: Path, tmp_path: Path) -> None:
    x = torch.randn(7, 4)
    export(heads, tmp_path / "heads.pt2", to="pt2")
    export(steps, tmp_path / "steps.pt2", to="pt2")
    with torch.no_grad():
        outs, z = torch.export.load(tmp_path / "heads.pt2").module()(x)
        for i, module in enumerate(HEADS):
            own, mine = module(x)
            same(outs[i], own)
            same(z[i], mine)
        model = torch.export.load(tmp_path / "steps.pt2").module()
        state = {"h": torch.zeros(3, 7, 6), "steps": torch.zeros(3, dtype=torch.int64)}
        modules, own = [made(Step, i) for i in range(N)], [torch.zeros(7, 6)] * N
        for _ in range(2):
            found, state = model(x, **state)
            for i, module in enumerate(modules):
                wanted = module(x, own[i])
                own[i] = wanted["h"]
                same(found["y"][i], wanted["y"])


def test_a_program_that_answers_wrongly_is_not_kept(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widepack.exporters import pt2_file as form_pt2
    from widepack.backends.torch_export import exported_program

    before = exported_program

    def spoiled(*args: Any) -> Any:
        made = before(*args)
        made.state_dict["head.weight"] = made.state_dict["head.weight"] * 1.01
        return made

    monkeypatch.setattr(form_pt2, "exported_program", spoiled)
    with pytest.raises(
        VerificationError, match="written as a torch.export program, does not answer as the artifact's members do: probe: output y of member 0"
    ):
        export(small, tmp_path / "e.pt2", to="pt2")
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("old", "new", "words"), [("trunk.weight", 'trunk.we"ght', "a weight called 'trunk.we\"ght'"), ("x", "x,*_", "an input called 'x,\\*_'")]
)
def test_names_that_would_be_code_are_refused(old: str, new: str, words: str, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from widepack.exporters import pt2_file as form_pt2
    from widepack.exporters.subject import Subject

    def renamed(subject: Subject, *_: Any) -> Any:
        if old in subject.values:
            subject.values[new] = subject.values.pop(old)
        else:
            subject.entry = replace(subject.entry, inputs=tuple(replace(i, name=new) for i in subject.entry.inputs))
        return before(subject, *_)

    before = form_pt2.write
    monkeypatch.setattr(form_pt2, "write", renamed)
    with pytest.raises(LoweringError, match=f"a torch.export program cannot have {words}"):
        export(heads, tmp_path / "e.pt2", to="pt2")
    assert left(tmp_path) == set()


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"to": "tflite"}, "to='tflite' is unknown; known: onnx, pt2"),
        ({"weights": "none"}, "weights='none' is unknown of onnx; known: inside, beside"),
        ({"to": "pt2", "weights": "beside"}, "weights='beside' is unknown of pt2; known: inside, none"),
        ({"pattern": "mixed"}, "pattern='mixed' is unknown; known: shared, each"),
        ({"member": 0, "members": [1]}, "member and members are both given"),
        ({"member": 0, "pattern": "each"}, "a single member has no member axis"),
        ({"to": "pt2", "opset": 20}, "opset is of ONNX files"),
        ({"to": "pt2", "member": "m9"}, "no member is called 'm9'; the members are m0, m1, m2"),
        ({"to": "pt2", "entry": "encode"}, "there is no entry 'encode'"),
        ({"opset": 17}, "opset=17 is none that torch's exporter writes; give one of 18 to 23"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], words: str, heads: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        export(heads, tmp_path / "e", **given)
    assert words in str(caught.value) and left(tmp_path) == set()


def test_places_that_are_taken_are_refused(heads: Path, tmp_path: Path) -> None:
    (tmp_path / "e.pt2").write_text("mine")
    with pytest.raises(ArtifactExists, match="exists; give another path"):
        export(heads, tmp_path / "e.pt2", to="pt2")
    with pytest.raises(UsageError, match="is a folder"):
        export(heads, tmp_path, to="pt2")
    with pytest.raises(UsageError, match="there is no folder"):
        export(heads, tmp_path / "no" / "e.pt2", to="pt2")
    assert (tmp_path / "e.pt2").read_text() == "mine"


def test_a_full_disk_leaves_what_was_there(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "e.pt2").write_text("old")
    monkeypatch.setattr("widepack.system.atomic_file.os.fsync", full)
    with pytest.raises(ArtifactError, match="e.pt2: cannot be written: No space left on device; nothing of it is left"):
        export(heads, tmp_path / "e.pt2", to="pt2", force=True)
    assert left(tmp_path) == {"e.pt2"} and (tmp_path / "e.pt2").read_text() == "old"


def test_without_the_extra_a_sentence_says_what_to_install(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"writing ONNX needs the packages onnx and onnxscript .*pip install 'widepack\[onnx\]'"):
        export(heads, tmp_path / "e.onnx")


def test_the_command_writes_a_program_and_refuses_options_of_the_other_form(heads: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.pt2"
    done = CliRunner().invoke(cli, ["export", str(heads), "--to", "pt2", "-o", str(out), "--weightless"])
    assert done.exit_code == 0, done.output
    assert (
        "3 members, pattern shared, entry forward" in done.stdout
        and "left out" in done.stdout
        and f"checked  torch {torch.__version__}" in done.stdout
    )
    for words, said in ((["--to", "onnx", "--weightless"], "--weightless is of pt2"), (["--to", "pt2", "--external"], "--external are of ONNX")):
        refused = CliRunner().invoke(cli, ["export", str(heads), *words])
        assert refused.exit_code == 2 and said in refused.stderr
    assert "no member is called 'm7'" in CliRunner().invoke(cli, ["export", str(heads), "--to", "pt2", "--member", "m7"]).stderr


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="the README signs with ssh-keygen")
def test_the_lines_of_the_readme_sign_an_artifact(heads: Path, tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    sign, verify = readme.partition("<!-- signing:")[2].partition("\n\n")[0].splitlines()[1:]
    (tmp_path / ".ssh").mkdir()
    must(sh('ssh-keygen -q -t ed25519 -N "" -C "" -f .ssh/id_ed25519', tmp_path))
    (tmp_path / "allowed_signers").write_text(f"me@example.org {(tmp_path / '.ssh' / 'id_ed25519.pub').read_text()}")
    shutil.copytree(heads, tmp_path / "ens.wide")
    must(sh(sign, tmp_path))
    said = must(sh(verify.replace("widepack verify", "echo widepack verify"), tmp_path))
    assert 'Good "widepack" signature for me@example.org' in said and "widepack verify ens.wide" in said
    manifest = tmp_path / "ens.wide" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"m0", b"m9", 1))
    assert sh(verify, tmp_path).returncode != 0


def sh(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line.strip().replace("~", "."), shell=True, cwd=folder, capture_output=True, text=True, check=False)


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path, heads: Path) -> None:
    left, busy = tmp_path / f".widepack-{'a' * 16}.pt2", tmp_path / f".widepack-{'b' * 16}.pt2"
    left.write_bytes(b"half")
    with open(busy, "xb") as other:
        hold(other.fileno())  # another export is at work
        export(heads, tmp_path / "e.pt2", to="pt2")
        assert {p.name for p in tmp_path.iterdir()} == {"e.pt2", busy.name}
