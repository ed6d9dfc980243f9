"""Tests that ONNX files of `widepack.export` give the answers of the members.

The tests are skipped if the extra `onnx` is not installed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from exporters.export_models import (
    HEADS,
    NETS,
    QUICK,
    SMALL,
    N,
    Step,
    assert_answers,
    assert_same,
    call_of,
    file_names,
    run_onnx,
    saved,
    seeded,
)
from widepack import ExportReport, build, export, load
from widepack.errors import LoweringError, UsageError, VerificationError
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli


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
    assert report.checked.startswith("ONNX Runtime")
    assert all(words in report.checked for words in ("the probe; B = 5", "B = 1", "T = "))
    assert report.unchecked == ["2 <= T <= 12", "ids in 0..6"]
    assert report.files == {"e.onnx": (tmp_path / "e.onnx").stat().st_size}
    assert file_names(tmp_path) == {"e.onnx"}
    for batch, length in ((1, 5), (2, 3), (40, 12)):
        x, ids = call_of(batch, length, batch)
        assert_answers(run_onnx(tmp_path / "e.onnx", x=x, ids=ids), NETS, x, ids)
    model = onnx.load(str(tmp_path / "e.onnx"))
    assert [
        [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input
    ] == [["B", "T", 4], ["B", "T"]]
    names = {i.name for i in model.graph.initializer}
    assert {"head.weight", "head.bias", "frozen.weight"} <= names
    assert report.made > 0 and "norm.running_mean" not in names, (
        "the batch norm is not folded into the convolution"
    )
    properties = {p.key: p.value for p in model.metadata_props}
    assert properties["widepack.artifact"] == Reader(net).manifest.digest == report.digest
    assert json.loads(properties["widepack.members"]) == ["m0", "m1", "m2"]
    assert properties["widepack.holds_where"] == "2 <= T <= 12; ids in 0..6"
    assert "2 <= T <= 12" in model.doc_string
    assert model.producer_name == "widepack"
    assert str(Path(__file__).parent) not in (tmp_path / "e.onnx").read_bytes().decode("latin1"), (
        "the file has paths of the machine that built it"
    )


@pytest.mark.extended
def test_each_member_sees_its_own_input_in_onnx(onnx: Any, net: Path, tmp_path: Path) -> None:
    report = export(net, tmp_path / "e.onnx", pattern="each", opset=18)
    assert report.inputs[0] == "x=float32[3,B,T,4]" and report.opset == 18
    assert {o.version for o in onnx.load(str(tmp_path / "e.onnx")).opset_import if not o.domain} == {18}
    calls = [call_of(4, seed=i) for i in range(N)]
    outputs = run_onnx(
        tmp_path / "e.onnx", x=torch.stack([x for x, _ in calls]), ids=torch.stack([ids for _, ids in calls])
    )
    for i, module in enumerate(NETS):
        assert_same(outputs["y"][i], module(*calls[i])["y"].detach())


@pytest.mark.extended
def test_an_onnx_file_may_point_into_the_artifact(onnx: Any, small: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "below" / "e.wide"
    shutil.copytree(small, artifact)
    weights = next(p for p in artifact.iterdir() if p.name.startswith("weights-"))
    with pytest.raises(
        UsageError, match=r"other.*own folder or below it, and.*weights='inside', --self-contained"
    ):
        (tmp_path / "other").mkdir()
        export(artifact, tmp_path / "other" / "e.onnx", weights="beside")
    assert file_names(tmp_path / "other") == set()
    x, ids = call_of(3)
    for out, location in (
        (tmp_path / "e.onnx", f"below/e.wide/{weights.name}"),
        (artifact / "e.onnx", weights.name),
    ):
        report = export(artifact, out, weights="beside")
        assert report.made == 0 and "the probe" in report.checked
        model = onnx.load(str(out), load_external_data=False)
        points = [
            {e.key: e.value for e in i.external_data} for i in model.graph.initializer if i.external_data
        ]
        assert {p["location"] for p in points} == {location} and len(points) == report.initializers
        assert_answers(run_onnx(out, x=x, ids=ids), SMALL, x, ids)
    load(artifact, verify="hashes")  # the artifact loads with an additional file in its folder
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "below", moved / "below")
    shutil.copy(tmp_path / "e.onnx", moved / "e.onnx")
    assert_same(run_onnx(moved / "e.onnx", x=x, ids=ids)["y"][1], SMALL[1](x, ids)["y"].detach())
    with pytest.raises(LoweringError, match="not in one piece.*write its weights inside"):
        export(moved / "below" / "e.wide", moved / "some.onnx", members=[0, 2], weights="beside")
    assert file_names(moved) == {"below", "e.onnx"}


@pytest.mark.extended
def test_some_members_and_one_alone_in_onnx(onnx: Any, small: Path, tmp_path: Path) -> None:
    x, ids = call_of(6)
    report = export(small, tmp_path / "two.onnx", members=["m2", 0])
    assert report.members == ("m2", "m0") and report.outputs[0] == "y=float32[2,B,T,5]"
    assert_answers(run_onnx(tmp_path / "two.onnx", x=x, ids=ids), [SMALL[2], SMALL[0]], x, ids)
    shutil.copytree(small, tmp_path / "e.wide")
    for weights in ("inside", "beside"):
        one = export(tmp_path / "e.wide", tmp_path / f"{weights}.onnx", member="m1", weights=weights)
        assert (one.members, one.pattern, one.outputs[0]) == (("m1",), "", "y=float32[B,T,5]")
        assert "the probe" in one.checked
        outputs = run_onnx(tmp_path / f"{weights}.onnx", x=x, ids=ids)
        assert_answers({name: value[None] for name, value in outputs.items()}, [SMALL[1]], x, ids)


def states_of(onnx: Any, path: Path) -> dict[str, str]:
    """Returns the output with the new value of each state, by the input's name, from the file's metadata."""
    states: dict[str, str] = json.loads(
        {p.key: p.value for p in onnx.load(path, load_external_data=False).metadata_props}["widepack.states"]
    )
    return states


@pytest.mark.extended
def test_ragged_outputs_and_states_in_onnx(onnx: Any, heads: Path, steps: Path, tmp_path: Path) -> None:
    report = export(heads, tmp_path / "heads.onnx")
    assert report.outputs == ["0@0=float32[B,2]", "0@1=float32[B,3]", "0@2=float32[B,4]", "1=float32[3,B,6]"]
    x = torch.randn(7, 4)
    outputs = run_onnx(tmp_path / "heads.onnx", x=x)
    for i, module in enumerate(HEADS):
        out, z = module(x)
        assert_same(outputs[f"0@{i}"], out.detach())
        assert_same(outputs["1"][i], z.detach())
    report = export(steps, tmp_path / "steps.onnx")
    assert report.inputs == ["x=float32[B,4]", "h=float32[3,B,6]", "steps=int64[3]"]
    assert {o.partition("=")[0] for o in report.outputs} == {"y", "h_new", "steps_new"}
    assert states_of(onnx, tmp_path / "steps.onnx") == {"h": "h_new", "steps": "steps_new"}
    h, count = torch.zeros(3, 7, 6), torch.zeros(3, dtype=torch.int64)
    hidden, modules = [torch.zeros(7, 6)] * N, [seeded(Step, i) for i in range(N)]
    for t in range(3):
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(t))
        outputs = run_onnx(tmp_path / "steps.onnx", x=x, h=h, steps=count)
        h, count = outputs["h_new"], outputs["steps_new"]
        for i, module in enumerate(modules):
            with torch.no_grad():
                expected = module(x, hidden[i])
            hidden[i] = expected["h"]
            assert_same(outputs["y"][i], expected["y"])


class Unnamed(nn.Module):
    """Returns its state as the second item of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h.sum(1), h


@pytest.mark.extended
def test_a_state_that_is_returned_without_a_name(onnx: Any, tmp_path: Path) -> None:
    modules = [seeded(Unnamed, i) for i in range(N)]
    build(
        saved(tmp_path, modules),
        tmp_path / "e.wide",
        model=Unnamed,
        inputs=["x=float32[B,4]", "h=float32[B,6]"],
        state=["h=1"],
        **QUICK,
    )
    report = export(tmp_path / "e.wide", tmp_path / "e.onnx")
    assert [o.partition("=")[0] for o in report.outputs] == ["0", "1"]
    assert states_of(onnx, tmp_path / "e.onnx") == {"h": "1"}
    x, h = torch.randn(5, 4), torch.randn(N, 5, 6)
    outputs = run_onnx(tmp_path / "e.onnx", x=x, h=h)
    for i, module in enumerate(modules):
        assert_same(outputs["1"][i], module(x, h[i])[1].detach())


class Chosen(nn.Module):
    """Sums as many rows as the data selects."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = self.fc(x[ids > 2])
        return y.relu().sum(0)


@pytest.mark.extended
def test_sizes_that_depend_on_data_in_onnx(onnx: Any, tmp_path: Path) -> None:
    modules = [seeded(Chosen, i) for i in range(N)]
    build(
        saved(tmp_path, modules),
        tmp_path / "e.wide",
        model=Chosen,
        inputs=["x=float32[B,4]", "ids=int64[B]:0..6"],
        **QUICK,
    )
    assert export(tmp_path / "e.wide", tmp_path / "e.onnx").written == "wide"
    x, ids = torch.randn(9, 4), torch.arange(9)
    outputs = run_onnx(tmp_path / "e.onnx", x=x, ids=ids)["output"]
    for i, module in enumerate(modules):
        assert_same(outputs[i], module(x, ids).detach())


@pytest.mark.extended
def test_weights_too_large_for_protobuf_are_in_a_second_file(
    onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widepack.exporters.onnx_file.INSIDE_BYTES", 100)
    report = export(small, tmp_path / "e.onnx")
    (data,) = (f for f in report.files if f.endswith(".data"))
    assert file_names(tmp_path) == {"e.onnx", data} and report.files[data] > 3 * 4 * 64
    x, ids = call_of(3)
    assert_same(run_onnx(tmp_path / "e.onnx", x=x, ids=ids)["y"][2], SMALL[2](x, ids)["y"].detach())
    again = export(small, tmp_path / "e.onnx", members=[0], force=True)
    assert data not in again.files and file_names(tmp_path) == set(again.files), (
        "weights of the replaced model are left"
    )
    monkeypatch.setattr(
        "widepack.exporters.onnx_file.check", lambda *_: (_ for _ in ()).throw(VerificationError("wrong"))
    )
    with pytest.raises(VerificationError):
        export(small, tmp_path / "other.onnx")
    assert file_names(tmp_path) == set(again.files)


@pytest.mark.extended
def test_a_file_that_answers_wrongly_is_not_kept(
    onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.exporters import onnx_file

    (tmp_path / "old.onnx").write_bytes(b"old")
    before = onnx_file.tensor_inside
    monkeypatch.setattr(
        onnx_file,
        "tensor_inside",
        lambda weight, name: before(weight * 1.01 if name == "head.weight" else weight, name),
    )
    for out in ("new.onnx", "old.onnx"):
        with pytest.raises(
            VerificationError,
            match=r"written as ONNX, does not answer as the artifact's members do: probe: output y "
            r"of member 0 is off",
        ):
            export(small, tmp_path / out, force=True)
    assert file_names(tmp_path) == {"old.onnx"} and (tmp_path / "old.onnx").read_bytes() == b"old"


@pytest.mark.extended
def test_ops_that_onnx_cannot_write_wide_are_written_for_each_member(
    onnx: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.backends import onnx_model

    before, tried = onnx_model.onnx_model, []

    def stumbles(*args: Any) -> Any:
        tried.append(args)
        if len(tried) == 1:
            raise RuntimeError("no translation of aten.wide")
        return before(*args)

    monkeypatch.setattr("widepack.exporters.onnx_file.onnx_model", stumbles)
    report = export(small, tmp_path / "e.onnx")
    assert report.written == "loop"
    assert all(w in report.why for w in ("cannot be written as ONNX by torch", "no translation of aten.wide"))
    x, ids = call_of(3)
    assert_same(run_onnx(tmp_path / "e.onnx", x=x, ids=ids)["y"][2], SMALL[2](x, ids)["y"].detach())
    tried.clear()
    with pytest.raises(
        LoweringError, match="member m1 cannot be written as ONNX by torch.*no translation of aten.wide"
    ):
        export(small, tmp_path / "one.onnx", member=1)
    assert file_names(tmp_path) == {"e.onnx"}


def test_without_onnx_runtime_nothing_is_checked_and_the_report_says_so(
    onnx: Any, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert export(heads, tmp_path / "e.onnx").checked.startswith("not checked: onnxruntime is not installed")


@pytest.mark.extended
def test_the_command_writes_onnx(onnx: Any, net: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "e.onnx"), "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["to"] == "onnx" and document["files"] == {"e.onnx": (tmp_path / "e.onnx").stat().st_size}
    again = CliRunner().invoke(cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "e.onnx")])
    assert again.exit_code == 2 and "exists; give another path, or force=True (--force)" in again.stderr
    done = CliRunner().invoke(
        cli, ["export", str(net), "--to", "onnx", "-o", str(tmp_path / "m1.onnx"), "--member", "m1"]
    )
    assert done.exit_code == 0, done.output
    for words in (
        "member m1, entry forward, ONNX opset 20",
        "y=float32[B,T,5]",
        "checked  ONNX Runtime",
        "does not check that 2 <= T <= 12, ids in 0..6",
    ):
        assert words in done.stdout
