"""Tests inputs as state, and entries that share a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from capture.state_members import MEMBERS, PAIR, QUICK, TWO, Cell, Pair, rows, save
from widepack import WideModel, build, load
from widepack.errors import CaptureError, InputError, UsageError


class Nested(Cell):
    """Takes and returns a dict of states with equal names."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        h = self.cell(x, state["h"])
        count = state["n"] + 1
        return {"y": self.out(h) + count[:, None], "state": {"h": h, "n": count}}


class InPlace(Cell):
    """A module with a cache of keys and values, which it writes in place at a position."""

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], at: Tensor) -> Tensor:  # type: ignore[override]
        key, value = kv
        key.copy_(torch.where(at[None, :, None] > 0, x[:, None], key))
        value.mul_(0.5).add_(self.out(x)[:, None, :].repeat(1, 1, 2))
        return torch.einsum("bd,btd->bt", self.cell(x), key) + value.sum(-1)


def loaded(folder: Path, make: Callable[[int], nn.Module], **how: Any) -> WideModel:
    build(save(folder, make), folder / "e.wide", model=make, **{**QUICK, **how})
    return load(folder / "e.wide")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_a_recurrent_state(pattern: str, tmp_path: Path) -> None:
    ens = loaded(tmp_path, Cell, inputs=TWO, state=["h=1"])
    carried = ens.state(B=5)
    assert torch.equal(carried["h"], torch.zeros(MEMBERS, 5, 8))
    members = [Cell(i).eval() for i in range(MEMBERS)]
    hidden = [torch.zeros(5, 8) for _ in members]
    for t in range(4):
        given = [rows(t, i if pattern == "each" else None, 5) for i in range(MEMBERS)]
        y, carried = ens.each(given, state=carried) if pattern == "each" else ens(given[0], state=carried)
        with torch.no_grad():
            for i, member in enumerate(members):
                expected, hidden[i] = member(given[i], hidden[i])
                torch.testing.assert_close(y[i], expected, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(carried["h"][i], hidden[i], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UsageError,
        match=r"state h is float32\[B,8\], and its size depends on B: give it, for example state\(B=",
    ):
        ens.state()
    with pytest.raises(UsageError, match="no state has the dim T; the dims of states are B"):
        ens.state(T=3)
    with pytest.raises(InputError, match="state h has B = 3 at axis 0, but input x has B = 5"):
        ens(rows(0, batch=5), state=ens.state(B=3))
    with pytest.raises(InputError, match="h is a state, not an input"):
        ens(rows(0), h=hidden[0], state=carried)


def test_a_dict_of_states_by_name(tmp_path: Path) -> None:
    x, h, n = rows(0), rows(1), torch.arange(4.0)
    ens = loaded(tmp_path, Nested, sample=(x, {"h": h, "n": n}), state=["state"])
    state = {k: v.expand(MEMBERS, *v.shape).clone() for k, v in {"state.h": h, "state.n": n}.items()}
    members = [Nested(i).eval() for i in range(MEMBERS)]
    states = [{"h": h, "n": n} for _ in members]
    for t in range(3):
        y, state = ens(rows(t), state=state)
        assert set(y) == {"y"}
        with torch.no_grad():
            for i, member in enumerate(members):
                want = member(rows(t), states[i])
                states[i] = want["state"]
                torch.testing.assert_close(y["y"][i], want["y"], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(state["state.h"][i], states[i]["h"], rtol=1e-5, atol=1e-6)
    mixed, _ = ens(widepack.each(rows(0).expand(MEMBERS, 4, 8)), state=state)
    assert torch.equal(mixed["y"], ens.each(rows(0).expand(MEMBERS, 4, 8), state=state)[0]["y"])


@pytest.mark.extended
def test_a_cache_written_in_place(tmp_path: Path) -> None:
    key, value, at = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.tensor([0, 1, 0, 0, 1])
    value = value[..., :8]
    paths = save(tmp_path, InPlace)
    call = (rows(0), (key, value), at)
    dynamic = {"x": {0: "B"}, "kv": [{0: "B"}, {0: "B"}]}
    with pytest.raises(
        CaptureError,
        match=r"changes kv\.0, kv\.1 when forward runs in eval mode.*--state kv\.0 --state kv\.1",
    ):
        build(paths, tmp_path / "e.wide", model=InPlace, sample=call, dynamic=dynamic)
    build(paths, tmp_path / "e.wide", model=InPlace, sample=call, dynamic=dynamic, state=["kv"], **QUICK)
    ens = load(tmp_path / "e.wide")
    assert set(ens.manifest.state) == {"kv.0", "kv.1"}
    state = ens.state(B=4)
    members = [InPlace(i).eval() for i in range(MEMBERS)]
    states = [(torch.zeros(4, 5, 8), torch.zeros(4, 5, 8)) for _ in members]
    for t in range(3):
        turn = torch.tensor([t % 2, 1, 0, t == 1, 0]).long()
        y, state = ens(rows(t), at=turn, state=state)
        with torch.no_grad():
            for i, member in enumerate(members):
                torch.testing.assert_close(y[i], member(rows(t), states[i], turn), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(state["kv.0"][i], states[i][0])
                torch.testing.assert_close(state["kv.1"][i], states[i][1], rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_a_constant_part_of_a_state_is_carried(tmp_path: Path) -> None:
    ens = loaded(tmp_path, Pair, sample=PAIR, state=["kv"])
    factor = torch.rand(MEMBERS, 4, 8)
    state = {"kv.0": torch.zeros(MEMBERS, 4, 8), "kv.1": factor}
    states = [(torch.zeros(4, 8), f) for f in factor]
    for t in range(2):
        y, state = ens(rows(t), state=state)
        for i in range(MEMBERS):
            with torch.no_grad():
                torch.testing.assert_close(y[i], Pair(i).eval()(rows(t), states[i]), rtol=1e-5, atol=1e-6)
        assert torch.equal(state["kv.1"], factor)


class Decoder(nn.Module):
    """A module with three methods: `fill` writes the memory, `ask` reads it, `plain` does not use it."""

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
    how: Any = {"inputs": ["x=float32[B,8]"], "entries": ["fill", "ask", "plain"], "state": ["memory"]}
    ens = loaded(tmp_path, Decoder, **how, pt2=True)
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

    how: Any = {
        "inputs": ["x=float32[B,8]"],
        "entries": ["ask", "fill", "tick"],
        "state": ["memory", "count"],
    }
    ens = loaded(tmp_path, Two, **how)
    _, state = ens.tick(rows(0), state=ens.state())
    _, after = ens.fill(rows(0), state=state)
    assert torch.equal(after["count"], torch.ones(MEMBERS, 2))
    with pytest.raises(InputError, match="state lacks memory; the model carries memory"):
        ens.ask(rows(0), state={"count": state["count"]})
