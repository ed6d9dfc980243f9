"""`widepack bench`: times an artifact beside its members without widepack, or its nodes with `--profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..shared.failures import Failure
from ..shared.measuring import (
    BASELINES,
    as_text,
    baseline_option,
    check_output,
    device_option,
    total_options,
    write,
)
from ..shared.options import ARTIFACT, batch_list, emit, entry_option, example, model_options, stdout_kept
from ..shared.progress_bar import Progress


class Noisy(Failure):
    """Other programs disturbed the measurement."""


@click.command(
    epilog=example(
        "widepack bench ens.wide",
        "widepack bench ens.wide --model net.py:make --batch 1,64 --threads 1 --pin "
        "--full --html report.html",
        "widepack bench ens.wide --backend aot --backend eager --baseline loop --json report.json",
        "widepack bench ens.wide --profile --trace trace.json",
    )
)
@ARTIFACT
@entry_option
@device_option
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Load the artifact in another dtype: bf16, fp16, fp32. The members are timed in this dtype, too.",
)
@click.option(
    "--batch", "batches", default="1,8,32", show_default=True, callback=batch_list, help="Batch sizes."
)
@click.option(
    "--backend",
    "backends",
    metavar="NAME",
    multiple=True,
    help="The backend of the wide program: auto, eager, compile, aot, onnxruntime; auto+graph and so on run "
    "it by CUDA graphs. Repeatable. The first one is compared with the baselines; the others are only timed.",
)
@baseline_option
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="shared",
    show_default=True,
    help="shared: one set of inputs for all members. each: a separate set for each member.",
)
@model_options
@click.option(
    "--levels",
    is_flag=True,
    help="Also time the steps between one op after the other and the plan, and show what each step gains.",
)
@click.option(
    "--full", is_flag=True, help="Also measure peak memory and start-up, each program in a separate process."
)
@click.option(
    "--profile",
    is_flag=True,
    help="Instead of the comparison: the time of each node, op and source line, for all "
    "members and in a loop.",
)
@click.option(
    "--trace", metavar="FILE", help="Write the profile as a Chrome trace (chrome://tracing, ui.perfetto.dev)."
)
@click.option(
    "-t",
    "--top",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Rows of a profile's tables.",
)
@total_options
@click.option(
    "--json",
    "json_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the report as JSON to FILE, or to standard output if no FILE is given.",
)
@click.option(
    "--html", "html_file", metavar="FILE", help="Write the report as one self-contained page with plots."
)
def command(
    artifact: Path,
    batches: tuple[int, ...],
    json_file: str | None,
    html_file: str | None,
    profile: bool,
    trace: str | None,
    top: int,
    **options: Any,
) -> None:
    """Time ARTIFACT beside its members without widepack: eager, compiled, under vmap, in ONNX Runtime.

    All programs run interleaved in one process with the same inputs. Their answers are compared first. The
    verdict compares widepack with the fastest baseline. A run that is too noisy is refused with exit code 1.
    With --model the baselines run your own modules; without it they run the artifact's member programs.
    """
    for name, path in (("--json", json_file), ("--html", html_file), ("--trace", trace)):
        check_output(name, path)
    if options["model"] is None and options["model_args"]:
        raise click.UsageError("--model-arg is an argument of the factory: give --model, too")
    if profile or trace:
        _refuse_with_profile(html_file, options)
        _profile(artifact, batches, json_file, trace, top, options)
    else:
        _compare(artifact, batches, json_file, html_file, options)


def _refuse_with_profile(html_file: str | None, options: dict[str, Any]) -> None:
    """Refuses options that a profile would ignore. Raises: click.UsageError."""
    ignored = {
        "--html": html_file,
        "--model": options["model"],
        "--levels": options["levels"],
        "--full": options["full"],
        "--backend": options["backends"],
        "--baseline": options["baselines"],
    }
    if given := [name for name, value in ignored.items() if value]:
        raise click.UsageError(
            f"--profile and --trace cannot be used with {', '.join(given)}; leave out one or the other"
        )


def _compare(
    artifact: Path,
    batches: tuple[int, ...],
    json_file: str | None,
    html_file: str | None,
    options: dict[str, Any],
) -> None:
    """Times the artifact and the baselines, and prints or writes the report."""
    from widepack.spec.config import parse_model_args

    as_json = json_file == "-"
    with stdout_kept(as_json), Progress() as progress:
        progress("load", 0, 1)
        from widepack_bench import bench

        report = bench(
            artifact,
            device=options["device"],
            batches=batches,
            backends=options["backends"] or ("auto",),
            baselines=options["baselines"] or BASELINES,
            levels=options["levels"],
            total_s=options["budget"],
            compile_limit_s=options["compile_limit"],
            threads=options["threads"],
            pattern=options["pattern"],
            factory=options["model"],
            factory_args=parse_model_args(options["model_args"]),
            entry=options["entry"],
            dtype=options["dtype"],
            pin=options["pin"],
            roofline=True,
            alone=options["full"],
            progress=progress,
        )
    document = report.to_json()
    if as_json:
        emit(document)
    else:
        click.echo(report.table())
        if json_file:
            write(json_file, as_text(document))
    if html_file:
        from widepack_bench.report.html import page

        write(html_file, page(document))
    if report.noisy:
        noisy = ", ".join(str(row.batch) for row in report.rows if row.verdict == "noisy")
        raise Noisy(
            f"the times of batch {noisy} are not reliable, and the report says why: run the command again "
            "when no other programs run, or with more time (--budget)"
        )
    if not report.rows:
        raise Failure("no batch could be measured")


def _profile(
    artifact: Path,
    batches: tuple[int, ...],
    json_file: str | None,
    trace: str | None,
    top: int,
    options: dict[str, Any],
) -> None:
    """Times the nodes, and prints or writes the profiles."""
    as_json = json_file == "-"
    with stdout_kept(as_json), Progress() as progress:
        progress("load", 0, 1)
        import widepack
        from widepack_bench.measure.processors import quiet
        from widepack_bench.measure.profile import chrome_trace, profile
        from widepack_bench.report.environment import environment

        with quiet(options["threads"], options["pin"]) as threads:
            ens = widepack.load(artifact, device=options["device"], dtype=options["dtype"])
            found = []
            for done, batch in enumerate(batches):
                progress(f"batch {batch}", done, len(batches))
                found.append(
                    profile(
                        ens,
                        batch,
                        entry=options["entry"],
                        pattern=options["pattern"],
                        device=options["device"],
                        name=str(artifact),
                    )
                )
            where = environment(options["device"], threads)
    document = {
        "format": "widepack.profiles/1",
        "environment": where,
        "profiles": [p.to_json() for p in found],
    }
    if as_json:
        emit(document)
    else:
        click.echo(f"{where['device']}, {threads} thread{'' if threads == 1 else 's'}\n")
        click.echo("\n\n".join(p.table(top) for p in found))
        if json_file:
            write(json_file, as_text(document))
    if trace:
        write(trace, json.dumps(chrome_trace(found, where)) + "\n")
