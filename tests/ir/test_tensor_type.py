"""Tests that type texts are parsed into dtype and sizes, and that `str()` gives the text back."""

from __future__ import annotations

import pytest

from widepack.errors import UsageError
from widepack.ir.tensor_type import (
    TensorType,
    dtype_in,
    has_floats,
    member_types,
    parse_slot,
    ragged_type,
    rank_of,
    sizes_of,
    tensor_type,
    with_dtypes,
)
from widepack.spec.input_spec import DimExpr

TEXTS = [
    "float32[]",
    "float32[B,3,32*H]",
    "bool[u0]",
    "int64[2*u0,B]",
    "float32[(B + 1)//2,Max(1,u0),4]",
    "float8_e4m3fn[7]",
    "complex32[2]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_type_is_parsed_and_printed_unchanged(text: str) -> None:
    parsed = tensor_type(text)
    assert parsed is not None and str(parsed) == text


def test_sizes_are_numbers_dims_and_expressions() -> None:
    assert sizes_of("float32[B,3,32*H,u0,Max(1,u0)]") == (
        DimExpr("B"),
        3,
        DimExpr("H", 32),
        "u0",
        "Max(1,u0)",
    )
    assert rank_of("float32[]") == 0 and rank_of("float32[Max(1,u0),3]") == 2


@pytest.mark.parametrize("text", ["", "int", "(float32[3], int)", "float32[3]|float32[4]", "float32[3"])
def test_text_that_is_not_one_tensor_has_no_tensor_type(text: str) -> None:
    assert tensor_type(text) is None
    assert (rank_of(text), sizes_of(text), dtype_in(text)) == (0, (), "")


def test_the_type_of_a_slot_is_parsed_strictly() -> None:
    slot = parse_slot("float32[B,3,32*H]")
    assert slot == tensor_type("float32[B,3,32*H]")
    assert slot.shape({"B": 2, "H": 5}) == [2, 3, 160] and slot.numbers is None
    assert parse_slot("int64[2,3]").numbers == (2, 3)
    for wrong in ("float32[u0]", "float32", "(float32[3], int)", "flaot32[3]"):
        with pytest.raises(UsageError):
            parse_slot(wrong)


def test_an_expression_as_size_of_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a number nor a multiple of a dim"):
        _ = TensorType("float32", (3, "u0")).dims


def test_dtype_and_sizes_are_replaced() -> None:
    type_ = parse_slot("bfloat16[B,3]")
    assert str(type_.with_dtype("bool")) == "bool[B,3]"
    assert str(type_.with_sizes([*type_.sizes[:-1], 6])) == "bfloat16[B,6]"
    assert type_.is_floating and type_.is_rounded and not type_.with_dtype("int8").is_rounded
    assert parse_slot("complex64[2]").is_rounded and not parse_slot("complex64[2]").is_floating


def test_type_texts_of_several_values() -> None:
    text = "(float32[3], complex64[B], int)"
    assert has_floats(text) and not has_floats("(int64[3], float)")
    assert with_dtypes(text, {"float32": "float64"}) == "(float64[3], complex64[B], int)"
    assert member_types(ragged_type(["float32[3]", "int"])) == ["float32[3]", "int"]
