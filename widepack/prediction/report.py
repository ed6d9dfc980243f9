"""Defines the report of `widepack.predict`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
        """Returns the report as JSON values."""
        return asdict(self)
