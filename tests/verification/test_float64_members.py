"""Tests the own error of members in float64 whose answers are roots of differences that cancel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_networks import NETWORKS, Network
from faults import MEMBERS, Prepared
from loaded import saved
from torch import Tensor, nn

import widepack
from widepack.errors import VerificationError
from widepack.fused.check import LiveWeights
from widepack.verification.rounding import _moved

Head = Callable[[Tensor], Tensor]


class Distances(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head, self.linear = head, nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(torch.tanh(x)).reshape(-1, 6))


def squares(q: Tensor) -> Tensor:
    """The squares of the distances of all pairs, from their products: 0 but for rounding on the diagonal."""
    s = (q * q).sum(-1)
    return (s[:, None] + s[None] - 2 * q @ q.T).clamp_min(0)


def cosines(q: Tensor) -> Tensor:
    q = nn.functional.normalize(q, dim=-1)
    return (q @ q.T).clamp(-1, 1)


def cdist(q: Tensor) -> Tensor:
    return torch.cdist(q, q)


HEADS: dict[str, Head] = {
    "cdist": cdist,
    "cdist by products": lambda q: torch.cdist(q, q, compute_mode="use_mm_for_euclid_dist"),
    "sqrt": lambda q: squares(q).sqrt(),
    "pow 1/4": lambda q: squares(q).pow(0.25),
    "pow 3/4": lambda q: squares(q).pow(0.75),
    "log": lambda q: torch.log(squares(q) + 1e-12),
    "acos": lambda q: torch.acos(cosines(q)),
    "sqrt of a similarity": lambda q: (1 - cosines(q)).clamp_min(0).sqrt(),
    "deviation of equal numbers": lambda q: torch.cat([q[:, :1].expand(-1, 3), q], 1).reshape(-1, 9).std(1),
    "norm of a difference": lambda q: torch.stack([q.norm(dim=1), (q - q.flip(1).flip(1)).norm(dim=1)]),
}
OTHERS = [h for h in HEADS if h not in ("cdist", "sqrt", "acos")]


def _extended(*values: str) -> list[Any]:
    return [pytest.param(v, marks=pytest.mark.extended) for v in values]


def build(tmp_path: Path, head: Head, dtype: torch.dtype, leading: int) -> widepack.WideModel:
    of = f"{str(dtype).removeprefix('torch.')}[{f'{leading},' if leading > 1 else ''}B,4]"
    return saved(lambda: Distances(head).to(dtype), tmp_path, f"x={of}", members=2, targets=("cpu",))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("head", ["cdist", "sqrt", "acos", *_extended(*OTHERS)])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.extended)])
def test_a_root_of_a_difference_that_cancels_is_built(head: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype == torch.float32 and head in ("pow 1/4", "log"):
        with pytest.raises(VerificationError, match="may be wrong.*Rounding alone changes"):
            build(tmp_path, HEADS[head], dtype, 1)
        return
    leading = 5 if head == "cdist" else 1  # torch computes distances of over 25 points from products
    ens = build(tmp_path, HEADS[head], dtype, leading)
    for rows in (2, 5, 6, 30):
        x = torch.randn(*([leading] if leading > 1 else []), rows, 4, dtype=dtype)
        answers = ens(x)
        for i in range(2):
            alone = Distances(HEADS[head]).to(dtype)
            alone.load_state_dict(torch.load(tmp_path / f"m{i}.pt"))
            with torch.no_grad():
                own = alone(x)
            off = (answers[i] - own).abs()
            assert float(off.median()) <= 100 * torch.finfo(dtype).eps * float(own.abs().max())
            assert float(off.max()) <= 0.01


def test_answers_that_are_rounding_are_refused_as_such(tmp_path: Path) -> None:
    """Nothing but the diagonal is left, so no comparison can tell. The loop gives the members' own bits."""
    with pytest.raises(VerificationError, match="may be wrong.*Rounding alone changes the members' own"):
        build(tmp_path, lambda q: torch.cdist(q, q).diagonal(), torch.float64, 5)


class Doubles(Network):
    def sample(self, seed: int, batch: int = 6) -> Tensor:
        return super().sample(seed, batch).double()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("swapped members", lambda w: w.roll(1, 0)),
        ("member 0 for everybody", lambda w: w[:1].expand_as(w)),
        ("16 bits inside", lambda w: w.bfloat16().double()),
        ("columns in reverse", lambda w: w.flip(2)),
        ("wrong scale", lambda w: w * (1 + 1e-6)),
        ("float32 inside", lambda w: w.float().double() * (1 + 2.0**-22)),
    ],
)
@pytest.mark.parametrize("head", ["cdist", *_extended("sqrt", "acos")])
def test_wrong_weights_under_a_root_are_refused(
    head: str, fault: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETWORKS, "roots", Doubles(lambda: Distances(HEADS[head]).double(), (4,)))
    prepared = Prepared("roots", 3)
    assert prepared.refused(prepared.program) == ""
    wrong = {n: change(w) if w.dim() == 3 else w for n, w in prepared.weights.items()}
    prepared.answers.weights = LiveWeights(wrong)
    assert " is wrong: output" in prepared.refused(prepared.program)


def test_numbers_are_moved_by_one_ulp() -> None:
    most = torch.finfo(torch.float64).max
    x = torch.tensor([0.0, 1.0, -3.0, 1e-300, most, torch.inf, torch.nan], dtype=torch.float64)
    for seed in range(MEMBERS + 5):
        moved = _moved(x, seed)
        assert torch.equal(moved[[0, 5]], x[[0, 5]]) and moved[6].isnan() and bool(moved[:5].isfinite().all())
        part = (moved[1:4] / x[1:4] - 1).abs()
        assert bool((part > 0).all()) and bool((part <= torch.finfo(torch.float64).eps).all())
        assert torch.equal(_moved(torch.complex(x[1:4], x[1:4]), seed).real != x[1:4], torch.ones(3) > 0)
    assert _moved(x.float(), 0).dtype == torch.float32 and _moved(3, 0) == 3
