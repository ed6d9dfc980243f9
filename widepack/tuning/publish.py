"""Writes measured plans into an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike

from widepack_artifacts import strict_json
from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Program
from widepack_artifacts.reader import Reader
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

from ..planning.plan import Plan
from ..system.machine import name_of


def publish_plans(
    path: str | PathLike[str],
    device: str,
    plans: Mapping[tuple[str, str], Sequence[tuple[Program, Plan]]],
    digest: str,
) -> str:
    """Publishes measured programs in an artifact. They replace those of this machine and number of threads.

    Args:
        path: The artifact.
        device: The device of the measurement.
        plans: For each entry and pattern the wide programs with their plans.
        digest: The digest that the artifact must have.

    Returns:
        The new digest.

    Raises:
        ArtifactError: Another artifact was published in the meantime.
    """
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)  # the writer has the lock, so the artifact cannot change now
        writer.keep(reader.manifest.files)
        entries = dict(reader.manifest.entries)
        for (name, pattern), rows in plans.items():
            entries[name] = _with_rows(entries[name], name, pattern, device, rows, writer)
        used = {w.file for e in entries.values() for w in e.wide}
        unused = {w.file for e in reader.manifest.entries.values() for w in e.wide} - used
        for file in unused:
            writer.files.pop(file, None)
        return writer.publish(replace(reader.manifest, entries=entries)).digest


def _with_rows(
    entry: Entry, name: str, pattern: str, device: str, rows: Sequence[tuple[Program, Plan]], writer: Writer
) -> Entry:
    """Returns an entry with measured programs, whose files it writes."""
    kind, machine = device.partition(":")[0], name_of(device)
    threads = {plan.threads for _, plan in rows}
    wide = [
        w
        for w in entry.wide
        if (w.pattern, w.device, w.plan.get("machine", "")) != (pattern, kind, machine)
        or w.plan.get("threads") not in threads
        or w.part is not None
    ]
    for program, plan in rows:
        file = writer.file(
            f"programs/{kind}.{name}.{pattern}", "json", strict_json.canonical(program.to_json())
        )
        wide.append(WideProgram(kind, pattern, file, plan.batch, plan.to_json()))
    return replace(entry, wide=tuple(wide))
