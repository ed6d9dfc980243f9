"""Writes the files of this folder as other programs write them.

Run it where pandas and polars are installed. All files have the same rows: a name, six features, and a label.
It was run with pandas 3.1.1 and polars 2.1.0.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

HERE = Path(__file__).parent
FEATURES = [f"f{k}" for k in range(6)]
LABELS = ["cat", "dog", "bird"]


def rows() -> pd.DataFrame:
    """Returns 12 rows, whose features are multiples of 1/8."""
    generator = np.random.default_rng(5)
    values = generator.integers(-20, 20, (12, 6)) / 8
    table = pd.DataFrame(values, columns=FEATURES)
    table.insert(0, "name", [f"Zoë, {k:02d}" for k in range(12)])
    table["label"] = [LABELS[k] for k in generator.integers(0, 3, 12)]
    return table


def write_csv(table: pd.DataFrame) -> None:
    """Writes CSV files as pandas, polars, NumPy and Excel do."""
    table.to_csv(HERE / "pandas.csv", index=False)
    table.to_csv(HERE / "pandas_index.csv")
    table.to_csv(HERE / "pandas_excel.csv", index=False, sep=";", decimal=",", encoding="utf-8-sig",
                 lineterminator="\r\n")  # fmt: skip  # as Excel does in Germany
    table.to_csv(HERE / "pandas_tabs.csv", index=False, sep="\t")
    table.to_csv(HERE / "pandas_quoted.csv", index=False, quoting=1)
    table.to_csv(HERE / "pandas_no_header.csv", index=False, header=False)
    table[FEATURES].set_axis(range(6), axis=1).to_csv(HERE / "pandas_numbered.csv", index=False)
    pl.from_pandas(table).write_csv(HERE / "polars.csv")
    np.savetxt(HERE / "numpy.csv", table[FEATURES].to_numpy(), delimiter=",")
    np.savetxt(
        HERE / "numpy_header.csv",
        table[FEATURES].to_numpy(),
        delimiter=",",
        header=",".join(FEATURES),
        comments="",
    )


def write_parquet(table: pd.DataFrame) -> None:
    """Writes Parquet and Arrow files as pandas and polars do."""
    table.to_parquet(HERE / "pandas.parquet", index=False)
    table.set_index("name").to_parquet(HERE / "pandas_index.parquet")
    nullable = table.convert_dtypes().astype(dict.fromkeys(FEATURES, "Float64"))
    nullable["label"] = nullable["label"].astype("category")
    nullable.to_parquet(HERE / "pandas_nullable.parquet", index=False, row_group_size=5)
    decimals = table.assign(**{n: [Decimal(str(v)) for v in table[n]] for n in FEATURES})
    decimals.to_parquet(HERE / "pandas_decimal.parquet", index=False)
    whole = table.assign(**{n: (8 * table[n]).astype("Int16") for n in FEATURES})
    whole.to_parquet(HERE / "pandas_int16.parquet", index=False)
    frame = pl.from_pandas(table)
    frame.write_parquet(HERE / "polars.parquet")
    frame.write_ipc(HERE / "polars.arrow")
    lists = frame.select("name", pl.concat_list(FEATURES).alias("x"), pl.col("label").cast(pl.Categorical))
    lists.write_parquet(HERE / "polars_lists.parquet")
    arrays = lists.with_columns(pl.col("x").list.to_array(6))
    arrays.write_ipc(HERE / "polars_arrays.arrow", compat_level=pl.CompatLevel.newest())
    assert pa.__version__


def write_others(table: pd.DataFrame) -> None:
    """Writes compressed and partitioned files, JSON lines, and files with NaN, as pandas does."""
    table.to_csv(HERE / "pandas.tsv", index=False, sep="\t")
    table.to_csv(HERE / "pandas.csv.gz", index=False)
    table.to_csv(HERE / "pandas.csv.bz2", index=False)
    table.to_json(HERE / "pandas.jsonl", orient="records", lines=True)
    table.to_json(HERE / "pandas.jsonl.gz", orient="records", lines=True)
    table.to_parquet(
        HERE / "pandas_parts", partition_cols=["label"], index=False, basename_template="part-{i}.parquet"
    )
    missing = table.copy()
    missing.loc[3, "f1"] = missing.loc[7, "f5"] = np.nan
    missing.to_csv(HERE / "pandas_missing.csv", index=False)
    missing.to_parquet(HERE / "pandas_missing.parquet", index=False)
    missing.to_json(HERE / "pandas_missing.jsonl", orient="records", lines=True)


if __name__ == "__main__":
    write_csv(rows())
    write_others(rows())
    write_parquet(rows())
