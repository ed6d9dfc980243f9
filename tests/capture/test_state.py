"""State: buffers that change and values that come back, carried by the caller, against the members stepping alone; what is refused, and in which words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import widepack
from support import Bound, double, fresh, must
from widepack import build, load
from widepack.errors import ArtifactError, CaptureError, InputError, UsageError, VerificationError
from widepack.inference.model import WideModel
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.writer import Reader
from widepack_bench import bench
from widepack_cli.main import cli

MEMBERS = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Running(nn.Module):
    """A part that puts another tensor in the place of its buffer: what torch.export does not see below the root."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - before


class Cached(nn.Module):
    """A window of the last rows (written in place), a counter, a running mean in a submodule, a buffer that is not saved."""

    window: Tensor
    steps: Tensor
    last: Tensor
    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(8, 8)
            self.out = nn.Linear(8, 4)
            self.running = Running()
            self.register_buffer("window", torch.randn(3, 8) * 0.1 if seed else torch.zeros(3, 8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(8), persistent=False)
            self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # [B, 8]
        z = torch.tanh(self.fc(self.running(x * self.scale)))
        row = z.mean(0)
        self.window.copy_(torch.cat([self.window[1:], row[None]]))
        y = self.out(z + self.window.mean(0) + 0.1 * self.last)
        self.steps += 1
        self.last = row
        return {"y": y / (1 + self.steps), "row": self.last, "window": self.window}


CARRIED = ("running.mean", "window", "steps", "last")


def save(folder: Path, make: Callable[[int], nn.Module]) -> list[str]:
    paths = [str(folder / f"m{i}.pt") for i in range(MEMBERS)]
    for i, path in enumerate(paths):
        torch.save(make(i).state_dict(), path)
    return paths


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    build(save(folder, Cached), folder / "e.wide", model=Cached, inputs=["x=float32[B,8]"], state=CARRIED)
    return folder / "e.wide"


@pytest.fixture(scope="module")
def ens(artifact: Path) -> WideModel:
    return load(artifact)


def rows(step: int, member: int | None = None, batch: int = 4) -> Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(100 * step + (member or 0) + 1))


def stepped(
    make: Callable[[int], nn.Module], each: bool, steps: int, call: Callable[[nn.Module, Tensor], Any], raised: bool = False
) -> list[list[Any]]:
    """[step][member] -> what each member gives, stepping alone."""
    members = [make(i).eval() for i in range(MEMBERS)]
    members = [m.double() for m in members] if raised else members
    with torch.no_grad():
        found = []
        for t in range(steps):
            given = [rows(t, i if each else None) for i in range(MEMBERS)]
            given = double(given) if raised else given
            found.append([copy.deepcopy(call(m, x)) for m, x in zip(members, given)])
    return found


@pytest.mark.parametrize("strategy", [None, "wide", "loop"])
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_every_step_is_the_members_own(pattern: str, strategy: str | None, artifact: Path) -> None:
    ens = load(artifact, strategies=strategy)
    each = pattern == "each"

    def call(member: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y = member(x)
        return {**y, **{n: b for n, b in member.named_buffers() if n in CARRIED}}

    own, truth = (stepped(Cached, each, 5, call, raised) for raised in (False, True))
    bounds = {k: Bound() for k in own[0][0] if k != "steps"}
    state = ens.state()
    for t in range(5):
        y, state = ens.each(torch.stack([rows(t, i) for i in range(MEMBERS)]), state=state) if each else ens(rows(t), state=state)
        assert set(state) == set(CARRIED)
        wide = {**y, **state}
        for i in range(MEMBERS):
            assert int(state["steps"][i]) == t + 1
            for k, bound in bounds.items():
                bound.add(wide[k][i], own[t][i][k], truth[t][i][k])
    for name, bound in bounds.items():
        if sum(o.numel() for o in bound.own) >= 64:
            bound.check()
        else:
            raise AssertionError(f"{name} has too few numbers to say anything")


def test_states_begin_as_the_checkpoints_have_them(ens: WideModel) -> None:
    state = ens.state()
    for i in range(MEMBERS):
        member = Cached(i)
        for name in CARRIED:
            assert torch.equal(state[name][i], member.get_buffer(name))
            assert name == "last" or torch.equal(ens.state_dict(i)[name], member.get_buffer(name))
    assert state["window"].shape == (MEMBERS, 3, 8)
    state["window"].zero_()
    assert not torch.equal(ens.state()["window"], state["window"]), "a fresh state is the caller's own"


def test_the_model_keeps_nothing(ens: WideModel) -> None:
    state = ens.state()
    first, one = ens(rows(0), state=state)
    second, _ = ens(rows(0), state=state)
    assert torch.equal(first["y"], second["y"])
    assert torch.equal(state["window"], ens.state()["window"]), "what was given is not written to"
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


def test_threads_carry_their_own(ens: WideModel) -> None:
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


def test_ensemble_figures_step_too(ens: WideModel) -> None:
    y, state = ens(rows(0), state=ens.state())
    mean, after = ens.mean(rows(0), state=ens.state(), of=None)
    assert torch.equal(mean, y["y"].mean(0))
    assert torch.equal(after["window"], state["window"])


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


def test_the_record_holds_a_second_step(artifact: Path) -> None:
    manifest = Reader(artifact).manifest
    assert {"shared B=2, step 2", "each B=2, step 2"} <= set(manifest.verification["calls"])
    assert manifest.version == (1, 1)
    assert set(manifest.state) == set(CARRIED)
    entry = manifest.entries["forward"]
    assert [p.name for p in entry.signature] == ["x"]
    assert set(entry.states) == set(CARRIED)
    assert {entry.inputs[s.input].name: s.initial for s in entry.state} == {n: n for n in CARRIED}


# Inputs as state


class Cell(nn.Module):
    """A recurrent cell: (x, h) -> (y, h_new)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.cell = nn.GRUCell(8, 8)
            self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, h: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.out(h) * gain, h


class Nested(Cell):
    """A dict of states in and out, of equal names."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        h = self.cell(x, state["h"])
        count = state["n"] + 1
        return {"y": self.out(h) + count[:, None], "state": {"h": h, "n": count}}


class InPlace(Cell):
    """A cache of keys and values that is written in place at a position."""

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], at: Tensor) -> Tensor:  # type: ignore[override]
        key, value = kv
        key.copy_(torch.where(at[None, :, None] > 0, x[:, None], key))
        value.mul_(0.5).add_(self.out(x)[:, None, :].repeat(1, 1, 2))
        return torch.einsum("bd,btd->bt", self.cell(x), key) + value.sum(-1)


@pytest.mark.parametrize("pattern", ["shared", "each"])
@pytest.mark.parametrize(("make", "state", "specs"), [(Cell, ["h=1"], ["x=float32[B,8]", "h=float32[B,8]"])])
def test_a_recurrent_state(pattern: str, make: Callable[[int], nn.Module], state: list[str], specs: list[str], tmp_path: Path) -> None:
    build(save(tmp_path, make), tmp_path / "e.wide", model=make, inputs=specs, state=state, **QUICK)
    ens = load(tmp_path / "e.wide")
    carried = ens.state(B=5)
    assert torch.equal(carried["h"], torch.zeros(MEMBERS, 5, 8))
    members = [make(i).eval() for i in range(MEMBERS)]
    hidden = [torch.zeros(5, 8) for _ in members]
    for t in range(4):
        given = [rows(t, i if pattern == "each" else None, 5) for i in range(MEMBERS)]
        y, carried = ens.each(given, state=carried) if pattern == "each" else ens(given[0], state=carried)
        with torch.no_grad():
            for i, member in enumerate(members):
                own, hidden[i] = member(given[i], hidden[i])
                torch.testing.assert_close(y[i], own, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(carried["h"][i], hidden[i], rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=r"state h is float32\[B,8\], and its size depends on B: give it, for example state\(B="):
        ens.state()
    with pytest.raises(UsageError, match="no state has the dim T; the dims of states are B"):
        ens.state(T=3)
    with pytest.raises(InputError, match="state h has B = 3 at axis 0, but input x has B = 5"):
        ens(rows(0, batch=5), state=ens.state(B=3))
    with pytest.raises(InputError, match="no input 'h'"):
        ens(rows(0), h=hidden[0], state=carried)


def test_a_dict_of_states_by_name(tmp_path: Path) -> None:
    x, h, n = rows(0), rows(1), torch.arange(4.0)
    build(save(tmp_path, Nested), tmp_path / "e.wide", model=Nested, sample=(x, {"h": h, "n": n}), state=["state"], **QUICK)
    ens = load(tmp_path / "e.wide")
    state = {k: v.expand(MEMBERS, *v.shape).clone() for k, v in {"state.h": h, "state.n": n}.items()}
    members = [Nested(i).eval() for i in range(MEMBERS)]
    own = [{"h": h, "n": n} for _ in members]
    for t in range(3):
        y, state = ens(rows(t), state=state)
        assert set(y) == {"y"}
        with torch.no_grad():
            for i, member in enumerate(members):
                want = member(rows(t), own[i])
                own[i] = want["state"]
                torch.testing.assert_close(y["y"][i], want["y"], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(state["state.h"][i], own[i]["h"], rtol=1e-5, atol=1e-6)
    mixed, _ = ens(widepack.each(rows(0).expand(MEMBERS, 4, 8)), state=state)
    assert torch.equal(mixed["y"], ens.each(rows(0).expand(MEMBERS, 4, 8), state=state)[0]["y"])


def test_a_cache_written_in_place(tmp_path: Path) -> None:
    key, value, at = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.tensor([0, 1, 0, 0, 1])
    value = value[..., :8]
    paths = save(tmp_path, InPlace)
    call = (rows(0), (key, value), at)
    dynamic = {"x": {0: "B"}, "kv": [{0: "B"}, {0: "B"}]}
    with pytest.raises(CaptureError, match=r"changes kv\.0, kv\.1 when forward runs in eval mode.*--state kv\.0 --state kv\.1"):
        build(paths, tmp_path / "e.wide", model=InPlace, sample=call, dynamic=dynamic)
    build(paths, tmp_path / "e.wide", model=InPlace, sample=call, dynamic=dynamic, state=["kv"], **QUICK)
    ens = load(tmp_path / "e.wide")
    assert set(ens.manifest.state) == {"kv.0", "kv.1"}
    state = ens.state(B=4)
    members = [InPlace(i).eval() for i in range(MEMBERS)]
    own = [(torch.zeros(4, 5, 8), torch.zeros(4, 5, 8)) for _ in members]
    for t in range(3):
        turn = torch.tensor([t % 2, 1, 0, t == 1, 0]).long()
        y, state = ens(rows(t), at=turn, state=state)
        with torch.no_grad():
            for i, member in enumerate(members):
                torch.testing.assert_close(y[i], member(rows(t), own[i], turn), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(state["kv.0"][i], own[i][0])
                torch.testing.assert_close(state["kv.1"][i], own[i][1], rtol=1e-5, atol=1e-5)


def test_what_does_not_change_goes_with_what_does(tmp_path: Path) -> None:
    build(save(tmp_path, Pair), tmp_path / "e.wide", model=Pair, sample=PAIR, state=["kv"], **QUICK)
    ens = load(tmp_path / "e.wide")
    factor = torch.rand(MEMBERS, 4, 8)
    state = {"kv.0": torch.zeros(MEMBERS, 4, 8), "kv.1": factor}
    own = [(torch.zeros(4, 8), f) for f in factor]
    for t in range(2):
        y, state = ens(rows(t), state=state)
        for i in range(MEMBERS):
            with torch.no_grad():
                torch.testing.assert_close(y[i], Pair(i).eval()(rows(t), own[i]), rtol=1e-5, atol=1e-6)
        assert torch.equal(state["kv.1"], factor)


# Several entries over one state


class Decoder(nn.Module):
    """`fill` writes the memory, `ask` reads it, `plain` does not know of it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.key = nn.Linear(8, 8)
            self.register_buffer("memory", torch.zeros(5, 8))

    def fill(self, x: Tensor) -> None:
        self.memory.copy_(self.memory * 0.5 + self.key(x).sum(0))

    def ask(self, x: Tensor) -> Tensor:
        return self.key(x) @ self.memory.T

    def plain(self, x: Tensor) -> Tensor:
        return self.key(x)


def test_entries_share_a_state(tmp_path: Path) -> None:
    build(save(tmp_path, Decoder), tmp_path / "e.wide", model=Decoder, inputs=["x=float32[B,8]"], entries=["fill", "ask", "plain"], state=["memory"])
    ens = load(tmp_path / "e.wide")
    members = [Decoder(i).eval() for i in range(MEMBERS)]
    state = {**ens.state()}
    assert ens.plain.state() == {}
    for t in range(3):
        nothing, state = ens.fill(rows(t), state=state)
        answer, state = ens.ask(rows(t + 1), state=state)
        assert nothing is None
        for i, member in enumerate(members):
            with torch.no_grad():
                member.fill(rows(t))
                torch.testing.assert_close(answer[i], member.ask(rows(t + 1)), rtol=1e-5, atol=1e-5)
    assert ens.plain(rows(0)).shape == (MEMBERS, 4, 8)
    with pytest.raises(InputError, match="no input 'state'"):
        ens.plain(rows(0), state=state)


def test_a_state_of_another_entry_is_kept(tmp_path: Path) -> None:
    class Two(Decoder):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.register_buffer("count", torch.zeros(2))

        def tick(self, x: Tensor) -> Tensor:
            self.count += 1.0
            return self.key(x) + self.count[0]

    build(
        save(tmp_path, Two),
        tmp_path / "e.wide",
        model=Two,
        inputs=["x=float32[B,8]"],
        entries=["ask", "fill", "tick"],
        state=["memory", "count"],
        **QUICK,
    )
    ens = load(tmp_path / "e.wide")
    _, state = ens.tick(rows(0), state=ens.state())
    _, after = ens.fill(rows(0), state=state)
    assert torch.equal(after["count"], torch.ones(MEMBERS, 2))
    with pytest.raises(InputError, match="state lacks memory; the model carries memory"):
        ens.ask(rows(0), state={"count": state["count"]})


# What is refused


def refused(error: type[Exception], folder: Path, make: Callable[[int], nn.Module], **words: Any) -> str:
    paths = save(folder, make)
    with pytest.raises(error) as caught:
        build(paths, folder / "e.wide", model=make, **{"inputs": ["x=float32[B,8]"], **QUICK, **words})
    assert not (folder / "e.wide").exists()
    assert "\n\n" not in str(caught.value)
    return str(caught.value)


def test_a_changed_buffer_is_refused_by_name(tmp_path: Path) -> None:
    said = refused(CaptureError, tmp_path, Cached)
    assert "Cached changes last, running.mean, steps, window when forward runs in eval mode" in said
    assert "--state last --state running.mean --state steps --state window" in said
    said = refused(CaptureError, tmp_path, Cached, state=["window", "steps", "last"])
    assert "Cached changes running.mean when" in said
    assert "build with --state running.mean:" in said


class Grows(Cell):
    def forward(self, x: Tensor, h: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.out(x), torch.cat([h, h[:, :1]], 1)


class Casts(Cell):
    def forward(self, x: Tensor, h: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.out(h), self.cell(x, h).double()


class Named(Cell):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(x) + state[:, :4]


class Shrinks(nn.Module):
    seen: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((4, 8), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen[1:]
        return x + self.seen.sum(0)


class Attribute(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.h = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) + self.h
        self.h = y.mean(0)
        return y


class Trains(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.bias.add_(0.1)
        return self.fc(x)


class TwoNames(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.view = self.get_buffer("seen")

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(x.sum(0))
        return x + self.view


class Pair(Cell):
    """Of its two states one never changes."""

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        kv[0].add_(self.cell(x))
        return self.out(kv[0] * kv[1])


PAIR = (torch.ones(4, 8), (torch.ones(4, 8), torch.full((4, 8), 2.0)))
TWO = ["x=float32[B,8]", "h=float32[B,8]"]


@pytest.mark.parametrize(
    ("make", "words", "error", "said"),
    [
        (Cached, {"state": ["windwo", *CARRIED]}, UsageError, ["state windwo", "no buffer", "did you mean window?", "inputs: x"]),
        (Cached, {"state": ["scale", *CARRIED]}, UsageError, ["state scale", "leaves this buffer as it is", "leave --state scale out"]),
        (Cached, {"state": ["fc.weight", *CARRIED]}, CaptureError, ["fc.weight is a parameter of Cached"]),
        (Cached, {"state": ["window=y", *CARRIED[2:]]}, CaptureError, ["window is a buffer", "write --state window"]),
        (Cached, {"state": ["window", "window"]}, UsageError, ["window is given twice"]),
        (Cached, {"state": ["a b"]}, UsageError, ["'a b'", "--state cache", "--state h=h_new"]),
        (Cached, {"state": ["decode:window"]}, UsageError, ["no entry is called 'decode'", "forward"]),
        (Shrinks, {"state": ["seen"]}, CaptureError, ["state seen is float32[4,8]", "makes it float32[3,8]", "keeps its dtype and shape"]),
        (
            Cell,
            {"inputs": TWO, "state": ["h"]},
            CaptureError,
            ["no output called h", "does not change this input in place", "outputs are 0, 1", "--state h=0"],
        ),
        (Attribute, {}, VerificationError, ["forward leaves another tensor in h, a plain attribute", "register_buffer", "--state h"]),
        (Attribute, {"state": ["h"]}, UsageError, ["state h is a plain attribute of Attribute", 'self.register_buffer("h", ...)']),
        (Trains, {}, CaptureError, ["Trains changes its parameters fc.bias at every call of forward in eval mode"]),
        (TwoNames, {"state": ["seen"]}, CaptureError, ["state seen of TwoNames lies in the memory of view too"]),
        (Pair, {"inputs": None, "sample": PAIR, "state": ["kv.0"]}, CaptureError, ["state kv.0 is a part of the input kv", "--state kv"]),
        (Cell, {"inputs": TWO, "state": ["h=2"]}, CaptureError, ["no output called 2", "outputs are 0, 1"]),
        (Cell, {"inputs": TWO, "state": ["h=0"]}, CaptureError, ["state h is float32[B,8] and comes out of Cell.forward as float32[B,4]"]),
        (Casts, {"inputs": TWO, "state": ["h=1"]}, CaptureError, ["state h is float32[B,8]", "as float64[B,8]"]),
        (
            Grows,
            {"inputs": ["x=float32[B,8]", "h=float32[B,T,8]"], "state": ["h=1"]},
            CaptureError,
            ["float32[B,T,8]", "float32[B,T+1,8]", "A value that grows"],
        ),
        (Cell, {"inputs": TWO, "state": ["x=1", "h=1"]}, CaptureError, ["states x, h come out of Cell.forward as one output"]),
    ],
)
def test_refusals(make: Callable[[int], nn.Module], words: dict[str, Any], error: type[Exception], said: list[str], tmp_path: Path) -> None:
    found = refused(error, tmp_path, make, **words)
    for word in said:
        assert word in found, found


def test_an_input_called_state(tmp_path: Path) -> None:
    class Both(Named):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
            self.count += 1.0
            return self.out(x) + state[:, :4] + self.count

    specs = ["x=float32[B,8]", "state=float32[B,8]"]
    assert "an input called state" in refused(CaptureError, tmp_path, Both, inputs=specs, state=["count"])
    build(save(tmp_path, Named), tmp_path / "e.wide", model=Named, inputs=specs, **QUICK)
    assert load(tmp_path / "e.wide")(rows(0), state=rows(1)).shape == (MEMBERS, 4, 4), "without states it is an input like any other"


class Counts(Cached):
    """A Python number that changes with every call: right in the first step, wrong in the second."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        y = super().forward(x)
        return {**y, "y": y["y"] * (1.0 + 0.5 * ((self.calls - 1) % 3))}


def test_a_number_that_changes_is_caught(tmp_path: Path) -> None:
    assert "not give the members' own answers" in refused(VerificationError, tmp_path, Counts, state=CARRIED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: None, ["state is missing", "carries running.mean, window, steps, last", "state = ens.state()"]),
        (lambda s: s["window"], ["state is a Tensor", "ens(x, state=state)"]),
        (lambda s: {k: v for k, v in s.items() if k != "steps"}, ["state lacks steps"]),
        (lambda s: {**s, "windwo": s["window"]}, ["state has windwo, which the model does not carry", "window"]),
        (lambda s: {**s, "steps": 3}, ["state steps is an int", "int64[]", "one a member"]),
        (lambda s: {**s, "steps": s["steps"].float()}, ["state steps is float32, the model takes int64"]),
        (lambda s: {**s, "window": s["window"][:2]}, ["state window has shape [2, 3, 8]", "[3, 3,8]"]),
        (lambda s: {**s, "window": s["window"][..., :7]}, ["state window has 7 at axis 1"]),
    ],
)
def test_bad_states_are_refused(change: Callable[[dict[str, Tensor]], Any], words: list[str], ens: WideModel) -> None:
    with pytest.raises(InputError) as caught:
        ens(rows(0), state=change(ens.state()))
    for word in words:
        assert word in str(caught.value), caught.value


# The format


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
        (lambda d: d.update(version=[1, 0]), ["entries: forward", "unknown state"]),
        (lambda d: d["entries"]["forward"].pop("state"), ["each of the 5 input leaves once"]),
        (lambda d: state_of(d).update(input=9), ["names input 9"]),
        (lambda d: d["entries"]["forward"]["state"].append(dict(state_of(d))), ["stands twice"]),
        (lambda d: state_of(d).update(output=0), ["window is float32[3,8] and comes out as"]),
        (lambda d: state_of(d).update(initial="nothing"), ["begins as the weight 'nothing', which is not in the table"]),
        (lambda d: state_of(d).update(initial="scale"), ["begins as the weight 'scale', which is stacked float32[8]"]),
        (lambda d: state_of(d).update(more=1), ["unknown more"]),
        (lambda d: d["state"].pop(), ["state: the entries carry running.mean"]),
    ],
)
def test_manifests_that_do_not_hold_together(edit: Callable[[dict[str, Any]], object], words: list[str], artifact: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_bytes(edited(artifact, edit))
    for word in words:
        assert word in str(caught.value), caught.value


def test_the_manifest_reads_back(artifact: Path) -> None:
    manifest = Reader(artifact).manifest
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert Manifest.from_bytes(edited(artifact, lambda d: None)) == manifest


# The command line


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words])


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_state import Cached as make\n")
    paths = save(tmp_path, Cached)
    words = ["build", *paths, "-o", f"{tmp_path}/e.wide", "--model", f"{tmp_path}/net.py:make", "--input", "x=float32[B,8]", "--no-pt2"]
    done = run(*words)
    assert done.exit_code == 1
    assert "--state window" in done.output
    done = run(*words, *(w for name in CARRIED for w in ("--state", name)))
    assert done.exit_code == 0, done.output
    shown = run("inspect", tmp_path / "e.wide").output
    assert "state   window: float32[3,8], one a member; begins as the weight window" in shown
    assert "input   x: float32[B,8]" in shown
    assert "input   window" not in shown
    assert json.loads(run("inspect", tmp_path / "e.wide", "--json").output)["summary"]["state"]
    checked = run("verify", tmp_path / "e.wide", *paths, "--model", f"{tmp_path}/net.py:make")
    assert checked.exit_code == 0, checked.output
    assert "two steps" in checked.output
    (tmp_path / "other.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_state import Counts as make\n")
    other = run("verify", tmp_path / "e.wide", "--model", f"{tmp_path}/other.py:make")
    assert other.exit_code == 1
    assert "step 2: output 0" in other.output
    assert run("trace", tmp_path / "e.wide").exit_code == 0
    timed = run("bench", tmp_path / "e.wide", "--batch", "2", "--budget", "0.2", "--model", f"{tmp_path}/net.py:make")
    assert timed.exit_code == 2, timed.output
    assert "forward carries state (running.mean, window, steps, last)" in timed.output
    (tmp_path / "widepack.toml").write_text(f'model = "{tmp_path}/net.py:make"\ninput = "x=float32[B,8]"\nstate = {json.dumps(CARRIED)}\n')
    assert run("build", *paths, "--dry-run").exit_code == 0


@pytest.mark.parametrize("pattern", ["shared", "each"])
@pytest.mark.parametrize(("make", "specs", "state"), [(Cached, ["x=float32[B,8]"], CARRIED), (Cell, ["x=float32[B,8]", "h=float32[B,8]"], ["h=1"])])
def test_bench_begins_every_call_with_one_state(
    make: Callable[[int], nn.Module], specs: list[str], state: list[str], pattern: str, tmp_path: Path
) -> None:
    build(save(tmp_path, make), tmp_path / "e.wide", model=make, inputs=specs, state=state, **QUICK)
    report = bench(tmp_path / "e.wide", batches=(2, 3), baselines=("loop", "vmap"), pattern=pattern, budget_s=0.2, threads=1)
    assert [r.batch for r in report.rows] == [2, 3]
    assert all("loop" in [t.name for t in r.timings] for r in report.rows)


def test_an_artifact_without_state_stays_1_0(tmp_path: Path) -> None:
    build(save(tmp_path, Cell), tmp_path / "e.wide", model=Cell, inputs=TWO, **QUICK)
    data = json.loads((tmp_path / "e.wide/manifest.json").read_bytes())
    assert data["version"] == [1, 0]
    assert data["state"] == []
    assert "state" not in data["entries"]["forward"]
