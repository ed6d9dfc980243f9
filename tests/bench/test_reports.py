"""Tests the documents, pages and commands of the benchmark, and the memory of processes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from support import Artifacts

import cases
from widepack_bench import bench
from widepack_bench.measure import race as noise
from widepack_bench.measure.figures import Ceilings, Memory, Roof, Start, Work
from widepack_bench.processes.contestant import resident
from widepack_bench.report.document import Report
from widepack_bench.report.environment import environment
from widepack_bench.report.html import page
from widepack_bench.report.row import Row
from widepack_cli.main import cli

# ---------------------------------------------------------------- documents and pages


def fault(value: Any, schema: Any, root: Any, at: str = "$") -> str:
    """Returns the first error of a value under a JSON schema, or an empty text.

    It knows only the keywords that widepack's schemas use.
    """
    known = {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "description",
        "title",
        "$schema",
        "$defs",
    }
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return fault(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        faults = [fault(value, option, root, at) for option in schema["anyOf"]]
        return "" if "" in faults else "; ".join(faults)
    if "const" in schema and value != schema["const"]:
        return f"{at} is {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} is {value!r}"
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "integer": int,
        "boolean": bool,
        "null": type(None),
    }
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(
        isinstance(value, types[w]) and (w == "boolean" or not isinstance(value, bool)) for w in wanted
    ):
        return f"{at} is a {type(value).__name__}"
    if isinstance(value, dict):
        if missing := set(schema.get("required", ())) - set(value):
            return f"{at} lacks {sorted(missing)}"
        for key, inner in value.items():
            under = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            if under is False:
                return f"{at} has {key}"
            if under is not True and (wrong := fault(inner, under, root, f"{at}.{key}")):
                return wrong
    if isinstance(value, list):
        return next(
            (w for i, v in enumerate(value) if (w := fault(v, schema.get("items", {}), root, f"{at}[{i}]"))),
            "",
        )
    return ""


def full_report() -> Report:
    """Returns a report with a value in every field, without a measurement."""
    names = (noise.OURS, noise.AGAIN, "widepack[eager]", "level loop", "loop", "vmap")
    rounds = tuple((1e6, 1e6, 1.1e6, 2e6, 2e6 + i % 3 * 1e4, 1.5e6) for i in range(40))
    race = noise.Race(names, rounds, 2, tuple(tuple(row[k] for row in rounds) for k in range(len(names))))
    memory: dict[str, Memory | str] = {"widepack": Memory(1_000_000, 2_000_000), "loop": "no <figure>"}
    roof = Roof(Work(2_000_000, 1_000_000, 3_000_000, 4), Ceilings(33e9, 50e9), 1.0)
    row = replace(
        Row.of(2, {"B": 2, "T": 33}, race, {"vmap-compiled": "no compiler"}, 8), memory=memory, roof=roof
    )
    start: dict[str, Start | str] = {"widepack": Start(12.5, 900.0, 3), "loop": "it is <unknown>"}
    where = environment("cpu", 1)
    return Report("a<b>.wide", 8, "each", "your own modules", (row,), {64: "too <large>"}, where, start=start)


def test_the_document_matches_its_schema(artifacts: Artifacts) -> None:
    schema = json.loads(resources.files("widepack_bench").joinpath("schema.json").read_text(encoding="utf-8"))
    measured = bench(
        artifacts("mlp"),
        batches=(2,),
        baselines=("loop", "cuda-graph-loop"),
        budget_s=0.2,
        threads=1,
        roofline=True,
    )
    assert fault(json.loads(json.dumps(measured.to_json(), allow_nan=False)), schema, schema) == ""
    document = json.loads(json.dumps(full_report().to_json(), allow_nan=False))
    assert fault(document, schema, schema) == ""
    for path, words in (
        (("environment", "threads"), "lacks"),
        (("rows", 0, "ratio", "low"), "lacks"),
        (("rows", 0, "roofline", "share"), "lacks"),
    ):
        broken = copy.deepcopy(document)
        inner: Any = broken
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        assert words in fault(broken, schema, schema), path
    assert "has more" in fault({**document, "more": 1}, schema, schema)
    assert "rows[0].verdict" in fault(
        {**document, "rows": [{**document["rows"][0], "verdict": "won"}]}, schema, schema
    )
    table = full_report().table()
    assert (
        "1.00 MB" in table
        and "start-up of widepack: 12.5 ms" in table
        and "start-up of loop: not measured: it is <unknown>" in table
    )


def test_the_page_is_one_file() -> None:
    from html.parser import HTMLParser

    text = page(full_report().to_json())
    opened: list[str] = []
    closed: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            opened.append(tag)
            assert not {"src", "href", "onclick"} & {k for k, _ in attrs}, "the page fetches a file"

        def handle_endtag(self, tag: str) -> None:
            closed.append(tag)

    Reader().feed(text)
    assert opened.count("svg") == closed.count("svg") >= 3 and "script" not in opened and "link" not in opened
    assert "http" not in text and "url(" not in text and "prefers-color-scheme: dark" in text
    assert "a&lt;b&gt;.wide" in text and "<b>" not in text and "too &lt;large&gt;" in text
    assert "of the roofline" in text and "widepack[eager]" in text


# ---------------------------------------------------------------- memory and start-up


def test_the_memory_of_a_process_is_read_from_the_system() -> None:
    private, mapped = resident()
    values = torch.ones(25_000_000)
    more, _ = resident()
    assert private > 0 and mapped > 0 and more - private > 0.9 * values.nbytes


@pytest.mark.slow
def test_memory_and_start_up_in_separate_processes(artifacts: Artifacts, tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "batches": (2,),
        "baselines": ("loop",),
        "budget_s": 0.3,
        "threads": 1,
        "alone": True,
    }
    report = bench(artifacts("mlp"), factory="cases.mlp:model", **words)
    wide, loop = (report.rows[0].memory[name] for name in ("widepack", "loop"))
    assert isinstance(wide, Memory) and isinstance(loop, Memory)
    assert loop.private_bytes > 1_000_000, (
        "the modules of the loop do not store their weights in private memory"
    )
    for name in ("widepack", "loop"):
        start = report.start[name]
        assert isinstance(start, Start) and 1 < start.median_ms < 60_000 and start.torch_ms > 10
    case = cases.load("mlp")
    given = bench(artifacts("mlp"), factory=lambda state: case.model(), **words)
    assert "the modules are objects" in str(
        given.rows[0].memory["loop"]
    ) and "a loop starts from checkpoints" in str(given.start["loop"])


# ---------------------------------------------------------------- the command


def command(*words: Any) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, ["bench", *map(str, words)])


def test_command_of_a_profile(artifacts: Artifacts, tmp_path: Path) -> None:
    done = command(
        artifacts("mlp"),
        "--profile",
        "--batch",
        "2",
        "--threads",
        "1",
        "--trace",
        tmp_path / "t.json",
        "--json",
        tmp_path / "p.json",
    )
    assert done.exit_code == 0, done.output
    assert "the nodes of the members' own programs" in done.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "p.json").read_text())["profiles"][0]["batch"] == 2


def test_command_writes_a_page(artifacts: Artifacts, tmp_path: Path) -> None:
    words = ("--batch", "2", "--baseline", "loop", "--budget", "0.3", "--threads", "1", "--backend", "eager")
    done = command(artifacts("mlp"), *words, "--html", tmp_path / "r.html")
    assert done.exit_code in (0, 1), done.output  # 1: the machine is too busy
    assert "backend eager" in done.output and "p99" in done.output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'ARTIFACT'"),
        (("x.wide", "--suite", "cpu"), "No such option '--suite'"),
        (("x.wide", "--rows", "vit"), "No such option '--rows'"),
        (("x.wide", "--model-arg", "a=1"), "--model-arg is an argument of the factory: give --model, too"),
        (("x.wide", "--html", "."), ". is a folder"),
        (
            ("x.wide", "--profile", "--backend", "eager", "--full"),
            "--profile and --trace cannot be used with --full, --backend",
        ),
        (("x.wide", "--tune"), "No such option '--tune'"),
    ],
)
def test_command_refuses(words: Sequence[str], message: str) -> None:
    done = command(*words)
    assert done.exit_code == 2 and message in done.output
