"""Tuned artifacts of many layers, several at once, each layer in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .fresh import ProcessEnded, lines_of_fresh_process
from .primitive_rows import Progress, Task


def tune_at_once(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], jobs: int, progress: Progress | None) -> None:
    """Build and tune every task's artifact, so many layers at once. What fails here is tried again by its row, which says why. options: of `run_row`."""
    lock, stopped, done = threading.Lock(), threading.Event(), 0

    def tune(name: str) -> None:
        nonlocal done
        members = [t.members for t in tasks if t.sweep.name == name]
        arguments = {"name": name, "members": members, "preset": preset, "options": dict(options)}
        lines = lines_of_fresh_process(
            "widepack_bench.tuned_layer:tuned_of", arguments, threads=options["threads"] or 1, steady=True, stopped=stopped
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
