"""Tests the groups of options in --help, shell completion, and a start without NumPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors import safe_open
from support import Artifacts

from widepack_cli.main import cli
from widepack_cli.shared.option_groups import GroupedCommand

MAIN = "from widepack_cli.main import main; main()"


def process(code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("name", ["build", "serve"])
def test_options_are_grouped_by_purpose(name: str) -> None:
    command = import_module(f"widepack_cli.commands.{name}").command
    assert isinstance(command, GroupedCommand)
    text = CliRunner().invoke(cli, [name, "--help"]).stdout
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles[: len(command.groups) + 1] == [*command.groups, "Options"]
    names = [n for group in command.groups.values() for n in group]
    options = {p.name: p for p in command.params}
    assert set(names) <= set(options) and len(set(names)) == len(names)
    for parameter in options.values():
        for flag in parameter.opts if parameter.param_type_name == "option" else ():
            shown = re.findall(rf"^  (?:-\w, )?{re.escape(flag)}(?![\w-])", text, re.MULTILINE)
            assert len(shown) == 1 or not flag.startswith("--"), flag


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("widepack bu", "plain,build"),
        ("widepack serve --grpc", "plain,--grpc-port"),
        ("widepack build --feat", "plain,--features"),
    ],
)
def test_shells_complete_commands_and_options(words: str, found: str) -> None:
    count = str(len(words.split()) - 1)
    env = {"_WIDEPACK_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = process(MAIN, **env)
    assert found in done.stdout.splitlines(), done.stderr
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    assert "_WIDEPACK_COMPLETE=bash_source widepack" in page.read_text(encoding="utf-8")
    source = process(MAIN, _WIDEPACK_COMPLETE="zsh_source").stdout
    assert "compdef" in source and "widepack" in source


@pytest.mark.parametrize(
    "words", [["verify"], ["serve", "--check"], ["export", "--to", "pt2", "-o", "e.pt2"]]
)
def test_commands_without_numpy_print_no_warning(
    words: list[str], artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "serve" in words:
        pytest.importorskip("uvicorn")
    path = str(artifacts("mlp").resolve())
    monkeypatch.chdir(tmp_path)
    done = process("import sys; sys.modules['numpy'] = None; " + MAIN, words[0], path, *words[1:])
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr + done.stdout and "Warning" not in done.stderr


def test_an_extracted_file_says_that_it_is_of_pytorch(artifacts: Artifacts, tmp_path: Path) -> None:
    """Older versions of transformers refuse files without this word."""
    out = tmp_path / "m.safetensors"
    result = CliRunner().invoke(cli, ["extract", str(artifacts("mlp")), "0", "-o", str(out)])
    assert result.exit_code == 0, result.output
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
