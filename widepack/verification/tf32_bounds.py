"""Widens the bounds of answers that a GPU computes in TF32, with ten bits of each factor.

torch has a setting for each kind of op. By default convolutions and recurrent layers of cuDNN run in TF32,
and products of matrices do not. widepack reads the settings and never changes them.

| setting of torch.backends | ops | default |
|---|---|---|
| `cuda.matmul.fp32_precision`, `cuda.matmul.allow_tf32` | products of matrices, attention | off |
| `cudnn.conv.fp32_precision`, `cudnn.allow_tf32` | convolutions | on |
| `cudnn.rnn.fp32_precision`, `cudnn.allow_tf32` | recurrent layers of one member | on |

`NVIDIA_TF32_OVERRIDE=0` in the environment switches TF32 off in all libraries of the process, whatever the
settings are.

The bounds of an artifact were recorded in float32. Where a program runs in TF32, the members' own errors
count as many times as the eps of TF32 is larger than that of float32, and an ulp is one of TF32.
"""

from __future__ import annotations

import os
from collections.abc import Set

import torch

from widepack_artifacts.program import Program

from ..ir.edit import all_nodes
from ..ir.op_records import record
from ..kernels.triton_kernels.available import TF32_SWITCH
from .record import OutputBounds

EPS = 2.0**-10
"""The eps of TF32, which has ten bits behind the point."""
_RATIO = EPS / torch.finfo(torch.float32).eps
_PRODUCTS = frozenset(
    ["product", "contraction", "attention", "grouped linear", "factored", "bilinear", "recurrent steps"]
)
_KINDS = {
    "products": _PRODUCTS,
    "convolutions": frozenset(["convolution", "member convolutions"]),
    "recurrent layers": frozenset(["recurrent", "cell"]),
}


def tf32_kinds(device: torch.device) -> frozenset[str]:
    """Returns the kinds of ops that run in TF32 on a device: `products`, `convolutions`, `recurrent layers`.

    Args:
        device: The device. Only CUDA devices have TF32.
    """
    if device.type != "cuda" or os.environ.get(TF32_SWITCH) == "0":
        return frozenset()
    backends = torch.backends
    settings = {
        "products": (backends.cuda.matmul,),
        "convolutions": (getattr(backends.cudnn, "conv", None), backends.cudnn),
        "recurrent layers": (getattr(backends.cudnn, "rnn", None), backends.cudnn),
    }
    return frozenset(kind for kind, some in settings.items() if _precision(*some, backends) == "tf32")


def _precision(*settings: object) -> str:
    """Returns the first precision that is set, of an op, its library and all libraries."""
    for setting in settings:
        found = str(getattr(setting, "fp32_precision", "none"))
        if found != "none":
            return found
    return "none"


def runs_in_tf32(program: Program, kinds: Set[str]) -> bool:
    """Returns whether a program has ops that run in TF32.

    Args:
        program: The member program. A convolution may run as a product of matrices for all members, and a
            recurrent layer as one product for each step.
        kinds: As `tf32_kinds` returns them.
    """
    some = {c for kind in kinds for c in _KINDS[kind]}
    if "products" in kinds:
        some |= _KINDS["convolutions"] | _KINDS["recurrent layers"]
    return any(n.body is None and record(n.op).cost in some for n in all_nodes(program))


def in_tf32(bounds: OutputBounds) -> OutputBounds:
    """Returns the bounds of an output that is computed in TF32."""
    return OutputBounds(
        bounds.output,
        _RATIO * bounds.own_max + EPS * bounds.scale,
        _RATIO * bounds.own_rms + EPS / 2 * bounds.scale,
        bounds.scale,
    )
