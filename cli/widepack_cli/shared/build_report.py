"""Prints the report of a build as lines of text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from widepack_artifacts.errors import some
from widepack_bench.text import duration, plural, size

from .plan_lines import PlanRow, in_words, joined
from .report_lines import contradicted_lines, damaged, unused_lines
from .verified_lines import verified_line

if TYPE_CHECKING:
    from widepack import BuildReport
    from widepack.building.report import EntryReport


def build_lines(report: BuildReport, dry_run: bool, verbose: bool = False) -> list[str]:
    """Returns the report as lines of text. verbose: with ops, kernels, each measured plan, and times."""
    text = [f"{plural(len(report.members), 'member')}: {some(report.members, 20)}", _weights(report)]
    text += _fleet(report.fleet)
    text += [line for line in [verified_line(report.verification)] if line]
    text += [f"answers      {line}" for line in approximation_lines(report.verification)]
    several = list(report.entries) != ["forward"]
    for name, entry in report.entries.items():
        text += [f"plan         {f'{name}, ' if several else ''}{_plan(report, name)}"]
        text += [f"sizes        {f'{name}, ' if several else ''}{bound}" for bound in entry.bounds]
    text += [f"left out     {b['path']}: {b['why']}" for b in report.left_out]
    text += unused_lines(report.unused)
    text += contradicted_lines(report.contradicted)
    text += damaged(report.not_finite)
    text += _failed(report.measured)
    if verbose:
        for name, entry in report.entries.items():
            text += [*([f"entry {name}"] if several else []), *_entry(entry)]
        text += _measured(report.measured)
        times = ", ".join(f"{stage} {duration(1000 * s)}" for stage, s in report.seconds.items())
        text.append(f"time         {times}")
    if dry_run:
        found = f"the weights would be {size(report.bytes_disk)} on disk; programs and proof come on top"
        return [*text, f"dry run: nothing was written; {found}"]
    took = duration(1000 * sum(report.seconds.values()))
    path = shlex.quote(report.path)
    return [
        *text,
        f"wrote {report.path}: {size(report.bytes_disk)}, in {took}",
        f"next: widepack inspect {path}, widepack serve {path}, or widepack.load({report.path!r}) in Python",
    ]


def _weights(report: BuildReport) -> str:
    """Returns the line about the bytes of the weights, and what the members share."""
    shared, memory = report.weights.get("shared", 0), f"{size(report.bytes_memory)} in memory"
    if not shared:
        return f"weights      {memory}, and no weight is equal in all members"
    own = size(sum(report.weights.values()) - shared)
    return (
        f"weights      {memory}: {size(shared)} equal in all members and stored once, {own} of single members"
    )


def _plan(report: BuildReport, name: str) -> str:
    """Returns what runs at which batch in a call with one input for all members, and how fast that is."""
    measured = (report.measured or {}).get("rows", ())
    rows = [
        PlanRow(
            row["classes"][0],
            row["classes"][1],
            in_words(row["strategies"], row["backend"]),
            loop=(row["loop"], row["loop"]) if row["loop"] else None,
        )
        for row in measured
        if (row["entry"], row["pattern"]) == (name, "shared")
    ]
    predicted = "" if rows else " (predicted, not measured)"
    rows = rows or [
        PlanRow(plan["batch"][0], plan["batch"][1], in_words(plan["strategies"]))
        for plan in report.entries[name].plans
        if (plan["device"], plan["pattern"]) == ("cpu", "shared")
    ]
    return "; ".join(f"{row.batches}: {row.text}{_over(row)}" for row in joined(rows)) + predicted


def _over(row: PlanRow) -> str:
    """Returns how many times as fast as a loop a plan is; "" if that was not measured, or it is the loop."""
    if row.loop is None or row.loop == (1.0, 1.0):
        return ""
    least, most = (f"{ratio:.1f}" for ratio in row.loop)
    return f", about {least if least == most else f'{least} to {most}'} times as fast as a loop over them"


def absent_lines(report: BuildReport) -> list[str]:
    """Returns a sentence for each entry about the inputs of the model that no sample has."""
    return [
        f"{'' if name == 'forward' else f'entry {name}: '}the model also takes {some(entry.absent)}; they "
        "are not among the inputs of the artifact, which answers as without them. To pass one, describe it "
        "as an input too (--input)"
        for name, entry in report.entries.items()
        if entry.absent
    ]


def approximation_lines(verification: Mapping[str, Any]) -> list[str]:
    """Returns lines about what approximate weights change in the answers; none if all are exact."""
    from widepack.verification.record import read_approximations

    return [
        f"{one.entry}: approximate weights change at most {one.worst.part:.2g} of what the fine-tunes change"
        f" (member {one.worst.member}, output {one.worst.output or '0'}); declared {one.tolerance:g}"
        for one in read_approximations(verification)
    ]


_MOST_REASONS = 5
"""How many reasons why weights stay stacked are printed."""


def _fleet(fleet: Mapping[str, Any] | None) -> list[str]:
    """Returns the lines of fine-tunes of one base."""
    if fleet is None:
        return []
    factored, stacked = fleet["factored"], fleet["stacked"]
    ranks = sorted({r for row in factored for r in row["ranks"]})
    bases = ", ".join(dict.fromkeys(row["base"] for row in factored))
    found = f"; ranks {', '.join(map(str, ranks))}; base {bases}" if factored else ""
    text = [f"fleet        {plural(len(factored), 'weight')} as a base and factors{found}"]
    if near := [row for row in factored if row["approximate"]]:
        most = max(row["residual"] for row in near)
        text.append(
            f"approximate  {some([row['weight'] for row in near])}: the factors leave at most {most:.2g} of"
            " the differences from the base"
        )
    by_reason: dict[str, list[str]] = {}
    for row in stacked:
        by_reason.setdefault(row["why"], []).append(row["weight"])
    for why, names in list(by_reason.items())[:_MOST_REASONS]:
        text.append(f"stacked      {some(names)}: {why}")
    if len(by_reason) > _MOST_REASONS:
        text.append(f"             and {len(by_reason) - _MOST_REASONS} more reasons; --json has all")
    return text


def _failed(measured: Mapping[str, Any] | None) -> list[str]:
    """Returns a line if the measurement failed."""
    if measured is None or "failed" not in measured:
        return []
    return [f"plans        were not measured, and the predicted ones stay: {measured['failed']}"]


def _measured(measured: Mapping[str, Any] | None) -> list[str]:
    """Returns the lines of the measured plans, one for each batch class."""
    if measured is None or "failed" in measured:
        return []
    entries = {row["entry"] for row in measured["rows"]}
    note = [f"measured     {measured['note']}"] if measured["note"] else []
    return (
        note
        + [
            f"measured     {row['entry'] + ', ' if len(entries) > 1 else ''}{_plan_line(row)}"
            for row in measured["rows"]
        ]
        + [f"measured     {batch}: not measured: {why}" for batch, why in measured["refused"].items()]
    )


def _plan_line(row: Mapping[str, Any]) -> str:
    """Returns what was chosen for a batch class, and what was measured."""
    least, most = row["classes"]
    batches = f"batch {least}" if least == most else f"batch {least} to {most or 'any'}"
    over = [
        f"{row[key]:.2f}x over {name}"
        for key, name in (("predicted", "the predicted plan"), ("loop", "the loop"))
        if row[key]
    ]
    time = f"{duration(row['ms'])} at {row['batch']}"
    return f"{row['pattern']}, {batches}: {row['chosen']}, {time}; {', '.join(over)}"


def _entry(entry: EntryReport) -> list[str]:
    """Returns the lines of one entry."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in entry.kinds.items() if count)
    used = ", ".join(
        f"{name} {count}" for name, count in sorted(entry.strategies.items(), key=lambda item: -item[1])
    )
    return [
        f"nodes        {kinds}",
        f"strategies   {used}",
        f"wide share   {entry.wide_share:.0%} of the nodes that read a stacked weight",
        *(
            [f"kernels      {entry.kernels_wide} for all members, {entry.kernels_member} for one"]
            if entry.kernels_wide
            else []
        ),
    ]
