"""Starts the Triton kernels, with sizes and precisions chosen by rule.

Each function returns None if its kernel may not run here (`available.py`), its shape does not fit, or the
kernel is predicted to be slower. Then the op runs in plain torch. Nothing is tuned by trials, so a call under
capture of a CUDA graph starts the same kernels as any other.

Shapes fit if chunks of all widths stay in registers, by the reports of NVIDIA's assembler: widths up to 256,
or up to 128 of float32 numbers without TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..projections import projected_parts
from . import available
from .available import ACTIVATIONS
from .predictions import GATES, MOST_ROWS, ROWS, chain_times, step_times

PROJECTED_BYTES = 64 << 20
"""The bytes of products with x that are computed before the steps that read them, on a CUDA device."""
WIDEST = 256
"""The largest width of a state or a layer."""
WIDEST_FLOAT32 = 128
"""The same for products with all digits of float32."""
MOST_LAYERS = 8


def run_steps(
    cell: str,
    x: Tensor,
    h: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    bias: Tensor | None,
    reverse: bool,
    *,
    relu: bool = False,
    new_bias: Tensor | None = None,
    c: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Runs all steps of a recurrent layer in one direction by a kernel.

    Args:
        cell: `rnn`, `gru` or `lstm`.
        x, h, w_x, w_h, reverse: The arguments of `widepack::rnn_steps` and its like, without a projection.
        bias: What is added to the products with x.
        relu: Whether relu is the activation of a plain RNN.
        new_bias: What is added to the new gate's product with h of a GRU, `[N, 1, H]`.
        c: The first cells of an LSTM.

    Returns:
        y and the last cells; None if the kernel may not run.
    """
    (members, batch, width), dtype = h.shape, h.dtype
    if not available.usable(f"{cell}_steps", width, x, h, w_x, w_h, bias, new_bias, c):
        return None
    if not steps_fit(batch, width, dtype, available.precision(torch.float32) != "tf32x3"):
        return None
    total, sizes = x.shape[1], (batch, width, dtype, _tf32())
    if not available.interpreted() and not _steps_pay(GATES[cell], members, total, *sizes):
        return None
    x, h = x.expand(members, -1, -1, -1), h.contiguous()
    shared = w_h.stride(0) == 0 and w_h[0].is_contiguous()  # one for all members
    w_h = w_h if shared else w_h.contiguous()
    cells = None if c is None else torch.empty(c.shape, dtype=torch.float32, device=c.device).copy_(c)
    added = None if new_bias is None else new_bias.flatten(1).contiguous()
    y = h.new_empty(members, total, batch, width)
    columns = chunk(width)
    constants = {
        "GATES": GATES[cell],
        "H": width,
        "W": w_h.stride(0),
        "C": columns,
        "K": -(-width // columns),
        "R": ROWS,
        "REVERSE": reverse,
        "RELU": relu,
        "BIAS": added is not None,
        "PRECISION": available.precision(dtype),
    }
    key = (cell, dtype, h.device, *constants.values(), *_aligned(w_h))

    def launch() -> None:
        from . import steps  # imports Triton

        grid, named = (members, -(-batch // ROWS)), {**constants, **options(width)}
        others = [w_h if t is None else t for t in (added, cells)]  # those that are not read are any tensor
        state, stride = h, batch * width
        for first, products in projected_parts(x, w_x, bias, reverse, PROJECTED_BYTES):
            count = products.shape[1]
            numbers = (stride, first, count, total, batch)
            steps.steps_kernel[grid](products, w_h, *others, state, y, *numbers, **named)
            state, stride = y[:, first if reverse else first + count - 1], total * batch * width

    if not available.run(f"{cell}_steps", width, h, key, launch):
        return None
    return y, None if cells is None else cells.to(dtype)


@lru_cache(maxsize=1024)
def _steps_pay(*sizes: Any) -> bool:
    return step_times(*sizes).faster


def _tf32() -> bool:
    return available.precision(torch.float32) == "tf32"


def _widest(dtype: torch.dtype, tf32: bool) -> int:
    return WIDEST if tf32 or dtype is not torch.float32 else WIDEST_FLOAT32


def steps_fit(batch: int, width: int, dtype: torch.dtype, tf32: bool = False) -> bool:
    """Whether a kernel may run a recurrent layer. batch: a member's rows. width: of the state."""
    return dtype in available.DTYPES and batch <= MOST_ROWS and width <= _widest(dtype, tf32)


def chunk(width: int) -> int:
    """Returns the columns of a chunk of a state or a layer: a power of two from 16 to 64."""
    return min(64, max(16, 1 << (width - 1).bit_length()))


def options(width: int) -> dict[str, Any]:
    """Returns how Triton compiles a kernel whose widest state or layer has this width.

    a * b + c is rounded once, as in torch's own kernels.
    """
    return {"num_warps": 8 if width > 32 else 4, "num_stages": 1, "enable_fp_fusion": True}


def _aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each tensor begins at a multiple of 16 bytes; a compiled kernel depends on it."""
    return tuple(t is not None and t.data_ptr() % 16 == 0 for t in tensors)


def chain_fits(widths: Sequence[int], dtype: torch.dtype, tf32: bool = False) -> bool:
    """Whether a kernel may run a chain. widths: the inputs of the first layer, then the outputs of each."""
    few = 2 <= len(widths) <= MOST_LAYERS + 1
    return dtype in available.DTYPES and few and max(widths[1:]) <= _widest(dtype, tf32)


def mlp_chain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor | None:
    """Runs `widepack::mlp_chain` by a kernel. The arguments are those of the op."""
    members, dtype = weights[0].shape[0], x.dtype
    widths = (x.shape[2], *(w.shape[1] for w in weights))
    widest = max(widths[1:])
    if not available.usable("mlp_chain", widest, x, *weights, *biases):
        return None
    rows, shared = x.shape[1], x.shape[0] == 1 < members
    exact = available.precision(torch.float32)
    if not chain_fits(widths, dtype, exact != "tf32x3") or rows > MOST_ROWS:
        return None
    given = tuple(b is not None for b in biases)
    sizes = (members, rows, widths, given, tuple(activations), shared, dtype, exact == "tf32")
    if not available.interpreted() and not _chain_pays(*sizes):
        return None
    x = x.contiguous()
    matrices = tuple(w.contiguous() for w in weights)
    added = tuple(None if b is None else b.contiguous() for b in biases)
    y = x.new_empty(members, rows, widths[-1])
    constants = {
        "SHARED": shared,
        "WIDTHS": widths,
        "ACTIVATIONS": tuple(map(ACTIVATIONS.index, activations)),
        "LAYERS": len(matrices),
        "C": chunk(widest),
        "R": ROWS,
        "PRECISION": available.precision(dtype),
    }
    key = ("chain", dtype, x.device, *constants.values(), *_aligned(x, *matrices, *added), given)

    def launch() -> None:
        from . import chain  # imports Triton

        grid = (members, -(-rows // ROWS))
        named = {**constants, **options(widest)}
        chain.chain_kernel[grid](x, y, matrices, added, rows, **named)

    return y if available.run("mlp_chain", widest, x, key, launch) else None


@lru_cache(maxsize=1024)
def _chain_pays(*sizes: Any) -> bool:
    return chain_times(*sizes).faster
