"""Reads the files of examples/deploy: the Dockerfile, YAML, and Triton's configurations."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from paths import ROOT

from widepack_cli.commands.serve import command

DEPLOY = ROOT / "examples" / "deploy"


@dataclass
class Stage:
    """The last stage of a Dockerfile: what a container runs."""

    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    copied: list[list[str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields the instructions of a Dockerfile: their names, and the rest."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name, rest.strip()


def last_stage(text: str) -> Stage:
    """Returns the last stage of a Dockerfile. Its commands must be in the exec form, which is JSON."""
    stage = Stage()
    for name, rest in instructions(text):
        if name == "FROM":
            stage = Stage()
        elif name == "ENV":
            stage.env |= {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(rest)}
        elif name == "USER":
            stage.user = rest
        elif name == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif name == "CMD":
            stage.arguments = json.loads(rest)
        elif name == "HEALTHCHECK":
            stage.health = json.loads(rest.split("CMD", 1)[1])
        elif name == "COPY":
            stage.copied.append(shlex.split(rest))
        else:
            stage.others.append(f"{name} {rest}")
    return stage


def documents(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file."""
    return [d for d in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")) if d is not None]


def served(arguments: list[str]) -> dict[str, Any]:
    """Returns the options that `widepack serve` reads from its arguments. Raises: click.UsageError."""
    return dict(command.make_context("serve", list(arguments)).params)


def seconds_to_end(arguments: list[str]) -> float:
    """Returns the longest time that a server with these arguments takes after SIGTERM."""
    options = served(arguments)
    return float(options["drain"] + options["timeout"]) + 5


_TOKEN = re.compile(r'\s*(?:(?P<text>"[^"]*")|(?P<word>[\w.+-]+)|(?P<mark>[:{}\[\],]))')


def configuration(text: str) -> dict[str, list[Any]]:
    """Reads a message in protobuf's text format, as in config.pbtxt. Returns: the values of each field."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    words = [m[0].strip() for m in _TOKEN.finditer(text)]
    assert "".join(words) == re.sub(r'\s+(?=(?:[^"]*"[^"]*")*[^"]*$)', "", text)
    message, rest = _message(words)
    assert not rest
    return message


def _message(words: list[str]) -> tuple[dict[str, list[Any]], list[str]]:
    message: dict[str, list[Any]] = {}
    while words and words[0] != "}":
        name, words = words[0], words[1:]
        if words[0] == ":":
            words = words[1:]
        value, words = _value(words)
        message.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return message, words


def _value(words: list[str]) -> tuple[Any, list[str]]:
    first, words = words[0], words[1:]
    if first == "{":
        message, words = _message(words)
        assert words[0] == "}"
        return message, words[1:]
    if first == "[":
        values = []
        while words[0] != "]":
            value, words = _value(words)
            values.append(value)
            words = words[1:] if words[0] == "," else words
        return values, words[1:]
    if first.startswith('"'):
        return first[1:-1], words
    return (int(first) if re.fullmatch(r"-?\d+", first) else first), words
