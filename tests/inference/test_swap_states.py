"""Tests swaps of members with states: a state of the caller goes on with the new weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack import InputError, MemberMismatch

N = 3


class Memory(nn.Module):
    """Has a buffer that each call changes."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("cache", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.mul_(0.5).add_(self.layer(x).mean(0))
        return self.layer(x) + self.cache  # type: ignore[no-any-return]


class Steps(nn.Module):
    """Takes its state as an input, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 5)

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        h_new = self.cell(x, h)
        return {"y": h_new.sum(-1), "h_new": h_new}


CASES: list[tuple[Any, str, str]] = [
    (Memory, "x=float32[B,4]", "cache"),
    (Steps, "x=float32[B,4], h=float32[B,5]", "h=h_new"),
]


def wide_run(ens: widepack.WideModel, xs: list[Tensor], state: Any) -> tuple[list[Tensor], Any]:
    answers = []
    for x in xs:
        y, state = ens(x, state=state)
        answers.append(y["y"] if isinstance(y, dict) else y)
    return answers, state


def own_run(module: Any, xs: list[Tensor], state: Tensor | None = None) -> list[Tensor]:
    """Runs a member alone, from this state or from its start."""
    module, answers = copy.deepcopy(module).eval(), []
    with torch.no_grad():
        if isinstance(module, Memory):
            if state is not None:
                module.cache.copy_(state)
            return [module(x) for x in xs]
        h = torch.zeros(len(xs[0]), 5) if state is None else state
        for x in xs:
            result = module(x, h)
            h = result["h_new"]
            answers.append(result["y"])
    return answers


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(("make", "inputs", "name"), CASES, ids=["buffer", "input"])
def test_a_state_goes_on_over_a_swap(tmp_path: Path, make: Any, inputs: str, name: str) -> None:
    torch.manual_seed(0)
    modules = [make() for _ in range(N)]
    ens = widepack.load(built(tmp_path, make, modules, *inputs.split(", "), state=[name]))
    key = name.partition("=")[0]

    def start(batch: int) -> dict[str, Tensor]:
        return ens.state() if make is Memory else ens.state(B=batch)

    def check(members: list[Any]) -> None:
        for batch in (1, 2, 65):
            xs = [torch.randn(batch, 4) for _ in range(3)]
            answers, _ = wide_run(ens, xs, start(batch))
            for i, m in enumerate(members):
                torch.testing.assert_close(torch.stack([a[i] for a in answers]), torch.stack(own_run(m, xs)))

    check(modules)
    xs = [torch.randn(2, 4) for _ in range(4)]
    _, state = wide_run(ens, xs[:2], start(2))
    held = {k: v.clone() for k, v in state.items()}
    modules[1] = make()
    torch.save(modules[1].state_dict(), tmp_path / "new.pt")
    ens.swap(1, tmp_path / "new.pt")
    assert all(torch.equal(state[k], v) for k, v in held.items())  # the caller's state does not change
    answers, _ = wide_run(ens, xs[2:], state)
    for i, m in enumerate(modules):
        expected = own_run(m, xs[2:], held[key][i])
        torch.testing.assert_close(torch.stack([a[i] for a in answers]), torch.stack(expected))
    check(modules)  # the start is the new member's, too

    with pytest.raises(InputError, match="B = 0"):
        ens(torch.zeros(0, 4), state=start(1))
    with pytest.raises(InputError, match=r"a first axis of 3 members"):
        ens(xs[0], state={k: v[:2] for k, v in state.items()})


def test_a_state_of_another_shape_is_no_member(tmp_path: Path) -> None:
    modules = [Memory() for _ in range(N)]
    ens = widepack.load(built(tmp_path, Memory, modules, "x=float32[B,4]", state=["cache"]))
    torch.save({**modules[0].state_dict(), "cache": torch.zeros(4)}, tmp_path / "other.pt")
    with pytest.raises(MemberMismatch, match=r"cache is \[4\] float32; the model has \[3\] float32"):
        ens.swap(1, tmp_path / "other.pt")
