"""Writes the files of a build: stacked weights, programs, what state dicts have beside tensors (versions and
extra state), and the manifest's rows for them, with the provenance: versions, system, date, command, commit.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import manifest as form
from widepack_artifacts import strict_json, tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Entry, Input, OutputLeaf, State
from widepack_artifacts.factored import Factored
from widepack_artifacts.manifest_weights import member_tensor
from widepack_artifacts.state_dicts import STEM, StateDicts, is_row
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

from ..backends.torch_export import export_program, placeholder
from ..checkpoints.alignment import Alignment
from ..checkpoints.extra_state import NotData, encode, tensors_of_states
from ..checkpoints.factory import Factory
from ..checkpoints.loading import MemberLoader, ignored
from ..errors import UsageError
from ..lowering.pattern_programs import LoweringEntry
from ..lowering.wide_programs import LoweredProgram, wide_only
from ..planning.request import StrategyRequest
from ..spec.dtypes import dtype_of
from ..spec.entries import PATTERNS
from ..version import __version__
from .build_weights import BuildEntry, BuildWeights, StoredFactors, WeightRow, WeightTable

HASHING = 4
"""The number of checkpoints that are hashed at the same time."""
SHARD_BYTES = 5 * 10**9
"""The default size of a weights file, as in Hugging Face's libraries."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights files that were written, and a reader of them."""

    paths: list[Path]
    weights: weight_files.Weights

    @classmethod
    def open(cls, writer: Writer, names: Sequence[str], factored: Factored | None = None) -> WeightFiles:
        """Opens the weights files of these names. factored: the weights that are stored as factors."""
        paths = [writer.place(name) for name in names]
        corrections = writer.place(factored.corrections) if factored and factored.corrections else None
        return cls(paths, weight_files.Weights(paths, factored, corrections))


Counted = Callable[[Iterator[torch.Tensor]], Iterator[torch.Tensor]]
FileTensor = tuple[str, Sequence[int], torch.dtype, Callable[[], Iterator[torch.Tensor]]]
"""A tensor of a weights file: its name, shape, dtype, and what makes its content."""


def write_weights(
    writer: Writer,
    table: WeightTable,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Writes the stacked weights; at most one tensor of one member is in memory.

    shard_bytes: the largest size of a file; one weight is never divided. progress: called with the bytes that
    are written and the bytes of all weights. Returns: the names of the files.
    """
    total, done = sum(r.weight.bytes(table.count) for r in table.rows), 0

    def counted(values: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields the values; each is counted after it was written."""
        nonlocal done
        for value in values:
            yield value
            done += value.nbytes
            if progress is not None:
                progress(done, total)

    shards: list[list[FileTensor]] = [[]]
    size = 0
    for row in table.rows:
        row_bytes = row.weight.bytes(table.count)
        if shards[-1] and size + row_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1] += _file_tensors(row, table.count, counted)
        size += row_bytes
    names = []
    for tensors in shards:
        with writer.stream("weights", "safetensors") as file:
            weight_files.write(file, tensors, {"format": "pt"})
        names.append(file.name)
    return names


def _file_tensors(row: WeightRow, count: int, counted: Counted) -> list[FileTensor]:
    """Returns the tensors of the weights files that contain a weight. counted: counts its values."""
    weight, dtype = row.weight, dtype_of(row.weight.dtype)

    def source(members: range) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: counted(row.value(i) for i in members)

    if weight.kind == "ragged":
        return [
            (member_tensor(weight.name, i), weight.shape[i], dtype, source(range(i, i + 1)))
            for i in range(count)
        ]
    members = range(count if weight.kind == "stacked" else 1)
    return [(weight.name, weight.tensors(count)[weight.name], dtype, source(members))]


def write_factored(writer: Writer, factors: Sequence[StoredFactors]) -> Factored:
    """Writes the corrections of factored weights, and returns what the manifest says of these weights."""
    tensors = {
        name: torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for of_weight in factors
        for name, data in of_weight.corrections().items()
    }
    return Factored(
        tuple(f.weight for f in factors), write_tensors(writer, "corrections", tensors) if tensors else ""
    )


def write_tensors(writer: Writer, stem: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes tensors to one safetensors file and returns its name."""
    rows: list[FileTensor] = [(n, list(t.shape), t.dtype, partial(iter, [t])) for n, t in tensors.items()]
    with writer.stream(stem, "safetensors") as file:
        weight_files.write(file, rows)
    return file.name


def write_programs(
    writer: Writer, entries: Sequence[BuildEntry], wides: Mapping[str, Sequence[LoweredProgram]], pt2: bool
) -> form.Manifest:
    """Writes the programs of all entries and returns the manifest with their rows, without a probe or
    provenance.
    """
    table = entries[0].table
    rows = {e.entry: _write_entry(writer, e, wides[e.entry], pt2) for e in entries}
    return form.Manifest(members=_member_rows(table), weights=table.weights, entries=rows)


def _member_rows(table: BuildWeights) -> tuple[form.Member, ...]:
    """Returns the manifest's row of each member, with the hash of its checkpoint."""
    aligned = table.aligned
    with ThreadPoolExecutor(HASHING) as pool:  # hashing releases the GIL
        hashes = pool.map(lambda c: c.sha256(), aligned.checkpoints)
        return tuple(
            form.Member(n, c.label, digest, c.bytes)
            for n, c, digest in zip(aligned.names, aligned.checkpoints, hashes)
        )


def _write_entry(writer: Writer, entry: BuildEntry, wides: Sequence[LoweredProgram], pt2: bool) -> Entry:
    """Writes the programs of one entry and returns its row."""
    members = [
        writer.file(f"programs/member.{entry.entry}", "json", strict_json.canonical(p.to_json()))
        for p in entry.programs
    ]
    return entry.row(
        inputs=tuple(Input(s.name, s.type, s.low, s.high) for s in entry.sources),
        outputs=tuple(OutputLeaf(n, t, k) for (n, t), k in zip(entry.captured.outputs, output_kinds(wides))),
        member=members,
        signatures=list(entry.signatures),
        wide=tuple(write_wides(writer, entry.entry, wides)),
        pt2=write_exported(writer, entry, wides, PATTERNS if pt2 else ()),
        state=tuple(State(s.input, s.output, entry.initial(s)) for s in entry.states),
        literals=entry.literals,
    )


def output_kinds(wides: Sequence[LoweredProgram]) -> list[str]:
    """Returns the kinds of the outputs of an entry's programs if all members have one input."""
    return [o.kind for o in next(w for w in wides if w.pattern == "shared").lowered.program.outputs]


def write_wides(writer: Writer, entry: str, wides: Sequence[LoweredProgram]) -> list[WideProgram]:
    """Writes the wide programs of an entry and returns their rows, one for each plan and part of the
    members.
    """
    rows: list[WideProgram] = []
    for wide in wides:
        data = strict_json.canonical(wide.lowered.program.to_json())
        for plan in wide.uses:
            name = writer.file(f"programs/{plan.device}.{entry}.{plan.pattern}", "json", data)
            parts: list[tuple[int, int] | None] = [(m.start, len(m)) for m in wide.members]
            rows += [
                WideProgram(plan.device, plan.pattern, name, plan.batch, plan.to_json(), part)
                for part in parts or [None]
            ]
    return rows


def write_exported(
    writer: Writer, entry: LoweringEntry, wides: Sequence[LoweredProgram], patterns: Iterable[str]
) -> dict[str, str]:
    """Writes the torch.export programs of an entry and returns their files by pattern."""
    exported: dict[str, str] = {}
    keywords = frozenset(
        entry.sources[i].name
        for _, kind, t, _ in entry.signature
        if kind == "keyword"
        for i in tree.leaves(t)
    )
    result = entry.result
    if entry.states:
        # A program with states is called as `y, states = model(x, **states)`.
        keywords |= {s.name for s in entry.states}
        states = [[placeholder(s.name), {"leaf": s.output}] for s in entry.states]
        result = {"tuple": [result, {"dict": states}]}
    for pattern in patterns:
        program = wide_only(entry, wides, pattern)
        exported[pattern] = writer.file(
            f"programs/{entry.entry}.{pattern}",
            "pt2",
            export_program(program, entry.shapes[0].fakes, entry.bounds, result, keywords),
        )
    return exported


@dataclass(frozen=True)
class MemberStates:
    """What the members' state dicts have beside tensors. record: for the manifest, without the file of extra
    states. extra: of each member, by name.
    """

    record: StateDicts = field(default_factory=StateDicts)
    extra: Sequence[Mapping[str, Any]] = ()

    def write(self, writer: Writer) -> StateDicts:
        """Writes the extra states, and returns the record of the manifest."""
        if not any(self.extra):
            return replace(self.record, extra="")
        return replace(self.record, extra=write_tensors(writer, STEM, tensors_of_states(self.extra)))


def member_states(aligned: Alignment, loader: MemberLoader) -> MemberStates:
    """Returns what the members' state dicts have beside tensors. Raises: UsageError for what is no data."""
    extra = [stored_extra(c.extra_state(), loader.ignore) for c in aligned.checkpoints]
    for name, state in zip(aligned.names, extra):
        refuse_code(state, f"member {name}", ignorable=True)
    versions = {path: dict(row) for path, row in loader.versions.items() if is_row(dict(row))}
    takes = loader.verbatim()
    left_out = sorted({n for c in aligned.checkpoints for n in c.extra_state() if ignored(n, loader.ignore)})
    ignore = list(loader.ignore)
    record = StateDicts(versions, "", takes.versions, takes.bare, loader.plain, ignore, left_out)
    return MemberStates(record, extra)


def stored_extra(state: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the extra state that an artifact stores: without that which a user ignores."""
    return {name: value for name, value in state.items() if not ignored(name, ignore)}


def refuse_code(state: Mapping[str, Any], who: str, ignorable: bool = False) -> None:
    """Raises UsageError for an extra state that is not data.

    who: whose it is. ignorable: whether `--ignore` can leave it out.
    """
    for name, value in state.items():
        try:
            encode(value, {})
        except NotData as e:
            way_out = (
                f"; or leave it out of the artifact with --ignore {name!r}: members are loaded with it, and"
                " extract cannot write them"
                if ignorable
                else ""
            )
            raise UsageError(
                f"{who}: the extra state {name} contains {e}. An artifact stores data and no code: let"
                f" get_extra_state return dicts, lists, numbers, texts and tensors{way_out}"
            ) from None


SHARD_SIZE = "max_shard_size"
"""The field of the provenance with the requested size of a weights file."""
PART_COUNTS = "shards"
"""The field with the numbers of parts of the members that have programs of their own."""


def provenance_of(
    factory: Factory, strategies: StrategyRequest, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the provenance of a build. seconds: the time of each stage so far."""
    return {
        "widepack": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": timestamp(),
        "command": command_line(),
        "model": factory.call[:500],
        "dtype": str(factory.dtype or "").removeprefix("torch."),
        "strategy": [strategies.whole, *strategies.preferred],
        "git": _git_commit(),
        "seconds": dict(seconds),
    }


def timestamp() -> str:
    """Returns the time now, in UTC, as ISO 8601 text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def command_line() -> str:
    """Returns the command line of this process, at most 2000 characters."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000]


def _git_commit() -> str:
    """Returns the commit of the working folder; "" if it is not in a git checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
