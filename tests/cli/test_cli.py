"""Tests the command line: exit codes, the stream of each message, imports, and all steps to a benchmark."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from loaded import saved
from safetensors.torch import load_file
from support import Artifacts
from torch import nn

from cases import load, write_checkpoints
from widepack.errors import UsageError
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.reader import Reader
from widepack_cli.commands import build as build_command
from widepack_cli.main import COMMANDS, cli
from widepack_cli.shared.member_paths import expand
from widepack_cli.shared.progress_bar import Progress

CASE = load("mlp")
FILE = Path(CASE.__file__ or "").resolve()
MODEL = f"{FILE}:model"


def widepack(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words], prog_name="widepack")


def done(*words: str | Path) -> Result:
    result = widepack(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(code: int, *words: str | Path, quiet: bool = True) -> str:
    """Returns the error paragraph of a command that fails with this code.

    quiet: checks that standard output is empty.
    """
    result = widepack(*words)
    assert result.exit_code == code, result.output
    assert not (quiet and result.stdout)
    paragraph = result.stderr.rpartition("Error: ")[2].strip()
    assert paragraph
    assert "\n\n" not in paragraph
    assert "Traceback" not in result.stderr
    return paragraph


def options() -> list[str]:
    return ["--model", MODEL, "--no-pt2", *(part for spec in CASE.INPUTS for part in ("--input", spec))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(path) for path in write_checkpoints("mlp", tmp_path_factory.mktemp("ckpts"))]


@pytest.fixture(scope="module")
def artifact(checkpoints: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "ens.wide"
    done("build", *checkpoints, "-o", path, *options())
    return path


# Commands without an artifact


def fresh(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


@pytest.mark.extended(keep=16)
@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_no_torch(words: list[str]) -> None:
    code = (
        f"import sys; from widepack_cli.main import cli; cli.main({words!r}, "
        "standalone_mode=False); print('torch' in sys.modules)"
    )
    result = fresh(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("False")


def test_help_has_a_line_for_each_command() -> None:
    text = done("--help").stdout
    for name, line in COMMANDS.items():
        assert name in text
        assert line in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str) -> None:
    text = done(name, "--help").stdout
    assert "Example:" in text
    assert f"widepack {name}" in text.partition("Example:")[2]


def test_unknown_command_and_option_are_usage_errors() -> None:
    result = widepack("biuld")
    assert result.exit_code == 2
    assert "No such command 'biuld'. Did you mean build?" in result.stderr
    assert widepack("info", "--jsn").exit_code == 2
    assert widepack("build").exit_code == 2


def test_main_is_a_script() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "widepack_cli", "--version"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.split()[0]) == (0, "widepack"), result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ArtifactError("weights.safetensors is damaged"), 1, "weights.safetensors is damaged"),
        (UsageError("unknown strategy 'bm'; known: bmm"), 2, "unknown strategy 'bm'; known: bmm"),
        (
            OSError(28, "No space left on device", "/full/ens.wide"),
            1,
            "/full/ens.wide: No space left on device",
        ),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "/root/x: Permission denied"),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("you tried to allocate 16 bytes. Error code 12"), 1, "not enough memory for 16 bytes"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, "Aborted!"),
    ],
)
def test_errors_are_one_paragraph(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, checkpoints: list[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(import_module("widepack.building.build"), "build", fails)
    result = widepack("build", *checkpoints, "-o", "never.wide")
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    if not isinstance(error, KeyboardInterrupt):
        debug = widepack("--debug", "build", *checkpoints, "-o", "never.wide")
        assert debug.exit_code == code
        assert "Traceback" in debug.stderr
        assert words in debug.stderr


def test_info() -> None:
    document = json.loads(done("info", "--json").stdout)
    assert torch.__version__.startswith(document["packages"]["torch"])  # some builds add "+cu130"
    assert "cpu" in document["devices"]
    assert "python" in done("info").stdout


def test_primitives() -> None:
    text = done("primitives").stdout
    document = json.loads(done("primitives", "--json").stdout)
    assert "aten.linear.default" in document["linear"]
    for strategy in document["linear"]["aten.linear.default"]:
        assert strategy["strategy"] in text
        assert strategy["note"] in text
    assert list(json.loads(done("primitives", "conv", "--json").stdout)) == ["conv"]
    assert len(json.loads(done("primitives", "linear", "--json").stdout)["linear"]) > 5
    assert list(json.loads(done("primitives", "nn.Conv2d", "attention", "--json").stdout)["conv"]) == [
        "aten.conv2d.default",
        "aten.conv2d.padding",
    ]
    assert (
        document["sequential"]["aten.lstm.data"][0]["note"]
        == "recurrent over packed sequences: each step has other rows"
    )
    assert "recurrent over packed sequences" in done("primitives", "lstm.data").stdout
    of_lstm = [s["strategy"] for s in document["recurrent"]["aten.lstm.input"]]
    assert of_lstm == ["fold", "packed", "fused", "trained"]
    assert "there is no primitive or op called 'linaer'" in refused(2, "primitives", "linaer")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_pipe_has_one_line_for_each_stage() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for stage in ("capture", "verify"):
            for i in range(5):
                progress(stage, i, 4)
    assert stream.getvalue() == "capture\nverify\n"


def test_steps_of_a_stage_have_no_lines_of_their_own() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for total in (3, 5):
            progress("write weights", total, total)
        for done, step in enumerate(("predicted", "loop", "race")):
            progress(f"B = 1: {step}", done, 3)
    assert stream.getvalue().split("\n") == ["write weights", "B = 1", ""]


def test_a_terminal_shows_the_step_of_a_stage() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        for done, step in enumerate(("predicted", "loop")):
            progress(f"B = 1: {step}", done, 3)
    assert "B = 1  predicted" in stream.getvalue() and "B = 1  loop" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress("verify", 2, 4)
        assert "verify  [##################------------------]  2/4" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h\n")  # the cursor is shown again


def test_large_totals_are_percentages_with_the_time_that_is_left() -> None:
    """A CSV file is read by bytes: the bar shows its part, and not the numbers of bytes."""
    stream = Terminal()
    with Progress(stream) as progress:
        progress("predict", 0, 40_000_000)
        time.sleep(1.1)
        progress("predict", 10_000_000, 40_000_000)
        shown = stream.getvalue().splitlines()[-1]
        assert "25%" in shown and "40000000" not in shown
        assert re.search(r"\d\d:\d\d:0[2-9]", shown), shown


def test_settings_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "b").mkdir()
    paths = ["runs/a/best.pt", "runs/b/best.pt"]
    assert build_command.settings_of(None, paths) == {}
    assert capsys.readouterr().err == ""
    settings = (
        'model = "net.py:make"\ninput = "x=float32[B,4]"\nfeatures = "a,b,c,d"\n[model_arg]\nwidth = 8\n'
    )
    (tmp_path / "runs" / "widepack.toml").write_text(settings)
    assert build_command.settings_of(None, paths) == {}
    assert (
        "runs/widepack.toml was not read: it is not in the working folder. "
        "If you trust it, give --config runs/widepack.toml"
    ) in capsys.readouterr().err
    expected = {"input": ["x=float32[B,4]"], "features": ["a,b,c,d"], "model_arg": {"width": 8}}
    assert build_command.settings_of(Path("runs/widepack.toml"), paths) == {
        "model": "runs/net.py:make",
        **expected,
    }
    assert (
        "options that the command line does not give are read from runs/widepack.toml: "
        "model, input, features, model_arg" in capsys.readouterr().err
    )
    assert "there is no such file" in refused(2, "build", *paths, "--dry-run", "--config", "gone.toml")
    (tmp_path / "widepack.toml").write_text(settings)
    assert build_command.settings_of(None, paths) == {"model": "net.py:make", **expected}

    seen: dict[str, Any] = {}

    def record(*_: Any, **given: Any) -> None:
        seen.update(given)
        raise UsageError("enough")

    monkeypatch.setattr(import_module("widepack.building.build"), "build", record)
    refused(2, "build", *paths, "--dry-run", "--model-arg", "depth=2")
    assert (seen["model"], seen["model_args"], seen["inputs"]) == (
        "net.py:make",
        {"width": 8, "depth": 2},
        ["x=float32[B,4]"],
    )
    assert seen["features"] == "a,b,c,d"
    refused(2, "build", *paths, "--dry-run", "--model", "other:make", "--input", "y=float32[B]")
    assert (seen["model"], seen["model_args"], seen["inputs"]) == ("other:make", None, ["y=float32[B]"])


def test_an_error_of_many_lines_is_folded(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.pt") for i in range(9)]
    words = refused(1, "build", *paths, "--dry-run", "--model", "net.py:make", "--input", "x=float32[B,4]")
    lines = words.strip().split("\n")[-5:]
    assert lines[0].endswith("9 of 9 checkpoints cannot be used:")
    assert lines[3].endswith("2.pt): there is no such file")
    assert lines[4] == "and 6 more lines; `widepack --debug ...` shows all"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_code_next_to_the_checkpoints_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    (downloaded / "evil.py").write_text("import os; os.mkdir('evil-was-here')\ndef make(): ...")
    (downloaded / "widepack.toml").write_text('model = "evil.py:make"\ninput = "x=float32[B,4]"\n')
    paths = [str(downloaded / f"{i}.pt") for i in range(2)]
    for path in paths:
        torch.save({"w": torch.ones(2)}, path)
    assert "no model: a state dict has weights and no code" in refused(
        2, "build", *paths, "-o", "e.wide", *options
    )
    assert not list(tmp_path.rglob("evil-was-here"))


def test_patterns_that_no_shell_has_expanded(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt"):
        (tmp_path / name).touch()
    assert expand((f"{tmp_path}/*.pt", "other.pt")) == [
        f"{tmp_path}/a.pt",
        f"{tmp_path}/b.pt",
        "other.pt",
    ]
    assert f"no checkpoint matches {tmp_path}/*.pth" in refused(
        2, "build", f"{tmp_path}/*.pth", "-o", "x.wide"
    )


def test_samples(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    for value, expected in ((x, ((x,), None)), ((x, x), ((x, x), None)), ({"x": x}, ((), {"x": x}))):
        torch.save(value, tmp_path / "sample.pt")
        args, kwargs = build_command.read_sample(tmp_path / "sample.pt")
        assert str((args, kwargs)) == str(expected)
    (tmp_path / "sample.pt").write_text("no tensors")
    assert "cannot be read as tensors" in refused(
        2, "build", "a.pt", "-o", "x.wide", "--sample", tmp_path / "sample.pt"
    )
    assert "there is no such file" in refused(
        2, "build", "a.pt", "-o", "x.wide", "--sample", tmp_path / "none.pt"
    )
    torch.save(3, tmp_path / "sample.pt")
    assert "holds a int" in refused(2, "build", "a.pt", "-o", "x.wide", "--sample", tmp_path / "sample.pt")


# All steps from checkpoints to a benchmark


def test_build_reports_its_artifact(artifact: Path, checkpoints: list[str], tmp_path: Path) -> None:
    result = done("build", *checkpoints, "-o", tmp_path / "ens.wide", *options(), "--json")
    document = json.loads(result.stdout)
    assert len(document["members"]) == len(checkpoints)
    assert document["wide_share"] >= 0.95
    assert "capture\n" in result.stderr, "the stages are not on standard error"
    text = done("build", *checkpoints, "-o", tmp_path / "ens.wide", *options(), "--force").stdout
    head, weights, verified, plan, wrote, following = text.splitlines()
    assert head == f"{len(checkpoints)} members: {', '.join(document['members'])}"
    assert re.fullmatch(r"weights      .* in memory, and no weight is equal in all members", weights)
    assert re.fullmatch(
        r"verified     8 calls of every member against float64: off by at most \S+, your own models by \S+ "
        r"\(accepted: about 4 times your models' error\)",
        verified,
    )
    assert re.match(r"plan         (any batch|batch 1 to \d+): all members at once", plan)
    assert wrote.startswith(f"wrote {tmp_path / 'ens.wide'}: ")
    assert following.startswith(f"next: widepack inspect {tmp_path / 'ens.wide'}, widepack serve ")
    more = done("build", *checkpoints, "-o", tmp_path / "ens.wide", *options(), "--force", "--verbose").stdout
    assert {"wide", "strategies", "nodes", "kernels", "time"} <= {
        line.split()[0] for line in more.splitlines()
    }


def test_dry_run_writes_nothing(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = done("build", *checkpoints, "--dry-run", *options()).stdout
    assert "dry run: nothing was written" in text
    assert "on disk; programs and proof come on top" in text
    assert "in memory" in text
    assert os.listdir(tmp_path) == []


def test_build_refuses(artifact: Path, checkpoints: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.wide"
    assert "-o" in refused(2, "build", *checkpoints, *options())
    assert "is an artifact already" in refused(2, "build", *checkpoints, "-o", artifact, *options())
    words = refused(2, "build", *checkpoints, "-o", out, *options(), "--strategy", "bm")
    assert "'bm'" in words
    assert "bmm" in words
    refused(2, "build", *checkpoints, "-o", out, "--model", MODEL, "--input", "x=flaot32[B,4]")
    assert "gone.pt" in refused(1, "build", checkpoints[0], tmp_path / "gone.pt", "-o", out, *options())
    (tmp_path / "text.pt").write_text("hello")
    assert "text.pt" in refused(1, "build", checkpoints[0], tmp_path / "text.pt", "-o", out, *options())
    assert not out.exists()


def test_a_bare_build_says_what_to_give() -> None:
    for words in ((), ("-o", "ens.wide"), ("--dry-run",)):
        result = widepack("build", *words)
        assert result.exit_code == 2
        assert "give the checkpoints, the folder to write" in result.stderr
        assert "widepack build fold*.pt -o ens.wide --model net.py:make" in result.stderr


def test_build_makes_the_folders_above(checkpoints: list[str], tmp_path: Path) -> None:
    out = tmp_path / "runs" / "today" / "e.wide"
    assert "parent folders are created" in " ".join(done("build", "--help").stdout.split())
    refused(2, "build", *checkpoints, "-o", out, "--model", MODEL, "--input", "x=flaot32[B,4]")
    assert os.listdir(tmp_path) == []
    done("build", *checkpoints, "-o", out, *options(), "--no-pt2")
    assert str(out) in done("inspect", out).stdout


def test_a_member_that_reads_values_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import math\n\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n    def forward(self, x):\n    "
        "    return super().forward(x) / math.log(float(x.abs().max()) + 2)\n"
    )
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    model = (
        "--model",
        f"{tmp_path}/net.py:Net",
        "--model-arg",
        "in_features=3",
        "--model-arg",
        "out_features=2",
        "--input",
        "x=float32[B,3]",
    )
    words = refused(1, "build", tmp_path / "a.pt", "-o", tmp_path / "e.wide", *model)
    assert "\n" not in words
    assert (
        "Net reads the value of a tensor as a Python number at net.py:8 in forward: "
        "return super().forward(x) / math.log(float(x.abs().max()) + 2)" in words
    )
    assert "has no 'Nope'. It defines Net." in refused(
        2,
        "build",
        tmp_path / "a.pt",
        "-o",
        tmp_path / "e.wide",
        "--model",
        f"{tmp_path}/net.py:Nope",
        *model[2:],
    )


def test_build_takes_any_checkpoint(checkpoints: list[str], tmp_path: Path) -> None:
    states = [torch.load(path, weights_only=True) for path in checkpoints]
    saved = [tmp_path / f"m{i}.ckpt" for i in range(len(states))]
    for path, state in zip(saved, states, strict=True):
        torch.save(
            {
                "model": {f"module.{k}": v for k, v in state.items()},
                "model_ema": {"module": {k: v.half() for k, v in state.items()}},
            },
            path,
        )
    (tmp_path / "names.txt").write_text("\n".join(f"fold {i}" for i in range(len(states))))
    out = tmp_path / "e.wide"
    words = refused(1, "build", *saved, "-o", out, *options())
    assert f"{len(saved)} of {len(saved)} checkpoints cannot be used:" in words
    assert (
        f"Dicts of tensors in it: model ({len(states[0])} tensors), model_ema.module "
        f"({len(states[0])} tensors); name one, for example --key model." in words
    )
    text = done(
        "build",
        *saved,
        "-o",
        out,
        *options(),
        "--key",
        "model_ema.module",
        "--dtype",
        "f32",
        "--names",
        tmp_path / "names.txt",
    ).stdout
    assert "members: fold 0, fold 1" in text
    assert "bit for bit" in done("verify", out, *saved, "--key", "model_ema.module", "--model", MODEL).stdout
    assert "unknown dtype 'int3'" in refused(
        2, "build", *saved, "-o", tmp_path / "f.wide", *options(), "--dtype", "int3"
    )
    assert "and there is no file gone.txt" in refused(
        2, "build", *saved, "-o", tmp_path / "f.wide", *options(), "--names", "gone.txt"
    )

    (tmp_path / "text.pt").write_text("hello")
    result = done(
        "build", tmp_path / "text.pt", *checkpoints, "-o", out, *options(), "--skip-bad", "--force", "--json"
    )
    assert json.loads(result.stdout)["left_out"] == [
        {
            "number": 0,
            "path": str(tmp_path / "text.pt"),
            "why": "is a text file (it starts with 'hello'), not a file of torch.save or safetensors",
        }
    ]
    assert (
        f"left out     {tmp_path / 'text.pt'}: is a text file"
        in done(
            "build", tmp_path / "text.pt", *checkpoints, "-o", out, *options(), "--skip-bad", "--force"
        ).stdout
    )
    assert "left_out" in done("inspect", out).stdout
    assert "is a text file" in refused(
        1, "build", tmp_path / "text.pt", "-o", tmp_path / "f.wide", *options(), "--skip-bad"
    )
    assert not (tmp_path / "f.wide").exists()


def test_checkpoints_that_bring_their_model(tmp_path: Path) -> None:
    members = [CASE.member(i) for i in range(2)]
    pickled = [tmp_path / f"m{i}.pt" for i in range(2)]
    for path, member in zip(pickled, members, strict=True):
        torch.save(member, path)
    specs = [part for spec in CASE.INPUTS for part in ("--input", spec)]
    out = tmp_path / "e.wide"
    assert "or give --trust-pickle if you trust the origin of the file" in refused(
        1, "build", *pickled, "-o", out, *specs
    )
    done("build", *pickled, "-o", out, *specs, "--trust-pickle")
    assert "bit for bit" in done("verify", out, *pickled, "--trust-pickle").stdout
    args, _ = CASE.sample(4, 1)
    programs = [tmp_path / f"m{i}.pt2" for i in range(2)]
    for path, member in zip(programs, members, strict=True):
        torch.export.save(
            torch.export.export(member, args, dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}], strict=False),
            path,
        )
    done("build", *programs, "-o", out, "--force")
    assert "bit for bit" in done("verify", out, *programs, "--model", MODEL).stdout
    assert (
        json.loads(done("inspect", out, "--json").stdout)["manifest"]["provenance"]["model"]
        == "the exported programs()"
    )
    assert "no model: a state dict has weights and no code" in refused(
        2, "build", *pickled[:1], *programs, "--trust-pickle", "-o", tmp_path / "f.wide", *specs
    )


def test_inspect(artifact: Path) -> None:
    text = done("inspect", artifact, "--weights", "--files").stdout
    document = json.loads(done("inspect", artifact, "--json").stdout)
    assert set(document) == {"path", "summary", "manifest"}
    for name in document["summary"]["members"]:
        assert name in text
    for weight in document["manifest"]["weights"]:
        assert str(weight["name"] if isinstance(weight, dict) else weight[0]) in text
    assert "plans   cpu, shared" in text
    assert "sha256" in text
    assert "none.wide" in refused(1, "inspect", artifact.parent / "none.wide")


def test_trace(artifact: Path) -> None:
    text = done("trace", artifact).stdout
    steps = json.loads(done("trace", artifact, "--json").stdout)["steps"]
    assert {"node", "op", "reads", "kind", "strategy", "why", "becomes", "out", "source"} == set(steps[0])
    linear = [s for s in steps if s["op"] == "aten.linear.default"]
    assert linear
    assert all(s["kind"] == "stacked" and s["why"] and s["becomes"] for s in linear)
    assert "Stacked" in text
    for device in ("cpu", "cuda"):
        for pattern in ("shared", "each"):
            assert (
                f"{device}, {pattern}"
                in done("trace", artifact, "--device", device, "--pattern", pattern, "--source").stdout
            )
    assert "there is no entry 'encode'; the entries of this artifact are forward" in refused(
        2, "trace", artifact, "--entry", "encode"
    )
    assert "there is no wide program for tpu, shared" in refused(2, "trace", artifact, "--device", "tpu")


def test_trace_shows_what_runs_once(artifacts: Artifacts) -> None:
    steps = json.loads(done("trace", artifacts("frozen_trunk"), "--json").stdout)["steps"]
    trunk = [s for s in steps if s["op"] == "aten.conv2d.default"]
    assert trunk
    assert all((s["strategy"], s["kind"], set(s["reads"])) == ("once", "shared", {"shared"}) for s in trunk)
    assert {s["kind"] for s in steps if s["op"] == "aten.linear.default"} == {"stacked"}
    large = json.loads(done("trace", artifacts("mlp"), "--batch", "100000", "--json").stdout)
    assert large["batch"][0] > 1, "a large batch has no separate plan"


def deep_network() -> nn.Module:
    hidden = (layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(8, 8)).eval()


def test_trace_explains_the_chain_of_layers_of_a_gpu(tmp_path: Path) -> None:
    saved(deep_network, tmp_path, "input=float32[B,8]", targets=("cuda",))
    found = json.loads(done("trace", tmp_path / "e.wide", "--device", "cuda", "--json").stdout)
    assert found["batch"][0] == 1, "without a batch, the plan of small ones is shown"
    layers = [s for s in found["steps"] if s["op"] == "aten.linear.default"]
    assert {s["strategy"] for s in layers} == {"chain"}
    assert all(f"one kernel for {len(layers)} layers takes" in s["why"] for s in layers)
    assert [op for s in layers for op in s["becomes"] if "mlp_chain" in op] == ["widepack.mlp_chain.default"]


@pytest.mark.parametrize("command", ["inspect", "trace"])
def test_inspection_needs_no_torch(command: str, artifact: Path) -> None:
    result = fresh(
        "import sys; from widepack_cli.main import cli; "
        f"cli.main([{command!r}, {str(artifact)!r}], standalone_mode=False); print('torch' in sys.modules)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("False")


def test_extract_gives_the_checkpoint_back(artifact: Path, checkpoints: list[str], tmp_path: Path) -> None:
    names = json.loads(done("inspect", artifact, "--json").stdout)["summary"]["members"]
    original = torch.load(checkpoints[1], weights_only=True)
    for member, out in ((names[1], tmp_path / "one.safetensors"), ("1", tmp_path / "one.pt")):
        done("extract", artifact, member, "-o", out)
        found = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)
        assert set(found) == set(original)
        assert all(
            torch.equal(found[k], original[k]) and found[k].dtype == original[k].dtype for k in original
        )
    before = (tmp_path / "one.pt").read_bytes()
    assert "exists; give another path" in refused(2, "extract", artifact, "0", "-o", tmp_path / "one.pt")
    assert (tmp_path / "one.pt").read_bytes() == before
    done("extract", artifact, "0", "-o", tmp_path / "one.pt", "--force")
    assert (tmp_path / "one.pt").read_bytes() != before
    assert "no member is called 'm99'" in refused(2, "extract", artifact, "m99")
    assert "must end in .pt, .pth or .safetensors" in refused(
        2, "extract", artifact, "0", "-o", tmp_path / "one.onnx"
    )


def test_verify(artifact: Path, checkpoints: list[str], tmp_path: Path) -> None:
    text = done("verify", artifact).stdout
    for word in ("digest", "sizes", "hashes", "probe"):
        assert word in text
    assert json.loads(done("verify", artifact, "--json").stdout)["ok"] is True
    text = done("verify", artifact, *checkpoints, "--model", MODEL).stdout
    assert "checkpoints" in text
    assert "answers" in text
    assert "in the order of the members" in refused(
        1, "verify", artifact, *checkpoints[::-1], "--model", MODEL, quiet=False
    )
    assert "checkpoints" in refused(1, "verify", artifact, *checkpoints[1:], quiet=False)


def test_verify_finds_a_flipped_bit(artifact: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "ens.wide"
    shutil.copytree(artifact, copy)
    (weights,) = copy.glob("weights-*")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights.name in refused(1, "verify", copy, quiet=False)


@pytest.mark.extended
def test_bench(artifact: Path, tmp_path: Path) -> None:
    common_words = (
        "bench",
        artifact,
        "--batch",
        "2",
        "--baseline",
        "loop",
        "--baseline",
        "vmap",
        "--budget",
        "1.5",
        "--threads",
        "1",
    )
    result = widepack(*common_words, "--model", MODEL, "--json", tmp_path / "report.json")
    assert result.exit_code in (0, 1), result.output  # 1: the machine is too busy
    assert "your own modules" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["batch"] == 2
    document = json.loads(widepack(*common_words, "--pattern", "each", "--json").stdout)
    assert document["pattern"] == "each"
    assert "member programs" in document["modules"]
    assert "unknown baseline 'lop'" in refused(2, "bench", artifact, "--baseline", "lop")
    assert "not a list of positive integers" in refused(2, "bench", artifact, "--batch", "1,x")


def test_a_model_that_prints_does_not_change_the_json_output(checkpoints: list[str], tmp_path: Path) -> None:
    loud = tmp_path / "loud.py"
    loud.write_text("from cases import mlp\n\ndef make():\n    print('hello')\n    return mlp.model()\n")
    words = ["--model", f"{loud}:make", *(part for spec in CASE.INPUTS for part in ("--input", spec))]
    result = done("build", *checkpoints, "-o", tmp_path / "x.wide", *words, "--json")
    json.loads(result.stdout)
    assert "hello" in result.stderr


@pytest.mark.slow
def test_demo_in_full(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ("demo", tmp_path / "demo", "--count", "2", "--budget", "0.5", "--threads", "1")
    text = done(*words).stdout
    assert "the members answer" in text and "their mean" in text and "speed: " in text
    assert "$ widepack build" in text
    assert "$ widepack verify" in text and "digest ok, sizes ok, hashes ok, probe ok" in text
    assert "$ widepack bench" in text
    assert len(text.splitlines()) < 30
    assert (tmp_path / "demo" / "digits.wide" / "manifest.json").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "is not the folder of an earlier demo" in refused(2, "demo", tmp_path / "other")


@pytest.mark.parametrize(
    ("verdict", "ratio", "words"),
    [
        ("holds", {"value": 2.04, "low": 1.9, "high": 2.1}, ["2.04 [1.90, 2.10]", "2.0 times as fast"]),
        (
            "noisy",
            {"value": 2.04, "low": 1.2, "high": None},
            ["2.04 [1.20, open]", "uncertain: other programs"],
        ),
        ("noisy", {"value": None}, ["no comparison: the time was too short"]),
    ],
)
def test_demo_shows_its_speed_on_a_busy_machine(
    verdict: str,
    ratio: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo = import_module("widepack_cli.commands.demo")
    row = {"median_ms": 1.5, "verdict": verdict, "ratio": ratio, "baselines": {"loop": {"median_ms": 3.0}}}
    report = {"members": 8, "environment": {"device": "cpu"}, "rows": [row]}

    def bench(command: list[str]) -> str:
        Path(command[-1]).write_text(json.dumps(report))
        if verdict == "noisy":
            raise demo.Noisy("the machine was too busy")
        return ""

    monkeypatch.setattr(demo, "run", bench)
    line = demo.timed(tmp_path, tmp_path / "e.wide", tmp_path / "net.py", [])
    shown = capsys.readouterr().out + line
    assert all(word in shown for word in words), shown
    assert "1.50 ms for 32 images and 8 members" in line
    assert ("uncertain" in line) == (verdict == "noisy" and ratio["value"] is not None)


def test_demo_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widepack_cli.commands.demo.find_spec", lambda name: None)
    assert "pip install scikit-learn" in refused(1, "demo")


def test_inspect_shortens_long_tables(monkeypatch: pytest.MonkeyPatch, artifact: Path) -> None:
    """The table shows a few of 500 members and shortens long names. --members lists all."""
    original = Reader(artifact).manifest
    many = tuple(
        replace(original.members[0], name=f"customer-{i}-{'n' * 90}", source=f"/data/{'x' * 200}/{i}.pt")
        for i in range(500)
    )
    command = import_module("widepack_cli.commands.inspect")
    manifest = replace(original, members=many)
    text = command.lines("ens.wide", manifest, False, False)
    rows = text[text.index("members") + 1 :]
    rows = rows[: rows.index("")]
    assert len(rows) == 15 and "... 487 more; --members lists all" in rows[11] and "499" in rows[-1]
    assert max(map(len, rows)) <= 130
    whole = command.lines("ens.wide", manifest, False, False, True)
    assert sum("customer-" in row for row in whole) == 500 and any(many[250].name in row for row in whole)


def test_the_order_of_the_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell sorts cust-10 before cust-2. A notice reports this, and --sort natural sorts by number."""
    order = import_module("widepack_cli.commands.build").in_order
    paths = [str(tmp_path / f"cust-{i}.pt") for i in (0, 1, 10, 11, 2)]
    assert order(paths, "none") == paths
    assert "member 2 is cust-10.pt, before cust-2.pt" in capsys.readouterr().err
    assert order(paths, "natural") == [str(tmp_path / f"cust-{i}.pt") for i in (0, 1, 2, 10, 11)]
    assert order(paths[::-1], "none") == paths[::-1] and not capsys.readouterr().err, (
        "the order of the user was changed or reported"
    )
    assert order([f"{i}/a" for i in range(3)], "none") and not capsys.readouterr().err
    assert order(["b2", "b02", "a10b3", "a10b20"], "natural") == ["a10b3", "a10b20", "b02", "b2"]
