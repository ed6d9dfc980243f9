"""Tests the functions that visit the arguments of nodes."""

from __future__ import annotations

import torch

from widepack.ir.encoding import decode, encode, iter_arguments, map_arguments
from widepack_artifacts.program import Ref, Tag

ARGS = (1, [Ref("x"), (2, None)], {"dtype": Tag("dtype", "int8"), "sizes": [3, slice(4)]})


def test_every_leaf_is_visited_once_in_order() -> None:
    assert list(iter_arguments(ARGS)) == [1, Ref("x"), 2, None, Tag("dtype", "int8"), 3, slice(4)]


def test_a_map_keeps_the_structure_or_returns_lists() -> None:
    assert map_arguments(ARGS, lambda a: a) == ARGS
    doubled = map_arguments((1, [2, (3,)], {"k": 4}), lambda a: 2 * a)
    assert doubled == (2, [4, (6,)], {"k": 8})
    assert map_arguments((1, [2, (3,)]), lambda a: 2 * a, as_lists=True) == [2, [4, [6]]]


def test_tags_are_converted_to_torch_and_back() -> None:
    stored = [Tag("dtype", "int8"), Tag("layout", "strided"), Tag("memory_format", "channels_last"), [1, 2.0]]
    given = decode(stored, torch.device("cpu"))
    assert given == [torch.int8, torch.strided, torch.channels_last, [1, 2.0]]
    assert encode(given) == stored
    assert encode(tuple(given)) == stored
