"""Faces of recurrent layers and their cells. States that are not given are zeros, as in the modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .base import Face, one_for_all
from ..registry.registry import Strategy

FEW = 256  # numbers of a member's state up to which `fused` of an LSTM is faster than once a member


class _Recurrent(Face):
    """All layers over all steps: x [N, T, B, I], with batch_first [N, B, T, I], without a batch [N, T, I]; a state [N, layers * directions, B, H].

    A PackedSequence holds `data` [N, rows, I], the members' lengths alike; it runs once a member.
    """

    states: ClassVar[int] = 1

    def op(self) -> str:
        raise NotImplementedError

    def wide(self, input: Any, hx: Any = None) -> Any:
        m = self.options
        train = self.training and m.dropout > 0 and m.num_layers > 1  # what training changes
        options = [m.bias, m.num_layers, float(m.dropout), train, m.bidirectional]
        params = [self.get_parameter(name) for name in m._flat_weights_names]
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, params, options)
        alone = input.ndim == 3
        x = input.unsqueeze(1 if m.batch_first else 2) if alone else input
        given = self._states(hx, x.shape[1 if m.batch_first else 2], x, alone)
        y, *ends = self.run(f"{self.op()}.input", x, given if self.states == 2 else given[0], params, *options, m.batch_first)
        if alone:
            y, ends = y.squeeze(1 if m.batch_first else 2), [e.squeeze(2) for e in ends]
        return y, tuple(ends) if self.states == 2 else ends[0]

    def _states(self, hx: Any, batch: int, like: Tensor, alone: bool) -> list[Any]:
        m = self.options
        if hx is None:
            sizes = [m.proj_size or m.hidden_size, m.hidden_size][: self.states]
            rows = m.num_layers * (2 if m.bidirectional else 1)
            return [one_for_all(torch.zeros(rows, batch, size, dtype=like.dtype, device=like.device)) for size in sizes]
        given = list(hx) if self.states == 2 else [hx]
        return [h.unsqueeze(2) for h in given] if alone else given

    def _packed(self, input: PackedSequence, hx: Any, params: list[Any], options: list[Any]) -> Any:
        data, sizes, order, back = input
        given = self._states(hx, int(sizes[0]), data, False)
        if hx is not None and order is not None:
            given = [h.index_select(2, order) for h in given]
        y, *ends = self.run(f"{self.op()}.data", data, one_for_all(sizes), given if self.states == 2 else given[0], params, *options, main=False)
        if back is not None:
            ends = [e.index_select(2, back) for e in ends]
        return PackedSequence(y, sizes, order, back), tuple(ends) if self.states == 2 else ends[0]

    def _takes(self, given: Any) -> Any:
        args, kwargs = given
        args = tuple(a.data if isinstance(a, PackedSequence) else a for a in args)
        return args, {k: v.data if isinstance(v, PackedSequence) else v for k, v in kwargs.items()}

    def _expected(self, args: Any, kwargs: Any, cast: bool) -> Any:
        packed = any(isinstance(a, PackedSequence) for a in (*args, *kwargs.values()))
        return None if packed else super()._expected(args, kwargs, cast)  # its sizes are data, which nothing without memory has


class WideLSTM(_Recurrent):
    """N `nn.LSTM`: x, (h, c) -> y [N, T, B, directions * P], (h, c)."""

    member, ops, states = nn.LSTM, ("lstm.input",), 2

    def automatic(self, fits: list[Strategy], args: Any) -> Strategy | None:
        """A face has its weights as they are, so `packed` would pack them in every call; `fused` pays where a member's state has few numbers."""
        found = next((s for s in fits if s.name == "fused"), None)
        if found is None:
            return None
        *_, batch, width = args[1][0].value.held.shape
        return found if batch * width <= FEW else None

    def op(self) -> str:
        return "lstm"


class WideGRU(_Recurrent):
    """N `nn.GRU`: x, h -> y [N, T, B, directions * H], h.

    No limit as an LSTM's: in artifacts with states of 1024 numbers a member `fused` takes 0.5 to 0.8 of the loop's time for a GRU and an RNN, and 1.2 to 1.8 of it for an LSTM
    (`tune` of gru, gru-8, rnn-8 and lstm in bench/results/suite-cpu.json). Larger states, and what turning the weights in every call costs a face, are not measured.
    """

    member, ops = nn.GRU, ("gru.input",)

    def op(self) -> str:
        return "gru"


class WideRNN(_Recurrent):
    """N `nn.RNN`: x, h -> y [N, T, B, directions * H], h."""

    member, ops = nn.RNN, ("rnn_tanh.input", "rnn_relu.input")

    def op(self) -> str:
        return f"rnn_{self.options.nonlinearity}"


class _Cell(Face):
    """One step: x [N, B, I] or [N, I], a state [N, B, H] or [N, H]."""

    states: ClassVar[int] = 1

    def op(self) -> str:
        return self.ops[0]

    def wide(self, input: Tensor, hx: Any = None) -> Any:
        alone = input.ndim == 2
        x = input.unsqueeze(1) if alone else input
        if hx is None:
            zeros = torch.zeros(x.shape[1], self.options.hidden_size, dtype=x.dtype, device=x.device)
            given: list[Any] = [one_for_all(zeros) for _ in range(self.states)]
        else:
            given = [h.unsqueeze(1) if alone else h for h in (hx if self.states == 2 else [hx])]
        made = self.run(self.op(), x, given if self.states == 2 else given[0], self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        ends = [e.squeeze(1) if alone else e for e in (made if self.states == 2 else [made])]
        return tuple(ends) if self.states == 2 else ends[0]


class WideLSTMCell(_Cell):
    """N `nn.LSTMCell`: x, (h, c) -> (h, c)."""

    member, ops, states = nn.LSTMCell, ("lstm_cell",), 2


class WideGRUCell(_Cell):
    """N `nn.GRUCell`: x, h -> h."""

    member, ops = nn.GRUCell, ("gru_cell",)


class WideRNNCell(_Cell):
    """N `nn.RNNCell`: x, h -> h."""

    member, ops = nn.RNNCell, ("rnn_tanh_cell", "rnn_relu_cell")

    def op(self) -> str:
        return f"rnn_{self.options.nonlinearity}_cell"
