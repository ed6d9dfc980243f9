"""Lets torch.export follow packed sequences: layers run over the padded sequences, and lengths select steps.

A packed sequence has as many rows as the lengths say, so its size is data. During an export it holds the
padded sequence instead, `[T, B, ...]`, and `batch_sizes` has T numbers: zeros from the longest length on.
The program checks the lengths where torch's packing does. Layers are written as layers over padded
sequences, one for each direction:

1. Outputs of a step depend on earlier steps only, so padding at the end changes none that counts. The
   backward direction reads each sequence reversed within its length.
2. The last hidden state is the output at the length.
3. The last cell state of an LSTM needs a cell that padding leaves as it is. The input gets one more
   feature, 1 at padding. Its weights close the input gate and open the forget gate: `c = 1 c + 0 g`.

A member's code that reads `packed.data` gets the rows that the lengths select, and a packed sequence that it
makes of such rows holds them as a padded sequence again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from ...ir.torch_internals import same_size, surely_larger
from ..explain import is_infrastructure

_VF: Any = vars(torch)["_VF"]  # the functions below torch's recurrent layers
_INVERT = rnn.invert_permutation
_PACK, _PAD = (getattr(_VF, name) for name in ("_pack_padded_sequence", "_pad_packed_sequence"))
_FORWARD: dict[type[RNNBase], Callable[..., Any]] = {kind: kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)}
_NEW, _REPLACE = PackedSequence.__new__, PackedSequence._replace
_SOURCE = "_widepack_padded"
"""Names, on batch sizes that a member has read, the padded sequence and the batch sizes of all steps."""
_CLOSED = 1e4
"""What closes or opens a gate: its sigmoid is exactly 0 or 1 in every floating dtype."""


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`_pack_padded_sequence`: the padded sequence, time first, and the number of sequences at each step.

    The program checks the lengths at every call, as torch's own packing does.
    """
    data = x.transpose(0, 1) if batch_first else x
    steps = torch.arange(data.shape[0], device=lengths.device)
    lengths = torch.ops.widepack.sequence_lengths.default(lengths, steps)
    return data, (lengths.unsqueeze(0) > steps.unsqueeze(1)).sum(1)


def _lengths(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the lengths of the sequences, longest first. [B]"""
    rows = torch.arange(data.shape[1], device=batch_sizes.device)
    return (batch_sizes.unsqueeze(0) > rows.unsqueeze(1)).sum(1)


def _inside(data: Tensor, lengths: Tensor) -> Tensor:
    """Returns which places of a padded sequence belong to a sequence. [T, B]"""
    steps = torch.arange(data.shape[0], device=lengths.device)
    return steps.unsqueeze(1) < lengths.unsqueeze(0)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total: Any
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence`: up to the longest length, or to a total length, which no length exceeds."""
    lengths, most = _lengths(data, batch_sizes), data.shape[0]
    fits = total is None or same_size(total, most) or surely_larger(total, most)
    if not fits:  # the mask reads the lengths that are checked, so the check stays in the program
        steps = torch.arange(total, device=lengths.device)
        lengths = torch.ops.widepack.sequence_lengths.default(lengths, steps)
    inside = _inside(data, lengths)
    inside = inside.reshape(*data.shape[:2], *(1,) * (data.ndim - 2))
    y = torch.where(inside, data, torch.full((), padding, dtype=data.dtype, device=data.device))
    if total is None:
        y = y.narrow(0, 0, _longest(lengths, most))
    elif not same_size(total, most):
        y = torch.cat([y, y.new_full((total, *y.shape[1:]), padding)]).narrow(0, 0, total)
    return (y.transpose(0, 1) if batch_first else y), lengths


def _longest(lengths: Tensor, most: Any) -> Any:
    """Returns the longest length as a number that is known when the program runs. most: that of steps."""
    longest: Any = lengths.max().item()
    check: Any = torch._check
    check(longest >= 0)
    check(longest <= most)
    return longest


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


class _Sizes:
    """The batch sizes of a packed sequence for `pad_packed_sequence`, which compares their count.

    The count is that of all steps during an export. The program checks the longest length itself.
    """

    def __init__(self, batch_sizes: Tensor) -> None:
        self.tensor = batch_sizes

    def size(self, dim: int) -> int:
        """Returns a count that no total length is below."""
        return 0


def _by_member() -> bool:
    """Whether a member's code reads a packed sequence of an export."""
    return torch.compiler.is_exporting() and not is_infrastructure(sys._getframe(2).f_code.co_filename)


def _rows(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the rows that the lengths select: step after step, the longest sequence first. [S, ...]"""
    return data.flatten(0, 1).index_select(0, _places(data, batch_sizes))


def _places(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the place of each row of a packed sequence in the flat padded one. [S]"""
    return _inside(data, _lengths(data, batch_sizes)).flatten().nonzero().squeeze(1)


def _sizes(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the batch sizes of the steps up to the longest length."""
    sizes = batch_sizes.narrow(0, 0, _longest(_lengths(data, batch_sizes), data.shape[0]))
    setattr(sizes, _SOURCE, (data, batch_sizes))
    return sizes


def _padded(rows: Tensor, data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Returns the padded sequence of rows. data: another padded sequence of the same lengths."""
    flat = rows.new_zeros(data.shape[0] * data.shape[1], *rows.shape[1:])
    flat = flat.index_copy(0, _places(data, batch_sizes), rows)
    return flat.reshape(*data.shape[:2], *rows.shape[1:])


def _fields(packed: PackedSequence) -> tuple[Any, ...]:
    """Returns what a packed sequence holds: the padded sequence, the batch sizes of all steps, the orders."""
    return tuple(tuple.__iter__(packed))


def _read_data(self: PackedSequence) -> Tensor:
    """`packed.data`."""
    data, batch_sizes, *_ = _fields(self)
    return _rows(data, batch_sizes) if _by_member() else data


def _read_sizes(self: PackedSequence) -> Any:
    """`packed.batch_sizes`."""
    data, batch_sizes, *_ = _fields(self)
    if torch.compiler.is_exporting() and sys._getframe(1).f_code is rnn.pad_packed_sequence.__code__:
        return _Sizes(batch_sizes)
    return _sizes(data, batch_sizes) if _by_member() else batch_sizes


def fields_of(packed: PackedSequence) -> tuple[Any, ...]:
    """Returns the fields of a packed sequence as a member's code reads them: data, sizes and orders."""
    fields = _fields(packed)
    if not torch.compiler.is_exporting():
        return fields
    return (_rows(*fields[:2]), _sizes(*fields[:2]), *fields[2:])


def _read_all(self: PackedSequence) -> Iterator[Any]:
    """`data, batch_sizes, sorted_indices, unsorted_indices = packed`."""
    return iter(fields_of(self) if _by_member() else _fields(self))


def _read_one(self: PackedSequence, index: Any) -> Any:
    """`packed[0]`."""
    return (fields_of(self) if _by_member() else _fields(self))[index]


def _new(cls: type[PackedSequence], data: Any, batch_sizes: Any = None, *order: Any, **named: Any) -> Any:
    """`PackedSequence(...)`, also of rows that a member computed from those of another packed sequence."""
    source = getattr(batch_sizes, _SOURCE, None) if torch.compiler.is_exporting() else None
    if source is not None:
        data, batch_sizes = _padded(data, *source), source[1]
    return _NEW(cls, data, batch_sizes, *order, **named)


def _replace(self: PackedSequence, **fields: Any) -> Any:
    """`packed._replace(data=...)`."""
    if "data" in fields and _by_member():
        data, batch_sizes, *_ = _fields(self)
        fields["data"] = _padded(fields["data"], data, batch_sizes)
    return _REPLACE(self, **fields)


def _packing(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    exporting = torch.compiler.is_exporting()
    return _pack(x, lengths, batch_first) if exporting else _PACK(x, lengths, batch_first)


def _padding(data: Tensor, batch_sizes: Any, batch_first: bool, padding: float, total: Any) -> Any:
    if not isinstance(batch_sizes, _Sizes):
        return _PAD(data, batch_sizes, batch_first, padding, total)
    asked = sys._getframe(1).f_locals.get("total_length")  # both cases give the same number here
    return _pad(data, batch_sizes.tensor, batch_first, padding, total if asked is not None else None)


def _inverted(permutation: Tensor | None) -> Tensor | None:
    """`invert_permutation`; torch writes it into memory whose first numbers are arbitrary."""
    if permutation is None or not torch.compiler.is_exporting():
        return _INVERT(permutation)
    return permutation.argsort()


REPLACEMENTS: dict[tuple[Any, str], Any] = {
    (_VF, "_pack_padded_sequence"): _packing,
    (_VF, "_pad_packed_sequence"): _padding,
    (rnn, "invert_permutation"): _inverted,
    **{(kind, "forward"): _forward for kind in _FORWARD},
    (PackedSequence, "data"): property(_read_data),
    (PackedSequence, "batch_sizes"): property(_read_sizes),
    (PackedSequence, "__iter__"): _read_all,
    (PackedSequence, "__getitem__"): _read_one,
    (PackedSequence, "__new__"): _new,
    (PackedSequence, "_replace"): _replace,
}
"""What stands in the place of torch's packing, unpacking and recurrent layers during an export."""
