"""Tests the bounds of answers in TF32: torch's settings, the programs they matter for, and the probe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from small import node, program
from tf32_settings import without_tf32
from torch import nn

from widepack.errors import ProbeError
from widepack.inference.programs import probe_check
from widepack.kernels.triton_kernels.available import TF32_SWITCH, precision
from widepack.verification.record import OutputBounds
from widepack.verification.tf32_bounds import EPS, in_tf32, runs_in_tf32, tf32_kinds
from widepack_artifacts.program import Program, Ref
from widepack_bench.report.environment import tf32

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALL = {"products", "convolutions", "recurrent layers"}


@pytest.fixture(autouse=True)
def without_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TF32_SWITCH, raising=False)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets what torch's settings answer, without a change of the settings."""

    class Setting:
        """A stand-in for one of `torch.backends`."""

        def __init__(self, precision: str) -> None:
            self.fp32_precision = precision

    def put(products: str, conv: str, rnn: str, cudnn: str = "none", every: str = "none") -> None:
        monkeypatch.setattr(torch.backends.cuda, "matmul", Setting(products))
        library = Setting(cudnn)
        library.conv, library.rnn = Setting(conv), Setting(rnn)  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.backends, "cudnn", library)
        monkeypatch.setattr(torch.backends, "fp32_precision", every)

    return put


def test_torchs_defaults() -> None:
    """The defaults on which the plans for CUDA rest (kernel_times/cuda.py)."""
    assert tf32_kinds(CUDA) == {"convolutions", "recurrent layers"}
    assert tf32_kinds(CPU) == frozenset()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("none", "none", "none"), set()),
        (("tf32", "ieee", "ieee"), {"products"}),
        (("ieee", "tf32", "none"), {"convolutions"}),
        (("ieee", "none", "none", "tf32"), {"convolutions", "recurrent layers"}),
        (("none", "none", "none", "none", "tf32"), ALL),
        (("none", "none", "none", "ieee", "tf32"), {"products"}),
        (("ieee", "ieee", "ieee", "tf32", "tf32"), set()),
    ],
)
def test_a_setting_of_an_op_comes_before_that_of_its_library(
    settings: Any, given: Any, expected: Any
) -> None:
    settings(*given)
    assert tf32_kinds(CUDA) == expected


@pytest.mark.parametrize(("value", "expected"), [("0", set()), ("1", ALL), ("", ALL)])
def test_the_variable_of_the_environment_switches_tf32_off(
    settings: Any, monkeypatch: pytest.MonkeyPatch, value: str, expected: set[str]
) -> None:
    settings("tf32", "tf32", "tf32")
    monkeypatch.setenv(TF32_SWITCH, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert tf32_kinds(CUDA) == expected
    assert tf32() == {"products": bool(expected), "convolutions": bool(expected)}
    assert precision(torch.float32) == ("tf32" if expected else "tf32x3")  # of widepack's own kernels


@pytest.fixture
def one_kind() -> Iterator[None]:
    """Sets the precision of convolutions alone, as the docs show."""
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    yield
    cudnn.allow_tf32 = True  # the default


def test_the_precision_of_one_kind_of_ops_can_be_read(one_kind: None) -> None:
    with pytest.raises(RuntimeError, match="different TF32 flags"):
        assert torch.backends.cudnn.allow_tf32
    assert tf32() == {"products": False, "convolutions": False}
    assert tf32_kinds(CUDA) == {"recurrent layers"}
    with without_tf32():
        assert tf32_kinds(CUDA) == set() and not torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        assert tf32()["products"]
    assert tf32_kinds(CUDA) == {"recurrent layers"}


def test_settings_are_as_before_after_a_block_without_tf32() -> None:
    with without_tf32():
        assert tf32_kinds(CUDA) == set()
    assert tf32_kinds(CUDA) == {"convolutions", "recurrent layers"}
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def net(op: str) -> Program:
    return program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("y", op, Ref("x"), Ref("w"), out="float32[B,4]"),
    ], ["y"])  # fmt: skip


@pytest.mark.parametrize(
    ("op", "kinds"),
    [
        ("linear", {"products"}),
        ("conv2d", {"products", "convolutions"}),
        ("lstm.input", {"products", "recurrent layers"}),
        ("add.Tensor", set()),
    ],
)
def test_programs_that_tf32_matters_for(op: str, kinds: set[str]) -> None:
    """A convolution may run as a product, and a recurrent layer as a product for each step."""
    assert {kind for kind in ALL if runs_in_tf32(net(op), {kind})} == kinds
    assert not runs_in_tf32(net(op), set())


def test_errors_and_ulp_are_those_of_tf32() -> None:
    ratio = 2.0**13
    found = in_tf32(OutputBounds("y", own_max=3e-6, own_rms=1e-6, scale=2.0))
    assert found.output == "y" and found.scale == 2.0
    assert 2 * found.own_rms == pytest.approx(2 * 1e-6 * ratio + EPS * 2.0)
    assert 4 * found.own_max == pytest.approx(4 * 3e-6 * ratio + 4 * EPS * 2.0)


def make() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Returns numbers as TF32 holds them, with ten bits behind the point."""
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~0x1FFF).view(torch.float32)


def in_tf32_of(i: int, x: torch.Tensor) -> torch.Tensor:
    """Returns a member's answer with the operands of its convolutions in TF32."""
    torch.manual_seed(i)
    for layer in make().children():
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = rounded(layer.weight)
            x = layer(rounded(x))
        else:
            x = layer(x)
    return x


def test_the_probe_allows_tf32_only_where_it_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ens = saved(make, tmp_path, "input=float32[B,16,9,9]", members=3)
    check = ens.entry("forward").programs.probe_check

    def answers(scale: float = 1.0) -> Any:
        return lambda x: [scale * torch.stack([in_tf32_of(i, x).detach() for i in range(3)])]

    with pytest.raises(ProbeError, match="the bound is"):
        check.check("shared", answers(), ["stacked"])
    before = check.bounds("shared")
    assert before is not None
    monkeypatch.setattr(probe_check, "tf32_kinds", lambda device: frozenset({"convolutions"}))
    assert check.check("shared", answers(), ["stacked"]) == "", "within the bounds of a build in TF32"
    assert check.bounds("shared") == [in_tf32(row) for row in before]
    with pytest.raises(ProbeError, match="the bound is"):
        check.check("shared", answers(1.05), ["stacked"])
    monkeypatch.setattr(probe_check, "tf32_kinds", lambda device: frozenset({"recurrent layers"}))
    assert check.bounds("shared") == before, "the program has no such layers"
