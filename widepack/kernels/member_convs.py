"""Defines the op `member_convs`: the members' own convolutions, on several streams in a CUDA graph.

    member_convs(x, weight, bias, stride, padding, dilation, groups, output_padding=None) -> [N, B, O, *s']
    x: [N or 1, B, C, *s]   weight: [N, O, C / groups, *k]   bias: [N, O] or none

With `output_padding` the convolutions are transposed, and weight is [N, C, O / groups, *k].

Each member runs the convolution that it runs alone, so cuDNN takes its kernels of ungrouped convolutions.
While a CUDA graph is captured, the members are divided over `STREAMS` streams. Each stream begins when the
current stream has reached the op (fork), and the current stream goes on when all have ended (join), by
events. The branches become part of the graph. In other calls, and on a CPU, the members run one after the
other. torch takes streams from a pool that all threads share, so a call outside of a capture could start work
on a stream that another thread captures. The side streams have a priority of their own, for which torch has
another pool.

The result is allocated on the current stream before the fork. Each stream writes its members' results into
it, so no memory of a side stream is read after the join. In ATen ops the op is one grouped convolution.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks.images import extents, geometry, transposed_extents
from .checks.require import dense, for_members, of_shape, require
from .library import NodeList, in_aten, own_op

OP = "widepack.member_convs.default"
STREAMS = 8
"""The most streams on which members run at once in a CUDA graph. It has not been measured on a GPU."""

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


class SideStreams(threading.local):
    """The side streams of each stream, for one thread. torch may give several threads the same stream, so
    they are used in captures only, and `graph_pool.py` captures one graph at a time.
    """

    def __init__(self) -> None:
        self._of: dict[Any, list[Any]] = {}

    def of(self, current: Any, count: int) -> list[Any]:
        """Returns `count` streams for members, beside the current stream."""
        streams = self._of.setdefault((current.device, current.cuda_stream), [])
        while len(streams) < count:
            made = torch.cuda.Stream(current.device, priority=-1)  # type: ignore[no-untyped-call]
            streams.append(made)  # of a pool of its own: users get streams of the default priority
        return streams[:count]


SIDE = SideStreams()


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    dims = list(zip(x.shape[3:], weight.shape[3:], stride, padding, dilation))
    if output_padding is None:
        outputs = weight.shape[1]
        sizes = [(n + 2 * margin - step * (k - 1) - 1) // by + 1 for n, k, by, margin, step in dims]
    else:
        outputs = weight.shape[2] * groups
        sizes = [
            (n - 1) * by - 2 * margin + step * (k - 1) + more + 1
            for (n, k, by, margin, step), more in zip(dims, output_padding)
        ]
    return x.new_empty((weight.shape[0], x.shape[1], outputs, *sizes))


@own_op(
    "member_convs(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int groups, int[]? output_padding=None) -> Tensor",
    _fake,
)
def _member_convs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    members, packed, of_group, *window = dense("weight", weight, 4, 5, 6).shape
    dense("x", x, weight.dim())
    geometry(len(window), stride, padding, dilation, groups)
    outputs, inputs = packed, of_group * groups
    if output_padding is not None:  # transposed
        outputs, inputs = inputs, outputs
    for_members("x", x, members, [None, inputs, *x.shape[3:]], weight)
    of_shape("bias", bias, [members, outputs], weight)
    require(members > 0, "weight is for 0 members; at least 1 is needed")
    require(packed % groups == 0, f"{packed} channels do not form {groups} groups")
    if output_padding is None:
        extents(x.shape[3:], window, padding, dilation)
    else:
        transposed_extents(x.shape[3:], window, stride, padding, dilation, output_padding)
    options = (stride, padding, dilation, groups, output_padding)
    rows = x.expand(members, *x.shape[1:])
    if weight.device.type == "cuda":
        y = _fake(x, weight, bias, *options)

        def run(i: int) -> None:
            y[i].copy_(member_conv(rows[i], weight[i], _part(bias, i), *options))

        run_members(run, members, y.device)
        return y
    return torch.stack([member_conv(rows[i], weight[i], _part(bias, i), *options) for i in range(members)])


def run_members(run: Any, members: int, device: torch.device) -> None:
    """Calls `run(i)` for each member.

    In a capture, the calls run on side streams that fork from the current stream and join it.

    Args:
        run: Launches the kernels of a member. It must not return a tensor that was allocated on its stream.
        members: N.
        device: Where the members are. It need not be the current device.
    """
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(current):  # the question is about the current device
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            for i in range(members):
                run(i)
            return
    side = SIDE.of(current, min(members, STREAMS))
    for stream in side:
        stream.wait_stream(current)
    try:
        for i in range(members):
            with torch.cuda.stream(side[i % len(side)]):
                run(i)
    finally:  # members that were launched before an error still write into the result's memory
        for stream in side:
            current.wait_stream(stream)


def _part(bias: Tensor | None, i: int) -> Tensor | None:
    return None if bias is None else bias[i]


def member_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Runs a member's convolution. options: stride, padding, dilation, groups, output_padding."""
    stride, padding, dilation, groups, output_padding = options
    spatial = weight.dim() - 2
    if output_padding is None:
        return _CONVOLUTIONS[spatial](x, weight, bias, stride, padding, dilation, groups)
    return _TRANSPOSED[spatial](x, weight, bias, stride, padding, output_padding, groups, dilation)


@in_aten(OP)
def _in_aten(
    new: NodeList, members: int, x: Any, weight: Any, bias: Any, *options: Any, output_padding: Any = None
) -> None:
    """Writes the op as one convolution of N * groups groups."""
    stride, padding, dilation, groups, *last = options
    output_padding = last[0] if last else output_padding
    spatial = len(stride)
    if output_padding is None:
        op, given = f"aten.conv{spatial}d.default", [stride, padding, dilation, members * groups]
    else:
        overload = "default" if spatial == 1 else "input"
        op = f"aten.conv_transpose{spatial}d.{overload}"
        given = [stride, padding, output_padding, members * groups, dilation]
    rows = new.add("aten.expand.default", x, [members, *(-1 for _ in range(2 + spatial))], suffix="rows")
    image = new.add("aten.transpose.int", rows, 0, 1, suffix="image")  # [B, N, C, *s]
    image = new.add("aten.flatten.using_ints", image, 1, 2, suffix="packed")
    matrix = new.add("aten.flatten.using_ints", weight, 0, 1, suffix="weight")
    if bias is not None:
        bias = new.add("aten.flatten.using_ints", bias, 0, 1, suffix="bias")
    y = new.add(op, image, matrix, bias, *given, suffix="conv")
    y = new.add("aten.unflatten.int", y, 1, [members, -1], suffix="members")
    new.add("aten.transpose.int", y, 0, 1, suffix="stacked")
