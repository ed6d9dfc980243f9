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
ROW_ERRORS = 3  # the exit code of a measurement that tried all rows, some of which ended with an error
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
    finished: tuple[int, ...] = (0, ROW_ERRORS)
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


def _measures(script: str, document: str, full: str = "", small: str = "") -> Callable[[Plan], list[Command]]:
    """Returns the command of a script. full, small: its options on a device, and on a CPU."""

    def commands(plan: Plan) -> list[Command]:
        start = [sys.executable, str(MEASURE / script), "-o", plan.file(document), "--device", plan.device]
        return [[*start, *plan.sized(full.split(), small.split())]]

    return commands


def _backends(plan: Plan) -> list[Command]:
    if plan.collection is None:
        return []
    full = ["--sample", "20", "--jobs", str(COLLECTION_PROCESSES), "--backends", "eager,graph,compile"]
    small = ["--sample", "1", "--backends", "eager,graph"]
    script = [sys.executable, str(MEASURE / "backends.py"), str(plan.collection), "--device", plan.device]
    return [[*script, "-o", str(plan.out / "backends.jsonl"), *plan.sized(full, small)]]


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


def _bench_layers(names: str, small_names: str, document: str) -> Callable[[Plan], list[Command]]:
    full, small = [names, "-p", "full", "--budget", "1", "-n", "32,8"], [small_names, "-p", "ci"]

    def commands(plan: Plan) -> list[Command]:
        command = _command_line(plan, "bench-layers", *plan.sized(full, small))
        return [[*command, "-q", "--resume", plan.file(document)]]

    return commands


_CLAIM = "--size cpu --names mlp-20 --members 3 --baseline compiled-member"  # of a rehearsal
_SWAPS = _measures("swaps.py", "swaps", "--threads 4", "--threads 4 --calls 400")
_PREPARE = _measures("peer_networks.py", "claims", "--prepare", f"--prepare {_CLAIM}")
_CLAIMS = _measures("peer_networks.py", "claims", "--seconds 2", f"{_CLAIM} --baseline loop --seconds 0.2")
_KERNELS = _measures("device_kernels.py", "kernels", "", "--scale 64")
_SMALL_LAYERS = "--preset ci --members 2 --names linear,dropout --seconds 0.1"
_LAYERS = _measures("peer_layers.py", "layers", "--seconds 0.4", f"{_SMALL_LAYERS} --jobs 2")
_FLEETS = _measures("device_fleets.py", "fleets", "", "--fleet 32,1,2,4 --rows 1x1 --seconds 0.1")
_LOAD = _measures("load.py", "load", "--gb 2,10", "--gb 0.01 --copy-gb 0.01 --runs 2")
_SMALL_ROUTE = "--only convolutional --batches 8 --seconds 0.1"
_ROUTE = _measures("route.py", "route", "--batches 32,8,128 --seconds 0.5", _SMALL_ROUTE)
_BLOCKS = _bench_layers("block", "block:mlp", "blocks")
_PRIMITIVES = _bench_layers("all", "linear", "primitives")
_PUBLISHED = "published ratios of networks, against the eager loop and compiled; peak memory of the device"
_COUNTED = "published ratios of layers and blocks, in the published way and against one program for N"

STEPS: tuple[Step, ...] = (
    Step("tests", "tests/gpu passes", 0.0, _tests, finished=(0, 1, NO_TESTS), tf32=True, timed=False),
    Step("backends", "drawn architectures on every backend of the device", 0.0, _backends, timed=False),
    Step("swaps", "no answer mixes two versions of a member", 0.0, _SWAPS, timed=False),
    Step("prepare", "nothing: it compiles what the claims compare", 0.0, _PREPARE, timed=False),
    Step("kernels", "the times of kernels that the cost model predicts", 0.06, _KERNELS),
    Step("claims", _PUBLISHED, 0.22, _CLAIMS),
    Step("layers", _COUNTED, 0.3, _LAYERS),
    Step("fleets", "32 fine-tunes at one token, over the merged artifact and PEFT", 0.07, _FLEETS),
    Step("load", "load of 10 GB as a part of the bandwidth from pinned memory", 0.14, _LOAD),
    Step("suite", "other networks against all baselines; the time-weighted floor", 0.1, _suite),
    Step("route", "rows of several members against what a service would write itself", 0.03, _ROUTE),
    Step("blocks", "blocks against the fastest baseline", 0.04, _BLOCKS, finished=(0, 1)),
    Step(
        "primitives", "layers against the fastest baseline, by strategy", 0.04, _PRIMITIVES, finished=(0, 1)
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
