"""Builds the artifact of a network, and starts the processes of its contestants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widepack.spec.draws import InputSource, draw_all

from ..errors import BenchError
from ..measure.answers import difference
from ..models.weights import write_checkpoints
from ..processes.fresh import environment_of
from .contestant import AGAIN, ALTERNATIVES, COMPILED_LOOP, DIVIDED, LOOP, OURS
from .networks import NETWORKS

MOST_COMPILED = 8  # members of a loop that is compiled
NETWORKS_MODULE = "widepack_bench.as_built.networks"
READY_S = 300.0  # seconds that a contestant may take to load and compile, and a build


@dataclass(frozen=True)
class Case:
    """One row."""

    network: str
    batch: int
    threads: int
    call: str

    @property
    def key(self) -> str:
        return f"{self.network}, B={self.batch}, threads={self.threads}, {self.call}"


class Process:
    """A contestant's process. It is killed when it takes too long, and gives an error then.

    cache: the folder of the user's cache.
    """

    def __init__(self, spec: Mapping[str, Any], cache: Path) -> None:
        module = "widepack_bench.as_built.contestant"
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(spec["threads"], cache),
        )

    def ask(self, line: Mapping[str, Any] | None = None) -> Any:
        """Sends a case, or asks for a sample. Returns the answer; an `error` where there is none."""
        assert self._child.stdin is not None and self._child.stdout is not None
        limit = threading.Timer(READY_S, self._child.kill)
        limit.start()
        try:
            self._child.stdin.write(json.dumps(line or {}) + "\n")
            self._child.stdin.flush()
            said = self._child.stdout.readline()
        except OSError:
            said = ""
        finally:
            limit.cancel()
        return json.loads(said) if said else {"error": f"its process ended, or took over {READY_S:.0f} s"}

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


class Stage:
    """The artifact and the processes of one network and number of threads, made when they are first used.

    The build and the loads with its defaults share a user's cache, which begins empty. Each other form of a
    load has a cache of its own, so that a load as built does not find what that form has compiled.

    without: alternatives that take no part.
    """

    def __init__(
        self, network: str, threads: int, forms: Sequence[str], folder: Path, without: Collection[str] = ()
    ) -> None:
        self.network, self.threads, self.folder, self.without = network, threads, folder, without
        compiled = NETWORKS[network].members <= MOST_COMPILED
        left_out = {*without, *(() if threads > 1 else (DIVIDED,)), *(() if compiled else (COMPILED_LOOP,))}
        alternatives = (name for name in ALTERNATIVES if name not in left_out)
        self.names = [OURS, AGAIN, *(f"load {form}" for form in forms), *alternatives]
        self._processes: dict[str, Process] = {}

    def _built(self) -> None:
        """Builds the artifact with the command line, as users do."""
        network, path = NETWORKS[self.network], self.folder / f"{self.threads}.wide"
        if path.exists():
            return
        members = sorted(self.folder.glob("[0-9]*.pt")) or write_checkpoints(
            network.make, network.members, self.folder
        )
        words = ["-m", "widepack_cli", "build", *members, "-o", path]
        words += ["--model", f"{NETWORKS_MODULE}:member", "--model-arg", f"name={self.network}"]
        words += [word for spec in network.inputs for word in ("--input", spec)]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            env=_environment(self.threads, self._cache(OURS)),
            check=False,
            capture_output=True,
            text=True,
            timeout=READY_S,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise BenchError(f"the build failed: {''.join(lines[-1:])[:500]}")

    def _cache(self, name: str) -> Path:
        own = name not in (OURS, AGAIN)
        return self.folder / (f"cache-{self.threads}" + (f"-{name}" if own else ""))

    def ready(self, case: Case) -> tuple[dict[str, Process], dict[str, str]]:
        """Lets all contestants get ready for a case. Returns those that are, and the reason of the others."""
        self._built()
        inputs, ids = inputs_of(case)
        torch.save((inputs, ids), self.folder / "inputs.pt")
        allowed = sorted(os.sched_getaffinity(0))[-self.threads :]
        spec = {"network": self.network, "folder": str(self.folder), "threads": self.threads, "cpus": allowed}
        found: dict[str, Process] = {}
        left = dict.fromkeys(self.without, "left out by an option")
        line = {"call": case.call, "inputs": str(self.folder / "inputs.pt")}
        for name in self.names:
            if name not in self._processes or not self._processes[name].alive:
                self._processes[name] = Process({**spec, "name": name}, self._cache(name))
            answer = self.folder / f"{name}.answer"
            said = self._processes[name].ask({**line, "answer": str(answer)})
            if "error" in said:
                left[name] = said["error"]
            else:
                found[name] = self._processes[name]
        return self._right(found, left), left

    def _right(self, found: dict[str, Process], left: dict[str, str]) -> dict[str, Process]:
        """Returns the contestants whose answers are those of the loop, and notes the others in `left`.

        Raises: BenchError if the answer of widepack, as built, differs, or there is none to compare.
        """
        if missing := [f"{name}: {left[name]}" for name in (LOOP, OURS, AGAIN) if name in left]:
            raise BenchError(f"no answer of {'; '.join(missing)}")
        expected = torch.load(self.folder / f"{LOOP}.answer")
        for name in list(found):
            if wrong := difference(torch.load(self.folder / f"{name}.answer"), expected):
                if name in (OURS, AGAIN):
                    raise BenchError(f"the answer differs from the loop's: {wrong}")
                left[name] = f"its answer differs from the loop's: {wrong}"
                del found[name]
        return found

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()


def _environment(threads: int, cache: Path) -> dict[str, str]:
    """Returns the environment of a process, with a user's cache of its own."""
    return {**environment_of(threads), "XDG_CACHE_HOME": str(cache)}


def inputs_of(case: Case) -> tuple[tuple[torch.Tensor, ...], list[int]]:
    """Returns the inputs of a row, and for `route` the member of each row of the batch."""
    network = NETWORKS[case.network]
    sources = []
    for spec in network.inputs:
        name, _, kind = spec.partition("=")
        kind, _, bounds = kind.partition(":")
        low, _, high = bounds.partition("..")
        sources.append(InputSource(name, kind, int(low) if low else None, int(high) if high else None))
    drawn = [draw_all(sources, {"B": case.batch}, seed) for seed in range(network.members)]
    generator = torch.Generator().manual_seed(case.batch)
    ids: list[int] = torch.randint(network.members, (case.batch,), generator=generator).tolist()
    each = tuple(torch.stack(leaf) for leaf in zip(*drawn, strict=True))
    return (each if case.call == "each" else tuple(drawn[0])), ids
