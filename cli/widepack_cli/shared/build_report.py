"""Prints the report of a build as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from widepack_bench.text import duration, plural, size

from .report_lines import contradicted_lines, damaged, some, unused_lines

if TYPE_CHECKING:
    from widepack import BuildReport
    from widepack.building.report import EntryReport


def build_lines(report: BuildReport, dry_run: bool) -> list[str]:
    """Returns the report as lines of text."""
    weights = ", ".join(f"{size(count)} {kind}" for kind, count in report.weights.items() if count)
    text = [
        f"{plural(len(report.members), 'member')}: {some(report.members)}",
        f"weights      {weights or 'none'}; {size(report.bytes_disk)} on disk, "
        f"{size(report.bytes_memory)} in memory",
    ]
    text += _fleet(report.fleet)
    text += [f"answers      {line}" for line in approximation_lines(report.verification)]
    for name, entry in report.entries.items():
        text += [*([f"entry {name}"] if list(report.entries) != ["forward"] else []), *_entry(entry)]
    text += [f"left out     {b['path']}: {b['why']}" for b in report.left_out]
    text += unused_lines(report.unused)
    text += contradicted_lines(report.contradicted)
    text += damaged(report.not_finite)
    text += _measured(report.measured)
    text.append(
        f"time         {', '.join(f'{stage} {duration(1000 * s)}' for stage, s in report.seconds.items())}"
    )
    return [*text, "dry run: nothing was written"] if dry_run else [*text, f"wrote {report.path}"]


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


def _measured(measured: Mapping[str, Any] | None) -> list[str]:
    """Returns the lines of the measured plans, one for each batch class."""
    if measured is None:
        return []
    if "failed" in measured:
        return [f"plans        were not measured, and the predicted ones stay: {measured['failed']}"]
    entries = {row["entry"] for row in measured["rows"]}
    note = [f"plans        {measured['note']}"] if measured["note"] else []
    return (
        note
        + [
            f"plan         {row['entry'] + ', ' if len(entries) > 1 else ''}{_plan_line(row)}"
            for row in measured["rows"]
        ]
        + [f"plan         {batch}: not measured: {why}" for batch, why in measured["refused"].items()]
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
        *(f"sizes        {text}" for text in entry.bounds),
    ]
