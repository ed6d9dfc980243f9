"""Tests that the code of docs/how-to/run-without-widepack.md gives the answers of `ens(x)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from support import Artifacts, fresh, leaves, must, stack

import cases
from widepack import Output, build, load
from widepack_artifacts.reader import Reader

PAGE = (ROOT / "docs" / "how-to" / "run-without-widepack.md").read_text(encoding="utf-8")
LINES = PAGE.partition("<!-- tests/exporters/test_without_widepack.py runs these lines")[2].partition(
    "```python\n"
)[2]
LINES = LINES.partition("y = model(x)\n```")[0]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("widepack"):
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
for name in ("widepack", "widepack_artifacts"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} could be imported")
"""
CALLS = """
with torch.no_grad():
    answers = [model(*args, **kwargs) for args, kwargs in torch.load("calls.pt")]
torch.save(answers, "answers.pt")
"""
EACH_FOLDER = """
import os, pathlib, torch, traceback

torch.set_num_threads(1)
for folder in sys.argv[1:]:
    os.chdir(folder)
    try:
        exec(pathlib.Path("lines.py").read_text(), {})
    except Exception:
        pathlib.Path("error.txt").write_text(traceback.format_exc())
"""
Calls = list[tuple[Any, Any]]


def outside(jobs: Sequence[tuple[Path, Path, str, Calls]]) -> None:
    """Runs the code of the page in a new process. A job has a folder, its artifact, a pattern and calls."""
    for folder, artifact, pattern, calls in jobs:
        folder.mkdir()
        (folder / "ens.wide").symlink_to(artifact)
        (folder / "lines.py").write_text(LINES.replace("shared", pattern) + CALLS)
        torch.save(calls, folder / "calls.pt")
    must(fresh(BLOCKED + EACH_FOLDER, *(folder for folder, *_ in jobs)))


def called(artifact: Path, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns a call in the form of the program: torch.export accepts an input in one form only."""
    parameters = Reader(artifact).manifest.entries["forward"].signature
    given = {**dict(zip([p.name for p in parameters], args)), **kwargs}
    return tuple(given[p.name] for p in parameters if p.kind == "positional" and p.name in given), {
        p.name: given[p.name] for p in parameters if p.kind == "keyword" and p.name in given
    }


QUICK = [("mlp", "shared"), ("bert", "each"), ("ragged_heads", "shared")]
MORE = [(name, "shared") for name in cases.NAMES if name not in ("mlp", "ragged_heads")] + [
    ("mlp", "each"),
    ("ragged_heads", "each"),
]


def calls_of(name: str, pattern: str, artifact: Path) -> Calls:
    case, calls = cases.load(name), []
    for batch in (1, 5, 40):
        samples = [case.sample(batch, 60 + i) for i in range(case.N)]
        args, kwargs = (
            samples[0]
            if pattern == "shared"
            else (stack([a for a, _ in samples]), stack([k for _, k in samples]))
        )
        calls.append(called(artifact, args, kwargs))
    return calls


def jobs_of(
    names: list[tuple[str, str]], artifacts: Artifacts, folder: Path
) -> list[tuple[Path, Path, str, Calls]]:
    return [
        (folder / f"{name}-{pattern}", artifacts(name), pattern, calls_of(name, pattern, artifacts(name)))
        for name, pattern in names
    ]


@pytest.fixture(scope="module")
def answered(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the answers for every job of `QUICK`, and for one call that must be refused."""
    folder = tmp_path_factory.mktemp("outside")
    jobs = jobs_of(QUICK, artifacts, folder)
    long = called(artifacts("bert"), *cases.load("bert").sample(2, 0, length=65))
    outside([*jobs, (folder / "refused", artifacts("bert"), "shared", [long])])
    return folder


@pytest.fixture(scope="module")
def more_answered(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("more")
    outside(jobs_of(MORE, artifacts, folder))
    return folder


@pytest.mark.parametrize(
    ("name", "pattern"), [*QUICK, *(pytest.param(*job, marks=pytest.mark.extended) for job in MORE)]
)
def test_the_code_of_the_page_answers_as_the_ensemble(
    name: str, pattern: str, artifacts: Artifacts, request: pytest.FixtureRequest
) -> None:
    answered: Path = request.getfixturevalue("answered" if (name, pattern) in QUICK else "more_answered")
    folder = answered / f"{name}-{pattern}"
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    ens = load(artifacts(name))
    for (args, kwargs), got in zip(
        calls_of(name, pattern, artifacts(name)), torch.load(folder / "answers.pt"), strict=True
    ):
        want = ens(*args, **kwargs) if pattern == "shared" else ens.each(*args, **kwargs)
        if isinstance(want, Output):
            assert list(got) == list(want)
            want = dict(want)
        else:
            assert type(got) is type(want)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_code_of_the_page_refuses_sizes_outside_the_bounds(answered: Path) -> None:
    assert (answered / "refused" / "error.txt").exists()
    assert not (answered / "refused" / "answers.pt").exists()


def test_the_programs_contain_no_weights(artifacts: Artifacts) -> None:
    report = artifacts.report("bert")
    manifest = load(artifacts("bert"), warmup=False).manifest
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    assert set(manifest.entries["forward"].pt2) == {"shared", "each"}
    for name in manifest.entries["forward"].pt2.values():
        assert sizes[name] < sum(report.weights.values()) / 4


def test_the_page_shows_these_lines() -> None:
    """The code is short, needs only torch and safetensors, and ends with the call."""
    assert f"```python\n{LINES}y = model(x)\n```\n" in PAGE
    assert LINES.count("\n") < 15 and "import json, pathlib, torch\n" in LINES and "widepack" not in LINES
    assert set(re.findall(r"^(?:import|from) (.*)", LINES, re.MULTILINE)) == {
        "json, pathlib, torch",
        "safetensors.torch import load_file",
    }


class Masked(torch.nn.Module):
    """Selects columns by a mask that all members share. The number of columns depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 6)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)[:, self.mask]
        return y


def test_a_size_that_depends_on_shared_data_has_a_range(tmp_path: Path) -> None:
    paths = [tmp_path / f"m{i}.pt" for i in range(2)]
    for path in paths:
        torch.save(Masked().state_dict(), path)
    build(paths, tmp_path / "e.wide", model=Masked, inputs=["x=float32[B,4]"])
    ens, x = load(tmp_path / "e.wide"), torch.randn(3, 4)
    exported = torch.export.load(tmp_path / "e.wide" / ens.manifest.entries["forward"].pt2["shared"])
    weights = {n: torch.stack([ens.state_dict(i)[n] for i in range(2)]) for n in ("fc.weight", "fc.bias")}
    exported.state_dict.update({n: weights.get(n, ens.state_dict(0)["mask"]) for n in exported.state_dict})
    torch.testing.assert_close(exported.module()(x), ens(x).clone())
