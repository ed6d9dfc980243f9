"""Tests that the tables of docs/how-to/serve-http.md are those of the server. tests/docs runs its code."""

from __future__ import annotations

import re

from paths import ROOT

from widepack_cli.commands.serve import command
from widepack_serve.errors import RequestError
from widepack_serve.metrics import Metrics
from widepack_serve.rest.models import WrongMethod

PAGE = (ROOT / "docs" / "how-to" / "serve-http.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_metrics_are_those_of_the_server() -> None:
    named = re.findall(r"^\| `(widepack_\w+)` \|", section("Metrics"), re.MULTILINE)
    families = list(Metrics().registry.collect())
    assert sorted(named) == sorted(f.name + "_total" * (f.type == "counter") for f in families)


def test_the_statuses_are_those_of_the_errors() -> None:
    def statuses(kind: type[RequestError]) -> set[int]:
        return {kind.status}.union(*(statuses(k) for k in kind.__subclasses__()))

    assert issubclass(WrongMethod, RequestError)
    rows = re.findall(r"^\| (\d+) \|", section("Limits and errors"), re.MULTILINE)
    assert [int(r) for r in rows] == sorted(statuses(RequestError))


def test_the_options_exist_and_their_defaults_are_right() -> None:
    options = {name: p for p in command.params for name in (*p.opts, *p.secondary_opts)}
    used = set(re.findall(r"`(?:widepack serve [^`]*?)?(--[a-z-]+)[^`]*`", PAGE)) - {"--build-arg"}
    assert used <= set(options)
    limits = section("Limits and errors") + section("Limits")
    for option, text in {
        "--max-body": "64 MB",
        "--max-queue": "1024 rows",
        "--max-connections": "4096",
        "--receive-timeout": "60 s",
        "--timeout": "30 s",
    }.items():
        assert f"`{option}`, {text}" in limits or f"`{option}` | {text}" in limits
        assert str(options[option].default).lower() == text.split(" rows")[0].replace(" ", "").lower()
    for text in ("`--drain 5s`", "`--hang 60s`"):
        assert text in PAGE and options[text[1:-1].split()[0]].default == text[1:-1].split()[1]


def test_the_files_to_deploy_are_named() -> None:
    files = {p.name for p in (ROOT / "examples" / "deploy").iterdir()}
    named = set(re.findall(r"examples/deploy/([\w.-]+)\)", section("Deploy")))
    assert named | {"triton", "README.md", ".dockerignore"} == files
