"""Tests fused members that train over packed sequences, whose lengths are an input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fusing import square, train
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import widepack
from widepack.kernels.checks.require import OperandError

OP = torch.ops.widepack.sequence_lengths.default
STEPS = 6


class Packed(nn.Module):
    def __init__(self, kind: Any, ordered: bool, total: int | None, **options: Any) -> None:
        super().__init__()
        self.layer, self.ordered, self.total = kind(3, 4, batch_first=True, **options), ordered, total

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        y, last = self.layer(packed)
        padded, sizes = pad_packed_sequence(y, batch_first=True, total_length=self.total)
        return padded.tanh() / sizes.reshape(-1, 1, 1), last[0] if isinstance(last, tuple) else last


def members_of(kind: Any, ordered: bool, total: int | None, **options: Any) -> list[nn.Module]:
    made: list[nn.Module] = []
    for i in range(2):
        torch.manual_seed(i)
        made.append(Packed(kind, ordered, total, **options))
    return made


def lengths_of(ordered: bool, step: int) -> Tensor:
    drawn = torch.randint(1, STEPS + 1, (4,), generator=torch.Generator().manual_seed(step))
    return drawn.sort(descending=True).values if ordered else drawn


def batches_of(ordered: bool, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    drawn = [torch.randn(4, STEPS, 3, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    return [(x.to(dtype), lengths_of(ordered, step)) for step, x in enumerate(drawn)]


def check(kind: Any, ordered: bool, total: int | None, **options: Any) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    members = members_of(kind, ordered, total, **options)
    alone = copy.deepcopy(members)
    fused = widepack.fuse(members, (torch.zeros(4, STEPS, 3), lengths_of(ordered, 0)))
    train(fused, batches_of(ordered, torch.float32), optimizer)
    for member, trained in zip(alone, fused.unfuse(), strict=True):
        before = {name: p.detach().clone() for name, p in member.named_parameters()}
        train(member.double(), batches_of(ordered, torch.float64), optimizer)
        for name, p in trained.named_parameters():
            want = member.get_parameter(name).detach()
            assert not torch.allclose(before[name].double(), want, atol=1e-4)  # it has learned
            torch.testing.assert_close(p.detach().double(), want, atol=1e-6, rtol=1e-5)


def test_packed_sequences_train_as_each_member_alone() -> None:
    check(nn.GRU, False, STEPS)


@pytest.mark.extended
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "in any order"])
@pytest.mark.parametrize("total", [None, STEPS, STEPS + 2])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_each_layer_trains_over_packed_sequences(kind: Any, total: int | None, ordered: bool) -> None:
    check(kind, ordered, total)


@pytest.mark.extended
def test_layers_of_two_directions_train_over_packed_sequences() -> None:
    check(nn.LSTM, False, None, num_layers=2, bidirectional=True)


@pytest.mark.extended
def test_training_refuses_lengths_that_torch_refuses() -> None:
    members = members_of(nn.RNN, True, STEPS)
    fused = widepack.fuse(members, (torch.zeros(4, STEPS, 3), lengths_of(True, 0)))
    for lengths, message in (
        ([4, 5, 2, 1], "in descending order"),
        ([7, 2, 2, 1], "contains 7"),
        ([0], "contains 0"),
    ):
        x = torch.zeros(len(lengths), STEPS, 3)
        with pytest.raises(RuntimeError):
            members[0](x, torch.tensor(lengths))
        with pytest.raises(OperandError, match=message):
            fused(x, torch.tensor(lengths))


@pytest.mark.extended
def test_autocast_and_gradients_of_func_take_packed_sequences() -> None:
    members = members_of(nn.GRU, False, STEPS)
    x, lengths = (
        torch.randn(4, STEPS, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([3, 6, 1, 2]),
    )
    fused = widepack.fuse(members, (x, lengths))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for y, *alone in zip(fused(x, lengths), *(m(x, lengths) for m in members), strict=True):
            torch.testing.assert_close(y, torch.stack(alone), atol=1e-2, rtol=1e-2)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return square(torch.func.functional_call(fused, values, (x, lengths)), 0)

    found = torch.func.grad(loss)({name: p.detach() for name, p in fused.named_parameters()})
    for i, member in enumerate(members):
        square(member.double()(x.double(), lengths), 0).backward()  # type: ignore[no-untyped-call]
        for name, p in member.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(found[name][i].double() * len(members), p.grad, atol=1e-6, rtol=1e-5)


def test_lengths_inside_vmap() -> None:
    steps, lengths = torch.arange(5), torch.tensor([[4, 2, 1], [5, 5, 3]])
    assert torch.equal(torch.vmap(OP, in_dims=(0, None))(lengths, steps), lengths)
    assert torch.equal(torch.vmap(OP, in_dims=(1, None))(lengths.T, steps), lengths)
    assert torch.equal(
        torch.vmap(OP, in_dims=(None, 0))(lengths[0], torch.zeros(2, 5)), lengths[:1].expand(2, 3)
    )
    with pytest.raises(OperandError, match="contains 6; 1 to 5 are possible"):
        torch.vmap(OP, in_dims=(0, None))(lengths + 1, steps)
