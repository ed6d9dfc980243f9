"""Tests that guards compute what Python computes over named dims, and that every evaluation ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack_artifacts import guards
from widepack_artifacts.errors import ArtifactError

DIMS = {"B": 2, "T": 7, "H": 64}
BINARY = [op for op in guards.OPS if op != "not"]
ARITHMETIC, COMPARISONS = BINARY[:7], BINARY[7:13]
SUMS = st.recursive(
    st.integers(-4, 4) | st.sampled_from(list(DIMS)),
    lambda e: st.tuples(st.sampled_from(ARITHMETIC), e, e).map(list),
    max_leaves=6,
)
CONDITIONS = st.recursive(
    st.tuples(st.sampled_from(COMPARISONS), SUMS, SUMS).map(list),
    lambda e: st.tuples(st.sampled_from(["and", "or"]), e, e).map(list) | e.map(lambda v: ["not", v]),
    max_leaves=4,
)
EXPRESSIONS = st.recursive(
    st.integers(-(2**63) + 1, 2**63 - 1) | st.integers(-4, 4) | st.sampled_from(list(DIMS)),
    lambda e: st.tuples(st.sampled_from(BINARY), e, e).map(list) | e.map(lambda v: ["not", v]),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_every_expression_has_an_answer(expr: Any) -> None:
    guards.check(expr, DIMS)
    assert guards.holds(expr, DIMS) in (True, False)
    assert guards.text(expr)


@given(CONDITIONS)
def test_the_text_of_a_guard_evaluates_to_the_same_value(expr: Any) -> None:
    try:
        value = guards.evaluate(expr, DIMS)
    except (ZeroDivisionError, OverflowError):
        return
    assert eval(guards.text(expr), {"min": min, "max": max, **DIMS}) == value


@pytest.mark.parametrize(
    ("expr", "expected", "holds"),
    [
        (["le", "T", 512], "T <= 512", True),
        (["eq", ["mod", "H", 32], 0], "H % 32 == 0", True),
        (["ne", ["mod", "T", 2], 1], "T % 2 != 1", False),
        (["and", ["gt", "B", 0], ["not", ["eq", "T", 8]]], "B > 0 and not (T == 8)", True),
        (["eq", ["floordiv", "T", 0], 0], "T // 0 == 0", False),
        (["eq", ["mod", "T", 0], 0], "T % 0 == 0", False),
        (["gt", ["mul", ["mul", "H", 2**62], 4], 0], "H * 4611686018427387904 * 4 > 0", False),
        (["lt", ["min", "B", "T"], ["max", "B", "T"]], "min(B, T) < max(B, T)", True),
    ],
)
def test_text_and_result_of_a_guard(expr: Any, expected: str, holds: bool) -> None:
    assert guards.text(expr) == expected
    assert guards.holds(expr, DIMS) is holds


def test_text_keeps_the_order_of_operations() -> None:
    dims = {"B": 3, "T": 50, "H": 7}
    wrong = []
    for outer in ARITHMETIC:
        for inner in ARITHMETIC:
            for expr in ([outer, "T", [inner, "H", "B"]], [outer, [inner, "T", "H"], "B"]):
                shown = guards.text(expr)
                if eval(shown, {"min": min, "max": max, **dims}) != guards.evaluate(expr, dims):
                    wrong.append(f"{expr} is shown as {shown}")
    assert not wrong


def chain(levels: int) -> Any:
    expr: Any = "T"
    for _ in range(levels):
        expr = ["not", expr]
    return expr


def broad(terms: int) -> Any:
    return 1 if terms <= 1 else ["add", broad(terms // 2), broad(terms // 2)]


@pytest.mark.parametrize(
    "expr",
    [None, 1.5, True, [], ["le"], ["le", "T"], ["le", "T", 1, 2], ["not", "T", "T"], ["exec", "T", 1],
     [["le"], "T", 1], [None, 1, 2], {"le": 1}, "Q", "__import__",
     ["le", "T", 2**63], ["le", "T", -(2**63)], ["le", "T", None], chain(65), chain(400), broad(1024)],
)  # fmt: skip  # one line for each kind
def test_invalid_guards_are_refused(expr: Any) -> None:
    with pytest.raises(ArtifactError, match="guard: "):
        guards.check(expr, DIMS)
