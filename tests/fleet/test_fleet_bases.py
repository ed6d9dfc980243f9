"""Tests bases that are not all of what the members have, and members that are not all over one base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import widepack
from fleet.small_fleets import INPUTS, SIZE, Net, answer_of, build_of, write_adapter, write_fleet
from widepack_cli.main import cli


def test_one_adapter_is_a_build_of_one_member(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, (2,))
    report = build_of(fleet.adapters, tmp_path / "one.wide", base=fleet.base)
    assert report.fleet is not None and not report.fleet["factored"]
    reasons = {row["weight"]: row["why"] for row in report.fleet["stacked"]}
    assert reasons["head.weight"] == "an adapter replaces it" and "1 dims" in reasons["first.bias"]
    x = torch.randn(3, SIZE)
    found = widepack.load(tmp_path / "one.wide")(x)[0].double()
    torch.testing.assert_close(found, answer_of(fleet.states[0], x), rtol=1e-5, atol=1e-5)


def test_a_base_of_another_shape_is_a_reason(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path)
    base = torch.load(fleet.base)
    base["first.weight"] = torch.randn(SIZE + 1, SIZE)
    torch.save(base, tmp_path / "grown.pt")
    report = build_of(fleet.merged, tmp_path / "x.wide", base=tmp_path / "grown.pt", unmerge=True)
    assert report.fleet is not None
    reasons = {row["weight"]: row["why"] for row in report.fleet["stacked"]}
    assert reasons["first.weight"] == f"the base has [{SIZE + 1}, {SIZE}], and the members [{SIZE}, {SIZE}]"
    assert [row["weight"] for row in report.fleet["factored"]] == ["second.weight"]


def test_a_base_without_a_weight_is_a_reason_and_one_without_any_an_error(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path)
    base = torch.load(fleet.base)
    del base["first.weight"]
    torch.save(base, tmp_path / "part.pt")
    torch.save({"other": torch.ones(2)}, tmp_path / "none.pt")
    report = build_of(fleet.merged, tmp_path / "x.wide", base=tmp_path / "part.pt", unmerge=True)
    assert report.fleet is not None
    reasons = {row["weight"]: row["why"] for row in report.fleet["stacked"]}
    assert reasons["first.weight"] == "the base does not have it"
    with pytest.raises(widepack.UsageError, match=r"none\.pt has no weight of the model: it has other"):
        build_of(fleet.merged, tmp_path / "y.wide", base=tmp_path / "none.pt", unmerge=True)


def test_an_adapter_over_a_base_that_the_artifact_does_not_have(tmp_path: Path) -> None:
    """Every member has a head of its own, so the artifact has no head of the base."""
    fleet = write_fleet(tmp_path)
    out = tmp_path / "fleet.wide"
    build_of(fleet.adapters, out, base=fleet.base)
    write_adapter(tmp_path / "plain", 2, 8, 9, head=False)
    with pytest.raises(widepack.MemberMismatch, match=r"lacks head"):
        widepack.append(out, [tmp_path / "plain"])
    widepack.append(out, [tmp_path / "plain"], base=fleet.base)
    ens = widepack.load(out)
    x = torch.randn(3, SIZE)
    torch.testing.assert_close(
        ens(x)[3].double(), answer_of(ens.state_dict("plain"), x), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(ens.state_dict("plain")["head.weight"], torch.load(fleet.base)["head.weight"])
    args = ["update", str(out), "--member", "a0", str(tmp_path / "plain")]
    found = CliRunner().invoke(cli, [*args, "--base", str(fleet.base)])
    assert found.exit_code == 0, found.output
    state = widepack.load(out).state_dict("a0")
    assert all(torch.equal(v, ens.state_dict("plain")[n]) for n, v in state.items())


def test_errors_of_shapes_name_the_adapter_and_the_weight(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path)
    base = torch.load(fleet.base)
    base["second.weight"] = torch.randn(SIZE, SIZE + 2)

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(SIZE + 2, SIZE, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    torch.save(base, tmp_path / "wide.pt")
    with pytest.raises(widepack.CheckpointError, match=r"adapter .*a0: second\.weight: the adapter changes"):
        widepack.build(
            fleet.adapters, tmp_path / "x.wide", base=tmp_path / "wide.pt", model=Wider, inputs=INPUTS
        )
