"""Defines the wide recurrent layers and cells. A missing state is zeros, as in the modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..registry.registry import Strategy
from .arguments import Form, shared_value
from .base import WideLayer

MAX_FUSED_STATE = 256  # numbers in a member's state up to which `fused` of an LSTM is faster than the loop


class _WithState(WideLayer):
    """A layer that takes a state and returns it: one tensor, or two (`states`)."""

    states: ClassVar[int] = 1

    @property
    def op(self) -> str:
        """The op of the module's options: `nonlinearity` chooses between those of an RNN."""
        return next(op for op in self.ops if getattr(self.options, "nonlinearity", "") in op)


class _Recurrent(_WithState):
    """All layers over all steps.

    x is `[N, T, B, I]`, with `batch_first` `[N, B, T, I]`, without a batch `[N, T, I]`. A state is
    `[N, layers * directions, B, H]`. A PackedSequence has `data` `[N, rows, I]`, and its lengths are the same
    for all members; it runs member after member.
    """

    def wide(self, input: Any, hx: Any = None) -> Any:
        m = self.options
        train = self.training and m.dropout > 0 and m.num_layers > 1  # nothing else depends on the mode
        options = [m.bias, m.num_layers, float(m.dropout), train, m.bidirectional]
        names = {id(p): name for name, p in m.named_parameters()}
        weights = [self.get_parameter(names[id(p)]) for layer in m.all_weights for p in layer]
        if isinstance(input, PackedSequence):
            return self._run_packed_sequence(input, hx, weights, options)
        unbatched = input.ndim == 3
        batch_axis = 1 if m.batch_first else 2
        x = input.unsqueeze(batch_axis) if unbatched else input
        states = self._initial_states(hx, x.shape[batch_axis], x, unbatched)
        y, *ends = self.run(
            self.op,
            x,
            states if self.states == 2 else states[0],
            weights,
            *options,
            m.batch_first,
        )
        if unbatched:
            y, ends = y.squeeze(batch_axis), [e.squeeze(2) for e in ends]
        return y, tuple(ends) if self.states == 2 else ends[0]

    def _initial_states(self, hx: Any, batch: int, like: Tensor, unbatched: bool) -> list[Any]:
        """Returns the states `[N, layers * directions, B, H]` of a call; zeros if `hx` is None."""
        m = self.options
        if hx is None:
            sizes = [m.proj_size or m.hidden_size, m.hidden_size][: self.states]
            rows = m.num_layers * (2 if m.bidirectional else 1)
            return [
                shared_value(torch.zeros(rows, batch, size, dtype=like.dtype, device=like.device))
                for size in sizes
            ]
        states = list(hx) if self.states == 2 else [hx]
        return [h.unsqueeze(2) for h in states] if unbatched else states

    def _run_packed_sequence(
        self, input: PackedSequence, hx: Any, weights: list[Any], options: list[Any]
    ) -> Any:
        data, sizes, order, back = input
        states = self._initial_states(hx, int(sizes[0]), data, False)
        if hx is not None and order is not None:
            states = [h.index_select(2, order) for h in states]
        y, *ends = self.run(
            self.op.replace(".input", ".data"),
            data,
            shared_value(sizes),
            states if self.states == 2 else states[0],
            weights,
            *options,
            main=False,
        )
        if back is not None:
            ends = [e.index_select(2, back) for e in ends]
        return PackedSequence(y, sizes, order, back), tuple(ends) if self.states == 2 else ends[0]

    def _batched(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args = tuple(a.data if isinstance(a, PackedSequence) else a for a in args)
        return args, {k: v.data if isinstance(v, PackedSequence) else v for k, v in kwargs.items()}

    def _expected_forms(self, args: Any, kwargs: Any, autocast: bool) -> list[Form] | None:
        if any(isinstance(a, PackedSequence) for a in (*args, *kwargs.values())):
            return None  # its sizes are data, which a tensor on meta does not have
        return super()._expected_forms(args, kwargs, autocast)


class WideLSTM(_Recurrent):
    """N `nn.LSTM` as one module.

    Shape:
        - Input `x` `[N, T, B, I]`; with `batch_first` `[N, B, T, I]`; without a batch `[N, T, I]`.
        - State `(h, c)`: `[N, layers * directions, B, P]` and `[N, layers * directions, B, H]`.
        - Returns `y` `[N, T, B, directions * P]` and `(h, c)`. P is `proj_size`, or H without a projection.

    Example:
        >>> layer = WideLSTM.from_modules([nn.LSTM(16, 32) for _ in range(4)])
        >>> y, (h, c) = layer(torch.randn(4, 10, 8, 16))  # y: [4, 10, 8, 32]
    """

    ops, states = ("lstm.input",), 2

    def automatic(self, fits: list[Strategy], args: Any) -> Strategy | None:
        """Returns `fused` for small states, else None.

        `packed` would reorder the weights in every call, because a layer keeps its weights in torch's order.
        """
        fused = next((s for s in fits if s.name == "fused"), None)
        if fused is None:
            return None
        *_, batch, width = args[1][0].value.fake.shape
        return fused if batch * width <= MAX_FUSED_STATE else None


class WideGRU(_Recurrent):
    """N `nn.GRU` as one module.

    `auto` has no limit on the state's size as `WideLSTM` has. In artifacts with states of 1024 numbers for
    each member, `fused` takes 0.5 to 0.8 of the loop's time for a GRU and an RNN, and 1.2 to 1.8 of it for an
    LSTM (bench/results/suite-cpu.json). Larger states are not measured, and neither is the transpose of the
    weights in every call of a layer.

    Shape:
        - Input `x` `[N, T, B, I]`; with `batch_first` `[N, B, T, I]`; without a batch `[N, T, I]`.
        - State `h` `[N, layers * directions, B, H]`.
        - Returns `y` `[N, T, B, directions * H]` and `h`.
    """

    ops = ("gru.input",)


class WideRNN(_Recurrent):
    """N `nn.RNN` as one module, with `tanh` or `relu`.

    Shape:
        - Input `x` `[N, T, B, I]`; with `batch_first` `[N, B, T, I]`; without a batch `[N, T, I]`.
        - State `h` `[N, layers * directions, B, H]`.
        - Returns `y` `[N, T, B, directions * H]` and `h`.
    """

    ops = ("rnn_tanh.input", "rnn_relu.input")


class _Cell(_WithState):
    """One step: x is `[N, B, I]` or `[N, I]`, a state `[N, B, H]` or `[N, H]`."""

    def wide(self, input: Tensor, hx: Any = None) -> Any:
        unbatched = input.ndim == 2
        x = input.unsqueeze(1) if unbatched else input
        if hx is None:
            zeros = torch.zeros(x.shape[1], self.options.hidden_size, dtype=x.dtype, device=x.device)
            states: list[Any] = [shared_value(zeros) for _ in range(self.states)]
        else:
            states = [h.unsqueeze(1) if unbatched else h for h in (hx if self.states == 2 else [hx])]
        output = self.run(
            self.op,
            x,
            states if self.states == 2 else states[0],
            self.weight_ih,
            self.weight_hh,
            self.bias_ih,
            self.bias_hh,
        )
        ends = [e.squeeze(1) if unbatched else e for e in (output if self.states == 2 else [output])]
        return tuple(ends) if self.states == 2 else ends[0]


class WideLSTMCell(_Cell):
    """N `nn.LSTMCell` as one module.

    Shape:
        Input `x` `[N, B, I]` or `[N, I]`; state `(h, c)`, each `[N, B, H]` or `[N, H]`; returns `(h, c)`.
    """

    ops, states = ("lstm_cell",), 2


class WideGRUCell(_Cell):
    """N `nn.GRUCell` as one module.

    Shape:
        Input `x` `[N, B, I]` or `[N, I]`; state `h` `[N, B, H]` or `[N, H]`; returns `h`.
    """

    ops = ("gru_cell",)


class WideRNNCell(_Cell):
    """N `nn.RNNCell` as one module, with `tanh` or `relu`.

    Shape:
        Input `x` `[N, B, I]` or `[N, I]`; state `h` `[N, B, H]` or `[N, H]`; returns `h`.
    """

    ops = ("rnn_tanh_cell", "rnn_relu_cell")
