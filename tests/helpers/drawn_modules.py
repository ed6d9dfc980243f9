"""Draws modules as people write them: with hooks, closures, partials, patched forwards, shared parts.

A drawn network is a chain of parts `[B, 6] -> [B, 6]`. The seed decides which parts; the weights come from
torch's random state, so that every member is one architecture with weights of its own.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 6
Parts = dict[str, Callable[[random.Random], nn.Module]]
PARTS: Parts = {}


def part(make: Callable[[random.Random], nn.Module]) -> Callable[[random.Random], nn.Module]:
    PARTS[make.__name__] = make
    return make


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Two(nn.Module):
    """Two layers, which parts add something to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


# ---------------------------------------------------------------- hooks


@part
def hook_that_stores(rng: random.Random) -> nn.Module:
    class Stores(Two):
        def __init__(self) -> None:
            super().__init__()
            self.features: dict[str, Tensor] = {}
            self.a.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.features["a"] = out

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.features["a"].mean(1, keepdim=True)

    return Stores()


@part
def hook_in_a_closure(rng: random.Random) -> nn.Module:
    kept: dict[str, Tensor] = {}
    net, gain = Two(), rng.choice((0.5, 2.0))
    net.a.register_forward_hook(lambda m, a, out: kept.__setitem__("a", out))
    net.b.register_forward_hook(lambda m, a, out: out + gain * kept["a"])
    return net


@part
def hook_that_uses_another_layer(rng: random.Random) -> nn.Module:
    net: Any = Two()
    net.a.register_forward_pre_hook(lambda m, args: (args[0] * net.b.bias,))
    net.b.register_forward_hook(functools.partial(lambda w, m, a, out: out @ w, net.a.weight))
    return net  # type: ignore[no-any-return]


@part
def hook_with_keywords(rng: random.Random) -> nn.Module:
    net: Any = Two()

    def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0].sin(),), kwargs

    net.register_forward_pre_hook(scaled, with_kwargs=True)
    return net  # type: ignore[no-any-return]


@part
def hook_that_counts(rng: random.Random) -> nn.Module:
    net, calls = Two(), 0

    def count(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal calls
        calls += 1

    net.register_forward_hook(count)
    return net


# ---------------------------------------------------------------- functions


@part
def patched_forward(rng: random.Random) -> nn.Module:
    net: Any = Two()
    old = net.a.forward
    act = rng.choice((torch.tanh, torch.sin, torch.sigmoid))
    net.a.forward = lambda x: act(old(x))
    return net  # type: ignore[no-any-return]


@part
def method_patch(rng: random.Random) -> nn.Module:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return torch.sin(F.linear(x, self.weight, self.bias))

    net: Any = Two()
    net.b.forward = types.MethodType(forward, net.b)
    return net  # type: ignore[no-any-return]


@part
def method_with_a_closure(rng: random.Random) -> nn.Module:
    net: Any = Two()
    old, other = net.b.forward, net.a
    net.b.forward = types.MethodType(lambda self, x: torch.sin(old(x)) + other(x) * self.bias, net.b)
    return net  # type: ignore[no-any-return]


@part
def class_that_holds_its_parent(rng: random.Random) -> nn.Module:
    weak = rng.random() < 0.5

    class Parent(Two):
        def __init__(self) -> None:
            super().__init__()
            parent: Any = weakref.ref(self) if weak else lambda: self

            class Child(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.own = linear()

                def forward(self, x: Tensor) -> Tensor:
                    return self.own(x) + parent().a(x)  # type: ignore[no-any-return]

            self.child = Child()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(self.child(x)))

    return Parent()


@part
def closure_over_the_module(rng: random.Random) -> nn.Module:
    net: Any = Two()
    net.forward = lambda x: torch.sigmoid(net.b(net.a(x)))
    return net  # type: ignore[no-any-return]


@part
def partials(rng: random.Random) -> nn.Module:
    class Chain(Two):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[Any] = [
                functools.partial(F.linear, weight=self.a.weight, bias=self.a.bias),
                functools.partial(self.b.forward),
                torch.tanh,
            ]

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    return Chain()


@part
def bound_methods(rng: random.Random) -> nn.Module:
    class Table(Two):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = {"first": self.one, "then": [self.b.forward]}

        def one(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.table["then"][0](self.table["first"](x))
            return y

    return Table()


@part
def default_arguments(rng: random.Random) -> nn.Module:
    net: Any = Two()

    def forward(x: Tensor, layer: nn.Module = net.b, *, gain: Tensor = net.a.bias) -> Tensor:
        y: Tensor = layer(torch.tanh(net.a(x))) * gain
        return y

    net.b.register_forward_hook(lambda m, a, out, net=net: out - net.a.bias)
    net.step = forward
    net.forward = lambda x: net.step(x)
    return net  # type: ignore[no-any-return]


@part
def methods_of_lists(rng: random.Random) -> nn.Module:
    class Log(Two):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Tensor] = []
            self.note, self.dot = self.log.append, self.a.weight.matmul

        def forward(self, x: Tensor) -> Tensor:
            self.note(self.a(x))
            return self.b(self.log.pop()) + self.dot(x.t()).t()  # type: ignore[no-any-return]

    return Log()


@part
def weak_references(rng: random.Random) -> nn.Module:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = weakref.ref(parent)

        def forward(self, x: Tensor) -> Tensor:
            parent: Any = self.parent()
            return torch.tanh(parent.a(x))

    class Parent(Two):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(self)
            self.parts = weakref.WeakValueDictionary({"b": self.b})
            self.method, self.proxies = weakref.WeakMethod(self.b.forward), [weakref.proxy(self.b)]

        def forward(self, x: Tensor) -> Tensor:
            y = self.child(x)
            method: Any = self.method()
            return self.parts["b"](y) + method(y) + self.proxies[0](x)  # type: ignore[no-any-return]

    return Parent()


@part
def class_in_a_function(rng: random.Random) -> nn.Module:
    scale, table = rng.choice((0.5, 1.5)), torch.linspace(-1, 1, WIDTH)

    class Local(Two):
        power = 2

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale + table.pow(self.power)

    return Local()


# ---------------------------------------------------------------- weights


@part
def weight_norm(rng: random.Random) -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear())


@part
def weight_norm_by_hooks(rng: random.Random) -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(linear()), nn.Tanh())


@part
def orthogonal(rng: random.Random) -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh())


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


@part
def own_parametrization(rng: random.Random) -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh())


@part
def tied_parts(rng: random.Random) -> nn.Module:
    net: Any = Two()
    if rng.random() < 0.5:
        net.b = net.a
    else:
        net.b.weight = net.a.weight
    return net  # type: ignore[no-any-return]


@part
def parameter_in_a_dict(rng: random.Random) -> nn.Module:
    class Held(Two):
        def __init__(self) -> None:
            super().__init__()
            self.held: Any = {"w": self.a.weight, "bias": [self.b.bias]}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x @ self.held["w"] + self.held["bias"][0]
            return y

    return Held()


@part
def unused_and_frozen(rng: random.Random) -> nn.Module:
    net: Any = Two()
    net.unused = nn.Parameter(torch.randn(3))
    net.b.weight.requires_grad_(False)
    return net  # type: ignore[no-any-return]


@part
def statistics(rng: random.Random) -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, momentum=rng.choice((0.1, None))), nn.ReLU())


@part
def own_statistics(rng: random.Random) -> nn.Module:
    class Running(Two):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
            return y - self.mean

    return Running()


# ---------------------------------------------------------------- other attributes


@part
def plain_attributes(rng: random.Random) -> nn.Module:
    class Plain(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.note, self.options = rng.choice((0.5, 2.0)), "plain", {"depth": [1, 2]}
            self.table, self.lock, self.module = torch.linspace(0, 1, WIDTH), threading.Lock(), math
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                y = super().forward(x) * self.scale + self.table * self.module.pi
            self.last = y
            return y

    return Plain()


@part
def constants_of_its_own(rng: random.Random) -> nn.Module:
    """The tensors in the attribute, the closure and the plain module differ from member to member."""
    if hasattr(rng, "member"):
        generator = torch.Generator().manual_seed(rng.member)
        own = torch.rand(WIDTH, generator=generator)
    else:
        own = torch.full((WIDTH,), 0.5)

    class Own(Two):
        def __init__(self) -> None:
            super().__init__()
            self.own = [own]
            self.shift = lambda y: y + own.cos()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.shift(super().forward(x) * self.own[0])  # type: ignore[no-untyped-call]
            return y

    return Own()


@part
def a_buffer_that_is_not_saved(rng: random.Random) -> nn.Module:
    class Unsaved(Two):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    return Unsaved()


@part
def traced(rng: random.Random) -> nn.Module:
    return fx.symbolic_trace(Two())


class Extra(Two):
    """A module with extra state, which its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain

    def get_extra_state(self) -> Any:
        return {"gain": self.gain}

    def set_extra_state(self, state: Any) -> None:
        self.gain = state["gain"]


@part
def extra_state(rng: random.Random) -> nn.Module:
    return Extra()


class Versioned(Two):
    """A module that converts older state dicts: version 1 stored the bias with the other sign."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2 and f"{prefix}a.bias" in state_dict:
            state_dict[f"{prefix}a.bias"] = -state_dict[f"{prefix}a.bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@part
def versions(rng: random.Random) -> nn.Module:
    return Versioned()


@part
def hooks_of_the_state_dict(rng: random.Random) -> nn.Module:
    net: Any = Two()
    net.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    net.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: None)
    return net  # type: ignore[no-any-return]


# ---------------------------------------------------------------- networks


class Chain(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.parts:
            x = x + 0.5 * step(x)
        y: Tensor = self.head(x)
        return y


@dataclass(frozen=True)
class Drawn:
    """A drawn architecture. seed: of its draw. names: its parts."""

    seed: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {' + '.join(self.names)}"

    def __call__(self) -> nn.Module:
        """Makes a module with fresh weights."""
        return self.member(None)

    def member(self, number: int | None) -> nn.Module:
        """Makes member `number`, whose constants are its own; None: constants as in all modules."""
        rng = random.Random(self.seed)
        if number is not None:
            rng.member = number  # type: ignore[attr-defined]
        return Chain([PARTS[name](rng) for name in self.names])


def drawn(seed: int) -> Drawn:
    """Draws an architecture of one to three parts."""
    rng = random.Random(seed * 7919 + 1)
    return Drawn(seed, tuple(rng.choice(sorted(PARTS)) for _ in range(rng.randint(1, 3))))
