"""Predicts the times of the Triton kernels, and of plain torch in their place, on an H100.

A prediction decides before a kernel runs whether it is worth running. It adds, for each kernel that starts,
the time of a start and the longest of three: bytes over bandwidth, FLOP over the rate of the units that
multiply, and for the Triton kernels what one multiprocessor can read. None of these times was measured on a
device by us: the limits of the hardware are of the data sheet, the other constants are estimates.

A recurrent layer's products with x are the same in both ways, and are not counted. `plain` and `kernel` are
times in a CUDA graph; `plain_eager` and `kernel_eager` are without one, where the host starts each kernel,
and the op itself takes time of the host (`OWN_START`). A kernel is used if it is faster by `MARGIN` in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# The limits of the hardware are those of `system/devices.py`, which kernels do not import. A test compares.
BANDWIDTH = 3.35e12
"""Bytes for each second from memory: NVIDIA's data sheet of the H100 SXM, 80 GB."""
HALF_FLOPS = 989.4e12
"""FLOP for each second of the tensor cores in bfloat16 and float16, from the same data sheet, dense."""
TF32_FLOPS = HALF_FLOPS / 2
"""The same in TF32."""
FLOAT32_FLOPS = 67e12
"""FLOP for each second of the float32 units, from the same data sheet."""
PROCESSORS = 132
"""Multiprocessors, from the same data sheet."""
PROCESSOR_READ = 64 * 1.755e9
"""Bytes for each second that one multiprocessor reads from the second-level cache: 64 in a clock cycle."""
CACHE_READ = 5.5e12
"""An estimate of the bytes for each second that all of them read from the second-level cache."""
CACHE_BYTES = 50e6
"""The second-level cache, from the data sheet."""
START = 2e-6
"""An estimate of the time from the start of one small kernel to that of the next in a CUDA graph."""
OP_START = 5e-6
"""An estimate of the time that the host takes to start an op of torch."""
TRITON_START = 15e-6
"""An estimate of the time that the host takes to start a Triton kernel."""
OWN_START = 30e-6
"""The time of an op before its kernel starts: checks of operands, and what the kernel is chosen by. Measured
on a CPU: 28 us for a chain of two layers."""
MARGIN = 0.9
"""A kernel must save a tenth of the predicted time of plain torch."""
LEAST = 1e-9
"""The seconds beyond the margin, so that rounding does not decide between equal times."""
STEP = 1.5e-6
"""An estimate of the least time of one step in a kernel of all steps: dependent products and activations."""
PLAIN_PART = 0.5
"""An estimate of the part of a rate that torch's products of small matrices reach."""
KERNEL_PART = 0.25
"""An estimate of the part of a rate that products of `ROWS` rows in a Triton kernel reach."""
TILE = 32
"""torch's products compute at least this many rows."""
ROWS = 16
"""The rows of the batch that one program of a Triton kernel runs."""
MOST_ROWS = 4096
"""The most rows of a member for which a kernel is used. With more, torch's products reach a larger part of
their rate than `PLAIN_PART`."""
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""The gates of a recurrent layer."""
STEP_OPS = {1: 3, 3: 7, 4: 9}
"""The kernels of a step of a recurrent layer in plain torch, by the number of gates."""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """Seconds of plain torch and of one Triton kernel, in a CUDA graph and without one."""

    plain: float
    kernel: float
    plain_eager: float
    kernel_eager: float

    @property
    def faster(self) -> bool:
        """Whether the kernel is faster in a graph and without one, by the margin."""
        pairs = ((self.kernel, self.plain), (self.kernel_eager, self.plain_eager))
        return all(kernel + LEAST < MARGIN * plain for kernel, plain in pairs)


def plain_rate(dtype: torch.dtype, tf32: bool) -> float:
    """Returns the FLOP for each second of torch's products of small matrices."""
    if dtype is torch.float32:
        return PLAIN_PART * (TF32_FLOPS if tf32 else FLOAT32_FLOPS)
    return PLAIN_PART * HALF_FLOPS


def kernel_rate(dtype: torch.dtype, tf32: bool) -> float:
    """Returns the FLOP for each second of one multiprocessor in a Triton kernel.

    Without TF32, three products of TF32 numbers give one of float32.
    """
    rate = HALF_FLOPS if dtype is not torch.float32 else TF32_FLOPS if tf32 else TF32_FLOPS / 3
    return KERNEL_PART * rate / PROCESSORS


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to


def _programs_time(programs: int, weight_bytes: float, flops: float, rate: float, least: float) -> float:
    """Returns the seconds of programs that read weights and multiply. Each processor runs one at once."""
    waves = -(-programs // PROCESSORS)
    read = max(weight_bytes / PROCESSOR_READ, min(programs, PROCESSORS) * weight_bytes / CACHE_READ)
    return waves * max(read, flops / rate, least)


def step_times(
    gates: int, members: int, steps: int, batch: int, width: int, dtype: torch.dtype, tf32: bool = False
) -> PredictedTimes:
    """Predicts all steps of a recurrent layer in one direction.

    Args:
        gates: 1 of a plain RNN, 3 of a GRU, 4 of an LSTM.
        members: N.
        steps: T.
        batch: B.
        width: H.
        dtype: Of the weights.
        tf32: Whether products of float32 numbers may be in TF32.
    """
    size, numbers = dtype.itemsize, gates * width * width
    reading = CACHE_READ if members * numbers * size < CACHE_BYTES else BANDWIDTH
    product = max(
        members * numbers * size / reading,
        2.0 * members * numbers * _round_up(batch, TILE) / plain_rate(dtype, tf32),
    )
    others = members * batch * width * size * 3 / CACHE_READ
    count = STEP_OPS[gates]
    plain = steps * (START + product + (count - 1) * (START + others))
    eager = steps * (max(OP_START, START + product) + (count - 1) * max(OP_START, START + others))
    programs = members * -(-batch // ROWS)
    one = _programs_time(programs, numbers * size, 2.0 * numbers * ROWS, kernel_rate(dtype, tf32), least=STEP)
    work = max(steps * one, members * numbers * size / BANDWIDTH)
    return PredictedTimes(plain, START + work, eager, max(OWN_START + TRITON_START, START + work))


def chain_times(
    members: int,
    rows: int,
    widths: Sequence[int],
    biases: Sequence[bool],
    activations: Sequence[str],
    shared: bool,
    dtype: torch.dtype,
    tf32: bool = False,
) -> PredictedTimes:
    """Predicts a chain of linear layers and activations.

    Plain torch starts a kernel for each product, one for each activation, and one that copies each bias.

    Args:
        members: N.
        rows: The rows of a member.
        widths: The inputs of the first layer, then the outputs of each layer.
        biases: Whether each layer has a bias.
        activations: The activation of each layer; "" is none.
        shared: Whether all members read the same input.
        dtype: Of the weights.
        tf32: Whether products of float32 numbers may be in TF32.
    """
    size, plain, eager = dtype.itemsize, 0.0, 0.0
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        copies = 1 if shared and not i else members
        made = members * rows * outputs * size
        moved = copies * rows * inputs * size + members * inputs * outputs * size + made
        flops = 2.0 * members * inputs * outputs * _round_up(rows, TILE)
        kernels = [max(moved / BANDWIDTH, flops / plain_rate(dtype, tf32))]
        kernels += [made / BANDWIDTH] if biases[i] and (i or not shared) else []
        kernels += [2 * made / BANDWIDTH] if activations[i] else []
        plain += sum(START + k for k in kernels)
        eager += max(OP_START * (1 + bool(activations[i])), sum(START + k for k in kernels))
    pairs = sum(a * b for a, b in pairwise(widths))
    programs = members * -(-rows // ROWS)
    work = _programs_time(programs, pairs * size, 2.0 * pairs * ROWS, kernel_rate(dtype, tf32), least=0.0)
    ends = (1 if shared else members) * widths[0] + members * widths[-1]
    work = max(work, (members * pairs + rows * ends) * size / BANDWIDTH)
    return PredictedTimes(plain, START + work, eager, max(OWN_START + TRITON_START, START + work))


def most_rows(
    members: int,
    widths: Sequence[int],
    biases: Sequence[bool],
    activations: Sequence[str],
    shared: bool,
    dtype: torch.dtype,
) -> int:
    """Returns the most rows of a member, a power of two, up to which a chain's kernel is predicted to be
    faster. 0: at one row it is not. It is at most `MOST_ROWS`.
    """
    most = 0
    for rows in (1 << power for power in range(MOST_ROWS.bit_length())):
        if not chain_times(members, rows, widths, biases, activations, shared, dtype).faster:
            break
        most = rows
    return most


def table() -> list[tuple[str, int, PredictedTimes]]:
    """Returns the predictions that the documentation shows: a name, N and the times."""
    found = []
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for layers, widths in ((2, "64-128-64"), (6, "64-128-...-128-64")):
            inner = (128,) * (layers - 1)
            acts = ("relu",) * (layers - 1) + ("",)
            times = chain_times(100, 32, (64, *inner, 64), (True,) * layers, acts, True, dtype)
            found.append((f"MLP {widths}, {layers} layers, B=32, {name}", 100, times))
        for gates, cell in ((3, "GRU"), (4, "LSTM")):
            for members in (8, 32):
                times = step_times(gates, members, 32, 8, 128, dtype)
                found.append((f"{cell} H=128, T=32, B=8, {name}", members, times))
    assert all(math.isfinite(t.plain) for _, _, t in found)
    return found
