"""Tests that the code of the page about new ops gives the members' answers, and that paths on pages exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import assert_equal, member, outputs, run_all
from paths import ROOT

from widepack.costs.counts import other_ops
from widepack.ir import ops
from widepack.ir.op_records import RECORDS, OpRecord, record
from widepack.primitives import find
from widepack.registry.registry import REGISTRY
from widepack.registry.samples import SAMPLES
from widepack.rows.call import MixesRows
from widepack.rows.layout import RowAxis
from widepack.rows.walk import walk
from widepack.runtime.op_costs import cost
from widepack_artifacts.opset import EXTRA, OPS
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

PAGE = (ROOT / "docs/contributing/add-an-op.md").read_text(encoding="utf-8")
PRIMITIVE, STRATEGY = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OP, CONV = "aten.trapezoid.dx", "aten.conv2d.default"


def run(code: str, **known: Any) -> dict[str, Any]:
    """Runs a block of the page as a file of widepack/primitives. Returns its names."""
    space: dict[str, Any] = {
        "__name__": "widepack.primitives.of_the_page",
        "__package__": "widepack.primitives",
        **known,
    }
    exec(
        compile(
            f"from __future__ import annotations\nfrom typing import Any\n{code}", "add-an-op.md", "exec"
        ),
        space,
    )
    return space


def count_compared(op: str, name: str) -> int:
    """Compares a strategy with the op run once for each member. Returns the number of compared samples."""
    found = 0
    for members in (1, 3):
        for where, result, inputs in run_all(op, members):
            if where.endswith(f"strategy {name}"):
                found += 1
                for i, (got, sample) in enumerate(zip(outputs(result, members), inputs, strict=True)):
                    assert_equal(op, got, member(op, sample), f"{where}, member {i}")
    return found


@pytest.fixture
def new_op() -> Iterator[None]:
    """Adds the op of the page from outside of the library, by the one file of the page."""
    assert OP not in OPS and OP not in REGISTRY
    ops.allow(["aten::trapezoid.dx"])
    run(PRIMITIVE)
    yield
    for known, name in ((REGISTRY, OP), (SAMPLES, OP), (RECORDS, "aten.trapezoid")):
        known.pop(name, None)
    EXTRA.clear()
    ops.resolve.cache_clear()


def over_dim(dim: int) -> Program:
    node = Node("y", OP, (Ref("x"),), {"dim": dim})
    return Program((), (Slot("x", "x", "shared", "float32[B,4]"),), (node,), (Output(Ref("y"), "shared"),))


def test_the_op_answers_as_the_members(new_op: None) -> None:
    assert [p.family for p in find("trapezoid.dx")] == ["dim"]
    assert list(REGISTRY[OP].strategies) == ["shifted"]
    assert SAMPLES[OP].__code__.co_filename == "add-an-op.md"
    assert count_compared(OP, "shifted") > 4


def test_rows_costs_and_counts_read_the_record_of_the_op(new_op: None) -> None:
    assert record(OP) == OpRecord(rows="reduction", ops=3)
    assert walk(over_dim(1), "B", [{"B": 5}])[0]["y"] == RowAxis(0)
    with pytest.raises(MixesRows) as mixes:
        walk(over_dim(0), "B", [{"B": 5}])
    assert mixes.value.why == "reduces over the rows"
    x = torch.ones(8, 4)
    y: Any = ops.resolve(OP)(x)
    assert other_ops("trapezoid", ops.resolve(OP), [x], y) == 3 * 8
    assert cost(OP, [x], {}, y) == cost("aten.sum.dim_IntList", [x, [1]], {}, y)


def test_the_strategy_runs_and_answers_as_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY[CONV], "strategies", dict(REGISTRY[CONV].strategies))
    known = run("\n".join(line for line in PRIMITIVE.splitlines() if line.startswith("from ")))
    run(STRATEGY, **{name: known[name] for name in ("Stacked", "WideValue", "Writer", "rank", "strategy")})
    assert list(REGISTRY[CONV].strategies)[-1] == "matmul_1x1"
    assert count_compared(CONV, "matmul_1x1") > 1


def test_the_paths_on_the_pages_exist() -> None:
    pages = PAGE + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = set(re.findall(r"`((?:widepack|artifacts|tests|bench|cli|scripts|docs)/[\w./*]*)`", pages))
    assert {
        "tests/helpers/option_spaces.py",
        "bench/widepack_bench/layers/sweeps.py",
        "widepack/layers/catalog.py",
        "widepack/layers/*.py",
        "widepack/registry/families.py",
        "scripts/docs/result_pages.py",
    } <= places
    assert not [place for place in places if not list(ROOT.glob(place.rstrip("/")))]
