"""Tests `widepack serve --memory`: whether a server computes whole weights of a fleet's members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_builds import QUICK

import widepack
from fleet.small_fleets import INPUTS, Net, write_fleet
from widepack_cli.main import cli
from widepack_serve.lifecycle.service import Service
from widepack_serve.settings import Settings

BATCH = 4000
"""So many rows that whole weights are faster."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    fleet = write_fleet(folder)
    out = folder / "fleet.wide"
    widepack.build(fleet.adapters, out, base=fleet.base, model=Net, inputs=INPUTS, **QUICK)
    return out


def whole_weights(ens: widepack.WideModel) -> bool:
    """Returns whether a program is bound that runs over whole weights."""
    return any("split" not in plan.strategies() for plan in ens.plans())


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    ("memory", "batch", "whole"),
    [("auto", BATCH, True), ("auto", 2, False), ("least", BATCH, False), ("most", 2, True)],
)
def test_memory_of_a_server(wide: Path, memory: str, batch: int, whole: bool) -> None:
    service = Service(Settings({"ens": str(wide)}, memory=memory, max_batch=batch))
    (artifact,) = service.catalog.artifacts.values()
    assert whole_weights(artifact.model) == whole


@pytest.mark.parametrize("memory", ["auto", "least", "most"])
def test_the_option(wide: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    load = widepack.load

    def recorded(path: str, **options: Any) -> widepack.WideModel:
        given.append(options["memory"])
        found: widepack.WideModel = load(path, **options)
        return found

    monkeypatch.setattr(widepack, "load", recorded)
    done = CliRunner().invoke(cli, ["serve", str(wide), "--check", "--memory", memory])
    assert done.exit_code == 0, done.output
    assert given == [memory]


def test_other_words_are_refused(wide: Path) -> None:
    done = CliRunner().invoke(cli, ["serve", str(wide), "--check", "--memory", "none"])
    assert done.exit_code == 2 and "'auto', 'least', 'most'" in done.output
    with pytest.raises(widepack.UsageError, match="memory='none' is unknown"):
        Service(Settings({"ens": str(wide)}, memory="none"))
