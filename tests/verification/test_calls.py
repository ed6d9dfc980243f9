"""Tests which calls a verification makes: their batches, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from loaded import saved
from torch import nn

import widepack
from widepack.verification import calls, reference
from widepack.verification.subject import Subject, VerifiedCall


class OneNumber(nn.Module):
    """A network whose output has one number for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y


def calls_of(tmp_path: Path) -> list[str]:
    """Builds an artifact and returns the names of the calls that were compared, in order."""
    ens = saved(OneNumber, tmp_path, "x=float32[B, 5]", members=2)
    found: list[str] = ens.manifest.verification["calls"]
    return found


def test_the_large_batch_has_64_numbers_of_every_output(tmp_path: Path) -> None:
    wanted = [f"{pattern} B={b}" for pattern in ("shared", "each") for b in (64, 1, 2, 5)]
    assert calls_of(tmp_path) == wanted


def test_a_call_for_which_memory_is_lacking_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Subject.answers

    def fails(self: Subject, i: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(inputs[0]) == 64:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return answers(self, i, inputs)

    monkeypatch.setattr(Subject, "answers", fails)
    with pytest.raises(RuntimeError, match="tried to allocate"):
        calls_of(tmp_path)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(("rows", "large"), [(1, 6), (18, 10), (40, 32), (10_000, 64)])
def test_networks_with_much_work_have_a_smaller_large_batch(
    rows: int, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rows: of all calls of a pattern, as far as the limit of operations allows."""
    monkeypatch.setattr(calls, "FLOPS", float(rows * 2 * 2 * 2 * (5 * 16 + 16)))
    found = calls_of(tmp_path)
    assert [c for c in found if c.startswith("shared")] == [f"shared B={b}" for b in (large, 1, 2, 5)]


class Summed(OneNumber):
    """A network whose output has one number for a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "each"),
    [(OneNumber, [1, 1]), (Summed, [17, 16])],  # 33 calls of the large batch, divided
)
def test_calls_with_an_offset(
    make: type[nn.Module], each: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floats of a call of the large batch are moved up by each offset."""
    found: list[tuple[Sequence[VerifiedCall], list[list[VerifiedCall]]]] = []

    def noted(subject: Subject, made: Sequence[VerifiedCall]) -> list[list[VerifiedCall]]:
        found.append((made, calls.shifted(subject, made)))
        return found[-1][1]

    monkeypatch.setattr(reference, "shifted", noted)
    x = torch.randn(6, 5)
    with torch.no_grad():
        widepack.fuse([make() for _ in range(2)], x)(x)
    made, of_offsets = found[-1]
    assert [len(some) for some in of_offsets] == each
    large = [c for c in made if c.case.sizes == made[0].case.sizes]
    spread = float(x.std(correction=0))
    for number, (offset, some) in enumerate(zip(calls.OFFSETS, of_offsets)):
        for call, before in zip(some, large[number::2] or large):
            assert f"inputs + {offset:g} x their spread" in call.label
            for moved, own in zip(call.inputs, before.inputs):
                torch.testing.assert_close(moved[0], own[0] + offset * spread)
