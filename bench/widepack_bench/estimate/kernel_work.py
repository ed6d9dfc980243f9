"""Describes a kernel's work by its kind and sizes, as rates need it.

A product multiplies `rows` rows by a matrix of `width` numbers, `count` times: a linear layer of all members
is N products; a convolution multiplies one row for each place of its result. Any other kernel goes through
`elements` values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from widepack.costs.counts import Kernel
from widepack.ir import ops
from widepack.ir.op_records import RECURRENT_LAYERS, RECURRENT_STEPS

_PRODUCTS: Mapping[str, str] = {
    "aten.addmm": "product",
    "aten.mm": "product",
    "aten.mv": "product",
    "aten.addmv": "product",
    "aten.dot": "product",
    "aten.bmm": "batched product",
    "aten.baddbmm": "batched product",
    "widepack.streamed_linear": "streamed product",
    "widepack.delta_linear": "batched product",
    "widepack.expert_linear": "batched product",
    "widepack.expert_mm": "batched product",
    "widepack.linear": "packed product",
    "widepack.mlp_chain": "batched product",
}
_CONVOLUTIONS: Mapping[str, str] = {
    "aten.convolution": "convolution",
    "widepack.convolution": "packed convolution",
}


def _kinds(kinds: Mapping[str, str]) -> dict[str, str]:
    """`{"pool": "a b"}` as `{"a": "pool", "b": "pool"}`."""
    return {op: kind for kind, names in kinds.items() for op in names.split()}


_OTHERS = _kinds(
    {
        "function": "celu cos elu erf exp gelu hardswish log mish pow selu sigmoid silu sin softplus tanh "
        "elu_backward gelu_backward mish_backward silu_backward softplus_backward",
        "norm": "_fused_rms_norm native_group_norm native_layer_norm",
        "batch norm": "_native_batch_norm_legit_no_training native_batch_norm",
        "softmax": "_log_softmax _safe_softmax _softmax",
        "reduction": "all amax amin any argmax cumsum linalg_vector_norm max mean min prod std sum var",
        "copy": "_to_copy cat clone constant_pad_nd copy_ repeat stack",
        "gather": "embedding gather index index_select take",
        "pool": "_adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices",
    }
)
ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel.

    kind: of the rates that apply. count, rows, width: of products; count is 0 for another kernel. elements:
    what another kernel goes through. weight_bytes: the bytes of weights that it reads. times: how often the
    kernel runs in a call.
    """

    kind: str
    count: float
    rows: float
    width: float
    elements: float
    weight_bytes: float
    times: int


def work_of(kernel: Kernel) -> KernelWork:
    """Returns the work of a kernel that was counted at sizes which are numbers."""

    def amount(measure: str) -> float:
        return float(sum(kernel.costs.get(measure, [0])))

    weights, flops, made = amount("weights_read"), amount("flops"), [int(n) for n in kernel.made]

    def product(kind: str, count: float, rows: float) -> KernelWork:
        width = flops / (2 * count * rows) if count and rows else 0.0
        return KernelWork(kind, count, rows, width, 0.0, weights, kernel.times)

    if flops:
        if kernel.op in _PRODUCTS:
            count = made[0] if len(made) == 3 else 1
            return product(_PRODUCTS[kernel.op], count, math.prod(made[:-1]) / max(count, 1))
        if kernel.op in _CONVOLUTIONS:
            groups = max(1, int(kernel.read[0][1]) // max(1, int(kernel.read[1][1])))
            kind = _CONVOLUTIONS[kernel.op]
            if groups > 1:
                alone = kernel.read[1][1] == 1
                kind = "depthwise convolution" if alone else kind.replace("conv", "grouped conv")
            return product(kind, groups, math.prod(made) / max(1, made[1]))
        if "attention" in kernel.op:
            return product("attention", math.prod(made[:-2]), made[-2])
        if kernel.op in RECURRENT_LAYERS or kernel.op in RECURRENT_STEPS:
            return product(kernel.op.partition(".")[2], *_steps(kernel))
        return product("product", 1, math.prod(made[:-1]))
    numbers = [math.prod(int(n) for n in shape) for shape in (kernel.made, *kernel.read[:1])]
    kind = _OTHERS.get(kernel.op.partition(".")[2], ELEMENTWISE)
    if kind == "pool" and _is_channels_last(kernel):
        kind = "channels-last pool"
    elements = numbers[-1] if kind == "reduction" else numbers[0]
    return KernelWork(kind, 0.0, 0.0, 0.0, float(elements), weights, kernel.times)


def _is_channels_last(kernel: Kernel) -> bool:
    """Whether the channels of an image are neighbours in memory."""
    return len(kernel.strides) > 3 and kernel.read[0][1] > 1 and kernel.strides[1] == 1


def _steps(kernel: Kernel) -> tuple[int, int]:
    """Returns the steps of a recurrent kernel, over layers, directions and members, and the rows of one."""
    x = [int(n) for n in kernel.read[0]]
    if kernel.op in RECURRENT_STEPS:  # x is [N or 1, T, B, I], and the result [N, T, B, P]
        return int(kernel.made[0]) * x[1], x[2]
    given = ops.bind(kernel.node.op, kernel.node.args, kernel.node.kwargs)
    if len(x) == 2:
        steps, rows = x[0], 1
    else:
        steps, rows = (x[1], x[0]) if given.get("batch_first") else (x[0], x[1])
    passes = int(given.get("num_layers", 1)) * (2 if given.get("bidirectional") else 1)
    return steps * passes, rows
