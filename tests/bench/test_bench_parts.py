"""Tests the parts of the benchmark other than its ratios.

These are percentiles, baselines, work and ceilings, profiles, pages, documents, memory and the suite.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import click.testing
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
from widepack_bench.measure.figures import Ceilings, Memory, Roof, Start, Work
from widepack_bench.measure.levels import LEVELS
from widepack_bench.measure.profile import StepClock, chrome_trace, profile
from widepack_bench.measure.roofline import ceilings, work
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import states
from widepack_bench.processes.contestant import resident
from widepack_bench.processes.fresh import in_fresh_process
from widepack_bench.report.document import Report
from widepack_bench.report.environment import environment
from widepack_bench.report.html import page
from widepack_bench.report.row import Row
from widepack_bench.suite import row as suite_row
from widepack_bench.suite import run as suite_run
from widepack_bench.suite import table as suite_table
from widepack_bench.suite.rows import ROWS, SuiteRow, chosen
from widepack_cli.main import cli

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
    from widepack_bench.measure.programs import entry_of

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
    from widepack_bench.measure.programs import entry_of, weights_of

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


# ---------------------------------------------------------------- documents and pages


def fault(value: Any, schema: Any, root: Any, at: str = "$") -> str:
    """Returns the first error of a value under a JSON schema, or an empty text.

    It knows only the keywords that widepack's schemas use.
    """
    known = {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "description",
        "title",
        "$schema",
        "$defs",
    }
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return fault(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        faults = [fault(value, option, root, at) for option in schema["anyOf"]]
        return "" if "" in faults else "; ".join(faults)
    if "const" in schema and value != schema["const"]:
        return f"{at} is {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} is {value!r}"
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "integer": int,
        "boolean": bool,
        "null": type(None),
    }
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(
        isinstance(value, types[w]) and (w == "boolean" or not isinstance(value, bool)) for w in wanted
    ):
        return f"{at} is a {type(value).__name__}"
    if isinstance(value, dict):
        if missing := set(schema.get("required", ())) - set(value):
            return f"{at} lacks {sorted(missing)}"
        for key, inner in value.items():
            under = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            if under is False:
                return f"{at} has {key}"
            if under is not True and (wrong := fault(inner, under, root, f"{at}.{key}")):
                return wrong
    if isinstance(value, list):
        return next(
            (w for i, v in enumerate(value) if (w := fault(v, schema.get("items", {}), root, f"{at}[{i}]"))),
            "",
        )
    return ""


def full_report() -> Report:
    """Returns a report with a value in every field, without a measurement."""
    names = (noise.OURS, noise.AGAIN, "widepack[eager]", "level loop", "loop", "vmap")
    rounds = tuple((1e6, 1e6, 1.1e6, 2e6, 2e6 + i % 3 * 1e4, 1.5e6) for i in range(40))
    race = noise.Race(names, rounds, 2, tuple(tuple(row[k] for row in rounds) for k in range(len(names))))
    memory: dict[str, Memory | str] = {"widepack": Memory(1_000_000, 2_000_000), "loop": "no <figure>"}
    roof = Roof(Work(2_000_000, 1_000_000, 3_000_000, 4), Ceilings(33e9, 50e9), 1.0)
    row = replace(
        Row.of(2, {"B": 2, "T": 33}, race, {"vmap-compiled": "no compiler"}, 8), memory=memory, roof=roof
    )
    start: dict[str, Start | str] = {"widepack": Start(12.5, 900.0, 3), "loop": "it is <unknown>"}
    where = environment("cpu", 1)
    return Report("a<b>.wide", 8, "each", "your own modules", (row,), {64: "too <large>"}, where, start=start)


def test_the_document_matches_its_schema(artifacts: Artifacts) -> None:
    schema = json.loads(resources.files("widepack_bench").joinpath("schema.json").read_text(encoding="utf-8"))
    measured = bench(
        artifacts("mlp"),
        batches=(2,),
        baselines=("loop", "cuda-graph-loop"),
        budget_s=0.2,
        threads=1,
        roofline=True,
    )
    assert fault(json.loads(json.dumps(measured.to_json(), allow_nan=False)), schema, schema) == ""
    document = json.loads(json.dumps(full_report().to_json(), allow_nan=False))
    assert fault(document, schema, schema) == ""
    for path, words in (
        (("environment", "threads"), "lacks"),
        (("rows", 0, "ratio", "low"), "lacks"),
        (("rows", 0, "roofline", "share"), "lacks"),
    ):
        broken = copy.deepcopy(document)
        inner: Any = broken
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        assert words in fault(broken, schema, schema), path
    assert "has more" in fault({**document, "more": 1}, schema, schema)
    assert "rows[0].verdict" in fault(
        {**document, "rows": [{**document["rows"][0], "verdict": "won"}]}, schema, schema
    )
    table = full_report().table()
    assert (
        "1.00 MB" in table
        and "start-up of widepack: 12.5 ms" in table
        and "start-up of loop: not measured: it is <unknown>" in table
    )


def test_the_page_is_one_file() -> None:
    from html.parser import HTMLParser

    text = page(full_report().to_json())
    opened: list[str] = []
    closed: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            opened.append(tag)
            assert not {"src", "href", "onclick"} & {k for k, _ in attrs}, "the page fetches a file"

        def handle_endtag(self, tag: str) -> None:
            closed.append(tag)

    Reader().feed(text)
    assert opened.count("svg") == closed.count("svg") >= 3 and "script" not in opened and "link" not in opened
    assert "http" not in text and "url(" not in text and "prefers-color-scheme: dark" in text
    assert "a&lt;b&gt;.wide" in text and "<b>" not in text and "too &lt;large&gt;" in text
    assert "of the roofline" in text and "widepack[eager]" in text


# ---------------------------------------------------------------- memory and start-up


def test_the_memory_of_a_process_is_read_from_the_system() -> None:
    private, mapped = resident()
    values = torch.ones(25_000_000)
    more, _ = resident()
    assert private > 0 and mapped > 0 and more - private > 0.9 * values.nbytes


@pytest.mark.slow
def test_memory_and_start_up_in_separate_processes(artifacts: Artifacts, tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "batches": (2,),
        "baselines": ("loop",),
        "budget_s": 0.3,
        "threads": 1,
        "alone": True,
    }
    report = bench(artifacts("mlp"), factory="cases.mlp:model", **words)
    wide, loop = (report.rows[0].memory[name] for name in ("widepack", "loop"))
    assert isinstance(wide, Memory) and isinstance(loop, Memory)
    assert loop.private_bytes > 1_000_000, (
        "the modules of the loop do not store their weights in private memory"
    )
    for name in ("widepack", "loop"):
        start = report.start[name]
        assert isinstance(start, Start) and 1 < start.median_ms < 60_000 and start.torch_ms > 10
    case = cases.load("mlp")
    given = bench(artifacts("mlp"), factory=lambda state: case.model(), **words)
    assert "the modules are objects" in str(
        given.rows[0].memory["loop"]
    ) and "a loop starts from checkpoints" in str(given.start["loop"])


# ---------------------------------------------------------------- the suite


def test_rows_of_the_suite() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    facts = {(row.name, row.members, row.batch) for row in ROWS}
    assert {
        ("mlp-b1", 100, 1),
        ("deep-mlp", 20, 32),
        ("resnet50", 32, 1),
        ("bert", 8, 4),
        ("lstm", 16, 8),
        ("cnn1d", 30, 16),
        ("rnn-8", 8, 8),
    } <= facts
    assert [row.name for row in chosen(["unet", "vit"])] == ["vit", "unet"], (
        "the rows are not in the order of the suite"
    )
    with pytest.raises(UsageError, match="no row 'nope'; its rows are mlp-b32"):
        chosen(["vit", "nope"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_networks_of_the_suite(row: SuiteRow) -> None:
    """Every network runs at its CPU size. Its published form has the published number of parameters."""
    from widepack.spec.draws import InputSource, draw_all
    from widepack.spec.input_spec import parse_inputs, type_text

    make = factory_of(row.model)
    form = row.form("cpu")
    first, second = states(lambda: make(**form.options), 2, row.shared)
    module = make(**form.options).eval()
    module.load_state_dict(first)
    specs, _ = parse_inputs(list(form.inputs))
    calls = draw_all([InputSource(s.name, type_text(s), s.low, s.high) for s in specs], {"B": 2}, 0)
    with torch.inference_mode():
        y = module(*calls)
    assert y.shape[0] == 2 and torch.isfinite(y).all() and y.std() > 1e-3
    unequal = {name for name in first if not torch.equal(first[name], second[name])}
    assert unequal == {n for n in first if not row.shared(n)} - {
        n for n in first if n.endswith("num_batches_tracked")
    }
    with torch.device("meta"):
        count = sum(p.numel() for p in make(**row.form("full").options).parameters())
    published = {"resnet18": 11_689_512, "resnet50": 25_557_032, "vit": 22_050_664}
    assert count == published.get(row.name, count)


def test_a_row_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one row from random weights to the document, and continues the document.

    Rows in the document do not run again, except noisy ones.
    """
    ran: list[str] = []

    def run(function: str, arguments: dict[str, Any], threads: int) -> dict[str, Any]:
        assert function == "widepack_bench.suite.run:run_named" and threads == 1
        ran.append(arguments["name"])
        row = next(r for r in ROWS if r.name == arguments["name"])
        return (
            kept[0]
            if kept
            else suite_row.run_row(
                replace(row, members=3),
                arguments["size"],
                suite_row.NetworkOptions(**{k: v for k, v in arguments.items() if k not in ("name", "size")}),
            )
        )

    kept: list[dict[str, Any]] = []

    monkeypatch.setattr(suite_run, "in_fresh_process", run)
    out = tmp_path / "suite.json"
    lines: list[str] = []
    options: dict[str, Any] = {"baselines": ("loop",), "budget_s": 0.2, "threads": 1}
    document = suite_run.run_suite("cpu", out, names=["mlp-b1"], report=lines.append, **options)
    assert ran == ["mlp-b1"] and json.loads(out.read_text()) == document
    found = document["rows"]["mlp-b1, 1 thread"]
    assert (
        found["report"]["modules"] == "your own modules"
        and found["report"]["rows"][0]["roofline"]["stream_ms"] > 0
    )
    assert "| MLP 64-128-64 | 100 | 1 | 1 |" in lines[-1]
    kept.append(found)
    for verdict, again in (("holds", False), ("noisy", True), ("slower", False)):
        found["report"]["rows"][0]["verdict"] = verdict
        out.write_text(json.dumps(document))
        ran.clear()
        suite_run.run_suite("cpu", out, names=["mlp-b1"], report=None, **options)
        assert bool(ran) is again, verdict
    with pytest.raises(UsageError, match="has rows in size 'cpu', but this run is for 'full'"):
        suite_run.run_suite("full", out, report=None)
    out.write_text("{}")
    with pytest.raises(UsageError, match="is no document of the suite"):
        suite_run.run_suite("cpu", out, report=None)


@pytest.mark.extended
def test_a_row_in_a_process_that_fails() -> None:
    found = in_fresh_process("widepack_bench.suite.run:run_named", {"name": "nope", "size": "cpu"})
    assert "the suite has no row 'nope'" in found["error"] and suite_table.must_run(found)
    assert "did not end within 0 s" in in_fresh_process("time:sleep", {}, limit_s=0.001)["error"]
    assert "AttributeError" in in_fresh_process("time:nothing", {})["error"]


def fake_row(ratio: float, verdict: str, **others: Any) -> dict[str, Any]:
    interval = {"value": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    row = {
        "median_ms": 1.0,
        "fastest": "vmap",
        "ratio": interval,
        "verdict": verdict,
        "baselines": {
            "vmap": {"median_ms": ratio, "ratio": interval},
            "loop": {"median_ms": 9.0, "ratio": {**interval, "value": 9.0}},
        },
        "others": others,
        "roofline": {"share": 0.5, "stream_ms": 0.2, "least_bytes": 6_600_000, "stream_bytes_per_s": 33e9},
    }
    environment = {"threads": 1, "device": "cpu (X)", "date": "2026-11-21", "versions": {"torch": "2.13"}}
    return {"title": "net", "members": 100, "batch": 1, "report": {"rows": [row], "environment": environment}}


def test_summary_and_table_of_the_suite() -> None:
    by_hand = {
        suite_table.BY_HAND: {"median_ms": 1.1, "over_ours": {"value": 1.1, "low": 1.05, "high": 1.15}}
    }
    rows = {
        "mlp-b1, 1 thread": fake_row(2.0, "holds"),
        "a, 1 thread": fake_row(0.5, "slower"),
        "b, 1 thread": fake_row(8.0, "holds", **by_hand),
        "c, 1 thread": fake_row(50.0, "noisy"),
        "d, 1 thread": {"title": "d", "members": 2, "batch": 1, "error": "it broke"},
    }
    found = suite_table.summary(rows)
    assert found["geometric_mean"] == pytest.approx(2.0) and (found["holds"], found["measured"]) == (2, 3)
    assert found["below"] == ["a, 1 thread"] and found["not_measured"] == ["c, 1 thread", "d, 1 thread"]
    text = suite_table.table({"size": "cpu", "rows": rows, "summary": found})
    assert (
        "2 of 3 measured rows hold (67%)" in text
        and "geometric mean of the ratios to the fastest baseline 2.00" in text
    )
    assert "| net | 100 | 1 | 1 | 1.00 ms | vmap, 2.00 ms | 2.00 [1.99, 2.01] | 9.00 | 50% | holds |" in text
    assert "mlp-b1, 1 thread: the streaming floor is 200 us (6.60 MB at 33.0 GB/s)" in text
    assert (
        "b, 1 thread: the trunk shared by hand takes 1.10 ms, 1.10 [1.05, 1.15] times as long as widepack"
        in text
    )
    assert "chosen plans" not in text and "regret" not in found
    rows["a, 1 thread"]["again"], rows["b, 1 thread"]["again"], rows["c, 1 thread"]["again"] = (
        {"regret": 1.0},
        {"regret": 1.21},
        {"error": "it broke"},
    )
    told = suite_table.summary(rows)
    assert told["regret"] == {"rows": 2, "geometric_mean": pytest.approx(1.1), "worst": ["b, 1 thread", 1.21]}
    assert "take 1.100 times as long as the best candidate (geometric mean of 2 rows" in suite_table.table(
        {"size": "cpu", "rows": rows, "summary": told}
    )
    assert "error: it broke" in text and "2026-11-21, cpu (X), torch 2.13; sizes: cpu." in text


def test_the_table_is_in_the_order_of_the_suite() -> None:
    keys = [f"{row.name}, {threads}" for row in ROWS for threads in ("1 thread", "2 threads")]
    rows = {key: {**fake_row(2.0, "holds"), "title": key} for key in reversed(keys)}
    text = suite_table.table({"size": "cpu", "rows": rows, "summary": suite_table.summary(rows)})
    assert [line.split("|")[1].strip() for line in text.splitlines()[2 : 2 + len(keys)]] == keys


@pytest.mark.extended
def test_a_row_is_tuned_and_its_plan_measured_in_a_separate_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("widepack.tuning.tune.backends_here", lambda device: ("eager",))
    row = next(r for r in ROWS if r.name == "mlp-b1")
    found = suite_row.run_row(
        replace(row, members=3),
        "cpu",
        suite_row.NetworkOptions(
            baselines=("loop",), budget_s=0.2, threads=1, tune=True, backends=("eager",)
        ),
    )
    (tuned,) = found["tune"]["rows"]
    assert tuned["batch"] == 1 and tuned["backend"] == "eager" and found["tune"]["seconds"] > 0
    assert (
        found["again"]["regret"] >= 1
        and found["again"]["best"] in found["again"]["times_ms"]
        and "chosen" in found["again"]["times_ms"]
    )
    arguments = {"batch": 1, "backends": ["eager"], "budget_s": 0.1, "threads": 1, "pin": False}
    assert (
        "nowhere.wide"
        in in_fresh_process("widepack_bench.suite.regret:regret", {**arguments, "artifact": "nowhere.wide"})[
            "error"
        ]
    )


def test_a_trunk_shared_by_hand_is_the_loop() -> None:
    row = next(r for r in ROWS if r.by_hand)
    from widepack_bench.models.transformer import bert

    modules: list[Any] = []
    for state in states(lambda: bert(**row.form("cpu").options), 3, row.shared):
        module = bert(**row.form("cpu").options).eval()
        module.load_state_dict(state)
        modules.append(module)
    ids, mask = torch.randint(0, 1000, (2, 32)), torch.ones(2, 32, dtype=torch.int64)
    with torch.inference_mode():
        assert difference(suite_row.by_hand(modules, "cpu")(ids, mask), loop(modules, False)(ids, mask)) == ""


# ---------------------------------------------------------------- the command


def command(*words: Any) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, ["bench", *map(str, words)])


def test_command_of_a_profile(artifacts: Artifacts, tmp_path: Path) -> None:
    done = command(
        artifacts("mlp"),
        "--profile",
        "--batch",
        "2",
        "--threads",
        "1",
        "--trace",
        tmp_path / "t.json",
        "--json",
        tmp_path / "p.json",
    )
    assert done.exit_code == 0, done.output
    assert "the nodes of the members' own programs" in done.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "p.json").read_text())["profiles"][0]["batch"] == 2


def test_command_writes_a_page(artifacts: Artifacts, tmp_path: Path) -> None:
    words = ("--batch", "2", "--baseline", "loop", "--budget", "0.3", "--threads", "1", "--backend", "eager")
    done = command(artifacts("mlp"), *words, "--html", tmp_path / "r.html")
    assert done.exit_code in (0, 1), done.output  # 1: the machine is too busy
    assert "backend eager" in done.output and "p99" in done.output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'ARTIFACT'"),
        (("x.wide", "--suite", "cpu"), "unexpected extra argument (x.wide)"),
        (("x.wide", "--rows", "vit"), "No such option '--rows'"),
        (("--suite", "cpu", "--rows", "nope"), "the suite has no row 'nope'"),
        (("x.wide", "--model-arg", "a=1"), "--model-arg is an argument of the factory: give --model, too"),
        (("x.wide", "--html", "."), ". is a folder"),
        (
            ("x.wide", "--profile", "--backend", "eager", "--full"),
            "--profile and --trace cannot be used with --full, --backend",
        ),
        (("--suite", "cpu", "--levels", "--model", "a:b"), "No such option '--levels'"),
        (("x.wide", "--tune"), "No such option '--tune'"),
    ],
)
def test_command_refuses(words: Sequence[str], message: str) -> None:
    done = command(*words)
    assert done.exit_code == 2 and message in done.output
