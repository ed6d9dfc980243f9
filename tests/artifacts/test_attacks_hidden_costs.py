"""Tests attacks 62 to 64 of ATTACKS.md: nodes whose work or memory does not show in their sizes, and
operands that stop the processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attacks import SELF, X, refused
from forged import Forged, node, ref

from widepack import load
from widepack.runtime import budget


def full(name: str, shape: list[int], value: float = 1.0, dtype: str = "float32") -> dict[str, Any]:
    return node(name, "aten.full.default", shape, value, dtype={"dtype": dtype}, device=SELF)


def bombs() -> dict[str, list[dict[str, Any]]]:
    """Returns nodes whose operands and results are small, or views, and whose work or memory is not."""
    one, small = full("o", [1]), full("s", [1, 1], 1e-3, "float64")

    def view(name: str, *shape: int) -> dict[str, Any]:
        return node(name, "aten.expand.default", ref("o"), list(shape))

    def often(op: str, *args: Any, times: int = 200) -> list[dict[str, Any]]:
        return [node(f"n{i}", op, *args) for i in range(times)]

    square, ids = (
        view("e", 8000, 8000),
        node("i", "aten._to_copy.default", ref("o"), dtype={"dtype": "int64"}),
    )
    zeros = node("z", "aten.sub.Tensor", ref("i"), ref("i"))
    return {
        "many parts": [one, view("e", 200_000), *often("aten.unbind.int", ref("e"))],
        "many copies": [
            node("r", "aten.arange.default", 7000),
            node("e", "aten.expand.default", ref("r"), [7000, 7000]),
            *often("aten.reshape.default", ref("e"), [-1]),
        ],
        "a product with a view": [
            one,
            view("e", 50000, 50000),
            view("r", 1, 50000),
            node("a", "aten.mm.default", ref("r"), ref("e")),
        ],
        "a product by names": [
            one,
            view("e", 1000, 10**6),
            view("r", 10**6, 1000),
            {
                "name": "a",
                "op": "aten.mm.default",
                "args": [],
                "kwargs": {"mat2": ref("r"), "self": ref("e")},
            },
        ],
        "sums of products": [
            one,
            view("e", 7000, 1, 1000),
            view("r", 1, 7000, 1000),
            node("a", "aten.linalg_vecdot.default", ref("e"), ref("r")),
        ],
        "sums of exponentials": [
            one,
            view("e", 40000, 40000),
            node("a", "aten.logsumexp.default", ref("e"), [1]),
        ],
        "cells": [one, square, *often("aten.rnn_tanh_cell.default", ref("e"), ref("e"), ref("e"), ref("e"))],
        "bags": [
            one,
            view("w", 1, 10000),
            ids,
            zeros,
            node("b", "aten.expand.default", ref("z"), [10**6]),
            *often("aten.embedding_bag.default", ref("w"), ref("b"), ref("z")),
        ],
        "pairs of classes": [
            node("r", "aten.arange.default", 60000),
            node("t", "aten.unsqueeze.default", ref("r"), 0),
            node("f", "aten._to_copy.default", ref("t"), dtype={"dtype": "float32"}),
            *often("aten.multilabel_margin_loss.default", ref("f"), ref("t")),
        ],
        "differences": [one, view("e", 2**30), node("a", "aten.diff.default", ref("e"), 2**30)],
        "many differences": [one, view("e", 10**7), *often("aten.diff.default", ref("e"), 100)],
        "a series": [
            full("v", [2], 3.0, "float64"),
            full("q", [2], -1000000000000000.0 - 0.5, "float64"),
            node("a", "aten.special_zeta.default", ref("v"), ref("q")),
        ],
        "a series of an order": [
            full("q", [2], -1000000000000000.0 - 0.5, "float64"),
            node("a", "aten.polygamma.default", 3, ref("q")),
        ],
        "groups": [
            full("o", [1], 1.0, "float64"),
            view("v", 1, 10**6, 1, 1),
            view("w", 10**6, 1, 1, 1),
            node("a", "aten.conv2d.default", ref("v"), ref("w"), None, [1, 1], [0, 0], [1, 1], 10**6),
        ],
        "filters that are views": [
            one,
            view("v", 1, 50000, 1, 1),
            view("w", 50000, 50000, 1, 1),
            node("a", "aten.conv2d.default", ref("v"), ref("w")),
        ],
        "solutions of copies": [
            one,
            view("e", 2, 1, 1000, 1000),
            view("r", 1, 1000, 1000, 1),
            node("a", "aten.linalg_solve.default", ref("e"), ref("r")),
        ],
        "exponentials of matrices": [
            small,
            node("e", "aten.expand.default", ref("s"), [1200, 1200]),
            *often("aten.linalg_matrix_exp.default", ref("e"), times=3),
        ],
        "features of a product of three": [
            one,
            view("w", 2**30, 1, 1),
            node("a", "aten.bilinear.default", ref("o"), ref("o"), ref("w")),
        ],
        "a layer of a view": [
            one,
            view("v", 1, 1, 50000),
            view("h", 1, 1, 50000),
            view("w", 50000, 50000),
            node(
                "a",
                "aten.rnn_tanh.input",
                ref("v"),
                ref("h"),
                [ref("w"), ref("w")],
                False,
                1,
                0.0,
                False,
                False,
                False,
            ),
        ],
    }


BOMBS = bombs()


@pytest.mark.parametrize("name", BOMBS)
def test_nodes_with_hidden_costs(tmp_path: Path, name: str) -> None:
    text = refused(Forged().add(*BOMBS[name]).save(tmp_path))
    assert any(word in text for word in ("load(limit=", "must be whole", "n is ", "features; up to")), text


def test_the_time_of_computing_sizes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LONGEST_WALK", 0.001)
    nodes = [node(f"n{i}", "aten.diff.default", X, 50, 0) for i in range(3)]
    refused(Forged().add(*nodes).save(tmp_path), "computing the sizes of the nodes up to here took")


SERIES = ("a series", "a series of an order")


@pytest.mark.parametrize("name", SERIES)
def test_a_series_that_never_ends(tmp_path: Path, name: str) -> None:
    refused(Forged().add(*BOMBS[name]).save(tmp_path), "contains -1e+15; numbers below -256 must be whole")


def test_operands_that_stop_the_processor(tmp_path: Path) -> None:
    least, minus = full("q", [2], -(2**63), "int64"), full("r", [2], -1, "int64")
    divided = node("a", "aten.div.Tensor_mode", ref("q"), ref("r"), rounding_mode={"str": "trunc"})
    view = node("e", "aten.expand.default", ref("o"), [64, 1])
    norm = node("n", "aten._weight_norm_interface.default", ref("e"), ref("e"))
    forged = Forged().add(least, minus, divided, full("o", [1]), view, norm)
    assert len(load(forged.save(tmp_path))) == 3


def test_nodes_that_only_a_member_runs(tmp_path: Path) -> None:
    """A cast runs the members alone. Nothing reads these nodes, so no wide program has them."""
    first = node("first", "aten.nonzero.default", X)  # sizes alone do not tell what comes after it
    wide = node("wide", "aten.expand.default", ref("o"), [5000, 5000])
    products = [node(f"m{i}", "aten.mm.default", ref("wide"), ref("wide")) for i in range(20)]
    forged = Forged().add(first, full("o", [1]), wide, *products, start="programs/member.")
    path = forged.save(tmp_path)
    assert len(load(path)) == 3
    refused(path, "the member program 0 of entry forward: node m0", "load(limit=", dtype="float64")
