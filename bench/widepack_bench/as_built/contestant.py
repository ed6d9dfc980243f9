"""Runs one contestant in a process of its own: `python -m widepack_bench.as_built.contestant SPEC`.

SPEC is a JSON object: `name` of the contestant, `network`, `folder`, `threads` and `cpus`. A line of standard
input is a case, `{"call", "inputs", "answer"}`, for which the contestant gets ready, writes its answer to a
file and prints `{}` or an error; or `{}`, for which it takes a sample and prints its nanoseconds of a call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack.system.timing import LONG_S, WARM_CALLS, rest, without_gc

from ..baselines.compiled import compiled_loop, compiler_settings, vmap_compiled
from ..baselines.members import loop, reason
from ..baselines.onnxruntime_sessions import Exported, Sessions, exported, opened
from ..baselines.routes import by_dict, gathered
from ..baselines.vmap import vmap
from .networks import NETWORKS

OURS, AGAIN = "widepack", "widepack again"
FORMS: dict[str, dict[str, Any]] = {
    "ort": {"backend": "onnxruntime", "compile": "now"},
    "ort-loop": {"backend": "onnxruntime", "compile": "now", "strategies": "loop"},
    **{name: {"backend": "eager", "strategies": name} for name in ("loop", "wide", "packed", "streamed")},
}
"""The options of `widepack.load` of forms that are no default, by name; contestants are named `load NAME`."""
LOOP, COMPILED_LOOP = "loop", "compiled-loop"
SESSIONS, DIVIDED = "onnxruntime", "onnxruntime-divided"
ALTERNATIVES = (LOOP, COMPILED_LOOP, "vmap", "vmap-compiled", SESSIONS, DIVIDED)
SAMPLE_NS = 10_000_000
Call = Callable[[], Any]
Inputs = tuple[Tensor, ...]


class Contestant:
    """What is called: an artifact, or the members in the form that the name says."""

    def __init__(self, name: str, network: str, folder: Path, threads: int) -> None:
        self.name, self.folder, self.threads = name, folder, threads
        self.modules: list[nn.Module] = []
        self.exports: dict[tuple[int, bool], Exported] = {}
        if self.name in (OURS, AGAIN) or self.name.startswith("load "):
            options = FORMS.get(self.name.removeprefix("load "), {})
            self.ens = widepack.load(folder / f"{threads}.wide", **options)
            return
        for path in sorted(folder.glob("[0-9]*.pt")):
            self.modules.append(NETWORKS[network].make().eval().requires_grad_(requires_grad=False))
            self.modules[-1].load_state_dict(torch.load(path, weights_only=True))

    def ready(self, call: str, inputs: Inputs, ids: Sequence[int]) -> Call:
        """Returns the call for these inputs. call: `shared`, `each` or `route`."""
        if not self.modules:
            way: Any = {"shared": self.ens, "each": self.ens.each, "route": self.ens.route}[call]
            return lambda: way(*inputs, **({"member": ids} if call == "route" else {}))
        if call == "route":
            return self._route(inputs, ids)
        each = call == "each"
        if self.name in (SESSIONS, DIVIDED):
            sessions = Sessions(self._exported(inputs, each, dynamic=False), self._workers)
            return lambda: sessions.run(inputs)
        ways = {LOOP: loop, COMPILED_LOOP: compiled_loop, "vmap": vmap, "vmap-compiled": vmap_compiled}
        run = ways[self.name](self.modules, each)
        return lambda: run(*inputs)

    def _route(self, inputs: Inputs, ids: Sequence[int]) -> Call:
        """Returns what a service would write for rows of several members."""
        if self.name in (LOOP, COMPILED_LOOP):
            compiled = self.name == COMPILED_LOOP
            members: Any = [torch.compile(m, dynamic=True) if compiled else m for m in self.modules]
            return lambda: by_dict(members, inputs, ids)
        if self.name in (SESSIONS, DIVIDED):
            made = self._exported(tuple(torch.cat([x, x]) for x in inputs), each=False, dynamic=True)
            return routed(made, inputs, ids, self._workers)
        run = gathered(self.modules, torch.compile if self.name == "vmap-compiled" else lambda f: f)
        return lambda: run(inputs, ids)

    @property
    def _workers(self) -> int:
        return self.threads if self.name == DIVIDED else 1

    def _exported(self, inputs: Inputs, each: bool, dynamic: bool) -> Exported:
        """Returns the members as files, which shared and own inputs of one batch have in common."""
        key = len(inputs[0][0] if each else inputs[0]) * (not dynamic), dynamic
        if key not in self.exports:
            with torch.no_grad():
                made = exported(self.modules, each, inputs, {}, dynamic)
                paths: list[bytes | str] = []
                for i, data in enumerate(made.models):
                    paths.append(f"{self.folder}/{self.name}-{key[0]}-{i}.onnx")
                    Path(os.fsdecode(paths[-1])).write_bytes(data if isinstance(data, bytes) else b"")
            self.exports[key] = replace(made, models=paths)
        return replace(self.exports[key], each=each, inputs=[x.clone() for x in inputs])


def routed(made: Exported, inputs: Inputs, ids: Sequence[int], workers: int) -> Call:
    """Returns a call that runs a session for the rows of each member. workers: as of `Sessions`."""
    models, (shape, dtype) = list(made.models), made.outputs[0]
    threads = 1 if workers > 1 else torch.get_num_threads()
    sessions = {i: opened(models[i], threads) for i in sorted(set(ids))}
    names = [one.name for one in next(iter(sessions.values())).get_inputs()]
    pool = ThreadPoolExecutor(workers) if workers > 1 else None
    values = [x.numpy() for x in inputs]

    def run() -> Tensor:
        whole = torch.empty((len(ids), *shape[1:]), dtype=dtype)
        answer = whole.numpy()
        grouped: dict[int, list[int]] = {}
        for row, i in enumerate(ids):
            grouped.setdefault(i, []).append(row)

        def one(i: int) -> None:
            at = grouped[i]
            answer[at] = sessions[i].run(None, {n: v[at] for n, v in zip(names, values)})[0]

        list(pool.map(one, grouped) if pool else map(one, grouped))
        return whole

    return run


class Sampler:
    """Takes samples of a call: the nanoseconds of one, on the wall and of all the process's threads."""

    def __init__(self, call: Call) -> None:
        self.call, self.count = call, 1
        self._block(3)
        wall, _ = self._block(1)
        self.long, self.count = wall > 1e9 * LONG_S, max(1, round(SAMPLE_NS / max(wall, 1.0)))

    def __call__(self) -> tuple[float, float]:
        rest()
        if not self.long:  # the caches hold what another process reads
            self._block(WARM_CALLS)
        return self._block(self.count)

    def _block(self, count: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(count):
            self.call()
        return (time.perf_counter_ns() - wall) / count, (time.process_time_ns() - cpu) / count


def pin(cpus: Sequence[int]) -> None:
    """Binds every thread of this process to processors."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cpus)


def main() -> None:
    spec = json.loads(sys.argv[1])
    written, sys.stdout = sys.stdout, sys.stderr  # a library may print, which is not the result
    threads: int = spec["threads"]
    torch.set_num_threads(threads)
    one: Contestant | None = None
    sample: Sampler | None = None
    with torch.inference_mode(), compiler_settings(), without_gc():
        for line in sys.stdin:
            found: Any = {}
            if case := json.loads(line):
                try:
                    sample = None
                    os.sched_setaffinity(0, range(os.cpu_count() or 1))
                    one = one or Contestant(spec["name"], spec["network"], Path(spec["folder"]), threads)
                    inputs, ids = torch.load(case["inputs"])
                    call = one.ready(case["call"], inputs, ids)
                    torch.save(call(), case["answer"])
                    sample = Sampler(call)
                    pin(spec["cpus"])
                except Exception as error:  # noqa: BLE001  # whatever it raises leaves it out
                    found = {"error": reason(error)}
            elif sample is not None:
                found = sample()
            print(json.dumps(found), file=written, flush=True)


if __name__ == "__main__":
    main()
