"""Measures the time of each node: of the wide program, and of the member programs in a loop over the members.

| grouped by | what a row is |
|---|---|
| `node` | a node of the member program, and the nodes of the wide program that replace it |
| `op` | all nodes of one op; wide and member program may use different ones |
| `source` | the user's line, with its method |

Every node is run and timed alone, and values are freed after their last use. A time is the median over runs.
`overhead_ms` is the rest of a call: checks of the inputs, Python between ops. The weight prologue runs once,
before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from widepack.inference.entry import WideEntry
from widepack.ir import ops
from widepack.ir.encoding import decode
from widepack.runtime.graph_module import graph_module
from widepack.runtime.prologue import split
from widepack_artifacts.program import Node, Program, refs, substitute

from ..text import columns, duration, plural
from .inputs import make
from .loading import entry_of, weights_of

FORMAT = "widepack.profile/1"
SECONDS = 1.0  # Seconds of running each side.
Key = Literal["node", "op", "source"]
KEYS: tuple[Key, ...] = ("node", "op", "source")


@dataclass(frozen=True, slots=True)
class Span:
    """One run of one node.

    member: the member that ran, -1 for all. start_ns: since the start of the run.
    """

    name: str
    op: str
    source: str
    of: str
    member: int
    start_ns: int
    ns: int


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a profile.

    wide_ms, loop_ms: of one call; None where a side has no such node. nodes: of the wide program.
    """

    key: str
    wide_ms: float | None
    loop_ms: float | None
    nodes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The profiles of both sides at one batch. wide, loop: the spans of each run."""

    name: str
    batch: int
    members: int
    sizes: dict[str, int]
    call_ms: float
    wide: tuple[tuple[Span, ...], ...]
    loop: tuple[tuple[Span, ...], ...]

    @property
    def wide_ms(self) -> float:
        return _total(self.wide)

    @property
    def loop_ms(self) -> float:
        return _total(self.loop)

    @property
    def overhead_ms(self) -> float:
        return self.call_ms - self.wide_ms

    def lines(self, by: Key) -> list[Line]:
        """Returns the rows, longest first."""
        wide, loop = _times(self.wide, by), _times(self.loop, by)
        count: dict[str, int] = {}
        for span in {s.name: s for s in self.wide[0]}.values():
            count[_key(span, by)] = count.get(_key(span, by), 0) + 1
        made = [
            Line(key, wide.get(key), loop.get(key), count.get(key, 0))
            for key in dict.fromkeys([*wide, *loop])
        ]
        return sorted(made, key=lambda line: (-(line.wide_ms or 0.0), -(line.loop_ms or 0.0)))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "batch": self.batch,
            "members": self.members,
            "sizes": self.sizes,
            "call_ms": self.call_ms,
            "wide_ms": self.wide_ms,
            "loop_ms": self.loop_ms,
            "overhead_ms": self.overhead_ms,
            **{f"by_{by}": [asdict(line) for line in self.lines(by)] for by in KEYS},
        }

    def table(self, top: int = 12) -> str:
        """Returns the first rows of each grouping as text."""
        text = [
            f"{self.name}, batch {self.batch}, {plural(self.members, 'member')}: a call takes "
            f"{duration(self.call_ms)}, its nodes {duration(self.wide_ms)}; "
            f"the nodes of the members' own programs, one member after the other, {duration(self.loop_ms)}"
        ]
        for by in KEYS:
            lines = self.lines(by)
            body = [
                [
                    line.key or "(no line)",
                    str(line.nodes),
                    duration(line.wide_ms) if line.wide_ms is not None else "-",
                    f"{line.wide_ms / self.wide_ms:.0%}" if line.wide_ms is not None else "-",
                    duration(line.loop_ms) if line.loop_ms is not None else "-",
                    f"{line.loop_ms / line.wide_ms:.2f}x"
                    if line.wide_ms and line.loop_ms is not None
                    else "-",
                ]
                for line in lines[:top]
            ]
            text += ["", *columns([[by, "nodes", "wide", "share", "in a loop", "gain"], *body])]
            if len(lines) > top:
                text.append(f"({len(lines) - top} more)")
        return "\n".join(text)

    def trace(self) -> list[dict[str, Any]]:
        """Returns events of the Chrome trace format (chrome://tracing, Perfetto): the last run of each side
        as a process.
        """
        events: list[dict[str, Any]] = []
        for pid, (side, runs) in enumerate(
            (("wide program", self.wide), ("member programs in a loop", self.loop)), 2 * self.batch
        ):
            events.append(
                {
                    "ph": "M",
                    "name": "process_name",
                    "pid": pid,
                    "tid": 0,
                    "args": {"name": f"{side}, batch {self.batch}"},
                }
            )
            for span in runs[-1]:
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.op,
                        "pid": pid,
                        "tid": 0,
                        "ts": span.start_ns / 1e3,
                        "dur": span.ns / 1e3,
                        "args": {
                            "op": span.op,
                            "source": span.source,
                            "of": span.of,
                            "member": "all" if span.member < 0 else span.member,
                        },
                    }
                )
        return events


def profile(
    ens: Any,
    batch: int,
    *,
    entry: str = "",
    pattern: str = "shared",
    device: str = "cpu",
    name: str = "model",
    seconds: float = SECONDS,
) -> Profile:
    """Profiles one batch of a loaded model.

    seconds: of running each side. Raises: BenchError where no inputs can be made at this batch.
    """
    run = entry_of(ens, entry)
    args, kwargs, sizes = make(run.entry, batch, members=len(run) if pattern == "each" else 0, device=device)
    state = run.state(**{d: n for d, n in sizes.items() if d in run.state_dims}) if run.entry.state else None
    values, marks = run.tensor_calls.tensors(args, kwargs, pattern, state)
    program = run.programs.for_sizes(pattern, sizes)
    with torch.inference_mode():
        call = program.run
        call_ms = _median_call(lambda: call(*values), device, seconds)
        wide, loop = _runs(
            _wide(run, program.program, values, device),
            _loop(run, values, marks, device),
            seconds=2 * seconds,
        )
    return Profile(name, batch, len(run), sizes, call_ms, wide, loop)


class StepClock:
    """Runs a program node by node. early: names that are computed before it begins."""

    def __init__(self, program: Program, device: str) -> None:
        self.program, self.device = program, torch.device(device)
        self._cuda = device.startswith("cuda")
        last: dict[str, int] = {}
        for i, node in enumerate(program.nodes):
            for r in refs((node.args, node.kwargs)):
                last[r] = i
        kept = {r for o in program.outputs for r in refs(o.value)}
        self._drop: list[list[str]] = [[] for _ in program.nodes]
        for name, i in last.items():
            if name not in kept:
                self._drop[i].append(name)
        self._bodies = {n.name: StepClock(n.body, device) for n in program.nodes if n.body is not None}

    def run(self, values: dict[str, Any], begin: int, spans: list[Span], member: int = -1) -> dict[str, Any]:
        """Runs all nodes.

        values: of weights and inputs by name; results are added. begin: the clock at the start of the run.
        """
        for node, drop in zip(self.program.nodes, self._drop, strict=True):
            args = decode(substitute(node.args, values.__getitem__), self.device)
            if node.body is not None:
                values[node.name] = self._loop(node, args, begin, spans)
            else:
                kwargs = decode(substitute(node.kwargs, values.__getitem__), self.device)
                op = ops.resolve(node.op)
                start = time.perf_counter_ns()
                values[node.name] = op(*args, **kwargs)
                self._wait()
                spans.append(_span(node, member, start, begin))
                del args, kwargs
            for name in drop:
                del values[name]
        return values

    def _loop(self, node: Node, args: Sequence[Any], begin: int, spans: list[Span]) -> list[Any]:
        """Runs a loop region: its body for each member, then the writing of the results."""
        body = node.body
        assert body is not None
        member_args = [
            (a.unbind(0) if isinstance(a, Tensor) else a) if s.kind != "shared" else None
            for s, a in zip(body.inputs, args, strict=True)
        ]
        outs: list[Any] = [[] for _ in body.outputs]
        for i in range(self.program.members):
            one = {
                s.name: a if g is None else g[i]
                for s, a, g in zip(body.inputs, args, member_args, strict=True)
            }
            made = self._bodies[node.name].run(one, begin, spans, i)
            start = time.perf_counter_ns()
            for k, o in enumerate(body.outputs):
                value = substitute(o.value, made.__getitem__)
                if o.kind == "stacked":
                    if i == 0:
                        outs[k] = torch.empty(
                            (self.program.members, *value.shape), dtype=value.dtype, device=value.device
                        )
                    outs[k][i] = value
                else:
                    outs[k].append(value)
            self._wait()
            spans.append(_span(node, i, start, begin))
        return outs

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _span(node: Node, member: int, start: int, begin: int) -> Span:
    return Span(
        node.name,
        node.op,
        node.source,
        node.member or node.name,
        member,
        start - begin,
        time.perf_counter_ns() - start,
    )


def _wide(run: WideEntry, program: Program, inputs: Sequence[Any], device: str) -> Iterator[tuple[Span, ...]]:
    """Yields runs of the wide program without end."""
    parts = split(program)
    derived = list(graph_module(parts.prologue, torch.device(device)).forward(*weights_of(run, program)))
    steps = StepClock(parts.main, device)
    names = [s.name for s in (*parts.main.weights, *parts.main.inputs)]
    while True:
        spans: list[Span] = []
        steps.run(dict(zip(names, [*derived, *inputs], strict=True)), time.perf_counter_ns(), spans)
        yield tuple(spans)


def _loop(
    run: WideEntry, inputs: Sequence[Any], marks: Sequence[bool], device: str
) -> Iterator[tuple[Span, ...]]:
    """Yields runs of all members' own programs, one after the other, without end."""
    made: dict[int, StepClock] = {}
    sides = []
    for i in range(len(run)):
        program, weights = run.programs.source.member(i)
        steps = made.setdefault(id(program), StepClock(program, device))
        own = [v[i] if m else v for v, m in zip(inputs, marks, strict=True)]
        sides.append(
            (
                steps,
                dict(
                    zip([s.name for s in (*program.weights, *program.inputs)], [*weights, *own], strict=True)
                ),
            )
        )
    while True:
        spans: list[Span] = []
        begin = time.perf_counter_ns()
        for i, (steps, values) in enumerate(sides):
            steps.run(dict(values), begin, spans, i)
        yield tuple(spans)


def _runs(*sides: Iterator[tuple[Span, ...]], seconds: float) -> list[tuple[tuple[Span, ...], ...]]:
    """Runs all sides in turn for some seconds: two warm-up runs, then at least three and at most 200.

    Other work on the machine then slows all sides down.
    """
    for _ in range(2):
        for side in sides:
            next(side)
    runs_of_sides: list[list[tuple[Span, ...]]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    while len(runs_of_sides[0]) < 3 or (time.perf_counter() < end and len(runs_of_sides[0]) < 200):
        for runs, side in zip(runs_of_sides, sides, strict=True):
            runs.append(next(side))
    return [tuple(runs) for runs in runs_of_sides]


def _median_call(call: Any, device: str, seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter_ns()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return statistics.median(times[2:])


def _key(span: Span, by: Key) -> str:
    return span.of if by == "node" else span.op if by == "op" else span.source


def _times(runs: Sequence[Sequence[Span]], by: Key) -> dict[str, float]:
    """Returns milliseconds by key, in the order of the program: the median over runs of the sums within a
    run.
    """
    sums: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        for span in run:
            row = sums.setdefault(_key(span, by), [0] * len(runs))
            row[number] += span.ns
    return {key: statistics.median(row) / 1e6 for key, row in sums.items()}


def _total(runs: Sequence[Sequence[Span]]) -> float:
    return statistics.median(sum(span.ns for span in run) for run in runs) / 1e6


def chrome_trace(profiles: Sequence[Profile], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one Chrome trace of several batches."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"widepack": dict(environment)},
        "traceEvents": [e for p in profiles for e in p.trace()],
    }
