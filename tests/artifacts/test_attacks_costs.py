"""Attacks on the formulas of `costs-*.json`: texts that are code, and numbers without end."""

from __future__ import annotations

import time

import pytest

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.formulas import Formula
from widepack_artifacts.polynomials import added


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B +",
        "__import__('os')",
        "B.real",
        "B[0]",
        "lambda: 1",
        "print(B)",
        "max()",
        "max(B, key=T)",
        "max(*B)",
        "B if T else 1",
        "B / T",
        "B << 9",
        "B ** T",
        "B ** 17",
        "B ** -1",
        "1.5*B",
        "True",
        "'B'",
        "B and T",
        "[B]",
        "(B := 1)",
        "~B",
        "(" * 300 + "B" + ")" * 300,
        "-" * 200 + "B",
        "max(" * 70 + "B" + ", 1)" * 70,
        "B*" * 200_000 + "B",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="formula"):
        Formula(text)


@pytest.mark.parametrize(
    "text", ["(" * 30 + "B" + "**16)" * 30, "(" * 30 + "2" + "**16)" * 30, "B*" * 400 + "B"]
)
def test_numbers_that_would_take_all_memory_are_refused(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ArtifactError, match="over 4096 bits"):
        Formula(text).at({"B": 2**40})
    with pytest.raises(ArtifactError, match="over 4096 bits|is not a formula"):
        Formula(added([text, "1"])).at({"B": 2**40})
    assert time.process_time() - begin < 5
