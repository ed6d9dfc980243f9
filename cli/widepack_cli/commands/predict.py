"""`widepack predict`: runs an artifact over the rows of a file, and writes the answers to another file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from widepack_artifacts.errors import some
from widepack_bench.text import duration, plural

from ..shared.options import ARTIFACT, emit, entry_option, example, json_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.row_options import columns_of, row_options
from ..shared.threads import use_free_cores

if TYPE_CHECKING:
    from widepack import PredictReport


@click.command(
    epilog=example(
        "widepack predict ens.wide in.parquet -o out.parquet --reduce mean,std",
        "widepack predict ens.wide in.csv -o out.csv --input x=f0..f63 --reduce vote --of softmax",
        "widepack predict ens.wide in.parquet -o out.parquet --member tenant --id id",
        "widepack predict ens.wide in.npy -o out.npy --batch 64",
    )
)
@ARTIFACT
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to write: .parquet, .arrow, .feather, .csv, .tsv, .npy or .safetensors.",
)
@row_options
@click.option(
    "--member",
    metavar="COLUMN",
    help="The column that names the member of each row, by name or number. Only this member answers.",
)
@click.option(
    "--reduce",
    metavar="FIGURES",
    default="",
    help="Figures of all members that replace their answers: mean,std,vote,entropy, ...",
)
@click.option(
    "--of",
    type=click.Choice(["softmax", "sigmoid", "probabilities"]),
    help="What the figures are computed of. Default: the answers themselves.",
)
@click.option(
    "--calibrated",
    is_flag=True,
    help="Apply the calibration that widepack evaluate --save recorded to the figures.",
)
@click.option(
    "--name", metavar="NAME", help="What the output is called in OUT. Default: its own name, or output."
)
@entry_option
@click.option(
    "--id",
    "ids",
    metavar="COLUMN",
    multiple=True,
    help="A column that is passed on. Repeatable. Default: all columns that are no inputs.",
)
@click.option("--device", metavar="DEVICE", help="Where to run: cpu, cuda, cuda:1. Default: cpu.")
@click.option(
    "--backend",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="What runs the programs: auto, eager, compile, aot, onnxruntime.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op. Default: the free cores.")
@click.option(
    "--allow-dependent-rows",
    is_flag=True,
    help="Run a model in which one row may change the answer to another row of its batch. Its answers depend "
    "on --batch, which must be given.",
)
@click.option("--force", is_flag=True, help="Replace an existing OUT.")
@json_option
def command(
    artifact: Path,
    source: Path,
    out: Path,
    inputs: tuple[str, ...],
    member: str | None,
    reduce: str,
    of: str | None,
    calibrated: bool,
    dim: int,
    answer: str | None,
    name: str | None,
    entry: str,
    batch: int | None,
    header: bool | None,
    delimiter: str | None,
    decimal: str,
    nulls: str,
    ids: tuple[str, ...],
    device: str | None,
    backend: str,
    threads: int | None,
    allow_dependent_rows: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Run ARTIFACT over the rows of INPUT, and write the answers to OUT.

    Rows keep their order. Every member answers, with a column for each; --reduce gives figures of the members
    in their place, and --member lets one member answer each row. Columns that are no inputs pass through. The
    file is read and written in blocks, so that it may be larger than the memory, and OUT appears whole or not
    at all. Parquet, Arrow and CSV need pyarrow: pip install 'widepack[predict]'.
    """
    named = columns_of(inputs)
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        if threads is None:
            use_free_cores()
        report = widepack.predict(
            artifact,
            source,
            out,
            inputs=named,
            member=member,
            reduce=reduce,
            of=of,
            dim=dim,
            calibrated=calibrated,
            answer=answer,
            name=name,
            entry=entry,
            batch=batch,
            header=header,
            delimiter=delimiter,
            decimal=decimal,
            nulls=nulls,
            ids=ids or None,
            device=device,
            backend=backend,
            threads=threads,
            force=force,
            allow_dependent_rows=allow_dependent_rows,
            progress=progress,
            note=lambda sentence: click.echo(sentence, err=True),
        )
    if as_json:
        emit(report.to_json())
        return
    click.echo("\n".join(lines(report)))


def lines(report: PredictReport) -> list[str]:
    """Returns the report as lines of text."""
    shown = some(report.columns, 12)
    return [
        f"wrote {report.path}: {plural(report.rows, 'row')}, {plural(len(report.columns), 'column')}: "
        f"{shown}",
        f"{report.batches} {'batch' if report.batches == 1 else 'batches'} of {report.batch} rows in "
        f"{duration(1000 * report.seconds)}, {report.rows_per_s:,.0f} rows/s",
    ]
