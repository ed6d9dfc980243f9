"""Patterns of everyday code: recurrent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, case, linear, net, of, param


def cells(self: Any, x: Tensor) -> Tensor:
    h, c = x.new_zeros(x.shape[0], 6), torch.zeros(x.shape[0], 6)
    g, r = self.start.expand(x.shape[0], -1), x.new_zeros(x.shape[0], 6)
    for t in range(4):
        h, c = self.lstm(x[:, t], (h, c))
        g = self.gru(h, g)
        r = self.rnn(g, r)
    return r


def relu_cell(self: Any, x: Tensor) -> Tensor:
    h, c = self.lstm(x)
    return self.rnn(self.gru(h)) + c


SEQUENCE, TIMED = "input=float32[B,6,8]", "input=float32[6,B,8]"


CASES: dict[str, Case] = {
    "lstm": case(of(nn.LSTM, 8, 5, batch_first=True), SEQUENCE),
    "lstm_layers": case(
        of(nn.LSTM, 8, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5), SEQUENCE
    ),
    "lstm_time_first": case(of(nn.LSTM, 8, 5, num_layers=2), TIMED),
    "lstm_projected": case(of(nn.LSTM, 8, 5, proj_size=4, batch_first=True), SEQUENCE),
    "lstm_state": case(
        net(lambda self, x, h, c: self.r(x, (h, c)), r=of(nn.LSTM, 8, 5, bias=False, batch_first=True)),
        "x=float32[B,6,8]",
        "h=float32[1,B,5]",
        "c=float32[1,B,5]",
    ),
    "lstm_last_step": case(
        net(
            lambda self, ids: self.fc(self.r(self.e(ids))[0][:, -1]),
            e=of(nn.Embedding, 9, 8),
            r=of(nn.LSTM, 8, 5, batch_first=True),
            fc=linear(5, 4),
        ),
        "ids=int64[B,6]:0..8",
    ),
    "lstm_unbatched": case(of(nn.LSTM, 8, 5), "input=float32[6,8]"),
    "gru": case(of(nn.GRU, 8, 5, batch_first=True), SEQUENCE),
    "gru_layers": case(of(nn.GRU, 8, 5, num_layers=2, bidirectional=True), TIMED),
    "gru_state": case(
        net(lambda self, x, h: self.r(x, h), r=of(nn.GRU, 8, 5, bias=False)),
        "x=float32[6,B,8]",
        "h=float32[1,B,5]",
    ),
    "rnn_tanh": case(of(nn.RNN, 8, 5, batch_first=True), SEQUENCE),
    "rnn_relu": case(of(nn.RNN, 8, 5, num_layers=2, nonlinearity="relu", bidirectional=True), TIMED),
    "cells": case(
        net(
            cells,
            lstm=of(nn.LSTMCell, 8, 6),
            gru=of(nn.GRUCell, 6, 6, bias=False),
            rnn=of(nn.RNNCell, 6, 6),
            start=param(1, 6),
        ),
        "x=float32[B,4,8]",
    ),
    "relu_cell": case(
        net(
            relu_cell,
            lstm=of(nn.LSTMCell, 8, 6, bias=False),
            gru=of(nn.GRUCell, 6, 6),
            rnn=of(nn.RNNCell, 6, 6, nonlinearity="relu"),
        ),
        "x=float32[B,8]",
    ),
}
