"""Defines the models whose artifacts the tests export, and a function that runs their ONNX files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from torch import Tensor, nn

from widepack import build

N = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Net(nn.Module):
    """A net with a convolution and its batch norm, a frozen layer, and attention over a dim T.

    Its outputs include two names of one value, an input, a weight and a Shared value.
    """

    scale: Tensor

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 8)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attends else None
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:  # [B, T, 4], [B, T]
        frozen = self.frozen(x)
        z = torch.relu(self.norm(self.conv(frozen.transpose(1, 2)))).transpose(1, 2)
        if self.attention is not None:
            z = z + self.attention(z, z, z, need_weights=False)[0]
        y = self.head(z) * self.scale * (ids > 2)[..., None]
        return {
            "y": y,
            "again": y,
            "x": x,
            "scale": self.scale,
            "frozen": frozen,
            "best": y.argmax(-1),
            "sure": y > 0,
        }


class Head(nn.Module):
    """A net with a head whose number of classes differs between members."""

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None, classes: int = 2) -> None:
        super().__init__()
        self.trunk, self.out = (
            nn.Linear(4, 6),
            nn.Linear(6, classes if state_dict is None else state_dict["out.weight"].shape[0]),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.trunk(x))
        return self.out(z), z


class Step(nn.Module):
    """A net with a counter that changes, and a state that is an input and an output with the same name."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Tensor]:
        h = self.cell(x, h)
        self.steps += 1
        return {"y": h * self.steps, "h": h}


def saved(folder: Path, modules: Sequence[nn.Module]) -> list[str]:
    return [str(path) for path in files_of(folder, modules)]


def seeded(kind: type[nn.Module], seed: int, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind(**options).eval()
        with torch.no_grad():
            for name, value in [*module.named_parameters(), *module.named_buffers()]:
                if value.is_floating_point() and not name.startswith("frozen"):
                    value.add_(0.1 * torch.rand_like(value) + 0.05)
        for name, value in module.named_parameters():
            if name.startswith("frozen"):
                nn.init.constant_(value, 0.3)
    return module


NETS = [seeded(Net, i) for i in range(N)]
SMALL = [seeded(Net, i, attends=False) for i in range(N)]
HEADS = [seeded(Head, i, classes=2 + i) for i in range(N)]
STEPS = [seeded(Step, i) for i in range(N)]
NET: dict[str, Any] = {"model": Net, "inputs": ["x=float32[B,T,4]", "ids=int64[B,T]:0..6", "T=2..12"]}


def artifact_of(modules: Sequence[nn.Module], factory: pytest.TempPathFactory, **options: Any) -> Path:
    folder = factory.mktemp("forms")
    build(saved(folder, modules), folder / "e.wide", **{**QUICK, **options})
    return folder / "e.wide"


def call_of(batch: int, length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 4, generator=g), torch.randint(0, 7, (batch, length), generator=g)


def run_onnx(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    """Runs an ONNX file in ONNX Runtime and returns its outputs by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    return {o.name: torch.from_numpy(y) for o, y in zip(session.get_outputs(), outputs, strict=True)}


def assert_same(outputs: Tensor, expected: Tensor) -> None:
    assert outputs.dtype == expected.dtype
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def assert_answers(outputs: Mapping[str, Tensor], modules: Sequence[nn.Module], *args: Tensor) -> None:
    """Checks the outputs `[N, ...]` against the dict that each member answers."""
    for i, module in enumerate(modules):
        with torch.no_grad():
            answer = module(*args)
        for name, value in answer.items():
            assert_same(outputs["x_new" if name == "x" and "x_new" in outputs else name][i], value)


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
