"""Tests names with commas, files without rows, nulls as NaN, compressed files, JSON lines and folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import widepack
from prediction.members import exact
from prediction.test_csv_forms import HEAD, ROW, X, answered, csv
from prediction.test_refusals import refused
from widepack import InputError, UsageError
from widepack.inference.model import WideModel

NAN = float("nan")


def check(net: WideModel, source: str, x: Tensor, **options: Any) -> None:
    """Checks that the answers to a file are those of the members alone to `x`."""
    assert widepack.predict(net, source, "out.npy", force=True, **options).rows == len(x)
    found = torch.from_numpy(np.load("out.npy")).movedim(1, 0).double()
    torch.testing.assert_close(found, exact(net, x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_names_with_commas(folder: Path, net: WideModel, pa: Any) -> None:
    text = 'id,"a,b",c,"d ""e""",f0,f1,f2\nq,1,2,3,4,5,6\n'
    for words in ('"a,b",c,"d ""e""",f0..f2', ' "a,b" , c, "d ""e""", f0..f2'):
        answered(net, text, [X], inputs={"x": words})
    refused(UsageError, "there is no column 'a'", net, csv(text), "o.npy", inputs={"x": "a,b,c,f0..f2"})
    refused(UsageError, "where a quote has no end", net, csv(text), "o.npy",
            inputs={"x": '"a,b'})  # fmt: skip  # a call in two lines
    one = '"a..b",f1,f2,f3,f4,f5\n1,2,3,4,5,6\n'
    answered(net, one, [X], inputs={"x": "a..b,f1..f5"})


@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n"])
def test_a_file_of_names_alone_gives_an_empty_output(end: str, folder: Path, net: WideModel, pa: Any) -> None:
    names = HEAD.strip().removeprefix("id,")
    report = widepack.predict(net, csv(names + end), "out.csv")
    assert (report.rows, report.inputs["x"]) == (0, tuple(names.split(",")))
    lines = Path("out.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 and lines[0].startswith('"output.m0.0","output.m0.1",')
    report = widepack.predict(net, csv(HEAD.strip() + end), "out.parquet", ids=["id"])
    assert report.rows == 0 and pa.parquet.read_table("out.parquet").num_rows == 0
    refused(UsageError, "7 columns of numbers are left", net, csv(HEAD.strip() + end), "o.csv")
    refused(UsageError, "the file has no rows|it has no name|may be a row", net, csv("," + end), "o.csv")


def test_columns_of_empty_values_are_rows(folder: Path, net: WideModel, pa: Any) -> None:
    source = csv(HEAD + "a,,,,,,\n")
    check(net, source, torch.full((1, 6), NAN), nulls="nan", inputs={"x": "f0..f5"})
    refused(InputError, "row 0 .*column f0: there is no value", net, source, "o.csv",
            inputs={"x": "f0..f5"})  # fmt: skip  # a call in two lines


@pytest.mark.parametrize(
    "type_", ["float64", "float32", "float16", "int8", "uint16", "int64", "bool_", "list"]
)
def test_nulls_as_nan(type_: str, folder: Path, net: WideModel, pa: Any) -> None:
    x = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, NAN, 1, 0], [1, NAN, 0, 1, 1, 1]])
    rows = [[None if v != v else int(v) for v in row] for row in x.tolist()]
    if type_ == "list":
        table = pa.table({"x": pa.array(rows, pa.list_(pa.int32(), 6))})
    else:
        arrow_type = getattr(pa, type_)()
        cast: Any = {"float16": np.float16, "bool_": bool}.get(type_, float if "float" in type_ else int)
        table = pa.table(
            {
                f"f{k}": pa.array([None if r[k] is None else cast(r[k]) for r in rows], arrow_type)
                for k in range(6)
            }
        )
    pa.parquet.write_table(table, "in.parquet", row_group_size=2)
    check(net, "in.parquet", x, nulls="nan")
    row = "1 .*column x" if type_ == "list" else "2 .*column f1"
    refused(InputError, f"row {row}: there is no value", net, "in.parquet", "o.npy")


def test_nulls_that_stay_refused(folder: Path, net: WideModel, tokens: WideModel, pa: Any) -> None:
    rows = [[1.0] * 6, None]
    pa.parquet.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.float32(), 6))}), "in.parquet")
    refused(InputError, "row 1 .*there is no value", net, "in.parquet", "o.npy", nulls="nan")
    whole = pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2))
    pa.parquet.write_table(pa.table({"ids": whole, "scale": pa.array([1.0, 2.0])}), "ids.parquet")
    words = "row 1 .*column ids: there is no value .*give a value$"
    refused(InputError, words, tokens, "ids.parquet", "o.parquet", nulls="nan")
    members = csv(HEAD.replace("id", "who") + ROW.replace("a", "0") + ROW.replace("a", ""))
    refused(InputError, "row 1 .*column who: there is no value|no member", net, members, "o.npy",
            nulls="nan", member="who", inputs={"x": "f0..f5"})  # fmt: skip  # a call in two lines
    refused(
        UsageError,
        "nulls='zero' is unknown; give 'refuse' or 'nan'",
        net,
        "in.parquet",
        "o.npy",
        nulls="zero",
    )


def test_compressed_files(folder: Path, net: WideModel, pa: Any) -> None:
    text = (HEAD + ROW * 3000).encode()
    for ending, codec in ((".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")):
        if pa.Codec.is_available(codec):
            with pa.CompressedOutputStream(f"in.csv{ending}", codec) as out:
                out.write(text)
            check(net, f"in.csv{ending}", torch.tensor([X] * 3000), inputs={"x": "f0..f5"})
    whole = gzip.compress(text)
    for damaged in (whole[: len(whole) // 2], b"no gzip", whole[:40] + b"\0" * 40 + whole[80:]):
        Path("in.csv.gz").write_bytes(damaged)
        refused(InputError, "in.csv.gz", net, "in.csv.gz", "o.npy", inputs={"x": "f0..f5"})
    Path("in.tsv").write_bytes(text.replace(b",", b"\t"))
    check(net, "in.tsv", torch.tensor([X] * 3000), inputs={"x": "f0..f5"})
    widepack.predict(net, "in.tsv", "out.tsv", reduce="mean", ids=["id"])
    assert Path("out.tsv").read_text(encoding="utf-8").startswith('"id"\t"output.mean.0"\t')


def lines(*objects: dict[str, Any], name: str = "in.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(o) + "\n" for o in objects), encoding="utf-8")
    return name


def test_json_lines(folder: Path, net: WideModel, tokens: WideModel, pa: Any) -> None:
    row = {"id": "007", "day": "2026-01-02", **{f"f{k}": k + 1 for k in range(6)}}
    later = {**row, "f5": 6.5, "id": "8"}
    report = widepack.predict(net, lines(*[row] * 5000, later), "out.parquet", reduce="mean")
    found = pa.parquet.read_table("out.parquet")
    assert report.rows == 5001 and report.inputs["x"] == tuple(f"f{k}" for k in range(6))
    assert (found["id"][0].as_py(), found["id"][5000].as_py(), found["day"][0].as_py()) == (
        "007", "8", "2026-01-02",
    )  # fmt: skip  # three values
    check(net, "in.jsonl", torch.tensor([X] * 5000 + [[*X[:5], 6.5]]))
    check(net, lines({"x": [1, 2, 3, 4, 5, 6]}, {"x": [1.5, 2, 3, 4, 5, 6]}, name="a.ndjson"),
          torch.tensor([X, [1.5, *X[1:]]]))  # fmt: skip  # a call in two lines
    check(net, lines(row, {k: v for k, v in row.items() if k != "f3"}),
          torch.tensor([X, [1, 2, 3, NAN, 5, 6]]), nulls="nan")  # fmt: skip  # a call in two lines
    check(net, lines({"x": [1, NAN, 3, 4, 5, 6]}), torch.tensor([[1, NAN, 3, 4, 5, 6]]))
    assert widepack.predict(tokens, lines({"ids": [1, 2], "scale": 1}), "o.parquet").rows == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"x": [1, 2, 3, 4, 5]}\n', "row 0 .*input x has 5 at axis 1"),
        ('{"x": [1, 2, 3, 4, 5, 6]}\n{"x": "q"}\n', "in.jsonl: .*Each line is one JSON object"),
        (
            '{"x": [1, 2, 3, 4, 5, 6]}\n{"x": [1, 2]}\n',
            "a list of 2, and the rows before have lists of 6; .*Pad texts",
        ),
        ('[{"x": [1, 2, 3, 4, 5, 6]}]\n', "in.jsonl: .*Each line is one JSON object"),
        ("", "in.jsonl: .*Empty JSON"),
        ("\n\n", "in.jsonl"),
    ],
)
def test_json_lines_that_are_refused(content: str, words: str, folder: Path, net: WideModel, pa: Any) -> None:
    Path("in.jsonl").write_text(content, encoding="utf-8")
    refused(InputError, words, net, "in.jsonl", "o.npy")


def parts(pa: Any, table: Any, *places: str) -> Tensor:
    """Writes the rows of a table in several files. Returns the order of the rows."""
    size = -(-table.num_rows // len(places))
    for k, where in enumerate(places):
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(table.slice(k * size, size), where)
    order = sorted(range(len(places)), key=lambda k: Path(places[k]))
    return torch.cat([torch.arange(table.num_rows)[k * size : (k + 1) * size] for k in order])


def test_a_folder_of_parquet_files(folder: Path, net: WideModel, pa: Any, table: Any, x: Tensor) -> None:
    order = parts(pa, table, "in/part-1.parquet", "in/part-0.parquet", "in/part-2.parquet")
    Path("in/_SUCCESS").touch()
    Path("in/.part-0.parquet.crc").touch()
    check(net, "in", x[order])
    assert widepack.predict(net, "in", "o.parquet", member="tenant", batch=64).rows == len(x)
    ids = pa.parquet.read_table("o.parquet")["id"].to_pylist()
    assert ids == [f"{i:05d}" for i in order.tolist()]


def test_folders_that_name_values(folder: Path, net: WideModel, pa: Any, table: Any, x: Tensor) -> None:
    order = parts(
        pa, table.drop_columns(["tenant"]), "in/tenant=1/day=007/a.parquet", "in/tenant=m%30/day=8/a.parquet"
    )
    widepack.predict(net, "in", "o.parquet", member="tenant", inputs={"x": "f0..f5"})
    found = pa.parquet.read_table("o.parquet")
    size = len(x) // 2
    assert found["day"].to_pylist() == ["007"] * size + ["8"] * size
    assert found["tenant"].to_pylist() == ["1"] * size + ["m0"] * size
    every = exact(net, x[order])
    want = torch.cat([every[1, :size], every[0, size:]])
    torch.testing.assert_close(torch.tensor(found["output"].to_pylist()).double(), want, rtol=1e-5, atol=1e-5)


def test_folders_that_are_refused(folder: Path, net: WideModel, pa: Any, table: Any) -> None:
    Path("in").mkdir()
    refused(UsageError, "input in: the folder has no .parquet file", net, "in", "o.csv")
    parts(pa, table, "in/a.parquet", "in/b.parquet")
    refused(UsageError, "in/o.npy is in the input folder", net, "in", "in/o.npy")
    refused(UsageError, "output in: is a folder", net, "in/a.parquet", "in")
    pa.parquet.write_table(table.drop_columns(["f0"]), "in/c.parquet")
    refused(InputError, "in/c.parquet: the column f0 is not in it, unlike the first", net, "in", "o.csv")
    as_text = table.set_column(1, "f0", pa.array(["1"] * table.num_rows))
    pa.parquet.write_table(as_text, "in/c.parquet")
    refused(InputError, "in/c.parquet: the column f0 is string, and float in the first", net, "in", "o.csv")
    Path("in/c.parquet").write_bytes(b"no parquet")
    refused(InputError, "in/c.parquet: ", net, "in", "o.csv")
    Path("in/c.parquet").rename("in/c.csv")
    refused(UsageError, "may have .parquet files only, and has c.csv", net, "in", "o.csv")


def test_data_with_targets(artifact: str, folder: Path, pa: Any, table: Any) -> None:
    """`evaluate` and `select` read the same files, with nulls and class names that have commas."""
    names = ["a,b", "c", "d"]
    whole = table.append_column("kind", pa.array([names[k % 3] for k in range(table.num_rows)]))
    parts(pa, whole, "in/a.parquet", "in/b.parquet")
    options: dict[str, Any] = {
        "target": "kind",
        "of": "softmax",
        "classes": '"a,b",c,d',
        "inputs": {"x": "f0..f5"},
    }
    one = widepack.evaluate(artifact, "in", **options)
    pa.parquet.write_table(whole, "in.parquet")
    assert one.ensemble == widepack.evaluate(artifact, "in.parquet", **options).ensemble
    holes = whole.set_column(1, "f0", pa.array([None, *whole["f0"].to_pylist()[1:]], pa.float32()))
    pa.parquet.write_table(holes, "holes.parquet")
    with pytest.raises(InputError, match="--nulls nan"):
        widepack.evaluate(artifact, "holes.parquet", **options)
    with pytest.raises(InputError, match="answers NaN or infinity in 1 of 700 rows"):
        widepack.evaluate(artifact, "holes.parquet", nulls="nan", **options)
    with pytest.raises(InputError, match="--nulls nan"):
        widepack.select(artifact, "holes.parquet", dry_run=True, **options)
