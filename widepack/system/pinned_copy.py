"""Copies tensors of mapped files to a GPU through one buffer of pinned memory.

A GPU reads pinned memory without another copy by the driver, and a mapped file cannot be pinned. The buffer
has two halves: while one half is copied to the GPU, the other is filled from the file. No tensor is in memory
as a whole.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

BYTES = 64 * 2**20


class Pinned:
    """Copies tensors to a device. size: bytes of the buffer, which is allocated at the first copy."""

    def __init__(self, device: torch.device, size: int = BYTES) -> None:
        self.device = device
        self._half = max(1, size // 2)
        self._buffer: Tensor | None = None
        self._sent: list[Any] = [None, None]
        self._lock = threading.Lock()

    def place(self, value: Tensor) -> Tensor:
        """A contiguous copy of a tensor on the device."""
        copy = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        if not value.numel():
            return copy
        source, target = _flat(value.detach().contiguous().resolve_conj().resolve_neg()), _flat(copy)
        with self._lock:
            for number, begin in enumerate(range(0, source.numel(), self._half)):
                self._send(number % 2, source[begin : begin + self._half], target[begin : begin + self._half])
            for sent in self._sent:
                if sent is not None:
                    sent.synchronize()
        return copy

    def _send(self, half: int, part: Tensor, into: Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(
                2 * self._half, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
            )
        if self._sent[half] is not None:
            self._sent[half].synchronize()  # the former part of this half has arrived
        place = self._buffer[half * self._half :][: part.numel()]
        place.copy_(part)
        into.copy_(place, non_blocking=True)
        if self.device.type == "cuda":
            self._sent[half] = torch.cuda.current_stream(self.device).record_event()


def _flat(value: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.reshape(-1).view(torch.uint8)
