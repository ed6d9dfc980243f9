"""Calls a model from several threads while its members change, and checks that each answer is whole."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """When a call began, on the clock of `time.perf_counter`, and how long it took."""

    begin: float
    seconds: float


class Load:
    """Calls a model from several threads.

    model: the call. known: [version][input] -> the answers of all members. at_once: whether each answer is
    compared directly after its call. Otherwise all are kept and compared after the last call. That is for
    calls that are as short as a comparison.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Sequence[Tensor],
        known: Sequence[Sequence[Tensor]],
        threads: int,
        at_once: bool = False,
    ) -> None:
        self.model, self.inputs, self.known, self.threads = model, inputs, known, threads
        self.torn = 0
        self.mixtures: set[tuple[int, ...]] = set()
        self.done = 0
        self._at_once = at_once
        self._lock = threading.Lock()

    def run(self, calls: int) -> list[Call]:
        """Makes all calls, and returns when they were."""
        each = calls // self.threads
        return self._run(lambda made: made < each)

    def run_until(self, ended: Callable[[], bool]) -> list[Call]:
        """Makes calls until `ended` returns true, and returns when they were."""
        return self._run(lambda made: not ended())

    def _run(self, more: Callable[[int], bool]) -> list[Call]:
        # Arrays, because the collector of garbage would stop the calls to look at many objects.
        begins, seconds = ([array("d") for _ in range(self.threads)] for _ in range(2))
        answers: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.threads)]
        start = threading.Barrier(self.threads)

        def work(me: int) -> None:
            with torch.inference_mode():
                start.wait()
                while more(len(begins[me])):
                    which = (me + len(begins[me])) % len(self.inputs)
                    begin = time.perf_counter()
                    y = self.model(self.inputs[which])
                    seconds[me].append(time.perf_counter() - begin)
                    begins[me].append(begin)
                    if self._at_once:
                        self._look(which, y)
                    else:
                        answers[me].append((which, y))
                    self.done += 1  # approximate: it only sets the pace of the swaps

        workers = [threading.Thread(target=work, args=(i,)) for i in range(self.threads)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        for rows in answers:
            for which, y in rows:
                self._look(which, y)
        return [Call(*one) for rows in zip(begins, seconds) for one in zip(*rows)]

    def _look(self, which: int, y: Tensor) -> None:
        versions = [
            next((v for v, known in enumerate(self.known) if _has(known[which], i, answer)), -1)
            for i, answer in enumerate(y)
        ]
        with self._lock:
            self.torn += versions.count(-1)
            self.mixtures.add(tuple(versions))


def _has(known: Tensor, member: int, answer: Tensor) -> bool:
    return member < len(known) and torch.equal(answer, known[member])


def percentile(times: Sequence[float], part: float) -> float:
    """Returns a percentile of times in seconds, in milliseconds."""
    return 1000 * sorted(times)[min(len(times) - 1, round(part * len(times)))]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest of times in seconds, in milliseconds."""
    return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "most": 1000 * max(times)}


def longest_gap(calls: Sequence[Call]) -> float:
    """Returns the longest time between the ends of two calls, in seconds; 0 for less than two calls."""
    ends = sorted(call.begin + call.seconds for call in calls)
    return max((b - a for a, b in pairwise(ends)), default=0.0)
