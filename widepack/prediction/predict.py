"""Runs an artifact over the rows of a file, and writes the answers to another file: `widepack.predict`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import torch

from ..errors import InputError, UsageError
from ..inference.entry import WideEntry
from ..inference.load import load
from ..inference.model import WideModel
from ..inference.weights_version import weights_version
from ..system.progress import Report
from .answers import AnswerColumns, Collected, Figures
from .batches import Batches
from .column_choice import chosen_columns
from .csv_form import CsvForm
from .entry_rows import checked_rows, row_inputs, row_of_zeros
from .formats import open_sink, open_table
from .input_columns import InputColumns
from .member_column import MemberColumn
from .output_file import OutputFile, output_file
from .passed_columns import checked_ids, passed_columns
from .report import PredictReport
from .request import BATCH, Files, check_batch, figures_of
from .table import RowBlock, Table

_BLOCK_ROWS, _BLOCK_BYTES = 2**12, 2**24
"""A block has as many batches as fit into both: rows, and bytes of inputs and answers."""


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
    answer: str | int | None = None,
    name: str | None = None,
    entry: str = "",
    batch: int | None = None,
    ids: Sequence[str] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    decimal: str = ".",
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
        source: The input: .parquet, .arrow, .feather or .csv (these need pyarrow), .npy or .safetensors.
        output: The file to write, with one of these endings.
        inputs: For an input of the model the columns that it is read from: a range such as `"f0..f63"`, a
            text such as `"a,b,c"`, or a list of names. One column has whole rows, as lists; several have one
            number each. Default: the column with the name of the input; for a single input the only column
            of its shape, or all columns of numbers if they are exactly as many as it takes.
        member: The column that names the member of each row, by name or number: only this member answers.
            Default: all members answer, with one column for each member.
        reduce: Figures of all members' answers that replace them, such as `"mean,std"`: see
            `WideModel.reduce`.
        of: What the figures are computed of: `softmax`, `sigmoid`, `probabilities`, or None.
        dim: The dim of the classes in a member's answer, for figures.
        answer: The output of the model that is wanted, by name or number. Default: all of them; for figures
            `logits`, else the first.
        name: What the output is called in the file. Default: its own name, or `output` if it has none.
        entry: The entry. Default: `forward`, or the first entry if there is no forward.
        batch: The rows of a batch. Default: 256.
        ids: The columns that are passed on. Default: all that are no inputs.
        header: Whether the first line of a CSV file has the names of the columns. False: it is a row, and the
            columns are f0, f1, ... Default: it has names, and is refused if a name is a number.
        delimiter: What stands between the values of a CSV file, such as `";"` or `"tab"`. Default: a comma.
        decimal: What stands before the decimals of a number in a CSV file: `"."` or `","`.
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
        Unavailable: pyarrow is needed, and is not installed.

    Example:
        >>> report = widepack.predict("ens.wide", "in.parquet", "out.parquet", reduce="mean,std")
        >>> widepack.predict(ens, "rows.csv", "answers.csv", inputs={"x": "f0..f63"}, member="tenant")
    """
    files = Files.of(source, output, force)
    check_batch(batch)
    figures = figures_of(reduce, of, dim, member)
    table = open_table(files.source, CsvForm.of(files.source, header, delimiter, decimal))
    ens = _loaded(model, device, backend, threads, progress)
    chosen = ens.entry(entry or ("forward" if "forward" in ens.entries else ens.entries[0]))
    title = f"{fspath(model) if not isinstance(model, WideModel) else 'the model'}: entry {chosen.name}"
    run = Prediction(ens, chosen, title, table, figures, batch, allow_dependent_rows, member, answer, name)
    run.choose(inputs or {}, ids, files, note or (lambda sentence: None))
    return run.run(files, force, progress)


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


class Prediction:
    """One run: what is read, computed and written.

    Args:
        ens: The model.
        entry: Its entry that answers.
        title: What messages call it.
        table: The input file.
        figures: The figures that replace the members' answers; None for the answers.
        batch: The rows of a batch; None for the default.
        allowed: Whether the rows may be dependent.
        member: The column that names the member of each row; None for all members.
        answer: The output that is wanted; None for all.
        name: What it is called; None for its own name.

    Raises:
        UsageError: The entry has no rows, or the options exclude each other.
    """

    def __init__(
        self,
        ens: WideModel,
        entry: WideEntry,
        title: str,
        table: Table,
        figures: Figures | None,
        batch: int | None,
        allowed: bool,
        member: str | None,
        answer: str | int | None,
        name: str | None,
    ) -> None:
        self.ens, self.entry, self.table = ens, entry, table
        self.member = None if member is None else MemberColumn(table, member, entry.members)
        rows = checked_rows(entry, title, member, allowed, batch)
        self.inputs = row_inputs(entry, title, rows.dim)
        self.answers = AnswerColumns(entry, rows.dim, answer, name, figures)
        most = entry.entry.dims[rows.dim].max
        self.batch = batch or min(BATCH, most or BATCH)
        self.batches = Batches(
            entry, self.answers, self.inputs, rows.dim, self.batch, ens.device, table.path, rows.independent
        )
        self.columns: list[InputColumns] = []
        self.passed: list[str] = []

    def choose(
        self,
        named: Mapping[str, Any],
        ids: Sequence[str] | None,
        files: Files,
        note: Callable[[str], None],
        unread: Collection[str] = (),
    ) -> None:
        """Chooses the columns. note: is called with each choice that the user did not make. unread: columns
        that are no inputs unless they are named for one. Raises: UsageError.
        """
        others = {
            *(checked_ids(self.table, ids) or ()),
            *([self.member.name] if self.member else []),
            *unread,
        }
        self.columns, notes = chosen_columns(self.table, self.inputs, named, others)
        self.passed, more = passed_columns(self.table, ids, self._read_names(), files.suffix)
        for sentence in (*notes, *more):
            note(sentence)

    def _read_names(self) -> list[str]:
        return list(dict.fromkeys(n for c in self.columns for n in c.names))

    def _blocks(self) -> Any:
        """Reads the file block by block."""
        dtypes = {n: c.input.dtype for c in self.columns for n in c.names}
        member = [self.member.name] if self.member else []
        names = list(dict.fromkeys([*self._read_names(), *member, *self.passed]))
        bytes_in = sum((c.input.numbers or 64) * c.input.dtype.itemsize for c in self.columns)
        fitting = _BLOCK_BYTES // (self.batch * (bytes_in + self.answers.row_bytes()))
        rows = self.batch * max(1, min(_BLOCK_ROWS // self.batch, fitting))
        return self.table.blocks(names, dtypes, rows)

    def run(self, files: Files, force: bool, progress: Report | None) -> PredictReport:
        """Runs all rows, and writes the output. Raises: InputError; UsageError; ArtifactExists."""
        return self._report(files, *self._write(files, force, progress))

    def _write(
        self, files: Files, force: bool, progress: Report | None
    ) -> tuple[OutputFile, int, int, float]:
        """Runs all rows. Returns: the file, the numbers of rows and batches, and the seconds."""
        begin = time.perf_counter()
        metadata = {
            "widepack.digest": self.ens.manifest.digest,
            "widepack.entry": self.entry.name,
            "widepack.members": ",".join(self.entry.members)[:10_000],
        }
        rows = batches = 0
        version = weights_version(self.ens)
        with output_file(
            files.source,
            files.output,
            force,
            lambda made: open_sink(files.suffix, made, metadata, self.table.count),
        ) as out:
            for block in self._blocks():
                if block.rows:
                    batches += self._run(block, out, files)
                else:
                    self._write_empty(block, out, files)
                rows += block.rows
                if progress is not None:
                    progress("predict", *self.table.position(rows))
            if weights_version(self.ens) != version:  # the file would have rows of both members
                raise UsageError(
                    f"{self.table.path}: a member was replaced by `swap` while the rows were answered, and "
                    "nothing was written; predict again, or swap when it has ended"
                )
        return out, rows, batches, time.perf_counter() - begin

    def _run(self, block: RowBlock, out: OutputFile, files: Files) -> int:
        """Runs and writes a block. Returns the number of batches."""
        values = [c.read(block) for c in self.columns]
        members = self.member.numbers(block) if self.member else None
        collected = Collected(block.rows, self.entry.members, files.is_table)
        batches = self.batches.run(values, members, block.start, collected)
        out.write(block.start, self._passed(block, files), collected.columns())
        return batches

    def _passed(self, block: RowBlock, files: Files) -> dict[str, Any]:
        read = block.column if files.is_table else block.tensor
        return {name: read(name) for name in self.passed}

    def _write_empty(self, block: RowBlock, out: OutputFile, files: Files) -> None:
        """Writes the columns of a file without rows. One row of zeros shows what the answers are."""
        values = row_of_zeros(self.entry, self.inputs)
        collected = Collected(1, self.entry.members, files.is_table)
        try:
            self.batches.run(values, [0] if self.member else None, 0, collected)
        except InputError:
            raise InputError(
                f"{self.table.path}: the file has no rows, and the columns of the output are not known "
                "without one"
            ) from None
        answers = {name: value[:0] for name, value in collected.columns().items()}
        out.write(0, self._passed(block, files), answers)

    def _report(
        self, files: Files, out: OutputFile, rows: int, batches: int, seconds: float
    ) -> PredictReport:
        """Returns the report of a run."""
        return PredictReport(
            path=str(files.output),
            source=str(files.source),
            digest=self.ens.manifest.digest,
            entry=self.entry.name,
            inputs={c.input.name: c.names for c in self.columns},
            columns=out.columns,
            rows=rows,
            batch=self.batch,
            batches=batches,
            seconds=seconds,
            rows_per_s=rows / seconds if seconds > 0 else 0.0,
        )
