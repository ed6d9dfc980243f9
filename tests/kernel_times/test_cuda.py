"""Tests the model that predicts times on a CUDA device: products, convolutions, moved bytes, and TF32."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor

from widepack.kernel_times import cuda as cuda_costs
from widepack.kernel_times.call_time import CallTime
from widepack.kernel_times.cuda import KERNEL_S, CudaModel, call_time, products_s
from widepack.kernels.member_convs import OP as MEMBER_CONVS
from widepack.kernels.triton_kernels.predictions import step_times
from widepack.planning import cuda_plans
from widepack.runtime.meta_values import run_on_meta
from widepack.system.devices import DEVICES, LAUNCH_S

MODEL = CudaModel()
H100 = DEVICES["h100"]
RATE = H100.flops["float32"]
PROCESSORS = H100.multiprocessors


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def timed(op: str, *args: Any, model: CudaModel = MODEL, **kwargs: Any) -> CallTime:
    return call_time(op, args, kwargs, run_on_meta(op, args, kwargs), model)


def test_large_products_take_their_part_of_the_rate() -> None:
    n = 128 * PROCESSORS  # tiles of 128 x 128 fill whole waves
    expected = 2 * n**2 * 4096 / (RATE * cuda_costs.PRODUCT_PART)
    assert products_s(n, n, 4096, 1, RATE, PROCESSORS) == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(129, 128, 512), (128, 130, 512), (128, 128, 513)])
def test_a_size_beyond_a_tile_costs_another_tile(sizes: tuple[int, int, int]) -> None:
    """Sizes are rounded up: to rows and columns of a tile, and to a multiple of eight inside."""
    count = 4 * PROCESSORS
    assert products_s(*sizes, count, RATE, PROCESSORS) > products_s(128, 128, 512, count, RATE, PROCESSORS)
    assert products_s(128, 128, 505, count, RATE, PROCESSORS) == products_s(
        128, 128, 512, count, RATE, PROCESSORS
    )


def test_members_that_leave_the_device_partly_empty_run_together_in_the_same_time() -> None:
    one = products_s(16, 64, 64, 1, RATE, PROCESSORS)
    assert products_s(16, 64, 64, PROCESSORS // 8, RATE, PROCESSORS) == pytest.approx(one)
    assert products_s(16, 64, 64, 100 * PROCESSORS, RATE, PROCESSORS) > 10 * one


def test_the_start_bounds_small_calls_and_bytes_bound_large_ones() -> None:
    small, large = (timed("aten.relu.default", meta(n)) for n in (100, 1 << 28))
    assert (small.seconds, small.bound) == (LAUNCH_S, "starts")
    moved = 2 * 4 * (1 << 28) / (H100.bandwidth * cuda_costs.BANDWIDTH_PART)
    assert large.seconds == pytest.approx(KERNEL_S + moved) and large.bound == "moving bytes"


def test_an_expanded_operand_is_read_once() -> None:
    whole, one = meta(1000, 1 << 16), meta(1, 1 << 16).expand(1000, -1)
    expanded = timed("aten.add.Tensor", whole, one)
    assert expanded.moving == pytest.approx(2 / 3 * timed("aten.add.Tensor", whole, whole).moving, rel=0.01)


@pytest.mark.parametrize(
    ("op", "shapes", "product"),
    [
        ("aten.mm.default", ((4096, 512), (512, 1024)), (4096, 1024, 512, 1)),
        ("aten.linear.default", ((8, 512, 512), (1024, 512), (1024,)), (4096, 1024, 512, 1)),
        ("aten.addmm.default", ((1024,), (4096, 512), (512, 1024)), (4096, 1024, 512, 1)),
        ("aten.bmm.default", ((20, 4096, 512), (20, 512, 1024)), (4096, 1024, 512, 20)),
        ("aten.baddbmm.default", ((20, 1, 1024), (20, 4096, 512), (20, 512, 1024)), (4096, 1024, 512, 20)),
        ("aten.matmul.default", ((8, 512, 512), (512, 1024)), (4096, 1024, 512, 1)),
    ],
)
def test_products_are_read_from_the_operands(op: str, shapes: Any, product: Any) -> None:
    found = timed(op, *(meta(*s) for s in shapes))
    assert found.computing == pytest.approx(products_s(*product, RATE, PROCESSORS))
    assert found.kernels == 1


def test_tf32_is_on_in_convolutions_and_off_in_products_by_default() -> None:
    both = replace(MODEL, tf32_products=True)
    neither = replace(MODEL, tf32_convolutions=False)
    product = ("aten.mm.default", meta(8192, 8192), meta(8192, 8192))
    conv = ("aten.conv2d.default", meta(256, 256, 32, 32), meta(256, 256, 3, 3))
    faster = H100.tf32 / RATE
    assert timed(*product).computing == pytest.approx(faster * timed(*product, model=both).computing)
    assert timed(*conv, model=neither).computing == pytest.approx(faster * timed(*conv).computing)
    half = (torch.bfloat16, torch.float16)
    assert all(MODEL.rate(t) == H100.flops["float16"] for t in half)
    assert replace(both, limits=DEVICES["v100"]).rate(torch.float32) == DEVICES["v100"].flops["float32"]


def grouped(members: int, batch: int, channels: int, side: int, dtype: torch.dtype = torch.float32) -> Any:
    x = meta(batch, members * channels, side, side, dtype=dtype)
    weight = meta(members * channels, channels, 3, 3, dtype=dtype)
    return timed("aten.conv2d.default", x, weight, None, [1, 1], [1, 1], [1, 1], members)


def streams(members: int, batch: int, channels: int, side: int, dtype: torch.dtype = torch.float32) -> Any:
    x = meta(members, batch, channels, side, side, dtype=dtype)
    weight = meta(members, channels, channels, 3, 3, dtype=dtype)
    return timed(MEMBER_CONVS, x, weight, None, [1, 1], [1, 1], [1, 1], 1)


def test_grouped_convolutions_against_streams() -> None:
    """The cases of pytorch issue 73764: N=2, 256 channels, 32x32, B=64 in float32; half precision is worse.
    Small members gain from one kernel.
    """
    assert 1.1 < grouped(2, 64, 256, 32).seconds / streams(2, 64, 256, 32).seconds < 1.4
    half = torch.float16
    assert 1.5 < grouped(5, 512, 512, 32, half).seconds / streams(5, 512, 512, 32, half).seconds < 3
    small = streams(20, 2, 16, 8)
    assert small.bound == "starts" and small.seconds > 10 * grouped(20, 2, 16, 8).seconds
    assert small.kernels == 40 and grouped(20, 2, 16, 8).kernels == 1


def test_grouped_convolutions_in_channels_last_memory_are_slow_unless_each_group_has_one_channel() -> None:
    weight = meta(2048, 64, 3, 3)
    x = meta(100, 2048, 14, 14)
    options = (None, [2, 2], [1, 1], [1, 1], 32)
    last = x.contiguous(memory_format=torch.channels_last)
    slow, plain = (timed("aten.conv2d.default", v, weight, *options) for v in (last, x))
    assert slow.bound == "computing" and slow.seconds > 4 * plain.seconds
    each = meta(2048, 1, 3, 3)
    options = (None, [2, 2], [1, 1], [1, 1], 2048)
    assert timed("aten.conv2d.default", last, each, *options) == timed(
        "aten.conv2d.default", x, each, *options
    )


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_transposed_convolutions_compute_as_often_as_their_input_has_places(spatial: int) -> None:
    x, weight = meta(64, 32, *[8] * spatial), meta(32, 16, *[2] * spatial)
    op = f"aten.conv_transpose{spatial}d.{'default' if spatial == 1 else 'input'}"
    expected = products_s(64 * 8**spatial, 16 * 2**spatial, 32, 1, MODEL.rate(x.dtype, True), PROCESSORS)
    found = timed(op, x, weight)
    assert found.seconds == pytest.approx(max(LAUNCH_S, KERNEL_S + max(expected, found.moving)), rel=1e-6)


@pytest.mark.parametrize(("cell", "gates", "starts"), [("rnn", 1, 3), ("gru", 3, 7), ("lstm", 4, 9)])
def test_steps_of_recurrent_layers_take_the_time_of_what_runs_them(
    cell: str, gates: int, starts: int
) -> None:
    """One kernel runs all steps where it fits and is faster. Else plain torch starts some at every step."""

    def found(width: int, steps: int, model: CudaModel = MODEL) -> CallTime:
        states = [meta(4, 8, width)] * (2 if cell == "lstm" else 1)
        last: tuple[Any, ...] = {"rnn": (False, "tanh"), "gru": (False,), "lstm": (None, False)}[cell]
        weights = (meta(4, 32, gates * width), meta(4, width, gates * width))
        args = (meta(4, steps, 8, 32), *states, *weights, None, None, *last)
        return timed(f"widepack.{cell}_steps.default", *args, model=model)

    one, plain = found(128, 20), found(256, 20)
    assert one.kernels == 2 and plain.kernels == 1 + starts * 20
    assert plain.host == pytest.approx(LAUNCH_S * plain.kernels) and plain.bound == "starts"
    times = step_times(gates, 4, 20, 8, 128, torch.float32)
    assert times.kernel < one.device < times.kernel + 10 * KERNEL_S and one.host < plain.host
    assert found(128, 1).kernels == 1 + starts, "plain torch runs one step sooner"
    assert found(256, 20, replace(MODEL, tf32_products=True)).kernels == 2


def test_steps_with_a_projection_start_kernels_at_every_step() -> None:
    args = (meta(4, 20, 8, 32), meta(4, 8, 6), meta(4, 8, 16), meta(4, 32, 64), meta(4, 6, 64))
    assert timed("widepack.lstm_steps.default", *args, None, None, meta(4, 16, 6), False).kernels >= 20


def test_every_device_of_the_table_has_what_the_model_needs() -> None:
    for device in DEVICES.values():
        model = CudaModel(device)
        assert device.multiprocessors > 0 and model.rate(torch.float64) < model.rate(torch.float32)
        assert model.short in device.name and " " not in model.short


def test_the_page_has_the_constants_of_the_model() -> None:
    """Values are written in microseconds, or as a part."""
    page = (ROOT / "docs" / "explanation" / "gpu-plans.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z_]+(?:\[\"\w+\"\])?)` \| ([\d.]+(?: us)?) \|", page, re.MULTILINE))
    found = {
        "LAUNCH_S": LAUNCH_S,
        "VIEW_S": cuda_costs.VIEW_S,
        "KERNEL_S": cuda_costs.KERNEL_S,
        "PRODUCT_PART": cuda_costs.PRODUCT_PART,
        "BANDWIDTH_PART": cuda_costs.BANDWIDTH_PART,
        'GROUPED_PART["float32"]': cuda_costs.GROUPED_PART["float32"],
        'GROUPED_PART["half"]': cuda_costs.GROUPED_PART["half"],
        "CHANNELS_LAST_PART": cuda_costs.CHANNELS_LAST_PART,
        "MARGIN": cuda_plans.MARGIN,
        "LOOP_PART": cuda_plans.LOOP_PART,
    }
    assert rows.keys() == found.keys()
    for name, text in rows.items():
        value = found[name] * 1e6 if text.endswith(" us") else found[name]
        assert value == pytest.approx(float(text.removesuffix(" us")), abs=5e-4), name
