"""`widepack tune`: an artifact's plans by measurement on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from widepack_bench.text import columns, duration

from ..shared.options import ARTIFACT, batch_list, emit, entry_named, entry_option, example, json_option, stdout_kept
from ..shared.progress_bar import Progress

PATTERNS = {"shared": ("shared",), "each": ("each",), "both": ("shared", "each")}


@click.command(
    epilog=example(
        "widepack tune ens.wide                        # kept in your cache: load() takes it on this machine",
        "widepack tune ens.wide --batch 1,64 --write   # published in the artifact, for machines of this kind",
    )
)
@ARTIFACT
@entry_option
@click.option(
    "--batch", "batches", default="1,8,32", show_default=True, callback=batch_list, help="Batch sizes to measure at; each stands for a class."
)
@click.option(
    "--pattern", type=click.Choice(list(PATTERNS)), default="both", show_default=True, help="Inputs that all members share, one input each, or both."
)
@click.option(
    "--budget", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True, help="Seconds of measuring a batch of one pattern."
)
@click.option("--device", default="cpu", show_default=True, help="Where to measure: cpu, cuda, cuda:1.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op; torch's own number without it.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="A backend that may be chosen: eager, aot, onnxruntime. Repeatable; all that are here without it (aot compiles, which takes its time).",
)
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="The folder of compiled programs; without it the user's own.")
@click.option(
    "--compile-limit",
    "compile_s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="Seconds of a batch of one pattern after which no compilation begins.",
)
@click.option("--write", is_flag=True, help="Publish the plans in ARTIFACT, which gets a new digest; without it they go to your cache.")
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
    """Time the strategies of ARTIFACT's programs on this machine and keep the fastest plan of each batch class.

    Every strategy that applies is measured, node by node and end to end, beside the plan by rules of thumb and the members in a loop, and the best of them on every
    backend that is here; a plan that is slower than either is not kept, nor one whose answers do not pass the artifact's probe.
    """
    from widepack_artifacts.writer import Reader

    entries = Reader(artifact).manifest.entries
    names = [entry_named(entries, entry, "")] if entry else []
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        report = widepack.tune(
            artifact,
            batches=batches,
            patterns=PATTERNS[pattern],
            entries=names,
            budget_s=budget,
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
    table = [["entry", "pattern", "batch", "for", "time", "rules of thumb", "loop", "plan"]]
    for r in report.rows:
        used = ", ".join(f"{s} {n}" for s, n in sorted(r.strategies.items(), key=lambda item: -item[1]) if s not in ("once", "part"))
        least, most = r.classes
        table.append(
            [
                r.entry,
                r.pattern,
                str(r.batch),
                f"{least} to {'any' if most is None else most}",
                duration(r.ms),
                _times(r.rules),
                _times(r.loop),
                f"{r.chosen}{'' if r.backend == 'eager' or r.backend in r.chosen else f' on {r.backend}'}: {used}",
            ]
        )
    click.echo("\n".join(columns(table)))
    for batch, why in report.refused.items():
        click.echo(f"{batch}: not measured: {why}")
    for r in report.rows:
        for change in r.changes:
            click.echo(f"{r.entry}, {r.pattern}, batch {r.batch}: {change}")
        for name, why in r.dropped.items():
            click.echo(f"{r.entry}, {r.pattern}, batch {r.batch}: {name} took no part: {why}")
    click.echo(f"{report.machine}, {report.threads} thread{'s' if report.threads > 1 else ''}; a ratio above 1 is how much longer the other takes")
    click.echo(f"wrote {report.kept}, now {report.digest}" if write else f"kept in {report.kept}; --write publishes it in the artifact")


def _times(value: float | None) -> str:
    return "does not run" if value is None else f"{value:.2f}x"
