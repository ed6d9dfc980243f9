"""Tests what `widepack.predict` refuses: each error names the file, the row, the column and the way out."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import fresh, must
from torch import Tensor

import widepack
from widepack import InputError, UsageError
from widepack.inference.model import WideModel


def refused(kind: type[Exception], words: str, *args: Any, **options: Any) -> str:
    """Checks that a run is refused, that the error is short, and that nothing is left in the folder."""
    before = sorted(os.listdir())
    with pytest.raises(kind, match=words) as e:
        widepack.predict(*args, **options)
    assert len(str(e.value).splitlines()) <= 5
    assert sorted(os.listdir()) == before
    return str(e.value)


def csv(text: str) -> str:
    Path("in.csv").write_text(text, encoding="utf-8")
    return "in.csv"


HEAD = "id,f0,f1,f2,f3,f4,f5\n"
GOOD = "a,1,2,3,4,5,6\n"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (GOOD + "b,1,2,3,q,5,6\n", "in.csv: row 1 (the first row is 0), column f3: .*invalid value 'q'"),
        (GOOD + "b,1,2,3,,5,6\n", "in.csv: row 1 (the first row is 0), column f3: there is no value (null)"),
        (GOOD + "b,1,2,3,NA,5,6\n", "row 1 .*column f3: there is no value"),
        (GOOD + "b,1,2,3,5,6\n", "in.csv: row 1 (the first row is 0): Expected 7 columns, got 6"),
        (GOOD + "b,1,2,3,1e39,5,6\n", "row 1 .*column f3: 1e+39: it is above the largest number of float32"),
    ],
)
def test_a_wrong_value_of_csv(rows: str, words: str, folder: Path, net: WideModel, pa: Any) -> None:
    pattern = ".*".join(map(re.escape, words.split(".*")))
    refused(InputError, pattern, net, csv(HEAD + rows), "out.csv", inputs={"x": "f0..f5"})


def test_a_wrong_value_far_down_in_csv(folder: Path, net: WideModel, pa: Any) -> None:
    """The types are those of the input: the first rows, which are integers, do not decide."""
    rows = GOOD * 40_000 + "b,1,2,3,4.5,5,6\n" + GOOD * 10 + 'c,1,2,3,"4,5",5,6\n'
    source = csv(HEAD + rows)
    refused(InputError, r"row 40011 .*column f3: .*'4,5'", net, source, "out.csv", inputs={"x": "f0..f5"})
    Path("in.csv").write_text(HEAD + GOOD * 40_000 + "b,1,2,3,4.5,nan,-inf\n", encoding="utf-8")
    report = widepack.predict(net, source, "out.csv", inputs={"x": "f0..f5"}, reduce="mean")
    assert report.rows == 40_001
    last = Path("out.csv").read_text(encoding="utf-8").splitlines()[-1]
    assert last == '"b",nan,nan,nan'


def test_texts_of_csv_stay_as_they_are(folder: Path, net: WideModel, pa: Any) -> None:
    source = csv('zip,note,f0,f1,f2,f3,f4,f5\n00700,,1,2,3,4,5,6\n9223372036854775808,"a\nb",1,2,3,4,5,6\n')
    widepack.predict(net, source, "out.parquet", inputs={"x": "f0..f5"}, reduce="mean")
    found = pa.parquet.read_table("out.parquet")
    assert found["zip"].to_pylist() == ["00700", "9223372036854775808"]
    assert found["note"].to_pylist() == ["", "a\nb"]


@pytest.mark.parametrize("text", ["", "\n", "a,a\n1,2\n"])
def test_a_csv_without_columns(text: str, folder: Path, net: WideModel, pa: Any) -> None:
    refused(InputError, "in.csv: ", net, csv(text), "out.csv")


def test_a_null_in_every_kind_of_column(folder: Path, net: WideModel, tokens: WideModel, pa: Any) -> None:
    values = {f"f{k}": [1.0] * 900 for k in range(6)}
    values["f2"][777] = None  # type: ignore[call-overload]
    pa.parquet.write_table(pa.table(values), "in.parquet")
    refused(InputError, r"row 777 .*column f2: there is no value", net, "in.parquet", "o.parquet")
    lists = [[1.0] * 6] * 5
    for bad in (None, [1.0] * 5 + [None]):
        pa.parquet.write_table(pa.table({"x": [*lists, bad]}), "in.parquet")
        refused(InputError, r"row 5 .*column x: there is no value", net, "in.parquet", "o.parquet")
    ids = [[1, 2]] * 3 + [[1, 2, 3]]
    pa.parquet.write_table(pa.table({"ids": ids, "scale": [1.0] * 4}), "in.parquet")
    refused(InputError, r"row 3 .*column ids: a list of 3, .* lists of 2", tokens, "in.parquet", "o.parquet")
    refused(InputError, r"row 3 .*a list of 3|row 3 .*shape \[3\]", tokens, "in.parquet", "o.npy", batch=1,
            reduce="mean")  # fmt: skip


def test_conversions_are_exact(folder: Path, net: WideModel, tokens: WideModel, pa: Any) -> None:
    def write(type_: Any, *values: Any) -> str:
        columns = {f"f{k}": pa.array(values, type_) for k in range(6)}
        pa.parquet.write_table(pa.table(columns), "in.parquet")
        return "in.parquet"

    for type_ in (pa.int64(), pa.int8(), pa.uint16(), pa.uint64(), pa.float64(), pa.float16()):
        source = write(pa.float32(), 1, 100) if type_ == pa.float16() else write(type_, 1, 100)
        widepack.predict(net, source, "out.npy", force=True)
    os.unlink("out.npy")
    write(pa.int64(), 2**24, -(2**24))
    widepack.predict(net, "in.parquet", "out.npy")
    os.unlink("out.npy")
    for value in (2**24 + 1, -(2**24) - 1, 2**63 - 1):
        source = write(pa.int64(), 3, value)
        refused(InputError, f"row 1 .*column f0: {value}: float32 has no such integer", net, source, "o.npy")
    source = write(pa.uint64(), 3, 2**64 - 1)
    refused(InputError, f"row 1 .*{2**64 - 1}: float32 has no such integer", net, source, "o.npy")
    widepack.predict(net, write(pa.uint64(), 3, 2**63), "out.npy")
    os.unlink("out.npy")
    source = write(pa.float64(), 3, 1e300)
    refused(
        InputError,
        r"row 1 .*1e\+300: it is above the largest number of float32, 3.4e\+38; change",
        net,
        source,
        "o.npy",
    )
    for type_ in (pa.string(), pa.timestamp("us")):
        text = "3" if type_ == pa.string() else 3
        source = write(type_, text)
        refused(UsageError, "the input takes numbers", net, source, "o.npy", inputs={"x": "f0..f5"})
    pa.parquet.write_table(pa.table({"ids": [[1.0, 2.0]], "scale": [1.0]}), "in.parquet")
    refused(UsageError, r"column ids is list.*the input takes int64", tokens, "in.parquet", "o.npy")


def test_the_row_of_an_index_out_of_range(folder: Path, tokens: WideModel) -> None:
    ids = torch.zeros(1000, 3, dtype=torch.int64)
    ids[613, 1] = 10
    save_file({"ids": ids, "scale": torch.ones(1000), "m": torch.arange(1000) % 4}, "in.safetensors")
    for more in ({}, {"reduce": "mean"}, {"member": "m"}):
        refused(InputError, r"in.safetensors: row 613 \(the first row is 0\): .*", tokens, "in.safetensors",
                "o.safetensors", **more)  # fmt: skip


def test_an_error_of_all_rows_names_none(folder: Path, classes: WideModel) -> None:
    np.save("in.npy", np.zeros((5, 1), "f4"))
    message = refused(InputError, "answers are int64", classes, "in.npy", "o.npy", reduce="mean")
    assert "row " not in message


def test_members_that_do_not_exist(folder: Path, net: WideModel, pa: Any, table: Any) -> None:
    tenant = table["tenant"].to_pylist()
    for bad, words in ((["m9"], "no member is called 'm9'"), ([None], "there is no value")):
        column = pa.array([*tenant[:300], *bad, *tenant[301:]])
        pa.parquet.write_table(table.set_column(7, "tenant", column), "in.parquet")
        refused(
            InputError, f"row 300 .*column tenant: {words}", net, "in.parquet", "o.parquet", member="tenant"
        )
    pa.parquet.write_table(table.set_column(7, "tenant", pa.array([3] * 699 + [4])), "in.parquet")
    refused(InputError, "row 699 .*there is no member 4", net, "in.parquet", "o.csv", member="tenant")
    refused(
        UsageError, "no column 'tenent'; did you mean tenant", net, "in.parquet", "o.csv", member="tenent"
    )
    refused(UsageError, "column f0 is float; a member is named by", net, "in.parquet", "o.csv", member="f0")
    refused(UsageError, "exclude each other", net, "in.parquet", "o.csv", member="tenant", reduce="mean")


def test_the_choice_of_columns(folder: Path, net: WideModel, tokens: WideModel, pa: Any, table: Any) -> None:
    numbered = table.append_column("label", pa.array([1] * 700))
    pa.parquet.write_table(numbered, "in.parquet")
    run = (net, "in.parquet", "o.parquet")
    refused(UsageError, "not clear: .* 7 columns of numbers are left: f0, .* label", *run)
    two = ["id", "age", "height", *table.column_names[3:]]
    pa.parquet.write_table(
        table.rename_columns(two).append_column("label", pa.array([1] * 700)), "two.parquet"
    )
    error = refused(UsageError, "not clear: ", net, "two.parquet", "o.parquet")
    assert "in the order of the model, for example inputs={'x': 'height,f2,...'}" in error
    assert "--features" in error and "Only if the file has the order of the model" in error
    assert widepack.predict(*run, ids=["label"]).columns == ("label", *(f"output.m{i}" for i in range(4)))
    os.unlink("o.parquet")
    notes: list[str] = []
    pa.parquet.write_table(table, "in.parquet")
    widepack.predict(*run, note=notes.append, reduce="mean", force=True)
    assert notes == ["input x is read from 6 columns in the file's order: f0, f1, f2, f3, f4, f5"]
    os.unlink("o.parquet")
    for words, error in (
        ("f0..f6", "no column 'f6'; its columns are id, f0"),
        ("f0..g5", "is not a range of columns"),
        ("f5..f0", "is not a range of columns"),
        ("f0,f1", r"takes 6 columns; 2 columns are named: f0, f1"),
        ("f0,,f1", "no column is named"),
        ("f0,f0,f1,f2,f3,f4", "the column f0 is named twice"),
        ("tenant", "column tenant is string, and the input takes numbers"),
    ):
        refused(UsageError, error, *run, inputs={"x": words})
    refused(UsageError, "no input 'y'; its inputs are x", *run, inputs={"y": "f0"})
    refused(UsageError, "inputs ids, scale have no column", tokens, "in.parquet", "o.parquet")
    refused(UsageError, "no column 'nr'", *run, ids=["nr"])
    refused(UsageError, "ids='id' is one text", *run, ids="id")
    both = table.append_column("g", pa.array([[0.0] * 6] * 700))
    pa.parquet.write_table(both, "in.parquet")
    refused(UsageError, "several choices fit: g; f0, f1", *run)
    zeros = {f"f{k:02d}": [0.0] for k in range(6)}
    pa.parquet.write_table(pa.table({**zeros, "__index_level_0__": [5]}), "in.parquet")
    report = widepack.predict(*run, reduce="mean")
    assert report.inputs["x"] == tuple(zeros) and report.columns == ("__index_level_0__", "output.mean")
    assert widepack.predict(*run, inputs={"x": "f00..f05"}, reduce="mean", force=True).rows == 1


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_an_index_of_pandas_is_no_input(folder: Path, net: WideModel, pa: Any, ending: str) -> None:
    """pandas writes a named index behind the columns, and names it in the metadata of the file."""
    columns = {**{f"f{k}": [float(k)] for k in range(6)}, "uid": [7]}
    table = pa.table(columns).replace_schema_metadata({"pandas": json.dumps({"index_columns": ["uid"]})})
    path = f"in.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert widepack.predict(net, path, "out.parquet").inputs["x"] == tuple(f"f{k}" for k in range(6))
    five = table.drop_columns(["f5"])
    pa.parquet.write_table(five, "five.parquet")
    refused(UsageError, "5 columns of numbers are left", net, "five.parquet", "o.parquet")
    named = widepack.predict(net, "five.parquet", "o.parquet", inputs={"x": "f0,f1,f2,f3,f4,uid"})
    assert named.inputs["x"][-1] == "uid"
    other = pa.table(columns).replace_schema_metadata({"pandas": "[1"})  # of another writer
    pa.parquet.write_table(other, "other.parquet")
    refused(UsageError, "7 columns of numbers are left", net, "other.parquet", "q.parquet")


def test_names_that_collide(folder: Path, net: WideModel, pa: Any, table: Any) -> None:
    pa.parquet.write_table(table.rename_columns(["output.mean", *table.column_names[1:]]), "in.parquet")
    refused(
        UsageError,
        "the column output.mean has the name of an answer",
        net,
        "in.parquet",
        "o.csv",
        reduce="mean",
    )
    report = widepack.predict(net, "in.parquet", "o.csv", reduce="mean", name="risk")
    assert report.columns == ("output.mean", "tenant", "risk.mean")
    pa.parquet.write_table(table.rename_columns(["output.mean.0", *table.column_names[1:]]), "in.parquet")
    refused(UsageError, "two columns .* output.mean.0", net, "in.parquet", "o2.csv", reduce="mean")


def test_what_an_output_cannot_hold(folder: Path, net: WideModel, pa: Any, table: Any) -> None:
    pa.parquet.write_table(table, "in.parquet")
    run = (net, "in.parquet")
    notes: list[str] = []
    widepack.predict(*run, "o.npy", reduce="mean", note=notes.append)
    assert notes[1] == "not passed on: id, tenant, since a .npy file has one array"
    refused(UsageError, "id cannot pass through: a .safetensors", *run, "o.safetensors", ids=["id"])
    refused(UsageError, "has one array, and the answers are output.mean, output.std", *run, "p.npy",
            reduce="mean,std")  # fmt: skip
    uneven = table.append_column("l", pa.array([[1]] * 699 + [[1, 2]]))
    pa.parquet.write_table(uneven, "in.parquet")
    refused(
        UsageError,
        "column l cannot become columns of a CSV file: a list of 2",
        *run,
        "o.csv",
        inputs={"x": "f0..f5"},
    )
    pairs = table.append_column("st", pa.array([{"q": i} for i in range(700)]))
    pa.parquet.write_table(pairs, "in.parquet")
    refused(
        UsageError,
        "column st cannot become columns of a CSV file: it holds struct.*--id",
        *run,
        "o.csv",
        inputs={"x": "f0..f5"},
    )


def test_paths(folder: Path, net: WideModel, pa: Any, table: Any) -> None:
    pa.parquet.write_table(table, "in.parquet")
    refused(UsageError, "in.xls: the ending .xls names no known format", net, "in.xls", "o.csv")
    refused(UsageError, "o: the ending is missing", net, "in.parquet", "o")
    refused(UsageError, "nothing.csv: there is no such file", net, "nothing.csv", "o.csv")
    refused(
        UsageError,
        "input in.csv.xz: .* takes in.csv, unpacked. .* .gz, .bz2, .zst",
        net,
        "in.csv.xz",
        "o.csv",
    )
    refused(UsageError, "output o.csv.gz: .* takes o.csv, unpacked$", net, "in.parquet", "o.csv.gz")
    refused(UsageError, "in.npz: a .npz file has several arrays; save .* as .npy", net, "in.npz", "o.csv")
    refused(
        UsageError, "output o.jsonl: the ending .jsonl names no known format", net, "in.parquet", "o.jsonl"
    )
    refused(UsageError, r"in.csv.gz: there is no such file", net, "in.csv.gz", "o.csv")
    refused(UsageError, "no/o.csv: the folder no does not exist", net, "in.parquet", "no/o.csv")
    refused(UsageError, "is the input file", net, "in.parquet", "in.parquet", force=True)
    Path("o.csv").write_text("mine", encoding="utf-8")
    refused(widepack.WidepackError, "o.csv exists; .*--force", net, "in.parquet", "o.csv")
    assert Path("o.csv").read_text(encoding="utf-8") == "mine"
    refused(UsageError, "device=, backend= and threads=", net, "in.parquet", "o2.csv", threads=1)
    refused(UsageError, "batch=0 is not a number of rows", net, "in.parquet", "o2.csv", batch=0)
    refused(UsageError, "there is no figure 'men'", net, "in.parquet", "o2.csv", reduce="men")
    refused(UsageError, "of='softmax' is about statistics", net, "in.parquet", "o2.csv", of="softmax")
    refused(UsageError, "there is no entry 'encode'", net, "in.parquet", "o2.csv", entry="encode")
    refused(UsageError, "answer='z' is unknown; the members answer", net, "in.parquet", "o2.csv", answer="z")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".npy", ".safetensors"])
def test_damaged_files(suffix: str, folder: Path, net: WideModel, pa: Any, table: Any, x: Tensor) -> None:
    path = Path(f"in{suffix}")
    if suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif suffix == ".npy":
        np.save(path, x.numpy())
    elif suffix == ".safetensors":
        save_file({"x": x}, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[: len(whole) // 2], whole[:-3], b"\0" * 200):
        path.write_bytes(damaged)
        refused(InputError, re.escape(str(path)), net, path, "o.npy", reduce="mean")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 6), ">f4"), "its dtype is '>f4'"),
        (np.zeros((3, 6), object), r"its dtype is '\|O'.*never Python objects"),
        (np.zeros((3, 6), [("a", "f4")]), "its dtype is"),
        (np.asfortranarray(np.zeros((3, 6), "f4")), "order of Fortran"),
        (np.float32(3), "one number"),
        (np.zeros((3, 5), "f4"), "the columns of input x"),
        (np.zeros((3, 6), "c8"), "the columns of input x"),
    ],
)
def test_arrays_that_are_refused(array: Any, words: str, folder: Path, net: WideModel) -> None:
    np.save("in.npy", array, allow_pickle=True)
    refused(widepack.WidepackError, words, net, "in.npy", "o.npy")


def test_headers_of_npy_are_data(folder: Path, net: WideModel) -> None:
    for text in (b"__import__('os')", b"(" * 5000, b"{'descr': '<f4'}", b"{'shape': 1, 'descr': 2, 'a': 3}",
                 b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 6)}",
                 b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**30, 6)}"):  # fmt: skip
        Path("in.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        refused(InputError, "in.npy: ", net, "in.npy", "o.npy")
    Path("in.npy").write_bytes(b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"))
    refused(InputError, "in.npy: .*2147483648", net, "in.npy", "o.npy")
    Path("in.npy").write_bytes(b"\x93NUMPY\x04\x00" + b"\0" * 60)
    refused(InputError, "in.npy: .*unknown version 4", net, "in.npy", "o.npy")


def test_tensors_of_different_lengths(folder: Path, net: WideModel) -> None:
    save_file({"x": torch.zeros(3, 6), "w": torch.zeros(4)}, "in.safetensors")
    refused(InputError, "the tensor . has . rows, and . has .", net, "in.safetensors", "o.npy")


@pytest.mark.extended
def test_without_pyarrow_and_numpy(folder: Path, net: WideModel, x: Tensor) -> None:
    """.safetensors needs neither; the errors of other files name the extra."""
    save_file({"x": x}, "in.safetensors")
    np.save("in.npy", x.numpy())
    path = net.__reduce__()[0].args[0]  # type: ignore[attr-defined]
    code = (
        "import sys, warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n"
        "sys.modules['pyarrow'] = sys.modules['numpy'] = None\n"
        "import widepack\n"
        "widepack.predict(sys.argv[1], 'in.safetensors', 'out.safetensors', reduce='mean')\n"
        "for one, other in (('safetensors', 'csv'), ('safetensors', 'npy'), ('npy', 'safetensors')):\n"
        "    try: widepack.predict(sys.argv[1], f'in.{one}', f'o.{other}')\n"
        "    except widepack.Unavailable as e: print(e)\n"
    )
    assert must(fresh(code, path)).count("pip install 'widepack[predict]'") == 3
    assert sorted(os.listdir()) == ["in.npy", "in.safetensors", "out.safetensors"]
    found = load_file("out.safetensors")["output.mean"]
    torch.testing.assert_close(found, net.mean(x), rtol=1e-5, atol=1e-6)
