"""Writes the fleets that are measured: LoRA adapters in all linear layers of an encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HEADS = 4
LAYERS = ("q", "k", "v", "o", "up", "down")
ALPHA = 16


class Block(nn.Module):
    """A layer of an encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return found


class Encoder(nn.Module):
    """An encoder of several layers."""

    def __init__(self, width: int = 768, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(x)
        return found


def write_adapter(folder: Path, base: Mapping[str, Tensor], rank: int, seed: int) -> dict[str, Tensor]:
    """Writes an adapter of all linear layers. Returns: the differences of the weights, by name."""
    generator = torch.Generator().manual_seed(seed)
    tensors, found = {}, {}
    for weight, value in base.items():
        name = weight.removesuffix(".weight")
        if name.rsplit(".", 1)[-1] not in LAYERS:
            continue
        rows, columns = value.shape
        left = torch.randn(rows, rank, generator=generator) * 0.01
        right = torch.randn(rank, columns, generator=generator) * columns**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = left
        tensors[f"base_model.model.{name}.lora_A.weight"] = right
        found[weight] = (left @ right) * (ALPHA / rank)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(LAYERS)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return found


def merged_state(base: Mapping[str, Tensor], differences: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of the base with an adapter merged in."""
    return {n: t + differences[n] if n in differences else t.clone() for n, t in base.items()}


def write_base(path: Path, width: int, layers: int) -> dict[str, Tensor]:
    """Writes the base. Returns: its state dict."""
    torch.manual_seed(0)
    base = Encoder(width, layers).state_dict()
    torch.save(base, path)
    return dict(base)


def write_fleet(
    folder: Path, width: int, layers: int, members: int, rank: int
) -> tuple[Path, list[Path], list[Path]]:
    """Writes the base, the adapters, and the merged checkpoints. Returns: their paths."""
    base = write_base(folder / "base.pt", width, layers)
    adapters, merged = [], []
    for i in range(members):
        adapters.append(folder / f"lora{i:02}")
        differences = write_adapter(adapters[-1], base, rank, i + 1)
        merged.append(folder / f"m{i:02}.pt")
        torch.save(merged_state(base, differences), merged[-1])
    return folder / "base.pt", adapters, merged


def options_of(width: int, layers: int) -> dict[str, Any]:
    """Returns the arguments with which an artifact of an encoder is built."""
    return {
        "model": lambda: Encoder(width, layers),
        "inputs": [f"x=float32[B,T,{width}]"],
        "pt2": False,
        "targets": ("cpu",),
    }
