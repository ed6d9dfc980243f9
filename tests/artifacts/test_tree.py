"""Tests the trees that describe inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack_artifacts import tree
from widepack_artifacts.errors import ArtifactError


def numbered(shape: Any, count: list[int]) -> tree.Tree:
    """Returns a tree of nested lists and dicts, with numbered leaves."""
    if shape is None:
        count[0] += 1
        return {"leaf": count[0] - 1}
    if isinstance(shape, dict):
        return {"dict": [[k, numbered(v, count)] for k, v in shape.items()]}
    if isinstance(shape, (list, tuple)):
        return {"list" if isinstance(shape, list) else "tuple": [numbered(v, count) for v in shape]}
    return {"const": shape}


SHAPES = st.recursive(
    st.none() | st.integers(0, 3) | st.booleans() | st.text("ab", max_size=2),
    lambda v: (
        st.lists(v, max_size=3)
        | st.lists(v, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), v, max_size=3)
    ),
    max_leaves=12,
)


@given(SHAPES)
def test_a_tree_rebuilds_the_described_value(shape: Any) -> None:
    count = [0]
    described = numbered(shape, count)
    tree.check(described, count[0])
    leaves = [object() for _ in range(count[0])]
    flat = iter(leaves)

    def filled(value: Any) -> Any:
        if value is None:
            return next(flat)
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        return type(value)(filled(v) for v in value) if isinstance(value, (list, tuple)) else value

    assert tree.build(described, leaves, lambda name, rows: (name, rows)) == filled(shape)
    assert sorted(tree.paths(described)) == tree.leaves(described) == list(range(count[0]))


def test_names_of_leaves() -> None:
    described = {
        "output": [
            "Result",
            [["logits", {"leaf": 0}], ["boxes", {"tuple": [{"leaf": 1}, {"const": None}, {"leaf": 2}]}]],
        ]
    }
    tree.check(described, 3)
    assert tree.paths(described) == {0: "logits", 1: "boxes.0", 2: "boxes.2"}
    assert tree.paths({"leaf": 0}) == {0: ""}
    assert tree.paths({"leaf": 0}, "x") == {0: "x"}
    assert tree.build(described, ["a", "b", "c"], lambda name, rows: (name, rows)) == (
        "Result",
        [("logits", "a"), ("boxes", ("b", None, "c"))],
    )


def deep(levels: int) -> Any:
    described: Any = {"const": None}
    for _ in range(levels):
        described = {"list": [described]}
    return described


@pytest.mark.parametrize(
    "value",
    [
        None, 3, [], {}, {"leaf": 1}, {"leaf": -1}, {"leaf": True}, {"leaf": 0.0},
        {"leaf": "0"}, {"leaf": 0, "list": []}, {"call": "f"},
        {"list": {}}, {"list": [3]}, {"tuple": [{"leaf": 9}]}, {"dict": {"a": {"leaf": 0}}},
        {"dict": [["a"]]}, {"dict": [[None, {"leaf": 0}]]},
        {"dict": [[["a"], {"leaf": 0}]]}, {"output": []}, {"output": [3, []]}, {"output": ["R", {}]},
        {"output": ["R", [["a", 3]]]},
        {"dict": [["a", {"leaf": 0}], ["a", {"const": 1}]]}, {"dict": [[True, {"leaf": 0}]]},
        {"output": ["R\x1b", []]}, {"output": ["R", [["a\u202e", {"leaf": 0}]]]},
        {"dict": [["a" * 1001, {"leaf": 0}]]}, {"output": ["a" * 1001, []]},
        {"output": ["R", [[1, {"leaf": 0}], [1, {"const": 1}]]]},
        {"const": []}, {"const": {}}, deep(33), deep(100),
    ],
)  # fmt: skip  # one line for each kind
def test_invalid_trees_are_refused(value: Any) -> None:
    with pytest.raises(ArtifactError, match="tree: "):
        tree.check(value, 1)


def test_the_documented_depth_is_accepted() -> None:
    tree.check(deep(32), 0)
