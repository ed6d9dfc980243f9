"""Tests `.pt2` files as checkpoints: how they are read, run and refused, and their conditions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import seeded
from torch import Tensor, nn
from torch.export import Dim

import cases
from capture.pt2_files import DYNAMIC, QUICK, Net, Small, exported, nets, refused, save, written
from widepack import Output, build, load
from widepack.checkpoints.discovery import open_checkpoint
from widepack.checkpoints.state_dict import TensorInfo
from widepack.errors import CaptureError, CheckpointError, InputError, MemberMismatch, UsageError
from widepack_artifacts.reader import Reader


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("functional", [True, False], ids=["functional", "as exported"])
def test_programs_are_their_own_model(
    functional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = nets(tmp_path, 3, functional, twice=True)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch.export.load can run code")

    monkeypatch.setattr(torch.export, "load", never)
    report = build(paths, tmp_path / "e.wide", **QUICK)
    assert report.members == ("m0", "m1", "m2")
    ens = load(tmp_path / "e.wide")
    members = [seeded(lambda i=i: Net(i + 1.0), i) for i in range(3)]
    assert set(ens.state_dict(1)) == set(members[1].state_dict())
    assert all(torch.equal(v, members[1].state_dict()[k]) for k, v in ens.state_dict(1).items())
    for batch in (1, 5):
        x = torch.randn(batch, 2, 8)
        y = ens(x, twice=True)
        with torch.no_grad():
            alone = [m(x, twice=True) for m in members]
        assert (y["parts"][1], y["none"], list(y)) == (3, None, ["y", "parts", "none"])
        torch.testing.assert_close(y["y"], torch.stack([o["y"] for o in alone]))
        torch.testing.assert_close(y["parts"][0], torch.stack([o["parts"][0] for o in alone]))
    entry = Reader(tmp_path / "e.wide").manifest.entries["forward"]
    assert [(i.name, i.type) for i in entry.inputs] == [("x", "float32[B,2,8]")]
    assert [p.name for p in entry.signature] == ["x", "twice"]
    constants = {w.name: w.kind for w in ens.manifest.weights if w.role == "constant"}
    assert constants["kept"] == constants["free"] == "stacked"
    assert Reader(tmp_path / "e.wide").manifest.provenance["model"] == "the exported programs()"


@pytest.mark.extended
def test_the_weights_of_a_program_go_into_any_model(tmp_path: Path) -> None:
    (path,) = nets(tmp_path, 1)
    found = open_checkpoint(path)
    state = seeded(Net, 0).state_dict()
    infos = {k: TensorInfo(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in state.items()}
    assert found.tensors() == infos
    assert all(torch.equal(found.get(k), v) for k, v in state.items())
    torch.save(seeded(Net, 1).state_dict(), tmp_path / "plain.pt")
    build([path, tmp_path / "plain.pt"], tmp_path / "e.wide", model=Net, inputs=["x=float32[B,2,8]"], **QUICK)
    with pytest.raises(
        UsageError, match=r"no model: .*m0.pt2 contains its own code, .*plain.pt does not\), so name"
    ):
        build([path, tmp_path / "plain.pt"], tmp_path / "f.wide", **QUICK)
    with pytest.raises(
        UsageError, match="dtype: the members are torch.export programs, which fix their dtypes"
    ):
        build([path], tmp_path / "f.wide", dtype="float64", **QUICK)
    with pytest.raises(
        UsageError,
        match="a sample is given, but the members are torch.export programs, which contain example inputs",
    ):
        build([path], tmp_path / "f.wide", sample=(torch.zeros(2, 2, 8),), **QUICK)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["guard_size", "bert", "ragged_heads", "encoder"])
def test_networks(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    paths, members = [], [case.member(i) for i in range(2)]
    for i, member in enumerate(members):
        args, kwargs = case.sample(4, 5)
        dims: Any = tuple({0: DYNAMIC} for _ in args) or {k: {0: DYNAMIC, 1: DYNAMIC} for k in kwargs}
        paths.append(save(tmp_path / f"{i}.pt2", copy.deepcopy(member), *args, dims=dims, **kwargs))
    build(paths, tmp_path / "e.wide", **QUICK)
    ens = load(tmp_path / "e.wide")
    args, kwargs = case.sample(3, 8)
    found = ens(*args, **kwargs)
    for i, member in enumerate(members):
        with torch.no_grad():
            alone = member(*args, **kwargs)
        if isinstance(found, Output):
            torch.testing.assert_close(found["logits"][i], alone["logits"], rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(found[i], alone, rtol=1e-4, atol=1e-5)
    if name == "guard_size":
        with pytest.raises(InputError, match="100"):
            ens(*case.sample(101, 3)[0])
    if name == "bert":
        ids = torch.zeros(2, 65, dtype=torch.long)
        with pytest.raises(InputError, match="D1 <= 64"):
            ens(input_ids=ids, attention_mask=ids + 1)
        # two dims of the export have the name B
        with pytest.raises(InputError, match="equal letters are equal sizes"):
            ens(input_ids=ids[:, :6], attention_mask=ids[:1, :6] + 1)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strict", [False, True])
def test_conditions_of_a_strict_export(strict: bool, tmp_path: Path) -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor, flag: int, y: Tensor) -> Tensor:  # [B, T], [T]
            return x * flag + y if y.shape[0] % 2 == 0 else x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, dims = (torch.randn(4, 6), 3, torch.randn(6)), ({0: DYNAMIC, 1: DYNAMIC}, None, {0: DYNAMIC})
        program = torch.export.export(Halved(), args, dynamic_shapes=dims, strict=strict)
    build([written(tmp_path / "a.pt2", program)], tmp_path / "e.wide", **QUICK)
    ens, x, y = load(tmp_path / "e.wide"), torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(ens(x, 3, y)[0], x * 3 + y)
    with pytest.raises(InputError, match="% 2"):
        ens(torch.randn(2, 7), 3, torch.randn(7))
    with pytest.raises(InputError, match="built with 3 there"):
        ens(x, 4, y)


def test_weights_of_a_program_are_mapped_not_read(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    path = save(tmp_path / "a.pt2", nn.Linear(1 << 12, 1 << 12), torch.zeros(2, 1 << 12))

    def anonymous_kib() -> int:
        return int(status.read_text().split("RssAnon:")[1].split()[0])

    before = anonymous_kib()
    found = open_checkpoint(path)
    assert found.get("weight").shape == (1 << 12, 1 << 12)
    assert float(found.mapped_state_dict()["weight"][-1, -1].abs()) < 1
    assert anonymous_kib() - before < 16 << 10  # of 64 MiB
    assert float(found.get("weight")[-1, -1].abs()) < 1  # a copy, which is released
    assert anonymous_kib() - before < 16 << 10  # of 64 MiB


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3)

    def forward(self, ids: Tensor, more: dict[str, list[Tensor]]) -> Tensor:  # [B, T]
        return (self.table(ids).sum(1) * more["by"][0]).squeeze()  # type: ignore[no-any-return]


def ids(path: Path, sample: bool = True, rank: int = 1) -> str:
    b, t = Dim("b", max=64), Dim("t")
    args = (torch.randint(0, 20, (4, 6)), {"by": [torch.randn(rank)]})
    program = exported(seeded(Ids, 0), *args, dims=({0: b, 1: 2 * t}, {"by": [None]}))
    if not sample:
        program.example_inputs = None
    return written(path, program)


def test_specs_name_the_dims_of_a_program(tmp_path: Path) -> None:
    path = ids(tmp_path / "a.pt2")
    report = build([path], tmp_path / "e.wide", **QUICK)
    entry = Reader(tmp_path / "e.wide").manifest.entries["forward"]
    assert [(i.name, i.type, i.low) for i in entry.inputs] == [
        ("ids", "int64[B,2*D1]", None),
        ("more.by.0", "float32[1]", None),
    ]
    dims = entry.dims
    assert (dims["B"].min, dims["B"].max, dims["B"].example, dims["D1"].example) == (1, 64, 4, 3)
    assert entry.outputs[0].type == "float32[B,3]", report
    specs = ["ids=int64[N,2*L]:0..19", "N=1..16"]
    with pytest.raises(UsageError, match=r"takes ids, more.by.0; the inputs describe ids"):
        build([path], tmp_path / "f.wide", inputs=specs, **QUICK)
    with pytest.raises(UsageError, match=r"not the name of a parameter"):
        build([path], tmp_path / "f.wide", inputs=[*specs, "more.by.0=float32[1]"], **QUICK)


@pytest.mark.extended
def test_specs_that_are_not_those_of_the_program(tmp_path: Path) -> None:
    path = nets(tmp_path, 1)[0]
    build([path], tmp_path / "e.wide", inputs=["x=float32[N,2,8]", "N=2..9"], **QUICK)
    dim = Reader(tmp_path / "e.wide").manifest.entries["forward"].dims
    assert {d: (v.min, v.max, v.example) for d, v in dim.items()} == {"N": (2, 9, 4)}
    with pytest.raises(InputError, match="N = 10"):
        load(tmp_path / "e.wide")(torch.zeros(10, 2, 8))
    for spec, words in (
        (
            "x=float64[N,2,8]",
            r"input x is float32\[a dynamic dim,2,8\] in the program of .*m0.pt2, "
            r"and x=float64\[N,2,8\] in the spec",
        ),
        ("x=float32[N,2,T]", "which says T at axis 2; an export decides which dims are dynamic"),
        ("x=float32[4,2,8]", "which says 4 at axis 0"),
        ("x=float32[3*N,2,8]", r"axis 0 is 3\*N in the spec, but 4 in the program's own example"),
    ):
        with pytest.raises(CaptureError, match=words):
            build([path], tmp_path / "f.wide", inputs=[spec], **QUICK)


def test_a_program_without_example_inputs(tmp_path: Path) -> None:
    words = refused(ids(tmp_path / "a.pt2", sample=False), UsageError)
    assert (
        "saved without example inputs, so widepack does not know which integers ids takes; describe its "
        "inputs, for example --input 'ids=int64[B,2*D1]:0..9'" in words
    )


class Scaled(nn.Module):
    """A module with a number that is not a weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.factor
        return y.relu() if self.factor < 9 else y  # type: ignore[no-any-return]


@pytest.mark.extended
def test_members_of_other_programs(tmp_path: Path) -> None:
    def times(i: int, factor: float, size: int = 4, dtype: torch.dtype = torch.float32) -> str:
        module = seeded(lambda: Scaled(factor), i).to(dtype)
        axis, x = DYNAMIC if size == 4 else None, torch.randn(size, 3, dtype=dtype)
        return save(tmp_path / f"{i}.pt2", module, x, dims={"x": {0: axis}})

    first = times(0, 2.0)
    build([first, times(1, 2.0)], tmp_path / "e.wide", **QUICK)
    with pytest.raises(MemberMismatch) as caught:
        build([first, times(1, 3.0)], tmp_path / "f.wide", **QUICK)
    assert str(caught.value).startswith(f"{tmp_path}/1.pt2 differs from {first}, from test_pt2_programs.py:")
    assert "3.0" in str(caught.value)
    assert "members differ in weights only" in str(caught.value)
    with pytest.raises(MemberMismatch, match=r"other results; members are of one architecture|differs from"):
        build([first, times(1, 9.0)], tmp_path / "f.wide", **QUICK)
    with pytest.raises(MemberMismatch, match=r"it takes x=float32\[5,3\], the other takes x=float32\[B,3\]"):
        build([first, times(1, 2.0, size=5)], tmp_path / "f.wide", **QUICK)
    with pytest.raises(
        MemberMismatch, match=r"other dtypes: float32 in the model, checkpoint 0 .*; float64 in checkpoint 1"
    ):
        build([first, times(1, 2.0, dtype=torch.float64)], tmp_path / "f.wide", **QUICK)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        y[:, 0] = 0
        return y.relu_()


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))  # type: ignore[no-any-return]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x + self.calls  # type: ignore[operator]


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, x.shape[0]


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize(
    ("module", "functional", "words"),
    [
        (Writes, False, "writes into a value (aten."),
        (
            Writes,
            False,
            "save the functional program: torch.export.save(exported.run_decompositions({}), path)",
        ),
        (Block, False, "contains a nested region (higher_order."),
        (Branch, True, "contains a nested region (higher_order.cond"),
        (Counts, True, "is a program that changes calls when it runs; a member program has no side effects"),
        (Sizes, True, "has an output that is a number which depends on the inputs' sizes"),
    ],
)
def test_programs_that_cannot_be_members_are_refused(
    module: Callable[[], nn.Module], functional: bool, words: str, tmp_path: Path
) -> None:
    assert words in refused(
        save(tmp_path / "a.pt2", module(), torch.randn(4, 4), dims={"x": {0: DYNAMIC}}, functional=functional)
    )


@pytest.mark.parametrize(
    ("functional", "words"),
    [(True, "changes 1.running_mean when it runs"), (False, "writes into a value (aten.add_.Tensor")],
)
def test_a_program_of_train_mode_is_refused(functional: bool, words: str, tmp_path: Path) -> None:
    train = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)).train()
    assert words in refused(save(tmp_path / "a.pt2", train, torch.randn(4, 2, 8), functional=functional))


class Residual(nn.Module):
    """Writes in place into values that no other op reads, as many ResNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        z = self.conv(y)
        z += x
        return self.act(z)  # type: ignore[no-any-return]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_writing_into_a_value_that_nothing_else_reads(tmp_path: Path) -> None:
    members = [seeded(Residual, i) for i in range(2)]
    paths = [
        save(tmp_path / f"{i}.pt2", m, torch.randn(4, 3, 5), dims={"x": {0: DYNAMIC}}, functional=False)
        for i, m in enumerate(members)
    ]
    build(paths, tmp_path / "e.wide", **QUICK)
    x = torch.randn(3, 3, 5)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "e.wide")(x), torch.stack([m(x.clone()) for m in members]))


def _dropped(x: Tensor) -> Tensor:
    y = x * 3
    z = nn.functional.dropout(y, training=False)  # y itself
    z.mul_(2)
    return y + z


def _viewed(x: Tensor) -> Tensor:
    y = x * 3
    z = y[:, :1]
    y.add_(1)
    return z


def _viewing(x: Tensor) -> Tensor:
    return (x * 3).flatten().mul_(2)


def _given(x: Tensor) -> Tensor:
    return x.relu_()


def _promoted(x: Tensor) -> Tensor:
    y = x * 3
    return y.mul_(torch.ones(x.shape[-1], dtype=torch.float64))


@pytest.mark.parametrize("forward", [_dropped, _viewed, _viewing, _given, _promoted])
def test_writing_into_a_value_that_others_may_read(
    forward: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    words = refused(
        save(tmp_path / "a.pt2", Whole(), torch.randn(4, 3), dims={"x": {0: DYNAMIC}}, functional=False)
    )
    assert "save the functional program: torch.export.save(exported.run_decompositions({}), path)" in words
    assert "writes into a value" in words or (
        forward is _promoted and "is float64 of 2 dims here, and float32 of 2 in the file" in words
    )


@pytest.mark.extended
def test_programs_that_are_left_out(tmp_path: Path) -> None:
    def small_one(i: int) -> str:
        return save(tmp_path / f"{i}.pt2", seeded(Small, i), torch.randn(4, 3), dims={"x": {0: DYNAMIC}})

    writes = save(tmp_path / "w.pt2", Writes(), torch.randn(4, 4), dims={"x": {0: DYNAMIC}}, functional=False)
    paths = [writes, small_one(0), small_one(1), nets(tmp_path, 1)[0]]
    with pytest.raises(CheckpointError) as caught:
        build(paths, tmp_path / "e.wide", **QUICK)
    assert str(caught.value).split("\n")[0] == "2 of 4 checkpoints cannot be used:"
    assert [line.partition(")")[0] for line in str(caught.value).split("\n")[1:]] == [
        f"- checkpoint {i} ({paths[i]}" for i in (0, 3)
    ]
    report = build(paths[:3], tmp_path / "e.wide", skip_bad=True, **QUICK)
    assert (report.members, [b["number"] for b in report.left_out]) == (("0", "1"), [0])
    assert "writes into a value" in report.left_out[0]["why"]
    with pytest.raises(CheckpointError, match="writes into a value"):
        build(paths[:1], tmp_path / "f.wide", skip_bad=True, **QUICK)


@pytest.mark.extended
def test_programs_with_another_number_are_left_out(tmp_path: Path) -> None:
    def scaled(i: int, factor: float) -> str:
        module = seeded(lambda: Scaled(factor), i)
        return save(tmp_path / f"{i}.pt2", module, torch.randn(4, 3), dims={"x": {0: DYNAMIC}})

    paths = [scaled(0, 2.0), scaled(1, 3.0), scaled(2, 2.0), scaled(3, 9.0)]
    with pytest.raises(MemberMismatch) as caught:
        build(paths, tmp_path / "e.wide", **QUICK)
    lines = str(caught.value).split("\n")
    assert lines[0] == "2 of 4 programs differ from the first:"
    assert [line.partition(" differs from ")[0] for line in lines[1:]] == [f"- {paths[i]}" for i in (1, 3)]
    report = build(paths, tmp_path / "e.wide", skip_bad=True, **QUICK)
    assert (report.members, [b["number"] for b in report.left_out]) == (("0", "2"), [1, 3])
    assert "3.0" in report.left_out[0]["why"]
    assert "members differ in weights only" in report.left_out[0]["why"]
    how: Any = {"inputs": ["x=float32[N,3]"], "skip_bad": True, "force": True, **QUICK}
    assert build(paths, tmp_path / "e.wide", **how).members == ("0", "2")
    (tmp_path / "4.pt2").write_bytes(b"PK\x03\x04 no archive")
    # one error names files that cannot be read and files that differ
    with pytest.raises(CheckpointError) as both:
        build([*paths, tmp_path / "4.pt2"], tmp_path / "f.wide", **QUICK)
    assert [line.partition(")")[0] for line in str(both.value).split("\n")[1:]] == [
        f"- checkpoint {i} ({p}" for i, p in ((1, paths[1]), (3, paths[3]), (4, tmp_path / "4.pt2"))
    ]


class Cross(nn.Module):
    """Fails if the batch is not larger than every index. An export does not report this."""

    def forward(self, a: Tensor, ids: Tensor) -> Tensor:  # [B], [3]
        return torch.arange(a.shape[0])[ids] + a.sum()


def test_a_program_that_fails_at_some_sizes_is_compared_at_the_others(tmp_path: Path) -> None:
    ids = torch.tensor([0, 3, 3])
    path = save(tmp_path / "a.pt2", Cross(), torch.randn(4), ids, dims={"a": {0: DYNAMIC}, "ids": None})
    build([path], tmp_path / "e.wide", **QUICK)
    ens = load(tmp_path / "e.wide")
    a = torch.randn(6)
    torch.testing.assert_close(ens(a, ids)[0], Cross()(a, ids))
    with pytest.raises(InputError, match="inputs a, ids.*out of"):
        ens(torch.randn(2), ids)
