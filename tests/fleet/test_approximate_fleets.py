"""Tests fleets whose factors are approximate within a declared part of what the fine-tunes change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import widepack
from fleet.small_fleets import (
    INPUTS,
    LAYERS,
    SIZE,
    Net,
    SmallFleet,
    answer_of,
    build_of,
    write_adapter,
    write_fleet,
)
from widepack.errors import ArtifactError, VerificationError
from widepack.fleet.factors import Factors, KeptStacked
from widepack.fleet.fleet import approximate
from widepack.verification.approximation import check
from widepack.verification.record import ApproximationError, read_approximations
from widepack_artifacts.correction import rounded
from widepack_cli.main import cli

TOLERANCE = 0.2


def halves(fleet: SmallFleet, folder: Path) -> tuple[list[Path], list[dict[str, Tensor]]]:
    """Returns float32 checkpoints whose fine-tuned weights were rounded to bfloat16, and their weights."""
    paths, states = [], []
    for i, state in enumerate(fleet.states):
        short = {
            n: v.bfloat16().float() if n.removesuffix(".weight") in LAYERS else v for n, v in state.items()
        }
        paths.append(folder / f"half{i}.pt")
        torch.save(short, paths[-1])
        states.append(short)
    return paths, states


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def built(fleet: SmallFleet, paths: list[Path], out: Path, **more: Any) -> widepack.BuildReport:
    return build_of(paths, out, **{"base": fleet.base, "unmerge": True, **more})


@pytest.fixture
def fleet(tmp_path: Path) -> SmallFleet:
    return write_fleet(tmp_path)


@pytest.fixture
def near(fleet: SmallFleet, tmp_path: Path) -> tuple[Path, list[dict[str, Tensor]]]:
    """Returns an artifact of approximate factors, and the weights of its checkpoints."""
    paths, states = halves(fleet, tmp_path)
    report = built(fleet, paths, tmp_path / "near.wide", tolerance=TOLERANCE)
    assert report.fleet is not None
    assert {row["weight"] for row in report.fleet["factored"] if row["approximate"]} == {
        "first.weight", "second.weight"
    }  # fmt: skip
    return tmp_path / "near.wide", states


def test_weights_of_a_shorter_dtype_stay_stacked_with_three_ways_out(
    fleet: SmallFleet, tmp_path: Path
) -> None:
    paths, _ = halves(fleet, tmp_path)
    report = built(fleet, paths, tmp_path / "x.wide", dry_run=True)
    assert report.fleet is not None
    (why,) = {row["why"] for row in report.fleet["stacked"] if row["weight"] == "first.weight"}
    for words in ("rounded to bfloat16", "--dtype bfloat16", "the adapters themselves", "--tolerance"):
        assert words in why


def test_answers_are_within_the_declared_part(
    fleet: SmallFleet, near: tuple[Path, list[dict[str, Tensor]]]
) -> None:
    path, states = near
    ens = widepack.load(path)
    base = torch.load(fleet.base)
    x = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(0))
    for i, (answer, state) in enumerate(zip(ens(x), states, strict=True)):
        own = ens.state_dict(i)
        # the program is right for the weights that the artifact gives
        torch.testing.assert_close(answer.double(), answer_of(own, x), rtol=1e-5, atol=1e-5)
        changed = {n: base[n] if n.removesuffix(".weight") in LAYERS else v for n, v in state.items()}
        effect = rms(answer_of(changed, x) - answer_of(state, x))
        error = rms(answer.double() - answer_of(state, x))
        assert 0 < error <= TOLERANCE * effect
        assert not torch.equal(own["first.weight"], state["first.weight"])
        assert torch.equal(own["plain.weight"], state["plain.weight"])
    assert ens.manifest.factored.corrections == ""


def test_the_record_has_each_member_and_output(near: tuple[Path, list[dict[str, Tensor]]]) -> None:
    manifest = widepack.load(near[0], warmup=False).manifest
    record = manifest.verification["approximation"]
    assert record["tolerance"] == TOLERANCE and record["weights"] == ["first.weight", "second.weight"]
    (output,) = record["outputs"]
    assert list(output["members"]) == ["half0", "half1", "half2"]
    assert all(0 < v["error"] <= TOLERANCE * v["effect"] for v in output["members"].values())
    (one,) = read_approximations(manifest.verification)
    assert (one.entry, one.tolerance) == ("forward", TOLERANCE) and 0 < one.worst.part <= TOLERANCE


def test_the_command_line_says_what_was_approximated(fleet: SmallFleet, tmp_path: Path) -> None:
    paths, _ = halves(fleet, tmp_path)
    (tmp_path / "net.py").write_text("from fleet.small_fleets import Net\n", encoding="utf-8")
    out = tmp_path / "near.wide"
    args = ["build", *map(str, paths), "--unmerge", "--base", str(fleet.base), "--tolerance", "0.2"]
    more = ["-o", str(out), "--model", f"{tmp_path / 'net.py'}:Net", "--input", INPUTS[0], "--budget", "0"]
    found = CliRunner().invoke(cli, [*args, *more])
    assert found.exit_code == 0, found.output
    assert "approximate  first.weight, second.weight: the factors leave at most" in found.output
    assert "of what the fine-tunes change (member half" in found.output
    found = CliRunner().invoke(cli, ["inspect", str(out)])
    assert found.exit_code == 0 and "declared 0.2" in found.output
    found = CliRunner().invoke(cli, ["verify", str(out)])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(cli, ["verify", str(out), *map(str, paths)])
    assert found.exit_code == 0, found.output
    assert "bit for bit, but 6 approximate weights, within 0.2 of what the fine-tunes change" in found.output
    found = CliRunner().invoke(cli, ["verify", str(out), *map(str, reversed(paths))])
    assert found.exit_code == 1 and "first.weight differs from" in found.output


def test_members_are_exchanged(fleet: SmallFleet, near: tuple[Path, list[dict[str, Tensor]]]) -> None:
    path, _ = near
    ens = widepack.load(path)
    x = torch.randn(4, SIZE)
    before = ens(x)
    ens.swap(0, fleet.merged[1])
    torch.testing.assert_close(ens(x)[0].double(), answer_of(fleet.states[1], x), rtol=1e-5, atol=1e-5)
    assert torch.equal(ens(x)[1:], before[1:])
    widepack.append(path, [fleet.merged[2]], names=["more"])
    ens = widepack.load(path)
    torch.testing.assert_close(ens(x)[3].double(), answer_of(fleet.states[2], x), rtol=1e-5, atol=1e-5)
    (output,) = ens.manifest.verification["approximation"]["outputs"]
    assert list(output["members"]) == ["half0", "half1", "half2"]
    widepack.update(path, {"half0": fleet.merged[0]})
    widepack.drop(path, ["half1", "half2"])
    assert "approximation" not in widepack.load(path, warmup=False).manifest.verification


def test_a_wrong_record_is_refused() -> None:
    broken: list[Any] = [
        1,
        {},
        {"outputs": []},
        {"outputs": [{"output": "", "members": 3}], "tolerance": 0.1},
    ]
    for wrong in broken:
        with pytest.raises(ArtifactError, match="approximation does not have the form"):
            read_approximations({"approximation": wrong})
    for entries in ([1], "text"):
        with pytest.raises(ArtifactError, match="entries is not an object"):
            read_approximations({"entries": entries})


def test_errors_over_the_declared_part_name_the_worst_member() -> None:
    rows = [
        ApproximationError("y", "a", 0.1, 1.0),
        ApproximationError("y", "b", 0.3, 1.0),
        ApproximationError("y", "c", 0.0, 0.0),
    ]
    check(rows, 0.3, "forward")
    with pytest.raises(VerificationError, match=r"member b change output y by .* 0\.3 of .*1 of 3 members"):
        check(rows, 0.2, "forward")
    with pytest.raises(VerificationError, match="inf of"):
        check([ApproximationError("y", "a", 0.1, 0.0)], 0.2, "forward")


@pytest.mark.parametrize("shape", [(40, 30), (400, 300), (24, 5, 3, 3)])
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_the_smallest_rank_is_taken(shape: tuple[int, ...], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator)
    rows, columns = base.flatten(1).shape
    left = torch.linalg.qr(torch.randn(rows, min(rows, columns), generator=generator).double()).Q
    right = torch.linalg.qr(torch.randn(columns, min(rows, columns), generator=generator).double()).Q
    values = 0.3 ** torch.arange(min(rows, columns)).double()
    member = (base.double() + ((left * values) @ right.t()).reshape(shape)).float()
    found = approximate([member, base], base, tolerance)
    assert isinstance(found, Factors) and found.approximate and found.ranks[1] == 0
    tails = values.square().flip(0).cumsum(0).flip(0).sqrt() / values.norm()
    expected = int((tails > tolerance / 2).sum())
    assert found.ranks[0] == expected and found.residual.rms <= tolerance / 2
    error = (rounded(found, 0).double() - member.double()).norm() / (member.double() - base.double()).norm()
    assert float(error) == pytest.approx(found.residual.rms)


def test_a_difference_without_large_directions_stays_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    base, member = torch.randn(2, 64, 64, generator=generator)
    found = approximate([member], base, 0.1)
    assert isinstance(found, KeptStacked) and "needs a rank over 16" in found.reason
    same = approximate([base], base, 0.1)
    assert isinstance(same, KeptStacked) and "no member differs" in same.reason


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"base": None}, "needs --unmerge and --base"),
        ({"unmerge": False, "base": None}, "needs --unmerge and --base"),
        ({"tolerance": 0.0}, "a part between 0 and 1"),
        ({"tolerance": 5.0}, "tolerance is 5"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": "0.1"}, "tolerance is '0.1'"),
    ],
)
def test_wrong_tolerances_are_refused(
    fleet: SmallFleet, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(widepack.UsageError, match=words):
        built(fleet, fleet.merged, tmp_path / "x.wide", **{"tolerance": 0.1, **more})
    assert not (tmp_path / "x.wide").exists()


def test_exact_factors_are_preferred(fleet: SmallFleet, tmp_path: Path) -> None:
    report = built(fleet, fleet.merged, tmp_path / "x.wide", tolerance=0.1)
    assert report.fleet is not None and not any(row["approximate"] for row in report.fleet["factored"])
    ens = widepack.load(tmp_path / "x.wide")
    assert "approximation" not in ens.manifest.verification
    assert all(torch.equal(v, s[n]) for i, s in enumerate(fleet.states) for n, v in ens.state_dict(i).items())
    assert json.loads((tmp_path / "x.wide" / "manifest.json").read_text())["factored"]["corrections"]
    write_adapter(tmp_path / "more", 2, 8, 50)
    ens.swap(0, tmp_path / "more")


class Sum(Net):
    """A second output that no fine-tuning changes: the sum of probabilities."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        found = super().forward(x).softmax(-1)
        return found, found.sum(-1)


@pytest.mark.extended
def test_an_output_that_fine_tuning_does_not_change(fleet: SmallFleet, tmp_path: Path) -> None:
    paths, _ = halves(fleet, tmp_path)
    out = tmp_path / "near.wide"
    built(fleet, paths, out, tolerance=TOLERANCE, model=Sum)
    record = widepack.load(out, warmup=False).manifest.verification["approximation"]
    first, second = record["outputs"]
    assert all(v["error"] <= second["rounding"] for v in second["members"].values())
    assert all(first["rounding"] < v["error"] <= TOLERANCE * v["effect"] for v in first["members"].values())
