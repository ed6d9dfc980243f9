"""Tests `scripts/on_device.py`: steps within a time, later calls, the record of tests, rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from peer_claims import LAYERS, NETWORKS, network
from runner import FAILED, RowFile, child, in_turns, parser, run

from device import running, verdict
from device.record_tests import FORMAT as TESTS_FORMAT
from device.record_tests import VARIABLE
from device.running import DeviceRun, OtherMachine, run_command
from device.steps import STEPS, Plan, Step, chosen, listed
from widepack.errors import UsageError
from widepack.kernels.triton_kernels.available import TF32_SWITCH
from widepack_bench.layers.block_sweeps import sweeps
from widepack_bench.layers.sweeps import find
from widepack_bench.suite.rows import ROWS

MACHINE = {"device": "cuda (made up)", "tf32": {"products": False}, "versions": {"torch": "2.13.0"}}


# ---------------------------------------------------------------- steps


def test_the_steps_divide_the_time_and_name_scripts_that_exist() -> None:
    assert sum(step.share for step in STEPS) == pytest.approx(1.0)
    assert [step.name for step in chosen("")] == [step.name for step in STEPS]
    assert [step.name for step in chosen("suite,tests")] == ["tests", "suite"], "in order of worth"
    with pytest.raises(ValueError, match="unknown steps nothing; known: tests, backends, swaps"):
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


@pytest.mark.extended
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


def test_tf32_is_off_for_all_steps_but_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.1)
    monkeypatch.setattr(running, "LEAST_S", 0.1)
    plan = Plan("cuda", tmp_path)
    environment = running.environment_of_steps(plan, [], tf32=False)
    assert TF32_SWITCH not in running.environment_of_steps(plan, [], tf32=True)
    assert [step.name for step in STEPS if step.tf32] == ["tests"]
    code = f"import os; print(os.environ.get({TF32_SWITCH!r}))"
    steps = [_step("measures", code), replace(_step("tests", code), tf32=True)]
    run = DeviceRun(plan, MACHINE, environment)
    assert run.run(steps, 20.0, lambda line: None)
    said = {name: row["runs"][0]["said"] for name, row in run.document["steps"].items()}
    assert said == {"measures": "0\n", "tests": "None\n"}


def test_compiled_code_is_in_a_folder_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = running.compiled_folder()
    assert folder == tmp_path / "cache" / "widepack" / "device" == running.compiled_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    environment = running.environment_of_steps(Plan("cuda", tmp_path), [], tf32=False)
    assert environment["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")

    def elsewhere() -> bool:
        found = running.compiled_folder()
        assert found.stat().st_mode & 0o777 == 0o700 and found != running.compiled_folder()
        return found.parent == tmp_path

    folder.chmod(0o777)
    assert elsewhere(), "other users may write here"
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert elsewhere(), "another user's"
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert elsewhere(), "a link"
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert elsewhere(), "no folder can be made"


def test_a_step_that_has_no_time_left_is_not_run(tmp_path: Path) -> None:
    run = DeviceRun(Plan("cuda", tmp_path), MACHINE, os.environ)
    assert not run.run([_step("late", "print('here')")], 1.0, lambda line: None)
    assert run.document["steps"]["late"] == {
        "decides": "late", "finished": False, "seconds": 0, "runs": [], "left_out": 1,
    }  # fmt: skip


@pytest.mark.extended
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
    line = verdict.tests_line(document, rehearsal=False)
    assert line.figure == 3 and line.state == verdict.NOT_MET and "test_ends" in line.detail
    assert line.missing == "1 skipped: no device"

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


def test_a_run_measures_what_is_missing(tmp_path: Path) -> None:
    path, measured = tmp_path / "rows.json", []
    options = parser("Measures nothing.\n\n    more", "nothing.json", seconds=1.0)

    def case(key: str, row: dict[str, Any]) -> dict[str, Any]:
        measured.append(key)
        if "raised" in row:
            raise ValueError(row["raised"])
        return row

    def once(*words: str, raised: bool) -> int:
        rows: dict[str, dict[str, Any]] = {"a": {"ms": 1.0}, "b": {"raised": "no"} if raised else {"ms": 3.0}}
        given = options.parse_args(["-o", str(path), *words])
        cases = {key: partial(case, key, row) for key, row in rows.items()}
        return run(given, cases, summary=lambda found: {"ms": sum(r["ms"] for r in found)}, members=4)

    assert once(raised=True) == FAILED
    document = json.loads(path.read_text())
    assert (document["format"], document["what"]) == ("widepack.nothing/1", "Measures nothing.")
    assert document["rows"]["b"]["error"] == "ValueError: no" and document["rows"]["a"]["ms"] == 1.0
    assert document["summary"] == {"ms": 1.0} and document["members"] == 4
    assert once(raised=False) == 0 and measured == ["a", "b", "b"]
    assert json.loads(path.read_text())["summary"] == {"ms": 4.0}
    assert once("--only", "a", "--again", raised=False) == 0 and measured[3:] == ["a"]


def test_contestants_in_processes_of_their_own_take_turns() -> None:
    code = "import json, os, sys; print('other'); print(json.dumps([sys.argv[1], os.environ.get('A')]))"

    def once(kind: str, number: int) -> Any:
        return number, child(code, kind, variables={"A": "1" if kind == "one" else None})

    found = in_turns(["one", "two"], once, 2)
    assert found == {kind: [(n, [kind, a]) for n in (0, 1)] for kind, a in (("one", "1"), ("two", None))}
    with pytest.raises(RuntimeError, match="no device"):
        child("raise SystemExit('no device')")
