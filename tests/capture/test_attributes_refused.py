"""Tests that builds refuse members that differ in a plain attribute that changes the program."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from loaded import files_of
from torch import Tensor, nn

from capture.attribute_members import (
    QUICK,
    Config,
    Mangled,
    Net,
    Scaled,
    Words,
    by_member,
    in_turn,
    numbered,
    refused,
    save,
)
from widepack import build
from widepack.errors import MemberMismatch, VerificationError


def clamped(bound: float) -> nn.Module:
    net = Net()
    net.bound = bound
    net.act = functools.partial(torch.clamp, max=net.bound)
    return net


class Flagged(Net):
    """A module with a flag that selects another path, which computes the same numbers for all inputs."""

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 / 2 if self.doubled else super().forward(x)


class Limited(Net):
    """A module with a length limit that only longer inputs reach. It is not a literal, but a condition."""

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most:
            raise ValueError("too long")
        return super().forward(x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "values", "words"),
    [
        (
            Scaled,
            (1e-5, 1e-5, 1e-6),
            "member m2 has another program than member m0 ... batch_norm ... 1e-06 in it, 1e-05 in the "
            "... batch.eps: 1e-05 in member m0, 1e-06 in member m2",
        ),
        (
            clamped,
            (1e3, 2e3, 1e3),
            "member m1 ... 2000.0 in it, 1000.0 in the captured ... bound: 1000.0 in member m0, 2000.0 "
            "in member m1 ... act.max: 1000.0",
        ),
        (
            Flagged,
            (False, False, True),
            "member m2 ... doubled: False in member m0, True in member m2 ... ops",
        ),
        (Limited, (64, 64, 128), "member m2 ... most: 64 in member m0, 128 in member m2 ... holds under"),
    ],
)
def test_a_difference_that_no_drawn_input_shows_is_refused_by_name(
    make: Callable[[Any], nn.Module], values: tuple[Any, ...], words: str, tmp_path: Path
) -> None:
    paths = numbered(tmp_path, Scaled if make is Scaled else Net)
    message = refused(MemberMismatch, tmp_path, paths, model=by_member(make, *values))
    for word in [*words.split(" ... "), "--model-arg", "buffer"]:
        assert word in message, message


class Guarded(nn.Module):
    """A module with a limit that no drawn size reaches, and that can be stored in several ways."""

    tag: Tensor

    def __init__(self, keep: Callable[[int], Any], read: Callable[[Any], int], limit: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("tag", torch.tensor(float(limit)))
        self.read, self.limit = read, keep(limit)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) + self.tag * 0
        return y * 2 if x.shape[1] > self.read(self.limit) else y


KEPT: dict[str, tuple[Callable[[int], Any], Callable[[Any], int]]] = {
    "a tensor's number": (torch.tensor, int),
    "a tensor's numbers": (lambda k: torch.tensor([k, 1]), lambda t: t.tolist()[0]),
    "a long tensor's numbers": (lambda k: torch.full((99,), k), lambda t: t.tolist()[0]),
    "a tensor's shape": (torch.zeros, lambda t: t.shape[0]),
    "a key of two": (lambda k: {("enc", 0): k}, lambda d: d["enc", 0]),
    "a default": (lambda k: defaultdict(lambda: k), lambda d: d["any"]),
    "a view of a dict": (lambda k: MappingProxyType({"k": k}), lambda d: d["k"]),
    "a method": (lambda k: Config(scale=k).most, lambda f: f()),
    "a text's own": (lambda k: Words("a", k), lambda w: w.number),
    "a hidden slot": (Mangled, lambda m: m.most),
    "six levels deep": (lambda k: [[[[[[k]]]]]], lambda v: v[0][0][0][0][0][0]),
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "how", [pytest.param(k, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i, k in enumerate(KEPT)]
)
def test_a_limit_is_found_wherever_it_is_stored(how: str, tmp_path: Path) -> None:
    def make(state_dict: dict[str, Tensor] | None = None) -> nn.Module:
        return Guarded(*KEPT[how], 200 if state_dict is None else int(state_dict["tag"]))

    paths = files_of(tmp_path, [Guarded(*KEPT[how], limit) for limit in (200, 200, 100)])
    with pytest.raises(MemberMismatch, match="m2 has another program than member m0"):
        build(paths, tmp_path / "e.wide", model=make, inputs=["x=float32[B,T,4]"], **QUICK)


class Modal(Net):
    """A module with four modes. Three give the same program; the fourth matters only for long inputs."""

    def __init__(self, mode: str = "a") -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.mode == "d" and x.shape[0] > 64 else y


@pytest.mark.extended
def test_harmless_values_do_not_hide_a_harmful_one(tmp_path: Path) -> None:
    message = refused(
        MemberMismatch, tmp_path, numbered(tmp_path, count=4), model=by_member(Modal, "a", "b", "c", "d")
    )
    assert "mode: 'a' in member m0, 'd' in member m3" in message


def test_an_eps_that_changes_answers_is_named_with_its_line(tmp_path: Path) -> None:
    make = by_member(lambda e: Net(eps=e), 1e-5, 1e-2, 1e-5)
    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=make)
    assert "gives other answers than the members" in message
    assert (
        "the modules differ in norm.eps: 1e-05 in member m0, 0.01 in member m1 (aten.layer_norm.default "
        "(attribute_members.py:" in message
    )
    assert "0.01 in it, 1e-05 in the captured program" in message


def test_a_factory_that_is_not_deterministic(tmp_path: Path) -> None:
    make = in_turn(Scaled, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5)
    message = refused(MemberMismatch, tmp_path, save(tmp_path, Scaled, count=1), model=make)
    assert "member m0 becomes another program each time that it is built" in message
    assert "The factory is not deterministic: batch.eps: " in message


@pytest.mark.extended
def test_a_list_of_numbers_that_is_drawn(tmp_path: Path) -> None:
    class Drawn(Net):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.randperm(6).tolist()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, self.order])

    message = refused(VerificationError, tmp_path, save(tmp_path, Drawn), model=Drawn)
    assert "differ in something that is not a weight: " in message
    assert "order." in message


def test_a_config_inside_a_module(tmp_path: Path) -> None:
    def make(slope: float) -> nn.Module:
        net = Net()
        net.config = config = Config(nested={"act": {"slope": slope}})
        net.act = lambda x: torch.nn.functional.threshold(x, -config.nested["act"]["slope"], 0.0)
        return net

    message = refused(MemberMismatch, tmp_path, numbered(tmp_path), model=by_member(make, 1e3, 1e3, 1e4))
    assert "config.nested.act.slope: 1000.0 in member m0, 10000.0 in member m2" in message


@pytest.mark.extended
def test_a_numpy_scalar(tmp_path: Path) -> None:
    def make(bound: float) -> nn.Module:
        net = Net()
        net.bound = most = np.float64(bound)
        net.act = lambda x: x.clamp(max=float(most))
        return net

    message = refused(MemberMismatch, tmp_path, numbered(tmp_path), model=by_member(make, 1e3, 1e4, 1e3))
    assert "bound: float64(1000.0) in member m0, float64(10000.0) in member m1" in message


@pytest.mark.extended
def test_a_number_made_into_a_tensor(tmp_path: Path) -> None:
    class Made(Net):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor(self.shift)

    paths, make = numbered(tmp_path, lambda: Made(0.0)), by_member(Made, 1e-20, 1e-20, 2e-20)
    message = refused(MemberMismatch, tmp_path, paths, model=make)
    assert "a tensor that the code makes of numbers (test_attributes_refused.py:" in message
    assert "shift: 1e-20 in member m0, 2e-20 in member m2" in message


HIDDEN: dict[str, float] = {}


class Hidden(Net):
    """Reads a number from a global variable, not from an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=HIDDEN["bound"]) * HIDDEN["scale"]


@pytest.mark.extended
def test_a_number_that_no_attribute_shows(tmp_path: Path) -> None:
    def make(pair: tuple[float, float]) -> nn.Module:
        HIDDEN.update(bound=pair[0], scale=pair[1])
        return Hidden()

    paths = numbered(tmp_path)
    message = refused(
        VerificationError, tmp_path, paths, model=by_member(make, (1e3, 1.0), (1e3, 2.0), (1e3, 1.0))
    )
    assert "member m1" in message
    assert "2.0 in it, 1.0 in the captured program" in message
    assert "he plain attributes of the modules do not explain it" in message
    message = refused(
        MemberMismatch, tmp_path, paths, model=by_member(make, (1e3, 1.0), (1e3, 1.0), (2e3, 1.0))
    )  # larger than every drawn input
    assert "member m2" in message
    assert "2000.0 in it, 1000.0 in the captured program" in message
    assert "he plain attributes of the modules do not explain it" in message


@pytest.mark.extended
def test_a_scale_in_a_closure_is_named(tmp_path: Path) -> None:
    make = by_member(lambda s: Net(lambda x: x * s), 1.0, 1.0, 3.0)
    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=make)
    assert "act.s: 1.0 in member m0, 3.0 in member m2" in message
    assert "3.0 in it, 1.0 in the captured program" in message


def test_a_member_whose_own_module_fails(tmp_path: Path) -> None:
    def make(value: int) -> nn.Module:
        net = Net()
        net.rows = value
        net.act = lambda x: x.reshape(-1, value, 5 // value).flatten(1)
        return net

    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=by_member(make, 5, 5, 4))
    assert "member m2: its own module fails at" in message
    assert "rows: 5 in member m0, 4 in member m2" in message
