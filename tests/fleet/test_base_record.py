"""Tests the record of a fleet's base, and the warning of adapters that name another base model."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import widepack
from fleet.small_fleets import SmallFleet, build_of, write_fleet
from widepack.fleet.adapter import read_adapter
from widepack.fleet.adapter_members import warn_of_other_base
from widepack_cli.main import cli


def name_base(adapter: Path, name: str) -> None:
    """Writes the name of a base model into the settings of an adapter."""
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "base_model_name_or_path": name}), encoding="utf-8")


def built(fleet: SmallFleet, out: Path, **options: Any) -> Path:
    build_of(options.pop("paths", fleet.adapters), out, **{"base": fleet.base, **options})
    return out


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SmallFleet:
    found = write_fleet(tmp_path_factory.mktemp("named"))
    for adapter in found.adapters:
        name_base(adapter, "org/base")
    return found


@pytest.fixture(scope="module")
def wide(fleet: SmallFleet) -> Path:
    return built(fleet, fleet.base.parent / "named.wide")


def other(fleet: SmallFleet, folder: Path, name: str) -> Path:
    """Returns a copy of an adapter that names another base model."""
    shutil.copytree(fleet.adapters[0], folder / "other")
    name_base(folder / "other", name)
    return folder / "other"


def record_of(path: Path) -> Any:
    return widepack.load(path, warmup=False).manifest.provenance.get("base")


def test_the_base_of_adapters_is_recorded(fleet: SmallFleet, wide: Path) -> None:
    data = fleet.base.read_bytes()
    record = {"source": str(fleet.base), "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert record_of(wide) == {**record, "named": "org/base"}
    shown = CliRunner().invoke(cli, ["inspect", str(wide)])
    assert shown.exit_code == 0, shown.output
    assert f"base {fleet.base}, named org/base by the adapters, sha256 {record['sha256']}" in shown.output


@pytest.mark.extended
def test_the_base_of_merged_checkpoints_is_recorded_if_it_is_given(fleet: SmallFleet, tmp_path: Path) -> None:
    given = built(fleet, tmp_path / "given.wide", paths=fleet.merged, unmerge=True)
    assert record_of(given)["source"] == str(fleet.base) and "named" not in record_of(given)
    absent = built(fleet, tmp_path / "absent.wide", paths=fleet.merged, unmerge=True, base=None)
    assert record_of(absent) is None
    shown = CliRunner().invoke(cli, ["inspect", str(absent)])
    assert shown.exit_code == 0 and "\n  base " not in shown.output


def test_a_swap_of_an_adapter_that_names_another_base_warns(
    fleet: SmallFleet, wide: Path, tmp_path: Path
) -> None:
    ens = widepack.load(wide)
    adapter = other(fleet, tmp_path, "org/second")
    words = r"other names the base model 'org/second', and the adapters of the artifact name 'org/base'"
    with pytest.warns(UserWarning, match=words) as caught:
        ens.swap(1, adapter)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["org/base", "org/base/", ""])
def test_a_swap_of_an_adapter_that_names_this_base_or_none_does_not_warn(
    fleet: SmallFleet, wide: Path, tmp_path: Path, name: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        widepack.load(wide).swap(1, other(fleet, tmp_path, name))


def test_append_warns_and_keeps_the_record(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    adapter, out = other(fleet, tmp_path, "org/second"), tmp_path / "more.wide"
    with pytest.warns(UserWarning, match="'org/second'.*'org/base'"):
        widepack.append(wide, [adapter], out=out)
    assert record_of(out) == record_of(wide)


def test_a_build_of_adapters_that_name_several_bases_warns(fleet: SmallFleet, tmp_path: Path) -> None:
    paths = [*fleet.adapters[:2], other(fleet, tmp_path, "org/second")]
    with pytest.warns(UserWarning, match=r"2 base models: .*a0 names 'org/base', and .* 'org/second'"):
        out = built(fleet, tmp_path / "several.wide", paths=paths)
    assert "named" not in record_of(out)


@pytest.mark.parametrize("record", [None, [], "x", {"named": 3}, {"named": ""}, {}])
def test_records_of_strangers(fleet: SmallFleet, record: Any) -> None:
    adapter = read_adapter(fleet.adapters[0])
    adapter = replace(adapter, config=replace(adapter.config, base_model="org/second"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_base({"base": record}, adapter)
