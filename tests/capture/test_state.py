"""Tests state: buffers and inputs that the caller carries. Compares each step with each member alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Bound, fresh, must
from torch import Tensor, nn

from capture.state_members import CARRIED, MEMBERS, Cached, rows, save, stepped
from widepack import build, load
from widepack.errors import ArtifactError, InputError
from widepack.inference.model import WideModel
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    build(save(folder, Cached), folder / "e.wide", model=Cached, inputs=["x=float32[B,8]"], state=CARRIED)
    return folder / "e.wide"


@pytest.fixture(scope="module")
def ens(artifact: Path) -> WideModel:
    return load(artifact)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", [None, "wide", "loop"])
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_every_step_is_that_of_each_member(pattern: str, strategy: str | None, artifact: Path) -> None:
    ens = load(artifact, strategies=strategy)
    each = pattern == "each"

    def call(member: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y = member(x)
        return {**y, **{n: b for n, b in member.named_buffers() if n in CARRIED}}

    alone, truth = (stepped(Cached, each, 5, call, raised) for raised in (False, True))
    bounds = {k: Bound() for k in alone[0][0] if k != "steps"}
    state = ens.state()
    for t in range(5):
        y, state = (
            ens.each(torch.stack([rows(t, i) for i in range(MEMBERS)]), state=state)
            if each
            else ens(rows(t), state=state)
        )
        assert set(state) == set(CARRIED)
        wide = {**y, **state}
        for i in range(MEMBERS):
            assert int(state["steps"][i]) == t + 1
            for k, bound in bounds.items():
                bound.add(wide[k][i], alone[t][i][k], truth[t][i][k])
    for name, bound in bounds.items():
        if sum(o.numel() for o in bound.alone) >= 64:
            bound.check()
        else:
            raise AssertionError(f"{name} has too few numbers to say anything")


def test_states_begin_with_the_values_of_the_checkpoints(ens: WideModel) -> None:
    state = ens.state()
    for i in range(MEMBERS):
        member = Cached(i)
        for name in CARRIED:
            assert torch.equal(state[name][i], member.get_buffer(name))
            assert name == "last" or torch.equal(ens.state_dict(i)[name], member.get_buffer(name))
    assert state["window"].shape == (MEMBERS, 3, 8)
    state["window"].zero_()
    assert not torch.equal(ens.state()["window"], state["window"]), "two fresh states share memory"


def test_the_model_does_not_store_state(ens: WideModel) -> None:
    state = ens.state()
    first, one = ens(rows(0), state=state)
    second, _ = ens(rows(0), state=state)
    assert torch.equal(first["y"], second["y"])
    assert torch.equal(state["window"], ens.state()["window"]), (
        "a call wrote into the state that it was given"
    )
    again, _ = ens(rows(1), state=one)
    assert not torch.equal(again["y"], first["y"])


def test_new_states_share_no_memory_with_answers_and_inputs(ens: WideModel) -> None:
    x = rows(0)
    y, state = ens(x, state=ens.state())
    kept = {k: v.clone() for k, v in state.items()}
    with torch.inference_mode():
        y["row"].fill_(7.0)
        y["window"].fill_(7.0)
        x.fill_(7.0)
    assert all(torch.equal(state[k], v) for k, v in kept.items())


def test_each_thread_carries_a_separate_state(ens: WideModel) -> None:
    def run(seed: int) -> Tensor:
        state = ens.state()
        for t in range(6):
            y, state = ens(rows(10 * seed + t), state=state)
        return y["y"]

    alone = [run(s) for s in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(alone, pool.map(run, range(4))):
            assert torch.equal(a, b)


def test_members_do_not_leak(ens: WideModel) -> None:
    state = ens.state()
    _, fine = ens(rows(0), state=state)
    state["window"][1] = float("nan")
    y, spoiled = ens(rows(0), state=state)
    for i in (0, 2):
        assert torch.equal(spoiled["window"][i], fine["window"][i])
        assert not y["y"][i].isnan().any()
    assert y["y"][1].isnan().all()


def test_a_member_alone_and_some_members(artifact: Path, ens: WideModel) -> None:
    some = load(artifact, members=[2, 0])
    state, theirs = ens.state(), some.state()
    one = ens.member(2)
    mine = one.state()
    assert mine["window"].shape == (3, 8)
    for t in range(3):
        y, state = ens(rows(t), state=state)
        z, theirs = some(rows(t), state=theirs)
        a, mine = one(rows(t), state=mine)
        torch.testing.assert_close(z["y"][0], y["y"][2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a["y"], y["y"][2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine["running.mean"], state["running.mean"][2], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="state is missing"):
        one(rows(0))
    some.probe()


def test_ensemble_statistics_use_state(ens: WideModel) -> None:
    y, state = ens(rows(0), state=ens.state())
    mean, after = ens.mean(rows(0), state=ens.state(), of=None)
    assert torch.equal(mean, y["y"].mean(0))
    assert torch.equal(after["window"], state["window"])


@pytest.mark.extended
def test_fresh_process(artifact: Path, ens: WideModel, tmp_path: Path) -> None:
    torch.save([rows(t) for t in range(3)], tmp_path / "in.pt")
    must(
        fresh(
            "import sys, torch, widepack\n"
            "ens = widepack.load(sys.argv[1])\n"
            "state = ens.state()\n"
            "for x in torch.load(sys.argv[2] + '/in.pt'):\n"
            "    y, state = ens(x, state=state)\n"
            "z, _ = ens.each(x.expand(3, *x.shape), state=state)\n"
            "assert not any(m.startswith('test_') for m in sys.modules)\n"
            "torch.save((y, z, state), sys.argv[2] + '/out.pt')",
            artifact,
            tmp_path,
        )
    )
    y, z, state = torch.load(tmp_path / "out.pt")
    mine = ens.state()
    for t in range(3):
        x, (want, mine) = rows(t), ens(rows(t), state=mine)
    assert torch.equal(y["y"], want["y"])
    assert all(torch.equal(state[k], mine[k]) for k in CARRIED)
    assert torch.equal(z["y"], ens.each(x.expand(MEMBERS, *x.shape), state=mine)[0]["y"])


def test_without_widepack(artifact: Path, ens: WideModel) -> None:
    from safetensors.torch import load_file

    manifest = Reader(artifact).manifest
    weights = load_file(artifact / next(n for n in manifest.files if n.startswith("weights-")))
    exported = torch.export.load(artifact / manifest.entries["forward"].pt2["shared"])
    exported.state_dict.update({name: weights[name] for name in exported.state_dict})
    model = exported.module()
    mine = ens.state()
    theirs = {name.replace(".", "_"): value for name, value in ens.state().items()}
    with torch.no_grad():
        for t in range(3):
            y, theirs = model(rows(t), **theirs)
            want, mine = ens(rows(t), state=mine)
            torch.testing.assert_close(y["y"], want["y"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs["running_mean"], mine["running.mean"], rtol=1e-5, atol=1e-6)


def test_the_record_contains_a_second_step(artifact: Path) -> None:
    manifest = Reader(artifact).manifest
    assert {"shared B=2, step 2", "each B=2, step 2"} <= set(manifest.verification["calls"])
    assert manifest.version == (1, 2)
    assert set(manifest.state) == set(CARRIED)
    entry = manifest.entries["forward"]
    assert [p.name for p in entry.signature] == ["x"]
    assert set(entry.states) == set(CARRIED)
    assert {entry.inputs[s.input].name: s.initial for s in entry.state} == {n: n for n in CARRIED}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: None,
            "state is missing ... carries running.mean, window, steps, last ... state = ens.state()",
        ),
        (lambda s: s["window"], "state is a Tensor ... ens(x, state=state)"),
        (lambda s: {k: v for k, v in s.items() if k != "steps"}, "state lacks steps"),
        (
            lambda s: {**s, "windwo": s["window"]},
            "state has windwo, which the model does not carry ... window",
        ),
        (lambda s: {**s, "steps": 3}, "state steps is an int ... int64[] ... one value for each member"),
        (lambda s: {**s, "steps": s["steps"].float()}, "state steps is float32, the model takes int64"),
        (lambda s: {**s, "window": s["window"][:2]}, "state window has shape [2, 3, 8] ... [3, 3,8]"),
        (lambda s: {**s, "window": s["window"][..., :7]}, "state window has 7 at axis 1"),
    ],
)
def test_bad_states_are_refused(
    change: Callable[[dict[str, Tensor]], Any], words: str, ens: WideModel
) -> None:
    with pytest.raises(InputError) as caught:
        ens(rows(0), state=change(ens.state()))
    for word in words.split(" ... "):
        assert word in str(caught.value), caught.value


def edited(artifact: Path, edit: Callable[[dict[str, Any]], object]) -> bytes:
    data = json.loads((artifact / "manifest.json").read_bytes())
    edit(data)
    data["digest"] = strict_json.digest({k: v for k, v in data.items() if k != "digest"})
    return json.dumps(data).encode()


def state_of(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in data["entries"]["forward"]["state"] if s["initial"] == "window")
    return found


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(version=[1, 0]), "entries: forward ... unknown rows, state"),
        (lambda d: d["entries"]["forward"].pop("state"), "each of the 5 input leaves once"),
        (lambda d: state_of(d).update(input=9), "names input 9"),
        (lambda d: d["entries"]["forward"]["state"].append(dict(state_of(d))), "occurs twice"),
        (lambda d: state_of(d).update(output=0), "window is float32[3,8] as input"),
        (lambda d: state_of(d).update(initial="nothing"), "its initial weight 'nothing' is not in the table"),
        (lambda d: state_of(d).update(initial="scale"), "its initial weight 'scale' is stacked float32[8]"),
        (lambda d: state_of(d).update(more=1), "unknown more"),
        (lambda d: d["state"].pop(), "state: the states of the entries are running.mean"),
    ],
)
def test_inconsistent_manifests_are_refused(
    edit: Callable[[dict[str, Any]], object], words: str, artifact: Path
) -> None:
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_bytes(edited(artifact, edit))
    for word in words.split(" ... "):
        assert word in str(caught.value), caught.value


def test_the_manifest_reads_back(artifact: Path) -> None:
    manifest = Reader(artifact).manifest
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert Manifest.from_bytes(edited(artifact, lambda d: None)) == manifest
