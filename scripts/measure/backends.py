"""Runs every backend over a collection of architectures, and compares the answers with members in float64.

usage: python scripts/measure/backends.py COLLECTION [--sample K] [-o ROWS.jsonl] [--backends eager,...]
       python scripts/measure/backends.py COLLECTION --device cuda --jobs 4 --backends eager,graph,compile
       python scripts/measure/backends.py --summary ROWS.jsonl -o bench/results/backends.json

COLLECTION is a folder with two modules. `zoo.py` has `ENTRIES`, `build(name, seed)` and
`inputs(name, batch, seed)`; `check.py` has `pick(count)` and `compare(...)`. Each pair of an architecture and
a backend is one row, written when it is known; a second run with the same rows goes on where the first ended.
On a CPU `graph` is the stand-in of CUDA graphs that the tests have. Entries whose package is not installed
are left out of the sample.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import widepack
from widepack.backends.graph_capture import RECORDERS
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("eager", "graph", "compile", "onnxruntime", "aot")
MEMBERS = 3
BATCHES = (5, 1, 2)


def installed(package: str) -> bool:
    """Returns whether a package of this name is installed."""
    try:
        return bool(importlib.metadata.distribution(package))
    except importlib.metadata.PackageNotFoundError:
        return False


class Collection:
    """The architectures of a folder."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self.zoo, self.check = importlib.import_module("zoo"), importlib.import_module("check")

    def members(self, name: str) -> list[Any]:
        """Returns the members of an architecture."""
        return [self.zoo.build(name, i) for i in range(MEMBERS)]

    def axes(self, name: str) -> tuple[Any, bool]:
        """Returns the axis of the batch of each input, and whether it is the first axis of all."""
        entry, given = self.zoo.ENTRIES[name], self.zoo.inputs(name, BATCHES[0], 0)
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        dims = entry.batch_dims
        dims = list(dims) if isinstance(dims, (list, tuple)) else [dims] * len(tensors)
        axis = iter(dims)

        def named(x: Any) -> Any:
            at = next(axis) if isinstance(x, Tensor) else None
            return {} if at is None and isinstance(x, Tensor) else None if at is None else {at: "B"}

        return tree_map(named, given), all(d == 0 for d in dims)

    def drawn(self, count: int) -> list[str]:
        """Returns the names of architectures whose package is installed."""
        names = self.check.pick(len(self.zoo.ENTRIES))
        return [n for n in names if installed(self.zoo.ENTRIES[n].package)][:count]

    def build(self, name: str, members: list[Any], folder: Path, device: str) -> None:
        """Builds the artifact `e.wide` for a device."""
        paths = [folder / f"{i}.pt" for i in range(MEMBERS)]
        for path, module in zip(paths, members):
            torch.save(module.state_dict(), path)
        args, kwargs = self.zoo.inputs(name, BATCHES[0], 0)
        (of_args, of_kwargs), _ = self.axes(name)
        names = list(inspect.signature(members[0].forward).parameters)
        widepack.build(
            paths,
            folder / "e.wide",
            model=lambda: self.zoo.build(name, 0),
            sample=args,
            sample_kwargs=kwargs,
            dynamic={**dict(zip(names, of_args)), **of_kwargs},
            strategy="wide",
            pt2=False,
            targets=(torch.device(device).type,),
            budget=0,
        )


def moved(value: Any, device: str) -> Any:
    """Returns a tree with its tensors on a device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)


class Truth:
    """The calls of an architecture, and what its members answer: on the device, and on the CPU in float64."""

    def __init__(self, collection: Collection, name: str, members: list[Any], device: str) -> None:
        check, zoo = collection.check, collection.zoo
        batches = BATCHES if collection.axes(name)[1] else BATCHES[:1]
        doubles = [zoo.build(name, i).double() for i in range(MEMBERS)]
        self.compare, self.device = check.compare, device
        members = [m.to(device) for m in members]
        self.calls: list[tuple[str, Any, list[Any], list[Any]]] = []
        for batch in batches:
            many = [zoo.inputs(name, batch, 10 + i) for i in range(MEMBERS)]
            stacked = tree_map(lambda *ts: torch.stack(ts) if isinstance(ts[0], Tensor) else ts[0], *many)
            for mode, given, inputs in (("shared", many[0], [many[0]] * MEMBERS), ("each", stacked, many)):
                with torch.no_grad():
                    own = [moved(m(*a, **k), "cpu") for m, (a, k) in zip(members, moved(inputs, device))]
                    try:
                        exact = [m(*check.to64(a), **check.to64(k)) for m, (a, k) in zip(doubles, inputs)]
                    except Exception:  # noqa: BLE001  an architecture that takes float32 alone
                        exact = []
                self.calls.append((f"{mode}, batch {batch}", given, own, exact))

    def wrong(self, ens: Any) -> str:
        """Returns what is wrong with the answers of a loaded artifact; empty if nothing is."""
        for title, given, own, exact in self.calls:
            args, kwargs = moved(given, self.device)
            found = moved((ens if title.startswith("shared") else ens.each)(*args, **kwargs), "cpu")
            tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
            for i in range(MEMBERS):
                said = self.compare(
                    [t[i] for t in tensors], own[i], exact[i] if exact else None, own if exact else (), exact
                )
                if said != "ok":
                    return f"{title}, member {i}: {said}"
        return ""


@contextlib.contextmanager
def opened(path: Path, backend: str, device: str) -> Iterator[Any]:
    """Loads an artifact on a backend."""
    options: dict[str, Any] = {"verify": "off", "warmup": False, "device": device}
    if backend != "graph":
        when = None if backend == "eager" else "now"
        yield widepack.load(path, backend=backend, cache=path.parent / "cache", compile=when, **options)
        return
    if device == "cpu":
        sys.path[:0] = [str(ROOT / "tests" / "helpers")]
        from graph_stand_in import StandInRecorder

        RECORDERS["cpu"] = lambda device: StandInRecorder()
    try:
        yield widepack.load(path, graph=True, **options)
    finally:
        RECORDERS.pop("cpu", None)


def outcome(run: Callable[[], str]) -> dict[str, Any]:
    """Returns a row's answer: ok, wrong, or refused with widepack's words; any other exception is a crash."""
    began = time.perf_counter()
    try:
        wrong = run()
        found = {"outcome": "wrong", "said": wrong} if wrong else {"outcome": "ok"}
    except widepack.WidepackError as e:
        found = {"outcome": "refused", "said": str(e)[:600]}
    except Exception as e:  # noqa: BLE001  a row says what came
        found = {"outcome": "crashed", "said": f"{type(e).__name__}: {e}"[:600]}
    return {**found, "seconds": round(time.perf_counter() - began, 1)}


def rows_of(
    collection: Collection, name: str, backends: Sequence[str], device: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields how an architecture ends on each backend; if it cannot be built, how its build ends."""
    with tempfile.TemporaryDirectory() as folder:
        members, path = collection.members(name), Path(folder) / "e.wide"

        def build() -> str:
            collection.build(name, members, Path(folder), device)
            return ""

        def call(backend: str) -> str:
            with opened(path, backend, device) as ens:
                return truth.wrong(ens)

        built = outcome(build)
        if built["outcome"] != "ok":
            yield "build", built
            return
        truth = Truth(collection, name, members, device)
        for backend in backends:
            yield backend, outcome(partial(call, backend))


def measure(collection: Collection, names: list[str], backends: list[str], out: Path, device: str) -> None:
    """Runs the pairs that the file of rows lacks, and adds a row for each."""
    rows = read_rows(out) if out.exists() else []
    done = {(r["name"], r["backend"]) for r in rows}
    where = environment(device, 1)
    torch.backends.mha.set_fastpath_enabled(False)  # it gives padded positions other numbers
    for name in names:
        todo = [b for b in backends if (name, b) not in done]
        if not todo or (name, "build") in done:
            continue
        family = collection.zoo.ENTRIES[name].family
        for backend, row in rows_of(collection, name, todo, device):
            whole = {"name": name, "family": family, "backend": backend, **row, "environment": where}
            with out.open("a") as file:  # one line at once: several processes add to the file
                file.write(json.dumps(whole) + "\n")


def in_a_process(given: argparse.Namespace, name: str) -> None:
    """Runs an architecture in a process of its own. At the limit its backend is cut, and others go on."""
    command = [sys.executable, __file__, str(given.collection), "--jobs", "0", "--names", name]
    command += ["--backends", given.backends, "--device", given.device, "-o", str(given.out)]
    for _ in given.backends.split(","):
        try:
            subprocess.run(command, check=False, timeout=given.limit)
            return
        except subprocess.TimeoutExpired:
            rows = read_rows(given.out) if given.out.exists() else []
            done = {r["backend"] for r in rows if r["name"] == name}
            left = [b for b in given.backends.split(",") if b not in done]
            row = {"name": name, "backend": left[0], "outcome": "cut", "said": f"no end in {given.limit} s"}
            with given.out.open("a") as file:
                file.write(json.dumps({**row, "environment": environment(given.device, 1)}) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts for each backend, and every pair that did not run."""
    eager = {r["name"] for r in rows if r["backend"] == "eager" and r["outcome"] == "ok"}
    pairs = [r for r in rows if r["backend"] in BACKENDS]
    ends = Counter((r["backend"], r["outcome"]) for r in pairs)
    counts = {b: {o: ends[b, o] for o in ("ok", "wrong", "refused", "crashed", "cut")} for b in BACKENDS}
    others = [r for r in pairs if r["backend"] != "eager" and r["name"] in eager]
    return {
        "environment": rows[-1]["environment"],
        "torch": rows[-1]["environment"]["versions"]["torch"],
        "architectures": len({r["name"] for r in rows}),
        "not_built": {r["name"]: r["said"] for r in rows if r["backend"] == "build"},
        "counts": counts,
        "pairs": len(others),
        "pairs_that_run": sum(r["outcome"] == "ok" for r in others),
        "others": [
            {k: r[k] for k in ("name", "backend", "outcome", "said")} for r in pairs if r["outcome"] != "ok"
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collection", nargs="?", type=Path)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--names", help="architectures, separated by commas (default: a sample)")
    parser.add_argument("--device", default="cpu")
    words = "processes at a time, one for each architecture; 0 runs all in this process (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, help=words)
    words = "seconds that an architecture may take, after which its backend is cut (default: 1200)"
    parser.add_argument("--limit", type=int, default=1200, help=words)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("backends.jsonl"))
    given = parser.parse_args()
    if given.summary:
        given.out.write_text(json.dumps(summary(read_rows(given.summary)), indent=1) + "\n")
        return
    torch.set_num_threads(1)
    collection = Collection(given.collection)
    names = given.names.split(",") if given.names else collection.drawn(given.sample)
    if not given.jobs:
        measure(collection, names, given.backends.split(","), given.out, given.device)
        return
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(partial(in_a_process, given), names))


if __name__ == "__main__":
    main()
