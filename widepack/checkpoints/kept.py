"""Keeps tensors that no file has, without memory for large ones."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor

from ..errors import CheckpointError

_SMALL_BYTES = 1 << 20


def kept(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor. A large one is mapped from a file that has no name.

    The file takes space until the copy is released, and the system may write its pages out of memory.
    Raises: CheckpointError if there is no space.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size < _SMALL_BYTES or tensor.device.type != "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    with tempfile.NamedTemporaryFile(prefix="widepack-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a page without space ends the process
        except OSError as e:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {size:,} bytes for a loaded weight: {e.strerror}; set TMPDIR to a"
                " folder with more space"
            ) from e
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    copy = mapped.view(tensor.dtype).reshape(tensor.shape)
    return copy.copy_(tensor)
