"""Tests the memory that a call takes anew: where the C library has given it back."""

from __future__ import annotations

import pytest
from small import node, program

from widepack.planning.call_memory import LEAST_BLOCK, MOST_BLOCK, bytes_given_back
from widepack_artifacts.program import Program, Ref


def chain(*ops: str, output: str = "") -> Program:
    """Returns a program in which each node reads the one before it."""
    names = [f"n{i}" for i in range(len(ops))]
    nodes = [node(n, op, Ref(before), out="float32[B]") for n, op, before in zip(names, ops, ["x", *names])]
    return program({}, {"x": "float32[B]"}, nodes, [output or names[-1]])


def test_two_results_at_the_same_time_stay_with_the_process() -> None:
    """Twice the largest block is kept."""
    net = chain(*["relu"] * 5)
    for size in (1.0, LEAST_BLOCK, 4.0 * LEAST_BLOCK):
        assert bytes_given_back(net, {f"n{i}": size for i in range(5)}) == 0


def test_more_results_at_the_same_time_are_given_back_together() -> None:
    net = chain(*["relu"] * 5, output="n0")  # the first result lives to the end
    size = 2.0 * LEAST_BLOCK
    assert bytes_given_back(net, {f"n{i}": size for i in range(5)}) == 3 * size
    assert bytes_given_back(net, {f"n{i}": size / 8 for i in range(5)}) == 0


def test_a_view_keeps_what_it_views() -> None:
    nodes = [
        node("a", "relu", Ref("x"), out="float32[B]"),
        node("v", "alias", Ref("a"), out="float32[B]"),
        node("b", "relu", Ref("x"), out="float32[B]"),
        node("c", "relu", Ref("b"), out="float32[B]"),
        node("d", "add.Tensor", Ref("c"), Ref("v"), out="float32[B]"),
    ]
    net = program({}, {"x": "float32[B]"}, nodes, ["d"])
    size = float(LEAST_BLOCK)
    assert bytes_given_back(net, dict.fromkeys("abcd", size)) == 3 * size
    assert bytes_given_back(net, {"b": size, "c": size, "d": size}) == 0


@pytest.mark.parametrize("count", [2, 9])
def test_larger_blocks_are_always_new_and_do_not_count(count: int) -> None:
    assert bytes_given_back(chain(*["relu"] * count), {f"n{i}": MOST_BLOCK + 1.0 for i in range(count)}) == 0
