"""Tests `widepack calibrate`: where the times are kept, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from widepack.kernel_times import calibration, sources
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.sources import measured_here, shipped
from widepack.system.machine import name_of
from widepack_cli.main import cli


def calibrate(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """Runs the command with the times of another machine in the place of a measurement."""

    def measured(dtype: str = "float32", progress: object = None) -> Profile:
        found = shipped()["amd-epyc-avx512"].to_json()
        here = {"machine": name_of("cpu"), "threads": torch.get_num_threads()}
        return Profile.from_json({**found, **here})

    monkeypatch.setattr(calibration, "measure", measured)
    return CliRunner().invoke(cli, ["calibrate", *words], prog_name="widepack")


def test_times_are_kept_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources.forget()
    assert measured_here() is None
    result = calibrate(monkeypatch)
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["machine"] == name_of("cpu") and Path(lines["file"]).parent.parent.parent == tmp_path
    found = measured_here()
    assert found is not None and found.machine == lines["machine"]
    sources.forget()


def test_times_are_written_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    result = calibrate(monkeypatch, "-o", str(out), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["file"] == str(out)
    assert Profile.from_json(json.loads(out.read_text(encoding="utf-8"))).machine == facts["machine"]


def test_a_folder_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = calibrate(monkeypatch, "-o", str(tmp_path / "no" / "times.json"))
    assert result.exit_code == 2
    assert "the folder" in result.stderr and "create it first" in result.stderr
