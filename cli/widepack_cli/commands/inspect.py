"""`widepack inspect`: shows what an artifact contains, from its manifest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from widepack_artifacts import guards
from widepack_artifacts.entry import Entry, Input, absent_inputs
from widepack_artifacts.errors import plain
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_bench.text import columns, plural, size

from ..shared.options import ARTIFACT, emit, example, json_option, readable
from ..shared.plan_lines import stored_lines, strategies_of
from ..shared.verified_lines import record_lines

FIRST, LAST = 10, 3  # rows of a long table of members
NAME, SOURCE = 40, 60  # characters of a name and of a path in that table


@click.command(
    epilog=example(
        "widepack inspect ens.wide",
        "widepack inspect ens.wide --weights",
        "widepack inspect ens.wide --json | jq .summary",
    )
)
@ARTIFACT
@click.option(
    "--members", is_flag=True, help="List every member, with whole names. Default: the first and last."
)
@click.option("--weights", is_flag=True, help="List every weight with its kind, type and shape.")
@click.option("--files", is_flag=True, help="List every file with its size and hash.")
@json_option
def command(artifact: Path, members: bool, weights: bool, files: bool, as_json: bool) -> None:
    """Show what ARTIFACT contains: members, inputs, guards, outputs, weights, programs, verification.

    The command reads only the manifest and checks its digest. `widepack verify` checks the files.
    """
    manifest = Reader(artifact).manifest
    with readable(artifact):
        if as_json:
            emit({"path": str(artifact), "summary": summary(manifest), "manifest": manifest.to_json()})
            return
        click.echo(plain("\n".join(lines(str(artifact), manifest, weights, files, members))))


def summary(manifest: Manifest) -> dict[str, Any]:
    """Returns the main figures of an artifact, for `--json`."""
    return {
        "members": [m.name for m in manifest.members],
        "entries": list(manifest.entries),
        "state": manifest.state,
        "weights": dict(Counter(w.kind for w in manifest.weights)),
        "bytes": sum(f.bytes for f in manifest.files.values()),
        # The rows of one batch class are in the order of preference; the first one counts.
        "strategies": {
            name: {
                f"{w.device}.{w.pattern}": strategies_of(w.plan)
                for w in reversed(entry.wide)
                if w.part is None
            }
            for name, entry in manifest.entries.items()
        },
    }


def lines(path: str, manifest: Manifest, weights: bool, files: bool, members: bool = False) -> list[str]:
    """Returns the artifact as lines of text. weights, files, members: list all of them."""
    total = sum(f.bytes for f in manifest.files.values())
    text = [
        (
            f"{path}: {plural(len(manifest.members), 'member')}, "
            f"{plural(len(manifest.files), 'file')} of {size(total)}, "
            f"format {'.'.join(map(str, manifest.version))}"
        ),
        f"{manifest.digest}",
        "",
        "members",
        *_indent(_members(manifest, members)),
    ]
    for name, entry in manifest.entries.items():
        text += ["", f"entry {name}", *_indent(_entry(entry))]
    text += ["", "weights", *_indent(_weights(manifest, weights))]
    text += ["", "verified", *_indent(_verified(manifest))]
    made = {k: v for k, v in manifest.provenance.items() if k != "history"}
    if isinstance(row := made.get("calibration"), dict):
        made["calibration"] = {k: row[k] for k in ("kind", "value", "output", "of") if k in row}
    text += ["", "provenance", *_indent(f"{k}: {_short(v)}" for k, v in made.items())] if made else []
    text += (
        ["", "since then", *_indent(since)] if (since := _history(manifest.provenance.get("history"))) else []
    )
    if files:
        rows = [[name, size(f.bytes), f.sha256] for name, f in manifest.files.items()]
        text += ["", "files", *_indent(columns([["name", "size", "sha256"], *rows]))]
    return text


def _members(manifest: Manifest, listed: bool) -> list[str]:
    """Returns the table of members; long tables and names are shortened unless all are `listed`."""

    def cell(text: str, most: int) -> str:
        return text if listed or len(text) <= most else f"{text[: most // 2 - 2]}...{text[1 - most // 2 :]}"

    rows = [
        [str(i), cell(m.name, NAME), cell(m.source, SOURCE), size(m.bytes)]
        for i, m in enumerate(manifest.members)
    ]
    table = columns([["", "name", "checkpoint", "size"], *rows])
    if listed or len(rows) <= FIRST + LAST + 1:
        return table
    left_out = f"... {len(rows) - FIRST - LAST} more; --members lists all"
    return [*table[: 1 + FIRST], left_out, *table[-LAST:]]


def _history(rows: Any) -> list[str]:
    """Returns a line for each member that `update`, `append` or `drop` changed.

    The history is a free record, so any value in it is accepted.
    """
    found = []
    for row in rows if isinstance(rows, list) else []:
        for change in (
            row.get("members", []) if isinstance(row, dict) and isinstance(row.get("members"), list) else []
        ):
            if isinstance(change, dict):
                change_text = (
                    f"{change.get('member')} is {change['source']}"
                    if "source" in change
                    else f"without {change.get('member')}"
                )
                before = f", was {change['left']}" if "source" in change and "left" in change else ""
                found.append(f"{row.get('date')} {row.get('did')}: {_short(change_text + before)}")
    return found


def _entry(entry: Entry) -> list[str]:
    inside, out = {s.input for s in entry.state}, {s.output for s in entry.state}
    text = [f"input   {i.name}: {i.type}{_bounds(i)}" for k, i in enumerate(entry.inputs) if k not in inside]
    if absent := absent_inputs(entry.signature):
        text.append(f"without {', '.join(absent)}: None is part of the program")
    text += [
        f"output  {o.name or '(the only one)'}: {o.type}, {o.kind}"
        for k, o in enumerate(entry.outputs)
        if k not in out
    ]
    for state in entry.state:
        begins = f"the weight {state.initial}" if state.initial else "zeros"
        text.append(
            f"state   {entry.inputs[state.input].name}: {entry.inputs[state.input].type}, one "
            f"for each member; begins as {begins}"
        )
    for name, dim in entry.dims.items():
        text.append(
            f"dim     {name} from {dim.min} to {'any' if dim.max is None else dim.max}{_where(dim.source)}"
        )
    text += [f"guard   {guards.text(g.expr)}{_where(g.source)}" for g in entry.guards]
    text += [f"rows    {entry.rows}"] if entry.rows is not None else []
    text += [f"fixed   {sentence}" for sentence in entry.fixed]
    text += stored_lines(entry.wide)
    text += [f"pt2     {pattern}: {file}" for pattern, file in entry.pt2.items()]
    return text


def _verified(manifest: Manifest) -> list[str]:
    """Returns what the build verified, by entry."""
    others = manifest.verification.get("entries", {})
    first = {k: v for k, v in manifest.verification.items() if k != "entries"}
    text = [line for record in [first] if record for line in record_lines(record, "")]
    text += [line for name, record in others.items() for line in record_lines(record, f"{name} ")]
    if any("approximation" in record for record in (first, *others.values())):
        from ..shared.build_report import approximation_lines

        text += approximation_lines(manifest.verification)
    return text or ["no record"]


def _bounds(spec: Input) -> str:
    if spec.low is None and spec.high is None:
        return ""
    return f" from {'any' if spec.low is None else spec.low} to {'any' if spec.high is None else spec.high}"


def _where(source: str) -> str:
    return f"  ({source})" if source else ""


def _weights(manifest: Manifest, listed: bool) -> list[str]:
    kinds = Counter(w.kind for w in manifest.weights)
    text = [", ".join(f"{kinds[k]} {k}" for k in ("shared", "stacked", "ragged") if kinds[k]) or "none"]
    if factored := manifest.factored.weights:
        ranks = sorted({rank for w in factored for rank in w.ranks})
        text.append(f"{len(factored)} as a base and factors, ranks {', '.join(map(str, ranks))}")
        text += _base(manifest.provenance.get("base"))
    if listed:
        rows = [[w.name, w.kind, w.role, w.dtype, str(w.shape)] for w in manifest.weights]
        text += columns([["name", "kind", "role", "dtype", "shape of one member"], *rows])
    return text


def _base(record: Any) -> list[str]:
    """Returns a line for the base of a fleet. The record is free, so any value in it is accepted."""
    if not isinstance(record, dict) or "source" not in record:
        return []
    named = f", named {_short(record['named'])} by the adapters" if "named" in record else ""
    return [f"base {_short(record['source'])}{named}, sha256 {_short(record.get('sha256', ''))}"]


def _short(value: Any) -> str:
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    text = text.replace("\n", "\\n")  # a record of an unknown file adds no lines
    return text if len(text) <= 200 else text[:197] + "..."


def _indent(rows: Any) -> list[str]:
    return [f"  {row}" for row in rows]
