"""`widepack advise`: finds what would make an artifact's calls faster, and tries it."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.failures import Failure
from ..shared.options import ARTIFACT, emit, entry_option, example, json_option, model_options, stdout_kept
from ..shared.progress_bar import Progress


@click.command(
    epilog=example(
        "widepack advise ens.wide --batch 32",
        "widepack advise ens.wide --batch 32 --apply plan -o better.wide",
        "widepack advise ens.wide --model net.py:make    # also looks for weights to share or factor",
    )
)
@ARTIFACT
@entry_option
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="The batch of calls.")
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="shared",
    show_default=True,
    help="shared: one set of inputs for all members. each: a separate set for each member.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads inside an op. Default: torch's number; other numbers are then tried.",
)
@click.option(
    "--dtype",
    "dtypes",
    metavar="DTYPE",
    multiple=True,
    help="Also try this dtype: bf16, fp16. Answers then differ by its rounding. Repeatable.",
)
@click.option(
    "--backend",
    "backends",
    metavar="NAME",
    multiple=True,
    help="A backend to try: aot, onnxruntime, compile; eager alone means no other. Repeatable. Default: all "
    "that are installed. Compilation takes a minute or more.",
)
@model_options
@click.option(
    "--apply",
    "only",
    metavar="MOVE",
    default="",
    help="Try only this move, a number or a name of the table, and write the artifact to which it leads.",
)
@click.option(
    "-o",
    "--out",
    metavar="ARTIFACT",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --apply: the artifact to write.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds after which no further move is tried.",
)
@json_option
def command(
    artifact: Path,
    entry: str,
    batch: int,
    pattern: str,
    threads: int | None,
    dtypes: tuple[str, ...],
    backends: tuple[str, ...],
    model: str | None,
    model_args: tuple[str, ...],
    only: str,
    out: Path | None,
    budget: float,
    as_json: bool,
) -> None:
    """Predict, try and measure what would make ARTIFACT's calls faster on this machine.

    A move is a command or an argument: measured plans, another backend, threads, calls of fewer rows or
    members, another dtype, settings of the process. Each is predicted from the costs of the program and from
    rates of this machine. Then it is carried out on a copy, its answers are compared with the members'
    answers, and calls are timed against those of now, interleaved. A move is recommended only if the
    measurement confirms it.
    """
    from widepack.spec.config import parse_model_args

    if (out is None) != (not only):
        raise click.UsageError("--apply and -o go together: --apply MOVE -o better.wide")
    if model is None and model_args:
        raise click.UsageError("--model-arg is an argument of the factory: give --model, too")
    with stdout_kept(as_json), Progress() as progress:
        progress("load", 0, 1)
        from widepack_bench.advice import advise

        found = advise(
            artifact,
            batch=batch,
            pattern=pattern,
            entry=entry,
            threads=threads,
            dtypes=dtypes,
            backends=backends or None,
            model=model,
            model_args=parse_model_args(model_args),
            only=only,
            out=out,
            total_s=budget,
            progress=progress,
        )
    if as_json:
        emit(found.to_json())
    else:
        click.echo(found.table())
    if out is not None:
        if not found.recommended:
            (move,) = found.moves
            raise Failure(f"{out} was not written: the move is {move.outcome}: {move.reason}")
        click.echo(f"wrote {out}", err=as_json)
