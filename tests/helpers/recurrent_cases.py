"""Makes random tensors and layers for the tests of recurrent ops."""

from __future__ import annotations

import torch
from torch import Tensor

OWN = torch.ops.widepack
GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
N, T, B, WIDTH, H = 3, 5, 4, 6, 7


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Layer:
    """One layer, in one direction, of N members: the arguments of the ops, and ATen's answers for each
    member.
    """

    def __init__(
        self,
        cell: str,
        biases: bool = True,
        project: int = 0,
        one: bool = False,
        dtype: torch.dtype = torch.float32,
        batch: int = B,
        members: int = N,
        steps: int = T,
        width: int = H,
    ) -> None:
        rows, out = GATES[cell] * width, project or width
        self.cell = cell
        self.x = rand(1, 1 if one else members, steps, batch, WIDTH, dtype=dtype)
        self.states = [rand(2, members, batch, out, dtype=dtype)] + (
            [rand(3, members, batch, width, dtype=dtype)] if cell == "lstm" else []
        )
        self.weights = [
            rand(4, members, rows, WIDTH, dtype=dtype) / 2,
            rand(5, members, rows, out, dtype=dtype) * (7 / out) ** 0.5 / 2,
        ]
        self.biases = (
            [rand(6, members, rows, dtype=dtype), rand(7, members, rows, dtype=dtype)] if biases else []
        )
        self.project = rand(8, members, project, width, dtype=dtype) / 2 if project else None

    def run(self, reverse: bool, packed: bool = False) -> tuple[Tensor, ...]:
        """Returns y, and the last c of an LSTM."""
        w_x, w_h = (w.transpose(1, 2).contiguous() for w in self.weights)
        b_x, b_h = self.biases or (None, None)
        if packed:
            weights = OWN.pack_lstm(w_x, w_h, reverse, list(self.x.shape[1:]))
            return tuple(OWN.packed_lstm(self.x, *self.states, weights, b_x, b_h, reverse))
        if self.cell == "lstm":
            project = None if self.project is None else self.project.transpose(1, 2).contiguous()
            return tuple(OWN.lstm_steps(self.x, *self.states, w_x, w_h, b_x, b_h, project, reverse))
        if self.cell == "gru":
            return (OWN.gru_steps(self.x, *self.states, w_x, w_h, b_x, b_h, reverse),)
        return (OWN.rnn_steps(self.x, *self.states, w_x, w_h, b_x, b_h, reverse, self.cell[4:]),)

    def members(self, reverse: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """Returns the results of ATen's op, which runs once for each member."""
        op, runs = getattr(torch.ops.aten, self.cell).input, []
        for i in range(len(self.weights[0])):
            x = self.x[i if self.x.shape[0] > 1 else 0].to(dtype)
            states = [s[i : i + 1].to(dtype) for s in self.states]
            params = [
                p[i].to(dtype)
                for p in (*self.weights, *self.biases, *([] if self.project is None else [self.project]))
            ]
            given = states if self.cell == "lstm" else states[0]
            y, _, *last = op(
                x.flip(0) if reverse else x, given, params, bool(self.biases), 1, 0.0, False, False, False
            )
            runs.append([y.flip(0) if reverse else y, *(c[0] for c in last)])
        return tuple(torch.stack(parts) for parts in zip(*runs))

    def same(self, found: tuple[Tensor, ...], want: tuple[Tensor, ...], ulps: float = 32) -> None:
        assert len(found) == len(want)
        for f, w in zip(found, want):
            assert f.dtype == self.x.dtype
            torch.testing.assert_close(
                f.to(w.dtype), w, rtol=0, atol=ulps * torch.finfo(f.dtype).eps * float(w.abs().max())
            )
