"""Tests the errors of wide layers: which calls they refuse, and the messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import CASES
from torch import nn
from wide_layers import (
    N,
    members,
    wide_layer_of,
)

from widepack import InputError, MemberMismatch, UsageError, primitives


def test_messages_name_the_refused_value() -> None:
    three = members(lambda: nn.Linear(4, 5))
    wide_layer = wide_layer_of(three)
    for call, error, words in (
        (lambda: wide_layer(), TypeError, "input"),
        (lambda: wide_layer(torch.randn(N, 2, 3).double()), RuntimeError, "got [2, 3] X [4, 5]"),
        (
            lambda: wide_layer(torch.randn(2, 4)),
            InputError,
            "WideLinear takes every input as [3, ...], with the member axis in front, "
            "and input 0 is float32[2,4]",
        ),
        (
            lambda: wide_layer_of(three, "bmw"),
            UsageError,
            "WideLinear has no strategy 'bmw'; it has one_gemm, ",
        ),
        (lambda: primitives.WideLinear.from_modules([]), UsageError, "there are no modules"),
        (
            lambda: primitives.WideLinear.from_modules([nn.Conv1d(1, 1, 1)]),
            UsageError,
            "takes modules of class torch.nn.Linear, and member 0 is of class",
        ),
        (
            lambda: primitives.WideLinear.from_modules(
                [nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))]
            ),
            UsageError,
            "widepack.fuse",
        ),
    ):
        _assert_raises(call, error, words)


def test_options_of_embeddings_are_refused() -> None:
    for module, words in (
        (nn.Embedding(5, 4, max_norm=1.0), "max_norm=1.0 changes the rows that are read in every forward"),
        (nn.Embedding(5, 4, sparse=True), "sparse=True"),
        (nn.EmbeddingBag(5, 4, max_norm=2.0), "max_norm=2.0"),
    ):
        with pytest.raises(UsageError) as e:
            wide_layer_of([module])
        assert words in str(e.value)


def test_inputs_that_a_member_refuses_are_refused() -> None:
    cell = torch.randn(N, 2, 4).double(), (torch.randn(N, 2, 6).double(), torch.randn(N, 2, 1).double())
    for name, inputs, error, words in (
        ("BatchNorm2d", (torch.randn(N, 2, 1, 3, 3).double(),), RuntimeError, ""),
        ("LSTMCell", cell, RuntimeError, ""),
        ("BatchNorm1d", (torch.randn(N, 1, 4).double(),), ValueError, "more than 1 value per channel"),
    ):
        wide_layer = wide_layer_of(members(CASES[name].make))
        _assert_raises(partial(wide_layer, *inputs), error, words)


def _assert_raises(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as e:
        call()
    assert words in str(e.value)


def test_a_forward_on_an_instance_is_refused() -> None:
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="member 1 has hooks"):
        wide_layer_of([nn.Linear(2, 2), hooked])
    changed = members(lambda: nn.MultiheadAttention(4, 2))
    for m in changed:
        vars(m.out_proj)["forward"] = torch.neg
    with pytest.raises(UsageError, match="out_proj of member 0 has a forward of its own"):
        wide_layer_of(changed)


def test_weights_of_a_bag_are_refused_without_mode_sum() -> None:
    """The layer refuses weights where the module does."""
    wide_layer: Any = wide_layer_of(members(lambda: nn.EmbeddingBag(9, 4, mode="mean")))
    ids = torch.zeros(N, 2, 3, dtype=torch.long)
    for strategy in wide_layer.strategies:
        wide_layer.strategy = strategy
        with pytest.raises((RuntimeError, UsageError), match="only supported with mode='sum'|does not apply"):
            wide_layer(ids, per_sample_weights=torch.ones(N, 2, 3).double())


def test_inputs_without_tensors_are_refused() -> None:
    wide_layer = wide_layer_of(members(lambda: nn.Linear(4, 5)))
    for inputs, words in (((None,), "was given builtins.NoneType"), (([1.0],), "was given builtins.list")):
        with pytest.raises(InputError, match=words):
            wide_layer(*inputs)
    for modules in (None, nn.Linear(4, 5)):
        with pytest.raises(UsageError, match="WideLinear takes a list of modules, not a"):
            type(wide_layer).from_modules(modules)  # type: ignore[arg-type]


def test_members_that_differ_are_refused_with_all_differences() -> None:
    one, two, three = (
        nn.Conv2d(2, 4, 3),
        nn.Conv2d(2, 4, 3, stride=2, padding=1).double(),
        nn.Conv2d(2, 4, 3, bias=False).eval(),
    )
    one.weight.requires_grad_(False)
    with pytest.raises(MemberMismatch) as found:
        wide_layer_of([one, two, three])
    text = str(found.value)
    assert text.startswith(
        "WideConv2d: the members differ from member 0: (1) member 1: weight is float64[4, 2, 3, 3] on cpu, "
        "in member 0 float32[4, 2, 3, 3]"
    )
    for words in (
        "(2) members 1-2: weight is a parameter that trains, in member 0 a parameter that is frozen",
        "member 1: stride.0 is 2, in member 0 1",
        "member 1: padding.1 is 1, in member 0 0",
        "member 2: it is in eval mode, in member 0 in train mode",
        "member 2: bias is not there, in member 0 float32[4] on cpu",
        "(8)",
    ):
        assert words in text, (words, text)
    assert "\n" not in text
    with pytest.raises(
        MemberMismatch,
        match=r"\(1\) member 1: it is a torch.nn.modules.conv.Conv1d, "
        r"in member 0 a torch.nn.modules.conv.Conv2d",
    ):
        wide_layer_of([one, nn.Conv1d(2, 4, 3)])


def test_channels_last_memory_does_not_train_on_one_image() -> None:
    layer = primitives.WideConv2d.from_modules(
        [nn.Conv2d(3, 4, 3) for _ in range(2)], strategy="grouped_channels_last"
    )
    one, two = torch.randn(2, 1, 3, 5, 5), torch.randn(2, 2, 3, 5, 5)
    with pytest.raises(UsageError, match=r"does not train on one image .*float32\[2,1,3,5,5\]"):
        layer(one)
    assert layer(two).requires_grad
    with torch.no_grad():
        assert layer(one).shape == (2, 1, 4, 3, 3)
