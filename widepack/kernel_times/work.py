"""Describes the work of a call by its kernels: kinds and sizes, as the table of kernel times needs them.

A product multiplies `rows` rows by a matrix of `width` numbers, `count` times: a linear layer of all members
is N products; a convolution multiplies one row for each place of its result. Any other kernel goes through
`elements` values. Composite ops run as torch implements them, so that copies appear as copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir import ops
from ..ir.limits import tensors
from ..ir.op_records import RECURRENT_LAYERS, RECURRENT_STEPS
from ..ir.torch_internals import is_overload, memory_id
from ..kernels.member_convs import OP as MEMBER_CONVS
from ..kernels.streamed import FEW
from ..runtime.flop_formulas import kernel_formula, own_formula
from ..runtime.kernel_count import NO_KERNEL, is_view
from ..runtime.meta_values import like_operand, run_on_meta
from .kernel_work import ELEMENTWISE, KernelWork

_PRODUCTS: Mapping[str, str] = {
    "aten.bmm": "batched product",
    "aten.baddbmm": "batched product",
    "widepack.streamed_linear": "streamed product",
    "widepack.delta_linear": "batched product",
    "widepack.expert_linear": "batched product",
    "widepack.expert_mm": "batched product",
    "widepack.linear": "packed product",
    "widepack.inner_product": "inner product",
    "widepack.member_products": "member product",
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
        "function": "celu cos elu erf exp gelu log mish pow selu sigmoid silu sin softplus tanh "
        "elu_backward gelu_backward mish_backward silu_backward softplus_backward",
        "norm": "_fused_rms_norm native_group_norm native_layer_norm",
        "batch norm": "_native_batch_norm_legit_no_training native_batch_norm",
        "softmax": "_log_softmax _safe_softmax _softmax",
        "reduction": "all amax amin any argmax cumsum linalg_vector_norm max mean min prod std sum var",
        "copy": "_to_copy clone constant_pad_nd copy_ repeat",
        "joining": "cat stack",
        "gather": "embedding gather index index_select take",
        "pool": "_adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices",
    }
)
WINDOW = 4
"""The numbers of a window of the pools in the table."""
NARROW = 16
"""The most outputs of a product that has few."""
_ACTIVATING = ("widepack.linear", "widepack.inner_product", "widepack.convolution")
"""Layers whose last argument may name an activation, which they run in place."""
_VIEWS = frozenset(
    "aten." + name
    for names in (
        "flatten unflatten reshape view transpose permute movedim t",
        "unsqueeze squeeze expand",
        "select slice unbind split chunk",
    )
    for name in names.split()
)
_ADDED = ("aten.addmm.default", "aten.baddbmm.default")


def works_of(
    op: str, args: Any, kwargs: Mapping[str, Any], weights: Collection[int] = ()
) -> tuple[Any, list[KernelWork]]:
    """Runs an op on torch's meta device. Returns its result, and the works of its kernels.

    Args:
        op: The name of the op.
        args: Its arguments, with tensors on the meta device.
        kwargs: The same, by name.
        weights: The memory of weights, as `memory_id` returns it.
    """
    if op.rpartition(".")[0] in _VIEWS and (view := _view(op, args, kwargs)) is not None:
        return view, []
    if (x := like_operand(op, args)) is not None:
        return x, [_other(op.rpartition(".")[0], [x], x, _bytes(x))]
    formula = own_formula(op)
    with torch.inference_mode(False), torch.no_grad():  # inference mode does not split composite ops
        if formula is not None or op.startswith(("aten.upsample_", "aten._upsample_")):
            result = run_on_meta(op, args, dict(kwargs))
            return result, [] if op in ops.PYTHON else [*_works(op, args, kwargs, result, formula, weights)]
        recorder = _WorkRecorder(weights)
        with recorder:
            result = run_on_meta(op, args, dict(kwargs))
    return result, recorder.works


def _view(op: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an op that is a view here; None if it copies."""
    with torch.no_grad():
        result = run_on_meta(op, args, dict(kwargs))
    read = {memory_id(t) for t in tensors(args)}
    return result if all(memory_id(t) in read for t in tensors(result)) else None


def _matrix(args: Any) -> Tensor:
    """Returns the result of a product that adds."""
    result: Tensor = args[1].new_empty((*args[1].shape[:-1], args[2].shape[-1]))
    return result


class _WorkRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Records the works of the kernels that torch dispatches in a block."""

    def __init__(self, weights: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[KernelWork] = []
        self._weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = ops.name_of(func) if is_overload(func) else ""
        result = _matrix(args) if name in _ADDED and not kwargs else func(*args, **(kwargs or {}))
        known = name and func.namespace != "prim" and name.split(".")[1] not in NO_KERNEL
        if known and not is_view(func):
            self.works += _works(name, args, kwargs or {}, result, kernel_formula(func), self._weights)
        return result


def _works(
    op: str, args: Any, kwargs: Mapping[str, Any], result: Any, formula: Any, weights: Collection[int]
) -> list[KernelWork]:
    """Returns the work of a kernel, and of the copies that it makes of its operands."""
    made = next(tensors(result), None)
    if made is None:
        return []
    read = list(tensors([*args, *kwargs.values()]))
    known = {memory_id(t) for t in read}
    new = sum(_bytes(t) for t in tensors(result) if memory_id(t) not in known)
    name = op.rpartition(".")[0]
    flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
    if not flops:
        return [_other(name, read, made, new)]
    if op == MEMBER_CONVS:
        return _member_convolutions(args, flops, made, new)
    kind, count, rows = _product(name, op, args, kwargs, read, made)
    own = sum(_bytes(t) for t in read if memory_id(t) in weights)
    width = flops / (2 * count * rows) if count and rows else 0.0
    # a convolution of groups reads the weights of all groups for each image
    passes = float(read[0].shape[0]) if "grouped" in kind else 1.0
    work = KernelWork(kind, count, rows, width, 0.0, own, new, passes)
    if kind.startswith("packed") and "conv" in kind and not is_channels_last(read[0]):
        works = [KernelWork("copy", elements=float(read[0].numel()), made_bytes=_bytes(read[0])), work]
    else:
        works = [work]
    if name in _ACTIVATING and args and isinstance(args[-1], str) and args[-1]:
        works.append(_other(f"aten.{args[-1]}", read[:1], made, 0.0))
    return works


def _member_convolutions(args: Any, flops: float, made: Tensor, new: float) -> list[KernelWork]:
    """Returns the works of the members' convolutions, one after the other, and of the copies of results."""
    weight = args[1]
    members, window = int(weight.shape[0]), weight.shape[3:]
    kind = "1x1 convolution" if all(n == 1 for n in window) else "convolution"
    rows = made.numel() / max(1, members * int(weight.shape[1]))
    one = KernelWork(kind, 1, rows, flops / (2 * members * max(rows, 1)), 0.0, _bytes(weight) / members)
    return [*[one] * members, KernelWork("joining", elements=float(made.numel()), made_bytes=2 * new)]


def _product(
    name: str, op: str, args: Any, kwargs: Mapping[str, Any], read: list[Tensor], made: Tensor
) -> tuple[str, float, float]:
    """Returns the kind, the count and the rows of a product."""
    sizes = [int(n) for n in made.shape]
    if name in _PRODUCTS:
        kind = _PRODUCTS[name]
        matrix = read[-1]
        if kind == "batched product" and matrix.dim() == 3 and matrix.stride(-1) == 1:
            kind = "turned product"
        if kind == "streamed product" and sizes[1] > FEW:
            kind = "turned product"
        count = sizes[0] if len(sizes) == 3 and kind != "inner product" else 1
        return _narrow(kind, sizes), count, math.prod(sizes[:-1]) / max(count, 1)
    if name in _CONVOLUTIONS:
        x, weight = read[0], read[1]
        groups = max(1, int(x.shape[1]) // max(1, int(weight.shape[1])))
        kind = _CONVOLUTIONS[name]
        if groups > 1:
            kind = kind.replace("conv", "depthwise conv" if weight.shape[1] == 1 else "grouped conv")
        if "depthwise" not in kind and all(n == 1 for n in weight.shape[2:]):
            kind = kind.replace("conv", "1x1 conv")
        if name == "aten.convolution" and is_channels_last(x):
            kind = f"channels-last {kind}"
        return kind, groups, math.prod(sizes) / max(1, sizes[1])
    if "attention" in name:
        return "attention", math.prod(sizes[:-2]), sizes[-2]
    if name in RECURRENT_LAYERS or name in RECURRENT_STEPS:
        return name.partition(".")[2], *_steps(name, op, args, kwargs, read[0], sizes)
    return _narrow("product", sizes), 1, math.prod(sizes[:-1])


def _narrow(kind: str, sizes: list[int]) -> str:
    """Returns the kind of a product, by whether it has few outputs."""
    return f"narrow {kind}" if sizes and sizes[-1] <= NARROW else kind


def _other(name: str, read: list[Tensor], made: Tensor, new: float) -> KernelWork:
    """Returns the work of a kernel that is no product."""
    kind = _OTHERS.get(name.partition(".")[2], ELEMENTWISE)
    if kind == "pool" and read:
        kind = _pool(read[0])
    if kind == "copy" and read and _same_order(read[0], made):
        kind = "joining"
    if kind == ELEMENTWISE and any(t.shape == made.shape and not _same_order(t, made) for t in read):
        kind = "copy"  # it reads one operand across its memory
    numbers = float(read[0].numel() if kind == "reduction" and read else made.numel())
    if kind.endswith("pool") and read and "avg" in name:  # a mean reads all numbers of its windows
        numbers = max(numbers, read[0].numel() / WINDOW)
    return KernelWork(kind, elements=numbers, made_bytes=new)


def _pool(x: Tensor) -> str:
    """Returns the kind of a pool, by the memory order of the image.

    An image whose channels are neighbours, but not those of one member and the next, has a kind of its own.
    """
    if is_channels_last(x):
        return "channels-last pool"
    return "strided pool" if x.dim() >= 3 and x.shape[-3] > 1 and x.stride(-3) == 1 else "pool"


def is_channels_last(x: Tensor) -> bool:
    """Whether torch's kernels for channels-last memory take an image, as torch decides by its strides."""
    if x.dim() not in (3, 4, 5) or not x.numel():
        return False
    least, channels = 0, x.stride(1)
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if not channels or x.stride(d) < least or (d == 0 and least == channels):
            return False
        least = x.stride(d) * x.shape[d]
    return channels == 1


def _same_order(x: Tensor, y: Tensor) -> bool:
    """Whether a copy reads neighbours as it writes them."""
    at = min((d for d in range(y.dim()) if y.shape[d] > 1), key=y.stride, default=None)
    return at is None or x.dim() != y.dim() or x.stride(at) in (0, 1)


def _bytes(t: Tensor) -> float:
    """Returns the bytes of a tensor. A dim that repeats numbers counts once."""
    numbers = math.prod(int(n) for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return float(numbers * t.element_size())


def _steps(
    name: str, op: str, args: Any, kwargs: Mapping[str, Any], x: Tensor, made: list[int]
) -> tuple[int, int]:
    """Returns the steps of a recurrent kernel, over layers, directions and members, and the rows of one."""
    sizes = [int(n) for n in x.shape]
    if name in RECURRENT_STEPS:  # x is [N or 1, T, B, I], and the result [N, T, B, P]
        return made[0] * sizes[1], sizes[2]
    given = ops.bind(op, tuple(args), dict(kwargs))
    if len(sizes) == 2:
        steps, rows = sizes[0], 1
    else:
        steps, rows = (sizes[1], sizes[0]) if given.get("batch_first") else (sizes[0], sizes[1])
    passes = int(given.get("num_layers", 1)) * (2 if given.get("bidirectional") else 1)
    return steps * passes, rows
