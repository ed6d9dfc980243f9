"""`widepack bench-layers`: layers of torch.nn and reference blocks, every strategy beside the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..shared.failures import Failure, Interrupted
from ..shared.measuring import (
    baseline_option,
    check_output,
    counts,
    device_option,
    thread_options,
    tune_option,
)
from ..shared.options import emit, example, stdout_kept
from ..shared.progress_bar import Progress


@click.command(
    epilog=example(
        "widepack bench-layers",
        "widepack bench-layers conv2d attention -p quick -n 4,16 --threads 1",
        "widepack bench-layers all -p full --tune --threads 1 --pin -o layers.json",
    )
)
@click.argument("names", metavar="[NAME|all|block]...", nargs=-1)
@click.option(
    "-p",
    "--preset",
    type=click.Choice(["ci", "quick", "full"]),
    default="quick",
    show_default=True,
    help="How much is measured: shapes, numbers of members, and baselines.",
)
@click.option(
    "-n", "members", metavar="N,..", callback=counts, help="Numbers of members, separated by commas."
)
@device_option
@click.option(
    "--backend",
    "backends",
    type=click.Choice(["eager", "compile"]),
    multiple=True,
    help="eager is always timed; `--backend compile` adds the compiled strategies.",
)
@baseline_option
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="each",
    show_default=True,
    help="shared: one set of inputs for all members. each: a separate set for each member.",
)
@tune_option
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 64),
    help="With --tune: layers that are tuned at the same time.",
)
@click.option(
    "--artifacts",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --tune: keep the tuned artifacts in DIR, and use those that are already there.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of measuring for each row. Default: that of the preset.",
)
@thread_options
@click.option(
    "-t",
    "--top",
    type=click.IntRange(min=1),
    help="Show only this many rows: those in which widepack is slowest compared with the fastest baseline. "
    "Default: all rows.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show the summary only.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write JSON to this file after every row.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    help="Continue the run that wrote this file: rows that are already in it are not measured again.",
)
@click.option(
    "--json",
    "json_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the document to FILE, or to standard output if no FILE is given.",
)
def command(names: tuple[str, ...], json_file: str | None, top: int | None, **options: Any) -> None:
    """Time layers of torch.nn: N of them as one wide layer, every strategy beside the baselines.

    NAME is a layer, an alias, or a family; `all` means every layer, `block` every reference block. Without a
    NAME the command lists what it can measure.
    """
    check_output("--json", json_file)
    as_json = json_file == "-"
    if not names:
        _list_layers(as_json)
        return
    if not options["tune"] and (ignored := [f"--{n}" for n in ("jobs", "artifacts") if options[n]]):
        raise click.UsageError(
            f"{', '.join(ignored)}: this option works only with --tune; give --tune, or leave the option out"
        )
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench.layers.run import run_layers
        from widepack_bench.layers.table import summary_text, table

        document = run_layers(
            ",".join(names),
            options["preset"],
            members=options["members"],
            out=options["out"] or (Path(json_file) if json_file and not as_json else None),
            resume=options["resume"],
            baselines=options["baselines"],
            pattern=options["pattern"],
            device=options["device"],
            threads=options["threads"],
            pin=options["pin"],
            compiled="compile" in options["backends"],
            tune=options["tune"],
            budget_s=options["budget"],
            jobs=options["jobs"] or 1,
            artifacts=options["artifacts"],
            progress=progress,
            report=lambda line: click.echo(line, err=True),
        )
    if as_json:
        emit(document)
    elif document["rows"]:
        click.echo(summary_text(document) if options["quiet"] else table(document, top))
    _end(document, options["out"] or options["resume"])


def _end(document: dict[str, Any], kept: Path | None) -> None:
    """Ends with exit code 130 after a run that was stopped, or 1 if rows failed. Raises: Failure."""
    count = len(document["rows"])
    if document["interrupted"]:
        raise Interrupted(
            f"stopped after {count} rows" + (f"; continue with --resume {kept}" if kept else "")
        )
    if failed := document["summary"]["failed"]:
        raise Failure(f"{len(failed)} of {count} rows failed: {', '.join(failed)}")


def _list_layers(as_json: bool) -> None:
    """Prints the names that the command takes."""
    from widepack_bench.layers.block_sweeps import sweeps
    from widepack_bench.layers.table import listed

    if not as_json:
        click.echo(listed(sweeps()))
        return
    emit(
        [
            {"name": s.name, "family": s.family, "aliases": list(s.aliases), "inputs": list(s.shape.inputs)}
            for s in sweeps()
        ]
    )
