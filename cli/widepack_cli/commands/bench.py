"""`widepack bench`: an artifact beside its members without widepack, node by node with `--profile`; the suite of reference networks with `--suite`, layers with `--primitive`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..shared.options import batch_list, emit, entry_option, example, model_options, stdout_kept
from ..main import Failure
from ..shared.progress_bar import Progress

BASELINES = ("loop", "compiled-member", "compiled-loop", "vmap", "vmap-compiled", "onnxruntime", "cuda-graph-loop")
SUITE_JSON = "suite.json"


class Noisy(Failure):
    """A run that measured the machine's other work."""


def _counts(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """A click callback: numbers of members, none where it is left out."""
    return () if value is None else batch_list(ctx, parameter, value)


@click.command(
    epilog=example(
        "widepack bench ens.wide",
        "widepack bench ens.wide --model net.py:make --batch 1,64 --threads 1 --pin --full --html report.html",
        "widepack bench ens.wide --backend aot --backend eager --baseline loop --json report.json",
        "widepack bench ens.wide --profile --trace trace.json",
        "widepack bench --suite cpu --threads 1 --pin --json suite.json",
        "widepack bench --primitive conv2d,attention -p quick -n 4,16 --threads 1",
        "widepack bench --primitive all -p full --tune --threads 1 --pin -o primitives.json",
    )
)
@click.argument("artifact", metavar="[ARTIFACT]", required=False, type=click.Path(path_type=Path))
@entry_option
@click.option("--device", default="cpu", show_default=True, help="Where everything runs: cpu, cuda, cuda:1.")
@click.option("--dtype", metavar="DTYPE", help="Load in another dtype: bf16, fp16, fp32. The members are timed in it too.")
@click.option("--batch", "batches", default="1,8,32", show_default=True, callback=batch_list, help="Batch sizes.")
@click.option(
    "--backend",
    "backends",
    metavar="NAME",
    multiple=True,
    help="What runs the wide program: auto, eager, compile, aot, onnxruntime. Repeatable: the verdict is about the first, the others are timed beside it.",
)
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
    help="Every member sees the same inputs, or each its own. Shared without it, and each with --primitive.",
)
@model_options
@click.option("--levels", is_flag=True, help="Time the steps between op after op and the plan too: what each of them gains.")
@click.option("--full", is_flag=True, help="Peak memory and start-up too, each contestant in a process of its own.")
@click.option(
    "--profile", is_flag=True, help="Instead of the comparison: the time of each node, op and line, beside the members' own programs in a loop."
)
@click.option("--trace", metavar="FILE", help="Write a Chrome trace of that profile (chrome://tracing, ui.perfetto.dev).")
@click.option(
    "-t",
    "--top",
    type=click.IntRange(min=1),
    help="Rows of each table of a profile (12), or of --primitive: those slowest against the fastest baseline (all).",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds of measuring a batch, compilation aside; up to three times as many where intervals stay wide.",
)
@click.option(
    "--compile-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a baseline may take to compile; it is skipped then.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads inside an op; without it torch's own number, and one with --primitive and --suite."
)
@click.option("--pin", is_flag=True, help="Bind the process to as many processors as it has threads.")
@click.option(
    "--json",
    "json_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write the report as JSON to standard output, or to FILE beside the table. With --suite: the file that the run goes on in.",
)
@click.option("--html", "html_file", metavar="FILE", help="Write the report as one self-contained page with plots.")
@click.option(
    "--suite", type=click.Choice(["cpu", "full"]), help="Instead of an artifact: the reference networks, in sizes for a CPU or as published."
)
@click.option("--tune", is_flag=True, help="With --suite or --primitive: tune each artifact on this machine before it is timed.")
@click.option("--rows", metavar="NAMES", help="Rows of the suite, with commas; all without it.")
@click.option(
    "--primitive",
    metavar="[NAME|all|block]",
    is_flag=False,
    flag_value="",
    help="Instead of an artifact: layers of torch.nn by name, alias or family, with commas, or reference blocks: each strategy beside the baselines. Without a name: lists them.",
)
@click.option("-p", "--preset", type=click.Choice(["ci", "quick", "full"]), help="With --primitive: shapes, N and baselines; quick without it.")
@click.option("-n", "members", metavar="N,..", callback=_counts, help="With --primitive: how many members, with commas.")
@click.option("-q", "--quiet", is_flag=True, help="With --primitive: the summary alone.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="With --primitive: write JSON to this file after every row.")
@click.option("--resume", type=click.Path(path_type=Path), help="With --primitive: go on with this file; rows that it has are not run again.")
@click.option(
    "--jobs", metavar="N", type=click.IntRange(1, 64), help="With --primitive --tune: layers that are tuned at once, all before anything is timed."
)
@click.option(
    "--artifacts",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --primitive --tune: keep the tuned artifacts here, and use those that are here.",
)
def command(
    artifact: Path | None,
    batches: tuple[int, ...],
    json_file: str | None,
    html_file: str | None,
    profile: bool,
    trace: str | None,
    top: int | None,
    suite: str | None,
    rows: str | None,
    primitive: str | None,
    **given: Any,
) -> None:
    """Time ARTIFACT beside its members without widepack: eager, compiled, under vmap, in ONNX Runtime.

    All run interleaved in one process with the same inputs; their answers are compared first. The verdict is about the fastest baseline, and
    a run that is too noisy is refused (exit code 1). With --model the baselines run your own modules, without it the artifact's member programs.
    """
    for name, path in (("--json", json_file), ("--html", html_file), ("--trace", trace)):
        if path and path != "-" and Path(path).is_dir():
            raise click.BadParameter(f"{path} is a folder; give the path of a file", param_hint=name)
    own = {name: given.pop(name) for name in ("preset", "members", "quiet", "out", "resume", "jobs", "artifacts")}
    if primitive is not None:
        if artifact is not None or suite is not None:
            raise click.UsageError("--primitive measures layers of its own; leave ARTIFACT and --suite out")
        others = {"--profile": profile, "--trace": trace, "--html": html_file, "--rows": rows}
        _alone("--primitive", {**others, **_named(given, "model", "entry", "levels", "dtype", "full")})
        if unknown := set(given["backends"]) - {"eager", "compile"}:
            raise click.UsageError(f"--primitive runs on eager, and with --backend compile on that too, not on {', '.join(sorted(unknown))}")
        if not given["tune"]:
            _only_tuned(own)
        _primitive(primitive, json_file, top, own, given)
        return
    _only_primitive({f"--{name}" if name != "members" else "-n": value for name, value in own.items()})
    if suite is not None:
        if artifact is not None:
            raise click.UsageError("--suite builds artifacts of its own; leave ARTIFACT out")
        _alone("--suite", {"--profile": profile, "--trace": trace, "--html": html_file, **_named(given, "model", "entry", "levels", "dtype")})
        _suite(suite, rows, json_file, given)
        return
    if artifact is None:
        raise click.UsageError("give an ARTIFACT, --suite cpu or --primitive all")
    if rows is not None:
        raise click.UsageError("--rows chooses among those of --suite")
    if given["model"] is None and given["model_args"]:
        raise click.UsageError("--model-arg needs --model")
    if given["tune"]:
        raise click.UsageError("--tune is of --suite and --primitive; an artifact is tuned before it is timed: widepack tune")
    if profile or trace:
        _alone("--profile", {"--html": html_file, **_named(given, "model", "levels", "full", "backends", "baselines")})
        _profile(artifact, batches, json_file, trace, top or 12, given)
        return
    _compare(artifact, batches, json_file, html_file, given)


def _alone(option: str, others: dict[str, Any]) -> None:
    """Refuse options that would be passed over."""
    given = [name for name, value in others.items() if value]
    if given:
        raise click.UsageError(f"{option} goes without {', '.join(given)}")


def _only_primitive(options: dict[str, Any]) -> None:
    """Refuse what only `--primitive` heeds."""
    given = [name for name, value in options.items() if value]
    if given:
        raise click.UsageError(f"{', '.join(given)} goes with --primitive")


def _only_tuned(own: dict[str, Any]) -> None:
    """Refuse what only `--tune` heeds."""
    if given := [f"--{name}" for name in ("jobs", "artifacts") if own[name]]:
        raise click.UsageError(f"{', '.join(given)} goes with --tune")


def _named(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {f"--{name.removesuffix('s') if name.startswith('b') else name}": given[name] for name in names}


def _compare(artifact: Path, batches: tuple[int, ...], json_file: str | None, html_file: str | None, given: dict[str, Any]) -> None:
    """The comparison with the baselines."""
    from widepack.spec.input_spec import parse_model_args

    as_json = json_file == "-"
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench import bench

        report = bench(
            artifact,
            device=given["device"],
            batches=batches,
            backends=given["backends"] or ("auto",),
            baselines=given["baselines"] or BASELINES,
            levels=given["levels"],
            budget_s=given["budget"],
            compile_limit_s=given["compile_limit"],
            threads=given["threads"],
            pattern=given["pattern"] or "shared",
            factory=given["model"],
            factory_args=parse_model_args(given["model_args"]),
            entry=given["entry"],
            dtype=given["dtype"],
            pin=given["pin"],
            roofline=True,
            alone=given["full"],
            progress=progress,
        )
    document = report.to_json()
    if as_json:
        emit(document)
    else:
        click.echo(report.table())
        if json_file:
            _write(json_file, _text(document))
    if html_file:
        from widepack_bench.report.html import page

        _write(html_file, page(document))
    if report.noisy:
        noisy = ", ".join(str(row.batch) for row in report.rows if row.verdict == "noisy")
        raise Noisy(f"the machine was too busy to measure batch {noisy}; what was found for it means nothing")
    if not report.rows:
        raise Failure("no batch could be measured")


def _profile(artifact: Path, batches: tuple[int, ...], json_file: str | None, trace: str | None, top: int, given: dict[str, Any]) -> None:
    """Node by node."""
    as_json = json_file == "-"
    with stdout_kept(as_json), Progress() as progress:
        import widepack
        from widepack_bench.measure.race import quiet
        from widepack_bench.measure.profile import chrome_trace, profile
        from widepack_bench.report.document import environment

        with quiet(given["threads"], given["pin"]) as threads:
            ens = widepack.load(artifact, device=given["device"], dtype=given["dtype"])
            found = []
            for done, batch in enumerate(batches):
                progress(f"batch {batch}", done, len(batches))
                found.append(
                    profile(ens, batch, entry=given["entry"], pattern=given["pattern"] or "shared", device=given["device"], name=str(artifact))
                )
            where = environment(given["device"], threads)
    document = {"format": "widepack.profiles/1", "environment": where, "profiles": [p.to_json() for p in found]}
    if as_json:
        emit(document)
    else:
        click.echo(f"{where['device']}, {threads} thread{'' if threads == 1 else 's'}\n")
        click.echo("\n\n".join(p.table(top) for p in found))
        if json_file:
            _write(json_file, _text(document))
    if trace:
        _write(trace, json.dumps(chrome_trace(found, where)) + "\n")


def _suite(size: str, rows: str | None, json_file: str | None, given: dict[str, Any]) -> None:
    """The reference networks, one row after the other, into a file that a later run goes on with."""
    from widepack_bench.suite.run import run_suite

    with Progress() as progress:
        document = run_suite(
            size,
            Path(json_file if json_file and json_file != "-" else SUITE_JSON),
            names=rows.split(",") if rows else (),
            baselines=given["baselines"] or BASELINES,
            backends=given["backends"] or ("auto",),
            budget_s=given["budget"],
            compile_limit_s=given["compile_limit"],
            threads=given["threads"] or 1,
            pin=given["pin"],
            alone=given["full"],
            tune=given["tune"],
            device=given["device"],
            progress=progress,
            said=click.echo if json_file != "-" else None,
        )
    if json_file == "-":
        emit(document)


def _primitive(asked: str, json_file: str | None, top: int | None, own: dict[str, Any], given: dict[str, Any]) -> None:
    """Layers of torch.nn, or the list of them."""
    as_json = json_file == "-"
    if not asked:
        _primitives_listed(as_json)
        return
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench.layers.run import run_primitives
        from widepack_bench.layers.table import said, table

        document = run_primitives(
            asked,
            own["preset"] or "quick",
            members=own["members"],
            out=own["out"] or (Path(json_file) if json_file and not as_json else None),
            resume=own["resume"],
            baselines=given["baselines"],
            pattern=given["pattern"] or "each",
            device=given["device"],
            threads=given["threads"],
            pin=given["pin"],
            compiled="compile" in given["backends"],
            tune=given["tune"],
            jobs=own["jobs"] or 1,
            artifacts=own["artifacts"],
            progress=progress,
            said=lambda text: click.echo(text, err=True),
        )
    if as_json:
        emit(document)
    elif document["rows"]:
        click.echo(said(document) if own["quiet"] else table(document, top))
    if document["interrupted"]:
        kept = own["out"] or own["resume"]
        raise Failure(f"stopped, {len(document['rows'])} rows are there" + (f"; go on with --resume {kept}" if kept else ""))
    if failed := document["summary"]["failed"]:
        raise Failure(f"{len(failed)} of {len(document['rows'])} rows failed: {', '.join(failed)}")


def _primitives_listed(as_json: bool) -> None:
    """The names that `--primitive` takes."""
    from widepack_bench.layers.block_sweeps import sweeps
    from widepack_bench.layers.table import listed

    if as_json:
        emit([{"name": s.name, "family": s.family, "aliases": list(s.aliases), "inputs": list(s.shape.inputs)} for s in sweeps()])
    else:
        click.echo(listed(sweeps()))


def _text(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _write(path: str, text: str) -> None:
    from widepack.system.atomic_file import whole

    with whole(Path(path), force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")
