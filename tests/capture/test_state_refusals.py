"""Tests states that a build or a call refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture.state_members import CARRIED, MEMBERS, PAIR, QUICK, TWO, Cached, Cell, Counts, Pair, rows, save
from widepack import build, load
from widepack.errors import CaptureError, UsageError, VerificationError


def refused(error: type[Exception], folder: Path, make: Callable[[int], nn.Module], **words: Any) -> str:
    paths = save(folder, make)
    with pytest.raises(error) as caught:
        build(paths, folder / "e.wide", model=make, **{"inputs": ["x=float32[B,8]"], **QUICK, **words})
    assert not (folder / "e.wide").exists()
    assert "\n\n" not in str(caught.value)
    return str(caught.value)


def test_a_changed_buffer_is_refused_by_name(tmp_path: Path) -> None:
    message = refused(CaptureError, tmp_path, Cached)
    assert "Cached changes last, running.mean, steps, window when forward runs in eval mode" in message
    assert "--state last --state running.mean --state steps --state window" in message
    message = refused(CaptureError, tmp_path, Cached, state=["window", "steps", "last"])
    assert "Cached changes running.mean when" in message
    assert "build with --state running.mean or make forward" in message


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


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize(
    ("make", "words", "error", "expected"),
    [
        (
            Cached,
            {"state": ["windwo", *CARRIED]},
            UsageError,
            "state windwo ... no buffer ... did you mean window? ... inputs: x",
        ),
        (
            Cached,
            {"state": ["scale", *CARRIED]},
            UsageError,
            "state scale ... does not change this buffer in eval mode ... leave --state scale out",
        ),
        (Cached, {"state": ["fc.weight", *CARRIED]}, CaptureError, "fc.weight is a parameter of Cached"),
        (
            Cached,
            {"state": ["window=y", *CARRIED[2:]]},
            CaptureError,
            "window is a buffer ... write --state window",
        ),
        (Cached, {"state": ["window", "window"]}, UsageError, "window is given twice"),
        (Cached, {"state": ["a b"]}, UsageError, "'a b' ... --state cache ... --state h=h_new"),
        (Cached, {"state": ["decode:window"]}, UsageError, "no entry is called 'decode' ... forward"),
        (
            Shrinks,
            {"state": ["seen"]},
            CaptureError,
            "state seen is float32[4,8] ... makes it float32[3,8] ... keeps its dtype and shape",
        ),
        (
            Cell,
            {"inputs": TWO, "state": ["h"]},
            CaptureError,
            "no output called h ... does not change this input in place ... 0 float32[B,4], 1 "
            "float32[B,8] ... --state h=1",
        ),
        (
            Attribute,
            {},
            VerificationError,
            "forward leaves other values in h, which the next call reads ... register_buffer ... --state h",
        ),
        (
            Attribute,
            {"state": ["h"]},
            UsageError,
            'state h is a plain attribute of Attribute ... self.register_buffer("h", ...)',
        ),
        (
            Trains,
            {},
            CaptureError,
            "Trains changes its parameters fc.bias at every call of forward in eval mode",
        ),
        (TwoNames, {"state": ["seen"]}, CaptureError, "state seen of TwoNames shares its memory with view;"),
        (
            Pair,
            {"inputs": None, "sample": PAIR, "state": ["kv.0"]},
            CaptureError,
            "state kv.0 is a part of the input kv ... --state kv",
        ),
        (
            Cell,
            {"inputs": TWO, "state": ["h=2"]},
            CaptureError,
            "no output called 2 ... are 0 float32[B,4], 1 ",
        ),
        (
            Cell,
            {"inputs": TWO, "state": ["h=0"]},
            CaptureError,
            "state h is float32[B,8] and comes out of Cell.forward as float32[B,4]",
        ),
        (
            Casts,
            {"inputs": TWO, "state": ["h=1"]},
            CaptureError,
            "state h is float32[B,8] ... as float64[B,8]",
        ),
        (
            Grows,
            {"inputs": ["x=float32[B,8]", "h=float32[B,T,8]"], "state": ["h=1"]},
            CaptureError,
            "float32[B,T,8] ... float32[B,T+1,8] ... A value that grows",
        ),
        (
            Cell,
            {"inputs": TWO, "state": ["x=1", "h=1"]},
            CaptureError,
            "states x, h come out of Cell.forward as one output",
        ),
    ],
)
def test_refusals(
    make: Callable[[int], nn.Module],
    words: dict[str, Any],
    error: type[Exception],
    expected: str,
    tmp_path: Path,
) -> None:
    found = refused(error, tmp_path, make, **words)
    for word in expected.split(" ... "):
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
    assert load(tmp_path / "e.wide")(rows(0), state=rows(1)).shape == (MEMBERS, 4, 4), (
        "without states an input with the name `state` is refused"
    )


@pytest.mark.extended
def test_a_number_that_changes_is_caught(tmp_path: Path) -> None:
    assert "gives other answers than the members" in refused(
        VerificationError, tmp_path, Counts, state=CARRIED
    )
