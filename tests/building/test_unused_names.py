"""Names beside a prefix that no member uses are named in the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import nn

import widepack
from widepack_cli.main import cli

FACTORY = (
    "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))\n"
)
INPUT = ("--input", "input=float32[B,4]", "--budget", "0", "--no-pt2")
LINE = "left out     model_ema.* (5 names), steps (1 name): names that the model does not have"


def save(path: Path, seed: int, extra: bool = True) -> Path:
    torch.manual_seed(seed)
    state = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).state_dict()
    average = {f"model_ema.{name.replace('.', '')}": 2 * value for name, value in state.items()}
    more = {**average, "model_ema.decay": torch.tensor(0.9), "steps": torch.tensor(3)} if extra else {}
    torch.save({"state_dict": {**{f"model.{k}": v for k, v in state.items()}, **more}, "epoch": 1}, path)
    return path


def run(*words: Any) -> Any:
    result = CliRunner().invoke(cli, [str(word) for word in words], prog_name="widepack")
    assert result.exit_code == 0, result.output
    return result


def test_build_append_update_and_swap_name_what_they_leave_out(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    model, out = ("--model", f"{tmp_path / 'net.py'}:make"), tmp_path / "e.wide"
    files = [save(tmp_path / f"{i}.pt", i) for i in range(3)]
    assert LINE in run("build", *files[:2], "-o", out, *model, *INPUT).stdout.splitlines()
    as_json = run("build", *files[:2], "-o", tmp_path / "j.wide", *model, *INPUT, "--json")
    assert json.loads(as_json.stdout)["unused"] == {"model_ema.*": 5, "steps": 1}
    assert LINE in as_json.stderr.splitlines()
    quiet = run(
        "build", *files[:2], "-o", tmp_path / "q.wide", *model, *INPUT,
        "--ignore", "model_ema.*", "--ignore", "steps",
    )  # fmt: skip
    assert "left out" not in quiet.output

    appended: Any = widepack.append(out, [files[2]])
    assert appended.unused == {"model_ema.*": 5, "steps": 1}
    assert LINE in run("update", out, "--member", "0", files[2]).stdout.splitlines()
    ens: Any = widepack.load(out)
    swapped = ens.swap(1, files[0])
    assert swapped.unused == {"model_ema.*": 5, "steps": 1}
    assert str(swapped).endswith("; left out: model_ema.* (5 names), steps (1 name)")
    plain = ens.swap(1, save(tmp_path / "plain.pt", 1, extra=False))
    assert plain.unused == {} and "left out" not in str(plain)
