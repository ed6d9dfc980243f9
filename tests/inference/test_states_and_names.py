"""Tests states as tensors that may be written into, messages about states, and the public names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from split_models import Cell
from support import fresh, must

import widepack
from widepack import InputError


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Any:
    inputs = ["x=float32[B,4]", "h=float32[B,3]"]
    return saved(Cell, tmp_path_factory.mktemp("cell"), *inputs, members=2, state=["h=1"])


def test_a_returned_state_may_be_written_into(cell: Any) -> None:
    x = torch.randn(5, 4)
    y, state = cell(x, state=cell.state(B=5))
    again = {"h": state["h"].clone()}
    state["h"][0, 2] = 0.0  # outside of inference_mode
    again["h"][0, 2] = 0.0
    assert torch.equal(cell(x, state=state)[0], cell(x, state=again)[0])
    for other in (cell.each(torch.stack([x, x]), state=state)[1], cell[1](x, state=cell[1].state(B=5))[1]):
        other["h"].zero_()
    with torch.inference_mode():
        cell(x, state=state)[1]["h"].zero_()
    assert not torch.equal(y, torch.zeros_like(y))


def test_a_missing_state_is_answered_with_the_call_to_make(cell: Any) -> None:
    x = torch.randn(5, 4)
    with pytest.raises(InputError, match=r"start with state = ens.state\(B=5\), and continue"):
        cell(x)
    with pytest.raises(InputError, match=r"start with state = ens.state\(B=5\)"):
        cell.each(torch.stack([x, x]))
    with pytest.raises(InputError, match=r"start with state = member.state\(B=5\)"):
        cell[0](x)


def test_a_state_without_a_new_value_lists_outputs_with_types(tmp_path: Path) -> None:
    torch.save(Cell().state_dict(), tmp_path / "m.pt")
    inputs = ["x=float32[B,4]", "h=float32[B,3]"]
    words = r"its outputs are 0 float32\[B\], 1 float32\[B,3\].*of h, float32\[B,3\], .*--state h=1$"
    with pytest.raises(widepack.CaptureError, match=words):
        widepack.build([tmp_path / "m.pt"], tmp_path / "e.wide", model=Cell, inputs=inputs, state=["h"])


def test_a_member_says_which_one_it_is(cell: Any) -> None:
    assert repr(cell[1]) == "Member(m1; inputs x=float32[B,4]; state h=float32[B,3])"


def test_the_public_names_are_listed_without_torch() -> None:
    code = "import sys, widepack; print(*dir(widepack)); assert 'torch' not in sys.modules"
    names = must(fresh(code)).split()
    assert set(widepack.__all__) | {"optim", "primitives"} <= set(names)


@pytest.mark.parametrize("name", [n for n in widepack.__all__ if n != "__version__"])
def test_pickles_name_the_public_place(name: str) -> None:
    found = getattr(widepack, name)
    assert pickle.loads(pickle.dumps(found)) is found
    assert found.__module__ in ("widepack", "widepack_artifacts.errors"), "a pickle would name a private file"


def test_public_names() -> None:
    for name in widepack.__all__:
        assert getattr(widepack, name) is not None
    assert issubclass(widepack.ProbeError, widepack.ArtifactError)
    assert issubclass(widepack.Unavailable, widepack.UsageError)


def test_a_backend_that_needs_more_is_unavailable(cell: Any) -> None:
    with pytest.raises(widepack.Unavailable):
        widepack.load(cell.entry("forward").programs.artifact.reader.root, backend="compile")
