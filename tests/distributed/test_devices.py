"""Tests models on several devices: `load(device=["cpu", "cpu"])` answers as the whole artifact on one."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from split_models import Cell, Heads, Scale
from support import Artifacts, double, leaves, run
from torch import nn

import cases
import widepack
from widepack import DeviceModel, InputError, UsageError
from widepack.distributed.part_calls import PreparedCall
from widepack.reduction.figures import FIGURES
from widepack.spec.member_parts import divided

TWO = ["cpu", "cpu"]
THREE = ["cpu"] * 3


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    specs = [f"{name}:x=float32[B,6]" for name in ("forward", "encode")]
    saved(Heads, folder, *specs, members=5, entries=["forward", "encode"])
    return folder / "e.wide"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cell")
    saved(Cell, folder, "x=float32[B,4]", "h=float32[B,3]", members=3, state=["h=1"])
    return folder / "e.wide"


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)


SLOW = pytest.mark.slow


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "name", ["mlp", "frozen_trunk", pytest.param("lstm", marks=SLOW), pytest.param("textcnn", marks=SLOW)]
)
def test_calls_answer_as_the_members_alone_and_as_one_device(name: str, artifacts: Artifacts) -> None:
    path, case = artifacts(name), cases.load(name)
    parts, whole = widepack.load(path, device=TWO), widepack.load(path)
    args, kwargs = case.sample(4, 3)
    answer = parts(*args, **kwargs)
    close(answer, whole(*args, **kwargs))
    for i in range(case.N):
        truth = run(case.member(i).double(), double(args), double(kwargs))
        for a, b in zip(leaves(answer), leaves(truth), strict=True):
            torch.testing.assert_close(a[i].double(), b, rtol=1e-4, atol=1e-4)


def test_the_same_plan_gives_the_same_bits(artifacts: Artifacts) -> None:
    for strategies in ("loop", "wide"):
        whole = widepack.load(artifacts("mlp"), strategies=strategies)
        parts = widepack.load(artifacts("mlp"), device=TWO, strategies=strategies)
        args, _ = cases.load("mlp").sample(6, 5)
        if strategies == "loop":
            assert torch.equal(parts(*args), whole(*args))
        else:
            torch.testing.assert_close(parts(*args), whole(*args))


@pytest.mark.extended
def test_answers_of_every_form(heads: Path) -> None:
    parts, whole = widepack.load(heads, device=THREE), widepack.load(heads)
    assert isinstance(parts, DeviceModel) and len(parts) == 5
    assert parts.members == whole.members and parts.entries == whole.entries
    assert parts.checkpoints == whole.checkpoints and parts.manifest == whole.manifest
    x, xs = torch.randn(4, 6), torch.randn(5, 4, 6)
    for found, wanted in [
        (parts(x), whole(x)),
        (parts(x=x), whole(x=x)),
        (parts(x.numpy()), whole(x)),
        (parts.each(xs), whole.each(xs)),
        (parts.each(list(xs)), whole.each(xs)),
        (parts(widepack.each(xs)), whole.each(xs)),
    ]:
        assert list(found) == list(wanted)
        close(found, wanted)
    close(parts.encode(x), whole.encode(x))
    close(parts.entry("encode").each(xs), whole.encode.each(xs))
    assert torch.equal(parts["m3"](x)["logits"], whole["m3"](x)["logits"])
    assert torch.equal(parts[-1](x)["logits"], whole[-1](x)["logits"])
    assert len(list(parts)) == 5
    for i in range(5):
        mine, theirs = parts.state_dict(i), whole.state_dict(i)
        assert list(mine) == list(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_a_subset_of_members_in_another_order(heads: Path) -> None:
    names = ["m4", "m0", "m2"]
    parts, whole = widepack.load(heads, device=TWO, members=names), widepack.load(heads, members=names)
    x = torch.randn(2, 6)
    assert parts.members == tuple(names)
    close(parts(x), whole(x))
    close(parts.route(x, member=["m2", "m4"]), whole.route(x, member=["m2", "m4"]))


@pytest.mark.slow
def test_heads_of_different_sizes_stay_lists(artifacts: Artifacts) -> None:
    parts, whole = (
        widepack.load(artifacts("ragged_heads"), device=TWO),
        widepack.load(artifacts("ragged_heads")),
    )
    args, _ = cases.load("ragged_heads").sample(4, 1)
    answer = parts(*args)
    assert isinstance(answer, list)
    close(answer, whole(*args))
    close(parts.route(*args, member=[2, 0, 1, 0]), whole.route(*args, member=[2, 0, 1, 0]))
    with pytest.raises(InputError, match="differ in shape"):
        parts.mean(*args)


def test_states_are_split_and_joined(cell: Path) -> None:
    parts, whole = widepack.load(cell, device=TWO), widepack.load(cell)
    x = torch.randn(2, 5, 4)
    mine, theirs = parts.state(B=5), whole.state(B=5)
    for step in x:
        y, mine = parts(step, state=mine)
        z, theirs = whole(step, state=theirs)
        close((y, mine), (z, theirs))
        mine["h"][0] *= 0.5  # may be written into
        theirs["h"][0] *= 0.5
    figures, state = parts.reduce(x[0], "mean", "std", state=mine)
    wanted, _ = whole.reduce(x[0], "mean", "std", state=theirs)
    close(figures, wanted)
    assert state["h"].shape == (3, 5, 3)
    with pytest.raises(InputError, match=r"start with state = ens.state\(B=5\)"):
        parts(x[0])
    with pytest.raises(InputError, match="one value for each member means a first axis of 3 members"):
        parts(x[0], state={"h": torch.zeros(2, 5, 3)})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"members": [4, 1, 2]},
    {"members": ["m3"]},
    {"weights": [0.1, 0.4, 0.0, 2, 1]},
    {"members": [0, 4], "weights": [1, 3]},
]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("of", [None, "softmax", "sigmoid"])
@pytest.mark.parametrize("strategies", [None, "loop"])
def test_every_figure_is_that_of_one_device(
    heads: Path, of: str | None, options: dict[str, Any], strategies: str | None
) -> None:
    parts = widepack.load(heads, device=THREE, strategies=strategies)
    whole = widepack.load(heads, strategies=strategies)
    names = [
        "quantile(0.3)" if n == "quantile" else n
        for n, f in FIGURES.items()
        if not (of is None and f.needs == "probabilities") and not ("weights" in options and not f.weighted)
    ]
    x = torch.randn(4, 6)
    for kept in (names, [n for n in names if FIGURES[n.partition("(")[0]].streamed]):
        found = parts.reduce(x, *kept, of=of, **options)
        wanted = whole.reduce(x, *kept, of=of, **options)
        assert list(found) == list(wanted) == kept
        for name in kept:
            torch.testing.assert_close(found[name], wanted[name], msg=name)
    close(parts.encode.reduce(x, "mean", "std", **options), whole.encode.reduce(x, "mean", "std", **options))


def test_short_forms_and_refusals_are_those_of_one_device(heads: Path) -> None:
    parts, whole = widepack.load(heads, device=TWO), widepack.load(heads)
    x = torch.randn(4, 6)
    close(parts.mean(x, of="softmax"), whole.mean(x, of="softmax"))
    close(parts.std(x), whole.std(x))
    assert torch.equal(parts.vote(x), whole.vote(x))
    calls: list[Any] = [
        lambda ens: ens(torch.randn(4, 7)),
        lambda ens: ens(x.double()),
        lambda ens: ens(),
        lambda ens: ens.each(torch.randn(2, 4, 6)),
        lambda ens: ens.reduce(x, "entropy"),
        lambda ens: ens.reduce(x, "mean", output="labels"),
        lambda ens: ens.reduce(x, "mean", weights=[1, 2]),
        lambda ens: ens.reduce(x, "mean", members=[9]),
        lambda ens: ens.route(x, member=[0, 1]),
        lambda ens: ens.route(x, member=[0, 1, 2, 9]),
        lambda ens: ens.route(widepack.each(torch.randn(5, 4, 6)), member=0),
        lambda ens: ens(x.clone().requires_grad_()),
        lambda ens: ens.member(7),
        lambda ens: ens.state(B=3),
        lambda ens: ens.entry("decode"),
    ]
    for call in calls:
        with pytest.raises(widepack.WidepackError) as mine:
            call(parts)
        with pytest.raises(widepack.WidepackError) as theirs:
            call(whole)
        assert type(mine.value) is type(theirs.value)
        assert str(mine.value) == str(theirs.value)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "frozen_trunk", "lstm", "guard_size"])
def test_rows_go_to_the_device_of_their_member(name: str, artifacts: Artifacts) -> None:
    parts, whole = widepack.load(artifacts(name), device=TWO), widepack.load(artifacts(name))
    case = cases.load(name)
    args, kwargs = case.sample(7, 4)
    for ids in ([0, 1, 0, case.N - 1, 1, case.N - 1, 0], [case.N - 1] * 7, [0] * 6 + [case.N - 1]):
        close(parts.route(*args, member=ids, **kwargs), whole.route(*args, member=ids, **kwargs))


def test_another_dtype(heads: Path) -> None:
    parts, whole = widepack.load(heads, device=TWO, dtype="bf16"), widepack.load(heads, dtype="bf16")
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    torch.testing.assert_close(parts(x)["logits"], whole(x)["logits"])
    assert parts.reduce(x, "mean", of="softmax")["mean"].dtype is torch.float32


@pytest.mark.extended
def test_copies_load_the_same_parts(heads: Path) -> None:
    parts = widepack.load(heads, device=TWO, members=[3, 1])
    x = torch.randn(2, 6)
    for again in (pickle.loads(pickle.dumps(parts)), copy.deepcopy(parts)):
        assert again.members == ("m3", "m1") and again.devices == parts.devices
        close(again(x), parts(x))
    parts.close()
    for call in (lambda: parts(x), lambda: parts.member(0), lambda: pickle.dumps(parts), parts.probe):
        with pytest.raises(UsageError, match="was closed"):
            call()


def test_words(heads: Path) -> None:
    parts = widepack.load(heads, device=TWO)
    members = "5 members: m0, m1, m2, m3, m4"
    devices = "cpu, eager + cpu, eager"
    assert repr(parts) == f"DeviceModel({members}; inputs x=float32[B,6]; entries encode; {devices})"
    entry = "DeviceEntry(encode of 5 members; inputs x=float32[B,6]; "
    assert repr(parts.encode).startswith(entry) and len(parts.encode) == 5
    assert parts.backend == "eager" and parts.plan.pattern == "shared" and parts.device.type == "cpu"
    parts.warmup(("shared", "each"))
    parts.probe()


def test_devices_that_cannot_be(heads: Path) -> None:
    with pytest.raises(UsageError, match="6 devices for 5 members; each takes at least one member"):
        widepack.load(heads, device=["cpu"] * 6)
    with pytest.raises(UsageError, match=r"device=\[\] names no device"):
        widepack.load(heads, device=[])
    with pytest.raises(UsageError, match="artifacts run on cpu and cuda"):
        widepack.load(heads, device=["cpu", "meta"])
    with pytest.raises(UsageError, match="is not a digest"):
        widepack.load(heads, device=TWO, expect="abc")


def test_members_are_divided_by_bytes() -> None:
    assert divided([1] * 6, 3, "devices") == [range(2), range(2, 4), range(4, 6)]
    assert divided([1] * 5, 2, "devices") in ([range(2), range(2, 5)], [range(3), range(3, 5)])
    assert divided([10, 1, 1, 1], 2, "devices") == [range(1), range(1, 4)]
    assert divided([1, 1, 1, 10], 3, "devices") == [range(2), range(2, 3), range(3, 4)]
    assert divided([0, 0, 0, 0], 2, "devices") == [range(2), range(2, 4)]
    for count in range(1, 8):
        parts = divided([3, 1, 4, 1, 5, 9, 2], count, "devices")
        assert [i for p in parts for i in p] == list(range(7)) and all(parts) and len(parts) == count


@pytest.fixture
def scale(tmp_path: Path) -> Path:
    saved(Scale, tmp_path, "x=float32[B,4]", members=4)
    for value in range(9):
        torch.save(Scale(float(value)).state_dict(), tmp_path / f"v{value}.pt")
    return tmp_path


def test_no_answer_mixes_members_before_and_after_swaps(scale: Path) -> None:
    """Member 0 becomes v, then member 3: at no time has member 3 a later value than member 0."""
    ens = widepack.load(scale / "e.wide", device=TWO)
    x = torch.ones(2, 4)
    for place in range(4):
        ens.swap(place, scale / "v0.pt")
    seen: set[tuple[int, int]] = set()
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            for y in (ens(x)[[0, 3], 0, 0], ens.route(x, member=[0, 3])[:, 0]):
                seen.add((int(y[0]), int(y[1])))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(1, 9):
        for member in (0, "m3"):
            report = ens.swap(member, scale / f"v{value}.pt")
            assert report.member in ("m0", "m3")
        assert [float(y[0, 0]) for y in ens(x)] == [value, 0, 0, value]
        assert ens.checkpoints[3].source == str(scale / f"v{value}.pt")
        assert torch.equal(ens.state_dict(3)["w"], torch.full((4,), float(value)))
    stop.set()
    for thread in threads:
        thread.join()
    assert seen <= {(v, v) for v in range(9)} | {(v + 1, v) for v in range(8)} and len(seen) > 1
    with pytest.raises(TypeError, match="m0, m1, m2, m3 was swapped in this process only"):
        pickle.dumps(ens)


def test_a_swap_waits_for_all_parts_of_a_call(scale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ens, x = widepack.load(scale / "e.wide", device=TWO), torch.ones(2, 4)
    before, run_part = ens(x), PreparedCall.run
    swaps: list[threading.Thread] = []

    def slow(self: PreparedCall) -> Any:
        if not swaps:  # the first part: a swap of a member of the second part begins now
            swaps.append(threading.Thread(target=ens.swap, args=(3, scale / "v7.pt")))
            swaps[0].start()
            swaps[0].join(0.5)
            assert swaps[0].is_alive()
        return run_part(self)

    monkeypatch.setattr(PreparedCall, "run", slow)
    assert torch.equal(ens(x), before)
    swaps[0].join()
    assert torch.equal(ens(x)[3], torch.full((2, 4), 7.0))


def test_an_op_that_refuses_is_explained(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Embedding(5, 3)

    saved(make, tmp_path, "input=int64[B]", members=4)
    ens = widepack.load(tmp_path / "e.wide", device=TWO)
    with pytest.raises(InputError, match="entry forward"):
        ens(torch.tensor([1, 9]))
    with pytest.raises(InputError, match="entry forward"):
        ens.route(torch.tensor([1, 9]), member=[0, 3])
    assert ens(torch.tensor([1, 4])).shape == (4, 2, 3)
