"""Tests layers over prepacked weights: the ops, their decompositions and their memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from packed_cases import OWN, needs_onednn, rand
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from widepack.ir.fake_values import Fakes
from widepack.kernels import packed

CONVOLUTIONS: list[tuple[list[int], list[int], int, list[int], list[int], list[int]]] = [
    # x, weight, groups, stride, padding, dilation
    ([2, 6, 8, 7], [9, 2, 3, 3], 3, [1, 1], [1, 1], [1, 1]),
    ([2, 6, 8, 7], [6, 2, 3, 2], 3, [2, 1], [0, 1], [1, 2]),
    ([1, 4, 9, 9], [4, 1, 3, 3], 4, [1, 1], [1, 1], [1, 1]),
    ([3, 32, 5, 5], [64, 32, 1, 1], 1, [1, 1], [0, 0], [1, 1]),
    ([2, 6, 1, 1], [6, 3, 1, 1], 2, [1, 1], [0, 0], [1, 1]),
    ([2, 4, 5, 6, 4], [6, 2, 3, 2, 2], 2, [1, 2, 1], [1, 0, 1], [1, 1, 1]),
]


LINEAR = [
    (3, 5, 4, 6),
    (1, 5, 16, 16),
    (3, 1, 7, 1),
    (2, 9, 1, 3),
    (4, 2, 32, 20),
    (2, 64, 5, 6),
    (3, 97, 4, 2),
    (1, 200, 7, 3),
]  # members, rows, inputs, outputs


def convolve(case: Any, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the answer of the op, and the answer of its decomposition in float64."""
    x, weight, groups, stride, padding, dilation = case
    x, w, b = (
        rand(*x, dtype=dtype),
        rand(*weight, dtype=dtype),
        rand(weight[0], dtype=dtype) if bias else None,
    )
    weights = OWN.pack_convolution(w, stride, padding, dilation, groups, list(x.shape))
    y = OWN.convolution(x, weights, b, stride, padding, dilation, groups)
    want = torch.convolution(
        x.double(),
        w.double(),
        None if b is None else b.double(),
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        groups,
    )
    return y, want


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, None])
def test_a_streamed_layer_equals_its_decomposition(
    case: Any, dtype: torch.dtype, bias: bool, shared: bool, rows: int | None
) -> None:
    members, count, inputs, outputs = case
    count = count if rows is None else rows
    x, w = (
        rand(1 if shared else members, count, inputs, dtype=dtype),
        rand(members, inputs, outputs, dtype=dtype),
    )
    b = rand(members, outputs, dtype=dtype) if bias else None
    for weight in (
        w,
        w.transpose(1, 2).contiguous().transpose(1, 2),
    ):  # contiguous, and in another memory order
        y = OWN.streamed_linear(x, weight, b)
        want = x.double() @ w.double() + (0 if b is None else b.double().unsqueeze(1))
        assert y.dtype == dtype and y.shape == want.shape
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_a_streamed_layer_propagates_nan() -> None:
    x, w = torch.zeros(1, 1, 3), torch.ones(2, 3, 4)
    w[1, 2, 3] = float("inf")
    y = OWN.streamed_linear(x, w, None)
    assert y[1, 0, 3].isnan() and y.isnan().sum() == 1, "0 times infinity is NaN, as in a product"


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_equals_its_decomposition(
    case: Any, dtype: torch.dtype, bias: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(packed, "packed_dtype", lambda weight, inputs: None)
    y, want = convolve(case, dtype, bias)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), want, rtol=0, atol=64 * torch.finfo(dtype).eps * float(want.abs().max())
    )
    last = torch.channels_last if len(case[3]) == 2 else torch.channels_last_3d
    assert y.is_contiguous(memory_format=last)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shape", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory", ["major", "packed", "gaps"])
def test_a_linear_layer_equals_its_decomposition(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: bool,
    memory: str,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not packs:
        monkeypatch.setattr(packed, "packed_dtype", lambda weight, inputs: None)
    n, rows, inputs, outputs = shape
    x, w, b = (
        rand(n, rows, inputs, dtype=dtype),
        rand(n, outputs, inputs, dtype=dtype),
        rand(n, outputs, dtype=dtype) if bias else None,
    )
    given = {
        "major": x,
        "packed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "gaps": torch.cat([x, x], 2)[:, :, :inputs],
    }[memory]
    y = OWN.linear(given, OWN.pack_linear(w, rows), b)
    want = torch.bmm(x.double(), w.double().transpose(1, 2)) + (0 if b is None else b.double().unsqueeze(1))
    torch.testing.assert_close(
        y.double(), want, rtol=0, atol=64 * torch.finfo(dtype).eps * float(want.abs().max())
    )
    assert y.transpose(0, 1).is_contiguous()


def test_fake_tensors_have_the_memory_layout_of_real_answers() -> None:
    fakes = Fakes({"B": 4}, static=True)
    with fakes.on():
        for shape, weight, groups, stride, padding, dilation in CONVOLUTIONS:
            fake = OWN.convolution(
                torch.empty(shape), torch.empty(weight), None, stride, padding, dilation, groups
            )
            with unset_fake_temporarily():
                real, _ = convolve((shape, weight, groups, stride, padding, dilation), bias=False)
            assert same_memory(fake, real)
        for n, rows, inputs, outputs in LINEAR:
            fake = OWN.linear(
                torch.empty(n, rows, inputs), OWN.pack_linear(torch.empty(n, outputs, inputs), rows), None
            )
            with unset_fake_temporarily():
                real = OWN.linear(
                    rand(n, rows, inputs), OWN.pack_linear(rand(n, outputs, inputs), rows), None
                )
            assert same_memory(fake, real)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33, 63, 64, 65, 127, 129, 300])
def test_without_avx512_images_have_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """For other numbers oneDNN has no fast kernel there. The answers stay the same."""
    monkeypatch.setattr(packed, "_takes_every_count", lambda: False)
    counts = packed.row_counts(3, 20, 12, torch.float32)
    images, each = packed.images_of_rows(rows, counts)
    assert each in counts and images * each >= rows and (images == 1) == (rows <= counts[-1])
    torch.manual_seed(0)
    x, w, b = torch.randn(3, rows, 12), torch.randn(3, 20, 12), torch.randn(3, 20)
    y = torch.ops.widepack.linear.default(x, torch.ops.widepack.pack_linear.default(w, 4), b)
    torch.testing.assert_close(y, torch.baddbmm(b[:, None], x, w.transpose(1, 2)))


AVX2 = """
import time
import torch
import widepack.primitives
from widepack.kernels import packed

torch.set_num_threads(1)
OWN = torch.ops.widepack


def seconds(run):
    times = []
    for _ in range(4):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


for members, width in ((16, 256), (40, 256)):
    w = torch.randn(members, width, width)
    p = OWN.pack_linear(w, 1)
    for rows in (1, 3, 16, 70):
        x = torch.randn(members, rows, width)
        plain = seconds(lambda: torch.bmm(x, w.transpose(1, 2)))
        print(members, rows, seconds(lambda: OWN.linear(x, p, None)) / plain)
"""


@needs_onednn
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is a part of x86-64")
def test_without_avx512_no_call_reorders_the_weight() -> None:
    """Such a call takes a hundred times as long as a batched product, and any other at most a few times."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", AVX2], env={**os.environ, **limits}, capture_output=True, text=True, check=True
    )
    ratios = [float(line.split()[2]) for line in done.stdout.splitlines()]
    assert len(ratios) == 8 and max(ratios) < 15, done.stdout


@pytest.mark.parametrize("rows", [*range(1, 140), 256, 509, 1000])
def test_images_of_rows_are_never_large(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """oneDNN has another order of large weights from 64 rows on."""
    monkeypatch.setattr(packed, "_takes_every_count", lambda: True)
    images, each = packed.images_of_rows(rows)
    assert each <= 63
    assert rows <= images * each < rows + images


@needs_onednn
def test_one_packed_weight_serves_every_number_of_rows() -> None:
    w = rand(2, 96, 80)
    packs = [OWN.pack_linear(w, rows) for rows in (1, 64, 512)]
    for rows in (1, 63, 64, 65, 131):
        x = rand(2, rows, 80)
        first, *others = (OWN.linear(x, p, None) for p in packs)
        torch.testing.assert_close(first, x @ w.transpose(1, 2), rtol=1e-5, atol=1e-4)
        assert all(torch.equal(first, y) for y in others)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Returns whether sizes are equal, and strides too where a size is not 1."""
    return a.shape == b.shape and [s for s, n in zip(a.stride(), a.shape) if n != 1] == [
        s for s, n in zip(b.stride(), b.shape) if n != 1
    ]


def test_nan_is_never_lost() -> None:
    w = rand(2, 3, 4)
    w[1] = float("nan")
    y = OWN.linear(rand(2, 5, 4), OWN.pack_linear(w, 5), None, "relu")
    assert torch.isnan(y[1]).all() and not torch.isnan(y[0]).any()
    weight = rand(6, 4, 3, 3)
    weight[3:] = float("nan")
    image = OWN.convolution(
        rand(2, 8, 5, 5),
        OWN.pack_convolution(weight, [1, 1], [1, 1], [1, 1], 2, [2, 8, 5, 5]),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        2,
        "relu",
    )
    assert torch.isnan(image[:, 3:]).all() and not torch.isnan(image[:, :3]).any()


def test_an_empty_batch_gives_an_empty_answer() -> None:
    assert OWN.linear(rand(2, 0, 4), OWN.pack_linear(rand(2, 3, 4), 5), None).shape == (2, 0, 3)
    weight = OWN.pack_convolution(rand(6, 4, 3, 3), [2, 1], [1, 1], [1, 1], 2, [2, 8, 5, 5])
    assert OWN.convolution(rand(0, 8, 5, 5), weight, None, [2, 1], [1, 1], [1, 1], 2).shape == (0, 6, 3, 5)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_of_a_member_reaches_no_other(channels: int, dtype: torch.dtype) -> None:
    """Kernels of 16 bits read channels in pairs: the last of an odd number with one of the next member."""
    members, outputs = 3, 2
    x = torch.ones(2, members * channels, 6, 6, dtype=dtype)
    x[:, channels : 2 * channels] = float("nan")
    weight = torch.ones(members * outputs, channels, 3, 3, dtype=dtype)
    geometry = [1, 1], [1, 1], [1, 1], members
    y = OWN.convolution(x, OWN.pack_convolution(weight, *geometry, list(x.shape)), None, *geometry)
    finite = y.isfinite().all(dim=(0, 2, 3)).view(members, outputs).all(1)
    assert finite.tolist() == [True, False, True]

    rows = torch.ones(members, 4, channels, dtype=dtype)
    rows[1, 2] = float("nan")
    layer = OWN.pack_linear(torch.ones(members, outputs, channels, dtype=dtype), 4)
    finite_rows = OWN.linear(rows, layer, None).isfinite().all(-1)
    assert (~finite_rows).nonzero().tolist() == [[1, 2]]
