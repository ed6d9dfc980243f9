"""Measures layers and blocks in the way of published tables, and beside N layers in one program.

    python scripts/measure/peer_layers.py
    python scripts/measure/peer_layers.py --device cpu --preset ci --members 2 --names linear,layernorm

`peer_claims.py` has the published figures. The shapes are those of `widepack bench-layers -p full`. The
largest number of members is measured first, for all layers. With `--jobs` the rows are taken in groups of
so many: their processes compile at the same time, which fills the caches of torch's compiler; then one
process measures row by row. If it ends, a new one goes on with the next row. There are two ways of
counting.

1. `published`, with gradients on. Ours: `widepack.fuse` of the members, as it is and after `compile()`.
   Baselines: one compiled module that is called N times (`one module`), and the N modules in one compiled
   program (`one program`).
2. `inference`. Ours: the wide program of each strategy, and under `torch.compile`; on a CUDA device also as
   CUDA graphs. Baselines: `compiled-loop` and `cuda-graph-loop`.

All members get equal inputs, each its own copy for ours. Ours is the form that is fastest in three calls,
after its answers were compared with each member alone in float64; the times of all forms are in the row. A
form or a baseline that cannot be made, or that answers otherwise, is in the row with the reason.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peer_claims import LAYERS, ONE_MODULE, ONE_PROGRAM
from runner import RowFile, build_threads, file_of, parser, say
from torch import Tensor, nn

import widepack
from widepack_bench.baselines.compiled import TooLong, at_most, compiler_settings
from widepack_bench.baselines.cuda_graph import recorded
from widepack_bench.baselines.members import reason
from widepack_bench.baselines.table import BASELINES
from widepack_bench.layers.block_sweeps import FAMILY, sweeps
from widepack_bench.layers.contestants import shortest
from widepack_bench.layers.in_memory import InMemory, inputs, members
from widepack_bench.layers.reference import LayerReference
from widepack_bench.layers.sweeps import Sweep, find
from widepack_bench.measure.answers import difference, leaves
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race
from widepack_bench.processes.fresh import ProcessEnded, in_fresh_process, lines_of_fresh_process

MEMBERS = (32, 16, 8, 4)
MORE_S = 60.0  # what a row may take beyond the compilation of its contestants
CONTESTANTS = 12
INFERENCE = ("compiled-loop", "cuda-graph-loop")
LEAST_ROUNDS = 12  # six even rounds: fewer give no 95% interval
SAMPLE_CALLS, SAMPLE_S = 5, 0.008  # an estimate: calls and further seconds of a sample in a race

Call = Callable[[], Any]
Task = tuple[str, int]
"""A layer's name and N."""


@dataclass
class Contest:
    """The calls of one way of counting.

    limit_s: the seconds in which each must be compiled. right: returns what is wrong with an answer of all
    members; empty where nothing is. forms: of widepack. skipped: the reasons why calls are missing.
    """

    limit_s: float
    right: Callable[[Any], str]
    forms: dict[str, Call] = field(default_factory=dict)
    baselines: dict[str, Call] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Call], form: bool = True, checked: bool = True) -> None:
        """Adds a form of widepack, or a baseline, if it can be made and its answer is right.

        checked: whether it gives the answer of all members.
        """
        try:
            with at_most(self.limit_s):
                call = make()
                wrong = self.right(call()) if checked else ""
                call()
        except (Exception, TooLong) as error:  # noqa: BLE001  # compilers raise errors of any class
            self.skipped[name] = reason(error)
            return
        if wrong:
            self.skipped[name] = f"its answers are not the members': {wrong}"
        else:
            (self.forms if form else self.baselines)[name] = call

    def measured(self, seconds: float, sync: Call | None, exact: Callable[[Any], str]) -> dict[str, Any]:
        """Returns the figures of a race of the fastest form against the baselines.

        seconds: of the race. sync: waits for the device. exact: compares an answer with float64. The fastest
        form whose answer is right by it takes part.
        """
        tried = {name: shortest(call, sync) for name, call in self.forms.items()}
        best = ""
        for name in sorted(tried, key=lambda name: tried[name]):
            wrong = exact(self.forms[name]())
            if not wrong:
                best = name
                break
            self.skipped[name] = f"its answers are not the members': {wrong}"
        if not best or not self.baselines:
            return {"error": "nothing to compare", "skipped": self.skipped}
        times = [tried[best], tried[best], *(shortest(call, sync) for call in self.baselines.values())]
        # The race ends at three times its budget, which must be enough for the least number of rounds.
        seconds = max(seconds, LEAST_ROUNDS / 2 * sum(SAMPLE_CALLS * t + SAMPLE_S for t in times))
        run = race(self.forms[best], self.baselines, budget_s=seconds, min_rounds=LEAST_ROUNDS, sync=sync)
        return {
            "form": best,
            "ms": run.median_ms(OURS),
            "forms_ms": {name: 1e3 * s for name, s in tried.items()},
            "baselines_ms": {name: run.median_ms(name) for name in self.baselines},
            "ratios": {name: run.ratio(name).to_json() for name in self.baselines},
            "fastest": run.fastest,
            "noise": run.noise.to_json(),
            "quiet": run.quiet,
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class Layer:
    """The members of a row, and the inputs of one call.

    args: of one member. stacked: a copy of them for each member. limit_s: the seconds in which each
    contestant must be compiled.
    """

    sweep: Sweep
    preset: str
    device: str
    modules: Sequence[nn.Module]
    args: Sequence[Tensor]
    stacked: Sequence[Tensor]
    limit_s: float

    @classmethod
    def of(cls, name: str, count: int, preset: str, device: str, limit_s: float) -> Layer:
        """Makes the members and the inputs on the CPU."""
        (sweep,) = find(name, sweeps())
        shape = sweep.at(preset)
        own = members(partial(sweep.make, preset), count)
        args = [v[0] for v in inputs(shape.inputs, shape.batch, 1)]
        return cls(sweep, preset, device, own, args, [torch.stack([v] * count) for v in args], limit_s)

    def copies(self, trained: bool) -> list[nn.Module]:
        """Returns copies of the members on the device. trained: whether their parameters need gradients."""
        return [copy.deepcopy(m).to(self.device).requires_grad_(trained) for m in self.modules]

    def on_device(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors on the device."""
        return [v.to(self.device) for v in values]

    def published(self, right: Callable[[Any], str]) -> Contest:
        """Returns the contest with gradients on. right: as in `Contest`."""
        contest = Contest(self.limit_s, right)
        args, stacked = self.on_device(self.args), self.on_device(self.stacked)
        modules = self.copies(trained=True)

        def fused(compiled: bool) -> Call:
            own = [copy.deepcopy(m).requires_grad_() for m in self.modules]
            module = widepack.fuse(own, tuple(self.args), validate=False).to(self.device)
            if compiled:
                module.compile()
            return lambda: module.each(*stacked)

        def one_module() -> Call:
            one, count = torch.compile(modules[0], dynamic=False), len(modules)
            return lambda: [one(*args) for _ in range(count)]

        def one_program() -> Call:
            run = torch.compile(lambda *a: [m(*a) for m in modules], dynamic=False)
            return lambda: run(*args)

        contest.add("fused", partial(fused, False))
        contest.add("fused, compiled", partial(fused, True))
        contest.add(ONE_MODULE, one_module, form=False, checked=False)
        contest.add(ONE_PROGRAM, one_program, form=False, checked=False)
        return contest

    def inference(self, right: Callable[[Any], str]) -> Contest:
        """Returns the contest without gradients. right: as in `Contest`."""
        contest, stacked = Contest(self.limit_s, right), self.on_device(self.stacked)
        specs = self.sweep.at(self.preset).inputs
        with torch.inference_mode(False):
            make = partial(self.sweep.make, self.preset)
            wide = InMemory(make, self.modules, specs, self.stacked, True, self.device)
        # A block has many ops: the strategies of each op would be hundreds of programs.
        programs, contest.skipped = wide.contestants(() if self.sweep.family == FAMILY else None)
        for program in [*programs, wide.compiled()]:
            contest.add(program.name, partial(partial, program.run, *stacked))
            if self.device.startswith("cuda") and program.name in contest.forms:
                graph = partial(partial, recorded(program.run), *stacked)
                contest.add(f"{program.name} as a graph", graph)
        modules = self.copies(trained=False)
        for name in INFERENCE:
            contest.add(name, partial(_baseline, name, modules, stacked), form=False)
        return contest


def _baseline(name: str, modules: Sequence[Any], inputs: Sequence[Any]) -> Call:
    return partial(BASELINES[name](modules, True), *inputs)


def rows(
    tasks: Sequence[Task], preset: str, device: str, seconds: float, limit_s: float, timed: bool
) -> Iterator[dict[str, Any]]:
    """Yields the rows of layers, as `{"row": ...}`. Runs in a process of its own.

    preset: the shapes, `ci` or those of published tables. seconds: of each race. limit_s: seconds in which
    each contestant must be compiled. timed: False: only compile, which fills the caches of torch's
    compiler.
    """
    for name, count in tasks:
        try:
            yield {"row": measured(name, count, preset, device, seconds, limit_s, timed)}
        except Exception as error:  # noqa: BLE001  # whatever a layer or a compiler raises is this row's result
            yield {"row": {"name": name, "members": count, "error": reason(error)}}
            if not _usable(device):
                return


def _usable(device: str) -> bool:
    """Returns whether the process can go on. An error in a kernel ends the process's use of the device."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def prepared(tasks: Sequence[Task], **options: Any) -> dict[str, Any]:
    """Compiles the contestants of rows without timing them. Returns how many rows there were."""
    return {"prepared": len(list(rows(tasks, timed=False, **options)))}


def measured(
    name: str, count: int, preset: str, device: str, seconds: float, limit_s: float, timed: bool = True
) -> dict[str, Any]:
    """Returns a row. The arguments are those of `rows`."""
    begin = time.perf_counter()
    sync = torch.cuda.synchronize if device.startswith("cuda") else None
    row: dict[str, Any] = {"name": name, "members": count}
    torch._dynamo.reset()
    with quiet(build_threads(device) if timed else 1):
        layer = Layer.of(name, count, preset, device, limit_s)
        reference = LayerReference.of(layer.modules, layer.stacked, True) if timed else None
    with quiet(1), compiler_settings():
        for way in ("published", "inference"):
            with torch.enable_grad() if way == "published" else torch.inference_mode():
                right = _near(reference, device)
                contest = layer.published(right) if way == "published" else layer.inference(right)
                if reference is not None:
                    row[way] = contest.measured(seconds, sync, reference.wrong)
            del contest
            torch._dynamo.reset()
            gc.collect()
    if sync is not None:
        sync()  # raises where a kernel has failed
        torch.cuda.empty_cache()
    return {**row, "seconds": time.perf_counter() - begin}


def _near(reference: LayerReference | None, device: str) -> Callable[[Any], str]:
    """Returns a comparison on the device with the members' answers in their dtype. It is fast, and finds
    answers of another meaning; the form that is raced is compared with float64 too.
    """
    if reference is None:
        return lambda answer: ""
    expected = [torch.stack(list(outputs)).to(device) for outputs in zip(*reference.own, strict=True)]
    return lambda answer: difference([leaf.detach() for leaf in leaves(answer)], expected)


def key_of(name: str, count: int) -> str:
    """Returns the key of a row: `linear, N=32`."""
    return f"{name}, N={count}"


def prepare(tasks: Sequence[Task], options: dict[str, Any], limit_s: float) -> None:
    """Compiles the contestants of rows, each row in its own process.

    tasks: of the rows. options: those of `rows`. limit_s: after which a process is ended: what
    it did not compile is compiled when it is measured.
    """

    def run(task: Task) -> None:
        found = in_fresh_process(
            "peer_layers:prepared",
            {"tasks": [task], **options},
            threads=1,
            limit_s=limit_s,
            environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        say("prepared", key_of(*task), found.get("error", ""))

    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(run, tasks))


def measure(tasks: Sequence[Task], file: RowFile, options: dict[str, Any]) -> None:
    """Measures rows into the file. A row whose process ends has the reason as its error."""
    waiting = list(tasks)
    limit_s = CONTESTANTS * options["limit_s"] + MORE_S
    while waiting:
        why, given = "it gave no row", 0
        try:
            for line in lines_of_fresh_process(
                "peer_layers:rows",
                {"tasks": waiting, "timed": True, **options},
                threads=1,
                limit_s=limit_s,
                steady=True,
            ):
                key = key_of(*waiting.pop(0))
                file.add(key, line["row"])
                say(key, line["row"].get("error", "is measured"))
                given += 1
        except ProcessEnded as error:
            why, given = str(error), 0
        if waiting and not given:  # a process that gave rows and returned cannot use the device any more
            name, count = waiting.pop(0)
            file.add(
                key_of(name, count), {"name": name, "members": count, "error": f"its process ended: {why}"}
            )


def main() -> None:
    """Measures the rows that the file does not have yet."""
    found = parser(__doc__, "device/layers.json", seconds=1.0, device="cuda")
    found.add_argument("--names", help="layers, separated by commas (default: those of a published table)")
    found.add_argument("--members", default=",".join(map(str, MEMBERS)), help="numbers of members, in order")
    found.add_argument("--preset", choices=["ci", "full"], default="full", help="the shapes")
    found.add_argument("--compile-limit", type=float, default=40.0, help="seconds for each contestant")
    found.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 4), help="rows that are compiled at once"
    )
    found.add_argument("--prepare-limit", type=float, default=60.0, help="seconds of compiling beforehand")
    given = found.parse_args()
    names = given.names.split(",") if given.names else list(LAYERS)
    options = {name: getattr(given, name) for name in ("preset", "device", "seconds")}
    options["limit_s"], file = given.compile_limit, file_of(given)
    for count in map(int, given.members.split(",")):
        tasks = [(name, count) for name in names if file.must_run(key_of(name, count))]
        part = given.jobs if given.jobs > 1 else len(tasks)
        for begin in range(0, len(tasks), max(1, part)):
            some = tasks[begin : begin + part]
            if given.jobs > 1:
                prepare(some, options, given.prepare_limit)
            measure(some, file, options)


if __name__ == "__main__":
    main()
