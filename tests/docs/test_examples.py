"""Tests that every example of a `--help` text and of a docstring runs, or has a reason why it does not.

Pages are tested in `test_pages.py`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import run_command
from example_stage import MEMBERS, NET, make_stage, modules
from paths import ROOT
from torch import nn

import widepack
from widepack.ir.values import Stacked, Value
from widepack.registry.writer import EagerWriter
from widepack.system.time_limit import TimeLimit
from widepack_cli.main import COMMANDS, cli

FLEET = "tests/docs/test_fleet_pages.py builds and verifies a fleet of adapters"
INT8 = "needs larger layers; tests/cli/test_int8_command.py runs it"
LONG = "measures for minutes; tests/cli/test_bench_layers.py and tests/bench run it with small options"
NOT_RUN = {
    "widepack demo": "trains for half a minute; tests/cli/test_cli.py runs `demo` with small options",
    "widepack build runs/checkpoint-*": "needs folders; tests/checkpoints/test_hugging_face.py builds them",
    "widepack build --base bert/": FLEET,
    "widepack build ckpts/*.pt --dry-run": "needs a widepack.toml; tests/cli/test_cli.py runs it with one",
    "widepack verify fleet.wide": FLEET,
    "widepack verify ens.wide --device cuda": "needs a GPU",
    "widepack verify ens.wide --weights int8": INT8,
    "widepack serve": "runs until it is stopped; tests/helpers/command_server.py starts it",
    "widepack bench ens.wide": "measures for a minute; tests/cli/test_cli.py runs it with a small budget",
    "widepack bench-layers conv2d": LONG,
    "widepack bench-layers all": LONG,
    "widepack bench-suite": LONG,
    "widepack tune ens.wide": "measures for a minute; tests/tuning/test_tune.py runs it with a small budget",
    "widepack advise": "measures for minutes; tests/bench/test_advice.py runs it with a small budget",
    "widepack compile": "needs a compiler and ONNX Runtime; tests/backends/test_aot.py runs it with them",
    "widepack analyze llama/": "needs a folder of Hugging Face; tests/costs/test_architectures.py reads one",
    "widepack export ens.wide --to onnx": "needs the packages of ONNX; tests/exporters runs it with them",
    "widepack calibrate": "measures for half a minute; tests/cli/test_calibrate.py runs it with short blocks",
    "widepack selftest": "runs for minutes; tests/bench/test_selftest.py runs it for some ops",
}
"""Why an example of `--help` is not run. A key is the beginning of a command line."""

RUN = {"widepack serve ens.wide --check"}
"""Examples that run although a key of NOT_RUN is their beginning."""


def help_examples() -> list[str]:
    """Returns the command lines of all `--help` texts."""
    found = []
    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None and command.epilog
        found += [
            line.strip() for line in command.epilog.splitlines() if line.strip().startswith("widepack ")
        ]
    return found


def reason(line: str) -> str:
    """Returns why an example is not run; "" if it is."""
    if line in RUN:
        return ""
    return next((why for start, why in NOT_RUN.items() if line == start or line.startswith(f"{start} ")), "")


HELP = help_examples()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that every example starts from."""
    folder = tmp_path_factory.mktemp("stage")
    with torch.random.fork_rng():
        make_stage(folder)
    return folder


@pytest.fixture
def stage(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a copy of this folder, which is the current one, and from which modules can be imported."""
    folder = tmp_path / "stage"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("WIDEPACK_BUDGET", "0.1")
    before = set(sys.modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield folder
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("line", [line for line in HELP if not reason(line)])
def test_an_example_of_help_runs(line: str, stage: Path) -> None:
    if line.startswith("widepack build "):
        shutil.rmtree("ens.wide")
    if "--target price" in line:  # targets that are numbers need members that answer one number
        shutil.rmtree("ens.wide")
        Path("price.wide").rename("ens.wide")
        line = line.replace("--input x=", "--input input=")
    command = line.partition(" | ")[0]
    run_command(command, line)


def test_few_examples_of_help_are_not_run() -> None:
    reasons = [reason(line) for line in HELP]
    assert sum(not why for why in reasons) >= 40
    used = {start for start in NOT_RUN if any(reason(line) == NOT_RUN[start] for line in HELP)}
    assert used == set(NOT_RUN)


NEEDS_PROCESSES = "needs several processes; tests/distributed/test_ranks.py runs it"
NEEDS_STATE = "needs members with states; docs/how-to/entries-and-state.md runs it"
OWN_CLASS = "needs members that answer a dataclass; tests/inference runs it"
DOC_NOT_RUN = {
    "to_json": "prints the report of the class; every command's --json runs it",
    "DeviceModel": "needs two GPUs; tests/distributed/test_devices.py joins two CPU devices",
    "distributed/rank_model.py:load": NEEDS_PROCESSES,
    "RankModel": NEEDS_PROCESSES,
    "input_values.py:each": "needs members with two inputs; tests/inference runs it",
    "WideEntry": "needs an entry `encode`; docs/how-to/entries-and-state.md runs it",
    "NamedInputs.only": "needs a tokenizer; tests/inference/test_only.py runs it",
    "Output": OWN_CLASS,
    "Output.kind": OWN_CLASS,
    "WideModel.selected_weights": "needs the record of `select`; tests/selection runs it",
    "weight_errors": INT8,
    "WeightError": INT8,
    "flop_formulas.py:formula": "registers an op for the process; tests/registry/test_user_ops.py runs it",
    "register": "registers an op for the process; tests/registry/test_user_ops.py runs it",
    "app": "runs a server until it is stopped; tests/serve runs it",
    "advise": "measures for minutes; tests/bench/test_advice.py runs it with a small budget",
    "bench": "measures for a minute; tests/bench runs it with small options",
    "tune": "measures for a minute; tests/tuning/test_tune.py runs it with a small budget",
    "TuneReport": "measures for a minute; tests/tuning/test_tune.py runs it with a small budget",
    "export": "needs the packages of ONNX; tests/exporters runs it with them",
    "compile": "compiles for a minute; tests/fused/test_fuse_training.py runs it",
    "cascade": "needs the record of `select`, whose own example runs the cascade",
}
"""Why the example of a docstring is not run. A key is its name, or the end of the path with the name."""

LINES_NOT_RUN = {"cuda:": "needs two GPUs", "state=": NEEDS_STATE}
"""Why a line of an example is not run. A key is a part of the line."""

BUILDS = (
    "building/",
    "errors.py:CheckpointError",
    "errors.py:CaptureError",
    "errors.py:LoweringError",
    "Fused.save",
)
"""The examples that write ens.wide."""


def docstrings() -> dict[str, str]:
    """Returns the docstrings with examples, by `path:name` or `path:Class.name`."""
    found = {}
    for folder in ("widepack", "serve", "bench", "artifacts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes: list[tuple[str, ast.AST]] = [("", tree), *_named("", tree)]
            for name, node in nodes:
                text = ast.get_docstring(node) or ""  # type: ignore[arg-type]  # a module, class or function
                if ">>> " in text:
                    found[f"{path.relative_to(ROOT)}:{name}"] = text
    return found


def _named(prefix: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the classes and functions in a node, the methods as `Class.name`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield f"{prefix}{child.name}", child
            yield from _named(f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix, child)
        else:
            yield from _named(prefix, child)


DOCS = docstrings()


def doc_reason(key: str) -> str:
    """Returns why the example of a docstring is not run; "" if it is."""
    return next((why for k, why in DOC_NOT_RUN.items() if key.endswith((f":{k}", f"/{k}", f".{k}"))), "")


def space_of(key: str) -> dict[str, Any]:
    """Returns the names that examples use without a definition."""
    make = modules(NET)["make"]
    x = torch.randn(3 if "route" in key else 16, 16 if "/fused/" in key or "/optim/" in key else 64)
    models = [make() for _ in range(3)]
    space: dict[str, Any] = {
        "EagerWriter": EagerWriter, "TimeLimit": TimeLimit, "torch": torch, "nn": nn,
        "json": json, "widepack": widepack, "x": x, "models": models, "Net": make,
        **{name: getattr(widepack.primitives, name) for name in ("WideLinear", "WideConv2d", "WideLSTM")},
    }  # fmt: skip  # names in a few lines
    if "/registry/" in key or "ir/values" in key:
        space |= {"w": EagerWriter(3), "x": Stacked(Value(None, torch.ones(3, 5, 4))),
                  "draw": widepack.primitives.Draw(0)}  # fmt: skip  # names in a few lines
    space["layer"] = widepack.primitives.WideLinear.from_modules([nn.Linear(64, 10) for _ in range(8)])
    if "/fused/" in key or "/optim/" in key:
        fused = widepack.fuse(models, x)
        optimizer = widepack.optim.SGD(fused.parameters(), lr=0.1)
        y = fused(x)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        space |= {"fused": fused, "y": y, "loss": y.square().mean(), "optimizer": optimizer,
                  "scheduler": scheduler, "losses": [0.1, 0.2, 0.3], "x0": x, "x1": x + 1, "x2": x + 2,
                  "batch": {"x": x, "label": x[:, 0]}}  # fmt: skip  # names in a few lines
        torch.save(fused.state_dict(), "run.pt")
        space["models"] = [make() for _ in range(3)]
    else:
        space |= {"ens": widepack.load("ens.wide"), "xs": torch.randn(len(MEMBERS), 16, 64)}
    return space


def runs(key: str) -> list[tuple[str, str]]:
    """Returns the statements of a docstring with what they print."""
    return [(e.source, e.want) for e in doctest.DocTestParser().get_examples(DOCS[key])]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("key", [key for key in DOCS if not doc_reason(key)])
def test_an_example_of_a_docstring_runs(key: str, stage: Path) -> None:
    space = space_of(key)
    if any(part in key for part in BUILDS):
        shutil.rmtree("ens.wide")
    for source, want in runs(key):
        if any(part in source for part in LINES_NOT_RUN):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, key, "single"), space)
        if want:
            assert masked(printed.getvalue()) == masked(want), (key, source, printed.getvalue())


def masked(text: str) -> str:
    """Replaces numbers, which depend on the model."""
    return re.sub(r"\d+", "#", " ".join(text.split()))


def test_few_examples_of_docstrings_are_not_run() -> None:
    skipped = {key: doc_reason(key) for key in DOCS if doc_reason(key)}
    assert len(skipped) <= 30 < len(DOCS) - len(skipped)
    assert all(any(key.endswith((f":{k}", f"/{k}", f".{k}")) for key in DOCS) for k in DOC_NOT_RUN)


def test_the_files_that_reasons_name_exist() -> None:
    reasons = " ".join([*NOT_RUN.values(), *DOC_NOT_RUN.values(), *LINES_NOT_RUN.values()])
    named = set(re.findall(r"\b(?:tests|docs)/[\w/.-]+\.(?:py|md)", reasons))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).is_file()]
