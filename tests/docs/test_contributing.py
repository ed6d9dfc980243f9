"""Tests that the code in CONTRIBUTING.md gives the members' answers, and that the paths on the page exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
from oracle import assert_equal, member, outputs, run_all
from paths import ROOT

from widepack.registry.registry import REGISTRY, Primitive
from widepack.registry.samples import SAMPLES

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PRIMITIVE, STRATEGY = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COSINE, CONV = "aten.cosine_similarity.default", "aten.conv2d.default"


def run(code: str, **known: Any) -> dict[str, Any]:
    """Runs a block of the page as a file of widepack/primitives. Returns its names."""
    space: dict[str, Any] = {
        "__name__": "widepack.primitives.of_the_page",
        "__package__": "widepack.primitives",
        **known,
    }
    exec(
        compile(
            f"from __future__ import annotations\nfrom typing import Any\n{code}", "CONTRIBUTING.md", "exec"
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


def test_the_primitive_runs_and_answers_as_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        REGISTRY, COSINE, Primitive(COSINE, "distance", "CONTRIBUTING.md")
    )  # widepack already has this op
    monkeypatch.delitem(SAMPLES, COSINE)
    run(PRIMITIVE)
    assert list(REGISTRY[COSINE].strategies) == ["shifted"]
    assert SAMPLES[COSINE].__code__.co_filename == "CONTRIBUTING.md"
    assert count_compared(COSINE, "shifted") > 8


def test_the_strategy_runs_and_answers_as_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY[CONV], "strategies", dict(REGISTRY[CONV].strategies))
    known = run("\n".join(line for line in PRIMITIVE.splitlines() if line.startswith("from ")))
    run(STRATEGY, **{name: known[name] for name in ("Stacked", "WideValue", "Writer", "rank", "strategy")})
    assert list(REGISTRY[CONV].strategies)[-1] == "matmul_1x1"
    assert count_compared(CONV, "matmul_1x1") > 1


def test_the_paths_on_the_page_exist() -> None:
    places = set(re.findall(r"`((?:widepack|artifacts|tests|bench|cli|scripts|docs)/[\w./*]*)`", PAGE))
    assert {
        "tests/helpers/option_spaces.py",
        "bench/widepack_bench/layers/sweeps.py",
        "widepack/layers/catalog.py",
        "widepack/layers/*.py",
        "widepack/registry/families.py",
        "scripts/docs/result_pages.py",
    } <= places
    assert not [place for place in places if not list(ROOT.glob(place.rstrip("/")))]
