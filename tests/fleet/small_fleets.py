"""Writes small fleets for tests: a base model, LoRA adapters in PEFT's format, and merged checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import widepack

SIZE = 48
LAYERS = ("first", "second")
INPUTS = ["x=float32[B,48]"]


class Net(nn.Module):
    """Two layers that adapters change, one that they do not, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.second = nn.Linear(SIZE, SIZE, bias=False)
        self.plain = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.first(x)))
        found: Tensor = self.head(torch.tanh(self.plain(self.second(x))))
        return found


@dataclass(frozen=True)
class SmallFleet:
    """The files of a fleet.

    base: the checkpoint of the base. adapters: the folders. merged: the checkpoints with the adapters merged
    in. states: their state dicts.
    """

    base: Path
    adapters: list[Path]
    merged: list[Path]
    states: list[dict[str, Tensor]]


def write_adapter(folder: Path, rank: int, alpha: int, seed: int, *, head: bool = True) -> dict[str, Tensor]:
    """Writes an adapter and returns its tensors. head: whether it has a head of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in LAYERS:
        left = 0.02 * torch.randn(SIZE, rank, generator=generator)
        right = torch.randn(rank, SIZE, generator=generator)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = left
        tensors[f"base_model.model.{layer}.lora_A.weight"] = right
    if head:
        tensors["base_model.model.head.weight"] = 0.2 * torch.randn(3, SIZE, generator=generator)
        tensors["base_model.model.head.bias"] = torch.randn(3, generator=generator)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(LAYERS),
        "modules_to_save": ["head"] if head else None,
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def merged_state(
    base: dict[str, Tensor], tensors: dict[str, Tensor], rank: int, alpha: int
) -> dict[str, Tensor]:
    """Returns the base's state dict with an adapter merged in, as PEFT does it."""
    found = {name: value.clone() for name, value in base.items()}
    for layer in LAYERS:
        left = tensors[f"base_model.model.{layer}.lora_B.weight"]
        right = tensors[f"base_model.model.{layer}.lora_A.weight"]
        found[f"{layer}.weight"] += (left @ right) * (alpha / rank)
    for name in ("head.weight", "head.bias"):
        found[name] = tensors.get(f"base_model.model.{name}", found[name])
    return found


def write_fleet(folder: Path, ranks: Sequence[int] = (2, 4, 4), alpha: int = 8) -> SmallFleet:
    """Writes a fleet with one member for each rank."""
    torch.manual_seed(0)
    base = Net().state_dict()
    torch.save(base, folder / "base.pt")
    adapters, merged, states = [], [], []
    for i, rank in enumerate(ranks):
        adapters.append(folder / "lora" / f"a{i}")
        tensors = write_adapter(adapters[-1], rank, alpha, i)
        states.append(merged_state(base, tensors, rank, alpha))
        merged.append(folder / f"m{i}.pt")
        torch.save(states[-1], merged[-1])
    return SmallFleet(folder / "base.pt", adapters, merged, states)


def equal_states(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Returns whether two state dicts are equal bit for bit."""
    return set(found) == set(expected) and all(torch.equal(found[k], v) for k, v in expected.items())


def answer_of(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Returns a member's answer in float64."""
    net = Net().double()
    net.load_state_dict(state)
    with torch.inference_mode():
        found: Tensor = net(x.double())
    return found


def build_of(paths: Sequence[Path], out: Path, **options: Any) -> widepack.BuildReport:
    """Builds an artifact of members of `Net`, without what most tests do not need."""
    quick: dict[str, Any] = {"model": Net, "inputs": INPUTS, "budget": 0, "pt2": False, "targets": ("cpu",)}
    return widepack.build(paths, out, **{**quick, **options})


def assert_right(ens: widepack.WideModel, states: Sequence[dict[str, Tensor]], rows: int) -> None:
    """Checks the answers to rows against those of the members in float64."""
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))
    for answer, state in zip(ens(x), states, strict=True):
        torch.testing.assert_close(answer.double(), answer_of(state, x), rtol=1e-5, atol=1e-5)


def assert_rows_right(
    answers: Tensor,
    states: Sequence[dict[str, Tensor]],
    ids: Sequence[int],
    x: Tensor,
    rows: Sequence[int] = (),
) -> None:
    """Checks the answers to routed rows. ids: the member of each row. rows: those to check; empty for all."""
    for row in rows or range(len(ids)):
        expected = answer_of(states[ids[row]], x[row : row + 1])[0]
        torch.testing.assert_close(answers[row].double(), expected, rtol=1e-5, atol=1e-5)
