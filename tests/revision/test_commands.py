"""Tests the commands `widepack update`, `append` and `drop`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from revisions import X, check_answers
from torch import nn

from widepack import ReviseReport
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli


def done(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(w) for w in words])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.mark.extended
def test_update_append_and_drop_from_the_command_line(
    copy: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path
) -> None:
    text = done("update", copy, "--member", "m1", paths[3], "--member", "2", paths[5])
    assert f"m1 is {paths[3]}, was {paths[1]}" in text
    assert "trunk.weight is no longer equal in all members: shared 144 B -> stacked 432 B" in text
    assert "programs     lowered again" in text and f"now {Reader(copy).manifest.digest}" in text
    found = json.loads(done("append", copy, paths[0], "--names", "x", "--json"))
    assert found["members"] == ["m0", "m1", "m2", "x"] and set(found) == set(
        ReviseReport.__dataclass_fields__
    )
    text = done("drop", copy, "x", "0", "-o", tmp_path / "o.wide", "--max-shard-size", "100B")
    assert len(Reader(copy).weights_files()) == 1 < len(Reader(tmp_path / "o.wide").weights_files())
    assert f"dropped      m0, from {paths[0]}" in text and "2 members: m1, m2" in text
    check_answers(tmp_path / "o.wide", [nets[3], nets[5]], X)
    text = done("inspect", copy)
    assert (
        "since then" in text
        and f" update: m1 is {paths[3]}, was {paths[1]}" in text
        and f" append: x is {paths[0]}" in text
    )
    assert " drop: without m0" in done("inspect", tmp_path / "o.wide")
    assert "bit for bit" in done("verify", tmp_path / "o.wide", paths[3], paths[5])
    assert "no member is called 'm9'" in done("update", copy, "--member", "m9", paths[3], code=2)
    assert "the member m1 is given twice" in done(
        "update", copy, "--member", "m1", paths[3], "--member", "1", paths[4], code=2
    )
    assert "Missing option '--member'" in done("update", copy, code=2)
    assert "all 4 members" in done("drop", copy, "0", "1", "2", "x", code=2)
    assert "has this name already" in done("append", copy, paths[1], code=2)
    assert "it does not exist" in done("append", tmp_path / "none.wide", paths[1], code=1)
