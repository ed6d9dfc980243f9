"""The torch.export programs of an artifact, where neither widepack nor widepack_artifacts can be imported: the README's few lines answer as `ens(x)` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from support import Artifacts, fresh, leaves, must, stack

from widepack.loading import load

LINES = """\
import json
import torch
from safetensors.torch import load_file

manifest = json.load(open("ens.wide/manifest.json"))
weights = load_file("ens.wide/" + next(name for name in manifest["files"] if name.startswith("weights-")))
exported = torch.export.load("ens.wide/" + manifest["entries"]["forward"]["pt2"]["shared"])
exported.state_dict.update({name: weights[name] for name in exported.state_dict})
model = exported.module()
"""
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
torch.set_num_threads(1)
calls, answers = torch.load("calls.pt"), []
with torch.no_grad():
    for args, kwargs in calls:
        answers.append(model(*args, **kwargs))
torch.save(answers, "answers.pt")
"""


def outside(artifact: Path, pattern: str, calls: list[tuple[Any, Any]], folder: Path) -> list[Any]:
    """What the lines answer in a process of their own, in a folder where the artifact is `ens.wide`."""
    (folder / "ens.wide").symlink_to(artifact)
    torch.save(calls, folder / "calls.pt")
    must(fresh(f"import os; os.chdir({str(folder)!r})\n{BLOCKED}{LINES.replace('shared', pattern)}{CALLS}"))
    return torch.load(folder / "answers.pt")  # type: ignore[no-any-return]


def called(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call by the inputs' names, as an artifact built from `--input` takes it."""
    names = [spec.partition("=")[0] for spec in cases.load(name).INPUTS]
    return (), {**dict(zip(names, args)), **kwargs}


@pytest.mark.parametrize(("name", "pattern"), [(name, "shared") for name in cases.NAMES] + [("mlp", "each"), ("bert", "each"), ("ragged_heads", "each")])
def test_the_lines_answer_as_the_ensemble(name: str, pattern: str, artifacts: Artifacts, tmp_path: Path) -> None:
    case = cases.load(name)
    calls = []
    for batch in (1, 5, 40):
        own = [case.sample(batch, 60 + i) for i in range(case.N)]
        args, kwargs = own[0] if pattern == "shared" else (stack([a for a, _ in own]), stack([k for _, k in own]))
        calls.append(called(name, args, kwargs))
    found = outside(artifacts(name), pattern, calls, tmp_path)
    ens = load(artifacts(name))
    for (args, kwargs), got in zip(calls, found):
        want = ens(*args, **kwargs) if pattern == "shared" else ens.each(*args, **kwargs)
        if isinstance(want, dict) or hasattr(want, "kind"):
            assert list(got) == list(want)
            want = dict(want)
        else:
            assert type(got) is type(want)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_lines_refuse_what_the_bounds_refuse(artifacts: Artifacts, tmp_path: Path) -> None:
    args, kwargs = called("bert", *cases.load("bert").sample(2, 0, length=65))
    (tmp_path / "ens.wide").symlink_to(artifacts("bert"))
    torch.save([(args, kwargs)], tmp_path / "calls.pt")
    done = fresh(f"import os; os.chdir({str(tmp_path)!r})\n{BLOCKED}{LINES}{CALLS}")
    assert done.returncode == 1
    assert not (tmp_path / "answers.pt").exists()


def test_the_programs_hold_no_weights(artifacts: Artifacts) -> None:
    report = artifacts.report("resnet18")
    manifest = load(artifacts("resnet18"), warmup=False).manifest
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    assert set(manifest.entries["forward"].pt2) == {"shared", "each"}
    for name in manifest.entries["forward"].pt2.values():
        assert sizes[name] < sum(report.weights.values()) / 4
