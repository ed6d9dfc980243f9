"""Tests `scripts/on_device.py`: steps within a time, later calls, the verdict, the tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import device_results
import fleet_results
import pytest
from paths import ROOT
from peer_claims import LAYERS, NETWORKS, network
from row_file import RowFile

import results
from device import running, verdict
from device.record_tests import FORMAT as TESTS_FORMAT
from device.record_tests import VARIABLE
from device.running import DeviceRun, OtherMachine, run_command
from device.steps import STEPS, Plan, Step, chosen, listed
from widepack.errors import UsageError
from widepack_bench.layers.block_sweeps import sweeps
from widepack_bench.layers.sweeps import find
from widepack_bench.suite.rows import ROWS

MACHINE = {"device": "cuda (made up)", "tf32": {"products": False}, "versions": {"torch": "2.13.0"}}


# ---------------------------------------------------------------- steps


def test_the_steps_divide_the_time_and_name_scripts_that_exist() -> None:
    assert sum(step.share for step in STEPS) == pytest.approx(1.0)
    assert [step.name for step in chosen("")] == [step.name for step in STEPS]
    assert [step.name for step in chosen("suite,tests")] == ["tests", "suite"], "in order of worth"
    with pytest.raises(ValueError, match="unknown steps nothing; known: tests, claims"):
        chosen("nothing")
    for device in ("cpu", "cuda"):
        plan = Plan(device, Path("/results"))
        for step in STEPS:
            for command in step.commands(plan):
                scripts = [Path(w) for w in command if w.endswith(".py")]
                assert all(script.is_file() for script in scripts), command
                assert step.name == "tests" or command[command.index("--device") + 1] == device
    assert all(step.decides in listed(plan) for step in STEPS)


def test_every_network_of_the_suite_is_in_a_step() -> None:
    plan = Plan("cuda", Path("/results"))
    (suite,) = chosen("suite")
    rows = [command[command.index("--rows") + 1] for command in suite.commands(plan)]
    named = {name for row in rows for name in row.split(",")} | {network(name).name for name in NETWORKS}
    assert {row.name for row in ROWS} <= named


def test_every_claim_names_what_the_benchmarks_have() -> None:
    assert [s.name for name in LAYERS for s in find(name, sweeps())] == list(LAYERS)
    assert network("mlp-20").members == 20 and network("mlp-b32").members == 100


def test_a_command_is_stopped_at_its_time_with_its_processes(tmp_path: Path) -> None:
    """The command ignores the interruption, and starts another process."""
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2.5); open({str(mark)!r}, 'w').close()"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "GRACE_S", 0.1)
        found = run_command([sys.executable, "-c", code], os.environ, 1.0)
    assert found["stopped"] and found["exit"] != 0 and found["said"] == "started\n"
    time.sleep(max(0.0, 3.0 - (time.monotonic() - begun)))
    assert not mark.exists()


def _step(name: str, *codes: str, share: float = 0.5) -> Step:
    """Returns a step of Python commands. Each gets the folder of the documents as its first argument."""
    return Step(name, name, share, lambda plan: [[sys.executable, "-c", c, str(plan.out)] for c in codes])


CONTINUES = """
import pathlib, sys, time
rows = pathlib.Path(sys.argv[1], "rows")
done = int(rows.read_text()) if rows.exists() else 0
while done < 2:
    done += 1
    rows.write_text(str(done))
    if done == 1:
        time.sleep(60)
"""


def test_a_later_call_continues_what_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.1)
    monkeypatch.setattr(running, "LEAST_S", 0.1)
    plan = Plan("cuda", tmp_path)
    steps = [
        _step("fails", "raise SystemExit('no device')", share=0.1),
        _step("continues", CONTINUES, share=0.1),
        _step("ends", "print('here')", share=0.8),
    ]
    said: list[object] = []
    run = DeviceRun(plan, MACHINE, os.environ)
    assert not run.run(run.waiting(steps, again=False), 12.0, said.append)
    rows = run.document["steps"]
    assert [rows[s.name]["finished"] for s in steps] == [False, False, True]
    assert "no device" in rows["fails"]["runs"][0]["said"] and rows["continues"]["runs"][0]["stopped"]
    assert len(said) == 3 and json.loads((tmp_path / "device.json").read_text())["steps"] == rows

    later = DeviceRun(plan, MACHINE, os.environ)
    waiting = later.waiting(steps, again=False)
    assert [step.name for step in waiting] == ["fails", "continues"]
    assert [step.name for step in later.waiting(steps, again=True)] == ["fails", "continues", "ends"]
    later.run(waiting[1:], 20.0, said.append)
    assert later.document["steps"]["continues"]["finished"] and (tmp_path / "rows").read_text() == "2"
    assert later.document["steps"]["ends"]["finished"] and len(later.document["calls"]) == 2

    with pytest.raises(OtherMachine, match=r"torch 2\.13\.0, and now 2\.12\.0\. Give another folder"):
        DeviceRun(plan, {**MACHINE, "versions": {"torch": "2.12.0"}}, os.environ)


def test_a_step_that_has_no_time_left_is_not_run(tmp_path: Path) -> None:
    run = DeviceRun(Plan("cuda", tmp_path), MACHINE, os.environ)
    assert not run.run([_step("late", "print('here')")], 1.0, lambda line: None)
    assert run.document["steps"]["late"] == {
        "decides": "late", "finished": False, "seconds": 0, "runs": [], "left_out": 1,
    }  # fmt: skip


def test_the_command_line(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "on_device.py")]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*script, *words], capture_output=True, text=True, check=False, cwd=tmp_path)

    assert "give a folder for the documents: -o FOLDER" in run().stderr
    unknown = run("-o", "found", "--device", "cpu", "--steps", "nothing")
    assert unknown.returncode == 2 and unknown.stderr.startswith("unknown steps nothing; known: tests")
    late = run("-o", "found", "--device", "cpu", "--seconds", "1", "--steps", "route")
    assert late.returncode == 1 and "route: not finished after 0 s" in late.stdout
    document = json.loads((tmp_path / "found" / "device.json").read_text())
    assert document["rehearsal"] and document["environment"]["torch_of_the_tests"] == "2.13.0"
    found = json.loads((tmp_path / "found" / "verdict.json").read_text())
    assert (
        found["summary"]["met"] == found["summary"]["not met"] == 0 and found["summary"]["not measured"] > 60
    )


# ---------------------------------------------------------------- the record of tests


def _recorded(folder: Path, text: str) -> dict[str, Any]:
    """Runs pytest with the plugin over a file of tests, and returns the document's tests."""
    (folder / "test_some.py").write_text(text, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "device.record_tests", "."],
        cwd=folder,
        env={
            **os.environ,
            VARIABLE: str(folder / "tests.json"),
            "PYTHONPATH": str(ROOT / "scripts"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        check=False,
    )
    document = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    assert document["format"] == TESTS_FORMAT
    tests: dict[str, Any] = document["tests"]
    return {name.rpartition("::")[2]: row for name, row in tests.items()}


TESTS = """
import os, pytest
def test_good(record_property):
    record_property("compared", 7)
    with open("runs", "a") as file:
        file.write("good ")
def test_bad():
    assert {value} == 1, "a kernel is missing"
@pytest.mark.skip(reason="no device")
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError("teardown")
def test_teardown(broken): pass
def test_ends():
    {ends}
"""


def test_the_record_of_tests_continues(tmp_path: Path) -> None:
    first = _recorded(tmp_path, TESTS.format(value=2, ends="os._exit(3)"))
    assert {name: row["outcome"] for name, row in first.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_teardown": "failed",
        "test_ends": "running",
    }
    assert "a kernel is missing" in first["test_bad"]["text"]
    assert first["test_good"]["properties"] == [["compared", 7]]
    document = json.loads((tmp_path / "tests.json").read_text())
    line = verdict.tests_line(document)
    assert line.figure == 3 and line.state == verdict.NOT_MET and "test_ends" in line.detail

    second = _recorded(tmp_path, TESTS.format(value=1, ends="pass"))
    assert {name: row["outcome"] for name, row in second.items()} == {
        "test_good": "passed",
        "test_bad": "passed",
        "test_skipped": "skipped",
        "test_teardown": "failed",
        "test_ends": "passed",
    }
    assert (tmp_path / "runs").read_text() == "good ", "a test that passed does not run again"


# ---------------------------------------------------------------- rows


def test_a_file_of_rows_continues(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    file = RowFile(path, "test/1", "rows", "cpu")
    file.add("a", {"ratio": 2})
    file.add("b", {"error": "it failed"})
    later = RowFile(path, "test/1", "rows", "cpu")
    assert [later.must_run(key) for key in "abc"] == [False, True, True]
    later.add("b", {"ratio": 3})
    assert json.loads(path.read_text())["rows"] == {"a": {"ratio": 2}, "b": {"ratio": 3}}
    with pytest.raises(UsageError, match="is no document of other"):
        RowFile(path, "test/2", "other", "cpu")
    document = json.loads(path.read_text())
    document["environment"]["device"] = "cuda (made up)"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"measured elsewhere: device cuda \(made up\), and now cpu"):
        RowFile(path, "test/1", "rows", "cpu")


# ---------------------------------------------------------------- the verdict


def _interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def _network(ms: dict[str, float], baselines: dict[str, float], result: str = "holds") -> dict[str, Any]:
    """Returns a row of `peer_networks.py`. ms: of each form, by backend; `auto` among them."""
    fastest = min(baselines, key=lambda name: baselines[name])
    row = {
        "median_ms": ms["auto"],
        "others": {f"widepack[{n}]": {"median_ms": t} for n, t in ms.items() if n != "auto"},
        "baselines": {n: {"median_ms": t} for n, t in baselines.items()},
        "fastest": fastest,
        "verdict": result,
        "roofline": {"floor_ms": 0.5},
    }
    return {"title": "a network", "members": 4, "batch": 8, "report": {"rows": [row]}}


def _layer(name: str, members: int, published: float, programs: dict[str, float]) -> dict[str, Any]:
    ratios = {name: _interval(value) for name, value in programs.items()}
    return {
        "name": name,
        "members": members,
        "published": {"form": "fused", "ratios": {"one module": _interval(published)}, "quiet": True},
        "inference": {"form": "wide", "ratios": ratios, "quiet": False},
    }


def _documents(folder: Path) -> None:
    memory = {"auto": {"part": 0.9}, "auto+graph": {"part": 1.2}}
    claims = {
        "mlp-b32": _network({"auto": 2.0, "auto+graph": 1.0}, {"loop": 50.0, "compiled-loop": 0.8})
        | {"memory": memory},
        "deep-mlp": _network({"auto": 2.0}, {"loop": 8.0}),
        "resblock": _network({"auto": 2.0}, {"loop": 80.0, "compiled-member": 80.0}, "noisy"),
        "resnet18": {"error": "out of memory"},
    }
    layers = {
        "linear, N=4": _layer("linear", 4, 3.0, {"compiled-loop": 1.5, "compiled-member": 0.1}),
        "linear, N=32": _layer("linear", 32, 9.0, {"compiled-loop": 0.7, "cuda-graph-loop": 1.1}),
        "gru, N=32": {"name": "gru", "members": 32, "error": "its process ended"},
    }
    load = {"weights_bytes": 10**10, "load_bytes_per_s": 2e10, "pinned_bytes_per_s": 4e10, "part": 0.5}
    fleet: dict[str, Any] = {
        "members": 32,
        "width": 768,
        "form": "fleet",
        "fastest": "merged",
        "ratio": _interval(5.0),
    }
    written: dict[str, dict[str, Any]] = {
        "claims": {"rows": claims},
        "layers": {"rows": layers},
        "suite": {"rows": {"vit, 1 thread": _network({"auto": 3.0}, {"loop": 2.0})}},
        "load": {"rows": {"10 GB": load}},
        "fleets": {"rows": {"768,1,32,8: 1 x 16": fleet | {"ratio": _interval(0.5)}, "768: 1 x 1": fleet}},
        "route": {
            "rows": {"a": {"ratio": _interval(4.0)}, "b": {"ratio": _interval(0.25)}, "c": {"error": ""}}
        },
        "tests": {"selected": 2, "tests": {"a": {"outcome": "passed"}, "b": {"outcome": "skipped"}}},
        "device": {"rehearsal": False},
    }
    where = {**MACHINE, "threads": 1, "date": "2026-01-01"}
    for name, document in written.items():
        (folder / f"{name}.json").write_text(json.dumps({"environment": where, **document}))


def test_the_verdict_decides_each_line(tmp_path: Path) -> None:
    _documents(tmp_path)
    document = verdict.verdict(tmp_path)
    lines = {line["name"]: line for line in document["lines"]}

    def found(*names: str) -> list[tuple[Any, str]]:
        return [(lines[name]["figure"], lines[name]["state"]) for name in names]

    assert found("tests/gpu") == [(0.0, "met")]
    assert found(
        "mlp-b32 over loop, published by WideCompiler", "deep-mlp over loop, published by WideCompiler"
    ) == [(50.0, "met"), (4.0, "not met")]
    assert found("mlp-b32 over the fastest baseline", "vit, 1 thread over the fastest baseline") == [
        (0.8, "not met"),
        (2 / 3, "not met"),
    ]
    assert (
        found(
            "resblock over compiled-member, published by WideCompiler",
            "resnet18 over loop, published by WideCompiler",
            "gru, published way",
        )
        == [(None, "not measured")] * 3
    ), "a row that was refused as noisy, and rows that failed"
    assert lines["resnet18 over loop, published by WideCompiler"]["detail"] == "out of memory"
    assert found("linear, published way", "linear, one program") == [(9.0, "met"), (0.7, "not met")]
    assert lines["linear, one program"]["detail"] == "N=32, wide against compiled-loop, noisy"
    assert found("time-weighted floor") == [(1.5 / 6.0, "measured")]
    assert found("peak memory over weights and N times one member's activations") == [(1.2, "not met")]
    assert found(verdict.LOAD) == [(0.5, "measured")]
    assert found("32 fine-tunes of width 768 at one token, over merged") == [(5.0, "met")]
    assert found("route over the fastest baseline") == [(1.0, "met")]
    assert sum(document["summary"].values()) == len(lines) == len(document["lines"])
    assert "| deep-mlp over loop, published by WideCompiler | 4 | at least 6.2 | not met |" in verdict.table(
        document
    )


@pytest.mark.parametrize(
    ("document", "figure", "state"),
    [
        ({}, None, "not measured"),
        ({"selected": 1, "tests": {"a": {"outcome": "skipped"}}}, None, "not measured"),
        ({"selected": 3, "tests": {"a": {"outcome": "passed"}}}, 2.0, "not met"),
    ],
)
def test_tests_that_did_not_run_do_not_pass(document: Any, figure: float | None, state: str) -> None:
    line = verdict.tests_line(document)
    assert (line.figure, line.state) == (figure, state)


def test_tables_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(fleet_results, "ROOT", tmp_path)
    monkeypatch.setattr(device_results, "ROOT", tmp_path)
    parts: Sequence[str] = [part() for part in device_results.PARTS.values()]
    assert all(part.startswith("There are no figures yet.") for part in parts)
    folder = tmp_path / "bench" / "results" / "device"
    folder.mkdir(parents=True)
    _documents(folder)
    (folder / "verdict.json").write_text(json.dumps(verdict.verdict(folder)))
    document = json.loads((folder / "verdict.json").read_text())
    document["environment"] = {**MACHINE, "threads": 1}
    (folder / "verdict.json").write_text(json.dumps(document))
    lines, networks, layers = (part() for part in device_results.PARTS.values())
    assert "| route over the fastest baseline | 1 | at least 1 | met |" in lines and "cuda (made up)" in lines
    assert "| a network | 4 | 8 | 50.0 ms | 1.00 ms, auto+graph | compiled-loop, 800 us | 0.80 |" in networks
    assert "- Not measured: resnet18: out of memory" in networks
    assert "| linear | 8.8 | 9.0 (N=32, fused) | 0.70 |" in layers
