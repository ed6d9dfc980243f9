"""Decides whether a Triton kernel may run, and runs it with a fallback.

A kernel is compiled at its first call for each combination of dtype, sizes that are constants of the kernel,
and alignment of the operands. Compiling takes seconds, once a machine: Triton keeps compiled kernels on disk.
If the first call fails, a warning names the op and the error, and the op runs in plain torch from then on.
While a CUDA graph is captured, nothing is compiled: a kernel that did not run before is not used.

On a CPU a kernel runs only under Triton's interpreter, which `TRITON_INTERPRET=1` in the environment starts.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

SWITCH = "WIDEPACK_TRITON"
"""The variable of the environment that switches the kernels off with `0`."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""The least compute capability: tensor cores for TF32 and bfloat16 (Ampere)."""

_compiled: set[Hashable] = set()
_failed: set[str] = set()


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in this process, on tensors of a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(op: str, *operands: Tensor | None) -> bool:
    """Returns whether an op may run its Triton kernel on these operands.

    Args:
        op: The op's name, without the namespace.
        *operands: Tensors of the op, or None for absent ones.
    """
    tensors = [t for t in operands if t is not None]
    first = tensors[0]
    if op in _failed or os.environ.get(SWITCH) == "0" or not _installed():
        return False
    if torch.compiler.is_compiling() or any(
        type(t) not in (Tensor, torch.nn.Parameter) or t.device != first.device or t.dtype != first.dtype
        for t in tensors
    ):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if first.dtype not in DTYPES or not all(t.numel() for t in tensors):
        return False
    if first.device.type not in ("cpu", "cuda") or torch.is_autocast_enabled(first.device.type):
        return False
    return interpreted() if first.device.type == "cpu" else _supported(first.device.index)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _supported(index: int) -> bool:
    """Whether the device is an NVIDIA GPU with tensor cores for all dtypes."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= OLDEST


def precision(dtype: torch.dtype) -> str:
    """Returns how a kernel multiplies factors of a dtype, as the kernels' parameter `PRECISION`.

    float32 factors are multiplied in TF32 if torch's own products are
    (`torch.backends.cuda.matmul.fp32_precision`, or `allow_tf32`). Otherwise each factor is a sum of two TF32
    numbers, and three products give the digits of float32 (`tf32x3`).
    """
    if interpreted():
        return "cast"
    if dtype is not torch.float32:
        return "ieee"  # has no meaning for half precision
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def run(op: str, key: Hashable, device: torch.device, launch: Callable[[], None]) -> bool:
    """Starts a kernel, or returns False if the op has to run in plain torch.

    Args:
        op: The op's name, for the warning.
        key: All that the compiled kernel depends on.
        device: The device of the operands.
        launch: Starts the kernel. It may start several.
    """
    on_device: AbstractContextManager[object] = (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    )
    with on_device:
        if key in _compiled:
            launch()
            return True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        try:
            launch()
        except Exception as error:  # noqa: BLE001  # compilers raise errors of many classes
            _failed.add(op)
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            warnings.warn(
                f"the Triton kernel of widepack::{op} does not run here ({type(error).__name__}: {reason}). "
                f"The op runs in plain torch instead. {SWITCH}=0 in the environment prevents the attempt",
                stacklevel=2,
            )
            return False
    _compiled.add(key)
    return True
