"""Copies tensors out of mapped files, also while another process shortens them.

A read of a mapped page that its file no longer has ends the process by a signal (SIGBUS). Here the kernel
reads the page, so that the same is an error.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO, Any

import torch

_OWN_MEMORY = "/proc/self/mem"
_AGAIN = "build again when no process writes to it"


class ShortenedFile(Exception):
    """Raised for a tensor whose file no longer has its bytes. The callers add the name."""


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a dense tensor on the CPU, with the same strides.

    Where a system shows no memory of processes as a file, the copy is an ordinary one.

    Raises:
        ShortenedFile: The file is shorter than when it was mapped.
    """
    plain = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )  # without the marks of conjugated and negated views
    steps = [(size - 1) * stride for size, stride in zip(plain.shape, plain.stride())]
    numbers = 1 + sum(steps) if plain.numel() else 0
    flat = torch.empty(numbers, dtype=plain.dtype)
    if (memory := _opened()) is None:
        return tensor.clone()
    with memory:
        _read(memory.fileno(), plain.data_ptr(), flat)
    copy = flat.as_strided(plain.shape, plain.stride())
    copy = copy.conj() if tensor.is_conj() else copy
    return copy.neg() if tensor.is_neg() else copy


def copy_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a mapped tensor into another one. Raises: ShortenedFile; RuntimeError for another shape."""
    alike = target.shape == tensor.shape and target.stride() == tensor.stride()
    plain = target.dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg())
    if not (alike and plain and target.is_contiguous() and target.device.type == "cpu"):
        target.copy_(copied(tensor))
    elif (memory := _opened()) is None:
        target.copy_(tensor)
    else:
        with memory:
            _read(memory.fileno(), tensor.data_ptr(), target)


def _opened() -> IO[bytes] | None:
    """Opens the memory of this process; None where the system does not show it as a file."""
    try:
        return open(_OWN_MEMORY, "rb", buffering=0)
    except OSError:
        return None


def _read(memory: int, address: int, flat: torch.Tensor) -> None:
    """Reads the bytes at an address of this process into a contiguous tensor. Raises: ShortenedFile."""
    size = flat.numel() * flat.element_size()
    target = memoryview((ctypes.c_char * size).from_address(flat.data_ptr())) if size else memoryview(b"")
    done = 0
    while done < size:
        try:
            count = os.preadv(memory, [target[done:]], address + done)
        except OSError:
            count = 0
        if not count:
            raise ShortenedFile
        done += count


def plain_copies(value: Any) -> Any:
    """Returns a value with copies of the dense tensors in it, and in its dicts, lists and tuples.

    Raises: ShortenedFile.
    """
    if type(value) in (dict, OrderedDict):
        return type(value)((key, plain_copies(inner)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(plain_copies, value))
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return value
    return copied(value) if value.layout is torch.strided and not value.is_quantized else value


def shortened(files: Sequence[tuple[str, os.stat_result]]) -> str:
    """Returns which file became shorter, and what to do. files: with their status when they were opened."""
    for path, status in files:
        size = os.stat(path).st_size if os.path.exists(path) else 0
        if size < status.st_size:
            name = f"{path} " if len(files) > 1 else ""
            return (
                f"{name}became shorter while it was read: it had {status.st_size:,} bytes and has {size:,};"
                f" {_AGAIN}"
            )
    return f"was changed while it was read; {_AGAIN}"
