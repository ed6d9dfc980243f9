"""Tests widepack with the cases of HFTA's operator and optimizer tests, and compares the outcomes with
bench/results/hfta-cases.json.

scripts/measure/hfta_cases.py makes the document and runs the cases. A case that was right must stay right.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from typing import Any

import database_check
import hfta_cases
import hfta_dropout
import hfta_layers
import hfta_optimizers
import pytest
from database_cases import Case
from database_check import FusedMembers, Outcome, outcome_of
from hfta_grids import LAYERS, OPTIMIZERS, cases

import widepack

DOCUMENT: dict[str, Any] = json.loads(hfta_cases.OUT.read_text(encoding="utf-8"))
FUSED = ("Linear", "Conv2d", "Embedding")  # their programs are made fast
EXCEPTIONS = ("beyond", "wrong", "refused", "crash", "apart")


def test_the_document_has_every_family_and_no_wrong_case() -> None:
    assert set(DOCUMENT["counts"]) == {*LAYERS, *OPTIMIZERS}
    assert set(DOCUMENT["mixed"]) == set(LAYERS)
    for family, grid in {**LAYERS, **OPTIMIZERS}.items():
        row = DOCUMENT["counts"][family]
        assert row["cases"] == len(list(cases(grid)))
        assert row["right"] + row["beyond"] >= row["cases"] - 1
    for rows in (DOCUMENT["counts"], DOCUMENT["mixed"]):
        for row in rows.values():
            assert row["cases"] == sum(row[name] for name in hfta_cases.OUTCOMES)
    assert not DOCUMENT["wrong"] and not DOCUMENT["crash"] and not DOCUMENT["refused"]
    assert len(DOCUMENT["beyond"]) <= 0.02 * sum(row["cases"] for row in DOCUMENT["counts"].values())
    assert all("gradient of " in why for why in DOCUMENT["beyond"].values())
    assert all("/device[" in key and "cuda" in why for key, why in DOCUMENT["apart"].items())
    for name in EXCEPTIONS:
        rows = (*DOCUMENT["counts"].values(), *DOCUMENT["mixed"].values())
        assert sum(row[name] for row in rows) == len(DOCUMENT[name])


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("family", hfta_cases.FAMILIES)
def test_one_case_of_each_family_is_right(family: str) -> None:
    """Of layers, it tests the wide layer, and of three layers also `fuse`."""
    rows = [e for e in hfta_cases.entries(family) if "cuda" not in e.key and not e.smaller]
    entry = random.Random(family).choice(rows)
    way = entry.ways[-1] if family in LAYERS else entry.ways[0]
    for tried in {way, "fuse"} if family in FUSED else {way}:
        outcome = entry.run(tried)
        assert outcome.name == "right", (entry.key, tried, outcome.why)


@pytest.mark.slow
@pytest.mark.parametrize("family", hfta_cases.FAMILIES)
def test_every_case_ends_as_in_the_document(family: str) -> None:
    known = {key: name for name in EXCEPTIONS for key in DOCUMENT[name]}
    found = {e.key: hfta_cases.outcome_of_entry(e) for e in hfta_cases.entries(family)}
    counted = DOCUMENT["counts"][family]["cases"] + DOCUMENT["mixed"].get(family, {"cases": 0})["cases"]
    assert len(found) == counted
    unexpected = {key: o for key, o in found.items() if o.name != known.get(key, "right")}
    assert not unexpected


@pytest.mark.parametrize("way", ["fuse", "wide layer"])
def test_members_in_another_order_are_found(way: str) -> None:
    options = {**LAYERS["Linear"].defaults, "batch": 4}

    def reversed_members(case: Case) -> FusedMembers:
        other = replace(case, members=case.members[::-1])
        return FusedMembers(case, hfta_layers.through(way, other).model)

    make = partial(hfta_layers.make_case, "case", "Linear", options, way)
    assert outcome_of(make, partial(hfta_layers.through, way)).name == "right"
    outcome = outcome_of(make, reversed_members)
    assert outcome.name == "wrong" and "output 0: member 0: rms error" in outcome.why


def test_statistics_of_a_step_too_few_are_found() -> None:
    options = {**LAYERS["BatchNorm1d"].defaults, "features": 4, "batch": 4, "steps": 3}

    class Fewer(hfta_layers.Wide):
        def each(self, *args: Any, **kwargs: Any) -> Any:
            answers = super().each(*args[:-1], **kwargs)
            return *answers, answers[-1]

    make = partial(hfta_layers.make_case, "case", "BatchNorm1d", options, "wide layer")
    for wide, expected in ((hfta_layers.Wide, "right"), (Fewer, "wrong")):

        def through(case: Case, wide: type[hfta_layers.Wide] = wide) -> FusedMembers:
            return FusedMembers(case, wide(hfta_layers.through("wide layer", case).model.model, True))

        assert outcome_of(make, through).name == expected


def test_a_mask_of_all_members_is_found() -> None:
    options = {**LAYERS["Dropout2d"].defaults, "batch": 4, "side": 2}
    assert hfta_dropout.outcome_of_dropout(options, "wide layer").name == "right"
    outcome = hfta_dropout.outcome_of_dropout(options, "wide layer", "shared")
    assert outcome.name == "wrong" and "members 0 and 1 drop together" in outcome.why


def test_a_rate_of_another_member_is_found() -> None:
    rates = [1e-3, 3e-3, 1e-2]
    training = hfta_optimizers.Training(3, "Adam", {"lr": rates, "eps": [1e-8] * 3})

    def other(key: str, value: Any) -> hfta_optimizers.WideOptimizer:
        return lambda params, **options: widepack.optim.Adam(params, **{**options, key: value})

    for key, value, words in (
        ("lr", rates[::-1], "the learning rate of member 0"),
        ("eps", [1e-8, 1e-8, 1e-3], "conv1.weight: member 2"),
    ):
        outcome = hfta_optimizers.outcome_of_training(training, "float32", other(key, value))
        assert outcome.name == "wrong" and words in outcome.why
    few = replace(training, options={"lr": [1e-3, 1e-3]})
    refused = hfta_optimizers.outcome_of_training(few, "float32")
    assert refused.name == "refused"
    assert "lr has 2 numbers" in refused.why


@pytest.mark.parametrize(
    ("name", "factor", "ulps", "right"),
    [
        ("gradient of weight", 1 + 1e-6, 32, True),
        ("gradient of weight", 1 + 1e-6, 0, False),
        ("gradient of weight", 1 + 1e-5, 32, False),
        ("gradient of input 0", 1 + 1e-6, 32, False),
    ],
)
def test_only_a_weights_gradient_may_be_rounded_more(
    name: str, factor: float, ulps: float, right: bool
) -> None:
    options = {**LAYERS["Linear"].defaults, "batch": 4}
    case = hfta_layers.make_case("case", "Linear", options, "fuse", ulps)
    own, wide = database_check.run_alone(case), database_check.run_alone(case)
    wide[1].tensors[name] = wide[1].tensors[name] * factor
    if right:
        database_check.compare(case, own, wide)
    else:
        with pytest.raises(database_check.Differs, match=f"{name}: member 1"):
            database_check.compare(case, own, wide)


def test_the_worst_way_is_the_outcome_of_a_case() -> None:
    outcomes = {"a": Outcome("right"), "b": Outcome("refused", "no"), "c": Outcome("wrong", "0.5")}
    entry = hfta_cases.Entry("Linear/x", "Linear", ("a", "b", "c"), outcomes.__getitem__)
    assert hfta_cases.outcome_of_entry(entry) == Outcome("wrong", "c: 0.5")
    table = hfta_cases.table({"Linear/x": (entry, Outcome("wrong", "c: 0.5"))})
    assert table["counts"]["Linear"] == {
        "cases": 1,
        "right": 0,
        "beyond": 0,
        "wrong": 1,
        "refused": 0,
        "crash": 0,
        "apart": 0,
    }
    assert table["wrong"] == {"Linear/x": "c: 0.5"}
