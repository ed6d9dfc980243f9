"""Names the devices that have graphs, and makes their recorders (`graph_capture.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .graph_capture import GraphRecorder


def _cuda(device: torch.device) -> GraphRecorder:
    from .cuda_graph import CudaRecorder  # only a load on CUDA needs it

    return CudaRecorder(device)


RECORDERS: dict[str, Callable[[torch.device], GraphRecorder]] = {"cuda": _cuda}
"""What makes the recorder of a device, by the kind of device."""


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """Returns a recorder for a device; None for a device without graphs."""
    make = RECORDERS.get(device.type)
    return make(device) if make is not None else None
