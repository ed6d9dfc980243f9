"""What a build writes: stacked weights, programs, and where all of it comes from."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from widepack_artifacts import manifest as form
from widepack_artifacts import strict_json
from widepack_artifacts import tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.writer import Writer

from ..ir.encoding import dtype_of
from ..spec.entries import PATTERNS
from ..backends.torch_export import export_program, placeholder
from .entry import Job, Row
from ..checkpoints.alignment import Factory
from ..system.progress import Stages
from ..registry.registry import Choice
from ..version import __version__
from ..lowering.wide_programs import Entry, Wide, wide_only

HASHING = 4
"""Checkpoints that are hashed at once."""
SHARD_BYTES = 5 * 10**9
"""Of a weights file, as Hugging Face has it."""
SHARD_SIZE = "max_shard_size"
"""Where the provenance says which size was asked for."""


class Rows(Protocol):
    """A table of weights: a row for each, and how many members there are."""

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def count(self) -> int: ...


Written = tuple[str, Sequence[int], torch.dtype, Callable[[], Iterator[torch.Tensor]]]


def write_weights(writer: Writer, table: Rows, most: int = SHARD_BYTES, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """The stacked weights, streamed from the members' mapped files: at most one tensor of one member is held.

    most: bytes of a file, unless one weight has more. progress: told the bytes done, and of how many. Returns: the files' names.
    """
    total = sum(r.weight.bytes(table.count) for r in table.rows)
    done = 0

    def told(values: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        nonlocal done
        for value in values:
            yield value
            done += value.numel() * value.element_size()
            if progress is not None:
                progress(done, total)

    def source(row: Row, members: range) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: told(row.value(i) for i in members)

    shards: list[list[Written]] = [[]]
    size = 0
    for row in table.rows:
        w = row.weight
        if w.kind == "ragged":
            made: list[Written] = [(f"{w.name}@{i}", w.shape[i], dtype_of(w.dtype), source(row, range(i, i + 1))) for i in range(table.count)]
        else:
            members = range(table.count if w.kind == "stacked" else 1)
            made = [(w.name, w.tensors(table.count)[w.name], dtype_of(w.dtype), source(row, members))]
        if shards[-1] and size + w.bytes(table.count) > most:
            shards.append([])
            size = 0
        shards[-1] += made
        size += w.bytes(table.count)
    names = []
    for entries in shards:
        with writer.stream("weights", "safetensors") as file:
            weight_files.write(file, entries, {"format": "pt"})
        names.append(file.name)
    return names


def write_tensors(writer: Writer, stem: str, tensors: Mapping[str, torch.Tensor]) -> str:
    with writer.stream(stem, "safetensors") as file:
        weight_files.write(file, [(n, list(t.shape), t.dtype, lambda t=t: iter([t])) for n, t in tensors.items()])  # type: ignore[misc]
    return file.name


def write_programs(writer: Writer, jobs: Sequence[Job], wides: Mapping[str, Sequence[Wide]], pt2: bool) -> form.Manifest:
    table = jobs[0].table
    with ThreadPoolExecutor(HASHING) as pool:  # hashing lets other threads run
        hashes = pool.map(lambda c: c.sha256(), table.aligned.checkpoints)
        records = tuple(form.Member(n, c.path, digest, c.bytes) for n, c, digest in zip(table.aligned.names, table.aligned.checkpoints, hashes))
    entries = {job.entry: _write_entry(writer, job, wides[job.entry], pt2) for job in jobs}
    return form.Manifest(members=records, weights=tuple(r.weight for r in table.rows), entries=entries)


def _write_entry(writer: Writer, job: Job, wides: Sequence[Wide], pt2: bool) -> form.Entry:
    first = job.first
    members = [writer.file(f"programs/member.{job.entry}", "json", strict_json.canonical(p.to_json())) for p in job.programs]
    return form.Entry(
        inputs=tuple(form.Input(s.name, s.type, s.low, s.high) for s in job.sources),
        signature=list(first.signature),
        outputs=tuple(form.OutputLeaf(n, t, k) for (n, t), k in zip(first.outputs, kinds_out(wides))),
        result=first.result,
        dims={d: form.Dim(least, most, source, first.sizes[d]) for d, (least, most, source) in first.dims.items()},
        guards=tuple(form.Guard(g.expr, g.source) for g in first.guards),
        fixed=list(first.fixed),
        member=members,
        signatures=list(job.captures.signatures),
        wide=tuple(write_wides(writer, job.entry, wides)),
        pt2=write_exported(writer, job, wides, PATTERNS if pt2 else ()),
        state=tuple(form.State(s.input, s.output, job.initial(s)) for s in job.states),
    )


def kinds_out(wides: Sequence[Wide]) -> list[str]:
    """What an entry's programs give where all members see one input."""
    return [o.kind for o in next(w for w in wides if w.pattern == "shared").lowered.program.outputs]


def write_wides(writer: Writer, entry: str, wides: Sequence[Wide]) -> list[form.WideProgram]:
    """The wide programs of an entry, a file for each plan."""
    rows: list[form.WideProgram] = []
    for wide in wides:
        data = strict_json.canonical(wide.lowered.program.to_json())
        for plan in wide.uses:
            name = writer.file(f"programs/{plan.device}.{entry}.{plan.pattern}", "json", data)
            rows.append(form.WideProgram(plan.device, plan.pattern, name, plan.batch, plan.to_json()))
    return rows


def write_exported(writer: Writer, job: Entry, wides: Sequence[Wide], patterns: Iterable[str]) -> dict[str, str]:
    """The torch.export programs of an entry, by pattern."""
    exported: dict[str, str] = {}
    keywords = frozenset(job.sources[i].name for _, k, t, _ in job.signature if k == "keyword" for i in tree.leaves(t))
    result = job.result
    if job.states:  # (result, {state: new value}), and the states as keywords: y, state = model(x, **state)
        keywords |= {s.name for s in job.states}
        result = {"tuple": [result, {"dict": [[placeholder(s.name), {"leaf": s.output}] for s in job.states]}]}
    for pattern in patterns:
        program = wide_only(job, wides, pattern)
        exported[pattern] = writer.file(
            f"programs/{job.entry}.{pattern}", "pt2", export_program(program, job.shapes[0].fakes, job.bounds, result, keywords)
        )
    return exported


def provenance_of(factory: Factory, opened: Sequence[Any], asked: Choice, stages: Stages) -> dict[str, Any]:
    return {
        "widepack": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000],
        "model": factory.call[:500],
        "dtype": str(factory.dtype or "").removeprefix("torch."),
        "strategy": [asked.whole, *asked.preferred],
        "git": _git_commit(),
        "seconds": dict(stages.seconds),
    }


def _git_commit() -> str:
    """The commit of the working folder, if it is in a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
