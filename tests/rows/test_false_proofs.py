"""Tests programs that the walk once proved to have independent rows, though they have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from row_cases import Examined, Of
from torch import Tensor, nn
from torch.nn import functional as F

from widepack.rows.call import MixesRows
from widepack.rows.layout import RowAxis
from widepack.rows.verdict import UNREADABLE
from widepack.rows.walk import walk
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0])


class Gated(nn.Module):
    """Adds a function of the input only where a weight is positive, which it is not: no trial sees it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.function = nn.Parameter(torch.zeros(())), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.gate > 0, x + self.function(x), x)


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    # torch sorts the values of all rows together, and takes two equal ones for one in the list
    "values in a list, by a sort": lambda x: torch.isin(x, torch.arange(60.0), assume_unique=True).float(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_trial_sees_is_not_proved(name: str) -> None:
    found = Examined(Gated(HIDDEN[name]), [X]).verdict()
    assert not found.proved or not found.independent, found


class FromThree(nn.Module):
    """Takes 3 rows or more, so that a part of three places is the same in every batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] < 3:
            raise ValueError("takes 3 rows or more")
        return x * ones(x)[:3].sum() + ones(x)[-2:].sum()


def test_a_part_that_every_batch_of_the_model_has_is_proved() -> None:
    found = Examined(FromThree(), [X]).verdict()
    assert found.independent and found.proved, found


def forged(nodes: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]], dtype: str = "float32") -> Program:
    """Returns a program of an input `x` `[B, 6]`. The node `n0` is B. The last node is the output."""
    listed: list[tuple[str, Sequence[Any], Mapping[str, Any]]] = [
        ("aten.sym_size.int", (Ref("x"), 0), {}),
        *nodes,
    ]
    made = tuple(Node(f"n{i}", op, tuple(args), dict(kwargs)) for i, (op, args, kwargs) in enumerate(listed))
    slot = Slot("x", "x", "shared", f"{dtype}[B,6]")
    return Program((), (slot,), made, (Output(Ref(made[-1].name), "shared"),))


PARTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "the first": ("aten.slice.Tensor", (Ref("n1"), 0, 0, 3)),
    "the last": ("aten.slice.Tensor", (Ref("n1"), 0, -3, 2**63 - 1)),
    "each second": ("aten.slice.Tensor", (Ref("n1"), 0, 0, 4, 2)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_ones_that_a_small_batch_does_not_have(name: str) -> None:
    """A program of a file may lack the guard that the capture of such a model has."""
    program = forged(
        [
            ("aten.ones.default", ([Ref("n0")],), {}),
            (*PARTS[name], {}),
            ("aten.sum.default", (Ref("n2"),), {}),
            ("aten.add.Tensor", (Ref("x"), Ref("n3")), {}),
        ]
    )
    with pytest.raises(MixesRows):
        walk(program, "B", [{"B": 5}])
    assert walk(program, "B", [{"B": 5}], least=3)[0]["n4"] == RowAxis(0)


def test_recorded_statistics_of_ones() -> None:
    """torch divides by one row less."""
    program = forged(
        [
            ("aten.ones_like.default", (Ref("x"),), {}),
            ("aten.select.int", (Ref("n1"), 0, 0), {}),
            (
                "aten._native_batch_norm_legit_functional.default",
                (Ref("n1"), None, None, Ref("n2"), Ref("n2"), True, 0.1, 1e-5),
                {},
            ),
            ("operator.getitem", (Ref("n3"), 4), {}),
            ("aten.add.Tensor", (Ref("x"), Ref("n4")), {}),
        ]
    )
    with pytest.raises(MixesRows):
        walk(program, "B", [{"B": 5}])


COMPUTED = {
    "a product": ("operator.mul", (Ref("n1"), 2)),
    "a sum": ("operator.add", (Ref("n1"), 1)),
    "a difference": ("operator.sub", (3, Ref("n1"))),
    "a number": ("torch.sym_int", (Ref("n1"),)),
}


@pytest.mark.parametrize("compares", ["gt", "lt", "ge", "ne"])
@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_that_are_computed_from_a_comparison(name: str, compares: str) -> None:
    """`2 * (B > 3)` is the number 2 in the sizes of the walk, since torch decides the comparison there."""
    op, args = COMPUTED[name]
    program = forged(
        [
            (f"operator.{compares}", (Ref("n0"), 3), {}),
            (op, args, {}),
            ("aten.mul.Scalar", (Ref("x"), Ref("n2")), {}),
        ]
    )
    with pytest.raises(MixesRows, match="comparison"):
        walk(program, "B", [{"B": 5}])


def test_a_comparison_as_a_size() -> None:
    program = forged(
        [
            ("operator.gt", (Ref("n0"), 3), {}),
            ("operator.add", (Ref("n1"), 1), {}),
            ("aten.ones.default", ([Ref("n2")],), {}),
            ("aten.sum.default", (Ref("n3"),), {}),
            ("aten.add.Tensor", (Ref("x"), Ref("n4")), {}),
        ]
    )
    with pytest.raises((MixesRows, *UNREADABLE)):
        walk(program, "B", [{"B": 5}])


def test_numbers_of_rows_that_say_how_often_places_are_repeated() -> None:
    program = forged(
        [
            ("aten.select.int", (Ref("x"), 1, 0), {}),
            ("aten.repeat_interleave.Tensor", (Ref("n1"),), {"output_size": 7}),
            ("aten.sum.default", (Ref("n2"),), {}),
            ("aten.add.Tensor", (Ref("x"), Ref("n3")), {}),
        ],
        "int64",
    )
    with pytest.raises(MixesRows):
        walk(program, "B", [{"B": 5}])


EMPTY: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: torch.cat([x, x[:, None, :0].flatten(1)], 1),
    "repeated": lambda x: torch.cat([x, x.repeat_interleave(0, 1)], 1),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_values(name: str) -> None:
    """They once ended the build with an error."""
    assert Examined(Of(EMPTY[name]), [X]).verdict().independent


def count_of_empty_rows(x: Tensor) -> Tensor:
    empty = (x == 0).all(1).float()
    return x + torch.outer(torch.ones(x.shape[0]), empty).sum(1)[:, None]


def test_rows_of_zeros_are_tried() -> None:
    found = Examined(Of(count_of_empty_rows), [X]).verdict()
    assert not found.independent, found


PROVED: dict[str, Callable[[Tensor], Tensor]] = {
    "a state of zeros": lambda x: (torch.zeros(x.shape[0], 4) @ torch.ones(4, 6) + x).tanh(),
    "added to a state": lambda x: torch.addmm(x, torch.zeros(x.shape[0], 4), torch.ones(4, 6)),
    "a part of zeros": lambda x: x[:, :2] + torch.zeros(x.shape[0], 4)[:, :2],
    "membership": lambda x: torch.isin(x, torch.arange(60.0)).float(),
    "numbers of a row": lambda x: x.view(x.shape[0], x.numel() // x.shape[0]) * (x.numel() // x.shape[0]),
    "halves": lambda x: x // 2 + F.glu(x).sum(1, keepdim=True),
    "polar": lambda x: torch.polar(x.abs(), x).real,
}


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("name", PROVED)
def test_modules_that_are_still_proved(name: str) -> None:
    found = Examined(Of(PROVED[name]), [X]).verdict()
    assert found.independent and found.proved, found
