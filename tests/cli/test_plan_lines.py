"""Tests the words for plans: which plan runs at which batch, once."""

from __future__ import annotations

from typing import Any

import pytest

from widepack_artifacts.wide_program import WideProgram
from widepack_cli.shared.plan_lines import PlanRow, in_words, joined, stored_lines

HERE, FILE = "AMD EPYC, AVX512", "programs/p.json"


def row(least: int, most: int | None, strategy: str, members: Any = None, **plan: Any) -> WideProgram:
    choices = {"a": [strategy, "why"], "b": [strategy, "why"]}
    regions = [{"strategy": "loop", "nodes": ["c"]}] if strategy == "bmm" else []
    return WideProgram(
        plan.pop("device", "cpu"),
        "shared",
        FILE,
        (least, most),
        {"choices": choices, "regions": regions, **plan},
        members,
    )


@pytest.mark.parametrize(
    ("strategies", "backend", "words"),
    [
        ({"bmm": 2, "pointwise": 1}, "", "all members at once"),
        ({"bmm": 2}, "eager", "all members at once"),
        ({"bmm": 2}, "compile", "all members at once on compile"),
        ({"loop": 3}, "onnxruntime", "one member after the other on onnxruntime"),
        ({"loop": 2, "sequential": 1}, "", "one member after the other"),
        ({"loop": 1, "bmm": 2}, "", "all members at once, with 1 op one member after the other"),
        ({"sequential": 2, "bmm": 2}, "", "all members at once, with 2 ops one member after the other"),
        ({}, "", "all members at once"),
    ],
)
def test_plans_in_words(strategies: dict[str, int], backend: str, words: str) -> None:
    assert in_words(strategies, backend) == words


def test_neighbours_of_one_text_are_joined() -> None:
    rows = [
        PlanRow(17, None, "a", (2.0, 2.0)),
        PlanRow(1, 2, "a", (4.0, 4.0)),
        PlanRow(3, 16, "a", (3.0, 3.0)),
    ]
    assert joined(rows) == [PlanRow(1, None, "a", (2.0, 4.0))]
    assert joined([PlanRow(1, 2, "a"), PlanRow(5, 5, "a")]) == [PlanRow(1, 2, "a"), PlanRow(5, 5, "a")]
    assert joined([PlanRow(1, 2, "a", (2.0, 2.0)), PlanRow(3, None, "a")]) == [PlanRow(1, None, "a")]
    texts = [
        r.batches for r in (PlanRow(1, None, ""), PlanRow(2, None, ""), PlanRow(5, 5, ""), PlanRow(1, 4, ""))
    ]
    assert texts == ["any batch", "batch 2 and more", "batch 5", "batch 1 to 4"]


def test_each_batch_has_one_line_on_each_machine() -> None:
    """A load takes the measured plans on their machine, and never those that were predicted for it."""
    measured: dict[str, Any] = {"machine": HERE, "threads": 1, "predicted": HERE}
    rows = [
        row(1, 6, "merged", predicted=HERE),
        row(7, None, "one_gemm", predicted=HERE),
        row(1, None, "streamed", device="cuda"),
        row(1, 2, "loop", backend="onnxruntime", **measured),
        row(1, 2, "turned", **measured),
        row(3, 16, "bmm", **measured),
        row(17, None, "bmm", **measured),
        row(1, None, "split", predicted="another"),
        row(1, None, "turned", **{**measured, "threads": 4}),
    ]
    assert stored_lines(rows) == [
        f"plans   cpu, shared, measured on {HERE} with 1 thread",
        "          batch 1 to 2: loop 2, backend onnxruntime; without that backend turned 2",
        "          batch 3 and more: bmm 2, loop 1",
        f"plans   cpu, shared, measured on {HERE} with 4 threads",
        "          any batch: turned 2",
        "plans   cpu, shared, predicted for another",
        "          any batch: split 2",
        "plans   cuda, shared",
        "          any batch: streamed 2",
    ]


def test_plans_that_were_not_measured_and_parts_of_the_members() -> None:
    rows = [row(1, None, "split", (1, 2)), row(1, None, "turned", predicted=HERE)]
    assert stored_lines(rows) == [
        "plans   cpu, shared, members 1 to 2",
        "          any batch: split 2",
        f"plans   cpu, shared, predicted for {HERE}",
        "          any batch: turned 2",
    ]
    rows = [row(1, None, "split", machine=HERE, threads=2), row(1, None, "turned")]
    assert stored_lines(rows)[2] == "plans   cpu, shared, on other machines"
