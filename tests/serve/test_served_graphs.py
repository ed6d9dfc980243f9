"""Tests `widepack serve --graph`: graphs are captured before the first request, and a CPU refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from graph_cases import artifact
from graph_stand_in import use_stand_in

import widepack
from widepack_cli.main import cli
from widepack_serve.lifecycle.service import Service
from widepack_serve.settings import Settings


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact(tmp_path_factory.mktemp("served"), "centered")


def test_the_graphs_of_a_server_are_captured_at_its_start(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    path = artifact(tmp_path_factory.mktemp("steps"), "one")
    service = Service(Settings({"ens": str(path)}, max_batch=12, graph=True))
    (found,) = service.catalog.artifacts.values()
    assert found.model.graph_use()[0].captured == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("off", False), ("on", True)])
def test_the_option(wide: Path, word: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    load = widepack.load

    def recorded(path: str, **options: Any) -> widepack.WideModel:
        given.append(options["graph"])
        found: widepack.WideModel = load(path, **options)
        return found

    monkeypatch.setattr(widepack, "load", recorded)
    done = CliRunner().invoke(cli, ["serve", str(wide), "--check", "--graph", word])
    assert given == [value]
    assert done.exit_code == (2 if value is True else 0), done.output
    assert (value is True) == ("graph=True needs a CUDA device" in done.output)


def test_other_words_are_refused(wide: Path) -> None:
    done = CliRunner().invoke(cli, ["serve", str(wide), "--check", "--graph", "yes"])
    assert done.exit_code == 2 and "'auto', 'on', 'off'" in done.output
