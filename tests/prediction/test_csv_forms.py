"""Tests CSV files of any form: each is read as it is meant, or refused in words, without a lost row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import widepack
from prediction.members import exact
from prediction.test_refusals import refused
from widepack import InputError, UsageError
from widepack.inference.model import WideModel

HEAD = "id,f0,f1,f2,f3,f4,f5\n"
ROW, X = "a,1,2,3,4,5,6\n", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
BIG = "a,1,2,3,4,5,1e300\n"


def csv(content: str | bytes) -> str:
    Path("in.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    return "in.csv"


def answered(net: WideModel, content: str | bytes, x: Tensor | list[list[float]], **options: Any) -> None:
    """Checks that the answers to a file are those of the members alone to `x`."""
    report = widepack.predict(net, csv(content), "out.npy", force=True, **options)
    assert report.rows == len(x)
    found = torch.from_numpy(np.load("out.npy")).movedim(1, 0).double()
    torch.testing.assert_close(found, exact(net, torch.as_tensor(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("\ufeff" + HEAD + ROW, 1),
        ((HEAD + ROW).replace("\n", "\r\n"), 1),
        ((HEAD + ROW + ROW).replace("\n", "\r"), 2),
        (HEAD + ROW.strip(), 1),
        ("\n\n" + HEAD + "\n" + ROW + "\n\n" + ROW + "\n", 2),
        ("id, f0, f1 ,f2, f3, f4, f5 \n a , 1, 2 ,3, 4, 5, 6 \n", 1),
        ('"id","f0","f1","f2","f3","f4","f5"\n"a, b","1","2","3","4","5","6"\n', 1),
        (HEAD + '"a\nb",1,2,3,4,5,6\n', 1),
        (HEAD + "a,+1,2.,3e0,4.0E+00,.5e1,06\n", 1),
        ("f0,f1,f2,f3,f4,f5,\n1,2,3,4,5,6,\n", 1),
        (",f0,f1,f2,f3,f4,f5\n0,1,2,3,4,5,6\n", 1),
        ("f5,id,f4,f3,f2,f1,f0\n6,a,5,4,3,2,1\n", 1),
    ],
)
def test_forms_that_are_read(content: str, rows: int, folder: Path, net: WideModel, pa: Any) -> None:
    answered(net, content, [X] * rows, inputs={"x": "f0..f5"})


def test_long_rows(folder: Path, net: WideModel, pa: Any) -> None:
    long, inputs = ROW.replace("a", "y" * 3_000_000), {"x": "f0..f5"}
    answered(net, HEAD + ROW + long + ROW, [X] * 3, inputs=inputs)
    answered(net, (HEAD + ROW).replace("id", "i" * 3_000_000), [X], inputs=inputs)
    for content in (long.replace("y", "y" * 12), '"' + long * 12):
        refused(InputError, "a row is longer than 16 MB, or a quote has no end; give a .parquet file", net,
                csv(HEAD + ROW + content), "o.npy", inputs=inputs)  # fmt: skip  # a call in two lines


def test_delimiters_and_decimals(folder: Path, net: WideModel, pa: Any) -> None:
    half = [1.5, -2.25, 3.0, 4.0, 5.0, 1e-3]
    text = "id;f0;f1;f2;f3;f4;f5\na,b;1,5;-2,25;3;4,0;5;1,0e-3\n"
    answered(net, text, [half], delimiter=";", decimal=",")
    answered(net, text.replace(";", "\t"), [half], delimiter="tab", decimal=",")
    answered(net, text.replace(";", "|"), [half], delimiter="|", decimal=",")
    answered(net, 'f0,f1,f2,f3,f4,f5\n"1,5","-2,25",3,4,5,"0,001"\n', [half], decimal=",")
    source = csv(text)
    refused(InputError, r"row 0 .*column f0: .*'1,5'; give decimal=',' \(--decimal ,\)", net, source, "o.csv",
            delimiter=";", inputs={"x": "f0..f5"})  # fmt: skip  # a call in two lines
    refused(UsageError, r"column f0 has '1,5': give decimal=',' \(--decimal ,\)", net, source, "o.csv",
            delimiter=";", ids=["id"])  # fmt: skip  # a call in two lines
    for word in ("", ";;", "a", "1", '"', "\n", 3):
        refused(UsageError, "is no delimiter", net, source, "o.csv", delimiter=word)
    refused(UsageError, "decimal=';' is unknown", net, source, "o.csv", decimal=";")
    refused(UsageError, "header='no' is neither", net, source, "o.csv", header="no")
    np.save("in.npy", np.zeros((2, 6), "f4"))
    refused(UsageError, "are for .csv files", net, "in.npy", "o.csv", header=False)


def test_files_without_a_header(folder: Path, net: WideModel, pa: Any) -> None:
    text = "1,2,3,4,5,6\n6,5,4,3,2,1\n"
    for options in ({}, {"inputs": {"x": "f0..f5"}}):
        words = r"the first line may be a row, since 1 is a number.\n.*--no-header.*\n.*\(--header\)"
        refused(UsageError, words, net, csv(text), "o.npy", **options)
        answered(net, text, [X, X[::-1]], header=False, **options)
    named = "cat,0.5,2,3,4,5,6\n" + "dog,6,5,4,3,2,1\n"
    refused(UsageError, "since 0.5 is a number", net, csv(named), "o.npy")
    answered(net, named, [[0.5, *X[1:]], X[::-1]], header=False)
    for first in ("nan,NA,,inf\n", "-1e-3,a\n", '"+.5",b\n', "1.,x\n"):
        refused(UsageError, "the first line may be a row", net, csv(first * 2), "o.npy")
    answered(net, "2019,2020,2021,2022,2023,2024\n1,2,3,4,5,6\n", [X], header=True)
    answered(net, "0,1,2,3,4,5\n1,2,3,4,5,6\n", [X], header=True, inputs={"x": "0..5"})
    bad = text + "1,2,3,4,5,q\n"
    refused(InputError, r"row 2 .*column f5: .*'q'", net, csv(bad), "o.npy", header=False,
            inputs={"x": "f0..f5"})  # fmt: skip  # a call in two lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("f0,f0,f2,f3,f4,f5\n1,2,3,4,5,6\n", "columns 0 and 1 .* have the name f0"),
        ("f0, f0,f2,f3,f4,f5\n1,2,3,4,5,6\n", "columns 0 and 1 .* have the name f0"),
        ("f0,f1,f2,f3,f4,f5,,\n1,2,3,4,5,6,,\n", "columns 6 and 7 .* have no name"),
        ("f0,f1,f2,f3,f4,f5\n1,2,3,4,5,6,\n", "row 0 .*Expected 6 columns, got 7"),
        (HEAD + ROW + "a,1,2\n", "row 1 .*Expected 7 columns, got 3"),
        (HEAD + ROW + " \n", "row 1 .*Expected 7 columns, got 1"),
        (HEAD + ROW + ",,,,,,\n", "row 1 .*column f0: there is no value"),
        (HEAD + 'a,"1,000",2,3,4,5,6\n', "row 0 .*column f0: .*'1,000'.*separators of thousands"),
        (HEAD + "a,1 000,2,3,4,5,6\n", "row 0 .*column f0: .*'1 000'"),
        (HEAD + "a,1_000,2,3,4,5,6\n", "row 0 .*column f0: .*'1_000'"),
        (HEAD + "a,1,2,50%,4,5,6\n", "row 0 .*column f2: .*'50%'"),
        (HEAD + ROW + HEAD, "row 1 .*column f0: .*'f0'"),
        (HEAD + ROW + ROW + BIG, r"row 2 .*column f5: 1e\+300: it is above the largest number of float32"),
        (HEAD + ROW + "a,1e400,2,3,4,5,6\n", "row 1 .*column f0: 1e400: it is above the largest .* float64"),
        (HEAD + "a,inf,2,3,4,5,-1e999\n", "row 0 .*column f5: -1e999: it is above"),
        (HEAD + 'b,"1,2,3,4,5,6\n', "in.csv"),
        (HEAD + "a\0b,1,2,3,4,5,6\n", "has NUL bytes.*UTF-8"),
        ((HEAD + ROW).encode("utf-16"), "is text in UTF-16; save it as CSV in UTF-8"),
        ((HEAD + ROW).encode("utf-16-le"), "has NUL bytes"),
        ("", "the file has no rows"),
        ("sep=;\n" + HEAD + ROW, "the first line is 'sep=;'"),
    ],
)
def test_forms_that_are_refused(
    content: str | bytes, words: str, folder: Path, net: WideModel, pa: Any
) -> None:
    refused(InputError, words, net, csv(content), "o.npy", inputs={"x": "f0..f5"})


def test_a_file_in_another_encoding(folder: Path, net: WideModel, pa: Any) -> None:
    source = csv((HEAD + "é" + ROW).encode("latin-1"))
    refused(InputError, "row 0 .*column id: .*UTF8.*save the file as CSV in UTF-8", net, source, "o.csv")
    source = csv(("é" + HEAD + ROW).encode("latin-1"))
    refused(InputError, "in.csv: the names .* are no text in UTF-8; save it as CSV", net, source, "o.csv")


def test_infinities_are_values_and_numbers_that_are_too_large_are_not(
    folder: Path, net: WideModel, pa: Any
) -> None:
    """The second reading of the file finds the same rows, also after many blocks."""
    for word in ("inf", "-inf", "Infinity", "+INF"):
        text = HEAD + ROW * 60_000 + ROW.replace("4", word) + ROW
        report = widepack.predict(net, csv(text), "out.npy", inputs={"x": "f0..f5"}, force=True)
        assert report.rows == 60_002
        assert not np.isfinite(np.load("out.npy")[60_000]).any()
        assert np.isfinite(np.load("out.npy")[60_001]).all()
    text = HEAD + ROW + ROW.replace("4", "inf") + ROW * 60_000 + ROW.replace("4", "1e309")
    Path("out.npy").unlink()
    refused(InputError, "row 60002 .*column f3: 1e309", net, csv(text), "o.npy", inputs={"x": "f0..f5"})


def test_true_and_false_are_one_and_zero(folder: Path, net: WideModel, pa: Any) -> None:
    text = HEAD + "a,True,2,False,4,5,6\nb,False,2,True,4,5,6\n"
    rows = [[1, 2, 0, 4, 5, 6], [0, 2, 1, 4, 5, 6]]
    answered(net, text, torch.tensor(rows).float(), inputs={"x": "f0..f5"})
    answered(net, text, torch.tensor(rows).float())
    more = text.replace(",6\n", ",6,True\n").replace("f5,True", "f5,f6")
    refused(UsageError, r"4 columns of numbers are left: .*no numbers: id \(text\), f0 \(bool\), f2",
            net, csv(more.replace("f5\n", "f5,f6\n")), "o.npy")  # fmt: skip  # a call in two lines
    four = HEAD + "a,True,2,3,4,5,6\n"
    refused(UsageError, "5 columns of numbers are left", net, csv(four.replace("a,", "True,")), "o.npy")


def test_an_empty_line_of_a_single_column_is_an_empty_value(
    folder: Path, classes: WideModel, pa: Any
) -> None:
    refused(InputError, "row 1 .*column x: there is no value", classes, csv("x\n1\n\n2\n"), "o.npy")
    assert widepack.predict(classes, csv("x\n1\n3\n2"), "o.npy").rows == 3


def test_complex_inputs(folder: Path, tmp_path_factory: pytest.TempPathFactory, pa: Any) -> None:
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.randn(2))

        def forward(self, z: Tensor) -> Tensor:
            return z.abs() * self.by

    fused = widepack.fuse([Turned() for _ in range(2)], torch.randn(3, 2, dtype=torch.complex64))
    fused.eval().save("z.wide")
    net = widepack.load("z.wide")
    refused(UsageError, "CSV files have no complex numbers", net, csv("a,b\n1,2\n"), "o.npy")
    np.save("in.npy", np.array([[1, 1e39]], "c16"))
    refused(InputError, r"row 0 .*: it is above the largest number of complex64", net, "in.npy", "o.npy")
