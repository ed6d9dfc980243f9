"""Tests `widepack analyze --wide` on artifacts, against the wide programs that the artifacts store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from forged import GOLDEN
from support import Artifacts

from cases import load
from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs, wide_program_costs
from widepack.costs.expressions import SizeSymbols
from widepack.costs.recorder import KernelRecorder, record
from widepack.ir.fake_values import Fakes
from widepack.ir.kinds import weights_only
from widepack.planning.plan import Plan, for_size, scaled
from widepack_artifacts.costs import Costs, stored_costs
from widepack_artifacts.program import Program
from widepack_artifacts.reader import Reader
from widepack_bench.measure.roofline import work
from widepack_cli.main import cli


def analyze(*words: Any) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, words)], prog_name="widepack")


def at(costs: Costs, sizes: dict[str, int], members: int) -> dict[str, Any]:
    return costs.at(costs.values(sizes, members=members))


def stored_program(reader: Reader, sizes: dict[str, int]) -> Program:
    """Returns the program by rules of thumb that the artifact stores for a call of these sizes."""
    entry = reader.manifest.entries["forward"]
    example = {name: dim.example for name, dim in entry.dims.items()}
    rows = [
        (w.file, Plan.from_json(w.plan)) for w in entry.wide if (w.device, w.pattern) == ("cpu", "shared")
    ]
    rows = sorted((r for r in rows if not r[1].machine), key=lambda r: r[1].batch)
    file, _ = for_size(rows, scaled(sizes, "B", example), lambda r: r[1])
    return reader.program(file)


def names_of(program: Program) -> list[str]:
    return [s.name for s in (*program.weights, *program.inputs)] + [n.name for n in program.nodes]


def kernels(program: Program, names: Iterable[str]) -> int:
    """Returns the number of kernels that a wide program starts, without its prologue. names: of the dims."""
    fakes = Fakes(dict.fromkeys(names, 8))
    recorder = KernelRecorder(SizeSymbols(fakes.dims, torch.float32))
    record(
        program,
        fakes,
        dict.fromkeys(names_of(program), "shared"),
        recorder,
        weights_only(program) - {s.name for s in program.weights},
    )
    return sum(kernel.times for kernel in recorder.kernels)


def test_an_mlp_costs_its_members(artifacts: Artifacts) -> None:
    reader = Reader(artifacts("mlp"))
    wide, member = wide_program_costs(reader, "forward", {}), stored_costs(reader)["forward"]
    assert wide.model == member.model and wide.classes == member.classes
    assert wide.totals["flops"][0] == "0" and wide.weights == member.weights
    for members in (1, 3, 100):
        found = at(wide, {"B": 5}, members)
        assert found["flops"] == members * at(member, {"B": 5}, 1)["flops"] > 0


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "batch"), [("mlp", 1), ("mlp", 3), ("mlp", 48), ("frozen_trunk", 3), ("bert", 3)]
)
def test_the_costs_are_those_of_the_stored_program(name: str, batch: int, artifacts: Artifacts) -> None:
    reader = Reader(artifacts(name))
    sizes = {"B": batch, "T": 7} if name == "bert" else {"B": batch}
    costs = wide_program_costs(reader, "forward", sizes)
    found, program = at(costs, sizes, len(reader.manifest.members)), stored_program(reader, sizes)
    assert found["flops"] == work(program, sizes).flop > 0
    assert found["kernels"] == kernels(program, sizes)


def test_no_weight_is_read(artifacts: Artifacts, tmp_path: Path) -> None:
    artifact = tmp_path / "ens.wide"
    shutil.copytree(artifacts("mlp"), artifact)
    before = wide_program_costs(Reader(artifact), "forward", {})
    for file in artifact.glob("*.safetensors"):
        file.unlink()
    assert wide_program_costs(Reader(artifact), "forward", {}) == before


def test_earlier_artifacts_have_wide_costs() -> None:
    """They store no file of costs, and may name nodes in another way."""
    reader = Reader(GOLDEN / "2026-11-22-mlp.wide")
    wide = wide_program_costs(reader, "forward", {})
    result = analyze(reader.root, "--at", "B=3", "--json")
    numbers = json.loads(result.stdout)["numbers"]
    assert at(wide, {"B": 3}, len(reader.manifest.members))["flops"] == numbers["flops"] > 0


def test_factored_weights_count_as_factors() -> None:
    reader = Reader(GOLDEN / "2026-11-25-fleet.wide")
    members, dims = len(reader.manifest.members), reader.manifest.entries["forward"].dims
    sizes = dict.fromkeys(dims, 1)
    wide = at(wide_program_costs(reader, "forward", sizes), sizes, members)
    result = analyze(reader.root, "--at", ",".join(f"{d}=1" for d in dims), "--json")
    assert 0 < wide["weights"] < json.loads(result.stdout)["numbers"]["weights"]


def test_the_command(artifacts: Artifacts) -> None:
    artifact = artifacts("mlp")
    members, case = len(Reader(artifact).manifest.members), load("mlp")
    found = json.loads(analyze(artifact, "--wide", "--at", "B=3", "--json").stdout)
    assert found["at"]["N"] == members
    model = model_costs(case.model, case.INPUTS, wide=members)
    assert found["numbers"]["flops"] == at(model, {"B": 3}, members)["flops"]
    more = json.loads(analyze(artifact, "--wide", "--at", "B=3,N=100", "--json").stdout)
    assert more["numbers"]["flops"] * members == found["numbers"]["flops"] * 100
    text = analyze(artifact, "--wide").stdout
    assert "FLOP" in text and "N*" in text


def test_members_of_different_shapes_are_refused(artifacts: Artifacts) -> None:
    result = analyze(artifacts("ragged_heads"), "--wide")
    assert result.exit_code == 2
    assert "different shapes" in result.stderr and "Traceback" not in result.stderr
