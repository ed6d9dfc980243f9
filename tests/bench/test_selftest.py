"""Tests the exit codes and the messages of `widepack selftest`, and that it finds errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from widepack.ir.values import Stacked, Value
from widepack.registry.registry import REGISTRY, Strategy
from widepack_bench import selftest
from widepack_bench.selftest import check_blocks, check_primitives
from widepack_cli.main import cli


def widepack(*words: str) -> Result:
    return CliRunner().invoke(cli, ["selftest", *words], prog_name="widepack")


def only(monkeypatch: pytest.MonkeyPatch, *ops: str) -> None:
    """Limits the command to these ops and one block."""
    primitives, blocks = check_primitives, check_blocks
    monkeypatch.setattr(selftest, "check_primitives", lambda preset, progress: primitives(preset, ops))
    monkeypatch.setattr(selftest, "check_blocks", lambda preset, progress: blocks(preset, ["mlp_embedder"]))


def test_correct_strategies_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "aten.linear.default", "aten.embedding.default")
    result = widepack()
    assert result.exit_code == 0, result.output
    assert (
        " strategies of 2 ops are right, in " in result.stdout
        and "1 of 1 block are right: mlp_embedder" in result.stdout
    )
    document = json.loads(widepack("--primitives", "--json").stdout)
    assert document["holds"] and document["format"] == "widepack.selftest/1" and not document["blocks"]
    assert {"device", "versions", "commit"} <= document["environment"].keys()
    rows = {(row["name"], row["strategy"]): row["cases"] for row in document["primitives"]}
    assert rows["aten.linear.default", "bmm"] > 0 and rows["aten.linear.default", "sequential"] > 0


def swapped(w: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives each member the answer of another member."""
    right = REGISTRY["aten.linear.default"].strategies["bmm"].rule(w, *args, **kwargs)
    return Stacked(Value(None, right.value.fake.flip(0)))


def rounded(w: Any, *args: Any, **kwargs: Any) -> Any:
    """Rounds the answer, as a kernel in bfloat16 would."""
    right = REGISTRY["aten.linear.default"].strategies["bmm"].rule(w, *args, **kwargs)
    return Stacked(Value(None, right.value.fake.to(torch.bfloat16).to(right.value.fake.dtype)))


def refusing(w: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("could not create a primitive")


@pytest.mark.parametrize("rule", [swapped, rounded, refusing])
def test_a_wrong_strategy_is_named(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "aten.linear.default")
    before = REGISTRY["aten.linear.default"].strategies["bmm"].when
    monkeypatch.setitem(
        REGISTRY["aten.linear.default"].strategies, "broken", Strategy("broken", rule, before, "")
    )
    result = widepack("--primitives")
    assert result.exit_code == 1
    assert "wrong: aten.linear.default broken: sample " in result.stdout
    assert "wrong: aten.linear.default bmm" not in result.stdout
    assert "1 check of " in result.stderr and "Traceback" not in result.stderr
    if rule is refusing:
        assert "could not create a primitive" in result.stdout


def test_a_block_that_does_not_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import widepack as library

    def build(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(library, "build", build)
    result = widepack("--blocks")
    assert result.exit_code == 1
    assert "wrong: mlp auto, wide, loop: RuntimeError: no compiler" in result.stdout


@pytest.mark.parametrize("family", ["recurrent", "dropout", "norm", "fft"])
def test_families(family: str) -> None:
    ops = [p.op for p in REGISTRY.values() if p.family == family]
    checked, _ = check_primitives("ci", ops)
    assert ops and {c.name for c in checked} == set(ops)
    assert [c for c in checked if c.wrong] == []


def test_an_unknown_preset_is_a_usage_error() -> None:
    assert widepack("-p", "tiny").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ci", "quick"])
def test_all(preset: str) -> None:
    checked, _ = check_primitives(preset)
    assert [c for c in checked if c.wrong] == []
    assert {c.name for c in checked} == set(REGISTRY)


@pytest.mark.slow
def test_all_blocks() -> None:
    assert [b for b in check_blocks() if b.wrong] == []
