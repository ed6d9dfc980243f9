"""`widepack bench-suite`: the reference networks with random weights, wide and beside every baseline."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.measuring import (
    BASELINES,
    baseline_option,
    check_output,
    device_option,
    measuring_options,
    tune_option,
)
from ..shared.options import emit, example
from ..shared.progress_bar import Progress

SUITE_JSON = "suite.json"


@click.command(
    epilog=example(
        "widepack bench-suite cpu --threads 1 --pin --json suite.json",
        "widepack bench-suite full --rows vit,bert --baseline loop",
    )
)
@click.argument("size", type=click.Choice(["cpu", "full"]))
@click.option("--rows", metavar="NAMES", help="Rows of the suite, separated by commas. Default: all.")
@device_option
@click.option(
    "--backend",
    "backends",
    metavar="NAME",
    multiple=True,
    help="The backend of the wide programs: auto, eager, compile, aot, onnxruntime. Repeatable.",
)
@baseline_option
@click.option(
    "--full", is_flag=True, help="Also measure peak memory and start-up, each program in a separate process."
)
@tune_option
@measuring_options
@click.option(
    "--json",
    "json_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help=f"The file of the results; a later run continues it. Default: {SUITE_JSON}. Without FILE: the "
    "document is also written to standard output.",
)
def command(
    size: str,
    rows: str | None,
    device: str,
    backends: tuple[str, ...],
    baselines: tuple[str, ...],
    full: bool,
    tune: bool,
    budget: float,
    compile_limit: float,
    threads: int | None,
    pin: bool,
    json_file: str | None,
) -> None:
    """Time the suite of reference networks: `cpu` for sizes that suit a CPU, `full` for the published sizes.

    Each row is built, loaded and compared with the baselines in a separate process. The document is written
    after every row, so a run that was stopped continues where it stopped.
    """
    from widepack_bench.suite.run import run_suite

    check_output("--json", json_file)
    with Progress() as progress:
        document = run_suite(
            size,
            Path(json_file if json_file and json_file != "-" else SUITE_JSON),
            names=rows.split(",") if rows else (),
            baselines=baselines or BASELINES,
            backends=backends or ("auto",),
            budget_s=budget,
            compile_limit_s=compile_limit,
            threads=threads or 1,
            pin=pin,
            alone=full,
            tune=tune,
            device=device,
            progress=progress,
            report=click.echo if json_file != "-" else None,
        )
    if json_file == "-":
        emit(document)
