"""Modules that change, rename or resize what they load, and the files of their members."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack.inference.model import WideModel

INPUTS: dict[str, Any] = {"inputs": ["input=float32[B,4]"], "pt2": False, "targets": ("cpu",)}
QUICK: dict[str, Any] = {**INPUTS, "budget": 0, "force": True}
Make = Callable[[], nn.Module]


class Turned(nn.Module):
    """Its weight was stored transposed in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T.clone()
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight


class Renamed(nn.Module):
    """A hook renames a weight of older files."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        for last in ("weight", "bias"):
            if (old := f"{prefix}fc.{last}") in state:
                state[f"{prefix}inner.{last}"] = state.pop(old)

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input)  # type: ignore[no-any-return]


class Bank(nn.Module):
    """The size of a buffer is set when it is loaded."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(0, 4))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.bank = torch.empty_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        return self.fc(input) @ self.bank.T  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Keeps extra state that forward uses."""

    extra: Any

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.extra = {"scale": 1.0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, input: Tensor) -> Tensor:
        return self.fc(input) * self.extra["scale"]  # type: ignore[no-any-return]


class Doubled(nn.Module):
    """A hook doubles the weight at every load, so the module does not take its own state dict as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_load_state_dict_pre_hook(self._double)  # type: ignore[no-untyped-call]

    @staticmethod
    def _double(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}fc.weight"] = 2 * state[f"{prefix}fc.weight"]

    def forward(self, input: Tensor) -> Tensor:
        return self.fc(input)  # type: ignore[no-any-return]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.backbone(input))  # type: ignore[no-any-return]


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


def turned() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Turned())


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))


def seeded(make: Make, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def old_norm(i: int) -> Any:
    return {k: v for k, v in seeded(norm, i).state_dict().items() if not k.endswith("num_batches_tracked")}


def old_weight_norm(i: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(nn.Sequential(nn.utils.weight_norm(seeded(lambda: nn.Linear(4, 3), i))).state_dict())


def bank(i: int, rows: int = 5) -> Any:
    found = seeded(Bank, i)
    found.bank = torch.randn(rows, 4)
    return found.state_dict()


def scaled(i: int) -> Any:
    found: Any = seeded(Scaled, i)
    found.extra = {"scale": 3.0, "classes": ["a", "b"], "counts": torch.arange(3), "nan": float("nan")}
    return found.state_dict()


FILES: dict[str, tuple[Make, Callable[[int], Any]]] = {
    "a norm without its counter": (norm, old_norm),
    "a norm": (norm, lambda i: seeded(norm, i).state_dict()),
    "weight_g and weight_v": (weight_norm, old_weight_norm),
    "version 2": (turned, lambda i: seeded(turned, i).state_dict()),
    "version 1": (turned, lambda i: dict(seeded(turned, i).state_dict())),
    "an old name": (
        Renamed,
        lambda i: {f"fc.{k[6:]}": v for k, v in seeded(Renamed, i).state_dict().items()},
    ),
    "a buffer sized at load": (Bank, bank),
    "buffers of other sizes": (Bank, lambda i: bank(i, 3 + i)),
    "extra state": (Scaled, scaled),
    "float16": (norm, lambda i: seeded(norm, i).half().state_dict()),
    "a scalar with a dim": (nn.PReLU, lambda i: {"weight": torch.full((1,), 0.2 + i)}),
    "a lazy module": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        lambda i: seeded(lambda: nn.Sequential(nn.Linear(4, 3)), i).state_dict(),
    ),
}


def save(folder: Path, states: list[Any]) -> list[Path]:
    for i, state in enumerate(states):
        torch.save(state, folder / f"{i}.pt")
    return [folder / f"{i}.pt" for i in range(len(states))]


def built(folder: Path, states: list[Any], make: Any, **options: Any) -> tuple[list[Path], WideModel]:
    """Returns the files of the states, and the artifact `e.wide` of them, loaded."""
    paths = save(folder, states)
    widepack.build(paths, folder / "e.wide", model=make, **QUICK, **options)
    return paths, widepack.load(folder / "e.wide")


def loaded(make: Make, path: Path) -> nn.Module:
    """Returns the truth: the factory's module, into which torch has loaded a file."""
    module = make().eval()
    module.load_state_dict(torch.load(path))
    return module


def same(answer: Tensor, module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(answer, module(x), rtol=1e-5, atol=1e-6)
