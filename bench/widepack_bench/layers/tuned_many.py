"""Tuned artifacts of many layers, several at once, each layer in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from widepack_bench.layers.sweeps import find

from ..measure import race as noise
from .block_sweeps import sweeps
from ..processes.fresh import ProcessEnded, lines_of_fresh_process
from .in_memory import members as members_of
from .rows import Progress, Task
from ..suite.compare import reason
from .tuned import place_of, tuned


def tune_at_once(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], jobs: int, progress: Progress | None) -> None:
    """Build and tune every task's artifact, so many layers at once. What fails here is tried again by its row, which says why. options: of `run_row`."""
    lock, stopped, done = threading.Lock(), threading.Event(), 0

    def tune(name: str) -> None:
        nonlocal done
        members = [t.members for t in tasks if t.sweep.name == name]
        arguments = {"name": name, "members": members, "preset": preset, "options": dict(options)}
        lines = lines_of_fresh_process(f"{__name__}:tuned_of", arguments, threads=options["threads"] or 1, steady=True, stopped=stopped)
        try:
            for line in lines:
                with lock:
                    done += 1
                    if progress is not None:
                        failed = f" failed: {line['error']}" if "error" in line else ""
                        progress(f"tuned {name}, N={line['members']}{failed}", done, len(tasks))
        except ProcessEnded:
            return

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for finished in [pool.submit(tune, name) for name in dict.fromkeys(t.sweep.name for t in tasks)]:
                finished.result()
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def tuned_of(name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Build and tune the artifacts of one primitive, as a process of its own is asked: `{"members": N}` after each, with `error` where it failed."""
    (sweep,) = find(name, sweeps())
    shape, pattern = sweep.at(preset), options["pattern"]
    with noise.quiet(options["threads"]):
        for count in members:
            torch._dynamo.reset()
            place = place_of(options["artifacts"], name, count)
            try:
                modules = members_of(lambda: sweep.make(preset), count)
                tuned(lambda: sweep.make(preset), modules, shape.inputs, shape.batch, place, pattern=pattern, device=options["device"])
            except Exception as error:  # noqa: BLE001  # the row says it, when its turn comes
                yield {"members": count, "error": reason(error)}
            else:
                yield {"members": count}
