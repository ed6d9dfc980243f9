"""Tests the checks of arguments that are known before any value is."""

from __future__ import annotations

from typing import Any

import pytest

from widepack.errors import ArtifactError
from widepack.runtime.graph_module import check_arguments
from widepack_artifacts.program import Node, Ref, Tag


@pytest.mark.parametrize("name", ["dtype", "layout", "device"])
def test_a_value_is_no_dtype_no_layout_and_no_device(name: str) -> None:
    node = Node("f", "aten.full.default", ([4], 1.0), {name: Ref("b")})
    with pytest.raises(ArtifactError, match=f"node f .* has a value as {name}; only a literal is allowed"):
        check_arguments(node)


def test_a_value_by_its_position_is_no_dtype_either() -> None:
    node = Node("f", "aten.softmax.int", (Ref("x"), -1, Ref("b")))
    with pytest.raises(ArtifactError, match="has a value as dtype"):
        check_arguments(node)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([Tag("dtype", "float32"), 200], 0), "does not read a part of one value"),
        ((Ref("x"), Ref("i")), "has a value as index"),
        ((Ref("x"),), "does not read a part of one value"),
    ],
)
def test_a_part_is_one_of_a_value_at_a_literal_place(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_arguments(Node("d", "operator.getitem", args))


def test_literals_and_values_of_tensors_pass() -> None:
    check_arguments(Node("f", "aten.full.default", ([Ref("b")], 1.0), {"dtype": Tag("dtype", "float32")}))
    check_arguments(Node("g", "operator.getitem", (Ref("x"), 0)))
    with pytest.raises(ArtifactError, match="the keyword 'other' to aten.relu.default"):
        check_arguments(Node("r", "aten.relu.default", (Ref("x"),), {"other": 1}))
