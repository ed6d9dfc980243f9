"""Counts what the server does, for Prometheus.

Names follow its conventions: a prefix, base units, `_total` for counters. Members are labels only if there
are few of them, or on request, since each label is a time series of its own.
"""

from __future__ import annotations

import os
import time
from collections import Counter as Counts

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import multiprocess as several

from widepack.version import __version__

from .batching.job import Part
from .catalog.served import EACH, ServedArtifact, ServedModel

MEMBERS_AS_LABELS = 100
"""The most members that are labels without a request."""
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class Statistics:
    """Counts for `GET /v2/models/NAME/stats`: successes, failures, rows and seconds of one model."""

    def __init__(self) -> None:
        self.successes = self.failures = self.rows = self.executions = 0
        self.seconds = self.queue_seconds = 0.0
        self.last = 0.0


class Metrics:
    """The metrics of one server. It is the observer of its batcher.

    Args:
        by_member: Whether members are labels; None: if there are at most 100.
    """

    def __init__(self, by_member: bool | None = None) -> None:
        self.registry = CollectorRegistry()
        self._by_member = by_member
        self.statistics: dict[str, Statistics] = {}
        r = self.registry
        self._requests = Counter(
            "widepack_requests", "Requests for inferences.", ("model", "entry", "code"), registry=r
        )
        self._request_seconds = Histogram(
            "widepack_request_seconds",
            "From the body to the answer.",
            ("model",),
            buckets=_SECONDS,
            registry=r,
        )
        self._queue_seconds = Histogram(
            "widepack_queue_seconds", "From the queue to the start.", ("model",), buckets=_SECONDS, registry=r
        )
        self._compute_seconds = Histogram(
            "widepack_compute_seconds", "Of a batch.", ("model", "form"), buckets=_SECONDS, registry=r
        )
        self._batch_rows = Histogram(
            "widepack_batch_rows", "Rows of a batch.", ("model",), buckets=_ROWS, registry=r
        )
        self._batch_members = Histogram(
            "widepack_batch_members", "Members that a batch runs.", ("model",), buckets=_ROWS, registry=r
        )
        self._member_rows = Counter(
            "widepack_member_rows", "Rows that were answered by a member.", ("model", "member"), registry=r
        )
        self._padding_rows = Counter(
            "widepack_padding_rows", "Rows that were computed and are of no request.", ("model",), registry=r
        )
        self._rejected = Counter(
            "widepack_rejected", "Requests that were refused or dropped.", ("reason",), registry=r
        )
        self._swaps = Counter("widepack_swaps", "Swaps of members.", ("result",), registry=r)
        self._swap_pause = Histogram(
            "widepack_swap_pause_seconds", "For how long a swap stops calls.", buckets=_SECONDS, registry=r
        )
        self._reloads = Counter("widepack_reloads", "Reloads of artifacts.", ("result",), registry=r)
        self.queue_rows = Gauge(
            "widepack_queue_rows", "Rows that wait.", registry=r, multiprocess_mode="livesum"
        )
        self.ready = Gauge(
            "widepack_ready", "1 if the server takes requests.", registry=r, multiprocess_mode="livemin"
        )
        self._info = Gauge(
            "widepack_info",
            "Versions.",
            ("version", "torch", "model", "digest", "backend", "device"),
            registry=r,
            multiprocess_mode="livemax",
        )
        self._children: dict[tuple[object, ...], tuple[Histogram, ...]] = {}
        self._members: dict[tuple[str, str], Counter] = {}
        self._described: dict[str, tuple[str, ...]] = {}
        self._counters: dict[tuple[str, str, int], Counter] = {}

    # ---------------------------------------------------------------- what happens

    def describe(self, artifact: ServedArtifact) -> None:
        """Shows which artifact runs."""
        model = artifact.model
        if (before := self._described.get(artifact.name)) is not None:
            self._info.labels(*before).set(0)
        labels = (
            __version__,
            torch.__version__,
            artifact.name,
            artifact.version,
            model.backend,
            str(model.device),
        )
        self._described[artifact.name] = labels
        self._info.labels(*labels).set(1)

    def answered(self, model: ServedModel, code: int, seconds: float) -> None:
        """Counts a request. code: the HTTP status. seconds: from its body to its answer."""
        key = (model.artifact.name, model.layout.entry.name, code)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._requests.labels(*key)
        counter.inc()
        self._of("requests", (self._request_seconds,), (key[0],))[0].observe(seconds)
        found = self.of_model(model)
        if code == 200:
            found.successes += 1
            found.seconds += seconds
            found.last = time.time()
        else:
            found.failures += 1

    def unreadable(self, code: int) -> None:
        """Counts a request that names no model, since it cannot be read. code: the HTTP status."""
        self._requests.labels("", "", code).inc()

    def of_model(self, model: ServedModel) -> Statistics:
        """Returns the counts of a model on the wire."""
        found = self.statistics.get(model.name)
        if found is None:
            found = self.statistics[model.name] = Statistics()
        return found

    def ran(self, parts: list[Part], seconds: float, padding: int) -> None:
        """Counts a batch. padding: how many rows it computed that are of no request."""
        first = parts[0].job.call
        name = first.model.artifact.name
        form = "rows" if first.numbers is not None else "each" if first.model.kind == EACH else "all"
        rows = sum(p.rows for p in parts)
        compute, size, members, queued = self._of(
            form, (self._compute_seconds, self._batch_rows, self._batch_members, self._queue_seconds), (name,)
        )
        compute.observe(seconds)
        size.observe(rows)
        counts: Counts[int] = Counts()
        for part in parts:
            job = part.job
            if part.start == 0:
                queued.observe(job.started - job.queued)
            statistics = self.of_model(job.call.model)
            statistics.executions += 1
            statistics.rows += part.rows
            statistics.queue_seconds += job.started - job.queued
            if job.call.numbers is not None:
                counts.update(job.call.numbers[part.start : part.stop])
        if padding:
            self._padding_rows.labels(name).inc(padding)
        members.observe(len(counts) or len(first.model.artifact.members))
        names = first.model.artifact.members
        if counts and (self._by_member or (self._by_member is None and len(names) <= MEMBERS_AS_LABELS)):
            for number, count in counts.items():
                self._rows_of(name, names[number]).inc(count)

    def _rows_of(self, model: str, member: str) -> Counter:
        """Returns the counter of the rows of a member."""
        found = self._members.get((model, member))
        if found is None:
            found = self._members[model, member] = self._member_rows.labels(model, member)
        return found

    def _of(
        self, form: str, metrics: tuple[Histogram, ...], labels: tuple[str, ...]
    ) -> tuple[Histogram, ...]:
        """Returns metrics with their labels, which costs more than counting, from a dict."""
        key = (form, *labels)
        found = self._children.get(key)
        if found is None:
            found = tuple(
                m.labels(*labels, form) if m is self._compute_seconds else m.labels(*labels) for m in metrics
            )
            self._children[key] = found
        return found

    def rejected(self, reason: str) -> None:
        """Counts a request that was refused or dropped."""
        self._rejected.labels(reason).inc()

    def swapped(self, pause: float | None) -> None:
        """Counts a swap. pause: for how many seconds it stopped calls; None if it failed."""
        self._swaps.labels("failed" if pause is None else "done").inc()
        if pause is not None:
            self._swap_pause.observe(pause)

    def reloaded(self, result: str) -> None:
        """Counts a reload: `done` or `failed`."""
        self._reloads.labels(result).inc()

    # ---------------------------------------------------------------- for Prometheus

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format; with several processes, those of all."""
        if os.environ.get(_DIRECTORY):
            registry = CollectorRegistry()
            several.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self.registry)
