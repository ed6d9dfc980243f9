"""Tests what `fuse` says about members whose gradients a capture does not contain, and its advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack import VerificationError, fuse
from widepack.fused.check_gradients import unless_refused, way_out
from widepack.fused.gradients import WAY_OUT
from widepack.fused.member_runs import LiveMemberRuns


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        return Rounding.apply(self.layer(x) * 4)  # type: ignore[no-untyped-call]


class Rounded(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x) * 4
        return y + (y.round() - y).detach()


class Hooked(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).tanh()
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return y


class Scaled(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).tanh()
        return 0.5 * y + (0.5 * y).detach()


class DetachedInPlace(Net):
    in_place = True

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        y = self.layer(x).sin().clone()
        y = y.detach_() if self.in_place else y.detach()
        return force + self.layer(x).tanh().sum() * y.sum()


class Detached(DetachedInPlace):
    in_place = False


class Dropped(Net):
    def forward(self, x: Tensor) -> Any:
        return Rounding.apply(nn.functional.dropout(self.layer(x) * 4, 0.5, self.training))  # type: ignore[no-untyped-call]


REFUSED: list[tuple[Any, str]] = [
    (Net, "the backward of Rounding, a torch.autograd.Function: write it in ops of torch"),
    (Dropped, "the backward of Rounding, a torch.autograd.Function: write it in ops of torch"),
    (Hooked, r"a hook of gradients \(register_hook\): change the gradients after backward, or write a \* x"),
    (DetachedInPlace, r"detach_ in place: write y = y.detach\(\)"),
]


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize(("member", "words"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_the_cause_is_named_whatever_the_strategy(member: Any, words: str, strategy: str) -> None:
    with pytest.raises(VerificationError, match=f"A capture does not contain {words}") as e:
        fuse([member().train() for _ in range(2)], torch.randn(4, 6), strategy=strategy)
    assert 'strategy="loop" gives the same gradient' in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("written", "instead_of"), [(Rounded, Net), (Scaled, Hooked), (Detached, DetachedInPlace)]
)
def test_what_the_message_says_to_write_has_the_same_gradients(written: Any, instead_of: Any) -> None:
    torch.manual_seed(0)
    members, x = [instead_of().train() for _ in range(2)], torch.randn(4, 6)
    others = [written().train() for _ in range(2)]
    for other, member in zip(others, members):
        other.load_state_dict(member.state_dict())
    fused = fuse(others, x)
    fused(x).square().sum().backward()
    for i, member in enumerate(members):
        member(x).square().sum().backward()
        grad = fused.get_parameter("layer.weight").grad
        assert grad is not None
        torch.testing.assert_close(grad[i], member.layer.weight.grad)


def test_a_wrong_wide_program_has_the_loop_as_its_way_out() -> None:
    fused = fuse([Rounded().train() for _ in range(2)], torch.randn(4, 6))
    entry: Any = fused.current_entry()
    runs, names = LiveMemberRuns(fused, entry, entry.programs[0], False), ["layer.weight", "layer.bias"]
    text = way_out(runs, entry.programs[0], 0, [torch.randn(4, 6)], names)
    assert text == WAY_OUT


def test_float64_that_does_not_fit_in_memory_is_the_cause() -> None:
    with pytest.raises(VerificationError, match="do not fit in memory: .*allocate"):
        unless_refused(lambda: {"w": torch.empty(2**55)})
    assert unless_refused(lambda: {"w": torch.zeros(2).svd()[0]}) == {}  # an op that refuses its input
