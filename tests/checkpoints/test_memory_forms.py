"""Tests members whose tensors repeat numbers of their storage, leave some out, or are negated views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_forms import FORMS
from torch import Tensor, nn

import widepack

QUICK: dict[str, Any] = {"inputs": ["x=float32[B,4]"], "pt2": False, "targets": ("cpu",), "budget": 0}


class Net(nn.Module):
    """Has a parameter, a buffer, and extra state with a tensor."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.register_buffer("scale", torch.rand(6))
        self.kept = torch.rand(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        return y

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.kept = state["kept"]


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_files_in_each_form_of_memory(form: str, same: bool, tmp_path: Path) -> None:
    members, paths = [], []
    for i in range(3):
        torch.manual_seed(0 if same else i)
        state: dict[str, Any] = dict(Net().state_dict())
        extra = state.pop("_extra_state")
        state = {name: FORMS[form](tensor) for name, tensor in state.items()}
        state["_extra_state"] = {"kept": FORMS[form](extra["kept"])}
        paths.append(tmp_path / f"{i}.pt")
        torch.save(state, paths[-1])
        members.append(Net())
        members[-1].load_state_dict(torch.load(paths[-1]))
    out, x = tmp_path / "e.wide", torch.randn(5, 4)
    widepack.build(paths, out, model=Net, **QUICK)
    found = widepack.load(out)(x)
    for i, member in enumerate(members):
        torch.testing.assert_close(found[i], member(x))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("form", FORMS)
def test_live_members_in_each_form_of_memory(form: str) -> None:
    members = [Net() for _ in range(3)]
    for member in members:
        for tensor in (*member.parameters(), *member.buffers()):
            tensor.data = FORMS[form](tensor.data)
    x = torch.randn(5, 4)
    torch.testing.assert_close(widepack.fuse(members, x)(x), torch.stack([m(x) for m in members]))


class WithExpandedBuffers(nn.Module):
    """Its own buffers repeat a number of their storage, and are no part of the file."""

    offset: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.register_buffer("offset", torch.full((1, 1), 0.5).expand(6, 4), persistent=False)
        self.register_buffer("count", torch.zeros(()).expand(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x + self.offset[0]) + self.count
        return y


def test_buffers_that_repeat_a_number(tmp_path: Path) -> None:
    members, x = [WithExpandedBuffers() for _ in range(3)], torch.randn(5, 4)
    expected = torch.stack([m(x) for m in members])
    torch.testing.assert_close(widepack.fuse(members, x)(x), expected)
    assert members[0].offset.stride() == (0, 0)
    for i, member in enumerate(members):
        torch.save(member.state_dict(), tmp_path / f"{i}.pt")
    widepack.build(
        [tmp_path / f"{i}.pt" for i in range(3)], tmp_path / "e.wide", model=WithExpandedBuffers, **QUICK
    )
    torch.testing.assert_close(widepack.load(tmp_path / "e.wide")(x), expected)
