"""Tests running statistics whose true value is 0: a linear layer keeps the mean of centered numbers at 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import trained_as_alone
from torch import Tensor, nn

import widepack
from widepack.errors import VerificationError
from widepack.verification.reference import ReferenceAnswers
from widepack_artifacts.program import Node, Program, Ref

ATEN_NORM = "aten._native_batch_norm_legit_functional.default"


def bottleneck(momentum: float | None = 0.1) -> nn.Module:
    def norm(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels, momentum=momentum)

    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.Conv2d(8, 16, 1, bias=False), norm(16))


class MobileBlock(nn.Module):
    """Two inverted residuals of MobileNetV2, with linear bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6())
        self.a, self.b, self.head = self.block(6, 6), self.block(6, 8), nn.Linear(8, 3)

    def block(self, inside: int, out: int) -> nn.Module:
        wide = 2 * inside
        return nn.Sequential(
            *(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.b(x + self.a(x)).mean((2, 3)))  # type: ignore[no-any-return]


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(
            *(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False)),
        )
        self.predict = nn.Sequential(
            nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.project(x)
        return self.predict(z) + z.detach()  # type: ignore[no-any-return]


class ZeroResidual(nn.Module):
    """A residual block whose last scale starts at 0, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = bottleneck(), nn.Conv2d(16, 16, 1, bias=False), nn.Linear(16, 2)
        self.norm = nn.BatchNorm2d(16)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(F.relu(x + self.norm(self.b(x))).mean((2, 3)))  # type: ignore[no-any-return]


class OwnNorm(nn.Module):
    """A batch norm that is written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.mean: Tensor
        self.var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
                self.var.lerp_(var, 0.1)
        return (x - mean) / torch.sqrt(var + 1e-5)


class Centers(nn.Module):
    """The running center of a head, as in DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 5, bias=False)
        self.register_buffer("center", torch.zeros(1, 5))
        self.center: Tensor

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self.norm(self.a(x)))
        if self.training:
            with torch.no_grad():
                self.center.copy_(self.center * 0.9 + 0.1 * z.sum(0, keepdim=True) / len(z))
        return z - self.center


def of_norms(*norms: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(*(part for norm in norms for part in (nn.Linear(6, 6, bias=False), norm(6))))


def _instance() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
    )


IMAGE, ROW = (3, 8, 8), (6,)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear bottleneck": (bottleneck, IMAGE),
    "cumulative average": (lambda: bottleneck(None), IMAGE),
    "MobileNetV2": (MobileBlock, IMAGE),
    "SimSiam": (SimSiam, ROW),
    "zero residual": (ZeroResidual, IMAGE),
    "own norm": (lambda: of_norms(OwnNorm, OwnNorm), ROW),
    "center": (Centers, ROW),
    "instance norm": (_instance, IMAGE),
    "norm of a norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)), ROW),
}


def members(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make().to(dtype).train() for _ in range(3)]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps_are_those_of_each_member_alone(name: str, dtype: torch.dtype) -> None:
    make, shape = NETWORKS[name]
    bound = 1e-5 if dtype == torch.float32 else 1e-13
    batches = [torch.randn(8, *shape, dtype=dtype) for _ in range(2)]
    trained_as_alone(members(make, dtype), batches, bounds={"rtol": bound, "atol": bound})


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["loop", "wide"])
def test_every_strategy_takes_it(strategy: str) -> None:
    widepack.fuse(members(bottleneck), torch.randn(8, 3, 6, 6), strategy=strategy)


# ---------------------------------------------------------------- faults


def momentum(program: Program) -> Program:
    """Another momentum in the second norm."""
    norms = [n for n in program.nodes if n.op == ATEN_NORM]
    wrong = replace(norms[-1], args=(*norms[-1].args[:6], 0.11, *norms[-1].args[7:]))
    return replace(program, nodes=tuple(wrong if n is norms[-1] else n for n in program.nodes))


def of_another_member(program: Program) -> Program:
    return _rolled(program, 0)


def of_another_channel(program: Program) -> Program:
    return _rolled(program, 1)


def _rolled(program: Program, dim: int) -> Program:
    """The last `running_var`, the second last output, of another member or channel."""
    outputs = list(program.outputs)  # the last is the number of batches
    node = Node("rolled", "aten.roll.default", (outputs[-2].value, [1], [dim]), {}, "float32[3,16]")
    outputs[-2] = replace(outputs[-2], value=Ref("rolled"))
    return replace(program, nodes=(*program.nodes, node), outputs=tuple(outputs))


def not_centered(program: Program) -> Program:
    """A hundred-thousandth is added to the input of the second norm."""
    return _before_norm(program, lambda x: [Node("shifted", "aten.add.Scalar", (x, 1e-5), {}, "")])


def far_from_zero(program: Program) -> Program:
    """The input of the second norm has lost the digits that a mean of 1,000 takes."""
    return _before_norm(
        program,
        lambda x: [
            Node("far", "aten.add.Scalar", (x, 1e3), {}, ""),
            Node("near", "aten.sub.Scalar", (Ref("far"), 1e3), {}, ""),
        ],
    )


def _before_norm(program: Program, made: Callable[[Any], list[Node]]) -> Program:
    norm = [n for n in program.nodes if n.op == ATEN_NORM][-1]
    before = made(norm.args[0])
    after = replace(norm, args=(Ref(before[-1].name), *norm.args[1:]))
    nodes = [m for n in program.nodes for m in ((*before, after) if n is norm else (n,))]
    return replace(program, nodes=tuple(nodes))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "fault", [momentum, of_another_member, of_another_channel, not_centered, far_from_zero]
)
def test_wrong_statistics_are_refused(
    fault: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ReferenceAnswers.check

    def check(self: ReferenceAnswers, pattern: str, program: Program, *rest: Any) -> Any:
        return right(self, pattern, fault(program), *rest)

    monkeypatch.setattr(ReferenceAnswers, "check", check)
    with pytest.raises(VerificationError, match="is wrong: output"):
        widepack.fuse(members(bottleneck), torch.randn(8, 3, 6, 6))
