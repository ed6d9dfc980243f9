"""Tests attack 109 of ATTACKS.md: feature names that no build writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attacks import refused
from forged import Forged

from widepack import load
from widepack.inference.feature_record import read_features


def forged(features: Any) -> Forged:
    artifact = Forged()
    artifact.manifest["provenance"]["features"] = features
    return artifact


def names(count: int = 6) -> list[Any]:
    return [f"f{k}" for k in range(count)]


def test_an_honest_record(tmp_path: Path) -> None:
    name = Forged().entry["inputs"][0]["name"]
    assert read_features(load(forged({name: names()}).save(tmp_path)).manifest) == {name: tuple(names())}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (names(5), "takes 6 names; 5 given"),
        (names(7), "takes 6 names; 7 given"),
        ([], "takes 6 names; 0 given"),
        (["f0"] * 6, "are called 'f0'"),
        ([*names(5), 5], "'5' is no name of a feature"),
        ([*names(5), ""], "'' is no name of a feature"),
        ([*names(5), "a\x1b[2J"], "is no name of a feature"),
        ([*names(5), "a\nb"], "is no name of a feature"),
        ([*names(5), "a" * 1001], "is no name of a feature"),
        ([*names(5), ["a"]], "is no name of a feature"),
        ("abcdef", "takes 6 names; no list given"),
        ({"a": 1}, "takes 6 names; no list given"),
        (None, "takes 6 names; no list given"),
    ],
)
def test_features_that_no_build_writes(words: Any, why: str, tmp_path: Path) -> None:
    name = Forged().entry["inputs"][0]["name"]
    refused(forged({name: words}).save(tmp_path / "a"), why)
    refused(forged({"other": names()}).save(tmp_path / "b"), "features: there is no input 'other'")
    for record in (3, [name], name, None):
        refused(forged(record).save(tmp_path / f"c{record}"), "provenance: features")
