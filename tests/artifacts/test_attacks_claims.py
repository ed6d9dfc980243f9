"""Tests attacks 98, 99 and 106 of ATTACKS.md: what an artifact says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import refused
from forged import Forged, node, ref

from widepack import ArtifactError, load
from widepack.errors import MemberMismatch, UsageError
from widepack_artifacts.entry import Rows
from widepack_serve.catalog.layout import EntryLayout

PROVED = {"dim": "B", "independent": True, "proved": True, "reason": ""}
TRIED = {"dim": "B", "independent": True, "proved": False, "reason": "an op without a rule"}
MIXES = [
    node("mixed", "aten.sum.dim_IntList", ref("x"), [0], True),
    node("mixed_rows", "aten.expand_as.default", ref("mixed"), ref("x")),
]


def mixing(record: dict[str, Any] | None, *starts: str) -> Forged:
    """Returns an artifact whose programs add the sum over the batch to their input."""
    forged = Forged()
    for start in starts:
        for program in forged.programs(start):
            first = program["nodes"][0]
            shift = node("mixed_x", "aten.add.Tensor", ref("x"), ref("mixed_rows"))
            program["nodes"] = [*MIXES, shift, *program["nodes"]]
            first["args"] = [ref("mixed_x") if a == ref("x") else a for a in first["args"]]
    forged.manifest["version"] = [1, 2]
    forged.entry["rows"] = record
    return forged


@pytest.mark.parametrize("record", [PROVED, TRIED])
def test_a_record_of_independent_rows_over_a_program_that_mixes_them(
    record: dict[str, Any], tmp_path: Path
) -> None:
    ens = load(mixing(record, "programs/").save(tmp_path), verify="off")
    entry = ens.entry("forward")
    calls = entry.tensor_calls
    assert EntryLayout(entry).batch == ""
    assert not calls.rows.independent and "sum.dim_IntList" in calls.rows.reason
    assert not calls.rows_of_callers.independent
    with pytest.raises(UsageError, match="not known to be independent"):
        ens.route(torch.ones(2, 6), member=[0, 1])


def test_wide_programs_that_mix_rows_beside_member_programs_that_do_not(tmp_path: Path) -> None:
    """The walk reads the member programs, so the programs of calls must be what these become."""
    honest = load(mixing(PROVED).save(tmp_path / "honest"), verify="off").entry("forward")
    assert honest.tensor_calls.rows_of_callers == honest.tensor_calls.rows == Rows("B", True, True)
    assert EntryLayout(honest).batch == "B"
    entry = load(mixing(PROVED, "programs/cpu.").save(tmp_path), verify="off").entry("forward")
    assert entry.tensor_calls.rows.proved  # a caller's own rows, of its own wrong answers
    shared = entry.tensor_calls.rows_of_callers
    assert not shared.independent and "not the one that this version makes" in shared.reason
    assert EntryLayout(entry).batch == "" and shared.reason in EntryLayout(entry).reason


def reading(literals: Any, version: tuple[int, int] = (1, 5)) -> Forged:
    """Returns an artifact that says that its members' code reads the values of weights."""
    forged = Forged("mlp")
    forged.manifest["version"] = list(version)
    forged.entry["literals"] = literals
    return forged


def nested(depth: int) -> Any:
    return "inner.weight" if not depth else ["abs", nested(depth - 1)]


def balanced(depth: int) -> Any:
    return "inner.weight" if not depth else ["add", balanced(depth - 1), balanced(depth - 1)]


@pytest.mark.parametrize(
    ("literals", "words"),
    [
        ([["zz", ""]], "the literal 'zz' is no stored weight"),
        ([["inner.weight"]], "expected"),
        ([["inner.weight", 3]], "expected"),
        ([["inner.weight", "\x1b[31m"]], "control characters"),
        ({"inner.weight": ""}, "literals"),
        ([[["gt", 1, 0], ""]], "names no weight"),
        ([[["save", "inner.weight"], ""]], "is not an expression"),
        ([[["gt", "inner.weight"], ""]], "is not an expression"),
        ([[["gt", "inner.weight", 2**63], ""]], "is outside 64 bits"),
        ([[["gt", "inner.weight", None], ""]], "is not an expression"),
        ([[[["gt"], "inner.weight", 0], ""]], "is not an expression"),
        ([[["gt", "zz", 0], ""]], "the literal 'zz' is no stored weight"),
        ([[nested(17), ""]], "over 16 deep"),
        ([[balanced(6), ""]], "over 64 terms"),
    ],
)
def test_literals_of_wrong_forms(tmp_path: Path, literals: Any, words: str) -> None:
    refused(reading(literals).save(tmp_path), words)


def test_literals_in_an_older_format(tmp_path: Path) -> None:
    refused(reading([["inner.weight", ""]], (1, 4)).save(tmp_path), "literals")


@pytest.mark.parametrize(
    "expression",
    [
        ["bitwise_not", "inner.weight"],
        ["add", "inner.weight", "inner.bias"],
        ["bool", ["gt", ["max", "inner.weight"], ["add", 1, 1]]],
    ],
)
def test_literals_that_cannot_be_computed(tmp_path: Path, expression: Any) -> None:
    ens = load(reading([[expression, ""]]).save(tmp_path / "forged"), backend="eager")
    torch.save(ens.state_dict(1), tmp_path / "other.pt")
    with pytest.raises(ArtifactError, match="the literal .* cannot be computed"):
        ens.swap(0, tmp_path / "other.pt")


def test_a_false_claim_of_literals_refuses_members_and_changes_no_answer(tmp_path: Path) -> None:
    x = torch.ones(2, 6)
    for claim in (True, False):
        found = reading([["inner.weight", "net.py:3"]]) if claim else Forged("mlp")
        ens = load(found.save(tmp_path / str(claim)), backend="eager")
        before, other = ens(x), tmp_path / "other.pt"
        torch.save(ens.state_dict(1), other)
        if claim:
            with pytest.raises(MemberMismatch, match=r"value of inner\.weight at net\.py:3"):
                ens.swap(0, other)
            assert torch.equal(ens(x), before)
        else:
            ens.swap(0, other)
            assert torch.equal(ens(x)[0], before[1])
