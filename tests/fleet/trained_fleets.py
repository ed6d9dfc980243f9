"""Trains fleets for tests: a small transformer on scikit-learn's digits, and LoRA adapters of it on some of
the classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH, HEADS = 64, 4
LAYERS = ("q", "v", "o", "up", "down")
"""The layers that adapters change."""
RANK, ALPHA = 4, 8
INPUTS = ["x=float32[B,8,8]"]
CLASSES = ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 8, 9))
"""Those on which each adapter is trained."""


class Digits(nn.Module):
    """A transformer of one layer. The rows of an image are its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        found: Tensor = self.head(x.mean(1))
        return found


class Lora(nn.Module):
    """A frozen linear layer with two factors that are trained."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, nn.Linear)
        self.layer = layer.requires_grad_(False)
        self.left = nn.Parameter(torch.zeros(layer.out_features, RANK))
        self.right = nn.Parameter(torch.randn(RANK, layer.in_features) * layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + (x @ self.right.t()) @ self.left.t() * (ALPHA / RANK)
        return found


@dataclass(frozen=True)
class TrainedFleet:
    """A fleet that was trained.

    base: the checkpoint of the base. adapters: the folders. exact: the state dicts of the members, merged in
    float64 and rounded once. merged: the checkpoints of the members, merged in float32. states: their state
    dicts. images: some images, [B, 8, 8].
    """

    base: Path
    adapters: list[Path]
    exact: list[dict[str, Tensor]]
    merged: list[Path]
    states: list[dict[str, Tensor]]
    images: Tensor


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    """Trains what requires grad with Adam on batches of 64 images."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(images), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns a model's mean loss."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


def trained_adapter(base: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Lora]:
    """Returns the layers of an adapter that was trained over a base."""
    model = Digits().requires_grad_(False)
    model.load_state_dict(base)
    for name in LAYERS:
        setattr(model, name, Lora(model.get_submodule(name)))
    before = loss_of(model, images, labels)
    train(model, images, labels, 60)
    after = loss_of(model, images, labels)
    assert after < before / 2, f"the training lowered the loss from {before} to {after} only"
    return {name: layer for name in LAYERS if isinstance(layer := model.get_submodule(name), Lora)}


def write_adapter(folder: Path, layers: Mapping[str, Lora]) -> None:
    """Writes an adapter in PEFT's format."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(LAYERS)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {}
    for name, layer in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.right.detach()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.left.detach()
    save_file(tensors, folder / "adapter_model.safetensors")


def merged_state(
    base: Mapping[str, Tensor], layers: Mapping[str, Lora], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the state dict of a member. dtype: in which the adapter is merged."""
    found = {name: value.clone() for name, value in base.items()}
    for name, layer in layers.items():
        difference = (layer.left.detach().to(dtype) @ layer.right.detach().to(dtype)) * (ALPHA / RANK)
        found[f"{name}.weight"] = (found[f"{name}.weight"].to(dtype) + difference).float()
    return found


def train_fleet(folder: Path, images: Tensor, labels: Tensor) -> TrainedFleet:
    """Trains and writes a base, and one adapter for each of `CLASSES`."""
    torch.manual_seed(0)
    model = Digits()
    train(model, images, labels, 40)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(base, folder / "base.pt")
    adapters: list[Path] = []
    merged: list[Path] = []
    exact: list[dict[str, Tensor]] = []
    states: list[dict[str, Tensor]] = []
    for i, classes in enumerate(CLASSES):
        rows = torch.isin(labels, torch.tensor(classes))
        layers = trained_adapter(base, images[rows], labels[rows])
        adapters.append(folder / f"lora{i}")
        write_adapter(adapters[-1], layers)
        exact.append(merged_state(base, layers, torch.float64))
        states.append(merged_state(base, layers, torch.float32))
        merged.append(folder / f"m{i}.pt")
        torch.save(states[-1], merged[-1])
    return TrainedFleet(folder / "base.pt", adapters, exact, merged, states, images[:256])


def rms_errors(state: Mapping[str, Tensor], answer: Tensor, x: Tensor) -> tuple[float, float]:
    """Returns the rms error of an answer, and that of the member's own module, against float64."""
    member = Digits()
    member.load_state_dict(state)
    with torch.inference_mode():
        own = member(x)
        exact = member.double()(x.double())
    return _rms(answer - exact), _rms(own - exact)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
