"""Tests tune: what is measured, where plans are stored, and that no wrong or slower plan is chosen."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import saved
from torch import Tensor, nn

import widepack
from widepack import backends
from widepack.backends.eager import EagerFunction
from widepack.errors import ArtifactError, LoweringError, UsageError
from widepack.inference.programs.bound_program import BoundProgram
from widepack.inference.programs.probe_check import ProbeCheck
from widepack.planning import plan_cache
from widepack.planning.plan import Plan
from widepack.system import timing
from widepack.system.machine import name_of
from widepack.tuning import candidate_pool, search, tune
from widepack.tuning.searches import batch_classes
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer
from widepack_cli.main import cli

N = 4
FAST: dict[str, Any] = {"batches": (2, 32), "patterns": ("shared",), "budget_s": 0.2}
ONE: dict[str, Any] = {"batches": (4,), "patterns": ("shared",), "budget_s": 0.2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def member(i: int) -> nn.Module:
    torch.manual_seed(i)
    return Net().eval()


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    saved(Net, folder, "x=float32[B,3,8,8]", members=N)
    return folder


@pytest.fixture(autouse=True)
def on_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows only eager, because compilation is slow. The tests of backends allow other backends."""
    monkeypatch.setattr(tune, "backends_here", lambda device: ("eager",))
    # other load on this machine must not decide which candidates run
    monkeypatch.setattr(search, "SLOW", float("inf"))
    monkeypatch.setattr(search, "NEAR", float("inf"))


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIDEPACK_PLANS", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def artifact(built_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built_folder / "e.wide", tmp_path / "e.wide"))


BACKEND = backends.backend


def put_backend(monkeypatch: pytest.MonkeyPatch, bind: Callable[[Any], Any], name: str = "aot") -> None:
    """Replaces a backend by one that binds tasks with `bind`."""
    fake = SimpleNamespace(NAME=name, COPIES=False, bind=bind)
    monkeypatch.setattr(backends, "backend", lambda other: fake if other == name else BACKEND(other))


def check_answers(ens: Any) -> None:
    for batch in (1, 2, 5, 16, 40):
        x = torch.randn(batch, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(
                ens(x).clone(), torch.stack([member(i)(x) for i in range(N)]), rtol=1e-4, atol=1e-5
            )


@pytest.mark.extended
def test_plans_are_stored_in_the_cache_and_loaded_from_it(artifact: Path, plans: Path) -> None:
    before = Reader(artifact).manifest.digest
    report = widepack.tune(artifact, **FAST)
    assert Reader(artifact).manifest.digest == before == report.digest, (
        "without write the artifact does not change"
    )
    assert [r.batch for r in report.rows] == [2, 32] and [r.classes for r in report.rows] == [
        (1, 8),
        (9, None),
    ]
    assert all(r.times_ms and r.ms > 0 and {"predicted", "loop"} & set(r.times_ms) for r in report.rows)
    assert [p.suffix for p in plans.iterdir()] == [".json"] and plans.stat().st_mode & 0o77 == 0
    ens = widepack.load(artifact)
    assert [p.machine for p in ens.plans()] == [name_of("cpu")] * 2
    assert [p.batch for p in ens.plans()] == [(1, 8), (9, None)]
    check_answers(ens)
    assert not widepack.load(artifact, strategies="wide").plan.machine, (
        "requested strategies come before a measured plan"
    )
    assert not ens.plans("each")[0].machine, "a pattern that was not measured keeps its plan"


@pytest.mark.extended
def test_plans_are_written_into_the_artifact(artifact: Path, plans: Path) -> None:
    before = Reader(artifact)
    report = widepack.tune(artifact, write=True, **ONE)
    assert not plans.exists()
    reader = Reader(artifact)
    reader.check_hashes()
    assert reader.manifest.digest == report.digest != before.manifest.digest
    rows = reader.manifest.entries["forward"].wide
    assert {w.file for w in before.manifest.entries["forward"].wide} <= {w.file for w in rows}, (
        "the plans for other machines are kept"
    )
    assert sum("machine" in w.plan for w in rows) == 1
    ens = widepack.load(artifact)
    assert all(p.machine for p in ens.plans())
    check_answers(ens)
    again = widepack.tune(artifact, write=True, **ONE)
    rows = Reader(artifact).manifest.entries["forward"].wide
    assert sum("machine" in w.plan for w in rows) == 1, "new measurements replace the first ones"
    assert set(Reader(artifact).manifest.files) == {
        p.relative_to(artifact).as_posix() for p in artifact.rglob("*-*.*")
    }, "no old file is left"
    assert again.digest == Reader(artifact).manifest.digest


@pytest.mark.extended
def test_trace_shows_the_plan_that_runs_here(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed_trace() -> str:
        return CliRunner().invoke(cli, ["trace", str(artifact)]).output

    assert "predicted" in printed_trace()
    widepack.tune(artifact, write=True, **ONE)
    assert f"measured on {name_of('cpu')} with" in printed_trace()
    monkeypatch.setattr("widepack.system.machine.name_of", lambda device: "another machine")
    assert "predicted" in printed_trace()


@pytest.mark.extended
def test_a_plan_of_another_machine_is_not_used(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widepack.tune(artifact, write=True, **ONE)
    name_of.cache_clear()
    monkeypatch.setattr("widepack.planning.plan.name_of", lambda device: "another machine")
    monkeypatch.setattr("widepack.planning.plan_cache.name_of", lambda device: "another machine")
    ens = widepack.load(artifact)
    assert not any(p.machine for p in ens.plans())
    check_answers(ens)


@pytest.mark.extended
def test_the_fastest_measured_plan_is_chosen(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `packed` is measured as fastest, it is chosen, and the report has its ratios."""

    monkeypatch.setattr(search, "race", race_won_by("packed"))
    report = widepack.tune(artifact, batches=[32], patterns=["shared"], budget_s=0.2)
    (row,) = report.rows
    assert row.chosen == "packed" and row.strategies["packed"] and row.predicted == row.loop == 2.0
    check_answers(widepack.load(artifact))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("write", [False, True])
def test_measurements_before_an_interruption_are_kept(
    artifact: Path, write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tune.tune_pattern

    def interrupted(entry: Any, pattern: str, *rest: Any) -> Any:
        if pattern == "each":
            raise KeyboardInterrupt
        return original(entry, pattern, *rest)

    monkeypatch.setattr(tune, "tune_pattern", interrupted)
    before = widepack.load(artifact).manifest.digest
    with pytest.raises(KeyboardInterrupt):
        widepack.tune(artifact, write=write, **{**ONE, "patterns": ("shared", "each")})
    ens = widepack.load(artifact)
    assert ens.manifest.digest == before and ens.plan.machine and not ens.plans("each")[0].machine
    check_answers(ens)


def race_won_by(name: str, second: str = "") -> Callable[..., dict[str, list[float]]]:
    def clocked(calls: dict[str, Callable[[], object]], budget_s: float, **_: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {n: [{name: 1e-3, second: 1.5e-3}.get(n, 2e-3)] * 7 for n in calls}

    return clocked


@pytest.mark.extended
def test_a_candidate_near_the_winner_runs_again(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate near the winner of a race runs in the next race."""
    put_backend(monkeypatch, lambda task: EagerFunction(task.eager))
    monkeypatch.setattr(candidate_pool, "once", lambda call, clock: 1e-3)  # none is dropped for its time
    monkeypatch.setattr(search, "NEAR", 1.3)
    better = "loop on aot"
    several: list[set[str]] = []
    lucky = ""  # another plan on the backend

    def clocked(calls: dict[str, Callable[[], object]], budget_s: float, **_: Any) -> dict[str, list[float]]:
        nonlocal lucky
        lucky = lucky or next((n for n in calls if n.endswith("on aot") and n != better), "")
        seconds = {lucky: 1.0e-3 if not several else 1.4e-3, better: 1.2e-3}
        if better in calls:
            several.append(set(calls))
        return {n: [seconds.get(n, 2e-3)] * 7 for n in calls}

    monkeypatch.setattr(search, "race", clocked)
    (row,) = widepack.tune(artifact, backends=["aot"], **ONE).rows
    assert len(several) == 2 and several[0] > several[1] >= {lucky, better}, (
        "much slower candidates do not run in the next race"
    )
    assert row.chosen == better


@pytest.mark.extended
@pytest.mark.parametrize("write", [False, True])
def test_a_plan_may_name_a_backend(artifact: Path, write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat graph under the name of a compiler replaces it. The choice, the report and the load are
    tested.
    """
    put_backend(monkeypatch, lambda task: EagerFunction(task.eager))
    monkeypatch.setattr(search, "race", race_won_by("loop on aot", "packed"))
    report = widepack.tune(artifact, backends=["aot"], write=write, **ONE)
    (row,) = report.rows
    assert (
        report.backends == ("eager", "aot")
        and row.backend == "aot"
        and row.chosen == "loop on aot"
        and row.loop == 2.0
    )
    assert any(n.endswith("on aot") and n != row.chosen for n in row.times_ms), (
        "wide plans were measured on this backend too"
    )
    ens = widepack.load(artifact)
    assert ens.backend == "aot" and ens.plan.backend == "aot" and ens.plan.at == 4
    check_answers(ens)
    assert len(ens.plans()) == 1, "the other plan is for machines without that backend"
    on_eager = widepack.load(artifact, backend="eager")
    assert (
        on_eager.backend == "eager" and not on_eager.plan.backend and on_eager.plan.strategies()["packed"]
    ), "the fastest on eager, not the loop"
    check_answers(on_eager)
    assert [w.plan.backend for w in ens.entry("forward").programs.source.planned("shared")] == ["aot", ""]
    monkeypatch.setattr(backends, "backend", BACKEND)  # without the program in the cache
    with pytest.warns(UserWarning, match="measured on backend 'aot', which cannot be used here"):
        ens = widepack.load(artifact, cache=artifact.parent / "empty")
    assert ens.backend == "eager" and ens.plan.strategies() == on_eager.plan.strategies()
    check_answers(ens)


@pytest.mark.extended
def test_a_backend_that_fails_is_left_out(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(task: Any) -> Any:
        raise LoweringError("it does not compile")

    put_backend(monkeypatch, bind)
    report = widepack.tune(artifact, backends=["eager", "aot"], **ONE)
    assert (
        report.rows[0].backend == "eager" and "it does not compile" in report.rows[0].dropped["loop on aot"]
    )
    for other in ("tvm", "compile"):
        with pytest.raises(
            UsageError,
            match=f"cannot name the backend {other}: .* and eager, aot, onnxruntime can; "
            "leave the backend out",
        ):
            widepack.tune(artifact, backends=[other], **ONE)


@pytest.mark.extended
def test_a_backend_that_answers_wrongly_on_this_machine_is_not_used(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = False

    def bind(task: Any) -> Any:
        return EagerFunction((lambda *inputs: [y + 1 for y in task.eager(*inputs)]) if wrong else task.eager)

    put_backend(monkeypatch, bind)
    monkeypatch.setattr(search, "race", race_won_by("loop on aot"))
    monkeypatch.setattr("widepack.system.user_cache.passed", lambda *_: False)
    widepack.tune(artifact, backends=["aot"], write=True, **ONE)
    wrong = True
    with pytest.warns(UserWarning, match="backend 'aot', which the plan names, gives wrong answers here"):
        ens = widepack.load(artifact)
    assert ens.backend == "eager"
    check_answers(ens)
    with pytest.raises(widepack.VerificationError):
        widepack.load(artifact, backend="aot")


def test_a_plan_must_be_within_the_bounds_of_the_build(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe has wider bounds, for other devices.

    A plan outside the bounds of the build is not chosen, however fast it is.
    """
    (record,) = widepack.load(artifact).entry("forward").programs.probe_check.bounds("shared") or []

    def bind(task: Any) -> Any:
        off = 3 * (2 * record.own_rms + torch.finfo(torch.float32).eps * record.scale)
        return EagerFunction(lambda *inputs: [y + off for y in task.eager(*inputs)])

    put_backend(monkeypatch, bind)
    monkeypatch.setattr(search, "race", race_won_by("loop on aot"))
    (row,) = widepack.tune(artifact, backends=["aot"], **ONE).rows
    assert row.backend == "eager" and "rms error over all calls" in row.dropped["loop on aot"]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("threads", ["x", None, [1]])
def test_a_plan_with_an_invalid_number_of_threads_is_refused(artifact: Path, threads: Any) -> None:
    widepack.tune(artifact, write=True, **ONE)
    reader = Reader(artifact)
    entry = reader.manifest.entries["forward"]
    strange = replace(
        entry,
        wide=tuple(
            replace(w, plan={**w.plan, "threads": threads}) if "machine" in w.plan else w for w in entry.wide
        ),
    )
    with Writer(artifact, force=True) as writer:
        writer.keep(reader.manifest.files)
        writer.publish(replace(reader.manifest, entries={"forward": strange}))
    with pytest.raises(ArtifactError, match="the data is not a plan. Build the artifact again"):
        widepack.load(artifact)


@pytest.mark.extended
def test_weights_are_stored_in_one_session_for_all_batches(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the winners of two batches store weights in two ways, one of the winners serves both batches."""
    put_backend(monkeypatch, lambda task: EagerFunction(task.eager), "onnxruntime")
    won = iter(["loop on onnxruntime"] * 4 + ["turned"] * 4)
    monkeypatch.setattr(search, "race", lambda calls, budget_s, **_: race_won_by(next(won))(calls, budget_s))
    report = widepack.tune(artifact, backends=["onnxruntime"], **FAST)
    assert len({r.chosen for r in report.rows if r.chosen != "loop"}) == 1
    check_answers(widepack.load(artifact))


@pytest.mark.extended
def test_plans_for_several_numbers_of_threads_are_kept(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            widepack.tune(artifact, threads=threads, write=True, **ONE)
        digest = Reader(artifact).manifest.digest
        (one,) = widepack.load(artifact, threads=1).entry("forward").programs.of("shared")
        for written in (True, False):
            for threads, nearest in ((1, 1), (2, 2), (5, 2)):
                (plan,) = widepack.load(artifact, threads=threads).plans()
                assert plan.threads == nearest and (plan.at == 77) is not written
            if written:  # the cache stores them as the artifact does
                for threads in (1, 2):
                    plan_cache.keep(
                        digest,
                        "forward",
                        "shared",
                        "cpu",
                        [(one.program, replace(one.plan, threads=threads, at=77))],
                    )
    finally:
        torch.set_num_threads(before)


def test_a_wrong_program_is_left_out(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProbeCheck.run

    def run(self: ProbeCheck, pattern: str, programs: Sequence[BoundProgram], again: bool = False) -> str:
        if any(n.op.startswith("widepack.") for b in programs for n in b.program.nodes):
            raise widepack.VerificationError("output 0 is off")
        return original(self, pattern, programs, again)

    monkeypatch.setattr(ProbeCheck, "run", run)
    report = widepack.tune(artifact, batches=[32], patterns=["shared"], budget_s=0.2)
    assert any("is off" in why for why in report.rows[0].dropped.values())
    assert not report.rows[0].strategies.get("packed")


def test_invalid_arguments_are_refused(artifact: Path) -> None:
    with pytest.raises(UsageError, match="batches are whole numbers from 1"):
        widepack.tune(artifact, batches=[0])
    with pytest.raises(UsageError, match="unknown pattern mixed; known: shared, each"):
        widepack.tune(artifact, patterns=["mixed"])
    with pytest.raises(ArtifactError, match="it does not exist"):
        widepack.tune(artifact.parent / "none.wide")
    with pytest.raises(UsageError, match="give one of the two"):
        widepack.build(["a.pt"], "x.wide", model=Net, strategy="loop", tune=True)


def test_a_damaged_cache_is_ignored(artifact: Path, plans: Path) -> None:
    widepack.tune(artifact, **ONE)
    digest = Reader(artifact).manifest.digest
    rows = plan_cache.find(digest, "forward", "shared", "cpu")
    assert [Plan.from_json(p.to_json()) for _, p in rows] == [p for _, p in rows]
    assert rows[0][1].times_ms and rows[0][1].threads == torch.get_num_threads()
    assert not plan_cache.find("sha256:" + "0" * 64, "forward", "shared", "cpu")
    (file,) = plans.iterdir()
    stored = file.read_text()
    assert file.stat().st_mode & 0o77 == 0, "for any umask"
    document = json.loads(stored)
    document[0]["program"]["nodes"][0]["op"] = "aten.from_file.default"
    for text, mode in (
        (stored[:-40], 0o600),
        (json.dumps(document), 0o600),
        ('{"a": 1}', 0o600),
        (stored, 0o666),
    ):
        file.write_text(text)
        file.chmod(mode)
        ens = widepack.load(artifact)
        assert not any(p.machine for p in ens.plans())
    check_answers(ens)
    document = json.loads(stored)
    loops = [n for n in document[0]["program"]["nodes"] if n["op"] == "aten.relu.default"]
    for node in loops or document[0]["program"]["nodes"][-1:]:
        node["op"] = "aten.neg.default"  # a program that is valid, but wrong
    file.write_text(json.dumps(document))
    file.chmod(0o600)
    with pytest.warns(
        UserWarning, match="the plan that was measured here is not used .*measure it again: widepack tune"
    ):
        ens = widepack.load(artifact)
    check_answers(ens)
    plans.chmod(0o777)
    with pytest.raises(UsageError, match="other users may write here"):
        plan_cache.keep(digest, "forward", "shared", "cpu", rows)


class Looked(nn.Module):
    """Reads rows by number. At batch size 1 the numbers are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y: Tensor = self.fc(x).index_select(0, rows)
        return y


def test_only_the_batch_that_members_refuse_is_refused(tmp_path: Path) -> None:
    saved(Looked, tmp_path, "x=float32[B,4]", "rows=int64[3]:0..1", "B=2..64", members=2)
    report = widepack.tune(tmp_path / "e.wide", batches=[1, 4], patterns=["shared"], budget_s=0.2)
    assert list(report.refused) == ["forward, shared, batch 1"] and [r.batch for r in report.rows] == [4]


def test_an_artifact_that_is_published_meanwhile_does_not_change(
    artifact: Path, built_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tune.tune_pattern

    def tuned(*args: Any) -> Any:
        found = original(*args)
        widepack.build(
            sorted(built_folder.glob("*.pt"))[:2],
            artifact,
            model=Net,
            inputs=["x=float32[B,3,8,8]"],
            pt2=False,
            force=True,
        )
        return found

    monkeypatch.setattr(tune, "tune_pattern", tuned)
    with pytest.raises(ArtifactError, match="expected the artifact"):
        widepack.tune(artifact, write=True, **ONE)
    assert len(widepack.load(artifact)) == 2


@pytest.mark.slow
def test_build_and_tune(built_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t.wide"
    function: Any = inspect.unwrap(tune.tune)  # a decorator switches autocast off
    monkeypatch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, "budget_s": 0.2})
    report = widepack.build(
        sorted(built_folder.glob("*.pt")), out, model=Net, inputs=["x=float32[B,3,8,8]"], pt2=False, tune=[4]
    )
    assert report.tuned is not None and report.digest == Reader(out).manifest.digest
    assert {r["pattern"] for r in report.tuned["rows"]} == {"shared", "each"} and "tune" in report.seconds
    check_answers(widepack.load(out))


def test_the_command_line(artifact: Path) -> None:
    run = CliRunner().invoke(
        cli,
        [
            "tune",
            str(artifact),
            "--batch",
            "4",
            "--pattern",
            "shared",
            "--budget",
            "0.2",
            "--write",
            "--json",
        ],
    )
    document = json.loads(run.stdout)
    assert document["digest"] == Reader(artifact).manifest.digest and document["rows"][0]["batch"] == 4
    run = CliRunner().invoke(cli, ["tune", str(artifact), "--batch", "0"])
    assert run.exit_code == 2


@pytest.mark.slow
def test_the_command_line_prints_a_summary(artifact: Path) -> None:
    run = CliRunner().invoke(
        cli, ["tune", str(artifact), "--batch", "4", "--pattern", "shared", "--budget", "0.2"]
    )
    assert run.exit_code == 0, run.output
    assert "--write publishes it in the artifact" in run.output and name_of("cpu") in run.output


def test_ratios_are_taken_within_a_round() -> None:
    times = {"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0], "c": [1.5, 9.0, 1.2]}
    assert timing.ratio(times, "b", "a") == 2.0
    assert timing.fastest(times) == "a"
    found = timing.race({"x": lambda: None, "y": lambda: sum(range(2000))}, 0.0)
    assert len(found["x"]) == len(found["y"]) == timing.ROUNDS and timing.ratio(found, "y", "x") > 1


def test_batch_classes_are_divided_at_the_geometric_mean() -> None:
    assert batch_classes({1: 1, 8: 8, 32: 32}) == {1: (1, 2), 8: (3, 16), 32: (17, None)}
    assert batch_classes({8: 8}) == {8: (1, None)}
