"""Tests which axes of a sample are dynamic, and the errors for other forms of `dynamic`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import members
from torch import Tensor, nn

import widepack
from widepack import UsageError
from widepack.capture.example import dynamic_axes

X = torch.ones(5, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


class Positions(Net):
    def forward(self, *x: Tensor) -> Tensor:
        return super().forward(x[0]) + super().forward(x[1])


class Keywords(nn.Module):
    def forward(self, **parts: Tensor) -> Tensor:
        return parts["x"] + 1


TENSOR = "for input x, which is a tensor in the sample; give a dict with the letter of each dynamic axis"
DICT = "for input x, which is a dict with the keys a, b in the sample; give a dict with an entry for each"
PARTS = "for input x, which has 2 parts in the sample; give one entry for each part, or a dict for all"
LETTER = "the name of a dim is a letter or a word, with a factor where sizes are its multiples"


@pytest.mark.parametrize(
    ("sample", "dynamic", "words"),
    [
        (X, "B,1", "dynamic is 'B,1', of the type str; give a dict with the dynamic axes of each input"),
        (X, 5, "dynamic is 5, of the type int"),
        (X, ["x"], "dynamic is ['x'], of the type list"),
        (X, {3: {0: "B"}}, "dynamic names 3, which forward does not take; it takes x"),
        (X, {"x": "B,1"}, f"dynamic has 'B,1' {TENSOR}"),
        (X, {"x": 5}, f"dynamic has 5 {TENSOR}"),
        (X, {"x": ["B"]}, f"dynamic has ['B'] {TENSOR}"),
        (X, {"x": {"a": "B"}}, "dynamic names axis 'a' of input x; an axis is a whole number"),
        (X, {"x": {True: "B"}}, "dynamic names axis True of input x"),
        (X, {"x": {0: 1}}, f"dynamic names axis 0 of input x with 1; {LETTER}"),
        (X, {"x": {0: None}}, "dynamic names axis 0 of input x with None"),
        (X, {"x": {0: "0*B"}}, "dynamic names axis 0 of input x with '0*B'"),
        (X, {"x": {0: "B,1"}}, "dynamic names axis 0 of input x with 'B,1'"),
        ([X, X], {"x": [{0: "B"}]}, f"dynamic has a list of 1 {PARTS}"),
        ([X, X], {"x": [{0: "B"}, "B"]}, "dynamic has 'B' for input x.1, which is a tensor"),
        ({"a": X, "b": X}, {"x": {0: "B"}}, f"dynamic has {{0: 'B'}} {DICT}"),
        ({"a": X, "b": X}, {"x": "B"}, f"dynamic has 'B' {DICT}"),
    ],
)
def test_other_forms_are_refused(sample: Any, dynamic: Any, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        dynamic_axes(dynamic, Net(), (sample,), {})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("net", "args", "kwargs", "dynamic", "axes"),
    [
        (Net, (X,), {}, {"x": {0: "B", "-1": "H*2"}}, {"x": {0: "B", -1: "2*H"}}),
        (Net, (X,), {}, {"x": None}, {"x": None}),
        (Net, ([X, 3],), {}, {"x": {0: "B"}}, {"x": [{0: "B"}, None]}),
        (Net, ({"a": X, "b": X},), {}, {"x": {"a": {0: "B"}}}, {"x": {"a": {0: "B"}}}),
        (Positions, (X, X), {}, {"x": {0: "B"}}, {"x": [{0: "B"}, {0: "B"}]}),
        (Positions, (X, X), {}, {"x_1": {0: "B"}}, {"x_1": {0: "B"}}),
        (Keywords, (), {"x": X}, {"x": {0: "B"}}, {"x": {0: "B"}}),
        (Net, (X,), {}, None, {"x": {0: "B"}}),
    ],
)
def test_axes_are_nested_as_the_sample_is(net: Any, args: Any, kwargs: Any, dynamic: Any, axes: Any) -> None:
    assert dynamic_axes(dynamic, net(), args, kwargs) == axes


def test_fuse_and_build_refuse_a_text_in_the_place_of_axes(tmp_path: Path) -> None:
    dynamic = {"x": "B,1"}
    with pytest.raises(UsageError, match="dynamic has 'B,1' for input x, which is a tensor"):
        widepack.fuse(members(Net), X, dynamic=dynamic)
    torch.save(Net().state_dict(), tmp_path / "0.pt")
    with pytest.raises(UsageError, match="dynamic has 'B,1' for input x, which is a tensor"):
        widepack.build([tmp_path / "0.pt"], tmp_path / "e.wide", model=Net, sample=(X,), dynamic=dynamic)


def test_one_position_of_several_is_named() -> None:
    nets = members(Positions)
    fused = widepack.fuse(nets, (X, X), dynamic={"x_0": {0: "B"}, "x_1": {0: "B"}})
    more = torch.ones(7, 4)
    torch.testing.assert_close(fused(more, more), torch.stack([m(more, more) for m in nets]))
