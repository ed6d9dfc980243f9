"""Tests the errors of `widepack.export`, the command `widepack export`, and that files appear complete."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from paths import ROOT
from support import must

from exporters.export_models import file_names
from widepack import export
from widepack.errors import ArtifactError, ArtifactExists, UsageError
from widepack_artifacts.lock import lock_handle
from widepack_cli.main import cli


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "tflite"}, "to='tflite' is unknown; known: onnx, pt2"),
        ({"weights": "none"}, "weights='none' is unknown for to='onnx'; known: inside, beside"),
        ({"to": "pt2", "weights": "beside"}, "weights='beside' is unknown for to='pt2'; known: inside, none"),
        ({"pattern": "mixed"}, "pattern='mixed' is unknown; known: shared, each"),
        ({"member": 0, "members": [1]}, "member and members are both given"),
        ({"member": 0, "pattern": "each"}, "a single member has no member axis"),
        ({"to": "pt2", "opset": 20}, "opset=20 is an option of ONNX files"),
        ({"to": "pt2", "member": "m9"}, "no member is called 'm9'; the members are m0, m1, m2"),
        ({"to": "pt2", "entry": "encode"}, "there is no entry 'encode'"),
        ({"opset": 17}, "opset=17: torch's exporter does not write it; give one of 18 to 23"),
    ],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], words: str, heads: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        export(heads, tmp_path / "e", **options)
    assert words in str(caught.value) and file_names(tmp_path) == set()


def test_existing_paths_are_refused(heads: Path, tmp_path: Path) -> None:
    (tmp_path / "e.pt2").write_text("mine")
    with pytest.raises(ArtifactExists, match="exists; give another path"):
        export(heads, tmp_path / "e.pt2", to="pt2")
    with pytest.raises(UsageError, match="is a folder"):
        export(heads, tmp_path, to="pt2")
    with pytest.raises(UsageError, match="the folder .* does not exist"):
        export(heads, tmp_path / "no" / "e.pt2", to="pt2")
    assert (tmp_path / "e.pt2").read_text() == "mine"


def test_a_full_disk_leaves_the_old_file(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "e.pt2").write_text("old")
    monkeypatch.setattr("widepack.system.atomic_file.os.fsync", full)
    with pytest.raises(
        ArtifactError,
        match="e.pt2: cannot be written: No space left on device; no part of the new file is left",
    ):
        export(heads, tmp_path / "e.pt2", to="pt2", force=True)
    assert file_names(tmp_path) == {"e.pt2"} and (tmp_path / "e.pt2").read_text() == "old"


def test_without_the_extra_the_error_names_the_package(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(
        UsageError,
        match=r"writing ONNX needs the packages onnx and onnxscript .*pip install 'widepack\[onnx\]'",
    ):
        export(heads, tmp_path / "e.onnx")


def test_the_command_writes_a_program_and_refuses_options_of_the_other_form(
    heads: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "e.pt2"
    done = CliRunner().invoke(cli, ["export", str(heads), "--to", "pt2", "-o", str(out), "--weightless"])
    assert done.exit_code == 0, done.output
    assert not caplog.records
    shown = ("3 members, pattern shared, entry forward", "left out", f"checked  torch {torch.__version__}")
    assert all(words in done.stdout for words in shown)
    for words, message in (
        (["--to", "onnx", "--weightless"], "--weightless is an option of pt2"),
        (["--to", "pt2", "--external"], "--external are options of ONNX"),
    ):
        refused = CliRunner().invoke(cli, ["export", str(heads), *words])
        assert refused.exit_code == 2 and message in refused.stderr
    refused = CliRunner().invoke(cli, ["export", str(heads), "--to", "pt2", "--member", "m7"])
    assert "no member is called 'm7'" in refused.stderr


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="docs/how-to/sign.md signs with ssh-keygen")
def test_the_lines_of_the_page_sign_an_artifact(heads: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "sign.md").read_text(encoding="utf-8")
    sign, verify = page.partition("<!-- signing:")[2].partition("```sh\n")[2].partition("```")[0].splitlines()
    (tmp_path / ".ssh").mkdir()
    must(sh('ssh-keygen -q -t ed25519 -N "" -C "" -f .ssh/id_ed25519', tmp_path))
    (tmp_path / "allowed_signers").write_text(
        f"me@example.org {(tmp_path / '.ssh' / 'id_ed25519.pub').read_text()}"
    )
    shutil.copytree(heads, tmp_path / "ens.wide")
    must(sh(sign, tmp_path))
    output = must(sh(verify.replace("widepack verify", "echo widepack verify"), tmp_path))
    assert 'Good "widepack" signature for me@example.org' in output and "widepack verify ens.wide" in output
    manifest = tmp_path / "ens.wide" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"m0", b"m9", 1))
    assert sh(verify, tmp_path).returncode != 0


def sh(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line.strip().replace("~", "."), shell=True, cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_next_export_removes_files_of_a_killed_one(tmp_path: Path, heads: Path) -> None:
    abandoned, busy = tmp_path / f".widepack-{'a' * 16}.pt2", tmp_path / f".widepack-{'b' * 16}.pt2"
    abandoned.write_bytes(b"half")
    with open(busy, "xb") as other:
        lock_handle(other.fileno())  # another export is running
        export(heads, tmp_path / "e.pt2", to="pt2")
        assert {p.name for p in tmp_path.iterdir()} == {"e.pt2", busy.name}
