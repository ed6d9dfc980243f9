"""Defines `widepack.predict`, which runs an artifact over the rows of a file, and its report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..inference.load import load
from ..inference.model import WideModel, weights_version
from ..inference.reduced_answer import Reduction
from ..spec.names import path_of
from ..system.atomic_file import admit
from ..system.progress import Report
from .csv_files import CsvForm
from .endings import ARROW, suffix_of
from .formats import check_package, open_table, output_file
from .run import Prediction
from .table import Table


@dataclass(frozen=True)
class PredictReport:
    """The result of `widepack.predict`.

    Attributes:
        path: The file that was written.
        source: The input file.
        digest: The digest of the artifact.
        entry: The entry that ran.
        inputs: For each input the columns that it was read from.
        columns: The columns that were written, in order. Those of the answers come last.
        rows: The number of rows.
        batch: The rows of a batch.
        batches: The number of batches.
        seconds: The time to read, run and write all rows. The time to load the artifact is not in it.
        rows_per_s: Rows per second of this time.

    Example:
        >>> report = widepack.predict("ens.wide", "in.parquet", "out.parquet", reduce="mean,std")
        >>> report.rows, report.columns
        (1000, ('id', 'tenant', 'output.mean', 'output.std'))
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    source: str
    digest: str
    entry: str
    inputs: dict[str, tuple[str, ...]]
    columns: tuple[str, ...]
    rows: int
    batch: int
    batches: int
    seconds: float
    rows_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with the fields of the report.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


def predict(
    model: WideModel | str | PathLike[str],
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    member: str | None = None,
    reduce: str | Sequence[str] = (),
    of: str | None = None,
    dim: int = -1,
    calibrated: bool = False,
    answer: str | int | None = None,
    name: str | None = None,
    entry: str = "",
    batch: int | None = None,
    ids: Sequence[str] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    decimal: str = ".",
    nulls: str = "refuse",
    device: str | torch.device | None = None,
    backend: str = "auto",
    threads: int | None = None,
    force: bool = False,
    allow_dependent_rows: bool = False,
    progress: Report | None = None,
    note: Callable[[str], None] | None = None,
) -> PredictReport:
    """Runs an artifact over the rows of a file, and writes the answers to another file.

    The rows keep their order and their number. They are read, run and written in blocks, so that the memory
    does not grow with the file. The output appears whole or not at all.

    Args:
        model: A loaded model, or the path of an artifact.
        source: The input: .parquet or a folder of such files, .arrow, .feather, .csv, .tsv or .jsonl (these
            need pyarrow), .npy (needs NumPy) or .safetensors. Texts may be compressed: .csv.gz.
        output: The file to write, with one of these endings, except .jsonl and compressed ones.
        inputs: For an input of the model the columns that it is read from: a range such as `"f0..f63"`, a
            text such as `'a,b,"c,d"'`, or a list of names. One column has whole rows, as lists; several have
            one number each. Default: the column with the name of the input; for a single input the only
            column of its shape, or all columns of numbers if they are exactly as many as it takes.
        member: The column that names the member of each row, by name or number: only this member answers.
            Default: all members answer, with one column for each member.
        reduce: Statistics of all members' answers that replace them, such as `"mean,std"`: see
            `WideModel.reduce`.
        of: What the statistics are computed of: `softmax`, `sigmoid`, `probabilities`, or None.
        dim: The dim of the classes in a member's answer, for statistics.
        calibrated: Whether the calibration that `widepack.evaluate` recorded is applied to the statistics.
        answer: The output of the model that is wanted, by name or number. Default: all of them; for
            statistics `logits`, else the first.
        name: What the output is called in the file. Default: its own name, or `output` if it has none.
        entry: The entry. Default: `forward`, or the first entry if there is no forward.
        batch: The rows of a batch. Default: 256.
        ids: The columns that are passed on. Default: all that are no inputs.
        header: Whether the first line of a CSV file has the names of the columns. False: it is a row, and the
            columns are f0, f1, ... Default: it has names, and is refused if a name is a number.
        delimiter: What stands between the values of a CSV file, such as `";"` or `"tab"`. Default: a comma.
        decimal: What stands before the decimals of a number in a CSV file: `"."` or `","`.
        nulls: `"nan"` reads a null in an input of floats as NaN, for models that take NaN. Default: it is
            refused.
        device: Where to run. Default: the CPU.
        backend: As `load` takes it.
        threads: The number of threads of torch, for the process. Default: unchanged.
        force: Replaces an existing output.
        allow_dependent_rows: Runs a model that is not known to answer each row by itself. Its answers depend
            on which rows share a batch, so `batch` must be given.
        progress: Is called with (stage, done, total).
        note: Is called with a sentence for each choice that the arguments leave open.

    Returns:
        A `PredictReport`: the rows, the columns, the time.

    Raises:
        UsageError: An argument is not valid, a column is missing, or the choice of columns is not clear.
        InputError: The file cannot be read, has a null in an input, or has a row that the model refuses. The
            message names the file, the row and the column.
        ArtifactExists: The output exists, and `force` is false.
        Unavailable: pyarrow or NumPy is needed, and is not installed.

    Example:
        >>> report = widepack.predict("ens.wide", "in.parquet", "out.parquet", reduce="mean,std")
        >>> widepack.predict(ens, "rows.csv", "answers.csv", inputs={"x": "f0..f63"}, member="tenant")
    """
    source = Path(path_of(source, "source", "the path of the input file"))
    output = Path(path_of(output, "output", "the path of the file to write"))
    suffix = _checked_output(source, output, force)
    check_batch(batch)
    statistics = _statistics(reduce, of, dim, calibrated, member)
    table = open_table(source, CsvForm.of(source, header, delimiter, decimal))
    ens = _loaded(model, device, backend, threads, progress)
    chosen = ens.entry(entry or ("forward" if "forward" in ens.entries else ens.entries[0]))
    title = f"{fspath(model) if not isinstance(model, WideModel) else 'the model'}: entry {chosen.name}"
    run = Prediction(
        ens, chosen, title, table, suffix, statistics=statistics, calibrated=calibrated, batch=batch,
        allowed=allow_dependent_rows, member=member, answer=answer, name=name,
        nan=nulls_as_nan(nulls),
    )  # fmt: skip  # its arguments in two lines
    run.choose(inputs or {}, ids, note or (lambda sentence: None))
    begin = time.perf_counter()
    columns, rows, batches = _write(ens, chosen.name, run, table, output, force, progress)
    seconds = time.perf_counter() - begin
    return PredictReport(
        path=str(output),
        source=str(source),
        digest=ens.manifest.digest,
        entry=chosen.name,
        inputs={c.input.name: c.names for c in run.columns},
        columns=columns,
        rows=rows,
        batch=run.batch,
        batches=batches,
        seconds=seconds,
        rows_per_s=rows / seconds if seconds > 0 else 0.0,
    )


def _write(
    ens: WideModel,
    entry: str,
    run: Prediction,
    table: Table,
    output: Path,
    force: bool,
    progress: Report | None,
) -> tuple[tuple[str, ...], int, int]:
    """Runs all rows, and writes the output. Returns: its columns, and the numbers of rows and batches.

    Raises: InputError; UsageError; ArtifactExists.
    """
    is_table = suffix_of(output, "output") in ARROW  # others hold only tensors
    metadata = {
        "widepack.digest": ens.manifest.digest,
        "widepack.entry": entry,
        "widepack.members": ",".join(ens.entry(entry).members)[:10_000],
    }
    columns: tuple[str, ...] = ()
    rows = batches = 0
    version = weights_version(ens)
    with output_file(output, force, metadata, table.count) as file:
        for block, outputs, count in run.blocks():
            passed = {n: (block.column if is_table else block.tensor)(n) for n in run.passed}
            if both := [n for n in passed if n in outputs]:
                raise UsageError(
                    f"{table.path}: the column {both[0]} has the name of an answer; give the answers "
                    "another name with name= (--name), or name the columns to pass on with ids= (--id)"
                )
            columns = (*passed, *outputs)
            file.write({**passed, **outputs})
            rows, batches = rows + block.rows, batches + count
            if progress is not None:
                progress("predict", *table.position(rows))
        if weights_version(ens) != version:  # the file would have rows of both members
            raise UsageError(
                f"{table.path}: a member was replaced by `swap` while the rows were answered, and "
                "nothing was written; predict again, or swap when it has ended"
            )
    return columns, rows, batches


def _checked_output(source: Path, output: Path, force: bool) -> str:
    """Checks the paths, and that the output can be written. Returns: the ending of the output.

    Raises: UsageError, ArtifactExists, Unavailable.
    """
    suffix_of(source, "input")
    suffix = suffix_of(output, "output")
    if os.path.exists(output) and os.path.exists(source) and os.path.samefile(source, output):
        raise UsageError(f"{output} is the input file; give another path for the output")
    if source.is_dir() and source.resolve() in output.resolve().parents:
        raise UsageError(f"{output} is in the input folder; give a path outside of it for the output")
    admit(output, force)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: the folder {output.parent} cannot be written; give another path")
    check_package(suffix)
    return suffix


def nulls_as_nan(nulls: Any) -> bool:
    """Returns whether a null in an input is NaN. Raises: UsageError."""
    if nulls not in ("refuse", "nan"):
        raise UsageError(f"nulls={nulls!r:.40} is unknown; give 'refuse' or 'nan'")
    return bool(nulls == "nan")


def _statistics(
    reduce: str | Sequence[str], of: str | None, dim: int, calibrated: bool, member: str | None
) -> Reduction | None:
    """Returns the statistics that are requested; None for none. Raises: UsageError."""
    names = [w.strip() for w in reduce.split(",")] if isinstance(reduce, str) else list(reduce)
    names = [n for n in names if n]
    if not names:
        if of is not None or calibrated:
            given = f"of={of!r}" if of is not None else "calibrated=True"
            raise UsageError(
                f"{given} is about statistics; name them with reduce=, for example reduce='mean'"
            )
        return None
    if member is not None:
        raise UsageError(
            "member= and reduce= exclude each other: a row that one member answers has no statistics of all "
            "members"
        )
    return Reduction(names, of, dim=dim)


def check_batch(batch: Any) -> None:
    """Raises: UsageError for a batch that is no positive number."""
    if batch is not None and (type(batch) is not int or batch < 1):
        raise UsageError(f"batch={batch!r} is not a number of rows; give a positive integer")


def _loaded(
    model: WideModel | str | PathLike[str],
    device: str | torch.device | None,
    backend: str,
    threads: int | None,
    progress: Report | None,
) -> WideModel:
    """Returns the model. Raises: UsageError for options of a load beside a loaded model."""
    if isinstance(model, WideModel):
        if device is not None or backend != "auto" or threads is not None:
            raise UsageError(
                "device=, backend= and threads= are of widepack.load, and the model is loaded already; give "
                "them there"
            )
        return model
    if progress is not None:
        progress("load", 0, 1)
    return load(model, device=device, backend=backend, threads=threads, progress=progress)
