"""Tests of members with hooks on the module itself: they run in every way in which a member is exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import widepack

X = torch.linspace(-2, 3, 20).reshape(5, 4)


def shift(module: nn.Module, args: Any) -> Any:
    return (args[0] - module.get_buffer("mean"), *args[1:])


class Plain(nn.Module):
    """Is exported as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(4, 3)
        self.register_buffer("mean", torch.randn(4))
        self.register_forward_pre_hook(shift)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class State(Plain):
    """Writes into buffers in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(self.inner)


class Keywords(Plain):
    """Takes any inputs by name."""

    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.inner(x) * more.get("scale", 1.0)


@dataclass
class Answer:
    """Is a result that torch.export does not know."""

    y: Tensor


class Dataclass(Plain):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Any:
        return Answer(self.inner(x))


class Shadowing(Plain):
    """Has a part with a name of `fx.GraphModule`."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.code(self.inner(x))


class Derivative(Plain):
    """Takes a derivative in its forward."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.inner(x).tanh().sum(), x)[0]


def seeded(make: Callable[[], nn.Module]) -> list[nn.Module]:
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        members.append(make())
    return members


def answers(members: list[nn.Module]) -> Tensor:
    found = [m(X) for m in members]
    return torch.stack([y.y if isinstance(y, Answer) else y for y in found]).detach()


@pytest.mark.parametrize("make", [Plain, State, Keywords, Dataclass, Shadowing, Derivative])
@pytest.mark.parametrize("train", [True, False])
def test_hooks_of_the_module_run_when_it_is_fused(make: Callable[[], nn.Module], train: bool) -> None:
    fused = widepack.fuse([m.train(train) for m in seeded(make)], X)
    y = fused(X)
    torch.testing.assert_close(
        y.y if hasattr(y, "y") else y, answers([m.train(train) for m in seeded(make)]), check_stride=False
    )


class Named(nn.Module):
    """Has a hook that takes keywords."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("mean", torch.randn(4))
        self.register_forward_pre_hook(hook, with_kwargs=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def by_position(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return shift(module, args), kwargs


def by_name(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "x": kwargs["x"] - module.get_buffer("mean")}


def built(folder: Path, hook: Callable[..., Any], **call: Any) -> tuple[Path, list[nn.Module]]:
    members = seeded(lambda: Named(hook))
    paths = [folder / f"{i}.pt" for i in range(len(members))]
    for path, member in zip(paths, members):
        torch.save(member.state_dict(), path)
    widepack.build(paths, folder / "a", model=lambda: Named(hook), budget=0, **call)
    return folder / "a", members


@pytest.mark.parametrize(
    "call",
    [{"inputs": ["x=float32[B,4]"]}, {"sample": (X,)}, {"sample_kwargs": {"x": X}}],
    ids=["specs", "sample", "names"],
)
def test_a_hook_that_takes_keywords_gets_inputs_by_position(tmp_path: Path, call: Any) -> None:
    path, members = built(tmp_path, by_position, **call)
    torch.testing.assert_close(widepack.load(path)(X), answers(members))


def test_a_hook_that_reads_inputs_by_name_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(
        widepack.CaptureError, match=r"KeyError: 'x'. It runs if its inputs are given by name"
    ):
        built(tmp_path, by_name, inputs=["x=float32[B,4]"])
