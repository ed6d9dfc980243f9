"""Calls a model from several threads while its members are swapped: whether all answers are consistent, and
how long calls wait.

    python scripts/measure/swaps.py
    python scripts/measure/swaps.py --device cuda --threads 4 -o bench/results/device/swaps.json

A row is one form of a model: `eager`, `graph` or `compile`. Its members are 8 residual MLPs, 14 layers deep,
in an artifact without shared weights. Each member has two versions, A and B. The answers of both to some
inputs are read first, after all members were swapped to that version. The threads make half of `--calls`
calls without a swap. Then they make `--calls` calls while one more thread swaps one member after the other,
to B and back to A, evenly over the calls. Then they make the other half.

| key | meaning |
|---|---|
| `mixed` | answers of a member that are equal, bit for bit, to those of no version; must be 0 |
| `versions_seen` | different sets of versions among the answers; more than one shows calls between swaps |
| `captures` | CUDA graphs that were captured after the first calls |
| `calls_ms` | times of calls without swaps and with them |
| `pause_ms`, `wait_ms`, `copy_ms` | times of a swap: calls stop; it waits for calls; it copies |
| `aside_ms` | median times of the stages of a swap during which calls go on |
| `error` | no answer is mixed, and all calls and swaps were made, or else what is wrong |
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runner import build_threads, parser, run
from torch import Tensor, nn

import widepack

LAYERS, WIDTH, MEMBERS, BATCH, INPUTS, VERSIONS = 14, 128, 8, 8, 4, ("A", "B")
FORMS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "graph": {"graph": True},
    "compile": {"backend": "compile", "compile": "now"},
}


class Load:
    """Calls a model from several threads.

    model: the call. known: [version][input] -> the answers of all members.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Sequence[Tensor],
        known: Sequence[Sequence[Tensor]],
        threads: int,
    ) -> None:
        self.model, self.inputs, self.known, self.threads = model, inputs, known, threads
        self.torn = 0
        self.mixtures: set[tuple[int, ...]] = set()
        self.done = 0
        self._lock = threading.Lock()

    def run(self, calls: int) -> list[float]:
        """Makes all calls, and returns their seconds."""
        # Arrays, because the collector of garbage would stop the calls to look at many objects.
        seconds = [array("d") for _ in range(self.threads)]
        start = threading.Barrier(self.threads)

        def work(me: int) -> None:
            with torch.inference_mode():
                start.wait()
                for number in range(calls // self.threads):
                    which = (me + number) % len(self.inputs)
                    begin = time.perf_counter()
                    y = self.model(self.inputs[which])
                    seconds[me].append(time.perf_counter() - begin)
                    self._look(which, y)
                    self.done += 1  # approximate: it only sets the pace of the swaps

        workers = [threading.Thread(target=work, args=(i,)) for i in range(self.threads)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        return [value for of_thread in seconds for value in of_thread]

    def _look(self, which: int, y: Tensor) -> None:
        versions = [
            next((v for v, known in enumerate(self.known) if torch.equal(answer, known[which][i])), -1)
            for i, answer in enumerate(y)
        ]
        with self._lock:
            self.torn += versions.count(-1)
            self.mixtures.add(tuple(versions))


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest of times in seconds, in milliseconds."""
    ordered = [1000 * time for time in sorted(times)]
    middle, high = (ordered[min(len(ordered) - 1, round(part * len(ordered)))] for part in (0.5, 0.99))
    return {"p50": middle, "p99": high, "most": ordered[-1]}


class Residual(nn.Module):
    """A sequence of norms and layers. A torn read of any weight changes every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(x)  # type: ignore[no-any-return]


def written(folder: Path, device: str) -> dict[str, list[Path]]:
    """Writes both versions of every member, and builds `e.wide` of A. Returns the checkpoints by version."""
    versions: dict[str, list[Path]] = {}
    for v, version in enumerate(VERSIONS):
        versions[version] = [folder / f"{version}{i}.pt" for i in range(MEMBERS)]
        for i, path in enumerate(versions[version]):
            torch.manual_seed(100 * v + i)
            torch.save(Residual().state_dict(), path)
    targets, inputs = (torch.device(device).type,), [f"x=float32[B,{WIDTH}]"]
    options: dict[str, Any] = {"inputs": inputs, "targets": targets, "pt2": False, "share": "none"}
    widepack.build(versions["A"], folder / "e.wide", model=Residual, **options)
    return versions


def on_own_streams(ens: widepack.WideModel, device: str) -> Callable[[Tensor], Tensor]:
    """Returns the call of a model on a stream of each thread. The answers are on the CPU."""
    local = threading.local()

    def call(x: Tensor) -> Tensor:
        if not device.startswith("cuda"):
            return ens(x)  # type: ignore[no-any-return]
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(local.stream):
            return ens(x).cpu()  # type: ignore[no-any-return]

    return call


def swapping(
    ens: widepack.WideModel,
    versions: dict[str, list[Path]],
    swaps: int,
    load: Load,
    calls: int,
    stop: Callable[[], bool],
) -> list[widepack.SwapReport]:
    """Swaps one member after the other, to B and back to A, evenly over the calls."""
    reports, begun = [], load.done
    for k in range(swaps):
        while load.done - begun < (k + 0.5) * calls / swaps and not stop():
            time.sleep(0.0005)
        version = "B" if (k // MEMBERS) % 2 == 0 else "A"
        reports.append(ens.swap(k % MEMBERS, versions[version][k % MEMBERS]))
    return reports


def measured(form: str, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a form."""
    with tempfile.TemporaryDirectory(prefix="widepack-swaps-") as name:
        folder = Path(name)
        torch.set_num_threads(build_threads(given.device))
        versions = written(folder, given.device)
        path, options = folder / "e.wide", FORMS[form]
        ens = widepack.load(path, device=given.device, cache=folder / "cache", **options)
        torch.set_num_threads(1)
        return under_load(ens, versions, given)


def under_load(
    ens: widepack.WideModel, versions: dict[str, list[Path]], given: argparse.Namespace
) -> dict[str, Any]:
    """Calls a model while its members are swapped."""
    generators = (torch.Generator().manual_seed(i) for i in range(INPUTS))
    inputs = [torch.randn(BATCH, WIDTH, generator=g).to(given.device) for g in generators]
    known, calls = {}, given.calls
    for version in reversed(VERSIONS):  # A last: it is loaded when the calls begin
        for i, path in enumerate(versions[version]):
            ens.swap(i, path)
        known[version] = [ens(x).cpu() for x in inputs]
    load = Load(on_own_streams(ens, given.device), inputs, list(known.values()), given.threads)
    load.run(max(given.threads, calls // 10))  # warm-up
    captured = sum(len(use.captured) for use in ens.graph_use())
    before = load.run(calls // 2)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(swapping, ens, versions, given.swaps, load, calls, ended.is_set)
        during = load.run(calls)
        ended.set()
        reports = future.result()
    after = load.run(calls // 2)
    row: dict[str, Any] = {
        "members": MEMBERS,
        "layers": LAYERS,
        "width": WIDTH,
        "threads": given.threads,
        "answers": len(during),
        "swaps": len(reports),
        "bytes_a_swap": reports[0].bytes,
        "captures": sum(len(use.captured) for use in ens.graph_use()) - captured,
        "calls_ms": {"without": spread(before + after), "swaps": spread(during)},
        "pause_ms": spread([r.pause for r in reports]),
        "wait_ms": spread([r.seconds["wait"] for r in reports]),
        "copy_ms": spread([r.seconds["copy"] for r in reports]),
        "aside_ms": {
            stage: 1000 * median(r.seconds[stage] for r in reports)
            for stage in ("open", "check", "derive", "verify")
        },
    }
    row |= {"mixed": load.torn, "versions_seen": len(load.mixtures)}
    if load.torn or len(during) != calls // given.threads * given.threads:
        row["error"] = f"{load.torn} answers mix versions; {len(during)} of {calls} calls answered"
    return row


def main() -> int:
    options = parser(__doc__, "swap-cpu.json", device="cpu")
    options.add_argument("--forms", default="", help="separated by commas (default: those of the device)")
    options.add_argument("--calls", type=int, default=10_000, help="for each form (default: 10000)")
    options.add_argument("--threads", type=int, default=8)
    options.add_argument("--swaps", type=int, default=50)
    given = options.parse_args()
    forms = given.forms or ("eager" if given.device == "cpu" else "eager,graph,compile")
    cases = {form: partial(measured, form, given) for form in forms.split(",")}
    return run(given, cases)


if __name__ == "__main__":
    sys.exit(main())
