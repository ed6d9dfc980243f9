"""Tests the parts of the benchmark other than its ratios.

These are percentiles, baselines, work and ceilings, profiles, backends and levels.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from support import Artifacts
from torch import Tensor, nn

import cases
import widepack
from widepack.errors import UsageError
from widepack.planning.plan import NodeChoice
from widepack.runtime.flop_formulas import own_formula
from widepack_artifacts.program import Program, Ref
from widepack_bench import bench, compare
from widepack_bench.baselines.compiled import TooLong, at_most
from widepack_bench.baselines.table import BASELINES, difference, loop
from widepack_bench.errors import BenchError, Unavailable
from widepack_bench.measure import race as noise
from widepack_bench.measure.figures import Ceilings, Roof, Work
from widepack_bench.measure.levels import LEVELS
from widepack_bench.measure.profile import StepClock, chrome_trace, profile
from widepack_bench.measure.roofline import ceilings, work

# ---------------------------------------------------------------- single calls


def test_percentiles_are_of_single_calls() -> None:
    """Every tenth call takes ten times as long. The p95 shows this; medians of blocks do not."""
    now, count = 0, 0

    def call() -> None:
        nonlocal now, count
        count += 1
        now += 1_000_000 if count % 10 == 0 else 100_000

    race = noise.race(call, {"loop": call}, clock=lambda: now)
    found = race.latency(noise.OURS)
    assert (found.p50_ms, found.p95_ms, found.p99_ms) == (0.1, 1.0, 1.0)
    assert found.calls > 1000 and race.median_ms(noise.OURS) < 0.25
    assert noise.Latency.of([float(n) for n in range(1, 101)]) == noise.Latency(50e-6, 95e-6, 99e-6, 100), (
        "the percentile is not the time of one call (nearest rank)"
    )
    assert noise.Latency.of(()).to_json() == {"p50_ms": None, "p95_ms": None, "p99_ms": None, "calls": 0}


def test_stored_calls_are_evenly_spaced() -> None:
    singles = noise.Singles()
    for start in range(300):
        singles.add([1000 * start + k * (start + 1) for k in range(1001)])
    kept = singles.sorted()
    assert len(kept) <= singles.LIMIT and kept[0] == 1.0 and kept[-1] == 300.0
    assert 140 <= kept[len(kept) // 2] <= 160, "the median of the stored calls is not the middle of the run"


def test_other_contestants_are_timed_and_are_not_baselines() -> None:
    now = 0

    def call(ns: int) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += ns

        return run

    race = noise.race(
        call(100_000),
        {"loop": call(150_000)},
        others={"widepack[aot]": call(50_000), "level loop": call(200_000)},
        clock=lambda: now,
    )
    assert (
        race.fastest == "loop"
        and race.baselines == ("loop",)
        and race.others == ("widepack[aot]", "level loop")
    )
    assert race.ratio("loop").value == 1.5 and race.ratio("loop", "widepack[aot]").value == 3.0
    assert (race.verdict, race.verdict_of("widepack[aot]"), race.verdict_of("level loop")) == (
        "holds",
        "holds",
        "slower",
    )


# ---------------------------------------------------------------- baselines


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.head(torch.relu(self.norm(self.fc(x))))
        return {"y": y if scale is None else y * scale, "top": y.argmax(-1), "none": None}


def nets(count: int = 3, classes: Callable[[int], int] = lambda i: 3) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for i in range(count):
        torch.manual_seed(i)
        net = Net(classes(i))
        assert net.norm.running_mean is not None
        nn.init.normal_(net.norm.running_mean)
        modules.append(net.eval())
    return modules


def compiled_names() -> list[str]:
    return ["compiled-member", "compiled-loop", "vmap-compiled"]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", compiled_names())
def test_compiled_baselines_give_the_loops_answers(
    name: str, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests the functions that are compiled, with a compiler that returns its argument."""
    seen: list[Any] = []

    def as_it_is(run: Any, **options: Any) -> Any:
        seen.append(options)
        return run

    monkeypatch.setattr(torch, "compile", as_it_is)
    members = nets()
    x, scale = torch.randn(*([3] if each else []), 5, 4), torch.rand(*([3] if each else []), 3)
    with torch.inference_mode():
        assert (
            difference(BASELINES[name](members, each)(x, scale=scale), loop(members, each)(x, scale=scale))
            == ""
        )
    assert seen == [{"dynamic": False}], "more than one function is compiled"


def test_members_of_other_shapes_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def as_it_is(run: Any, **_: Any) -> Any:
        seen.append(run)
        return run

    monkeypatch.setattr(torch, "compile", as_it_is)
    members = nets(classes=lambda i: 3 + i)
    x = torch.randn(5, 4)
    with torch.inference_mode():
        expected = loop(members, False)(x)
        for name in ("compiled-member", "compiled-loop"):
            assert difference(BASELINES[name](members, False)(x), expected) == "", name
    assert len(seen) == 4


@pytest.mark.filterwarnings("ignore")  # compiler and exporter warn about their own code
@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", compiled_names())
def test_compiled_baselines_with_the_compiler(name: str, each: bool) -> None:
    members = nets()
    x = torch.randn(*([3] if each else []), 5, 4)
    with torch.inference_mode():
        assert difference(BASELINES[name](members, each)(x), loop(members, each)(x)) == ""


@pytest.mark.filterwarnings("ignore")  # compiler and exporter warn about their own code
@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True])
def test_sessions_of_onnxruntime(each: bool) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    members = nets()
    run = BASELINES["onnxruntime"](members, each)
    shape = [3] if each else []
    for batch in (5, 2):
        x, scale = torch.randn(*shape, batch, 4), torch.rand(*shape, 3)
        with torch.inference_mode():
            expected = loop(members, each)(x, scale=scale)
            first = run(x, scale=scale)
            assert difference(first, expected) == ""
            run(x + 1, scale=scale)
            assert difference(first, expected) == "", "a later call wrote into an answer"


def test_baselines_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device, and the members are on cpu"):
        BASELINES["cuda-graph-loop"](nets(), False)
    monkeypatch.setattr(
        "widepack_bench.baselines.onnxruntime_sessions._installed", lambda name: name != "onnxruntime"
    )
    with pytest.raises(Unavailable, match=r"onnxruntime is not installed \(pip install 'widepack\[onnx\]'\)"):
        BASELINES["onnxruntime"](nets(), False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("each", [False, True])
def test_the_loop_as_one_cuda_graph(each: bool) -> None:
    members = [m.cuda() for m in nets()]
    run = BASELINES["cuda-graph-loop"](members, each)
    for _ in range(2):
        x = torch.randn(*([3] if each else []), 5, 4, device="cuda")
        with torch.inference_mode():
            assert difference(run(x), loop(members, each)(x)) == ""


def test_compilation_has_a_limit() -> None:
    import signal

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TooLong, match="not compiled within 0.05 s"), at_most(0.05):
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_limit_waits_for_functions_of_the_garbage_collector() -> None:
    def slow(phase: str, info: dict[str, int]) -> None:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass

    gc.callbacks.append(slow)
    try:
        with pytest.raises(TooLong), at_most(0.05):
            gc.collect()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                pass
    finally:
        gc.callbacks.remove(slow)


def test_the_limit_holds_where_python_ignores_its_exception() -> None:
    class Slow:
        def __del__(self) -> None:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass

    hook, begin = sys.unraisablehook, time.monotonic()
    with pytest.raises(TooLong), at_most(0.05):
        Slow()
        while time.monotonic() < begin + 4:
            pass
    assert time.monotonic() < begin + 3 and sys.unraisablehook is hook


# ---------------------------------------------------------------- work and ceilings


def test_work_is_counted_from_the_program() -> None:
    """The work equals a count by hand for linear [B,4]x[6,4], conv 3x3, attention and an LSTM.

    A Shared value counts once, a Stacked value N times.
    """
    nodes = [
        small.node("y", "linear", Ref("x"), Ref("w"), Ref("b")),
        small.node("r", "relu", Ref("y")),
    ]
    program = small.program({"w": "float32[6,4]", "b": "float32[6]"}, {"x": "float32[B,4]"}, nodes, ["r"])
    kinds = small.all_kinds(program, w="stacked", b="stacked")
    batch, members = 5, 3
    for wide in (
        small.lowered(program, kinds, small.plan(), members).program,
        small.lowered(program, kinds, small.plan(all=["y", "r"]), members).program,
    ):
        found = work(wide, {"B": batch})
        assert found.flop == 2 * members * batch * 6 * 4
        assert found.least_bytes == 4 * (members * (6 * 4 + 6) + batch * 4 + members * batch * 6)
        assert found.moved_bytes >= found.least_bytes
    assert (
        work(small.lowered(program, kinds, small.plan(all=["y", "r"]), members).program, {"B": batch}).kernels
        == 2 * members
    )
    conv = [small.node("y", "conv2d", Ref("x"), Ref("w"), None, [1, 1], [1, 1])]
    program = small.program({"w": "float32[7,2,3,3]"}, {"x": "float32[B,2,8,8]"}, conv, ["y"])
    assert work(_one_member(program), {"B": 2}).flop == 2 * 2 * 7 * 8 * 8 * 2 * 9
    sdpa = [small.node("y", "scaled_dot_product_attention", Ref("x"), Ref("x"), Ref("x"))]
    program = small.program({}, {"x": "float32[B,2,6,4]"}, sdpa, ["y"])
    assert work(_one_member(program), {"B": 3}).flop == 2 * (2 * 3 * 2 * 6 * 6 * 4)


def _one_member(program: Program) -> Program:
    return small.lowered(program, small.all_kinds(program), small.plan(), 1).program


def test_work_of_a_recurrent_layer() -> None:
    """Each weight counts once for each step and sample. Here: two directions of 5 -> 4 over 7 steps."""
    sizes = {"w_ih": "float32[16,5]", "w_hh": "float32[16,4]", "b_ih": "float32[16]", "b_hh": "float32[16]"}
    weights = {f"{name}{way}": type_ for way in ("", "_back") for name, type_ in sizes.items()}
    states = [Ref("h"), Ref("c")]
    call = small.node(
        "out", "lstm.input", Ref("x"), states, [Ref(n) for n in weights], True, 1, 0.0, False, True, True
    )
    program = small.program(
        {**weights, "h": "float32[2,3,4]", "c": "float32[2,3,4]"},
        {"x": "float32[3,7,5]"},
        [call, small.node("y", "operator.getitem", Ref("out"), 0)],
        ["y"],
    )
    assert work(_one_member(program), {}).flop == 2 * (2 * 16 * (5 + 4)) * 3 * 7
    stacked = small.all_kinds(program, **dict.fromkeys(weights, "stacked"))  # type: ignore[arg-type]
    for strategy, op in (("packed", "packed_lstm"), ("fused", "lstm_steps")):
        wide = small.lowered(
            program, stacked, replace(small.plan(), choices={"out": NodeChoice(strategy, "requested")}), 3
        ).program
        assert [n.op for n in wide.nodes].count(f"widepack.{op}.default") == 2
        assert work(wide, {}).flop == 3 * 2 * (2 * 16 * (5 + 4)) * 3 * 7


def test_work_over_packed_weights() -> None:
    """Counts linear layers 5 -> 7 of 3 members over 4 rows, and a 3x3 convolution of 2 groups over 8x8."""

    def flop(op: str, *shapes: tuple[int, ...]) -> int:
        x, weight, made = (torch.empty(s, device="meta") for s in shapes)
        formula = own_formula(f"widepack.{op}.default")
        assert formula is not None
        return int(formula(x, weight, None, out_val=made))

    assert flop("linear", (3, 4, 5), (3 * 7, 5, 1, 1), (3, 4, 7)) == 2 * 3 * 4 * 5 * 7
    assert flop("convolution", (2, 4, 8, 8), (6, 2, 3, 3), (2, 6, 8, 8)) == 2 * (2 * 6 * 8 * 8) * (2 * 9)


def test_work_of_an_artifact(artifacts: Artifacts) -> None:
    from widepack_bench.measure.loading import entry_of

    ens = widepack.load(artifacts("mlp"))
    matrices = sum(
        math.prod(w.shape) * (1 if w.kind == "shared" else len(ens))
        for w in ens.manifest.weights
        if len(w.shape) == 2
    )
    assert (
        work(entry_of(ens).programs.for_sizes("shared", {"B": 3}).program, {"B": 3}).flop == 2 * matrices * 3
    )


def test_ceilings_and_share() -> None:
    found = ceilings(1 << 16, torch.float32, "cpu", torch.get_num_threads())
    assert found.stream > 1e8 and found.gemm > 1e8
    roof = Roof(Work(2_000_000, 1_000_000, 3_000_000, 4), Ceilings(1e9, 1e9), 8.0)
    assert (roof.stream_ms, roof.gemm_ms, roof.floor_ms, roof.share) == (1.0, 2.0, 2.0, 0.25)


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("strategy", ["wide", "loop"])
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_profile_of_both_sides(artifacts: Artifacts, strategy: str, pattern: str) -> None:
    case = cases.load("mlp")
    ens = widepack.load(artifacts("mlp"), strategies=strategy)
    found = profile(ens, 2, pattern=pattern, name="mlp", seconds=0.02)
    assert found.members == case.N and found.call_ms > 0 and found.wide_ms > 0 and found.loop_ms > 0
    assert {s.member for s in found.loop[0]} == set(range(case.N))
    assert {s.member for s in found.wide[0]} == (
        {-1} if strategy == "wide" else set(range(case.N)) | ({-1} & {s.member for s in found.wide[0]})
    )
    lines = found.lines("op")
    assert any(line.key == "aten.linear.default" and line.loop_ms for line in lines)
    by_line = found.lines("source")
    assert any(line.wide_ms and line.loop_ms and ".py:" in line.key for line in by_line), (
        "a side does not name the line of the user's code"
    )
    table = found.table(2)
    assert "gain" in table and "more)" in table
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["format"] == "widepack.profile/1" and {"by_node", "by_op", "by_source"} <= set(document)
    events = chrome_trace([found], {"threads": 1})["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(found.wide[-1]) + len(found.loop[-1]) and all(
        e["dur"] >= 0 and e["ts"] >= 0 for e in spans
    )


def test_a_profile_runs_the_program_of_a_call(artifacts: Artifacts) -> None:
    """The profiler runs the program node by node and returns the answer of the call."""
    from widepack_bench.measure.inputs import make
    from widepack_bench.measure.loading import entry_of, weights_of

    for strategy in ("wide", "loop"):
        ens = widepack.load(artifacts("mlp"), strategies=strategy)
        (x,), _, sizes = make(ens.manifest.entries["forward"], 3)
        program = entry_of(ens).programs.for_sizes("shared", sizes).program
        names = [s.name for s in (*program.weights, *program.inputs)]
        with torch.inference_mode():
            values = StepClock(program, "cpu").run(
                dict(zip(names, [*weights_of(entry_of(ens), program), x])), 0, []
            )
            assert difference(values[program.outputs[0].value.name], ens(x)) == ""


# ---------------------------------------------------------------- backends and levels


@pytest.mark.extended
def test_backends_and_levels_are_contestants(artifacts: Artifacts) -> None:
    report = bench(
        artifacts("mlp"),
        batches=(2,),
        backends=("eager", "nonsense"),
        baselines=("loop",),
        levels=True,
        budget_s=0.3,
        threads=1,
        roofline=True,
    )
    (row,) = report.rows
    assert report.backend == "eager"
    assert "backend='nonsense' is unknown" in row.skipped["widepack[nonsense]"]
    assert {o.name for o in row.others} | set(row.skipped) >= {f"level {name}" for name in LEVELS}
    assert {"level sequential", "level loop", "level stacked", "level simplified", "level tuned"} <= {
        o.name for o in row.others
    }
    assert row.roof is not None and 0 < row.roof.share < 1.5
    table = report.table()
    assert (
        "levels, each with its gain over the one before: sequential" in table and "of the roofline" in table
    )
    assert "widepack[nonsense] was skipped" in table
    with pytest.raises(UsageError, match="unknown"):
        bench(artifacts("mlp"), backends=("nonsense",), batches=(2,))
    with pytest.raises(UsageError, match="need an artifact: give its path"):
        bench(widepack.load(artifacts("mlp")), backends=("eager",), batches=(2,))


def test_a_contestant_with_wrong_answers_is_never_timed(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))

    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    words: dict[str, Any] = {"batches": (2,), "baselines": ("loop",), "budget_s": 0.2}
    with pytest.raises(BenchError, match=r"mine does not give the members' answers"):
        compare(ens, None, beside={"mine": lambda x: ens(x) + 1}, **words)
    report = compare(ens, None, beside={"mine": ens, "broken": broken}, **words)
    assert [o.name for o in report.rows[0].others] == ["mine"] and report.rows[0].skipped[
        "broken"
    ] == "RuntimeError: no kernel"


def test_a_run_that_is_too_short_says_so() -> None:
    """One round gives no interval; it is no sign of a busy machine."""
    calls = {"loop": lambda: time.sleep(0.002)}
    found = noise.race(lambda: time.sleep(0.001), calls, budget_s=0.0)
    assert found.verdict == "noisy" and str(found.noise) == "-"
    assert "there was time for 1 round of all contestants, too few for an interval" in found.why
    assert "--budget" in found.why and "busy" not in found.why


def test_an_import_ends_before_the_limit_of_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.3)\nvalue = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TooLong), at_most(0.05):
        slow = import_module("slow_module")

        assert slow.value == 1
        time.sleep(5)
    assert sys.modules.pop("slow_module").value == 1
