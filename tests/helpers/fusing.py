"""Members for tests of fused modules: small networks whose members differ in weights and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import widepack

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Mlp(nn.Module):
    def __init__(self, width: int = 6, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.LayerNorm(width, eps=eps), nn.GELU(), nn.Linear(width, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Cnn(nn.Module):
    """A convolution with a batch norm, one without a norm, and a head."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6, momentum=momentum),
        )
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.conv2(y))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """An embedding, one encoder layer and a head. Dropout is optional."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(ids) + self.place))  # type: ignore[no-any-return]


class First(nn.Module):
    """Returns the first of several results, such as those of a recurrent layer."""

    def forward(self, results: tuple[Tensor, Any]) -> Tensor:
        return results[0]


def members(
    make: Callable[[], nn.Module], count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Returns members in eval mode. Their weights and statistics differ, even where a factory makes equal
    ones.
    """
    modules: list[Any] = []
    for i in range(count):
        g = torch.Generator().manual_seed(100 * seed + i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * seed + i)
            module = make().to(dtype).eval()
        for p in module.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=g).to(dtype)
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b += 0.3 * torch.randn(b.shape, generator=g).to(dtype)
            elif name.endswith("running_var"):
                b *= 0.5 + torch.rand(b.shape, generator=g).to(dtype)
        modules.append(module)
    return modules


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def copies(modules: Sequence[Any]) -> list[Any]:
    return [copy.deepcopy(m) for m in modules]


def stacked(modules: Sequence[Any]) -> dict[str, Tensor]:
    """Returns every weight and buffer, stacked as `[N, ...]`."""
    states = [m.state_dict() for m in modules]
    return {n: torch.stack([s[n] for s in states]) for n in states[0]}


def gradients(modules: Sequence[Any]) -> dict[str, Tensor]:
    result = {}
    for name, _ in modules[0].named_parameters():
        parameters = [dict(m.named_parameters())[name] for m in modules]
        result[name] = torch.stack(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        )
    return result


def same_gradients(fused: widepack.Fused, modules: Sequence[Any], **bounds: Any) -> None:
    """Asserts that the gradients of a fused module are those of the members alone."""
    for name, expected in gradients(modules).items():
        found = fused.tensor_of(name).grad
        torch.testing.assert_close(torch.zeros_like(expected) if found is None else found, expected, **bounds)


def square(outputs: Any, step: int) -> Tensor:
    """Returns the sum of the mean squares of a member's outputs, as a loss."""
    return torch.stack([y.square().mean() for y in pytree.tree_leaves(outputs)]).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train(
    module: Any,
    batches: Sequence[Any],
    optimizer: Optimizer = sgd,
    loss: Callable[[Any, int], Tensor] = square,
    each: bool = False,
) -> None:
    """Takes a step for each batch: of a member, or of a fused module on the sum of its members' losses.

    batches: the inputs of each step, one or a tuple. each: whether a fused module takes one for each member.
    """
    steps = optimizer(module.parameters())
    for step, batch in enumerate(batches):
        inputs = batch if isinstance(batch, tuple) else (batch,)
        steps.zero_grad()
        outputs = module.each(*inputs) if each else module(*inputs)
        fused = isinstance(module, widepack.Fused)
        of_members = (
            [pytree.tree_map(lambda y, i=i: y[i], outputs) for i in range(len(module))]
            if fused
            else [outputs]
        )
        torch.autograd.backward(torch.stack([loss(own, step) for own in of_members]).sum())
        steps.step()


def trained_as_alone(
    modules: Sequence[Any],
    batches: Sequence[Any],
    optimizer: Optimizer = sgd,
    loss: Callable[[Any, int], Tensor] = square,
    each: bool = False,
    bounds: Mapping[str, Any] = {},
    **options: Any,
) -> widepack.Fused:
    """Trains members fused and one after the other, and asserts that all weights and statistics are then the
    same. Returns the fused module. The members themselves are trained.

    options: those of `fuse`.
    """
    first = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    fused = widepack.fuse(
        [m.train() for m in modules], tuple(x[0] for x in first) if each else first, **options
    )
    train(fused, batches, optimizer, loss, each)
    for i, (module, copied) in enumerate(zip(modules, fused.unfuse(), strict=True)):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        own = (
            [tuple(x[i] for x in (b if isinstance(b, tuple) else (b,))) for b in batches] if each else batches
        )
        train(module, own, optimizer, loss)
        for name, value in module.state_dict().items():
            torch.testing.assert_close(copied.state_dict()[name], value, **bounds)
        assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return fused
