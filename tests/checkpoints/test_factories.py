"""Tests members that no factory of the user makes: pickled modules.

Also tests dtypes, names, and checkpoints that are left out.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack import build, load
from widepack.checkpoints.discovery import open_checkpoint
from widepack.errors import CaptureError, CheckpointError, MemberMismatch, UsageError, VerificationError
from widepack.spec.dtypes import find_dtype
from widepack_artifacts.reader import Reader

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",), "inputs": ["x=float32[B,2,8]"]}


class Net(nn.Module):
    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, width, 3, padding=1)
        self.fc = nn.Linear(width, 3)
        self.register_buffer("scale", torch.full((3,), scale), persistent=False)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:  # [B, 2, 8]
        return self.fc(torch.relu(self.conv(x)).mean(-1)) * self.scale * self.factor  # type: ignore[no-any-return]


def net(seed: int, **kwargs: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(**kwargs).eval()


def save(folder: Path, values: list[Any]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i, value in enumerate(values):
        torch.save(value, folder / f"m{i}.pt")
    return [str(folder / f"m{i}.pt") for i in range(len(values))]


# Pickled modules


def test_pickled_modules_need_no_factory(tmp_path: Path) -> None:
    nets = [net(i, scale=float(i + 1)) for i in range(3)]
    paths = save(
        tmp_path, [nets[0], {"model": nn.DataParallel(nets[1]), "epoch": 3}, {"state_dict": nets[2]}]
    )
    with pytest.raises(CheckpointError) as caught:
        build(paths, tmp_path / "e.wide", **QUICK)
    assert str(caught.value).startswith("3 of 3 checkpoints cannot be used:")
    assert str(caught.value).count("--trust-pickle") == 3
    report = build(paths, tmp_path / "e.wide", trust_pickle=True, **QUICK)
    assert report.members == ("m0", "m1", "m2")
    x = torch.randn(5, 2, 8)
    ens = load(tmp_path / "e.wide")
    with torch.no_grad():  # the unsaved buffer differs between members
        torch.testing.assert_close(ens(x), torch.stack([n(x) for n in nets]))
    assert Reader(tmp_path / "e.wide").manifest.provenance["model"] == "the pickled modules()"
    build(paths, tmp_path / "f.wide", model=Net, trust_pickle=True, **QUICK)  # only the weights are read
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "f.wide")(x)[2] * 3, nets[2](x))


def test_numbers_of_pickled_modules_that_differ_are_noticed(tmp_path: Path) -> None:
    nets = [net(i) for i in range(2)]
    nets[1].factor = 2.0
    with pytest.raises(
        VerificationError, match=r"member m1.*The members differ in something that is not a weight"
    ):
        build(save(tmp_path, nets), tmp_path / "e.wide", trust_pickle=True, **QUICK)
    assert not (tmp_path / "e.wide").exists()


@pytest.mark.extended
def test_pickled_modules_of_several_widths_and_dtypes(tmp_path: Path) -> None:
    paths = save(tmp_path, [net(0, width=4).half(), net(1, width=6)])
    build(paths, tmp_path / "e.wide", trust_pickle=True, dtype="float32", **QUICK)
    with torch.no_grad():
        x = torch.randn(3, 2, 8)
        torch.testing.assert_close(load(tmp_path / "e.wide")(x)[0], net(0, width=4).half().float()(x))


def test_a_pickle_that_cannot_be_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gonenet.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import gonenet  # type: ignore[import-not-found]

    torch.save(gonenet.Net(3, 2), tmp_path / "a.pt")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "gonenet")
    with pytest.raises(
        CheckpointError,
        match=r"cannot be unpickled here: ModuleNotFoundError: No module named 'gonenet'; run widepack where",
    ):
        open_checkpoint(tmp_path / "a.pt", trust_pickle=True)
    monkeypatch.chdir(tmp_path)  # the current folder is searched, as in Python
    assert set(open_checkpoint(tmp_path / "a.pt", trust_pickle=True).tensors()) == {"weight", "bias"}
    assert str(tmp_path) not in sys.path
    sys.modules.pop("gonenet")


def test_a_plain_pickle_of_a_state_dict(tmp_path: Path) -> None:
    import pickle

    state = net(0).state_dict()
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(state))
    assert set(open_checkpoint(tmp_path / "a.pkl", trust_pickle=True).tensors()) == set(state)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(state)[:-40])
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        open_checkpoint(tmp_path / "a.pkl", trust_pickle=True)


def test_torchscript_is_refused_even_when_trusted(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated")
        torch.jit.trace(net(0), torch.zeros(1, 2, 8)).save(str(tmp_path / "a.pt"))  # type: ignore[no-untyped-call]
    with pytest.raises(
        CheckpointError,
        match=r"is a TorchScript archive, which contains code; load it with torch.jit.load if "
        r"you trust it, and save the weights",
    ):
        open_checkpoint(tmp_path / "a.pt", trust_pickle=True)


def test_some_members_bring_their_model_and_some_do_not(tmp_path: Path) -> None:
    paths = save(tmp_path, [net(0), net(1).state_dict()])
    with pytest.raises(
        UsageError,
        match=r"no model: .*m0.pt contains its own code, .*m1.pt does not\), so name what makes "
        r"the module: --model",
    ):
        build(paths, tmp_path / "e.wide", trust_pickle=True, **QUICK)
    with pytest.raises(UsageError, match="model arguments are given, but no model"):
        build(paths[:1], tmp_path / "e.wide", trust_pickle=True, model_args={"width": 6}, **QUICK)


# dtypes


def test_members_of_other_dtypes_are_converted_as_torch_does(tmp_path: Path) -> None:
    nets = [net(0), net(1).half(), net(2).double()]
    paths = save(tmp_path, [n.state_dict() for n in nets])
    build(paths, tmp_path / "e.wide", model=Net, **QUICK)
    ens, x = load(tmp_path / "e.wide"), torch.randn(3, 2, 8)
    for i, path in enumerate(paths):
        model = Net().eval()
        model.load_state_dict(torch.load(path))
        torch.testing.assert_close(ens(x)[i], model(x).detach())
        assert all(torch.equal(v, model.state_dict()[n]) for n, v in ens.state_dict(i).items())
    for dtype, inputs in (("float32", "x=float32[B,2,8]"), ("double", "x=float64[B,2,8]")):
        build(paths, tmp_path / "e.wide", model=Net, dtype=dtype, force=True, **{**QUICK, "inputs": [inputs]})
        ens, wanted = load(tmp_path / "e.wide"), torch.float32 if dtype == "float32" else torch.float64
        x = torch.randn(3, 2, 8, dtype=wanted)
        with torch.no_grad():
            torch.testing.assert_close(
                ens(x), torch.stack([n.to(wanted)(x) for n in (net(0), net(1).half(), net(2).double())])
            )
        assert {t.dtype for t in ens.state_dict(1).values()} == {wanted}
        assert Reader(tmp_path / "e.wide").manifest.provenance["dtype"] == str(wanted).removeprefix("torch.")


def test_an_invalid_dtype_is_refused(tmp_path: Path) -> None:
    paths = save(tmp_path, [net(0).state_dict()])
    with pytest.raises(
        UsageError,
        match="unknown dtype 'int8'; the weights of a member can be float32, float64, bfloat16, float16",
    ):
        build(paths, tmp_path / "e.wide", model=Net, dtype="int8", **QUICK)
    with pytest.raises(
        CaptureError,
        match=r"The members were converted to bfloat16, but inputs are not converted: describe "
        r"them in the dtype",
    ):
        build(paths, tmp_path / "e.wide", model=Net, dtype="bf16", **QUICK)
    assert find_dtype(torch.bfloat16) is find_dtype("torch.bfloat16") is torch.bfloat16
    assert not (tmp_path / "e.wide").exists()


# Names, and checkpoints that are left out


@pytest.mark.extended
def test_names_from_a_text_and_a_file(tmp_path: Path) -> None:
    paths = save(tmp_path, [net(i).state_dict() for i in range(2)])
    (tmp_path / "names.txt").write_text("Zürich\n\n  St. Gallen \n", encoding="utf-8-sig")
    path = tmp_path / "names.txt"
    for names in ("Zürich, St. Gallen", path, str(path), ["Zürich", "St. Gallen"]):
        report = build(paths, tmp_path / "e.wide", model=Net, names=names, dry_run=True, **QUICK)
        assert report.members == ("Zürich", "St. Gallen")
    for names, words in (
        ("a,b,c", "2 checkpoints and 3 names; every member needs one checkpoint and one name$"),
        (
            "gone.txt",
            "2 checkpoints and 1 names; every member needs one checkpoint and one name, "
            "and there is no file gone.txt",
        ),
        ("", "2 checkpoints and 1 names"),
        ([], "2 checkpoints and 0 names"),
        ("a,a", "the members' names must differ: a is given twice"),
        ("a,", "names: '' is not a name"),
        (["a", "b\x1b[2J"], r"names: 'b\\x1b\[2J' is not a name; a name is printable text"),
    ):
        with pytest.raises(UsageError, match=words):
            build(paths, tmp_path / "e.wide", model=Net, names=names, **QUICK)
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"names.txt cannot be read"):
        build(paths, tmp_path / "e.wide", model=Net, names=str(tmp_path / "names.txt"), **QUICK)


def test_one_path_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    for one in ("a.pt", tmp_path):
        with pytest.raises(UsageError, match="checkpoints must be a list of paths, not the one path"):
            build(one, tmp_path / "e.wide", model=Net, **QUICK)  # type: ignore[arg-type]


def test_bad_checkpoints_are_one_error_or_left_out(tmp_path: Path) -> None:
    nets = [net(i) for i in range(4)]
    members = (nets[0], net(5, width=8), nets[1].half(), nets[3])
    paths = save(tmp_path, [member.state_dict() for member in members])
    (tmp_path / "text.pt").write_text("hello")
    paths.insert(1, str(tmp_path / "text.pt"))
    with pytest.raises(CheckpointError) as caught:
        build(paths, tmp_path / "e.wide", model=Net, **QUICK)
    head, *lines = str(caught.value).split("\n")
    assert head == "2 of 5 checkpoints cannot be used:"
    assert [line.partition(")")[0] for line in lines] == [f"- checkpoint {i} ({paths[i]}" for i in (1, 2)]
    report = build(paths, tmp_path / "e.wide", model=Net, names="a,b,c,d,e", skip_bad=True, **QUICK)
    assert report.members == ("a", "d", "e")
    assert [(b["number"], b["path"]) for b in report.left_out] == [(i, paths[i]) for i in (1, 2)]
    assert "is a text file" in report.left_out[0]["why"]
    assert "conv.bias is [8] float32; the model has [6] float32" in report.left_out[1]["why"]
    assert Reader(tmp_path / "e.wide").manifest.provenance["left_out"] == report.left_out
    x = torch.randn(3, 2, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            load(tmp_path / "e.wide")(x), torch.stack([nets[0](x), nets[1].float()(x), nets[3](x)])
        )
    for bad in (paths[1:2], paths[1:3]):
        with pytest.raises(CheckpointError, match=r"is a text file"):
            build(bad, tmp_path / "f.wide", model=Net, skip_bad=True, **QUICK)
    assert not (tmp_path / "f.wide").exists()


def test_the_model_inside_a_lightning_module(tmp_path: Path) -> None:
    states = [
        {**{f"net.{k}": v for k, v in net(i).state_dict().items()}, "criterion.weight": torch.ones(3)}
        for i in range(2)
    ]
    build(save(tmp_path, [{"state_dict": s} for s in states]), tmp_path / "e.wide", model=Net, **QUICK)
    assert set(load(tmp_path / "e.wide").state_dict(1)) == set(net(0).state_dict())
    twice = [
        {**s, **{f"ema_net.{k}": v for k, v in net(i).state_dict().items()}} for i, s in enumerate(states)
    ]
    with pytest.raises(
        MemberMismatch,
        match=r"All of the model's names are in it under net, ema_net: name one, for example --key net\.",
    ):
        build(save(tmp_path, [{"state_dict": s} for s in twice]), tmp_path / "f.wide", model=Net, **QUICK)
    beside = [
        {**net(i).state_dict(), **{f"ema.{k}": v for k, v in net(i + 5).state_dict().items()}}
        for i in range(2)
    ]
    with pytest.raises(
        MemberMismatch, match=r"Weights of the model's names are in it under ema too: --key ema takes those\."
    ):
        build(save(tmp_path, beside), tmp_path / "f.wide", model=Net, **QUICK)
