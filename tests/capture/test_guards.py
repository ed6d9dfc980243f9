"""Tests that conditions of torch become equivalent guards over named dims, or that the build stops."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import files_of
from torch import nn

import widepack
from widepack.capture.call import arrange
from widepack.capture.guards import guards_from
from widepack.errors import CaptureError
from widepack.ir.guards import InputLeaf, factor_of
from widepack_artifacts import guards
from widepack_cli.main import cli

LEAVES = (
    InputLeaf("x", "float32[B,3,32*H]", torch.zeros(4, 3, 64), {0: "B", 2: "32*H"}),
    InputLeaf("ids", "int64[B,T]", torch.zeros(4, 6, dtype=torch.int64), {0: "B", 1: "T"}),
    InputLeaf("pair.0", "float32[T]", torch.zeros(6), {0: "T"}),
    InputLeaf("rest_1", "float32[T]", torch.zeros(6), {0: "T"}),
)
B, T, W = "L['x'].size()[0]", "L['ids'].size()[1]", "L['x'].size()[2]"


def expressions(*codes: str) -> list[Any]:
    return [g.expr for g in guards_from(codes, LEAVES, "Net")]


@pytest.mark.parametrize(
    ("code", "want"),
    [
        (f"{T} <= 512", ["le", "T", 512]),
        (f"512 >= {T}", ["ge", 512, "T"]),
        (f"{W} % 64 == 0", ["eq", ["mod", ["mul", 32, "H"], 64], 0]),
        (f"L['ids'].size()[0] != {T}", ["ne", "B", "T"]),
        (f"2 <= {T} and {T} < 9", ["and", ["le", 2, "T"], ["lt", "T", 9]]),
        (f"2 <= {T} < 9", ["and", ["le", 2, "T"], ["lt", "T", 9]]),
        (f"not ({T} == 3)", ["not", ["eq", "T", 3]]),
        (f"{T} == 3 or {T} == 4 or {B} == 1", ["or", ["or", ["eq", "T", 3], ["eq", "T", 4]], ["eq", "B", 1]]),
        (
            f"-{T} + 2*({B} // 2) - 1 < 0",
            ["lt", ["sub", ["add", ["sub", 0, "T"], ["mul", 2, ["floordiv", "B", 2]]], 1], 0],
        ),
        (f"Max(1, {T}) == min({T}, {B})", ["eq", ["max", 1, "T"], ["min", "T", "B"]]),
        (f"L['x'].size()[1] * {B} > 7", ["gt", ["mul", 3, "B"], 7]),
        ("L['pair'][0].size()[0] > 1", ["gt", "T", 1]),
        ("L['rest'][1].size()[0] > 1", ["gt", "T", 1]),
        (f"\n  {T} <= 512  \n", ["le", "T", 512]),
    ],
)
def test_a_condition_is_arithmetic_over_named_dims(code: str, want: Any) -> None:
    (expr,) = expressions(code)
    assert expr == want
    guards.check(expr, {"B": 1, "T": 1, "H": 1})


CODES: list[Any] = [
    f"{T} <= 5",
    f"{W} % 64 == 0",
    f"2 <= {T} < {B}",
    f"not ({T} == 3 or {B} == 2)",
    f"({T} + {B}) // 3 != 1",
    f"max({T}, {B}) > 3",
]


@pytest.mark.parametrize("code", CODES)
def test_a_condition_means_what_its_text_means(code: str) -> None:
    (expr,) = expressions(code)
    for b, t, h in itertools.product((1, 2, 3, 5), (1, 3, 4, 7), (1, 2, 3)):
        shapes = {"x": (b, 3, 32 * h), "ids": (b, t)}
        inputs = {n: SimpleNamespace(size=lambda s=s: s) for n, s in shapes.items()}
        assert guards.holds(expr, {"B": b, "T": t, "H": h}) == bool(eval(code, {"L": inputs}))


def test_true_and_repeated_conditions_are_left_out() -> None:
    assert expressions(
        f"{T} == {T}",
        f"{T} <= {T}",
        f"L['ids'].size()[0] == {B}",
        "True",
        "L['x'].size()[1] == 3",
        f"{T} > 1",
        f"{T} > 1",
    ) == [["gt", "T", 1]]


def test_a_condition_that_is_true_at_all_sizes_is_left_out() -> None:
    provable = [
        f"16 * {B} != 2 * {B}",
        f"{W} // 32 != 0",
        f"({W} // 32) * 32 == {W}",
        f"8 * {B} // {B} == 8",
        f"Max(1, {T}) == {T}",
        f"{W} % 32 == 0",
    ]
    assert expressions(*provable) == []
    open_ = [
        f"{T} // 2 != 0",
        f"{W} % 64 == 0",
        f"8 * {B} != 8 * {T}",
        f"{T} - 2 >= 0",
        f"{B} % {T} != 0",
        f"-1 + {T} // 4 >= 1",
    ]
    kept = expressions(*open_)
    assert len(kept) == len(open_)
    assert guards.text(kept[-1]) == "-1 + T // 4 >= 1"
    for expr in kept:  # each guard is false at some size
        assert not all(
            guards.holds(expr, {"B": b, "T": t, "H": h}) for b, t, h in itertools.product((1, 2, 3), repeat=3)
        )


def test_a_condition_that_does_not_hold_is_refused() -> None:
    with pytest.raises(CaptureError, match="Net: the condition 'False' does not hold for the example"):
        expressions("False")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{T} / 2 == 1", "is not arithmetic over sizes"),
        ("L['x'].stride()[0] == 3", "is not a size of an input"),
        ("L['y'].size()[0] == 3", "belongs to an unknown input"),
        (f"__import__('os').getcwd() == {T}", "is not arithmetic over sizes"),
        (f"f({T}) == 1", "is not arithmetic over sizes"),
        (f"{T} in (1, 2)", "is not arithmetic over sizes"),
        (f"{T} < 1.5", "is not arithmetic over sizes"),
        (f"{T} <", "invalid syntax"),
        ("L[x].size()[0] == 3", "is not a size of an input"),
    ],
)
def test_a_condition_that_no_guard_expresses_stops_the_build(code: str, words: str) -> None:
    with pytest.raises(
        CaptureError,
        match=r"Net holds only while .* a condition that cannot be written as arithmetic over named dims",
    ) as caught:
        expressions(code)
    assert words in str(caught.value)
    assert str(caught.value).endswith(
        "change the member's code: compute with sizes in whole numbers, +, -, *, // and %"
    )


def test_a_dim_may_be_a_multiple() -> None:
    assert factor_of("B") == (1, "B")
    assert factor_of("32*H") == (32, "H")


def test_a_negative_axis_is_resolved() -> None:
    call = arrange(torch.nn.ReLU(), [torch.zeros(4, 8)], {}, {"input": {0: "B", -1: "T"}}, {})
    assert call.leaves[0].axes == {0: "B", 1: "T"}


class Bounded(nn.Module):
    """Takes lengths from 3 to 16, and even ones alone in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 3:
            raise ValueError("too short")
        if x.shape[1] % 2:
            x = x[:, :-1]
        return x + self.table[: x.shape[1]]  # the last line


def test_the_report_and_inspect_name_the_lines_of_bounds(tmp_path: Path) -> None:
    paths = files_of(tmp_path, [Bounded(), Bounded()])
    out, dynamic = tmp_path / "e.wide", {"x": {0: "B", 1: "T"}}
    report = widepack.build(
        paths, out, model=Bounded, sample=(torch.ones(4, 6, 3),), dynamic=dynamic, budget=0
    )
    (bounds,) = report.entries["forward"].bounds
    assert bounds.startswith("3 <= T <= 16: ") and "x.shape[1] < 3" in bounds and "last line" in bounds
    assert "% 2" not in bounds  # this condition bounds nothing
    shown = CliRunner().invoke(cli, ["inspect", str(out)]).output
    assert f"dim     T from 3 to 16  ({bounds.partition(': ')[2]})" in shown
