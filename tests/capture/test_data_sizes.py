"""Tests numbers and sizes that depend on values (`.item()`, `nonzero`, `y[mask]`).

Members differ in these, so they run one after the other from that op on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import built, member, refused, saved
from support import run
from torch import Tensor, nn

import widepack
from widepack_artifacts.reader import Reader

N = 3


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)


class Experts(Base):
    """Runs each expert on the rows that selected it, of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.fc(x)[:, :3].argmax(-1)
        order = chosen.argsort(stable=True)
        counts = nn.functional.one_hot(chosen, 3).sum(0).tolist()
        y = torch.cat([e(rows) for e, rows in zip(self.experts, x[order].split(counts, 0))])  # type: ignore[no-untyped-call]
        return torch.zeros_like(y).index_copy(0, order, y)


class Scaled(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * y.abs().max().item()


class Positive(Base):
    """Returns an output whose number of rows depends on the member."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y: Tensor = self.fc(x)
        keep = (y.sum(1) > 0).nonzero()[:, 0]
        return {"all": y, "rows": y[keep], "where": keep}


class Picked(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y[y > 0]


class Chosen(Base):
    """Selects rows by the input. A shared input selects the same number for all members."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y[torch.nonzero(x[:, 0] > 0)[:, 0]]


class Distinct(Base):
    def forward(self, x: Tensor) -> Tensor:
        found, back, counts = torch.unique(
            (self.fc(x).sum(1) * 2).round(), return_inverse=True, return_counts=True
        )
        answer: Tensor = (found * counts)[back]
        return answer


class Narrowed(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        n = (y[0] > 0).sum().item()
        torch._check(n >= 0)  # type: ignore[no-untyped-call]
        torch._check(n <= 6)  # type: ignore[no-untyped-call]
        return y[:, :n].sum(1)


class Repeated(Base):
    """Repeats rows by durations that the member predicts, as in text to speech."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return torch.repeat_interleave(y, y[:, 0].exp().round().clamp(1, 4).long(), 0)


class Given(Base):
    """Reads a number from an input. A shared input has one number for all members."""

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * k.item()


class Converted(Base):
    """Makes numbers of tensors by `int` and `float`, and uses both names otherwise too."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        assert isinstance(x.ndim, int) and not isinstance(x.ndim, float) and int("7", base=8) == 7
        assert isinstance(2.0, (int, float)) and issubclass(bool, int) and int.from_bytes(b"1", "big") == 49
        return y * float(y.abs().max()) + int((y > 0).sum()) * float(x.shape[1])


class Summed(Base):
    """Sums rows by groups. The number of groups is the last index and one more."""

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        groups = (torch.arange(x.shape[0]) * k).div(x.shape[0], rounding_mode="floor")
        return torch.zeros(int(groups[-1]) + 1, 6).index_add(0, groups, y)


class Caught(Base):
    """Branches on a value and catches the error. No program can follow this."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        try:
            return y * 2 if bool((y > 0).all()) else y
        except RuntimeError:
            return y


CASES: dict[str, type[Base]] = {
    k.__name__: k
    for k in (
        *(Experts, Scaled, Positive, Picked, Chosen, Distinct),
        *(Narrowed, Repeated, Given, Converted, Summed),
    )
}


def parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    members = [member(CASES[name], i) for i in range(N)]
    paths = saved(CASES[name], tmp_path, N)
    inputs = ["x=float32[B,6]", *(["k=int64[]:1..5"] if name in ("Given", "Summed") else [])]
    report = widepack.build(paths, tmp_path / "e.wide", model=CASES[name], inputs=inputs, targets=("cpu",))
    assert name in ("Given", "Chosen", "Summed") or (
        "loop" in report.strategies and "sequential" not in report.strategies
    ), report.strategies
    ens = widepack.load(tmp_path / "e.wide", warmup=False)
    g = torch.Generator().manual_seed(7)
    for batch in (1, 2, 5, 17, 40):
        calls = [
            {"x": torch.randn(batch, 6, generator=g)}
            | ({"k": torch.tensor(batch + i)} if name in ("Given", "Summed") else {})
            for i in range(N)
        ]
        for answer, given in (
            (ens(**calls[0]), [calls[0]] * N),
            (ens.each(**{k: [o[k] for o in calls] for k in calls[0]}), calls),
        ):
            for i, m in enumerate(members):
                for mine, alone in zip(parts(answer), parts(run(m, (), given[i])), strict=True):
                    torch.testing.assert_close(mine[i], alone, rtol=1e-4, atol=1e-5)
    if name == "Positive":
        kinds = {o.name: o.kind for o in Reader(tmp_path / "e.wide").manifest.entries["forward"].outputs}
        assert kinds == {"all": "stacked", "rows": "ragged", "where": "ragged"}


@pytest.mark.extended
def test_no_member_changes_anothers_numbers(tmp_path: Path) -> None:
    paths = saved(Scaled, tmp_path, N)
    torch.save({k: v * float("nan") for k, v in torch.load(paths[1]).items()}, paths[1])
    widepack.build(paths, tmp_path / "nan.wide", model=Scaled, inputs=["x=float32[B,6]"], targets=("cpu",))
    built(Scaled, tmp_path, N, inputs=["x=float32[B,6]"])
    x = torch.randn(5, 6)
    one, other = (widepack.load(tmp_path / n)(x) for n in ("nan.wide", "e.wide"))
    assert one[1].isnan().all() and torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])


def test_a_branch_whose_error_is_caught_is_refused(tmp_path: Path) -> None:
    message = refused(Caught, tmp_path, inputs=["x=float32[B,6]"])
    assert "branches on the values of a tensor" in message
