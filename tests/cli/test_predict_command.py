"""Tests `widepack predict`: exit codes, the stream of each message, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support import Artifacts

import widepack
from widepack_cli.main import cli

ROWS = 300


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["predict", *(str(w) for w in words)], prog_name="widepack")


@pytest.fixture
def artifact(artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an artifact, and makes an empty folder with in.csv the current one."""
    pytest.importorskip("pyarrow", reason="CSV files need pyarrow, from the extra predict")
    path = artifacts("mlp").resolve()
    monkeypatch.chdir(tmp_path)
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0))
    lines = [",".join(["id", *(f"f{k}" for k in range(64))])]
    lines += [",".join([f"{i:04d}", *map(str, row)]) for i, row in enumerate(x.tolist())]
    Path("in.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_run_and_its_report(artifact: Path) -> None:
    result = run(artifact, "in.csv", "-o", "out.csv", "--id", "id", "--reduce", "mean,std", "--of", "softmax")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "wrote out.csv: 300 rows, 3 columns: id, output.mean, output.std\n2 batches of 256 rows in"
    )
    assert (
        "input input is read from 64 columns in the file's order: f0, f1, f2, f3, f4, f5, f6, f7 and 56 more"
        in result.stderr
    )
    assert "input input" not in result.stdout
    rows = Path("out.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == ROWS + 1
    assert [r.split(",")[0] for r in rows[1:]] == [f'"{i:04d}"' for i in range(ROWS)]


def test_json_is_alone_on_standard_output(artifact: Path) -> None:
    result = run(
        artifact, "in.csv", "-o", "out.parquet", "--input", "input=f0..f63", "--batch", "100", "--json"
    )
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert set(report) == set(widepack.PredictReport.__dataclass_fields__)
    assert (report["rows"], report["batches"], report["inputs"]["input"][-1]) == (ROWS, 3, "f63")
    assert report["rows_per_s"] == pytest.approx(ROWS / report["seconds"])


@pytest.mark.parametrize(
    ("code", "words", "error"),
    [
        (2, ["in.csv", "-o", "out.xls"], "output out.xls: the ending .xls names no known format"),
        (2, ["no.csv", "-o", "out.csv"], "input no.csv: there is no such file"),
        (2, ["in.csv", "-o", "no/out.csv"], "no/out.csv: the folder no does not exist"),
        (2, ["in.csv", "-o", "in.csv", "--force"], "in.csv is the input file"),
        (2, ["in.csv"], "Missing option '-o'"),
        (2, ["in.csv", "-o", "out.csv"], "65 columns of numbers are left: id, f0"),
        (2, ["in.csv", "-o", "out.csv", "--input", "f0..f63"], "'f0..f63' is not NAME=COLUMNS"),
        (2, ["in.csv", "-o", "out.csv", "--input", "input=f0", "--input", "input=f1"], "is named twice"),
        (2, ["in.csv", "-o", "out.csv", "--input", "input=f0..f64"], "there is no column 'f64'"),
        (2, ["in.csv", "-o", "out.csv", "--id", "id", "--reduce", "entropy"], "entropy needs probabilities"),
        (2, ["in.csv", "-o", "out.csv", "--id", "id", "--batch", "0"], "'--batch'"),
        (2, ["in.csv", "-o", "out.csv", "--id", "id", "--entry", "encode"], "there is no entry 'encode'"),
        (2, ["in.csv", "-o", "out.csv", "--member", "tenant"], "there is no column 'tenant'"),
        (1, ["in.csv", "-o", "out.csv", "--member", "id", "--input", "input=f0..f63"], "in.csv: row 8 (the"),
        (1, ["bad.csv", "-o", "out.csv", "--input", "input=a"], "bad.csv: row 1 (the first row is 0)"),
    ],
)  # fmt: skip
def test_errors(code: int, words: list[str], error: str, artifact: Path) -> None:
    Path("bad.csv").write_text("a\n1\n2,3\n", encoding="utf-8")
    result = run(artifact, *words)
    assert result.exit_code == code, result.output
    paragraph = result.stderr.rpartition("Error: ")[2]
    assert error in paragraph, result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert not Path("out.csv").exists()
    assert not [p for p in Path().iterdir() if p.name.startswith(".widepack")]


def test_an_existing_output_is_kept_without_force(artifact: Path) -> None:
    Path("out.npy").write_text("mine", encoding="utf-8")
    words: list[str | Path] = [
        artifact,
        "in.csv",
        "-o",
        "out.npy",
        "--input",
        "input=f0..f63",
        "--reduce",
        "mean",
    ]
    refused = run(*words)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert Path("out.npy").read_text(encoding="utf-8") == "mine"
    done = run(*words, "--force")
    assert done.exit_code == 0, done.output
    assert "not passed on: id, since a .npy file has one array" in done.stderr
    assert Path("out.npy").read_bytes()[:6] == b"\x93NUMPY"


def test_members_of_rows(artifact: Path) -> None:
    lines = Path("in.csv").read_text(encoding="utf-8").splitlines()
    lines = [lines[0] + ",who", *(f"{line},{i % 8}" for i, line in enumerate(lines[1:]))]
    Path("in.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["--input", "input=f0..f63", "--member", "who", "--name", "score"]
    result = run(artifact, "in.csv", "-o", "out.safetensors", *words)
    assert result.exit_code == 0, result.output
    from safetensors.torch import load_file

    ens = widepack.load(artifact)
    x = torch.tensor([[float(v) for v in line.split(",")[1:65]] for line in lines[1:]])
    expected = ens.route(x, member=[i % 8 for i in range(ROWS)])
    torch.testing.assert_close(load_file("out.safetensors")["score"], expected, rtol=1e-5, atol=1e-6)
