"""Tests members whose classes and methods were made in a function, and hold parts of the member."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import trained_as_alone
from torch import Tensor, nn

import widepack
from widepack import UsageError


def layer() -> nn.Linear:
    return nn.Linear(5, 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- methods that are bound by hand


def method_of_a_layer() -> nn.Module:
    net: Any = Net()
    other = net.a

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return torch.sin(F.linear(x, self.weight, self.bias)) + other(x)  # type: ignore[no-any-return]

    net.b.forward = types.MethodType(forward, net.b)
    return net  # type: ignore[no-any-return]


def method_of_an_old_forward() -> nn.Module:
    net: Any = Net()
    old, calls = net.b.forward, 0

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(old(x))

    net.b.forward = types.MethodType(forward, net.b)
    return net  # type: ignore[no-any-return]


def method_with_a_default() -> nn.Module:
    net: Any = Net()
    net.b.forward = types.MethodType(lambda self, x, other=net.a: other(x) + F.linear(x, self.weight), net.b)
    return net  # type: ignore[no-any-return]


def method_as_a_hook() -> nn.Module:
    net: Any = Net()
    other = net.b
    net.a.register_forward_hook(types.MethodType(lambda self, m, args, y: y + other.bias, net))
    return net  # type: ignore[no-any-return]


def method_in_a_partial() -> nn.Module:
    net: Any = Net()
    weight = net.a.weight
    net.b.forward = functools.partial(
        types.MethodType(lambda self, gain, x: gain * (x @ weight) + self.bias, net.b), 2.0
    )
    return net  # type: ignore[no-any-return]


# ---------------------------------------------------------------- classes of a function


def child_of(reference: Callable[[nn.Module], Callable[[], Any]]) -> nn.Module:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, parent = layer(), reference(self)

            class Child(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.own = layer()

                def forward(self, x: Tensor) -> Tensor:
                    return self.own(x) + parent().a(x)  # type: ignore[no-any-return]

            self.child = Child()

        def forward(self, x: Tensor) -> Tensor:
            return self.child(torch.tanh(x))  # type: ignore[no-any-return]

    return Parent()


def body_and_property() -> nn.Module:
    first, second = layer(), layer()

    class Holds(nn.Module):
        shared = first

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        @property
        def weight(self) -> Tensor:
            return second.weight

        @staticmethod
        def run(x: Tensor) -> Tensor:
            return torch.sin(first(x))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.run(x), self.weight) + self.shared(x)  # type: ignore[no-any-return]

    return Holds()


def base_that_holds() -> nn.Module:
    held: dict[str, Any] = {}

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = layer()

        def forward(self, x: Tensor) -> Tensor:
            return held["net"].b(x) + self.a(x)  # type: ignore[no-any-return]

    class Derived(Base):
        def __init__(self) -> None:
            super().__init__()
            self.b = layer()
            held["net"] = self

        def forward(self, x: Tensor) -> Tensor:
            return self.b(super().forward(x)) if isinstance(self, Derived) else x  # type: ignore[no-any-return]

    return Derived()


def helper_object() -> nn.Module:
    net: Any = Net()

    class Helper:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.sin(net.a(x))

    net.helper, old = Helper(), net.forward
    net.forward = lambda x: old(net.helper(x))
    return net  # type: ignore[no-any-return]


def class_in_a_class() -> nn.Module:
    net: Any = Net()

    class Outer(nn.Module):
        class Inner:
            part = net.a

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net.b(self.Inner.part(x))  # type: ignore[no-any-return]

    return Outer()


def class_of_an_instance() -> nn.Module:
    net: Any = Net()
    other = net.a

    class Patched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + other(x)  # type: ignore[no-any-return]

    net.b.__class__ = Patched
    return net  # type: ignore[no-any-return]


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "a parent": lambda: child_of(lambda module: lambda: module),
    "a parent by weakref": lambda: child_of(weakref.ref),
    **{
        make.__name__.replace("_", " "): make
        for make in (
            method_of_a_layer,
            method_of_an_old_forward,
            method_with_a_default,
            method_as_a_hook,
            method_in_a_partial,
            body_and_property,
            base_that_holds,
            helper_object,
            class_in_a_class,
            class_of_an_instance,
        )
    },
}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", MEMBERS)
def test_members_train_as_alone(name: str) -> None:
    torch.manual_seed(0)
    modules = [MEMBERS[name]() for _ in range(3)]
    x, *batches = (torch.randn(6, 5) for _ in range(3))
    fused = trained_as_alone(modules, batches)
    for wide, copied, module in zip(fused(x), fused.unfuse(), modules):
        torch.testing.assert_close(wide, module(x))
        torch.testing.assert_close(copied(x), module(x))


def test_copies_with_weights_of_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    fused = widepack.fuse(MEMBERS["a parent by weakref"](), x, n=3)
    answers = fused(x)
    for i, copy in enumerate(fused.unfuse()):
        torch.testing.assert_close(answers[i], copy(x))
    assert not torch.allclose(answers[0], answers[1])


# ---------------------------------------------------------------- what stays refused


class InItsClass(nn.Module):
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()
        InItsClass.last = self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(InItsClass.last.a(x))  # type: ignore[no-any-return]


_LOCAL = threading.local()


class InTheThread(InItsClass):
    def __init__(self) -> None:
        super().__init__()
        _LOCAL.net = self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_LOCAL.net.a(x))  # type: ignore[no-any-return]


class InItsOwnThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.held = layer(), threading.local()
        self.held.layer = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.held.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (InItsOwnThread, r"was not found. A possible place: held is a threading.local, whose content"),
        (InItsClass, r"reads of the original: the member itself \(as InItsClass.last\)"),
        (InTheThread, "Where the copy reads the original was not found"),
    ],
)
def test_the_reason_of_a_refusal(make: Callable[[], nn.Module], words: str) -> None:
    modules = [make() for _ in range(2)]
    if make is InTheThread:  # only the thread holds it
        InItsClass.last = None
    with pytest.raises(UsageError, match=words):
        widepack.fuse(modules, torch.randn(6, 5))
