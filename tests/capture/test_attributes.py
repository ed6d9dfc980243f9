"""Tests plain attributes: how they are listed, and how those of two members are compared.

A build refuses a difference that changes the program. It accepts other differences.
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import threading
from collections import defaultdict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from capture.attribute_members import Config, Mangled, Net, Words
from widepack.capture.attributes import attributes_of, differences, in_words
from widepack.verification.same_program import Recorded, first_difference


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


def default(k: int) -> dict[str, int]:
    return defaultdict(lambda: k)


class Slots:
    __slots__ = ("one", "two")

    def __init__(self) -> None:
        self.one = 1


Point = collections.namedtuple("Point", ["x", "y"])


def of(**values: Any) -> dict[str, str]:
    module = nn.Module()
    module.inner = nn.Module()
    for name, value in values.items():
        setattr(module.inner, name, value)
    return {k.removeprefix("inner."): v for k, v in attributes_of(module).items()}


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (0.1, {"a": "0.1"}),
        (float("nan"), {"a": "nan"}),
        (None, {"a": "None"}),
        (torch.float16, {"a": "torch.float16"}),
        (torch.Size([2, 3]), {"a.0": "2", "a.1": "3"}),
        ([1, (2.0, "x")], {"a.0": "1", "a.1.0": "2.0", "a.1.1": "'x'"}),
        ([], {"a": "an empty list"}),
        ({"k": 1, 2: True}, {"a.k": "1", "a.2": "True"}),
        ({3, 1}, {"a.0": "1", "a.1": "3"}),
        ({(3, 4), (1, 2)}, {"a.0.0": "1", "a.0.1": "2", "a.1.0": "3", "a.1.1": "4"}),
        (Point(1, 2), {"a.x": "1", "a.y": "2"}),
        (Mode.SLOW, {"a": "Mode.SLOW"}),
        (Path("x/y"), {"a": "PosixPath('x/y')"}),
        (np.float64(0.1), {"a": "float64(0.1)"}),
        (np.arange(3), {"a": "int64([0, 1, 2])"}),
        (functools.partial(pow, 2, mod=3), {"a.func": "builtins.pow", "a.0": "2", "a.mod": "3"}),
        (
            Config(),
            {
                "a": "a Config",
                "a.eps": "1e-05",
                "a.sizes.0": "3",
                "a.sizes.1": "4",
                "a.nested.scale": "0.5",
                "a.nested.deep": "a SimpleNamespace",
                "a.nested.deep.flag": "True",
                "a.scale": "0",
            },
        ),
        (Slots(), {"a": "a Slots", "a.one": "1"}),
        (torch.ones(2), {"a": "float32[2] [1.0, 1.0]"}),
        (torch.tensor(7), {"a": "int64[] 7"}),
        ({("enc", 0): 1}, {"a.('enc', 0)": "1"}),
        (MappingProxyType({"k": 1}), {"a.k": "1"}),
        (Mangled(), {"a": "a Mangled", "a._Mangled__k": "3"}),
        (torch.Generator(), {}),
        (threading.Lock(), {}),
        (np, {}),
    ],
)
def test_values_as_rows(value: Any, rows: dict[str, str]) -> None:
    found = of(a=value)
    assert found == rows


def test_equal_modules_have_equal_rows_and_no_address_is_in_them() -> None:
    def make() -> nn.Module:
        scale = 0.5
        return nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16),
            nn.LSTM(8, 4, 2),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            Net(lambda x: x * scale),
        )

    one, other = make(), make()
    assert attributes_of(one) == attributes_of(other)
    assert not any(" at 0x" in text for text in attributes_of(one).values())
    assert attributes_of(one)["3.act.scale"] == "0.5"
    assert attributes_of(one)["0.norm1.eps"] == "1e-05"
    assert attributes_of(one.eval()) == attributes_of(other.train())  # the mode is not a plain attribute


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (list(range(100)), [*range(99), 7]),
        ({str(i): i for i in range(100)}, {str(i): i + (i == 50) for i in range(100)}),
        (np.zeros(100), np.eye(10).reshape(-1)),
        (np.zeros((10, 10)), np.zeros(100)),
        (np.zeros(3_000_000), np.concatenate([np.zeros(2_999_999), np.ones(1)])),
        (Config(nested={"deep": {"deeper": [1]}}), Config(nested={"deep": {"deeper": [2]}})),
        ({"a", "b"}, {"a", "c"}),
        ({(1, 2), (3, 4)}, {(1, 2), (3, 5)}),
        ({Mode.SLOW, 1}, {1, 2}),
        ({frozenset({1, 2})}, {frozenset({1, 3})}),
        (array.array("d", [1.0, 2.0]), array.array("d", [1.0, 3.0])),
        (array.array("f", [1.0]), array.array("i", [0x3F800000])),
        (memoryview(b"abcd"), memoryview(b"abcd").cast("i")),
        ([], ()),
        (torch.relu, torch.tanh),
        (torch.arange(9), torch.arange(1, 10)),
        (torch.zeros(9), torch.zeros(3, 3)),
        (torch.zeros(3_000_000), torch.cat([torch.zeros(2_999_999), torch.ones(1)])),
        (torch.zeros(4, 4).t(), torch.eye(4).t()),
        (memoryview(b"ab"), memoryview(b"ac")),
        (default(1), default(2)),
        (Words("a", 1), Words("a", 2)),
        (Config(scale=1).most, Config(scale=2).most),
        ({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}, {"a": {"b": {"c": {"d": {"e": {"f": 2}}}}}}),
    ],
)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert of(a=one) == of(a=one)
    assert differences(of(a=one), of(a=other))


def test_comparisons_of_circular_and_deep_values_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    assert of(a=loop) == {"a.0": "1"}
    assert of(a=deep) == {}
    module = nn.Linear(2, 2)
    object.__setattr__(module, "owner", SimpleNamespace(module=module))
    assert attributes_of(module)["owner"] == "a SimpleNamespace"
    many = of(
        a={str(i): {str(j): j for j in range(60)} for i in range(60)},
        b={str(i): list(range(60)) for i in range(60)},
    )
    assert len(many) <= 20_000


def test_messages_of_differences_name_numbers_first() -> None:
    found = differences({"a": "'text'", "b": "1", "gone": "2"}, {"a": "'other'", "b": "3", "long": "x" * 399})
    assert [d.path for d in found] == ["b", "gone", "long", "a"]
    text = in_words(found, "member a", "member b")
    assert text.startswith("b: 1 in member a, 3 in member b; gone: 2 in member a, nothing in member b; ")
    assert "(399 characters)" in text
    assert in_words(found * 2, "a", "b").endswith("; and 3 more")


def test_the_record_of_a_call() -> None:
    def did(scale: Any, text: str = "none") -> Recorded:
        found = Recorded()
        with found, torch.no_grad():
            x = torch.ones(2, 3)
            torch.nn.functional.gelu(x, approximate=text).clamp(max=scale) + torch.tensor(scale)
        return found

    assert first_difference(did(1.0).operations, did(1.0).operations) == (-1, "")
    assert "clamp" in first_difference(did(1.0).operations, did(2.0).operations)[1]
    assert "tanh" in first_difference(did(1.0).operations, did(1.0, "tanh").operations)[1]
    assert first_difference(did(1.0).operations, did(1.0).operations[:2])[1].endswith("ops and 2")
