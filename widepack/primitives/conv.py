"""Convolutions and transposed convolutions.

    y[i] = conv(x[i], W[i]) + b[i]
    x: [N, B, C, *s] or [B, C, *s]    W: [N, O, C/g, *k]    b: [N, O]    y: [N, B, O, *s']    g groups

| strategy | when | how |
|---|---|---|
| `one_conv` | x Shared | one convolution with `N*O` outputs |
| `fold` | W Shared | members in the batch |
| `grouped` | both Stacked | one convolution of `N*g` groups over `[B, N*C, *s]` |
| `packed` | on a CPU, W Stacked, not float64 | `grouped` over prepacked weights, in channels-last memory |
| `grouped_channels_last` | two or three spatial dims, W Stacked | `grouped` in channels-last memory |
| `bmm_1x1` | kernel of size 1, no padding, both Stacked | one batched product over pixels (conv_patches.py) |
| `unfold_bmm` | both Stacked | one batched product over columns of patches (conv_patches.py) |
| `streams` | both Stacked | the members' own convolutions, on streams in a CUDA graph (conv_streams.py) |

Transposed convolutions have `fold`, `grouped` and `streams`.

The result of `grouped` is channel-packed: a chain of grouped convolutions copies nothing. `packed` and
`grouped_channels_last` run one convolution of `N*O` outputs where x is Shared and g = 1.

On a GPU, float32 convolutions run in TF32 unless torch.backends.cudnn.conv says otherwise; the batched
products follow torch.backends.cuda.matmul, and are float32 by default.

The strategies were measured on one CPU, shape by shape. `packed` wins at most shapes. `grouped` wins where
members have 32 channels of 16x16, or many groups. The batched products are registered last, because `packed`
was faster on that CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir import ops
from ..ir.values import Shared, Stacked, Value, WideValue, hint
from ..kernels.onednn import PACKED_DTYPES, reads_beyond
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank

CONV = "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"
TRANSPOSED = "conv_transpose1d conv_transpose2d.input conv_transpose3d.input"


def _spatial(weight: WideValue) -> int:
    return rank(weight) - 2


def _flat(w: Writer, x: WideValue | None) -> Value | None:
    """`[N, O, ...] -> [N*O, ...]` of weights and biases."""
    return None if x is None else w.call("flatten.using_ints", w.stack(x), 0, 1)


def batched(w: Writer, x: WideValue, weight: WideValue) -> tuple[WideValue, Any]:
    """Returns x with a batch dim, and a function that removes this dim from the result if x had none."""
    if rank(x) == _spatial(weight) + 2:
        return x, lambda y: y
    if isinstance(x, Stacked):
        return Stacked(w.call("unsqueeze", x.value, 1)), lambda y: Stacked(w.call("squeeze.dim", y.value, 1))
    return Shared(w.call("unsqueeze", x.value, 0)), lambda y: Stacked(w.call("squeeze.dim", y.value, 1))  # type: ignore[union-attr]


def groups_of(w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], at: int) -> tuple[list[Any], Any]:
    """Returns the arguments after the bias, with defaults filled in, and the member's number of groups.

    The number of groups is at index `at`. It is a Value where it depends on a size of the inputs.
    """
    names = [(n, d) for n, _, d in ops.arguments(w.op)][3:]
    rest = [args[i] if i < len(args) else kwargs.get(n, d) for i, (n, d) in enumerate(names)]
    rest = [put_shared(r) for r in rest]
    return rest, rest[at]


def _weight_shared(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    return isinstance(weight, Shared)


def _x_shared(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    return isinstance(x, Shared) and isinstance(weight, Stacked)


@strategy(f"{CONV} {TRANSPOSED}", "fold", family="conv", when=_weight_shared)
def fold(
    w: Writer, x: WideValue, weight: Shared, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """for a Shared weight: folds members into the batch"""
    x, back = batched(w, x, weight)
    rest, options = put_shared(args), put_shared(kwargs)
    if not isinstance(bias, Stacked):
        assert isinstance(x, Stacked)
        y = w.call(w.op, w.fold(x), weight.value, put_shared(bias), *rest, **options)
        return back(w.unfold(y, x))  # type: ignore[no-any-return]
    image = w.fold(x) if isinstance(x, Stacked) else x.value  # type: ignore[union-attr]
    y = w.call(w.op, image, weight.value, None, *rest, **options)
    out: Value = w.unfold(y, x).value if isinstance(x, Stacked) else y
    b = w.call("unsqueeze", bias.value, 1)  # [N, 1, O]
    for _ in range(_spatial(weight)):
        b = w.call("unsqueeze", b, -1)
    return back(Stacked(w.call("add.Tensor", out, b)))  # type: ignore[no-any-return]


@strategy(CONV, "one_conv", family="conv", when=_x_shared)
def one_conv(
    w: Writer, x: Shared, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """for a Shared input: one convolution with N*O outputs"""
    rest, groups = groups_of(w, args, kwargs, 3)
    x, back = batched(w, x, weight)  # type: ignore[assignment]
    if isinstance(groups, int) and groups == 1:
        return back(w.unpack(w.call(w.op, x.value, _flat(w, weight), _flat(w, bias), *rest)))  # type: ignore[no-any-return]
    # Each group reads its own channels. Weights in the order [g, N, O/g] avoid a copy of the input for each
    # member.

    def by_group(value: Value) -> Value:
        value = w.call("transpose.int", w.call("unflatten.int", value, 1, [groups, -1]), 0, 1)
        return w.call("flatten.using_ints", value, 0, 2)

    matrix = by_group(weight.value)
    b = None if bias is None else by_group(w.stack(bias))
    y = w.call(w.op, x.value, matrix, b, *rest)
    y = w.call("unflatten.int", y, 1, [groups, w.members, -1])  # [B, g, N, O/g, *s]
    y = w.call("movedim.int", y, 2, 0)  # [N, B, g, O/g, *s]
    return back(Stacked(w.call("flatten.using_ints", y, 2, 3)))  # type: ignore[no-any-return]


@strategy(f"{CONV} {TRANSPOSED}", "grouped", family="conv")
def grouped(
    w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """one convolution of N*g groups over [B, N*C, *s]

    The weight [N, C, O/g, *k] of a transposed convolution packs on its axis 0 too.
    """
    rest, groups = groups_of(w, args, kwargs, 3)
    rest[3] = groups * w.members if isinstance(groups, int) else w.call("operator.mul", groups, w.members)
    x, back = batched(w, x, weight)
    stacked = x if isinstance(x, Stacked) else Stacked(w.stack(x))
    image = w.pack(stacked)
    if _leaks(weight, "transpose" in w.op):
        image = w.call("contiguous", image)
    return back(w.unpack(w.call(w.op, image, _flat(w, weight), _flat(w, bias), *rest)))  # type: ignore[no-any-return]


def _leaks(weight: Stacked, transposed: bool = False) -> bool:
    """Whether kernels for channels-last memory may read channels of the next member.

    The weight of a transposed convolution does not show the channels of a group.
    """
    return reads_beyond(weight.value.dtype, None if transposed else weight.value.sizes[2])


def per_dim(value: Any, spatial: int) -> list[int] | None:
    """Returns the numbers by spatial dim, from a number or a list; None if some are not known at export."""
    value = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(g, int) for g in value):
        return None
    return [int(g) for g in (value * spatial if len(value) == 1 else value)]


def fixed_numbers(
    w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], window: tuple[int | None, ...]
) -> tuple[list[int], list[int], list[int], int] | None:
    """Returns stride, padding and dilation by spatial dim, and groups; None if some are not numbers.

    window: the spatial sizes of the weight.
    """
    (stride, padding, dilation, groups), _ = groups_of(w, args, kwargs, 3)
    n = len(window)
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    if strides is None or dilations is None or not isinstance(groups, int) or not all(window):
        return None
    if padding == "same":  # equal on both sides; else torch runs another op
        margins = [d * (int(k or 0) - 1) for d, k in zip(dilations, window)]
        paddings = [m // 2 for m in margins] if all(m % 2 == 0 for m in margins) else None
    else:
        paddings = [0] * n if padding == "valid" else per_dim(padding, n)
    return None if paddings is None else (strides, paddings, dilations, groups)


def _packable(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether oneDNN can run it: CPU, float32 or 16 bits, and static sizes.

    A Shared input must have one group, because more groups would copy it.
    """
    if w.device != "cpu" or not isinstance(weight, Stacked) or not isinstance(x, (Shared, Stacked)):
        return False
    fixed = fixed_numbers(w, args, kwargs, weight.value.sizes[3:])
    return (
        fixed is not None
        and (isinstance(x, Stacked) or fixed[3] == 1)
        and weight.value.dtype == x.value.dtype
        and x.value.dtype in PACKED_DTYPES
        and all(weight.value.sizes)
    )


@strategy(CONV, "packed", family="conv", when=_packable, derivative=False)
def packed(
    w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """one oneDNN convolution in channels-last memory, over weights that were prepacked at load"""
    fixed = fixed_numbers(w, args, kwargs, weight.value.sizes[3:])
    assert fixed is not None
    stride, padding, dilation, groups = fixed
    x, back = batched(w, x, weight)
    image = w.pack(x) if isinstance(x, Stacked) else x.value  # type: ignore[union-attr]
    matrix, b = _flat(w, weight), _flat(w, bias)
    assert matrix is not None
    groups = groups * w.members if isinstance(x, Stacked) else 1
    line = len(stride) == 1
    if (
        line
    ):  # oneDNN packs only weights of two and three spatial dims, so a line runs as an image of height 1
        image, matrix = w.call("unsqueeze", image, 2), w.call("unsqueeze", matrix, 2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    sizes = [hint(s) for s in image.fake.shape]
    y = w.call(
        "widepack.convolution.default",
        image,
        w.call("widepack.pack_convolution.default", matrix, stride, padding, dilation, groups, sizes),
        b,
        stride,
        padding,
        dilation,
        groups,
    )
    return back(w.unpack(w.call("squeeze.dim", y, 2) if line else y))  # type: ignore[no-any-return]


def _reorderable(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether channels-last memory serves it: a Shared input must have one group, as in `_packable`, and
    kernels must not read beyond a group.
    """
    if not isinstance(weight, Stacked) or not isinstance(x, (Shared, Stacked)) or _leaks(weight):
        return False
    return isinstance(x, Stacked) or groups_of(w, args, kwargs, 3)[1] == 1


@strategy(
    [op for op in CONV.split() if "conv1d" not in op],
    "grouped_channels_last",
    family="conv",
    when=_reorderable,
)
def grouped_channels_last(
    w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """one convolution of N*g groups in channels-last memory, or for a Shared input one with N*O outputs"""
    rest, groups = groups_of(w, args, kwargs, 3)
    x, back = batched(w, x, weight)
    if isinstance(x, Stacked):
        rest[3] = groups * w.members if isinstance(groups, int) else w.call("operator.mul", groups, w.members)
    image = w.pack(x) if isinstance(x, Stacked) else x.value  # type: ignore[union-attr]
    order = torch.channels_last if _spatial(weight) == 2 else torch.channels_last_3d
    image, matrix = (w.call("contiguous", v, memory_format=order) for v in (image, _flat(w, weight)))
    return back(w.unpack(w.call(w.op, image, matrix, _flat(w, bias), *rest)))  # type: ignore[no-any-return]


def _convolutions(spatial: int) -> Make:
    def make(draw: Draw) -> list[Sample]:
        s = (7, 6, 6)[:spatial]

        def one(
            channels: int, out: int, groups: int, bias: bool, batch: bool = True, **options: Any
        ) -> Sample:
            x = draw.normal(*((B,) if batch else ()), channels, *s)
            rest = [
                options.get(k, [d] * spatial) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))
            ]
            return call(
                x,
                draw.normal(out, channels // groups, *[3, 2, 2][:spatial]),
                draw.normal(out) if bias else None,
                *rest,
                groups,
            )

        return [
            one(4, 6, 1, True, padding=[1] * spatial),
            one(4, 6, 2, False, stride=[2] * spatial),
            one(4, 4, 4, True, dilation=[2] * spatial),
            one(4, 8, 4, True, stride=[2], padding=[1]) if spatial > 1 else one(4, 8, 4, True),
            one(4, 6, 2, True, batch=False),
            one(1, 3, 1, False, batch=False),
            call(draw.normal(B, 4, *s), draw.normal(3, 4, *[1] * spatial)),
            call(draw.normal(B, 4, *s), draw.normal(6, 2, *[1] * spatial), groups=2),
        ]

    return make


def _named_padding(spatial: int) -> Make:
    def make(draw: Draw) -> list[Sample]:
        x, s = (B, 4, *(7, 6, 6)[:spatial]), [3, 3, 3][:spatial]
        return [
            call(draw.normal(*x), draw.normal(6, 4, *s), draw.normal(6), [1] * spatial, "same"),
            call(draw.normal(*x), draw.normal(6, 2, *s), None, [1] * spatial, "same", [1] * spatial, 2),
            call(draw.normal(*x), draw.normal(6, 4, *s), draw.normal(6), padding="valid"),
            call(
                draw.normal(*x[1:]),
                draw.normal(8, 1, *s),
                draw.normal(8),
                [1] * spatial,
                "same",
                [1] * spatial,
                4,
            ),
            call(
                draw.normal(*x),
                draw.normal(6, 2, *[1] * spatial),
                draw.normal(6),
                [2] * spatial,
                "valid",
                groups=2,
            ),
        ]

    return make


def _transposed(spatial: int) -> Make:
    def make(draw: Draw) -> list[Sample]:
        x, s, one, two = (B, 4, *(6, 4, 4)[:spatial]), [3, 2, 2][:spatial], [1] * spatial, [2] * spatial
        return [
            call(draw.normal(*x), draw.normal(4, 6, *s), draw.normal(6)),
            call(draw.normal(*x), draw.normal(4, 3, *s), draw.normal(6), two, one, one, 2),
            call(draw.normal(*x), draw.normal(4, 1, *s), None, two, one, one, 4, two),
            call(draw.normal(*x[1:]), draw.normal(4, 3, *s), draw.normal(6), two, groups=2),
        ]

    return make


for _n, _op in enumerate(("conv1d", "conv2d", "conv3d"), 1):
    samples(_op)(_convolutions(_n))
    samples(f"{_op}.padding")(_named_padding(_n))
for _n, _op in enumerate(TRANSPOSED.split(), 1):
    samples(_op)(_transposed(_n))
