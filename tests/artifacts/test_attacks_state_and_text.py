"""Tests attacks 37 to 42 of ATTACKS.md: state, ragged lists, text on terminals, and random changes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import refused
from click.testing import CliRunner
from forged import Forged, golden
from hypothesis import given
from hypothesis import strategies as st

from widepack import load
from widepack.errors import ArtifactError
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.program import Program
from widepack_cli.main import cli


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.entry["state"].append(f.entry["state"][0]), "an input occurs twice"),
        (lambda f: f.entry["state"][0].update(output=9), "names input"),
        (lambda f: f.entry["state"][0].update(initial="inner.weight"), "but its initial weight"),
        (lambda f: f.entry["state"][0].update(initial="gone"), "is not in the table"),
        (lambda f: f.manifest.update(state=["other"]), "the states of the entries are total"),
        (lambda f: f.manifest.update(version=[1, 0]), "unknown state"),
        (
            lambda f: f.manifest["weights"][0].update(aliases=[f.manifest["weights"][1]["name"]]),
            "occurs twice",
        ),
        (
            lambda f: f.manifest["weights"][0].update(aliases=[f.manifest["weights"][0]["name"]]),
            "occurs twice",
        ),
        (lambda f: f.entry.update(result={"leaf": 1}), "result's tree"),
        (lambda f: f.entry["signature"].append(["y", "positional", {"leaf": 0}, False]), "each of the"),
    ],
)
def test_states_and_aliases_that_repeat_or_name_nothing(
    tmp_path: Path, change: Callable[[Forged], object], words: str
) -> None:
    forged = Forged("state")
    change(forged)
    refused(forged.save(tmp_path), words)


def test_ragged_lists_of_wrong_lengths(tmp_path: Path) -> None:
    forged = Forged("ragged")
    row = next(w for w in forged.manifest["weights"] if w["kind"] == "ragged")
    row["shape"].append(row["shape"][0])
    refused(forged.save(tmp_path / "more"), "one shape for each of the 2 members")
    row["shape"] = [*row["shape"][:1], []]
    refused(forged.save(tmp_path / "rank"), "all of one rank")
    forged = Forged("ragged")
    for program in forged.programs():
        for item in program["nodes"]:
            if item["op"] == "loop":
                item["args"] = [[1] * 5 if isinstance(a, list) else a for a in item["args"]]
                item["args"][0] = [1, 2, 3]
    refused(forged.save(tmp_path / "loop"), "not one value for each of 2 members")
    forged = Forged("ragged")
    for program in forged.programs():
        for slot in program["weights"]:
            slot[2] = "stacked"
    refused(forged.save(tmp_path / "kind"), "in the manifest's table it is ragged")


def test_control_characters_in_names_and_texts(tmp_path: Path) -> None:
    escape = "\x1b[2J\x1b]0;owned\x07\x9b1m\u202egood"
    forged = Forged()
    forged.manifest["provenance"].update({"command": escape, escape: "x"})
    forged.manifest["verification"]["torch"] = escape
    for row in forged.entry["wide"]:
        row["plan"]["choices"] = {n: [escape, escape] for n in row["plan"]["choices"]}
    for program in forged.programs("programs/"):
        for item in program["nodes"]:
            item.update(source=escape, out=escape, member=item.get("member", ""))
    path = str(forged.save(tmp_path))
    for words in (
        ["inspect", path],
        ["inspect", path, "--files", "--weights"],
        ["trace", path, "--source"],
        ["inspect", path, "--json"],
        ["trace", path, "--json"],
    ):
        result = CliRunner().invoke(cli, words, prog_name="widepack")
        assert result.exit_code == 0, result.output
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", result.output), words
    for change in (
        lambda f: f.manifest["members"][0].update(name=escape),
        lambda f: f.manifest["members"][0].update(name="fold0\u202egpj.exe"),
        lambda f: [p["nodes"][0].update(op=escape) for p in f.programs()],
        lambda f: f.manifest.update({escape: 1}),
    ):
        forged = Forged()
        change(forged)
        refused(forged.save(tmp_path / str(id(change))))


@pytest.mark.parametrize(
    "plan", [{"regions": 3}, {"choices": [1]}, {"regions": [{"strategy": []}]}, {"choices": {"relu": 5}}]
)
def test_wrong_records_that_a_command_shows(tmp_path: Path, plan: dict[str, Any]) -> None:
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"] = plan
    forged.manifest["verification"] = {"wide": {"shared.0": [7]}, "calls": 3}
    path = str(forged.save(tmp_path))
    for words in (["inspect", path], ["trace", path], ["inspect", path, "--json"]):
        result = CliRunner().invoke(cli, words, prog_name="widepack")
        assert result.exit_code in (0, 1) and (
            result.exception is None or isinstance(result.exception, SystemExit)
        ), result.exception


@pytest.mark.extended
@given(st.data())
def test_random_changes_of_manifest_and_programs(data: st.DataObject) -> None:
    """Runs the check of scripts/stress/fuzz_artifacts.py for a few changes."""
    forged = Forged(data.draw(st.sampled_from(["mlp", "ragged", "state", "entries"])))
    document: Any = (
        forged.manifest
        if data.draw(st.booleans())
        else data.draw(st.sampled_from(forged.programs("programs/")))
    )
    part, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(part[key], (dict, list)) and part[key] and data.draw(st.integers(0, 3)):
        part = part[key]
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
    part[key] = data.draw(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.text(max_size=5),
            st.just([]),
            st.just({}),
        )
    )
    try:
        if document is forged.manifest:
            document["digest"] = strict_json.digest({k: v for k, v in document.items() if k != "digest"})
            Manifest.from_bytes(strict_json.canonical(document))
        else:
            Program.from_json(strict_json.parse(strict_json.canonical(document), "program"))
    except ArtifactError as e:
        assert str(e).strip()


@given(st.data())
def test_random_damage_of_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "ens.wide"
    shutil.copytree(golden("mlp"), path)
    place = data.draw(st.sampled_from(sorted(p for p in path.rglob("*") if p.is_file())))
    content = bytearray(place.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    place.write_bytes(content)
    with pytest.raises(ArtifactError):
        load(path, verify="hashes")
