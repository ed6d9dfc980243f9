"""Decides whether a Triton kernel may run, and runs it with a fallback.

A kernel is compiled at its first call for each combination of dtype, sizes that are constants of the kernel,
and alignment of the operands. Compiling takes seconds, once a machine: Triton keeps compiled kernels on disk.
If the first call fails, a warning names the op and the error, and the op runs in plain torch from then on,
for this dtype, device and width. A lack of memory is raised as the error that it is.
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
TF32_SWITCH = "NVIDIA_TF32_OVERRIDE"
"""The variable of the environment that switches TF32 off with `0` in NVIDIA's libraries, whatever torch's
settings are."""
ACTIVATIONS = ("", "relu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh")
"""The activations of a chain by name. "" is none, `gelu_tanh` is `gelu` with `approximate="tanh"`."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""The least compute capability: tensor cores for TF32 and bfloat16 (Ampere)."""

MOST_NUMBERS = 2**31
"""A member's part of an operand must have fewer numbers: kernels compute places in it in 32 bits."""

_compiled: set[Hashable] = set()
_failed: set[Hashable] = set()


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in this process, on tensors of a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(op: str, width: int, *operands: Tensor | None) -> bool:
    """Returns whether an op may run its Triton kernel on these operands.

    Args:
        op: The op's name, without the namespace.
        width: The widest state or layer.
        *operands: Tensors of the op, or None for absent ones. The first dim is that of the members.
    """
    tensors = [t for t in operands if t is not None]
    first = tensors[0]
    if os.environ.get(SWITCH) == "0" or not _installed():
        return False
    if torch.compiler.is_compiling() or any(
        type(t) not in (Tensor, torch.nn.Parameter) or t.device != first.device or t.dtype != first.dtype
        for t in tensors
    ):
        return False
    if (op, first.dtype, first.device, width) in _failed:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if first.dtype not in DTYPES or not all(t.numel() for t in tensors):
        return False
    if any(t.is_neg() or t.numel() // t.shape[0] >= MOST_NUMBERS for t in tensors):
        return False  # a kernel reads memory, where numbers of a negative view have the other sign
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
    (`torch.backends.cuda.matmul.fp32_precision`, or `allow_tf32`; not under `NVIDIA_TF32_OVERRIDE=0`).
    Otherwise each factor is a sum of two TF32 numbers, and three products give the digits of float32
    (`tf32x3`).
    """
    if interpreted():
        return "cast"
    if dtype is not torch.float32:
        return "ieee"  # has no meaning for half precision
    if os.environ.get(TF32_SWITCH) == "0":
        return "tf32x3"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def run(op: str, width: int, like: Tensor, key: Hashable, launch: Callable[[], None]) -> bool:
    """Starts a kernel, or returns False if the op has to run in plain torch.

    Args:
        op: The op's name, without the namespace.
        width: The widest state or layer.
        like: An operand: the kernel runs on its device, and in its dtype.
        key: All that the compiled kernel depends on.
        launch: Starts the kernel. It may start several.

    Raises:
        torch.OutOfMemoryError: The device has not enough memory.
    """
    device = like.device
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
        except torch.OutOfMemoryError:
            raise  # another call may have enough
        except Exception as error:  # noqa: BLE001  # compilers raise errors of many classes
            _failed.add((op, like.dtype, device, width))
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            warnings.warn(
                f"the Triton kernel of widepack::{op} does not run here ({type(error).__name__}: {reason}). "
                f"The op runs in plain torch instead, for {like.dtype} and width {width}. "
                f"{SWITCH}=0 in the environment prevents the attempt",
                stacklevel=2,
            )
            return False
    _compiled.add(key)
    return True
