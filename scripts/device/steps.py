"""Lists the steps of `scripts/on_device.py` in order of worth.

A step is one or more commands that write a document row by row, and continue an existing document. On the CPU
every step has small sizes: a rehearsal, which shows that all steps run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURE = ROOT / "scripts" / "measure"
CPU = "cpu"
NO_TESTS = 5  # the exit code of pytest where no test is left: all passed in an earlier call

Command = list[str]


@dataclass(frozen=True)
class Plan:
    """Where the steps run.

    device: its name. out: the folder of the documents. collection: a folder of architectures for
    `scripts/measure/backends.py`; without it that step runs nothing.
    """

    device: str
    out: Path
    collection: Path | None = None

    @property
    def rehearsal(self) -> bool:
        """Whether this is the CPU, where all sizes are small."""
        return self.device == CPU

    def file(self, name: str) -> str:
        """Returns the path of a document."""
        return str(self.out / f"{name}.json")

    def sized(self, full: Sequence[str], small: Sequence[str]) -> list[str]:
        """Returns options: those for a device, or those of a rehearsal."""
        return list(small if self.rehearsal else full)


@dataclass(frozen=True)
class Step:
    """A step.

    name: as `--steps` takes it. decides: the lines of `verdict.py` that it decides, in words. share: its part
    of the time. commands: what it runs, one after the other. finished: exit codes after which it is not run
    again. tf32: whether TF32 is as torch's settings say, also where it is off for the other steps. timed:
    whether it measures times. The steps that do not are run first, all at once.
    """

    name: str
    decides: str
    share: float
    commands: Callable[[Plan], list[Command]]
    finished: tuple[int, ...] = (0,)
    tf32: bool = False
    timed: bool = True


TEST_PROCESSES, COLLECTION_PROCESSES = 8, 4
TEST_FILES = ("graphs", "strategies", "triton", "networks", "oracle", "service")
"""The files of tests/gpu. Those with few networks come first, so that they run if the time ends early."""


def _tests(plan: Plan) -> list[Command]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += ["-p", "device.record_tests"]
    if not plan.rehearsal:
        command += ["-n", str(TEST_PROCESSES), "--dist", "worksteal"]
    graph = "tests/bench/test_bench_parts.py::test_the_loop_as_one_cuda_graph"
    small = ["tests/gpu/test_device_graphs.py", "-k", "recorder or entries or swaps"]
    files = [f"tests/gpu/test_device_{name}.py" for name in TEST_FILES]
    return [[*command, *plan.sized([*files, graph], small)]]


def _script(plan: Plan, script: str, document: str, full: Sequence[str], small: Sequence[str]) -> Command:
    start = [sys.executable, str(MEASURE / script), "-o", plan.file(document), "--device", plan.device]
    return [*start, *plan.sized(full, small)]


def _claims(plan: Plan) -> list[Command]:
    small = ["--size", "cpu", "--names", "mlp-20", "--members", "3", "--seconds", "0.2"]
    small += ["--baseline", "loop", "--baseline", "compiled-member"]
    return [_script(plan, "peer_networks.py", "claims", ["--seconds", "2"], small)]


def _backends(plan: Plan) -> list[Command]:
    if plan.collection is None:
        return []
    full = ["--sample", "20", "--jobs", str(COLLECTION_PROCESSES), "--backends", "eager,graph,compile"]
    small = ["--sample", "1", "--backends", "eager,graph"]
    script = [sys.executable, str(MEASURE / "backends.py"), str(plan.collection), "--device", plan.device]
    return [[*script, "-o", str(plan.out / "backends.jsonl"), *plan.sized(full, small)]]


def _prepare(plan: Plan) -> list[Command]:
    small = ["--size", "cpu", "--names", "mlp-20", "--members", "3", "--baseline", "compiled-member"]
    return [_script(plan, "peer_networks.py", "claims", ["--prepare"], ["--prepare", *small])]


def _kernels(plan: Plan) -> list[Command]:
    return [_script(plan, "device_kernels.py", "kernels", [], ["--scale", "64"])]


def _swaps(plan: Plan) -> list[Command]:
    return [_script(plan, "device_swaps.py", "swaps", [], ["--answers", "400", "--forms", "eager"])]


def _layers(plan: Plan) -> list[Command]:
    small = ["--preset", "ci", "--members", "2", "--names", "linear,dropout", "--seconds", "0.1"]
    small += ["--jobs", "2"]  # rows are prepared as on a device
    return [_script(plan, "peer_layers.py", "layers", ["--seconds", "0.4"], small)]


def _fleets(plan: Plan) -> list[Command]:
    small = ["--fleet", "32,1,2,4", "--rows", "1x1", "--seconds", "0.1"]
    return [_script(plan, "device_fleets.py", "fleets", ["--seconds", "1"], small)]


def _load(plan: Plan) -> list[Command]:
    small = ["--gb", "0.01", "--copy-gb", "0.01", "--runs", "2"]
    return [_script(plan, "device_load.py", "load", ["--gb", "2,10"], small)]


def _route(plan: Plan) -> list[Command]:
    small = ["--network", "convolutional", "--batches", "8", "--seconds", "0.1"]
    return [_script(plan, "device_route.py", "route", ["--seconds", "0.5"], small)]


def _command_line(plan: Plan, *words: str) -> Command:
    return [sys.executable, "-m", "widepack_cli", *words, "--device", plan.device]


SUITE_ROWS = (
    "mlp-b1,conv-net,cnn1d,gru,lstm",
    "bert-frozen,ft-transformer,gru-8,rnn-8",
    "vit,unet,bert-lora,bert",
)
"""Rows of the suite that are not among the claims, in order of worth."""


def _suite(plan: Plan) -> list[Command]:
    forms = ("auto",) if plan.rehearsal else ("auto", "auto+graph", "compile", "compile+graph")
    words = [word for form in forms for word in ("--backend", form)]
    full = [*words, "--budget", "2", "--compile-limit", "40"]
    small = [*words, "--budget", "0.1", "--compile-limit", "20", "--baseline", "loop", "--baseline", "vmap"]
    size = plan.sized(["full"], ["cpu"])
    rows = plan.sized(SUITE_ROWS, ["mlp-b1"])
    return [
        _command_line(
            plan, "bench-suite", *size, "--rows", r, "--json", plan.file("suite"), *plan.sized(full, small)
        )
        for r in rows
    ]


def _bench_layers(plan: Plan, names: str, small_names: str, document: str) -> list[Command]:
    full = [names, "-p", "full", "--budget", "1", "-n", "32,8"]
    small = [small_names, "-p", "ci"]
    command = _command_line(plan, "bench-layers", *plan.sized(full, small))
    return [[*command, "-q", "--resume", plan.file(document)]]


STEPS: tuple[Step, ...] = (
    Step("tests", "tests/gpu passes", 0.0, _tests, finished=(0, 1, NO_TESTS), tf32=True, timed=False),
    Step("backends", "drawn architectures on every backend of the device", 0.0, _backends, timed=False),
    Step("swaps", "no answer mixes two versions of a member", 0.0, _swaps, timed=False),
    Step("prepare", "nothing: it compiles what the claims compare", 0.0, _prepare, timed=False),
    Step("kernels", "the times of kernels that the cost model predicts", 0.06, _kernels),
    Step(
        "claims",
        "published ratios of networks, against the eager loop and compiled; peak memory of the device",
        0.22,
        _claims,
    ),
    Step(
        "layers",
        "published ratios of layers and blocks, in the published way and against one program for N",
        0.3,
        _layers,
    ),
    Step(
        "fleets", "32 fine-tunes of width 768 at one token, over the merged artifact and PEFT", 0.07, _fleets
    ),
    Step("load", "load of 10 GB as a part of the bandwidth from pinned memory", 0.14, _load),
    Step("suite", "other networks against all baselines; the time-weighted floor", 0.1, _suite),
    Step("route", "rows of several members against what a service would write itself", 0.03, _route),
    Step(
        "blocks",
        "blocks against the fastest baseline",
        0.04,
        lambda plan: _bench_layers(plan, "block", "block:mlp", "blocks"),
        finished=(0, 1),
    ),
    Step(
        "primitives",
        "all layers against the fastest baseline, strategy by strategy",
        0.04,
        lambda plan: _bench_layers(plan, "all", "linear", "primitives"),
        finished=(0, 1),
    ),
)
"""The steps in order of worth."""


def chosen(names: str) -> list[Step]:
    """Returns steps by name, separated by commas, in order of worth; all for an empty text.

    Raises: ValueError, with the known names.
    """
    known = {step.name: step for step in STEPS}
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown steps {', '.join(unknown)}; known: {', '.join(known)}")
    return [step for step in STEPS if not wanted or step.name in wanted]


def listed(plan: Plan) -> str:
    """Returns the steps as text: what each decides, its part of the time, and its commands."""
    lines = []
    for step in STEPS:
        lines.append(f"{step.name}: {step.decides} ({step.share:.0%} of the time)")
        lines += [f"    {' '.join(words[1:])}" for words in step.commands(plan)]
    return "\n".join(lines)
