"""Tests `--weights int8` and `--max-error` of `widepack verify` and `widepack serve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from loaded import saved
from torch import nn

from widepack_cli.main import cli


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words], prog_name="widepack")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    saved(lambda: nn.Linear(512, 512), folder, "input=float32[B,512]", members=2)
    return folder / "e.wide"


def test_verify_shows_the_largest_error(wide: Path) -> None:
    done = run("verify", wide, "--weights", "int8")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert "int8; forward, " in line
    assert "of the answer's rms" in line
    plain = run("verify", wide)
    assert plain.exit_code == 0, plain.output
    assert not [line for line in plain.stdout.splitlines() if line.startswith("weights")]


def test_verify_fails_over_the_limit(wide: Path) -> None:
    done = run("verify", wide, "--weights", "int8", "--max-error", "1e-6")
    assert done.exit_code == 1, done.output
    assert "max_error is 1e-06" in done.stderr
    document = json.loads(run("verify", wide, "--weights", "int8", "--max-error", "1e-6", "--json").stdout)
    assert document["ok"] is False
    assert "int8" in document["error"]
    assert run("verify", wide, "--weights", "int8", "--max-error", "0.5").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-error", "0.1"), "give weights='int8' too"),
        (("--weights", "int4"), "'int4' is not 'int8'"),
        (("--weights", "int8", "--max-error", "0"), "max_error=0.0 is not a limit"),
        (("--weights", "int8", "--dtype", "bf16"), "load with dtype='fp32'"),
        (("--weights", "int8", "--model", "net.py:make"), "--weights cannot be used with --model"),
    ],
)
def test_wrong_options_end_with_2(wide: Path, words: tuple[str, ...], message: str) -> None:
    done = run("verify", wide, *words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_runs_int8_weights(wide: Path) -> None:
    pytest.importorskip("starlette")
    done = run("serve", wide, "--check", "--weights", "int8", "--max-error", "0.5")
    assert done.exit_code == 0, done.output
    refused = run("serve", wide, "--check", "--weights", "int8", "--max-error", "1e-6")
    assert refused.exit_code == 1, refused.output
    assert "max_error is 1e-06" in refused.stderr
