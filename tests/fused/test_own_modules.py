"""Tests that `fuse` follows the members' own functions, and leaves the members as they were."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_checks import same_snapshot, snapshot
from fusing import draw, sgd, square, train, trained_as_alone
from torch import Tensor, fx, nn

import widepack
from widepack import CaptureError, MemberMismatch, UsageError, VerificationError
from widepack.fused.unchanged import unchanged

THE_MODEL: Any = None
THE_FEATURES: dict[str, Tensor] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


def patched() -> nn.Module:
    net = Net()
    old = net.a.forward
    net.a.forward = lambda x: torch.tanh(old(x))  # type: ignore[method-assign,assignment]
    return net


class Stores(Net):
    """A hook stores a feature, and forward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda m, args, out: self.features.__setitem__("a", out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.features["a"].mean(1, keepdim=True)


def hooked(other: nn.Module | None = None) -> nn.Module:
    net = Net()
    net.a.register_forward_hook(lambda m, args, out: out + (other or net).a.bias)  # type: ignore[union-attr]
    return net


def in_global_features() -> nn.Module:
    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        THE_FEATURES["a"] = out

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * THE_FEATURES["a"].sum(1, keepdim=True)

    net = Reads()
    net.a.register_forward_hook(keep)
    return net


class Own(Net):
    """A tensor of its own in a closure, what cannot be copied, and a parameter that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.rand(3)
        self.shift: Callable[[Tensor], Tensor] = lambda y: y + own
        self.lock, self.library, self.generator = threading.Lock(), functools, torch.Generator()
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.shift(super().forward(x))


def graph() -> nn.Module:
    return fx.symbolic_trace(Net())


def of_class(scale: float = 2.0) -> nn.Module:
    class Local(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    return Local()


BATCHES = [draw(6, 4) for _ in range(5)]
BOUNDS: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [patched, Stores, hooked, in_global_features, Own, graph, of_class])
def test_members_from_one_initial_state_train_as_alone(make: Callable[[], nn.Module]) -> None:
    modules = [make() for _ in range(3)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    fused = trained_as_alone(modules, BATCHES, bounds=BOUNDS)
    for copied, module in zip(fused.unfuse(), modules):
        torch.testing.assert_close(copied(BATCHES[0]), module(BATCHES[0]), **BOUNDS)


def test_copies_of_a_module_with_functions() -> None:
    fused, x = widepack.fuse(patched(), x := draw(6, 4), n=3), x
    for answer, member in zip(fused(x), fused):
        alone = patched()
        alone.load_state_dict(member.state_dict())
        torch.testing.assert_close(answer, alone(x), atol=1e-6, rtol=1e-5)


def test_a_global_name_of_the_member_itself() -> None:
    global THE_MODEL
    THE_MODEL = Net()
    THE_MODEL.a.register_forward_hook(lambda m, args, out: out * THE_MODEL.a.bias)
    other = Net()
    other.a.register_forward_hook(lambda m, args, out: out * other.a.bias)
    trained_as_alone([THE_MODEL, other], BATCHES, bounds=BOUNDS)


def test_weights_of_another_member_are_refused_by_name() -> None:
    first = hooked()
    with pytest.raises(MemberMismatch, match=r"member 1 reads a\.bias of member 0, as a\._forward_hooks\.0"):
        widepack.fuse([first, hooked(first)], draw(6, 4))


class Handle:
    """An object that a copy of a module shares with the module."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: Any) -> Handle:
        return self


def test_a_copy_that_uses_the_original_is_refused() -> None:
    class Held(Net):
        def __init__(self) -> None:
            super().__init__()
            self.handle = Handle(self.a)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.handle.layer(x))
            return y

    with pytest.raises(UsageError) as e:
        widepack.fuse([Held(), Held()], draw(6, 4))
    assert "a copy of member 0 does not do what member 0 does: with the same weights, output 0" in str(
        e.value
    )
    assert "What the copy reads of the original: a (as handle.layer)" in str(e.value)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_members_are_as_before_after_an_error(error: type[BaseException], calls: int) -> None:
    left = [10**6]

    class Fails(Stores):
        def forward(self, x: Tensor) -> Tensor:
            left[0] -= 1
            y = super().forward(x)
            if not left[0]:
                raise error("stop")
            self.note = y
            return y

    modules = [Fails().train() for _ in range(2)]
    modules[0](draw(3, 4)).sum().backward()
    modules[1].requires_grad_(False)
    modules[1].requires_grad_(True)
    before = [snapshot(m) for m in modules]
    left[0] = calls
    with pytest.raises((error, widepack.WidepackError)):
        widepack.fuse(modules, draw(6, 4))
    left[0] = 10**6
    widepack.fuse(modules, torch.ones(6, 4))
    for module, values in zip(modules, before):
        values["random"] = torch.get_rng_state()
        same_snapshot(module, values)


class Trunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.trunk(x)))
        return y


def test_a_trunk_of_all_members_stays_one() -> None:
    trunk = nn.Linear(4, 4)
    modules = [Trunk(trunk).train() for _ in range(3)]
    fused = widepack.fuse(modules, BATCHES[0])
    assert fused.trunk.weight.shape == (4, 4) and fused.head.weight.shape == (3, 3, 4)
    train(fused, BATCHES)
    optimizer = sgd({p for m in modules for p in m.parameters()})
    for x in BATCHES:
        optimizer.zero_grad()
        torch.stack([square(m(x), 0) for m in modules]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for copied, module in zip(fused.unfuse(), modules):
        for name, value in module.named_parameters():
            torch.testing.assert_close(copied.get_parameter(name), value, **BOUNDS)


def test_trunks_that_cannot_be_one_are_refused() -> None:
    trunk, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    with pytest.raises(MemberMismatch, match=r"trunk\.weight is one parameter in members 0, 2, and another"):
        widepack.fuse([Trunk(trunk), Trunk(nn.Linear(4, 4)), Trunk(trunk)], draw(6, 4))
    with pytest.raises(UsageError, match="would change in this mode, and is one buffer for all 2 members"):
        widepack.fuse([Trunk(norm), Trunk(norm)], draw(6, 4))
    widepack.fuse([Trunk(norm).eval(), Trunk(norm).eval()], draw(6, 4))
    with pytest.raises(UsageError, match="members 0 and 1 are one module object"):
        widepack.fuse([norm, norm], draw(6, 4))


class View(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.a.weight.data[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x * self.first).sum(1, keepdim=True)


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.kept[0]
        self.kept[0] = self.kept[0] + 1
        return y


class Writes(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].add_(1)
        return Net.forward(self, x) + self.kept[0]


class Counts(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def with_gradient_hook() -> nn.Module:
    net = Net()
    net.a.weight.register_hook(lambda g: g * 0.5)  # type: ignore[no-untyped-call]
    return net


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (View, CaptureError, "forward reads first, a plain tensor that is a view of a.weight"),
        (Keeps, VerificationError, "forward leaves other values in kept.0, which the next call reads"),
        (Writes, CaptureError, "Writes writes into kept.0 when forward runs"),
        (Counts, VerificationError, "forward leaves other values in calls, which the next call reads"),
        (Draws, VerificationError, "it draws from the generator of Python's random"),
        (with_gradient_hook, UsageError, "member 0: a.weight has a hook of its gradient"),
    ],
)
def test_the_reason_of_a_refusal(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as e:
        widepack.fuse([make() for _ in range(2)], draw(6, 4))
    assert words in str(e.value)


def test_graphs_and_classes_of_functions_are_compared_by_what_they_do() -> None:
    first = fx.symbolic_trace(Net())
    widepack.fuse([first, copy.deepcopy(first)], draw(6, 4))
    with pytest.raises(MemberMismatch, match=r"it runs aten\.sin\.default where the captured program runs"):
        sine = fx.symbolic_trace(Net())
        for node in sine.graph.nodes:
            node.target = torch.sin if node.target is torch.tanh else node.target
        sine.recompile()
        widepack.fuse([first, sine], draw(6, 4))
    with pytest.raises(MemberMismatch, match=r"forward\.scale: 2\.0 in member 0, 3\.0 in member 1"):
        widepack.fuse([of_class(), of_class(3.0)], draw(6, 4))


def test_sparse_gradients_stay_as_they_were() -> None:
    nets = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    rows = torch.tensor([[1, 2]])
    gradients = []
    for net in nets:
        net(rows).sum().backward()
        gradients.append(net.weight.grad)
    with pytest.raises(UsageError, match="sparse gradients"):
        widepack.fuse(nets, rows)
    for net, gradient in zip(nets, gradients):
        assert net.weight.grad is gradient
        assert gradient is not None and gradient.to_dense().sum() == 6


def test_a_changed_sparse_gradient_is_put_back() -> None:
    net = nn.Embedding(5, 3, sparse=True)
    net(torch.tensor([1])).sum().backward()
    gradient = net.weight.grad
    assert gradient is not None
    before = gradient.to_dense()
    with unchanged([net]), torch.no_grad():
        gradient.add_(torch.ones(5, 3).to_sparse(1))
    assert net.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before)


class Overlapping(nn.Module):
    """Two parameters lie in one memory, each element of one is an element of the other."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(8, 4)
        self.a, self.c = nn.Parameter(base[:4]), nn.Parameter(base.t()[:, :4])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + x @ self.c


def test_parameters_that_share_memory_are_named() -> None:
    with pytest.raises(UsageError, match="a and c share memory"):
        widepack.fuse([Overlapping() for _ in range(2)], torch.randn(3, 4))
