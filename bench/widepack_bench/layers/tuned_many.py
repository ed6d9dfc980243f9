"""Tunes the artifacts of many layers, several at the same time, each layer in its own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from widepack_bench.layers.sweeps import find

from ..baselines.members import reason
from ..measure.processors import quiet
from ..processes.fresh import ProcessEnded, lines_of_fresh_process
from .block_sweeps import sweeps
from .in_memory import members as members_of
from .rows import Progress, Task
from .tuned import TuneRequest, place_of, tuned


def tune_at_once(
    tasks: Sequence[Task], preset: str, options: Mapping[str, Any], jobs: int, progress: Progress | None
) -> None:
    """Builds and tunes the artifact of every task, `jobs` layers at the same time.

    A failure is not raised here: the task's row tries again and reports it. options: fields of `RowOptions`.
    """
    lock, stopped, done = threading.Lock(), threading.Event(), 0

    def tune(name: str) -> None:
        nonlocal done
        members = [t.members for t in tasks if t.sweep.name == name]
        arguments = {"name": name, "members": members, "preset": preset, "options": dict(options)}
        lines = lines_of_fresh_process(
            f"{__name__}:tuned_of", arguments, threads=options["threads"] or 1, steady=True, stopped=stopped
        )
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


def tuned_of(
    name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Builds and tunes the artifacts of one layer, in the process that `tune_at_once` starts.

    Yields `{"members": N}` after each artifact, with `error` where it failed.
    """
    (sweep,) = find(name, sweeps())
    shape = sweep.at(preset)
    request = TuneRequest(shape.inputs, shape.batch, options["pattern"], options["device"])
    with quiet(options["threads"]):
        for count in members:
            torch._dynamo.reset()
            place = place_of(options["artifacts"], name, count)
            try:
                modules = members_of(lambda: sweep.make(preset), count)
                tuned(lambda: sweep.make(preset), modules, request, place)
            except Exception as error:  # noqa: BLE001  # the task's row tries again and reports it
                yield {"members": count, "error": reason(error)}
            else:
                yield {"members": count}
