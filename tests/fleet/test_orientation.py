"""Tests square weights that a model stores transposed: the adapter's file does not tell, the model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from safetensors.torch import save_file
from torch import Tensor, nn

import widepack
from widepack.fleet.adapter_members import transposed_in_module, transposed_in_programs
from widepack_artifacts.reader import Reader

SIZE, RANK = 24, 2
LAYERS = ("turned", "plain")


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], as that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 5)
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned, self.plain, self.head = Conv1D(), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.plain(torch.tanh(self.turned(x)))))
        return y


def adapter(folder: Path, base: dict[str, Tensor], seed: int, setting: bool) -> dict[str, Tensor]:
    """Writes an adapter of both square layers. Returns: the state dict of its member."""
    generator = torch.Generator().manual_seed(seed)
    state, tensors = dict(base), {}
    for layer in LAYERS:
        left, right = (torch.randn(s, generator=generator) / 3 for s in ((SIZE, RANK), (RANK, SIZE)))
        tensors[f"base_model.model.{layer}.lora_B.weight"] = left
        tensors[f"base_model.model.{layer}.lora_A.weight"] = right
        delta = left @ right
        state[f"{layer}.weight"] = base[f"{layer}.weight"] + (delta.t() if layer == "turned" else delta)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "fan_in_fan_out": setting}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return state


def answer(state: dict[str, Tensor], x: Tensor) -> Tensor:
    net = Net().double()
    net.load_state_dict(state)
    with torch.inference_mode():
        found: Tensor = net(x.double())
    return found


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("setting", [True, False])
def test_the_model_decides_how_a_square_weight_is_stored(tmp_path: Path, setting: bool) -> None:
    torch.manual_seed(0)
    base = Net().state_dict()
    torch.save(base, tmp_path / "base.pt")
    states = [adapter(tmp_path / f"l{i}", base, i, setting) for i in range(5)]
    folders = [tmp_path / f"l{i}" for i in range(5)]
    out = tmp_path / "fleet.wide"
    options: dict[str, Any] = {
        "model": Net,
        "inputs": [f"x=float32[B,{SIZE}]"],
        "budget": 0,
        "pt2": False,
        "targets": ("cpu",),
    }
    report = widepack.build(folders[:3], out, base=tmp_path / "base.pt", **options)
    assert report.fleet is not None and len(report.fleet["factored"]) == 2
    widepack.append(out, [folders[3]])
    ens = widepack.load(out)
    ens.swap(0, folders[4])
    x = torch.randn(4, SIZE)
    for found, state in zip(ens(x), [states[4], *states[1:4]], strict=True):
        torch.testing.assert_close(found.double(), answer(state, x), rtol=1e-5, atol=1e-5)


def test_orientation_of_modules_and_programs(tmp_path: Path) -> None:
    expected = {"turned.weight": True, "plain.weight": False, "head.weight": False}
    assert transposed_in_module(Net()) == expected
    saved(Net, tmp_path, f"x=float32[B,{SIZE}]", members=2)
    assert transposed_in_programs(Reader(tmp_path / "e.wide")) == expected
