"""Tests the costs that a build writes into an artifact, and `widepack analyze` on artifacts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from forged import GOLDEN
from support import Artifacts

import widepack
from cases import load
from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack_artifacts.costs import costs_file, stored_costs
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli


def analyze(*words: Any) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, words)], prog_name="widepack")


def numbers(*words: Any) -> dict[str, Any]:
    result = analyze(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["numbers"]
    return found


def test_a_build_writes_the_costs_of_its_model(artifacts: Artifacts) -> None:
    artifact, case = artifacts("lstm"), load("lstm")
    costs = stored_costs(Reader(artifact))["forward"]
    model = model_costs(case.model, case.INPUTS)
    assert costs.model == model.model and costs.classes == model.classes and not costs.lower_bound
    for members, sizes in ((1, {"B": 3}), (9, {"B": 1})):
        kept, derived = (c.at(c.values(sizes, members=members)) for c in (costs, model))
        assert kept["flops"] == derived["flops"] and kept["kernels"] == derived["kernels"]


def test_weights_that_all_members_share_are_paid_once(artifacts: Artifacts) -> None:
    artifact = artifacts("frozen_trunk")
    reader = Reader(artifact)
    costs = stored_costs(reader)["forward"]
    stored = {w.name: w for w in reader.manifest.weights}
    read = {s.source for s in reader.program(reader.manifest.entries["forward"].member[0]).weights}
    count = len(reader.manifest.members)
    by_kind = {
        kind: sum(w.bytes(count) for w in stored.values() if w.name in read and w.kind == kind)
        for kind in ("shared", "stacked")
    }
    assert by_kind["shared"] > 0 and int(costs.totals["flops"][0].partition("*")[0]) > 0
    assert costs.at(costs.values({"B": 1}, members=count))["weights"] == sum(by_kind.values())


def test_the_command_imports_no_torch(artifacts: Artifacts) -> None:
    code = (
        "import sys; from widepack_cli.main import cli; "
        f"cli(['analyze', {str(artifacts('mlp'))!r}, '--at', 'B=3'], standalone_mode=False); "
        "print([m for m in ('torch', 'numpy', 'sympy', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "FLOP" in done.stdout


def test_the_members_of_the_artifact_are_the_default(artifacts: Artifacts) -> None:
    artifact = artifacts("mlp")
    members = len(Reader(artifact).manifest.members)
    assert numbers(artifact, "--at", "B=3") == numbers(artifact, "--at", f"B=3,N={members}")
    assert (
        numbers(artifact, "--at", "B=3,N=1")["flops"] * members == numbers(artifact, "--at", "B=3")["flops"]
    )


def test_artifacts_without_costs_are_derived() -> None:
    """Those of earlier versions have none."""
    artifact = GOLDEN / "2026-11-22-mlp.wide"
    assert costs_file(Reader(artifact).manifest.files) == ""
    found = numbers(artifact, "--at", "B=3")
    weights = [w for w in Reader(artifact).manifest.weights if len(w.shape) == 2]
    members = len(Reader(artifact).manifest.members)
    elements = sum(torch.Size(w.shape).numel() * (members if w.kind == "stacked" else 1) for w in weights)
    assert found["flops"] == 2 * 3 * elements > 0


def test_members_of_different_shapes_are_refused(artifacts: Artifacts) -> None:
    result = analyze(artifacts("ragged_heads"))
    assert result.exit_code == 2
    assert "different shapes" in result.stderr and "Traceback" not in result.stderr


def test_tuned_and_changed_artifacts_keep_their_costs(artifacts: Artifacts, tmp_path: Path) -> None:
    case = load("mlp")
    artifact = tmp_path / "ens.wide"
    shutil.copytree(artifacts("mlp"), artifact)
    before = costs_file(Reader(artifact).manifest.files)
    torch.save(case.member(99).state_dict(), tmp_path / "new.pt")
    widepack.append(artifact, [tmp_path / "new.pt"])
    after = Reader(artifact)
    assert costs_file(after.manifest.files) == before
    members = len(after.manifest.members)
    assert numbers(artifact, "--at", "B=3") == numbers(artifact, "--at", f"B=3,N={members}")


def test_costs_follow_the_kinds(artifacts: Artifacts, tmp_path: Path) -> None:
    """A member with another trunk: what all shared becomes a cost of each member."""
    case = load("frozen_trunk")
    artifact = tmp_path / "ens.wide"
    shutil.copytree(artifacts("frozen_trunk"), artifact)
    before = stored_costs(Reader(artifact))["forward"]
    state = case.member(0).state_dict()
    changed = {n: t + 0.01 if t.is_floating_point() else t for n, t in state.items()}
    torch.save(changed, tmp_path / "new.pt")
    widepack.update(artifact, {0: tmp_path / "new.pt"})
    after = stored_costs(Reader(artifact))["forward"]
    assert before.totals["flops"][0] != "0" and after.totals["flops"][0] == "0"
    whole, apart = (c.at(c.values({"B": 3}))["flops"] for c in (before, after))
    assert whole == apart and after.classes == before.classes
    assert [r.module for r in after.rows] == [r.module for r in before.rows]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "B=3,T=2"], "unknown: T; this model's dims are B >= 1"),
        (["--at", "N=3"], "no size for B"),
        (["--at", "B"], "write NAME=NUMBER"),
        (["--at", "B=0"], "write NAME=NUMBER"),
        (["--at", "B=1,B=2"], "--at gives B twice"),
        (["--entry", "encode"], "there is no entry 'encode'"),
        (["--input", "x=float32[B,8]"], "leave them out with an artifact"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, artifacts: Artifacts) -> None:
    result = analyze(artifacts("mlp"), *words)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torch.nn.Linear"], "a model needs its inputs"),
        (["torch.nn.Linear", "--input", "input=float32[B,8]"], "missing 2 required positional arguments"),
        (["torch.nn.Linar", "--input", "input=float32[B,8]"], "torch.nn has no 'Linar'"),
        (["nowhere/", "--input", "x=float32[B,8]"], "does not name a factory"),
        (["hf", "--input", "x=float32[B,8]"], "name the folder of the model"),
    ],
)
def test_wrong_models_are_refused(words: list[str], message: str) -> None:
    result = analyze(*words)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_a_class_of_torch() -> None:
    words = ["torch.nn.Linear", "--model-arg", "in_features=64", "--model-arg", "out_features=8"]
    result = analyze(*words, "--input", "input=float32[B,64]")
    assert result.exit_code == 0 and "N*1024*B" in result.stdout and "N*520*w_bytes" in result.stdout


@pytest.mark.extended
def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=200,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    words = ["--input", "input_ids=int64[B,T]:0..199", "--at", "B=2,T=40"]
    by_hand = 2 * 2 * 40 * (3 * (4 * 64 * 64 + 3 * 64 * 160) + 64 * 200) + 3 * 4 * 2 * 40 * 40 * 64
    assert numbers(tmp_path, *words)["flops"] == by_hand
    text = analyze(tmp_path, *words).stdout
    (line,) = [x for x in text.splitlines() if "model.layers.*.mlp.gate_proj" in x]
    assert line.split()[:4] == ["model.layers.*.mlp.gate_proj", "Linear", "3", f"{2 * 3 * 80 * 64 * 160:,}"]
