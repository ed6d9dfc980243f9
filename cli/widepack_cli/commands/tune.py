"""`widepack tune`: measures plans on this machine and keeps the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from widepack_bench.text import columns, duration

from ..shared.options import (
    ARTIFACT,
    batch_list,
    emit,
    entry_named,
    entry_option,
    example,
    json_option,
    stdout_kept,
)
from ..shared.progress_bar import Progress

if TYPE_CHECKING:
    from widepack import TuneReport
    from widepack.tuning.report import MeasuredBatch

HEAD = ["entry", "pattern", "batch", "for", "time", "predicted", "loop", "plan"]
PATTERNS = {"shared": ("shared",), "each": ("each",), "both": ("shared", "each")}


@click.command(
    epilog=example(
        "widepack tune ens.wide                        # keeps the plans in your cache, for load() here",
        "widepack tune ens.wide --batch 1,64 --write   # publishes the plans in the artifact",
    )
)
@ARTIFACT
@entry_option
@click.option(
    "--batch",
    "batches",
    default="1,8,32",
    show_default=True,
    callback=batch_list,
    help="Batch sizes to measure; each represents a batch class.",
)
@click.option(
    "--pattern",
    type=click.Choice(list(PATTERNS)),
    default="both",
    show_default=True,
    help="shared: one set of inputs for all members. each: a separate set for each member.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time limit in seconds for the whole command, with loading and compilation. Batch sizes and "
    "patterns get equal parts of it; each is measured for at most 20 s. The shortest measurement of a "
    "large artifact may exceed the limit.",
)
@click.option("--device", default="cpu", show_default=True, help="The device: cpu, cuda, cuda:1.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op. Default: torch's number.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="A backend that may be chosen: eager, aot, onnxruntime. Repeatable. Default: all that are "
    "installed (aot compiles, which is slow).",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of compiled programs. Default: the user's cache.",
)
@click.option(
    "--compile-limit",
    "compile_s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="For each batch size and pattern: start no compilation after this many seconds.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Publish the plans in ARTIFACT, which gets a new digest. Default: keep them in your cache.",
)
@json_option
def command(
    artifact: Path,
    entry: str,
    batches: tuple[int, ...],
    pattern: str,
    budget: float,
    device: str,
    threads: int | None,
    backends: tuple[str, ...],
    cache: Path | None,
    compile_s: float,
    write: bool,
    as_json: bool,
) -> None:
    """Time the strategies of ARTIFACT's programs on this machine and keep the fastest plan of each batch
    class.

    Every strategy that applies is timed, node by node and end to end, beside the predicted plan and
    the members in a loop. The best plans are timed on every installed backend. A plan is kept only if it is
    at least as fast as both, and if its answers pass the artifact's probe.
    """
    from widepack_artifacts.reader import Reader

    entries = Reader(artifact).manifest.entries
    names = [entry_named(entries, entry, "")] if entry else []
    with stdout_kept(as_json), Progress() as progress:
        progress("load", 0, 1)
        import widepack

        report = widepack.tune(
            artifact,
            batches=batches,
            patterns=PATTERNS[pattern],
            entries=names,
            total_s=budget,
            device=device,
            threads=threads,
            backends=backends or None,
            cache=cache,
            compile_s=compile_s,
            write=write,
            progress=progress,
        )
    if as_json:
        emit(report.to_json())
        return
    click.echo("\n".join(columns([HEAD, *map(_row, report.rows)])))
    click.echo("\n".join([*_notes(report), _where(report, write)]))


def _row(r: MeasuredBatch) -> list[str]:
    """Returns a row of the table: one pattern at one batch size."""
    strategies = sorted(r.strategies.items(), key=lambda item: -item[1])
    used = ", ".join(f"{name} {count}" for name, count in strategies if name not in ("once", "part"))
    least, most = r.classes
    backend = "" if r.backend == "eager" or r.backend in r.chosen else f" on {r.backend}"
    return [
        r.entry,
        r.pattern,
        str(r.batch),
        f"{least} to {'any' if most is None else most}",
        duration(r.ms),
        _times(r.predicted),
        _times(r.loop),
        f"{r.chosen}{backend}: {used}",
    ]


def _notes(report: TuneReport) -> list[str]:
    """Returns what was not measured, what changed, what was left out, and the machine."""
    from widepack.tuning.report import TIME_OVER

    text = [f"{batch}: not measured: {why}" for batch, why in report.refused.items()]
    for r in report.rows:
        which = f"{r.entry}, {r.pattern}, batch {r.batch}"
        text += [f"{which}: {change}" for change in r.changes]
        late = [name for name, why in r.dropped.items() if TIME_OVER in why]
        text += [f"{which}: {n} was left out: {why}" for n, why in r.dropped.items() if n not in late]
        if late:
            text.append(f"{which}: not tried within the budget: {', '.join(late)}; give a larger --budget")
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    return [*text, f"{report.machine}, {threads}; a ratio above 1 means that the other plan takes longer"]


def _where(report: TuneReport, write: bool) -> str:
    """Returns where the plans are kept."""
    if write:
        return f"wrote {report.kept}, now {report.digest}"
    return f"kept in {report.kept}; --write publishes it in the artifact"


def _times(value: float | None) -> str:
    return "not possible" if value is None else f"{value:.2f}x"
