"""Tests `widepack trace --model` and `-m`, which show a model before a build, and that a build agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import Artifacts

from cases import load
from widepack_bench.models.blocks import BLOCKS
from widepack_cli.main import cli

CASE = load("mlp")
FILE = Path(CASE.__file__ or "").resolve()
OPTIONS = ["--model", f"{FILE}:model", *(part for spec in CASE.INPUTS for part in ("--input", spec))]


def widepack(*words: Any) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, words)], prog_name="widepack")


def document(*words: Any) -> dict[str, Any]:
    result = widepack(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(code: int, *words: Any) -> str:
    result = widepack(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return result.stderr.rpartition("Error: ")[2].strip()


def test_shapes_go_in_and_out_of_every_node() -> None:
    found = document("-m", "mlp")
    assert [(s["op"], s["takes"], s["out"]) for s in found["steps"]] == [
        ("aten.linear.default", ["float32[B,64]", "float32[128,64]", "float32[128]"], "float32[B,128]"),
        ("aten.relu.default", ["float32[B,128]"], "float32[B,128]"),
        ("aten.linear.default", ["float32[B,128]", "float32[64,128]", "float32[64]"], "float32[B,64]"),
    ]
    assert found["inputs"] == [{"name": "input", "type": "float32[B,64]"}]
    assert found["members"] is None and found["batch"] is None and "strategy" not in found["steps"][0]
    text = widepack("-m", "mlp").stdout
    assert "mlp, a perceptron with one hidden layer: 3 nodes of the member program" in text
    assert "input float32[B,64] -> float32[B,64]" in text and "linear.py:" in text


def test_the_preview_agrees_with_a_build(artifacts: Artifacts) -> None:
    artifact = artifacts("mlp")
    built = json.loads(widepack(artifact, "--json", "--pattern", "each").stdout)
    members = len(json.loads((Path(artifact) / "manifest.json").read_text())["members"])
    foreseen = document(*OPTIONS, "-n", members, "--pattern", "each")
    keys = ("node", "op", "reads", "kind", "strategy", "why", "becomes", "out")
    assert [[s[k] for k in keys] for s in foreseen["steps"]] == [[s[k] for k in keys] for s in built["steps"]]
    assert foreseen["batch"] == built["batch"]


def test_kinds_and_strategies_depend_on_the_number_of_members() -> None:
    text = widepack("-m", "resblock", "-n", 4).stdout
    assert (
        "4 members, cpu, shared, batch 1 to " in text
        and "Shared Stacked -> Stacked" in text
        and "simplified away" in text
    )
    large = document("-m", "resblock", "-n", 64, "--batch", 100_000, "--strategy", "loop")
    assert large["batch"][0] > 1 and {s["strategy"] for s in large["steps"]} == {"loop"}
    on_gpu = document("-m", "resblock", "-n", 64, "--batch", 100_000, "--device", "cuda")
    assert "loop" not in {s["strategy"] for s in on_gpu["steps"]}


def test_invalid_command_lines_are_refused(tmp_path: Path) -> None:
    assert "give one of ARTIFACT, --model and -m" in refused(2)
    assert "not ARTIFACT and -m" in refused(2, "ens.wide", "-m", "mlp")
    assert "--model needs its inputs" in refused(2, "--model", f"{FILE}:model")
    assert "leave them out with ARTIFACT" in refused(2, "ens.wide", "-n", 3)
    assert "no reference block 'mlpp', did you mean mlp?" in refused(2, "-m", "mlpp")
    assert "leave out --input" in refused(2, "-m", "mlp", "--input", "x=float32[B,64]")
    assert "give -n" in refused(2, "-m", "mlp", "--strategy", "bmm")
    assert "`trace` reads no checkpoint" in refused(2, "--model", "hf", "--input", "x=int64[B,8]")
    assert "plans are for cpu and cuda, not for tpu" in refused(2, "-m", "mlp", "--device", "tpu")
    file = tmp_path / "sized.py"
    file.write_text(
        "import torch\ndef make(state_dict=None):\n    return torch.nn.Linear(*state_dict['weight'].shape)\n"
    )
    assert "build --dry-run" in refused(2, "--model", f"{file}:make", "--input", "x=float32[B,64]")
    file.write_text(
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        "
        "return x if x.sum() > 0 else -x\n"
    )
    assert "sized.py" in refused(1, "--model", f"{file}:M", "--input", "x=float32[B,64]")


def test_list_of_blocks() -> None:
    text = widepack("-m").stdout
    assert all(f"\n{name} " in text and b.doc in text for name, b in BLOCKS.items())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "ada_norm" else [pytest.mark.slow]) for n in BLOCKS]
)
def test_every_block(name: str) -> None:
    found = document("-m", name, "-n", 3)
    assert all(s["takes"] or not s["reads"] for s in found["steps"])
    assert not any(s["strategy"] in ("sequential", "loop") for s in found["steps"])
