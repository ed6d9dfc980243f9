"""Lets torch.export follow packed sequences: layers run over the padded sequences, and lengths select steps.

A packed sequence has as many rows as the lengths say, so its size is data. During an export it holds the
padded
sequence instead, `[T, B, ...]`, and `batch_sizes` has T numbers, with zeros from the longest length on.
Layers
are written as layers over padded sequences, one for each direction:

1. Outputs of a step depend on earlier steps only, so padding at the end changes none that counts. The
backward
   direction reads each sequence reversed within its length.
2. The last hidden state is the output at the length.
3. The last cell state of an LSTM needs a cell that padding leaves as it is. The input gets one more
feature, 1
   at padding. Its weights close the input gate and open the forget gate: `c = 1 c + 0 g`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from ..explain import is_infrastructure

_VF: Any = vars(torch)["_VF"]  # the functions below torch's recurrent layers
_INVERT = rnn.invert_permutation
_NAMES = ("_pack_padded_sequence", "_pad_packed_sequence")
_PACK, _PAD = (getattr(_VF, name) for name in _NAMES)
_FORWARD: dict[type[RNNBase], Callable[..., Any]] = {kind: kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)}
_CLOSED = 1e4
"""What closes or opens a gate: its sigmoid is exactly 0 or 1 in every floating dtype."""


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`_pack_padded_sequence`: the padded sequence, time first, and the number of sequences at each step."""
    data = x.transpose(0, 1) if batch_first else x
    steps = torch.arange(data.shape[0], device=lengths.device)
    return data, (lengths.unsqueeze(0) > steps.unsqueeze(1)).sum(1)


def _lengths(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the lengths of the sequences, longest first. [B]"""
    rows = torch.arange(data.shape[1], device=batch_sizes.device)
    return (batch_sizes.unsqueeze(0) > rows.unsqueeze(1)).sum(1)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total: int | None
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence`: up to the longest length, or to a total length."""
    lengths = _lengths(data, batch_sizes)
    steps = torch.arange(data.shape[0], device=lengths.device)
    inside = (steps.unsqueeze(1) < lengths.unsqueeze(0)).reshape(*data.shape[:2], *(1,) * (data.ndim - 2))
    y = torch.where(inside, data, torch.full((), padding, dtype=data.dtype, device=data.device))
    if total is None:
        longest: Any = lengths.max().item()
        check: Any = torch._check
        check(longest >= 0)
        check(longest <= data.shape[0])
        y = y.narrow(0, 0, longest)
    elif total > data.shape[0]:
        y = torch.cat([y, y.new_full((total - data.shape[0], *y.shape[1:]), padding)])
    return (y.transpose(0, 1) if batch_first else y), lengths


def _forward(self: RNNBase, input: Any, hx: Any = None) -> Any:  # a call may use the parameter's name
    """Forward of a recurrent layer, also over a packed sequence of an export."""
    original = _FORWARD[next(k for k in _FORWARD if isinstance(self, k))]
    if not isinstance(input, PackedSequence) or not torch.compiler.is_exporting():
        return original(self, input, hx)
    data, batch_sizes, order, back = input
    lengths = _lengths(data, batch_sizes)
    states = _states(self, data, hx, order)
    y, last = _layers(self, data, lengths, states)
    last = [v if back is None else v.index_select(1, back) for v in last]
    return PackedSequence(y, batch_sizes, order, back), tuple(last) if isinstance(self, nn.LSTM) else last[0]


def _states(layer: RNNBase, data: Tensor, hx: Any, order: Tensor | None) -> list[Tensor]:
    """Returns the first states, in the order of the packed sequence. Each is [layers * directions, B, H]."""
    if hx is not None:
        given = list(hx) if isinstance(layer, nn.LSTM) else [hx]
        return [v if order is None else v.index_select(1, order) for v in given]
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [data.new_zeros(rows, data.shape[1], n) for n in sizes[: 2 if isinstance(layer, nn.LSTM) else 1]]


def _layers(
    layer: RNNBase, x: Tensor, lengths: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the outputs of the last layer, and the last states of all. x: [T, B, I]."""
    steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    inside = steps < lengths.to(x.device).unsqueeze(0)  # [T, B]
    last_step = (lengths.to(x.device) - 1).clamp(min=0).reshape(1, -1, 1)
    turned = torch.where(inside, last_step[:, :, 0] - steps, steps).unsqueeze(2)  # [T, B, 1]
    directions = 2 if layer.bidirectional else 1
    last: list[list[Tensor]] = [[] for _ in states]
    for number in range(layer.num_layers):
        x = torch.where(inside.unsqueeze(2), x, torch.zeros((), dtype=x.dtype, device=x.device))
        outputs = []
        for k in range(directions):
            one = number * directions + k
            given = x.gather(0, turned.expand(-1, -1, x.shape[2])) if k else x
            y, cell = _direction(layer, given, inside, [v[one : one + 1] for v in states], one)
            at_length = y.gather(0, last_step.expand(-1, -1, y.shape[2]))
            for into, value in zip(last, (at_length, cell)):
                into.append(value)
            outputs.append(y.gather(0, turned.expand(-1, -1, y.shape[2])) if k else y)
        x = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        if layer.dropout and layer.training and number < layer.num_layers - 1:
            x = torch.dropout(x, layer.dropout, True)
    return x, [torch.cat(v) for v in last]


def _direction(
    layer: RNNBase, x: Tensor, inside: Tensor, states: Sequence[Tensor], number: int
) -> tuple[Tensor, Any]:
    """Returns the outputs of one direction of one layer, and the last cell state of an LSTM."""
    weights: list[Tensor] = list(layer.all_weights[number])
    if not isinstance(layer, nn.LSTM):
        op = _VF.gru if isinstance(layer, nn.GRU) else getattr(_VF, layer.mode.lower())
        return op(x, states[0], weights, layer.bias, 1, 0.0, False, False, False)[0], None
    padding = (~inside).unsqueeze(2).to(x.dtype)
    gates = x.new_zeros(4, layer.hidden_size, 1)  # input, forget, cell, output
    gates = gates + x.new_tensor([-_CLOSED, _CLOSED, 0.0, 0.0]).reshape(4, 1, 1)
    weights[0] = torch.cat([weights[0], gates.reshape(-1, 1)], 1)
    y, _, cell = _VF.lstm(
        torch.cat([x, padding], 2), tuple(states), weights, layer.bias, 1, 0.0, False, False, False
    )
    return y, cell


def _checked(original: Any) -> Any:
    """Returns a method of packed sequences that refuses to give a member's code what an export holds there.

    The padded rows would count in a mean of `packed.data`.
    """

    def read(self: PackedSequence, *args: Any) -> Any:
        if torch.compiler.is_exporting() and not is_infrastructure(sys._getframe(1).f_code.co_filename):
            raise PackedRowsRead
        return original(self, *args)

    return read


class PackedRowsRead(Exception):
    """A member reads the rows of a packed sequence itself."""

    def __init__(self) -> None:
        super().__init__("the rows of a packed sequence are read")


@contextmanager
def padded_sequences() -> Iterator[None]:
    """Replaces torch's packing, unpacking and recurrent layers inside a with block."""
    for name, replacement in zip(_NAMES, (_packing, _padding)):
        setattr(_VF, name, replacement)
    rnn.invert_permutation = _inverted
    for name, replacement in _READERS.items():
        setattr(PackedSequence, name, replacement)
    for kind in _FORWARD:
        kind.forward = _forward
    try:
        yield
    finally:
        for name, original in zip(_NAMES, (_PACK, _PAD)):
            setattr(_VF, name, original)
        rnn.invert_permutation = _INVERT
        for name in _READERS:
            delattr(PackedSequence, name)
        for kind, forward in _FORWARD.items():
            kind.forward = forward


_READERS: dict[str, Any] = {
    "data": property(_checked(lambda self: tuple.__getitem__(self, 0))),
    "__iter__": _checked(tuple.__iter__),
    "__getitem__": _checked(tuple.__getitem__),
}


def _packing(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    exporting = torch.compiler.is_exporting()
    return _pack(x, lengths, batch_first) if exporting else _PACK(x, lengths, batch_first)


def _padding(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total: int) -> Any:
    if not torch.compiler.is_exporting():
        return _PAD(data, batch_sizes, batch_first, padding, total)
    asked = sys._getframe(1).f_locals.get("total_length")  # both cases give the same number here
    return _pad(data, batch_sizes, batch_first, padding, total if asked is not None else None)


def _inverted(permutation: Tensor | None) -> Tensor | None:
    """`invert_permutation`; torch writes it into memory whose first numbers are arbitrary."""
    if permutation is None or not torch.compiler.is_exporting():
        return _INVERT(permutation)
    return permutation.argsort()
