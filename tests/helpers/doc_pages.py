"""Reads the code blocks of a Markdown page, and runs them in order, as a reader would."""

from __future__ import annotations

import contextlib
import glob
import io
import re
import shlex
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from command_server import command_server

from widepack_cli.main import cli

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*?) -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    language: str
    title: str
    code: str
    reason: str  # why the block is not run; empty if it is run
    line: int


def blocks(text: str) -> list[Block]:
    """Returns the fenced code blocks of a page in order."""
    return [
        Block(
            m["language"],
            m["title"] or "",
            m["code"],
            m["reason"] or "",
            text.count("\n", 0, m.start("language")) + 1,
        )
        for m in BLOCK.finditer(text)
    ]


def run_page(text: str, name: str, folder: Path) -> None:
    """Runs the blocks of a page in the current folder, which is `folder`. A block with a title is written to
    a file with that name.

    A `text` block after a block that ran is the expected output. The output must contain each of its lines,
    in this order. Numbers and times may differ, and `...` matches any text.

    `widepack serve` runs until the page ends, on a free port, which `curl` takes for the one of the page.
    """
    with ExitStack() as services:
        _run_blocks(text, name, folder, services)


def _run_blocks(text: str, name: str, folder: Path, services: ExitStack) -> None:
    space: dict[str, Any] = {"__name__": "page"}
    output: str | None = None
    address = ""
    for block in blocks(text):
        where = f"{name}:{block.line}"
        if block.title:
            (folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.reason:
            output = None
        elif block.language == "python":
            output = _run_python(block, where, space)
        elif block.language == "sh":
            output = ""
            for line in _lines(block.code):
                words = shlex.split(line, comments=True)
                if words[:2] == ["widepack", "serve"] and "--check" not in words:
                    server = services.enter_context(command_server(*words[2:]))
                    address, said = server.http, server.line
                elif words[0] == "curl":
                    said = _curl(words[1:], address)
                else:
                    said = run_command(line, where)
                output += said
        elif block.language == "text" and output is not None:
            _compare(block.code, output, where)


def _curl(words: list[str], address: str) -> str:
    """Sends the request of a `curl` command to another address, and returns the answer."""
    path = re.sub(r"^http://[^/]+", "", words[0])
    sent = words[words.index("-d") + 1].encode() if "-d" in words else None
    with urllib.request.urlopen(f"http://{address}{path}", sent, timeout=30) as answer:
        body: bytes = answer.read()
    return body.decode()


def _run_python(block: Block, where: str, space: dict[str, Any]) -> str:
    printed = io.StringIO()
    code = compile("\n" * block.line + block.code, where, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, space)
    return printed.getvalue()


def _lines(code: str) -> list[str]:
    """Returns the commands of a block, without comments."""
    joined = code.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def run_command(line: str, where: str) -> str:
    """Runs one command and returns its output. File names with `*` are expanded as in a shell."""
    words = [
        found
        for word in shlex.split(line, comments=True)
        for found in (sorted(glob.glob(word)) or [word] if "*" in word else [word])  # as a shell does
    ]
    if words[0] == "widepack":
        done = CliRunner().invoke(cli, words[1:], prog_name="widepack")
        assert done.exit_code == 0, f"{where}: {line}\n{done.output}"
        return done.output
    assert words[0] == "python", f"{where}: {line}: mark the block with <!-- not run: reason -->"
    run = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{where}: {line}\n{run.stdout}{run.stderr}"
    return run.stdout


def _compare(expected: str, output: str, where: str) -> None:
    """Checks that the output contains the lines of `expected` in order. Numbers are not compared."""
    rest = [_masked(line) for line in output.splitlines()]
    for line in expected.splitlines():
        pattern = ".*".join(re.escape(part) for part in _masked(line).split("..."))
        at = next((i for i, found in enumerate(rest) if re.fullmatch(pattern, found)), None)
        assert at is not None, f"{where}: the output has no line {line!r} here:\n{output}"
        rest = rest[at + 1 :]


def _masked(line: str) -> str:
    """Replaces each number of a line, and each time or size with its unit, by `#`."""
    line = re.sub(r"sha256:[0-9a-f]+", "#", line)
    line = re.sub(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?( (ms|us|s|kB|MB|GB|B)\b)?", "#", line)
    return re.sub(r"\s+", " ", line).strip()
