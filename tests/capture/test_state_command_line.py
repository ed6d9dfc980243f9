"""Tests state on the command line and in the benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import nn

from capture.state_members import CARRIED, QUICK, TWO, Cached, Cell, save
from widepack import build
from widepack_bench import bench
from widepack_cli.main import cli


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words])


def test_the_command_line(tmp_path: Path) -> None:
    for name, kind in (("net", "Cached"), ("other", "Counts")):
        (tmp_path / f"{name}.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"from state_members import {kind} as make\n"
        )
    paths = save(tmp_path, Cached)
    model = ["--model", f"{tmp_path}/net.py:make"]
    words = ["build", *paths, "-o", f"{tmp_path}/e.wide", *model, "--input", "x=float32[B,8]", "--no-pt2"]
    done = run(*words)
    assert done.exit_code == 1
    assert "--state window" in done.output
    done = run(*words, *(w for name in CARRIED for w in ("--state", name)))
    assert done.exit_code == 0, done.output
    shown = run("inspect", tmp_path / "e.wide").output
    assert "state   window: float32[3,8], one for each member; begins as the weight window" in shown
    assert "input   x: float32[B,8]" in shown
    assert "input   window" not in shown
    assert json.loads(run("inspect", tmp_path / "e.wide", "--json").output)["summary"]["state"]
    checked = run("verify", tmp_path / "e.wide", *paths, *model)
    assert checked.exit_code == 0, checked.output
    assert "two steps" in checked.output
    other = run("verify", tmp_path / "e.wide", "--model", f"{tmp_path}/other.py:make")
    assert other.exit_code == 1
    assert "step 2: output 0" in other.output
    assert run("trace", tmp_path / "e.wide").exit_code == 0
    timed = run("bench", tmp_path / "e.wide", "--batch", "2", "--budget", "0.2", *model)
    assert timed.exit_code == 2, timed.output
    assert "forward carries state (running.mean, window, steps, last)" in timed.output
    (tmp_path / "widepack.toml").write_text(
        f'model = "{tmp_path}/net.py:make"\ninput = "x=float32[B,8]"\nstate = {json.dumps(CARRIED)}\n'
    )
    config = tmp_path / "widepack.toml"
    assert run("build", *paths, "--dry-run", "--config", config).exit_code == 0


@pytest.mark.extended
@pytest.mark.parametrize("pattern", ["shared", pytest.param("each", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "specs", "state"),
    [
        (Cached, ["x=float32[B,8]"], CARRIED),
        pytest.param(Cell, ["x=float32[B,8]", "h=float32[B,8]"], ["h=1"], marks=pytest.mark.slow),
    ],
)
def test_bench_begins_every_call_with_one_state(
    make: Callable[[int], nn.Module], specs: list[str], state: list[str], pattern: str, tmp_path: Path
) -> None:
    build(save(tmp_path, make), tmp_path / "e.wide", model=make, inputs=specs, state=state, **QUICK)
    how: Any = {"batches": (2, 3), "baselines": ("loop", "vmap"), "budget_s": 0.2, "threads": 1}
    report = bench(tmp_path / "e.wide", pattern=pattern, **how)
    assert [r.batch for r in report.rows] == [2, 3]
    assert all("loop" in [t.name for t in r.timings] for r in report.rows)


def test_an_artifact_without_state_has_no_key_of_it(tmp_path: Path) -> None:
    build(save(tmp_path, Cell), tmp_path / "e.wide", model=Cell, inputs=TWO, **QUICK)
    data = json.loads((tmp_path / "e.wide/manifest.json").read_bytes())
    assert data["state"] == []
    assert "state" not in data["entries"]["forward"]
