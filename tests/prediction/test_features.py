"""Tests feature names: an artifact keeps them, and columns of files are read by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import widepack
from prediction.members import Net, exact
from prediction.test_refusals import refused
from widepack import UsageError
from widepack.building.features import features_of
from widepack.inference.feature_record import read_features
from widepack.inference.model import WideModel
from widepack_cli.main import cli

NAMES = ("age", "height", "a,b", "d", "e", "f")
ONE, TWO = {"x": "float32[B,4]"}, {"x": "float32[B,2]", "y": "float32[B]", "ids": "int64[B,T]"}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns four members whose input x [B, 6] has feature names."""
    folder = tmp_path_factory.mktemp("features")
    paths = []
    for i in range(4):
        torch.manual_seed(i)
        paths.append(folder / f"m{i}.pt")
        torch.save(Net().state_dict(), paths[-1])
    options: dict[str, Any] = {"inputs": ["x=float32[B,6]"], "pt2": False, "budget": 0}
    widepack.build(paths, folder / "e.wide", model=Net, features=NAMES, **options)
    return widepack.load(folder / "e.wide")


def table(pa: Any, names: tuple[str, ...], x: torch.Tensor) -> Any:
    return pa.table({n: x[:, k].tolist() for k, n in enumerate(names)})


def answers(net: WideModel, source: str, **options: Any) -> torch.Tensor:
    widepack.predict(net, source, "out.npy", force=True, **options)
    return torch.from_numpy(np.load("out.npy")).movedim(1, 0).double()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_are_read_by_name(
    ending: str, folder: Path, net: WideModel, pa: Any, x: torch.Tensor
) -> None:
    assert read_features(net.manifest) == {"x": NAMES}
    turned = (
        table(pa, NAMES, x).select(list(reversed(NAMES))).append_column("label", pa.array([1.5] * len(x)))
    )
    if ending == "csv":
        pa.csv.write_csv(turned, "in.csv")
    else:
        pa.parquet.write_table(turned, "in.parquet")
    torch.testing.assert_close(answers(net, f"in.{ending}"), exact(net, x), rtol=1e-5, atol=1e-5)
    whole = turned.append_column("kind", pa.array([0.5] * len(x)))
    pa.parquet.write_table(whole, "val.parquet")
    report = widepack.predict(net, f"in.{ending}", "o.parquet", reduce="mean")
    assert report.inputs == {"x": NAMES} and "label" in report.columns


def test_missing_columns_and_other_names(folder: Path, net: WideModel, pa: Any, x: torch.Tensor) -> None:
    others = ("Age", *NAMES[1:])
    pa.csv.write_csv(table(pa, others, x), "in.csv")
    words = (
        r"in.csv: there is no column 'age'; did you mean Age\?\nBy the artifact, the input x has the "
        r"features age, height, .*\nName other columns in this order with inputs= \(--input x=...\)"
    )
    refused(UsageError, words, net, "in.csv", "o.csv")
    notes: list[str] = []
    found = answers(net, "in.csv", inputs={"x": list(others)}, note=notes.append)
    torch.testing.assert_close(found, exact(net, x), rtol=1e-5, atol=1e-5)
    assert notes == [
        "input x is read from Age, height, a,b, d, e, f, which the artifact calls age, height, a,b, d, e, f"
    ]
    pa.csv.write_csv(table(pa, NAMES, x), "in.csv")
    refused(UsageError, "columns of input x are f, e, .* and the artifact has them in the order age, height",
            net, "in.csv", "o.csv", inputs={"x": list(reversed(NAMES))})  # fmt: skip  # a call in two lines
    torch.testing.assert_close(
        answers(net, "in.csv", inputs={"x": list(NAMES)}), exact(net, x), rtol=1e-5, atol=1e-5
    )


def test_files_without_names_of_columns(folder: Path, net: WideModel, pa: Any, x: torch.Tensor) -> None:
    """Arrays, lists and CSV files without a header have an order alone."""
    np.save("in.npy", x.numpy())
    np.savetxt("in.csv", x.numpy(), delimiter=",")
    pa.parquet.write_table(pa.table({"z": pa.array(x.tolist(), pa.list_(pa.float32(), 6))}), "in.parquet")
    for source, options in (("in.npy", {}), ("in.csv", {"header": False}), ("in.parquet", {})):
        torch.testing.assert_close(answers(net, source, **options), exact(net, x), rtol=1e-5, atol=1e-5)


def test_evaluate_and_select_read_by_name(folder: Path, net: WideModel, pa: Any, x: torch.Tensor) -> None:
    path = str(net.__reduce__()[0].args[0])  # type: ignore[attr-defined]
    kinds = pa.array([k % 3 for k in range(len(x))])
    right = table(pa, NAMES, x).append_column("kind", kinds)
    pa.parquet.write_table(right, "a.parquet")
    pa.parquet.write_table(right.select(["kind", *reversed(NAMES)]), "b.parquet")
    options: dict[str, Any] = {"target": "kind", "of": "softmax"}
    one, other = (widepack.evaluate(path, f, **options).ensemble for f in ("a.parquet", "b.parquet"))
    assert one == other
    pa.parquet.write_table(right.rename_columns(["years", *NAMES[1:], "kind"]), "c.parquet")
    for run in (widepack.evaluate, widepack.select):
        with pytest.raises(UsageError, match="there is no column 'age'"):
            run(path, "c.parquet", **options)


def test_an_artifact_that_changes_keeps_its_names(folder: Path, net: WideModel, tmp_path: Path) -> None:
    torch.manual_seed(9)
    torch.save(Net().state_dict(), "new.pt")
    path = str(net.__reduce__()[0].args[0])  # type: ignore[attr-defined]
    widepack.update(path, {"m1": "new.pt"}, out=tmp_path / "u.wide")
    assert read_features(widepack.load(tmp_path / "u.wide").manifest) == {"x": NAMES}


@pytest.mark.parametrize(
    ("features", "inputs", "found"),
    [
        (None, ONE, {}),
        ("f0..f3", ONE, {"x": ("f0", "f1", "f2", "f3")}),
        (' a , "b,c", d, e', ONE, {"x": ("a", "b,c", "d", "e")}),
        (["a", "b", "c", "d"], ONE, {"x": ("a", "b", "c", "d")}),
        ({"x": "a,b", "y": ["z"]}, TWO, {"x": ("a", "b"), "y": ("z",)}),
        (["a"], {"y": "float32[B]", "ids": "int64[B,T]"}, {"y": ("a",)}),
    ],
)
def test_names_that_are_taken(features: Any, inputs: dict[str, str], found: Any) -> None:
    assert features_of(features, inputs) == found


@pytest.mark.parametrize(
    ("features", "inputs", "words"),
    [
        ("a,b,c", ONE, r"the input x is float32\[B,4\], which takes 4 names; 3 given"),
        (["a", 2, 3], ONE, "takes 4 names; 3 given: a, 2, 3"),
        (list("abcdey"), ONE, r"6 given: a, b, (.|\n)*--features x=b,c,\.\.\."),
        ("a,b,c,a", ONE, "two features of the input x are called 'a'"),
        ("a,b,c,", ONE, "'' is no name of a feature"),
        ('a,b,"c,d', ONE, "where a quote has no end"),
        ("a,b", TWO, r"for no input, and the inputs are x, y; name the input: .*--features x=a,b,c"),
        ({"z": "a,b"}, TWO, "there is no input 'z'; the inputs are x, y, ids"),
        ({"ids": "a,b"}, TWO, "the input ids is .*, whose rows have no fixed number of numbers"),
        (["a", 2, "c", "d"], ONE, "'2' is no name of a feature"),
    ],
)
def test_names_that_are_refused(features: Any, inputs: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        features_of(features, inputs)


def test_the_command(folder: Path, pa: Any) -> None:
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef make() -> nn.Module:\n    return nn.Linear(2, 1)\n", encoding="utf-8"
    )
    for i in range(2):
        torch.manual_seed(i)
        torch.save(nn.Linear(2, 1).state_dict(), f"m{i}.pt")
    build = ["build", "m0.pt", "m1.pt", "--model", "net.py:make", "--input", "input=float32[B,2]", "--no-pt2"]
    build += ["--budget", "0", "-o", "e.wide"]

    def done(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, list(words), prog_name="widepack")
        assert result.exit_code == code, result.output
        return result.output

    many = done("build", "no.pt", *build[2:], "--features", "a,b,c", code=2)  # before any checkpoint is read
    assert "takes 2 names; 3 given: a, b, c\n" in many and "--features input=a,b,..." in many
    assert "give --features once" in done(*build, "--features", "a", "--features", "b", code=2)
    Path("train.csv").write_text("age,height\n1,2\n", encoding="utf-8")
    done(*build, "--features", "input=train.csv")
    assert "features: input ['age', 'height']" in done("inspect", "e.wide")
    Path("in.csv").write_text("height,age\n2,1\n", encoding="utf-8")
    done("predict", "e.wide", "in.csv", "-o", "by_name.csv")
    done("predict", "e.wide", "train.csv", "-o", "in_order.csv")
    assert Path("by_name.csv").read_bytes() == Path("in_order.csv").read_bytes()
    Path("in.csv").write_text("height,years\n2,1\n", encoding="utf-8")
    assert "there is no column 'age'" in done("predict", "e.wide", "in.csv", "-o", "no.csv", code=2)
    assert not Path("no.csv").exists()
