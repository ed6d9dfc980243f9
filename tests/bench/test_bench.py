"""Tests the statistics of the benchmark on simulated machines, and its baselines on small networks."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import QUICK
from support import Artifacts
from torch import Tensor, nn

import cases
import widepack
from widepack.building.build import build
from widepack.errors import UsageError
from widepack_artifacts.entry import Dim, Entry, Guard, Input, Parameter
from widepack_bench import Report, bench, compare
from widepack_bench.baselines.member_programs import Flat, flat_members
from widepack_bench.baselines.table import BASELINES, difference, leaves, loop, stack
from widepack_bench.errors import BenchError
from widepack_bench.measure import inputs
from widepack_bench.measure import race as noise
from widepack_bench.measure.processors import quiet
from widepack_bench.report.row import Row
from widepack_bench.text import columns, duration, plural, size


class Machine:
    """A simulated machine, whose clock only its calls move.

    `slow` returns the factor of each call, from the seeded random source and the time.
    """

    def __init__(self, slow: Callable[[random.Random, int], float], seed: int = 0) -> None:
        self.now = 0
        self._slow = slow
        self._random = random.Random(seed)

    def clock(self) -> int:
        return self.now

    def call(self, ns: float) -> Callable[[], None]:
        def run() -> None:
            self.now += max(1, round(ns * self._slow(self._random, self.now)))

        return run


def calm(source: random.Random, _now: int) -> float:
    return source.gauss(1.0, 0.02)


def test_every_contestant_runs_at_every_position() -> None:
    for count in (3, 4, 5, 6):
        rows = [noise.order(r, count) for r in range(4 * count)]
        assert all(rows[r] == rows[r + 1] for r in range(0, len(rows), 2)), (
            "an odd and an even round have different orders"
        )
        places = Counter((i, who) for row in rows for i, who in enumerate(row))
        followers = Counter(pair for row in rows for pair in pairwise(row))
        assert len(places) == count**2 and len(set(places.values())) == 1
        assert len(followers) == count * (count - 1) and len(set(followers.values())) == 1


def test_interval_of_the_median() -> None:
    assert noise.median_interval([3.0, 1.0, 2.0]) == noise.Interval(2.0, 0.0, math.inf)
    # n = 10: 1023/1024 of the mass is inside the extremes; 2.1% is outside the 2nd and 9th, and 10.9% outside
    # the 3rd and 8th
    assert noise.median_interval([float(i) for i in range(1, 11)]) == noise.Interval(5.5, 2.0, 9.0)
    assert noise.Interval(8.0, 7.8, 8.4).width == pytest.approx(0.075)
    assert noise.Interval(0.5, 0.45, 0.54).width == pytest.approx(0.09)
    assert noise.Interval(1.0, 0.0, math.inf).to_json() == {"value": 1.0, "low": 0.0, "high": None}


def test_interval_covers_the_truth() -> None:
    source = random.Random(1)
    inside = 0
    for _ in range(400):
        found = noise.median_interval([source.lognormvariate(0.0, 0.3) for _ in range(25)])
        inside += found.low <= 1.0 <= found.high
    assert inside >= 0.93 * 400


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("truth", [0.8, 1.0, 1.25, 6.0])
def test_a_known_ratio_is_inside(truth: float) -> None:
    machine = Machine(calm)
    race = noise.race(
        machine.call(50_000),
        {"slow": machine.call(80_000 * max(1, truth)), "loop": machine.call(50_000 * truth)},
        clock=machine.clock,
    )
    ratio = race.ratio("loop")
    assert race.fastest == "loop"
    assert ratio.low * 0.99 <= truth <= ratio.high * 1.01
    assert race.quiet and race.noise.low <= 1.01 and race.noise.high >= 0.99
    assert race.verdict == ("slower" if truth < 1 else "holds"), race.why
    assert "the fastest of the measured baselines (slow, loop)" in race.why


def test_a_drifting_machine_is_measured() -> None:
    """The machine becomes four times slower during the run.

    Medians of all times would mix both speeds. Ratios within a round do not.
    """
    machine = Machine(lambda source, now: (1 + 3 * min(1.0, now / 2e8)) * source.gauss(1.0, 0.02))
    race = noise.race(
        machine.call(200_000), {"loop": machine.call(300_000)}, clock=machine.clock, min_rounds=40
    )
    assert race.quiet
    assert race.ratio("loop").value == pytest.approx(1.5, rel=0.05)


def test_a_noisy_machine_is_refused() -> None:
    machine = Machine(lambda source, now: source.lognormvariate(0.0, 1.5))
    race = noise.race(
        machine.call(30_000_000), {"loop": machine.call(60_000_000)}, clock=machine.clock, budget_s=5.0
    )
    assert race.verdict == "noisy"
    assert "against itself gave" in race.why and str(race.noise) in race.why


def test_a_biased_clock_is_refused() -> None:
    """A against A differs by 10%, with a narrow interval: the clock is biased, and no ratio is valid."""
    rounds = tuple((100.0 + i % 3, 110.0 + i % 3, 200.0) for i in range(40))
    race = noise.Race((noise.OURS, noise.AGAIN, "loop"), rounds)
    assert race.noise.width < 0.1 and race.verdict == "noisy"


def test_the_choice_of_the_fastest_does_not_bias_its_ratio() -> None:
    """The fastest baseline is chosen on the odd rounds, and its ratio is computed on the even rounds."""
    rounds = tuple((1.0, 1.0, 1.0, 1.2) if i % 2 == 0 else (1.0, 1.0, 1.3, 1.2) for i in range(40))
    race = noise.Race((noise.OURS, noise.AGAIN, "lucky", "steady"), rounds)
    assert race.fastest == "lucky" and race.ratio("lucky").value == 1.3


def test_rounds_end() -> None:
    machine = Machine(lambda source, now: source.lognormvariate(0.0, 1.0))
    slow = noise.race(machine.call(2e9), {"loop": machine.call(2e9)}, clock=machine.clock, budget_s=20.0)
    assert len(slow.rounds) < noise.MIN_ROUNDS and slow.verdict == "noisy", (
        "the race did not end at three times the budget, or gave a verdict from too few rounds"
    )
    steady = Machine(lambda source, now: 1.0)
    assert (
        len(noise.race(steady.call(1e6), {"loop": steady.call(1e6)}, clock=steady.clock).rounds)
        == noise.MIN_ROUNDS
    )
    with pytest.raises(ValueError, match="baseline"):
        noise.race(steady.call(1), {})


def test_quiet_restores_the_settings() -> None:
    before = torch.get_num_threads()
    with quiet(1, pin=True) as threads:
        assert threads == torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(4, classes)
        self.norm = nn.BatchNorm1d(classes)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.norm(self.fc(x))
        return {"y": y if scale is None else y * scale, "top": y.argmax(-1), "none": None}


def members(count: int = 3, classes: Callable[[int], int] = lambda i: 3) -> list[nn.Module]:
    nets: list[nn.Module] = []
    for i in range(count):
        torch.manual_seed(i)
        net = Net(classes(i))
        assert net.norm.running_mean is not None
        nn.init.normal_(net.norm.running_mean)
        nets.append(net.eval())
    return nets


class Wide:
    """Replaces a WideModel: the loop over the members, or a loop with wrong answers."""

    def __init__(self, modules: list[nn.Module], wrong: bool = False) -> None:
        self._modules, self._wrong = modules, wrong
        self.members = tuple(f"m{i}" for i in range(len(modules)))

    def __len__(self) -> int:
        return len(self._modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y, top = loop(self._modules, False)(*args, **kwargs)
        return {"y": y.flip(0) if self._wrong else y, "top": top}

    def each(self, *args: Any, **kwargs: Any) -> Any:
        return loop(self._modules, True)(*args, **kwargs)

    def member(self, index: int) -> nn.Module:
        return self._modules[index]


@pytest.mark.parametrize("each", [False, True])
def test_baselines_give_the_loops_answers(each: bool) -> None:
    nets = members()
    x, scale = torch.randn(*([3] if each else []), 5, 4), torch.rand(*([3] if each else []), 3)
    with torch.inference_mode():
        expected = loop(nets, each)(x, scale=scale)
        for i, net in enumerate(nets):
            alone = net(x[i] if each else x, scale=scale[i] if each else scale)
            assert torch.equal(expected[0][i], alone["y"]) and torch.equal(expected[1][i], alone["top"])
        got = BASELINES["vmap"](nets, each)(x, scale=scale)
    assert difference(got, expected) == ""


def test_difference_describes_the_error() -> None:
    a = torch.randn(4, 5)
    nan = a.clone()
    nan[0, 0] = math.nan
    assert difference(a, a * (1 + 1e-6)) == ""
    assert difference(nan, nan.clone()) == ""
    assert "NaN" in difference(nan, a)
    assert "rms error" in difference(a * 1.01, a)
    assert "expected [4, 5]" in difference(a[0], a)
    assert difference([a, a], [a]) == "2 output tensors, expected 1"
    assert "1 of 2 values differ" in difference([a, torch.tensor([1, 2])], [a, torch.tensor([1, 3])])


def test_ragged_outputs_stay_lists_and_vmap_is_skipped() -> None:
    nets = members(classes=lambda i: 3 + i)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        y, top = loop(nets, False)(x)
    assert [t.shape[-1] for t in y] == [3, 4, 5] and top.shape == (3, 2)
    report = compare(
        Wide(nets),
        nets,
        (2,),
        baselines=("loop", "vmap"),
        budget_s=1.0,
        inputs=lambda batch: ((torch.randn(batch, 4),), {}),
    )
    assert "fc.weight have different shapes" in report.rows[0].skipped["vmap"]
    assert "vmap was skipped" in report.table()


def test_leaves_of_mappings_and_tuples() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert [t.item() for t in leaves({"x": a, "y": [b, None, "text", 3, (a,)]})] == [0.0, 1.0, 0.0]
    assert stack([(a, b), (b, a)])[0].tolist() == [[0.0], [1.0]]


@pytest.mark.extended
def test_compare_reports_rows() -> None:
    nets = members()
    seen: list[tuple[str, int, int]] = []
    report = compare(
        Wide(nets),
        nets,
        (1, 3),
        baselines=("loop", "vmap"),
        budget_s=0.5,
        inputs=lambda b: ((torch.randn(b, 4),), {}),
        progress=lambda *a: seen.append(a),
    )
    assert (
        [row.batch for row in report.rows] == [1, 3]
        and report.members == 3
        and report.modules == "your own modules"
    )
    assert {t.name for t in report.rows[0].timings} == {"loop", "vmap"}
    assert report.rows[0].fastest == "loop", (
        "the loop is not the fastest: vmap adds overhead to a network of this size"
    )
    assert seen[0] == ("batch 1", 0, 2) and seen[-1][1:] == (2, 2)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (
        document["format"] == "widepack.bench/1"
        and document["environment"]["versions"]["torch"] == torch.__version__
    )
    assert {"device", "threads", "commit", "command", "cpus", "date", "system", "versions"} == set(
        document["environment"]
    )
    assert set(document["rows"][0]) == {
        "batch",
        "sizes",
        "median_ms",
        "latency",
        "samples_per_s",
        "answers_per_s",
        "memory",
        "roofline",
        "others",
        "baselines",
        "skipped",
        "fastest",
        "ratio",
        "noise",
        "rounds",
        "verdict",
        "why",
    }
    assert (
        "the artifact's member programs"
        in compare(
            Wide(nets),
            None,
            (1,),
            baselines=("loop",),
            budget_s=0.5,
            inputs=lambda b: ((torch.randn(b, 4),), {}),
        ).modules
    )


def test_each_pattern_is_compared() -> None:
    nets = members()
    report = compare(
        Wide(nets),
        nets,
        (2,),
        baselines=("loop",),
        pattern="each",
        budget_s=0.5,
        inputs=lambda b: ((torch.randn(3, b, 4),), {}),
    )
    assert report.pattern == "each" and "each member has its own inputs" in report.table()


def test_wrong_answers_are_never_timed() -> None:
    nets = members()
    with pytest.raises(BenchError, match=r"does not give the members' answers.*rms error"):
        compare(
            Wide(nets, wrong=True),
            nets,
            (4,),
            baselines=("loop",),
            inputs=lambda b: ((torch.randn(b, 4),), {}),
        )
    with pytest.raises(BenchError, match=r"2 modules were given.*3 members"):
        compare(Wide(nets), nets[:2], (4,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"baselines": ("lop",)},
            "unknown baseline 'lop'; known: loop, compiled-member, compiled-loop, vmap, "
            "vmap-compiled, onnxruntime, cuda-graph-loop",
        ),
        ({"baselines": ()}, "none given"),
        ({"pattern": "all"}, "unknown pattern 'all'; known: shared, each"),
        ({"batches": (0,)}, "whole numbers from 1, got 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compare(Wide(members()), None, **options)


def test_a_baseline_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(modules: Any, each: bool) -> Any:
        raise RuntimeError("no compiler\nand much more")

    def wrong(modules: Any, each: bool) -> Any:
        return lambda x: [v * 2 for v in loop(modules, each)(x)]

    nets = members()
    monkeypatch.setitem(BASELINES, "vmap", broken)
    monkeypatch.setitem(BASELINES, "vmap-compiled", wrong)
    names = ("loop", "vmap", "vmap-compiled")
    report = compare(
        Wide(nets), nets, (2,), baselines=names, budget_s=0.5, inputs=lambda b: ((torch.randn(b, 4),), {})
    )
    assert report.rows[0].skipped["vmap"] == "RuntimeError: no compiler"
    assert "not the loop's" in report.rows[0].skipped["vmap-compiled"]


class Masked(nn.Module):
    """A module with two inputs, sizes, reshapes and a batch norm. vmap has no rule for some captured ops."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(
        self, x: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:  # [B, T, 8], [B, T] -> [B, 6], [B, T, 6]
        y = self.norm(self.fc(x).view(-1, 6)).view(x.shape[0], x.shape[1], 6) * mask.unsqueeze(-1)
        return y.sum(1), y


def test_an_artifacts_own_members_are_fair_baselines(tmp_path: Path) -> None:
    """The members of an artifact are plain modules without widepack's checks, and vmap accepts them."""
    paths = []
    for i in range(3):
        torch.manual_seed(i)
        module = Masked()
        assert module.norm.running_mean is not None
        nn.init.normal_(module.norm.running_mean)
        nn.init.normal_(module.fc.bias)
        paths.append(tmp_path / f"{i}.pt")
        torch.save(module.state_dict(), paths[-1])
    build(paths, tmp_path / "x.wide", model=Masked, inputs=["x=float32[B,T,8]", "mask=float32[B,T]"], **QUICK)
    ens = widepack.load(tmp_path / "x.wide")
    flat = flat_members(ens)
    assert all(isinstance(m, Flat) for m in flat)
    for each in (False, True):
        args, kwargs, _ = inputs.make(ens.manifest.entries["forward"], 3, members=3 if each else 0)
        with torch.inference_mode():
            expected = (ens.each if each else ens)(*args, **kwargs)
            for baseline in ("loop", "vmap"):
                assert difference(BASELINES[baseline](flat, each)(*args, **kwargs), expected) == "", baseline


@pytest.mark.extended
def test_bench_of_an_artifact_with_your_own_modules(artifacts: Artifacts) -> None:
    case = cases.load("mlp")
    words: dict[str, Any] = {"batches": (2,), "baselines": ("loop",), "budget_s": 0.5, "threads": 1}
    report = bench(artifacts("mlp"), factory=lambda state: case.model(), **words)
    assert (report.modules, report.members, report.rows[0].batch) == ("your own modules", case.N, 2)
    assert "member programs" in bench(artifacts("mlp"), **words).modules
    with pytest.raises(BenchError, match=r"has other shapes in .*, which the model of the factory needs"):
        bench(artifacts("mlp"), factory=lambda state: case.model(width=7), **words)
    with pytest.raises(BenchError, match=r"the artifact has no .*, which the model of the factory needs"):
        bench(artifacts("mlp"), factory=lambda state: Net(), **words)


def row(**changes: Any) -> Row:
    exact = noise.Interval(2.0, 1.98, 2.02)
    base = Row.of(
        8,
        {"B": 8, "T": 33},
        noise.Race((noise.OURS, noise.AGAIN, "loop"), tuple((1e6, 1e6, 2e6) for _ in range(40))),
        {"vmap": "no reason"},
    )
    assert base.ratio.value == exact.value and base.verdict == "holds"
    return replace(base, **changes)


def test_table_and_verdict_of_a_report() -> None:
    report = Report(
        "ens.wide",
        8,
        "shared",
        "your own modules",
        (row(),),
        {},
        {"device": "cpu (X)", "threads": 1, "versions": {"torch": "2.13"}},
    )
    table = report.table()
    assert report.holds and not report.noisy
    assert (
        "8 members" in table
        and "1 thread," in table
        and "B=8 T=33" in table
        and "2.00 [2.00, 2.00]*" in table
        and "vmap was skipped: no reason" in table
    )
    assert not replace(report, rows=(row(verdict="slower"),)).holds
    assert not replace(report, refused={100: "too large"}).holds and not replace(report, rows=()).holds
    assert replace(report, rows=(row(verdict="noisy"),)).noisy
    assert "batch 100: not measured: too large" in replace(report, refused={100: "too large"}).table()


def entry(
    types: dict[str, tuple[str, int | None, int | None]],
    dims: dict[str, Dim],
    conditions: list[Any] | None = None,
) -> Entry:
    return Entry(
        inputs=tuple(Input(name=n, type=t, low=low, high=high) for n, (t, low, high) in types.items()),
        signature=[
            Parameter(n, "positional" if i == 0 else "keyword", {"leaf": i}) for i, n in enumerate(types)
        ],
        outputs=(),
        result={"tuple": []},
        dims=dims,
        guards=tuple(Guard(expr=g) for g in conditions or []),
        fixed=[],
        member=[],
        signatures=[],
        wide=(),
    )


def dim(least: int, most: int | None = None) -> Dim:
    return Dim(min=least, max=most)


def test_inputs_follow_the_manifest() -> None:
    described = entry(
        {
            "ids": ("int64[B,T]", 5, 9),
            "mask": ("bool[B,T]", None, None),
            "img": ("float32[B,3,32*H]", None, None),
        },
        {"B": dim(1), "T": dim(2, 512), "H": dim(1, 1)},
    )
    args, kwargs, sizes = inputs.make(described, 7)
    assert sizes == {"B": 7, "T": 33, "H": 1}
    assert (
        args[0].shape == (7, 33)
        and args[0].dtype == torch.int64
        and args[0].min() >= 5
        and args[0].max() <= 9
    )
    assert kwargs["mask"].dtype == torch.bool and kwargs["img"].shape == (7, 3, 32)
    stacked = inputs.make(described, 7, members=4)[0][0]
    assert stacked.shape == (4, 7, 33)
    assert not torch.equal(stacked[0], stacked[1]), "equal inputs hide a swap of members"
    assert torch.equal(inputs.make(described, 7)[0][0], args[0]), "the inputs differ between calls"


def test_inputs_satisfy_the_guards() -> None:
    dims = {"B": dim(1, 100), "H": dim(1), "W": dim(1)}
    described = entry(
        {"x": ("float32[B,H,W]", None, None)},
        dims,
        [["eq", ["mod", "H", 32], 0], ["ne", ["mod", "W", 2], 1], ["le", "H", "W"]],
    )
    sizes = inputs.sizes(described, 2)
    assert sizes["H"] % 32 == 0 and sizes["W"] % 2 == 0 and sizes["H"] <= sizes["W"] <= 64
    with pytest.raises(BenchError, match="batch 101: the model was built for B from 1 to 100"):
        inputs.sizes(described, 101)
    with pytest.raises(BenchError, match=r"no sizes of B, H, W were found that satisfy .*H < 0"):
        inputs.sizes(replace(described, guards=(Guard(expr=["lt", "H", 0]),)), 2)


def test_the_batch_is_b_or_the_first_dim() -> None:
    assert inputs.batch_dim(entry({"x": ("float32[T,B,64]", None, None)}, {"T": dim(1), "B": dim(1)})) == "B"
    assert inputs.batch_dim(entry({"x": ("float32[R,64]", None, None)}, {"R": dim(1)})) == "R"
    assert inputs.sizes(entry({"x": ("float32[4,64]", None, None)}, {}), 8) == {}


def test_text() -> None:
    assert [duration(ms) for ms in (0.0352, 0.9996, 1.24, 999.4, 2050.0, 123456.0)] == [
        "35.2 us",
        "1.00 ms",
        "1.24 ms",
        "999 ms",
        "2.05 s",
        "123 s",
    ]
    assert [size(n) for n in (512, 1000, 8_400_000)] == ["512 B", "1.00 kB", "8.40 MB"]
    assert plural(1, "member") == "1 member" and plural(2, "member") == "2 members"
    assert columns([["name", "time"], ["a", "5 us"], ["longer", "15 us"]]) == [
        "name     time",
        "a        5 us",
        "longer  15 us",
    ]


def modules_after(code: str) -> Iterator[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    yield from done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "widepack_bench",
        "widepack_bench.text",
        "widepack_bench.measure.race",
        "widepack_bench.report.document",
    ],
)
def test_light_imports(module: str) -> None:
    assert "torch" not in set(modules_after(f"import {module}"))
