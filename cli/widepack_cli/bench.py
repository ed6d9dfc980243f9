"""`widepack bench`: an artifact beside its members without widepack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .common import ARTIFACT, batch_list, emit, entry_option, example, model_options, stdout_kept, write_whole
from .main import Failure
from .progress import Progress

BASELINES = ("loop", "vmap", "vmap-compiled")


class Noisy(Failure):
    """A run that measured the machine's other work."""


@click.command(
    epilog=example(
        "widepack bench ens.wide",
        "widepack bench ens.wide --model net.py:make --batch 1,64 --threads 1",
        "widepack bench ens.wide --baseline loop --json report.json",
    )
)
@ARTIFACT
@entry_option
@click.option("--device", default="cpu", show_default=True, help="Where everything runs: cpu, cuda, cuda:1.")
@click.option("--batch", "batches", default="1,8,32", show_default=True, callback=batch_list, help="Batch sizes.")
@click.option(
    "--baseline",
    "baselines",
    metavar="NAME",
    multiple=True,
    help=f"What to compare with: {', '.join(BASELINES)}. Repeatable; all of them without it.",
)
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="shared",
    show_default=True,
    help="Every member sees the same inputs, or each its own.",
)
@model_options
@click.option(
    "--budget", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True, help="Seconds of measuring a batch, compilation aside."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op; torch's own number without it.")
@click.option("--pin", is_flag=True, help="Bind the process to as many processors as it has threads.")
@click.option(
    "--json",
    "json_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the report as JSON to standard output, or to FILE beside the table.",
)
def command(
    artifact: Path,
    entry: str,
    device: str,
    batches: tuple[int, ...],
    baselines: tuple[str, ...],
    pattern: str,
    model: str | None,
    model_args: tuple[str, ...],
    budget: float,
    threads: int | None,
    pin: bool,
    json_file: str | None,
) -> None:
    """Time ARTIFACT beside its members in an eager loop, under vmap, and under compiled vmap.

    All run interleaved in one process with the same inputs; their answers are compared first. The verdict is about the fastest baseline, and
    a run that is too noisy is refused (exit code 1). With --model the baselines run your own modules, without it the artifact's member programs.
    """
    as_json = json_file == "-"
    if json_file and not as_json and Path(json_file).is_dir():
        raise click.BadParameter(f"{json_file} is a folder; give the path of a file", param_hint="--json")
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench import bench

        report = bench(
            artifact,
            device=device,
            batches=batches,
            baselines=baselines or BASELINES,
            budget_s=budget,
            threads=threads,
            pattern=pattern,
            factory=_factory(artifact, model, model_args),
            entry=entry,
            pin=pin,
            progress=progress,
        )
    if as_json:
        emit(report.to_json())
    else:
        click.echo(report.table())
    if json_file and not as_json:
        text = json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"
        write_whole(Path(json_file), lambda path: void(path.write_text(text, encoding="utf-8")), force=True)
    if report.noisy:
        noisy = ", ".join(str(row.batch) for row in report.rows if row.verdict == "noisy")
        raise Noisy(f"the machine was too busy to measure batch {noisy}; what was found for it means nothing")
    if not report.rows:
        raise Failure("no batch could be measured")


def void(_: Any) -> None:
    """A call for its effect."""


def _factory(artifact: Path, model: str | None, model_args: tuple[str, ...]) -> Any:
    if model is None:
        if model_args:
            raise click.UsageError("--model-arg needs --model")
        return None
    from widepack.models import find_factory
    from widepack.specs import parse_model_args
    from widepack_artifacts.store import Reader

    return find_factory(model, parse_model_args(model_args), Reader(artifact).manifest.members[0].source)
