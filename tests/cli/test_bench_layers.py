"""Tests `widepack bench-layers`: names, exit codes, messages and the document.

Also tests which rows are stored if a row fails or the run is stopped.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from widepack.errors import UsageError
from widepack.layers.catalog import LAYERS
from widepack.tuning import tune as tuner
from widepack_bench.layers import rows as primitive_rows
from widepack_bench.layers import run
from widepack_bench.layers.block_sweeps import LARGE, sweeps
from widepack_bench.layers.in_memory import InMemory, inputs, members
from widepack_bench.layers.reference import LayerReference
from widepack_bench.layers.run import run_layers
from widepack_bench.layers.sweeps import SWEEPS, find
from widepack_bench.layers.table import markdown, summary, table
from widepack_bench.layers.tuned import TuneRequest
from widepack_bench.measure.answers import leaves
from widepack_bench.models.blocks import BLOCKS
from widepack_bench.processes.fresh import ProcessEnded, lines_of_fresh_process
from widepack_cli.main import cli


def widepack(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words], prog_name="widepack")


def refused(code: int, *words: str | Path) -> str:
    result = widepack(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return result.stderr.rpartition("Error: ")[2].strip()


def test_list() -> None:
    result = widepack("bench-layers")
    assert result.exit_code == 0
    for words in ("conv2d", "attention, mha, selfattention", "takes names, aliases and families"):
        assert words in result.stdout
    listed = json.loads(widepack("bench-layers", "--json").stdout)
    assert [row["name"] for row in listed] == [s.name for s in sweeps()]


def test_invalid_command_lines_are_refused() -> None:
    assert "no primitive 'covn2d', did you mean conv2d?" in refused(2, "bench-layers", "covn2d")
    assert "is not a list of positive integers" in refused(2, "bench-layers", "linear", "-n", "4,x")
    assert "No such option '-p'" in refused(2, "bench", "ens.wide", "-p", "ci", "-n", "4")
    assert "No such option '--primitive'" in refused(2, "bench", "ens.wide", "--primitive", "linear")
    assert "No such option '--profile'" in refused(2, "bench-layers", "linear", "--profile")
    assert "--jobs: this option works only with --tune" in refused(2, "bench-layers", "linear", "--jobs", "2")
    assert "there is no primitive" in refused(2, "bench-layers", "conv9d")
    assert "'aot' is not one of 'eager', 'compile'" in refused(
        2, "bench-layers", "linear", "--backend", "aot"
    )


def test_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ("bench-layers", "linear", "-p", "ci", "-n", "3", "--threads", "1", "-q", "-o", out)
    result = widepack(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout == "1 of 1 row answer as each member alone does in float64, in every strategy\n"
    assert "linear, N=3 (1 of 1" in result.stderr and "measuring" not in result.stderr
    document = json.loads(out.read_text())
    assert document["format"] == "widepack.primitives/1" and not document["interrupted"]
    assert {"device", "versions", "commit", "command", "threads"} <= document["environment"].keys()
    row = document["rows"]["linear, N=3"]
    assert (row["members"], row["batch"], row["pattern"], row["verdict"]) == (3, 16, "each", "checked")
    assert {"auto", "turned", "loop"} <= row["strategies"].keys() and {"loop", "vmap"} == row[
        "baselines"
    ].keys()
    assert all(s["median_ms"] > 0 for s in row["strategies"].values())
    assert row["strategies"]["loop"]["used"] == ["loop"] and "wide" in row["strategies"]["auto"]["same"]
    before = out.read_text()
    again = widepack("bench-layers", "linear", "-p", "ci", "-n", "3", "--resume", out)
    assert "0 rows of 1 (the document has the others)" in again.stderr and "linear" in again.stdout
    assert json.loads(out.read_text())["rows"] == json.loads(before)["rows"]
    assert "has rows of the preset 'ci'" in refused(
        2, "bench-layers", "linear", "-p", "quick", "--resume", out
    )
    assert "no document of bench-layers" in refused(
        2, "bench-layers", "linear", "--resume", _json(tmp_path / "other.json", {"format": "x"})
    )


def test_invalid_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that cannot be used are refused before the measurement."""
    monkeypatch.setattr(primitive_rows, "run_row", lambda *_, **__: pytest.fail("measured"))
    words = ("bench-layers", "linear", "-p", "ci", "-n", "2")
    assert f"the folder {tmp_path / 'none'} does not exist" in refused(
        2, *words, "-o", tmp_path / "none" / "rows.json"
    )
    assert "is a folder; give the path of a file" in refused(2, *words, "-o", tmp_path)
    good: dict[str, Any] = {
        "format": "widepack.primitives/1",
        "preset": "ci",
        "pattern": "each",
        "tuned": False,
        "environment": {"device": "a wristwatch", "threads": 1},
    }
    damaged: list[Any] = [None, [], {"linear, N=2": 3}, {"linear, N=2": {}}]
    for rows in damaged:
        assert "is damaged" in refused(
            2, *words, "--resume", _json(tmp_path / "damaged.json", {**good, "rows": rows})
        )
    assert "has rows of the preset None" in refused(
        2, *words, "--resume", _json(tmp_path / "damaged.json", {"format": good["format"], "rows": {}})
    )
    elsewhere = _json(tmp_path / "elsewhere.json", {**good, "rows": {"linear, N=2": found(2)}})
    assert "measured elsewhere: device a wristwatch and now" in refused(2, *words, "--resume", elsewhere)
    assert json.loads(elsewhere.read_text())["rows"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write_whole", full)
    assert "cannot be written (No space left on device)" in refused(2, *words, "-o", tmp_path / "rows.json")


def test_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive_rows, "run_row", lambda *_, **__: pytest.fail("measured"))
    words = ("bench-layers", "linear", "-p", "ci")
    assert "unknown baseline 'nosuch'; known: loop, " in refused(2, *words, "--baseline", "nosuch")
    assert "device 'nosuch'" in refused(2, *words, "--device", "nosuch")
    assert "100000000 members are more than the limit of 4096" in refused(2, *words, "-n", "4,100000000")
    if not torch.cuda.is_available():
        assert "sees no CUDA device" in refused(2, *words, "--device", "cuda")
    assert "no primitive ','" in refused(2, "bench-layers", ",")
    monkeypatch.setattr(primitive_rows, "run_row", lambda sweep, count, *_, **__: found(count))
    assert list(run_layers("linear,,", "ci", members=(2, 2, 3))["rows"]) == ["linear, N=2", "linear, N=3"]


def _json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def found(members: int, ratio: float = 1.2, verdict: str = "holds", loop: float = 0.8) -> dict[str, Any]:
    """Returns a row as `run_row` returns it."""
    interval = {"value": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    slow = {
        "used": ["loop"],
        "same": [],
        "median_ms": 2.0,
        "ratio": {"value": loop, "low": None, "high": None},
    }
    return {
        "primitive": "linear",
        "members": members,
        "auto": "bmm",
        "median_ms": 1.0,
        "verdict": verdict,
        "fastest": "vmap",
        "ratio": interval,
        "compiled-member": {"value": 2 * ratio, "low": None, "high": None},
        "strategies": {
            "auto": {"used": ["bmm"], "same": ["wide"], "median_ms": 1.0, "ratio": interval},
            "loop": slow,
        },
        "baselines": {"vmap": {"median_ms": ratio}},
    }


def test_a_row_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row(sweep: Any, count: int, preset: str, **_: Any) -> dict[str, Any]:
        if count == 3:
            raise RuntimeError("out of luck")
        return found(count)

    monkeypatch.setattr(primitive_rows, "run_row", row)
    out = tmp_path / "rows.json"
    result = widepack("bench-layers", "linear", "-p", "ci", "-n", "2,3,4", "-o", out)
    assert result.exit_code == 1
    assert "linear, N=3 failed: RuntimeError: out of luck" in result.stdout
    assert "1 of 3 rows failed: linear, N=3" in result.stderr
    assert [k for k, r in json.loads(out.read_text())["rows"].items() if "error" not in r] == [
        "linear, N=2",
        "linear, N=4",
    ]


def test_a_stopped_run_keeps_measured_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row(sweep: Any, count: int, preset: str, **_: Any) -> dict[str, Any]:
        if count == 3:
            raise KeyboardInterrupt
        return found(count)

    monkeypatch.setattr(primitive_rows, "run_row", row)
    out = tmp_path / "rows.json"
    result = widepack("bench-layers", "linear", "-p", "ci", "-n", "2,3", "-o", out)
    assert result.exit_code == 130
    assert f"stopped after 1 rows; continue with --resume {out}" in result.stderr
    assert list(json.loads(out.read_text())["rows"]) == ["linear, N=2"]
    assert "linear" in result.stdout


def test_rows_that_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that failed or were noisy or unclear run again. Rows with a verdict do not."""
    before = {2: "holds", 3: "slower", 4: "noisy", 5: "unclear"}
    monkeypatch.setattr(
        primitive_rows, "run_row", lambda sweep, count, *_, **__: found(count, verdict=before[count])
    )
    out = tmp_path / "rows.json"
    run_layers("linear", "ci", members=tuple(before), out=out)
    again: list[int] = []

    def row(sweep: Any, count: int, *_: Any, **__: Any) -> dict[str, Any]:
        again.append(count)
        return found(count)

    monkeypatch.setattr(primitive_rows, "run_row", row)
    run_layers("linear", "ci", members=(*before, 6), resume=out)
    assert again == [4, 5, 6]


def test_summary() -> None:
    rows = {
        "linear, N=2": found(2, 0.8, "slower", 1.1),
        "linear, N=4": found(4, 1.25, loop=0.9),
        "linear, N=8": found(8, 1.25, loop=1.0),
        "linear, N=16": found(16, verdict="noisy"),
        "gru, N=4": {"primitive": "gru", "members": 4, "error": "no"},
    }
    totals = summary(rows)
    assert (totals["rows"], totals["checked"], totals["measured"], totals["holds"]) == (5, 4, 3, 2)
    assert (
        totals["below"] == ["linear, N=2"]
        and totals["noisy"] == ["linear, N=16"]
        and totals["failed"] == ["gru, N=4"]
    )
    assert math.isclose(totals["geometric_mean"], (0.8 * 1.25 * 1.25) ** (1 / 3))
    assert totals["wins_from"] == {"linear": {"auto": 4, "loop": 8, "wide": 4}}
    document = {
        "preset": "full",
        "pattern": "each",
        "environment": {"device": "cpu", "threads": 1, "versions": {"torch": "2"}},
        "rows": rows,
        "summary": totals,
    }
    assert len(re.findall("^linear +[0-9]+ ", table(document), re.M)) == 4
    assert re.findall("^linear +([0-9]+) ", table(document, 1), re.M) == ["2"]  # only the slowest row
    assert "linear is as fast as the fastest baseline from: auto N=4, loop N=8, wide N=4" in table(document)


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: s.name)
def test_every_layer_takes_its_inputs(sweep: Any) -> None:
    two = members(lambda: sweep.make("ci"), 2)
    given = inputs(sweep.small.inputs, sweep.small.batch, 2)
    reference = LayerReference.of(two, given, True)
    assert all(a.numel() >= 64 for a in reference.own[0])  # a comparison needs as many numbers
    assert not any(
        torch.equal(p, q) for p, q in zip(two[0].parameters(), two[1].parameters()) if p.numel() > 1
    )
    assert not reference.wrong([torch.stack(answers) for answers in zip(*reference.own)])
    assert reference.wrong([torch.stack(answers[::-1]) for answers in zip(*reference.own)])
    assert sweep.shape.inputs and [i.partition("=")[0] for i in sweep.shape.inputs] == [
        i.partition("=")[0] for i in sweep.small.inputs
    ]


def test_names() -> None:
    names = [n for s in SWEEPS for n in (s.name, *s.aliases)]
    assert len(set(names)) == len(names)
    assert [s.name for s in find("LayerNorm,layer_norm, mha")] == ["layernorm", "multiheadattention"]
    assert [s.name for s in find("linear")] == ["linear"]
    assert {s.family for s in find("norm")} == {"norm"} and find("all") == list(SWEEPS)
    assert [s.name for s in find("block:attention, block:mlp_block", sweeps())] == [
        "block:attention",
        "block:mlp_block",
    ]
    assert len(find("block", sweeps())) == len(sweeps()) - len(SWEEPS) and find("all", sweeps()) == list(
        SWEEPS
    )
    with pytest.raises(UsageError, match="known: all, linear, "):
        find("nothing")


@pytest.mark.parametrize("layer", [name.removeprefix("Wide") for name in LAYERS])
def test_every_wide_layer_has_a_sweep_by_its_modules_name(layer: str) -> None:
    (sweep,) = find(layer)
    module, kind = sweep.make("ci"), getattr(nn, layer)
    assert isinstance(module, kind) and sweep in find("all")


def test_layers_of_other_ranks_have_their_siblings_sizes() -> None:
    """Equal sizes make their rows comparable."""
    images: dict[str, set[tuple[int, tuple[str, ...]]]] = {}
    for s in SWEEPS:
        if s.name[-2:] in ("1d", "2d", "3d"):
            images.setdefault(s.name[-2:], set()).add((s.shape.batch, s.shape.inputs))
    assert images == {
        "1d": {(8, ("input=float32[B,64,256]",))},
        "2d": {(8, ("input=float32[B,64,32,32]",))},
        "3d": {(4, ("input=float32[B,32,16,16,16]",))},
    }


@pytest.mark.parametrize("sweep", find("block", sweeps()), ids=lambda s: s.name)
def test_every_block_takes_its_inputs_at_both_sizes(sweep: Any) -> None:
    assert set(LARGE) == set(BLOCKS)
    counts = []
    for preset in ("ci", "quick"):
        (x, *more) = (v[0] for v in inputs(sweep.at(preset).inputs, 2, 1))
        with torch.inference_mode():
            answers = leaves(sweep.make(preset)(x, *more))
        assert all(bool(a.isfinite().all()) for a in answers) and answers[0].shape[0] == 2
        counts.append(sum(a.numel() for a in answers))
    assert (
        counts[1] >= 2 * counts[0] and sweep.at("full") == sweep.at("quick") and sweep.at("quick").batch == 8
    )


def test_strategies_of_a_layer() -> None:
    (sweep,) = find("conv2d")
    two = members(lambda: sweep.make("ci"), 2)
    given = inputs(sweep.small.inputs, sweep.small.batch, 2)
    programs, refusals = InMemory(
        lambda: sweep.make("ci"), two, sweep.small.inputs, given, True
    ).contestants()
    assert programs[0].name == "auto" and not refusals
    # the plan `auto` is a loop here
    assert {"wide", "sequential"} <= {p.name for p in programs}
    reference = LayerReference.of(two, given, True)
    for program in programs:
        assert not reference.wrong(program.run(*given)), program.name
    assert reference.wrong(programs[0].run(given[0].flip(0)))


def test_a_process_that_ends_early_says_why() -> None:
    with pytest.raises(ProcessEnded, match="TypeError"):
        list(lines_of_fresh_process("time:sleep", {"seconds": 1}))


@pytest.mark.extended
def test_each_primitive_in_a_separate_process() -> None:
    stages: list[str] = []
    document = run_layers(
        "dropout,rmsnorm", "ci", members=(2,), isolate=True, progress=lambda stage, *_: stages.append(stage)
    )
    assert not document["summary"]["failed"] and list(document["rows"]) == ["dropout, N=2", "rmsnorm, N=2"]
    assert any(
        s.startswith("rmsnorm, N=2 (2 of 2, about ") and s.endswith(": preparing vmap") for s in stages
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler warns about torch
def test_the_wide_program_compiled_is_a_strategy(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    result = widepack("bench-layers", "layernorm", "-p", "ci", "--backend", "compile", "-o", out)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"].values()
    assert row["strategies"]["wide on compile"]["median_ms"] > 0


@pytest.mark.slow
def test_the_verdict_of_a_row() -> None:
    document = run_layers(
        "layernorm", "quick", members=(2,), baselines=("loop", "compiled-member"), threads=1, budget_s=0.2
    )
    (row,) = document["rows"].values()
    assert row["compiled-member"]["value"] > 0 and {"loop", "compiled-member"} == row["baselines"].keys()
    assert row["rounds"] >= 6 and row["verdict"] in ("holds", "slower", "unclear", "noisy")


def tuned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunes only the eager backend, which compiles nothing, for a short time."""
    monkeypatch.setattr("widepack.tuning.tune.backends_here", lambda device: ("eager",))
    monkeypatch.setattr("widepack_bench.layers.row.TuneRequest", partial(TuneRequest, budget_s=0.4))
    monkeypatch.setattr("widepack_bench.layers.tuned_many.TuneRequest", partial(TuneRequest, budget_s=0.4))


@pytest.mark.extended
def test_auto_is_a_tuned_artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One layer with weights, one without, one that is called by a name."""
    tuned_here(monkeypatch)
    out, kept = tmp_path / "rows.json", tmp_path / "artifacts"
    words = (
        "bench-layers",
        "linear,avgpool2d,batchnorm1d",
        "-p",
        "ci",
        "-n",
        "3",
        "--tune",
        "--artifacts",
        kept,
        "--resume",
        out,
    )
    result = widepack(*words)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    for key, row in rows.items():
        assert {"auto", "rules"} <= row["strategies"].keys(), key
        assert (
            row["tuned"]["backend"] == "eager"
            and row["tuned"]["times_ms"]
            and row["auto"].endswith("on eager")
        )
        assert str(tmp_path) not in json.dumps(row)
    assert {p.name for p in kept.iterdir()} == {"linear-3", "avgpool2d-3", "batchnorm1d-3"}
    monkeypatch.setattr("widepack.tune", lambda *_, **__: pytest.fail("tuned again"))
    out.unlink()
    assert widepack(*words).exit_code == 0
    assert "has rows of the tuned True, but this run is for False" in refused(
        2, "bench-layers", "linear", "-p", "ci", "-n", "3", "--resume", out
    )
    assert "--artifacts: this option works only with --tune" in refused(
        2, "bench-layers", "linear", "-p", "ci", "--artifacts", kept
    )


@pytest.mark.extended
def test_a_plan_of_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the row would have the times of a plan that was not chosen."""
    tuned_here(monkeypatch)
    run_layers("linear", "ci", members=(2,), tune=True, artifacts=tmp_path)
    record = tmp_path / "linear-2" / "tuned.json"
    record.write_text(record.read_text().replace('"backend": "eager"', '"backend": "aot"'))
    (row,) = run_layers("linear", "ci", members=(2,), tune=True, artifacts=tmp_path)["rows"].values()
    assert "on aot, but the loaded artifact runs another plan, on eager" in row["error"]


@pytest.mark.slow
def test_a_tuned_artifact_is_of_one_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan of another pattern, number of members or machine is measured again.

    A folder with files of the user is refused and kept.
    """
    tuned_here(monkeypatch)
    seen: list[str] = []

    def tune(*args: Any, **more: Any) -> Any:
        seen.append(str(more["patterns"]))
        return tuner.tune(*args, **more)

    monkeypatch.setattr("widepack.tune", tune)
    for pattern in ("each", "each", "shared", "shared"):
        document = run_layers("linear", "ci", members=(2,), tune=True, artifacts=tmp_path, pattern=pattern)
        assert not document["summary"]["failed"]
    assert seen == ["('each',)", "('shared',)"]
    monkeypatch.setattr("widepack_bench.layers.tuned.name_of", lambda device: "a wristwatch")
    (row,) = run_layers("linear", "ci", members=(2,), tune=True, artifacts=tmp_path)["rows"].values()
    assert len(seen) == 3 and row["tuned"]["of"]["device"] == "a wristwatch"
    (tmp_path / "gru-2").mkdir()
    (tmp_path / "gru-2" / "thesis.tex").touch()
    (row,) = run_layers("gru", "ci", members=(2,), tune=True, artifacts=tmp_path)["rows"].values()
    assert (
        "contains files that do not belong to a tuned layer" in row["error"]
        and (tmp_path / "gru-2" / "thesis.tex").exists()
    )


def test_a_baseline_that_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is left out only of that row, and only if it ended the process."""
    monkeypatch.setattr(primitive_rows, "ROWS_OF", "dying_rows:rows_of")
    options = {"baselines": ["loop", "vmap"], "threads": 1}
    (sweep,) = find("linear")
    tasks = [primitive_rows.Task(sweep, n) for n in (2, 3, 4, 5)]
    found = list(primitive_rows.rows(tasks, "ci", options, True, primitive_rows.Clock(tasks, 1.0, 0.0, None)))
    assert [task for task, _ in found] == tasks
    two, three, four, five = (row for _, row in found)
    for row in (two, three):
        assert (
            list(row["skipped"]) == ["vmap"]
            and "its process ended while it was prepared" in row["skipped"]["vmap"]
        )
    assert four["error"].startswith("its process ended: ") and five["error"].startswith("its process ended: ")
    assert (four["primitive"], four["members"]) == ("linear", 4)


OF_A_PARENT = """
import time
from widepack_bench.processes.fresh import lines_of_fresh_process
lines = lines_of_fresh_process("dying_rows:forever", {})
print(next(lines)["pid"], flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_its_parent() -> None:
    """The process ends even if its parent was killed and could not end it.

    Otherwise it would use the processor during the next measurement.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", OF_A_PARENT], stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            os.kill(child, 0)
        finally:
            parent.kill()
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(
            f"/proc/{pid}/stat", encoding="utf-8"
        ) as file:  # a process that has ended, and whose exit status nobody has read
            return file.read().rpartition(") ")[2][:1] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.slow
def test_layers_are_tuned_at_once(tmp_path: Path) -> None:
    stages: list[str] = []
    document = run_layers(
        "linear,gru",
        "ci",
        members=(2, 3),
        tune=True,
        jobs=2,
        artifacts=tmp_path,
        progress=lambda stage, *_: stages.append(stage),
    )
    assert not document["summary"]["failed"]
    assert {"tuned linear, N=2", "tuned linear, N=3", "tuned gru, N=2", "tuned gru, N=3"} <= set(stages)


def test_a_baseline_whose_answer_shares_memory_with_its_input_is_skipped() -> None:
    (row,) = run_layers("dropout", "ci", members=(2,))["rows"].values()
    assert "its answer shares memory with its input" in row["skipped"]["vmap"]
    assert list(row["baselines"]) == ["loop"]


def test_a_row_of_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a small row may have no even round, and no ratio."""
    none = {"value": None, "low": None, "high": None}
    row = {**found(2, verdict="checked"), "ratio": none, "compiled-member": none}
    row["strategies"] = {"auto": {"used": ["bmm"], "same": [], "median_ms": 1.0, "ratio": none}}
    monkeypatch.setattr(primitive_rows, "run_row", lambda *_, **__: row)
    result = widepack("bench-layers", "linear", "-p", "ci", "-n", "2", "-t", "1")
    assert result.exit_code == 0 and "too few rounds" in result.stdout, result.output
    assert "checked" in markdown(
        {
            "rows": {"linear, N=2": row},
            "summary": summary({"linear, N=2": row}),
            "environment": {"device": "cpu", "threads": 1, "date": "", "versions": {}},
        }
    )


def test_markdown() -> None:
    other = found(8, 0.8, "slower") | {"tuned": {"strategies": {"once": 1, "packed": 2}, "backend": "aot"}}
    rows = {
        "linear, N=4": found(4),
        "linear, N=8": other,
        "gru, N=4": {"primitive": "gru", "members": 4, "error": "no"},
    }
    where = {"device": "cpu", "threads": 1, "date": "2026-01-01", "versions": {"torch": "2"}}
    lines = markdown({"rows": rows, "summary": summary(rows), "environment": where}).splitlines()
    assert lines[0].startswith("| primitive | over the fastest baseline, N = 4 / 8 |")
    assert lines[2:4] == [
        "| linear | 1.20 / 0.80 (slower) | 2.40 / 1.60 | bmm / packed on aot |",
        "| gru | failed /  |  /  |  |",
    ]
    assert "1 of 2 measured rows hold (50%)" in lines[-2] and lines[-1] == "Failed: gru, N=4."


@pytest.mark.slow
def test_all_layers_give_the_answers_of_the_members() -> None:
    document = run_layers("all", "ci", threads=1)
    assert not document["summary"]["failed"] and document["summary"]["checked"] == len(SWEEPS)
