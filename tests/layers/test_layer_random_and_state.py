"""Tests dropout, packed sequences and running statistics of wide layers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import CASES
from support import leaves
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from wide_layers import (
    DROPOUTS,
    N,
    assert_members,
    members,
    wide_layer_of,
)


@pytest.mark.parametrize("module", DROPOUTS, ids=lambda m: type(m).__name__)
def test_dropout_draws_for_each_member(module: nn.Module) -> None:
    rank = {"Dropout1d": 3, "Dropout2d": 4, "Dropout3d": 5}.get(type(module).__name__, 4)
    value = torch.ones((6, 8, 5, 3, 2)[:rank], dtype=torch.float64)
    inputs = value.expand(N, *value.shape)
    wide_layer = wide_layer_of([copy.deepcopy(module) for _ in range(N)])
    answer = wide_layer(inputs)
    assert answer.shape == inputs.shape
    assert not torch.equal(answer[0], answer[1]) and not torch.equal(answer[1], answer[2])
    by_channel = "Dropout" in type(module).__name__ and type(module).__name__ not in (
        "Dropout",
        "AlphaDropout",
    )
    same = answer.flatten(3).eq(answer.flatten(3)[..., :1]).all()
    assert bool(same) == by_channel
    assert torch.equal(wide_layer.eval()(inputs), inputs)
    wide_layer.train().strategy = "sequential"
    torch.manual_seed(3)
    answer = wide_layer(inputs)
    torch.manual_seed(3)
    assert torch.equal(answer, torch.stack([module(value) for _ in range(N)]))
    assert type(wide_layer.to_modules()[1]) is type(module) and repr(wide_layer.to_modules()[1]) == repr(
        module
    )


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Dropout1d(0.5), (8, 5)), (nn.Dropout3d(0.5), (8, 3, 2, 2)), (nn.Dropout(0.5), (8,))],
)
def test_dropout_without_a_batch(module: nn.Module, shape: tuple[int, ...]) -> None:
    wide_layer = wide_layer_of([copy.deepcopy(module) for _ in range(N)])
    answer = wide_layer(torch.ones(N, *shape))
    assert answer.shape == (N, *shape)
    if len(shape) > 1:
        assert bool(answer.flatten(2).eq(answer.flatten(2)[..., :1]).all())  # a channel is dropped completely
    assert 0 < float((answer == 0).float().mean()) < 1


def test_dropout_has_one_mask_for_all_members_if_requested() -> None:
    wide_layer = wide_layer_of([nn.Dropout(0.4) for _ in range(N)], "shared")
    answer = wide_layer(torch.ones(N, 50, 4))
    assert torch.equal(answer[0], answer[1]) and 0 < float((answer == 0).float().mean()) < 1


def test_dropout_inside_layers_draws_for_each_member() -> None:
    for module, args in (
        (nn.LSTM(4, 6, 2, dropout=0.5), (torch.randn(5, 2, 4),)),
        (nn.MultiheadAttention(8, 2, dropout=0.5), (torch.randn(5, 2, 8),) * 3),
    ):
        wide_layer = wide_layer_of([copy.deepcopy(module) for _ in range(N)])
        answer = [
            leaves(
                wide_layer(*(a.expand(N, *a.shape) for a in args), **({} if "LSTM" in wide_layer.name else k))
            )[0]
            for k in ({}, {"need_weights": False})
        ]
        for y in answer:
            assert not torch.equal(y[0], y[1])
        wide_layer.eval()
        y = leaves(wide_layer(*(a.expand(N, *a.shape) for a in args)))[0]
        assert torch.equal(y[0], y[1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(layer: type[nn.Module]) -> None:
    """All members have the same lengths and different data. States have the caller's order."""
    alone = members(lambda: layer(4, 6, 2, bidirectional=True))
    wide_layer = wide_layer_of(alone)
    batch, lengths = torch.randn(N, 5, 3, 4, dtype=torch.float64), torch.tensor([2, 5, 3])
    sequences = [pack_padded_sequence(b, lengths, enforce_sorted=False) for b in batch]
    inputs = PackedSequence(
        torch.stack([p.data for p in sequences]),
        sequences[0].batch_sizes,
        sequences[0].sorted_indices,
        sequences[0].unsorted_indices,
    )
    states = [torch.randn(N, 4, 3, 6, dtype=torch.float64) for _ in range(2 if layer is nn.LSTM else 1)]
    for start in (None, tuple(states) if layer is nn.LSTM else states[0]):
        answer, ends = wide_layer(inputs) if start is None else wide_layer(inputs, start)
        for i, m in enumerate(alone):
            member_start = (
                None if start is None else tuple(s[i] for s in start) if layer is nn.LSTM else start[i]
            )
            expected, last = m(sequences[i], member_start)
            torch.testing.assert_close(answer.data[i], expected.data)
            assert torch.equal(answer.batch_sizes, expected.batch_sizes)
            for e, w in zip(leaves(ends), leaves(last)):
                torch.testing.assert_close(e[i], w)


def test_statistics_use_each_members_count_of_batches() -> None:
    """With momentum=None, a new batch has less weight in members that have seen more batches."""
    alone = members(lambda: nn.BatchNorm1d(4, momentum=None))
    for i, m in enumerate(alone):
        m.num_batches_tracked.fill_(i)  # type: ignore[operator]
    wide_layer = wide_layer_of(alone)
    for _ in range(3):
        inputs = torch.randn(N, 6, 4, dtype=torch.float64)
        assert_members(wide_layer(inputs), [m(g) for m, g in zip(alone, inputs)])
    for name, b in wide_layer.named_buffers():
        assert_members(b, [m.get_buffer(name) for m in alone])


def test_every_call_updates_the_statistics() -> None:
    """The second and third calls, which repeat the steps of the first, also update the statistics."""
    for name in ("InstanceNorm2d-all", "BatchNorm2d"):
        alone = members(CASES[name].make)
        wide_layer = wide_layer_of(alone)
        for _ in range(3):
            inputs = torch.randn(N, 3, 4, 4, 3, dtype=torch.float64)
            assert_members(wide_layer(inputs), [m(g) for m, g in zip(alone, inputs)])
            for key, b in wide_layer.named_buffers():
                assert_members(b, [m.get_buffer(key) for m in alone])
    dropout = wide_layer_of([nn.Dropout(0.5)] * N)
    assert len({tuple(dropout(torch.ones(N, 40)).flatten().tolist()) for _ in range(3)}) == 3


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "sequential"])
def test_a_batch_norm_of_an_empty_batch_equals_the_module(tracked: bool, strategy: str) -> None:
    """torch's kernel divides by the batch size in its backward. That ended the process for empty batches."""
    for training, options in ((True, {}), (True, {"momentum": None}), (False, {})):
        make = partial(nn.BatchNorm2d, 3, track_running_stats=tracked, **options)  # type: ignore[arg-type]
        alone = [m.train(training) for m in members(make)]
        wide_layer: Any = type(wide_layer_of(alone)).from_modules(alone, strategy)
        inputs = torch.empty(N, 0, 3, 4, 2).double()
        assert_members(wide_layer(inputs), [m(x) for m, x in zip(alone, inputs)])
        wide_layer(inputs).sum().backward()
        assert torch.equal(wide_layer.weight.grad, torch.zeros(N, 3).double())
        for one, module in zip(wide_layer.to_modules(), alone):
            if tracked:
                module(inputs[0])  # the second call
            assert all(torch.equal(a, b) for a, b in zip(one.buffers(), module.buffers()))
