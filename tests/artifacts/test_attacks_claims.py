"""Tests attacks 98 and 99 of ATTACKS.md: what an artifact says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Forged, node, ref

from widepack import load
from widepack.errors import UsageError
from widepack_artifacts.rows import Rows
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
