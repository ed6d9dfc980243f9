"""Recurrent networks over sequences: LSTM, GRU and a plain RNN, each with a classifier over the last step."""

from __future__ import annotations

from torch import Tensor, nn


class Recurrent(nn.Module):
    """A recurrent network and a classifier. kind: nn.LSTM, nn.GRU or nn.RNN."""

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU | nn.RNN], inputs: int, width: int, layers: int, classes: int
    ) -> None:
        super().__init__()
        self.steps = kind(inputs, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, inputs]
        y: Tensor = self.head(self.steps(x)[0][:, -1])
        return y  # [B, classes]


def lstm(inputs: int = 64, width: int = 128, layers: int = 2, classes: int = 10) -> nn.Module:
    return Recurrent(nn.LSTM, inputs, width, layers, classes)


def gru(inputs: int = 64, width: int = 128, layers: int = 2, classes: int = 10) -> nn.Module:
    return Recurrent(nn.GRU, inputs, width, layers, classes)


def rnn(inputs: int = 64, width: int = 128, layers: int = 2, classes: int = 10) -> nn.Module:
    return Recurrent(nn.RNN, inputs, width, layers, classes)


def lstm_forecaster(inputs: int = 16, width: int = 256, layers: int = 2, horizon: int = 24) -> nn.Module:
    """Forecasts the next `horizon` values of a series: [B, T, inputs] -> [B, horizon]."""
    return Recurrent(nn.LSTM, inputs, width, layers, horizon)


def gru_forecaster(inputs: int = 16, width: int = 256, layers: int = 2, horizon: int = 24) -> nn.Module:
    """Forecasts the next `horizon` values of a series: [B, T, inputs] -> [B, horizon]."""
    return Recurrent(nn.GRU, inputs, width, layers, horizon)
