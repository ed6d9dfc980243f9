"""Predicts how long the call of an op takes on a CUDA device, from sizes alone.

A call has two times. The host starts its kernels, one after the other. The device runs each kernel: it
computes, and it moves bytes between memory and processors, at the same time. What takes longer counts.

| what | how |
|---|---|
| starts | `LAUNCH_S` for each kernel, `VIEW_S` for each view |
| a kernel on the device | `KERNEL_S`, and the larger of computing and moving |
| computing | products in tiles (`Products`), at `PRODUCT_PART` of the device's rate for the dtype |
| moving | every operand and result once, at `BANDWIDTH_PART` of the device's bandwidth |
| a convolution | the product of its windows with its filters: [B * places, O] of depth C / g * k |
| a convolution of g groups | g such products, at a part of the rate (`GROUPED_PART`) |
| `member_convs` | N convolutions one after the other: outside of a CUDA graph it uses one stream |
| `*_steps` | the products with x, and the steps as `kernels/triton_kernels/predictions.py` predicts them |
| float32 | TF32 in convolutions and not in products of matrices, which are torch's defaults |

No constant here has been measured on a device by widepack. Each names its source. The model ranks strategies;
its times are no promise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ir import ops
from ..ir.limits import tensors as tensors_in
from ..ir.op_records import record
from ..ir.torch_internals import memory_id
from ..kernels.grouped_experts import OP as GROUPED_EXPERTS
from ..kernels.grouped_experts import SORTING_KERNELS
from ..kernels.member_convs import OP as MEMBER_CONVS
from ..kernels.triton_kernels.launches import steps_fit
from ..kernels.triton_kernels.predictions import GATES, OWN_START, STEP_OPS, TRITON_START, step_times
from ..runtime.flop_formulas import own_formula
from ..runtime.meta_values import run_on_meta
from ..system.devices import DEVICES, LAUNCH_S, Device
from .call_time import NOTHING, CallTime

VIEW_S = 1e-6
"""Seconds in which the host makes a view. An assumption."""
KERNEL_S = 2e-6
"""The seconds that a kernel takes on the device beside its work. An assumption."""
PRODUCT_PART = 0.7
"""The part of the rate of the data sheet that large products reach. An assumption."""
BANDWIDTH_PART = 0.8
"""The part of the bandwidth of the data sheet that kernels reach. An assumption."""
GROUPED_PART = {"float32": 1 / 1.34, "half": 1 / 2.95}
"""The rate of a grouped convolution, in parts of that of ungrouped ones. From pytorch issue 73764: 3.317 ms
against 2.477 ms (float32), 11.78 s against 3.99 s (float16, RTX 3090)."""
CHANNELS_LAST_PART = 1 / 34.8
"""The same in channels-last memory: 143 ms against 4.11 ms (pytorch issue 34977, float16, V100)."""
TILES = (16, 32, 64, 128)
"""The rows and columns of a tile: NVIDIA's Matrix Multiplication Background User's Guide, chapter 2.3."""
DEPTH = 8
"""The inner size of a product is padded to a multiple of this: the same guide, chapter 2.2."""
SPLIT_DEPTH = 256
"""cuBLAS divides the inner size where tiles are few. The least inner size of a part is an assumption."""
_HALF = ("float16", "bfloat16")
_GATES = {f"widepack.{cell}_steps": gates for cell, gates in GATES.items()}


@dataclass(frozen=True)
class CudaModel:
    """A device, and how it computes products of float32.

    limits: of the device. tf32_products, tf32_convolutions: whether TF32 is on; the defaults are torch's.
    """

    limits: Device = DEVICES["h100"]
    tf32_products: bool = False
    tf32_convolutions: bool = True

    device: ClassVar[str] = "cuda"

    def call(
        self, op: str, args: Any, kwargs: Mapping[str, Any], weights: Collection[int]
    ) -> tuple[Any, CallTime]:
        """Runs an op on torch's meta device. Returns its result and its time. Arguments: as `TimeModel`."""
        result = run_on_meta(op, args, kwargs)
        made = list(tensors_in(result))
        if op in ops.PYTHON or not made:
            return result, NOTHING
        known = {memory_id(t) for t in tensors_in([args, list(kwargs.values())])}
        if ops.may_view(op) and all(memory_id(t) in known for t in made):
            return result, view_time()
        return result, call_time(op, args, kwargs, result, self)

    def views(self, count: int) -> CallTime:
        """Returns the time of a number of views."""
        return view_time().times(count)

    def copy(self, values: Sequence[Tensor]) -> CallTime:
        """Returns the time in which each value is copied."""
        return copy_time(values, self)

    @property
    def place(self) -> str:
        """The device in words."""
        return f"an {self.short}"

    @property
    def short(self) -> str:
        """The name of the device: `H100`."""
        return self.limits.name.split(",")[0].removeprefix("NVIDIA ").split()[0]

    def rate(self, dtype: torch.dtype, convolution: bool = False) -> float:
        """Returns the FLOP for each second of products of a dtype."""
        name = str(dtype).removeprefix("torch.")
        single, tf32 = self.limits.flops["float32"], self.limits.tf32
        if name in _HALF:
            return self.limits.flops.get(name, single)
        if name == "float32":
            on = self.tf32_convolutions if convolution else self.tf32_products
            return tf32 if on and tf32 else single
        return single / 2 if name == "float64" else single / 4  # complex: four products


@lru_cache(maxsize=4096)
def products_s(rows: int, columns: int, depth: int, count: int, rate: float, processors: int) -> float:
    """Returns the seconds of `count` products of [rows, depth] with [depth, columns].

    A product is computed in tiles, each by one multiprocessor. The tiles run in waves, and the last wave may
    be partly empty. A small tile reads more numbers for each FLOP. The fastest tile counts. If tiles are few,
    the inner size is divided.
    """
    depth = -(-depth // DEPTH) * DEPTH
    rate *= PRODUCT_PART
    best = math.inf
    for high in TILES:
        for broad in TILES:
            tiles = count * -(-rows // high) * -(-columns // broad)
            parts = max(1, min(processors // max(tiles, 1), depth // SPLIT_DEPTH))
            waves = -(-tiles * parts // processors)
            flop = 2.0 * high * broad * -(-depth // parts) * processors * waves
            reuse = 2 * high * broad / (high + broad) / TILES[-1]
            best = min(best, flop / (rate * reuse))
    return best


def call_time(op: str, args: Any, kwargs: Mapping[str, Any], result: Any, model: CudaModel) -> CallTime:
    """Returns the time of a call that computes or copies.

    Args:
        op: The name of the op.
        args: Its arguments, with fake tensors.
        kwargs: The same, by name.
        result: Its fake result.
        model: The device.
    """
    name = op.rpartition(".")[0]
    kind = record(op).cost
    given = ops.bind(op, tuple(args), dict(kwargs))
    moved = _bytes([*given.values()]) + _bytes(result)
    if kind == "product":
        return _kernel(_product_s(given, result, model), moved, model)
    if kind == "convolution":
        return _convolution(name, given, result, model)
    if op == MEMBER_CONVS:
        return _member_convs(given, result, model)
    if op == GROUPED_EXPERTS:
        return _grouped_experts(given, moved, model)
    formula = own_formula(op)
    if formula is None:
        return _kernel(0.0, moved, model)
    x = next(tensors_in(list(given.values())))
    computing = float(formula(*args, **kwargs, out_val=result)) / (model.rate(x.dtype) * PRODUCT_PART)
    if name in _GATES and given.get("w_p") is None:
        return _steps(_GATES[name], given, model)
    if kind in ("recurrent", "recurrent steps"):
        steps = max(1, int(x.shape[1]) if x.dim() > 3 else int(max(x.shape[:-1])))
        return _kernel(computing / steps, moved / steps, model).times(2 * steps)
    return _kernel(computing, moved, model)


def _grouped_experts(given: Mapping[str, Any], moved: float, model: CudaModel) -> CallTime:
    """Returns the time of a grouped product of experts: rows are sorted, multiplied and put back.

    Experts have about as many rows. Matrices of experts without rows are not read.
    """
    x, weight = given["x"], given["weight"]
    rows, experts = int(x.shape[0] * x.shape[1]), int(weight.shape[0] * weight.shape[1])
    used = max(1, min(rows, experts))
    computing = products_s(
        -(-rows // used),
        int(weight.shape[3]),
        int(weight.shape[2]),
        used,
        model.rate(x.dtype),
        model.limits.multiprocessors,
    )
    unread = _bytes(weight) * (1 - used / experts)
    small = _kernel(0.0, 16.0 * rows, model).times(SORTING_KERNELS)
    return _kernel(computing, moved - unread, model) + copy_time([x, x], model) + small


def _steps(gates: int, given: Mapping[str, Any], model: CudaModel) -> CallTime:
    """Returns the time of all steps of a recurrent layer, by one kernel or in plain torch.

    The products with x are computed before.
    """
    x, h, w_x = given["x"], given["h"], given["w_x"]
    members, batch, width = (int(n) for n in h.shape)
    steps, tf32 = max(1, int(x.shape[1])), model.tf32_products
    rate, processors = model.rate(x.dtype), model.limits.multiprocessors
    projected = products_s(steps * batch, gates * width, int(x.shape[-1]), members, rate, processors)
    sums = float(members * steps * batch * gates * width * x.element_size())
    before = _kernel(projected, _bytes([x, w_x]) + sums, model)
    times = step_times(gates, members, steps, batch, width, h.dtype, tf32)
    if times.faster and steps_fit(batch, width, h.dtype, tf32):
        return before + CallTime(OWN_START + TRITON_START, times.kernel, 1, moving=times.kernel)
    starts = steps * STEP_OPS[gates]
    return before + CallTime(starts * LAUNCH_S, times.plain, starts, moving=times.plain)


def view_time() -> CallTime:
    """Returns the time of a view."""
    return CallTime(host=VIEW_S)


def copy_time(values: Sequence[Tensor], model: CudaModel) -> CallTime:
    """Returns the time in which each value is copied, by one kernel."""
    return sum((_kernel(0.0, 2 * _bytes(v), model) for v in values), NOTHING)


def _kernel(computing: float, moved: float, model: CudaModel, starts: int = 1) -> CallTime:
    """Returns the time of kernels. computing: seconds. moved: bytes. starts: how many the host starts."""
    moving = moved / (model.limits.bandwidth * BANDWIDTH_PART)
    bound = computing > moving
    return CallTime(
        starts * LAUNCH_S,
        KERNEL_S + max(computing, moving),
        starts,
        computing if bound else 0.0,
        0.0 if bound else moving,
    )


def _bytes(value: Any) -> float:
    """Returns the bytes of the tensors in a value. A dim that repeats numbers counts once."""
    total = 0
    for t in tensors_in(value):
        numbers = math.prod(int(n) for n, step in zip(t.shape, t.stride(), strict=True) if step)
        total += numbers * t.element_size()
    return float(total)


def _product_s(given: Mapping[str, Any], result: Any, model: CudaModel) -> float:
    """Returns the seconds in which a product of matrices computes."""
    factors = [v for k, v in given.items() if isinstance(v, Tensor) and k not in ("bias", "self")]
    first = given.get("self", given.get("input"))
    if len(factors) < 2 and isinstance(first, Tensor):  # `self` is a factor, and no addend
        factors = [first, *(f for f in factors if f is not first)]
    if not factors or not isinstance(result, Tensor) or not result.numel():
        return 0.0
    a, b = factors[0], factors[-1]
    depth = max(1, int(a.shape[-1]) if a.dim() else 1)
    columns = int(result.shape[-1]) if result.dim() > 1 else 1
    rows = result.numel() // columns
    count = 1
    if b.dim() > 2:
        rows = int(result.shape[-2])
        count = result.numel() // (rows * columns)
    return products_s(rows, columns, depth, count, model.rate(a.dtype), model.limits.multiprocessors)


def _convolution(name: str, given: Mapping[str, Any], result: Any, model: CudaModel) -> CallTime:
    """Returns the time of a convolution of torch."""
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not isinstance(result, Tensor):
        return _kernel(0.0, _bytes(list(given.values())) + _bytes(result), model)
    groups = int(given.get("groups", 1))
    transposed = "transpose" in name
    window = math.prod(weight.shape[2:])
    if transposed:
        inputs = int(weight.shape[0]) // groups
        places, outputs, depth = x, int(weight.shape[1]) * window, inputs
    else:
        inputs = int(weight.shape[1])
        places, outputs, depth = result, int(weight.shape[0]) // groups, inputs * window
    rows = max(1, places.numel() // max(1, int(places.shape[1 - weight.dim()])))
    moved = _bytes([x, weight, result])
    rate = model.rate(x.dtype, convolution=True)
    if groups > 1 and inputs == 1:
        flop = 2.0 * rows * groups * outputs * depth  # one channel in each group: no tiles, FP32 units
        return _kernel(flop / (model.limits.flops["float32"] * PRODUCT_PART), moved, model)
    part = grouped_part(x) if groups > 1 else 1.0
    return _kernel(
        products_s(rows, outputs, depth, groups, rate * part, model.limits.multiprocessors), moved, model
    )


def grouped_part(x: Tensor) -> float:
    """Returns the rate of a grouped convolution over x, in parts of that of ungrouped ones."""
    order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.dim() in (4, 5) and x.is_contiguous(memory_format=order) and not x.is_contiguous():
        return CHANNELS_LAST_PART
    return GROUPED_PART["half" if x.element_size() == 2 else "float32"]


def _member_convs(given: Mapping[str, Any], result: Tensor, model: CudaModel) -> CallTime:
    """Returns the time of the members' own convolutions, one after the other.

    A member starts a convolution and the copy of its result. The results are written twice. Operands of
    members with gaps are copied first.
    """
    x, weight, groups = given["x"], given["weight"], int(given["groups"])
    members, window = int(weight.shape[0]), math.prod(weight.shape[3:])
    if given.get("output_padding") is None:
        outputs, depth = int(weight.shape[1]) // groups, int(weight.shape[2]) * window
        rows = max(1, result.numel() // max(1, members * int(weight.shape[1])))
    else:  # a product for each number of the input, whose results are summed
        outputs, depth = int(weight.shape[2]) * window, int(weight.shape[1]) // groups
        rows = max(1, x[0].numel() // max(1, int(weight.shape[1])))
    rate = model.rate(x.dtype, convolution=True) * (grouped_part(x[0]) if groups > 1 else 1.0)
    computing = members * products_s(rows, outputs, depth, groups, rate, model.limits.multiprocessors)
    copies = 0 if x[0].is_contiguous() else 1
    moved = _bytes([x, weight]) + 3 * _bytes(result) + 2 * copies * _bytes(x)
    starts = members * (2 + copies)
    others = CallTime(host=4 * members * VIEW_S, device=(starts - 1) * KERNEL_S)
    return _kernel(computing, moved, model, starts) + others
