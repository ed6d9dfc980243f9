"""Tests calls without rows: each form answers as it answers rows, but without them, or refuses in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import widepack
from widepack.inference.model import WideModel
from widepack.reduction.figures import FIGURES

N = 3
EMPTY = torch.zeros(0, 6)


class Several(nn.Module):
    """Outputs of several dtypes, an input without rows, and small numbers as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        logits = self.head(x * scale + self.table(ids - 3))
        return {"logits": logits, "label": logits.argmax(-1), "turned": logits.mT}


class Rows(nn.Module):
    """An output that is one number for all rows, which no rows do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(x)
        return y, y.mean()


class Inverse(nn.Module):
    """A model that refuses a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.linalg.inv(x))
        return y


@pytest.fixture(scope="module", params=[None, ["cpu", "cpu"]], ids=["one", "parts"])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("several")
    saved(Several, folder, "x=float32[B,6]", "ids=int64[B]:3..11", "scale=float32[6]", members=N)
    return widepack.load(next(folder.glob("*.wide")), device=request.param)


SCALE = torch.ones(6)
NAMES = [name for name in FIGURES if name not in ("mixture", "quantile")] + ["quantile(0.3)"]
FORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "call": lambda ens, x, ids: ens(x, ids, SCALE),
    "each": lambda ens, x, ids: ens.each(x.expand(N, -1, 6), ids.expand(N, -1), SCALE.expand(N, 6)),
    "mixed": lambda ens, x, ids: ens(widepack.each(x.expand(N, -1, 6)), ids, SCALE),
    "route": lambda ens, x, ids: ens.route(x, ids, SCALE, member=[1] * len(x)),
    "one member": lambda ens, x, ids: ens.route(x, ids, SCALE, member=2),
    "member": lambda ens, x, ids: ens.member(1)(x, ids, SCALE),
    "figures": lambda ens, x, ids: ens.reduce(x, ids, SCALE, *NAMES, of="softmax"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_answer_has_the_shape_of_another_without_its_rows(form: str, several: Any) -> None:
    def answer(rows: int) -> list[Tensor]:
        found = FORMS[form](several, torch.randn(rows, 6), torch.full((rows,), 5))
        return pytree.tree_leaves(found)

    for none, two, three in zip(answer(0), answer(2), answer(3), strict=True):
        dims = [d for d, (a, b) in enumerate(zip(two.shape, three.shape)) if a != b]
        assert len(dims) == 1
        wanted = list(two.shape)
        wanted[dims[0]] = 0
        assert (list(none.shape), none.dtype) == (wanted, two.dtype)


def test_what_is_wrong_without_rows_is_still_refused(several: Any) -> None:
    ids = torch.zeros(0, dtype=torch.int64)
    for args, text in (
        ((torch.zeros(0, 5), ids, SCALE), "the model takes 6"),
        ((EMPTY, torch.zeros(2, dtype=torch.int64), SCALE), "equal letters are equal sizes"),
        ((EMPTY.double(), ids, SCALE), "x is float64"),
        ((EMPTY, ids, SCALE[:5]), "the model takes 6"),
    ):
        with pytest.raises(widepack.InputError, match=text):
            several(*args)
    with pytest.raises(widepack.InputError, match="member has 2 values, and the call has 0 rows"):
        several.route(EMPTY, ids, SCALE, member=[0, 1])


def one(folder: Path, make: Callable[[], nn.Module], *inputs: str, **options: Any) -> WideModel:
    return saved(make, folder, *inputs, members=N, **options)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Rows, "x=float32[B,6]"), (Inverse, "x=float32[B,2,2]")],
)
def test_an_answer_that_is_not_known_is_refused(make: type[nn.Module], shape: str, tmp_path: Path) -> None:
    ens = one(tmp_path, make, shape)
    x = torch.zeros(0, 6) if make is Rows else torch.zeros(0, 2, 2)
    calls: list[Callable[[], Any]] = [lambda: ens(x), lambda: ens.member(0)(x), lambda: ens.mean(x)]
    for call in calls:
        with pytest.raises(
            widepack.InputError, match=r"B = 0 \(input x\); the model is valid for 1 <= B"
        ) as e:
            call()
        assert type(e.value) is widepack.InputError


def test_a_sequence_of_length_0_is_answered_where_the_answer_has_it(tmp_path: Path) -> None:
    ens = one(tmp_path, lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), "input=float32[B,T,6]")
    assert ens(torch.zeros(2, 0, 6)).shape == (N, 2, 0, 4)
    assert ens(torch.zeros(0, 5, 6)).shape == (N, 0, 5, 4)
    with pytest.raises(widepack.InputError, match="0"):
        ens(torch.zeros(0, 0, 6))


def test_a_cascade(tmp_path: Path) -> None:
    ens = one(tmp_path, lambda: nn.Linear(6, 4), "input=float32[B,6]")
    found = ens.cascade(EMPTY, first=1, until=0.5)
    assert found.mean.shape == (0, 4) and found.members.shape == (0,)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_validation_file_without_rows_is_refused(suffix: str, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    one(tmp_path, lambda: nn.Linear(1, 4), "input=float32[B,1]")
    path = tmp_path / f"none.{suffix}"
    if suffix == "csv":
        path.write_text("a,y\n")
    else:
        parquet.write_table(arrow.table({"a": arrow.array([], "float"), "y": arrow.array([], "int64")}), path)
    wide = next(tmp_path.glob("*.wide"))
    for command in (widepack.evaluate, widepack.select):
        with pytest.raises(widepack.InputError, match=f"none.{suffix} has no rows"):
            command(wide, path, target="y", of="softmax")
