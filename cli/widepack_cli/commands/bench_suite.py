"""`widepack bench-suite`: the reference networks with random weights, wide and beside every baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..shared.measuring import (
    BASELINES,
    baseline_option,
    check_output,
    counts,
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
        "widepack bench-suite real --rows resnet18-64 --members 8 --baseline loop --json real.json",
        "widepack bench-suite training --rows mlp,gru-32 --members 8 --json training.json",
    )
)
@click.argument("size", type=click.Choice(["cpu", "full", "real", "training"]))
@click.option("--rows", metavar="NAMES", help="Rows of the suite, separated by commas. Default: all.")
@click.option(
    "--members",
    callback=counts,
    metavar="LIST",
    help="Only with real and training: numbers of members. Default: 4,8,16; with training 8,32.",
)
@click.option(
    "--batch", "batches", callback=counts, metavar="LIST", help="Only with real: batches. Default: 1,4,16."
)
@click.option(
    "--pattern",
    "patterns",
    type=click.Choice(["shared", "each"]),
    multiple=True,
    help="Only with real and training: one set of inputs for all members, or one for each. Repeatable. "
    "Default: shared.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    default=None,
    help="The dtype of weights, inputs and baselines. Default: float32. Not with training.",
)
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
    json_file: str | None,
    baselines: tuple[str, ...],
    **options: Any,
) -> None:
    """Time the suite of reference networks: `cpu` for small sizes, `full` for the published sizes.

    `real` has twelve networks at sizes that a CPU serves, each with several numbers of members and batches.
    It measures the artifact as it was built, and with --tune also the tuned one, in the same run.

    `training` measures training steps of fused members: forward, loss, backward and optimizer. Its baselines
    are loop, compiled-member, compiled-loop, vmap, vmap-compiled and processes, one for each member.

    Each network is built, loaded and compared with the baselines in a separate process. The document is
    written after every row, so a run that was stopped continues where it stopped.
    """
    check_output("--json", json_file)
    out = Path(json_file if json_file and json_file != "-" else SUITE_JSON)
    common: dict[str, Any] = {
        "names": options["rows"].split(",") if options["rows"] else (),
        "baselines": baselines or (() if size == "training" else BASELINES),
        "budget_s": options["budget"],
        "compile_limit_s": options["compile_limit"],
        "threads": options["threads"] or 1,
        "pin": options["pin"],
        "tune": options["tune"],
        "report": click.echo if json_file != "-" else None,
    }
    run = {"real": _real, "training": _training}.get(size, _reference)
    document = run(size, out, common, options)
    if json_file == "-":
        emit(document)


def _reference(size: str, out: Path, common: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs the suite in the sizes `cpu` or `full`. Raises: click.UsageError."""
    from widepack_bench.suite.run import run_suite

    _refuse(size, {"--members": "members", "--batch": "batches", "--pattern": "patterns"}, options)
    with Progress() as progress:
        return run_suite(
            size,
            out,
            backends=options["backends"] or ("auto",),
            alone=options["full"],
            device=options["device"],
            dtype=options["dtype"] or "",
            progress=progress,
            **common,
        )


def _real(size: str, out: Path, common: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs the suite `real`. Raises: click.UsageError."""
    from widepack_bench.suite.real_networks import BATCHES, MEMBERS
    from widepack_bench.suite.run import run_real

    _refuse(size, {"--backend": "backends", "--full": "full"}, options)
    if options["device"] != "cpu":
        raise click.UsageError("the suite real runs on the CPU: leave --device out")
    with Progress() as progress:
        return run_real(
            out,
            members=options["members"] or MEMBERS,
            batches=options["batches"] or BATCHES,
            patterns=options["patterns"] or ("shared",),
            dtype=options["dtype"] or "",
            progress=progress,
            **common,
        )


def _training(size: str, out: Path, common: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs the suite `training`. Raises: click.UsageError."""
    from widepack_bench.training.networks import BASELINES as KNOWN
    from widepack_bench.training.run import run_training

    if unknown := [name for name in common["baselines"] if name not in KNOWN]:
        raise click.UsageError(
            f"the suite training has no baseline {', '.join(unknown)}; it has {', '.join(KNOWN)}"
        )
    ignored = {"--batch": "batches", "--backend": "backends", "--full": "full", "--tune": "tune"}
    _refuse(size, {**ignored, "--dtype": "dtype"}, options)
    if options["device"] != "cpu":
        raise click.UsageError("the suite training runs on the CPU: leave --device out")
    common.pop("tune")
    with Progress() as progress:
        return run_training(
            out,
            members=options["members"],
            patterns=options["patterns"] or ("shared",),
            progress=progress,
            **common,
        )


def _refuse(size: str, names: dict[str, str], options: dict[str, Any]) -> None:
    """Refuses options that the suite would ignore. Raises: click.UsageError."""
    if given := [name for name, option in names.items() if options[option]]:
        raise click.UsageError(f"the suite {size} does not take {', '.join(given)}")
