"""Tests `predict` and `select` on files that other programs wrote, against the members alone.

`files/write_files.py` wrote them with pandas, polars and NumPy. All have the same 12 rows.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.functional import cross_entropy

import widepack
from prediction.members import exact
from widepack import UsageError
from widepack.inference.model import WideModel
from widepack_cli.main import cli

FILES = Path(__file__).parent / "files"
CLASSES = ["cat", "dog", "bird"]
EXCEL: dict[str, Any] = {"delimiter": ";", "decimal": ","}
RIGHT: dict[str, dict[str, Any]] = {
    "pandas.csv": {},
    "pandas_index.csv": {},
    "pandas_excel.csv": EXCEL,
    "pandas_tabs.csv": {"delimiter": "tab"},
    "pandas_quoted.csv": {},
    "pandas_no_header.csv": {"header": False, "inputs": {"x": "f1..f6"}},
    "pandas_numbered.csv": {"header": True, "inputs": {"x": "0..5"}},
    "pandas.tsv": {},
    "pandas.csv.gz": {},
    "pandas.csv.bz2": {},
    "pandas.jsonl": {},
    "pandas.jsonl.gz": {},
    "pandas_parts": {},
    "pandas_missing.csv": {"nulls": "nan"},
    "pandas_missing.parquet": {"nulls": "nan"},
    "pandas_missing.jsonl": {"nulls": "nan"},
    "polars.csv": {},
    "numpy.csv": {"header": False},
    "numpy_header.csv": {},
    "pandas.parquet": {},
    "pandas_index.parquet": {},
    "pandas_nullable.parquet": {},
    "pandas_decimal.parquet": {},
    "pandas_int16.parquet": {},
    "polars.parquet": {},
    "polars.arrow": {},
    "polars_lists.parquet": {},
    "polars_arrays.arrow": {},
}
"""The options with which each file is read."""


def rows() -> tuple[Tensor, list[str]]:
    """Returns the features [12, 6] and the labels, read by Python's own module."""
    with open(FILES / "pandas.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    return torch.tensor([[float(r[f"f{k}"]) for k in range(6)] for r in table]), [r["label"] for r in table]


def test_every_file_is_tested() -> None:
    assert {p.name for p in FILES.iterdir() if p.suffix != ".py"} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_the_answers_to_a_file_are_those_of_the_members(
    name: str, folder: Path, net: WideModel, pa: Any
) -> None:
    x, labels = rows()
    if "parts" in name:  # pandas writes a folder for each label
        x = x[sorted(range(12), key=labels.__getitem__)]
    if "missing" in name:
        x[3, 1] = x[7, 5] = torch.nan
    report = widepack.predict(net, FILES / name, "out.npy", **RIGHT[name])
    assert report.rows == 12
    found = torch.from_numpy(np.load("out.npy"))
    true = exact(net, 8 * x if "int16" in name else x)
    torch.testing.assert_close(found.movedim(1, 0).double(), true, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert bool(true.isnan().any()) == ("missing" in name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numpy.csv", "the first line may be a row, since 7.5.*is a number"),
        ("pandas_no_header.csv", "the first line may be a row, since 0.75 is a number"),
        ("pandas_numbered.csv", r"since 0 is a number.\n.*--no-header.*\n.*\(--header\)"),
        ("pandas_excel.csv", r"the first line has no ',', but ';'.*--delimiter ';'"),
        ("pandas_tabs.csv", "the first line has no ',', but tabs.*--delimiter 'tab'"),
    ],
)
def test_a_file_that_is_not_clear_is_refused(
    name: str, words: str, folder: Path, net: WideModel, pa: Any
) -> None:
    with pytest.raises(UsageError, match=f"(?s){words}") as e:
        widepack.predict(net, FILES / name, "out.npy")
    assert len(str(e.value).splitlines()) <= 5 and not list(folder.iterdir())


def losses(ens: WideModel, x: Tensor, y: Tensor) -> tuple[float, list[float]]:
    """Returns the log loss of the mean of all members' probabilities, and that of each member."""
    answers = exact(ens, x)
    single = [float(cross_entropy(a, y)) for a in answers]
    return float(-answers.softmax(-1).mean(0).gather(1, y[:, None]).log().mean()), single


@pytest.mark.extended(keep=6)
@pytest.mark.parametrize(
    "name", [n for n in RIGHT if not any(w in n for w in ("num", "no_header", "missing", "parts"))]
)
def test_select_takes_names_of_classes(name: str, folder: Path, artifact: str, pa: Any) -> None:
    """The targets of these files are texts, or texts by number (`category`)."""
    x, labels = rows()
    ens = widepack.load(artifact)
    x = 8 * x if "int16" in name else x
    options = {**RIGHT[name], "target": "label", "of": "softmax", "metric": "log_loss", "dry_run": True}
    report = widepack.select(artifact, FILES / name, classes=CLASSES, **options)
    whole, single = losses(ens, x, torch.tensor([CLASSES.index(v) for v in labels]))
    assert report.scores["all"] == pytest.approx(whole, rel=1e-5)
    assert report.scores["best_member"] == pytest.approx(min(single), rel=1e-5)
    other = widepack.select(artifact, FILES / name, classes="bird,cat,dog", **options)
    assert other.scores["all"] != pytest.approx(whole, rel=1e-3)  # the order is the user's, not that of texts
    with pytest.raises(UsageError, match="targets must be numbers: for classes 0 to C-1.*\n.*--classes"):
        widepack.select(artifact, FILES / name, **options)


def numbered(pa: Any, target: list[Any]) -> None:
    """Writes the rows with another target, as CSV."""
    x, _ = rows()
    columns = {f"f{k}": x[:, k].tolist() for k in range(6)}
    pa.csv.write_csv(pa.table({**columns, "y": target}), "val.csv")


@pytest.mark.parametrize("name", [n for n in RIGHT if "missing" in n])
def test_nan_of_pandas_is_refused_by_default(name: str, folder: Path, artifact: str, pa: Any) -> None:
    """pandas writes NaN as null, and as an empty value of CSV."""
    words = (
        r"row 3 \(the first row is 0\), column f1: there is no value \(null\); .*\(--nulls nan\) for a model"
    )
    with pytest.raises(widepack.InputError, match=words):
        widepack.predict(artifact, FILES / name, "out.npy")
    for run in (widepack.evaluate, widepack.select):
        options: dict[str, Any] = {"target": "label", "of": "softmax", "classes": CLASSES}
        with pytest.raises(
            widepack.InputError, match="answers NaN or infinity in 2 of 12 rows, first in row 3"
        ):
            run(artifact, FILES / name, nulls="nan", **options)
    command = ["predict", artifact, str(FILES / name), "-o", "out.npy", "--nulls", "nan"]
    assert CliRunner().invoke(cli, command).exit_code == 0


@pytest.mark.parametrize(
    ("metric", "target"),
    [
        ("accuracy", [0, 1, 2] * 4),
        ("log_loss", [0, 1, 2] * 4),
        ("log_loss", [0.0, 1.0, 2.0] * 4),
        ("log_loss", ["0", "1", "2"] * 4),
    ],
)
def test_select_takes_numbered_classes_of_csv(
    metric: str, target: list[Any], folder: Path, artifact: str, pa: Any
) -> None:
    numbered(pa, target)
    x, _ = rows()
    y = torch.tensor([int(v) for v in target])
    ens = widepack.load(artifact)
    report = widepack.select(artifact, "val.csv", target="y", of="softmax", metric=metric, dry_run=True)
    answers = exact(ens, x)
    if metric == "accuracy":
        true = float((answers.softmax(-1).mean(0).argmax(-1) == y).double().mean())
    else:
        true = losses(ens, x, y)[0]
    assert report.scores["all"] == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ([0, 1, 3] * 4, {}, "row 2 .*has 3.*\n.*classes="),
        ([0.5, 1, 2] * 4, {}, "row 0 .*has 0.5"),
        ([1.0, float("nan"), 2] * 4, {}, r"the target of row 1 .*is nan"),
        (["a", "b", "c"] * 4, {}, "targets must be numbers"),
        (["a", "b", "d"] * 4, {"classes": "a,b,c"}, "row 2 .*column y: 'd' is none of the classes a, b, c"),
        (["a", "b"] * 6, {"classes": "a,b"}, "classes= names 2 classes, and the members answer 3"),
        (["a", "b", "c"] * 4, {"classes": "a,b"}, "classes= names 2 classes, and the members answer 3"),
        (["a", "b"] * 6, {"classes": "a,a,b"}, "does not name each class once"),
        (["a", "b"] * 6, {"classes": 3}, "classes=3 is no list of names"),
        ([1, 2, 3] * 4, {"classes": "1,2,3", "of": None}, "give of='softmax'"),
        ([0.1, 0.2, 0.3] * 4, {"classes": "a,b,c"}, "'0.1' is none of the classes"),
    ],
)
def test_targets_that_are_refused(
    target: list[Any], options: dict[str, Any], words: str, folder: Path, artifact: str, pa: Any
) -> None:
    numbered(pa, target)
    with pytest.raises((UsageError, widepack.InputError), match=words) as e:
        widepack.select(artifact, "val.csv", **{"target": "y", "of": "softmax", **options})
    assert len(str(e.value).splitlines()) <= 5


def test_the_command_takes_the_same_options(folder: Path, artifact: str, pa: Any) -> None:
    excel = str(FILES / "pandas_excel.csv")
    words = ["--delimiter", ";", "--decimal", ","]
    done = CliRunner().invoke(cli, ["predict", artifact, excel, "-o", "out.csv", *words])
    assert done.exit_code == 0, done.output
    words += ["--target", "label", "--of", "softmax", "--classes", "cat,dog,bird", "--dry-run"]
    done = CliRunner().invoke(cli, ["select", artifact, "--on", excel, *words])
    assert done.exit_code == 0, done.output
    assert "accuracy on 12 rows" in done.output
    plain = str(FILES / "numpy.csv")
    done = CliRunner().invoke(cli, ["predict", artifact, plain, "-o", "all.csv", "--no-header"])
    assert done.exit_code == 0 and "12 rows" in done.output, done.output
    done = CliRunner().invoke(cli, ["predict", artifact, plain, "-o", "none.csv"])
    assert done.exit_code == 2 and "--no-header" in done.output and not Path("none.csv").exists()
