"""Measures the rates of this machine with the threads of this process. Takes about ten seconds.

Every kind of kernel runs alone at a few general sizes, which are those of no network. A small artifact gives
what a call takes beside its kernels.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

import widepack
from widepack.costs.amounts import kernels_at
from widepack.ir import ops
from widepack.system.timing import without_gc

from ..measure.loading import entry_of
from ..models.factory import MODELS
from ..models.mlp import mlp
from ..models.weights import write_checkpoints
from .kernel_work import work_of
from .rates import LEAST_S, MODULE_BYTES, Curve, ProductTimes, Rates, curve, product_times

BLOCK_S = 4e-4
BLOCKS = 5
ROWS = (1, 4, 16, 64, 256)
WIDTHS = (32, 64, 128, 256, 512, 1024)
ELEMENTS = (1, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 21)
BYTES = (1 << 19, 1 << 20, 1 << 22, 3 << 22, 1 << 24, 3 << 23, 1 << 25, 1 << 26, 1 << 27)
COLD = 256
"""The rows and columns of the matrices that are read in turn."""
CHANNELS = (4, 16, 64, 128)
PLACES = ((1, 4), (1, 8), (1, 16), (4, 16), (4, 32))
"""Samples and the side of an image, for convolutions."""
MEMBERS = 8
STEPS = 8
MODULES = (32, 256, 2048)
GROUPS = 4

Run = Callable[[], object]


class _Drawn:
    """Makes tensors of random numbers. Some kernels are faster where all numbers are equal."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self._generator).to(self._dtype)


Make = _Drawn
aten = torch.ops.aten
own = torch.ops.widepack
_BATCH_NORM = ops.resolve("aten._native_batch_norm_legit_no_training.default")
_SOFTMAX = ops.resolve("aten._softmax.default")


@cache
def rates_here(threads: int, dtype: str = "float32") -> Rates:
    """Measures the rates of this machine's processor.

    Args:
        threads: The number of torch's threads, which the caller has set.
        dtype: Of all values.

    Returns:
        The rates. A process measures them once for each argument.
    """
    make = _Drawn(getattr(torch, dtype))
    starts: dict[str, float] = {}
    products: dict[str, ProductTimes] = {}
    with torch.inference_mode(), without_gc():
        for kind, measure in _PRODUCTS.items():
            count, runs = measure(make)
            found = {at: seconds(run) for at, run in runs.items()}
            # each step of a recurrent layer starts kernels of its own
            starts[kind] = start = 0.0 if kind in RECURRENT else _start(found, count)
            products[kind] = product_times(
                {at: max((s - start) / count(at), LEAST_S) for at, s in found.items()}
            )
        others = {
            kind: curve({n: seconds(run) for n, run in runs(make).items()}) for kind, runs in _OTHERS.items()
        }
        cold = _cold(make)
        x = make(4, 4)
        view_s = seconds(partial(aten.view.default, x, [16]))
        modules = _modules(x, starts["product"])
    rates = Rates(
        threads=threads,
        dtype=dtype,
        starts=starts,
        products=products,
        others=others,
        cold=cold,
        view_s=view_s,
        modules=modules,
        call_s=0.0,
    )
    return replace(rates, call_s=_call_s(rates))


def seconds(run: Run) -> float:
    """Returns the seconds of a call: the median over a few blocks of calls."""
    run()
    begin = time.perf_counter()
    run()
    once = max(time.perf_counter() - begin, 1e-7)
    inner = max(1, round(BLOCK_S / once))
    times = []
    for _ in range(BLOCKS if once < 20 * BLOCK_S else 2):
        begin = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)


def _start(
    found: Mapping[tuple[float, float], float], count: Callable[[tuple[float, float]], float]
) -> float:
    """Returns the seconds that a kernel takes beside its products: a line through the two smallest sizes."""
    first, second = sorted(found, key=lambda at: at[0] * at[1] * count(at))[:2]
    work, more = (at[0] * at[1] * count(at) for at in (first, second))
    slope = max(0.0, (found[second] - found[first]) / max(more - work, 1))
    return max(LEAST_S, min(found[first] - slope * work, 0.98 * min(found.values())))


def _modules(x: Tensor, start: float) -> Curve:
    """Measures the call of a module beside its op, by the memory of all modules that are called in turn."""
    found: dict[float, float] = {}
    for count in MODULES:
        chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).to(x.dtype)
        found[count * MODULE_BYTES] = max(LEAST_S, seconds(partial(chain, x)) / count - start)
    return curve(found)


def _cold(make: Make) -> Curve:
    """Measures products of one row with matrices in turn, which are all in a cache or not, by their bytes."""
    x, b = make(1, COLD), make(COLD)
    one = make(COLD, COLD)
    size = one.nbytes
    found: dict[float, float] = {}
    for total in BYTES:
        matrices = [one.clone() for _ in range(total // size)]

        def run(matrices: list[Tensor] = matrices) -> object:
            return [aten.addmm.default(b, x, w.t()) for w in matrices]

        found[total] = seconds(run) / (len(matrices) * size)
    least = found[BYTES[0]]
    return curve({total: max(s - least, 1e-15) for total, s in found.items()})


Sized = tuple[Callable[[tuple[float, float]], float], dict[tuple[float, float], Run]]
Sizes = Callable[[Make], Sized]


def _one(_: tuple[float, float]) -> float:
    return 1.0


def _members(_: tuple[float, float]) -> float:
    return float(MEMBERS)


def _matrices(run: Callable[[Tensor, Tensor, Tensor], Run], members: bool, rows: Sequence[int]) -> Sizes:
    """Returns products of rows with square matrices, of one or all members. run: takes x, w and b."""

    def sized(make: Make) -> Sized:
        lead = (MEMBERS,) if members else ()
        runs = {
            (float(n), float(d * d)): run(make(*lead, n, d), make(*lead, d, d), make(*lead, d))
            for n, d in itertools.product(rows, WIDTHS[:-1] if members else WIDTHS)
        }
        return (_members if members else _one), runs

    return sized


def _packed(x: Tensor, w: Tensor, b: Tensor) -> Run:
    return partial(own.linear.default, x, own.pack_linear.default(w, x.shape[1]), b)


def _convolution(make: Make, groups: int = 1, packed: bool = False) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for (samples, side), channels in itertools.product(PLACES, CHANNELS):
        x = make(samples, groups * channels, side, side)
        w, b = make(groups * channels, channels, 3, 3), make(groups * channels)
        at = samples * side * side, 9 * channels * channels
        if packed:
            p = own.pack_convolution.default(w, [1, 1], [1, 1], [1, 1], groups, list(x.shape))
            x = x.contiguous(memory_format=torch.channels_last)
            runs[at] = partial(own.convolution.default, x, p, b, [1, 1], [1, 1], [1, 1], groups)
        else:
            runs[at] = partial(
                aten.convolution.default, x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], groups
            )
    return (_one if groups == 1 else lambda _: float(groups)), runs


def _depthwise(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for (samples, side), size in itertools.product(PLACES, (3, 7)):
        x, w, b = make(samples, 64, side, side), make(64, 1, size, size), make(64)
        pad = [size // 2] * 2
        runs[samples * side * side, size * size] = partial(
            aten.convolution.default, x, w, b, [1, 1], pad, [1, 1], False, [0, 0], 64
        )
    return lambda _: 64.0, runs


def _attention(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for length, width in itertools.product((6, 12, 50, 200, 500), (8, 32, 64)):
        q, k, v = (make(MEMBERS, 4, length, width) for _ in range(3))
        runs[length, 2 * width * length] = partial(aten.scaled_dot_product_attention.default, q, k, v)
    return lambda _: 4.0 * MEMBERS, runs


def _sequences(run: Callable[[Make, int, int], Run], gates: int, members: int = 1) -> Sizes:
    """Returns all steps of a recurrent layer. A step multiplies rows by [gates * H, I + H]. run: takes the
    number of rows and H.
    """

    def sized(make: Make) -> Sized:
        runs: dict[tuple[float, float], Run] = {}
        for rows, width in itertools.product((1, 8, 64), (32, 128, 256)):
            runs[rows, 2 * gates * width * width] = run(make, rows, width)
        return lambda _: float(STEPS * members), runs

    return sized


def _layer(name: str, gates: int) -> Sizes:
    """Returns the steps of a layer of torch."""

    def run(make: Make, rows: int, width: int) -> Run:
        x, h = make(STEPS, rows, width), make(1, rows, width)
        weights = [make(gates * width, width), make(gates * width, width), make(gates * width)]
        state = [h, h] if name == "lstm" else h
        given = (x, state, [*weights, make(gates * width)], True, 1, 0.0, False, False, False)
        return partial(getattr(aten, name).input, *given)

    return _sequences(run, gates)


def _steps(op: Callable[[Tensor, Tensor, Tensor, Tensor], Run], gates: int) -> Sizes:
    """Returns the steps of a layer of widepack, for all members."""

    def run(make: Make, rows: int, width: int) -> Run:
        x, h = make(MEMBERS, STEPS, rows, width), make(MEMBERS, rows, width)
        return op(x, h, make(MEMBERS, width, gates * width), make(MEMBERS, gates * width))

    return _sequences(run, gates, MEMBERS)


def _packed_lstm(x: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Run:
    packed = own.pack_lstm.default(w, w, False, list(x.shape[1:]))
    return partial(own.packed_lstm.default, x, h, h, packed, b, b, False)


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_steps", "gru_steps", "rnn_steps", "packed_lstm")
_PRODUCTS: Mapping[str, Sizes] = {
    "product": _matrices(lambda x, w, b: partial(aten.addmm.default, b, x, w.t()), False, ROWS),
    "batched product": _matrices(
        lambda x, w, b: partial(aten.baddbmm.default, b[:, None], x, w.transpose(1, 2)), True, ROWS
    ),
    "packed product": _matrices(_packed, True, ROWS),
    "streamed product": _matrices(partial(partial, own.streamed_linear.default), True, ROWS[:1]),
    "convolution": _convolution,
    "grouped convolution": partial(_convolution, groups=GROUPS),
    "packed convolution": partial(_convolution, packed=True),
    "packed grouped convolution": partial(_convolution, groups=GROUPS, packed=True),
    "depthwise convolution": _depthwise,
    "attention": _attention,
    "lstm": _layer("lstm", 4),
    "gru": _layer("gru", 3),
    "rnn_tanh": _layer("rnn_tanh", 1),
    "rnn_relu": _layer("rnn_relu", 1),
    "lstm_steps": _steps(
        lambda x, h, w, b: partial(own.lstm_steps.default, x, h, h, w, w, b, b, None, False), 4
    ),
    "gru_steps": _steps(lambda x, h, w, b: partial(own.gru_steps.default, x, h, w, w, b, b, False), 3),
    "rnn_steps": _steps(
        lambda x, h, w, b: partial(own.rnn_steps.default, x, h, w, w, b, b, False, "tanh"), 1
    ),
    "packed_lstm": _steps(_packed_lstm, 4),
}


def _over_elements(run: Callable[[Tensor], object]) -> Callable[[Make], dict[float, Run]]:
    def runs(make: Make) -> dict[float, Run]:
        return {float(n): partial(run, make(max(1, n // 64), min(n, 64))) for n in ELEMENTS}

    return runs


def _norm(x: Tensor) -> object:
    w = x[0]
    return aten.native_layer_norm.default(x, [x.shape[-1]], w, w, 1e-5)


def _pools(layout: torch.memory_format, make: Make) -> dict[float, Run]:
    runs: dict[float, Run] = {}
    for side in (2, 8, 32, 128):
        x = make(4, 16, side, side).contiguous(memory_format=layout)
        runs[16.0 * side * side] = partial(aten.max_pool2d_with_indices.default, x, [2, 2])
    return runs


def _batch_norms(make: Make) -> dict[float, Run]:
    runs: dict[float, Run] = {}
    w = make(16).abs()
    for side in (2, 8, 32, 128):
        x = make(4, 16, side, side)
        runs[64.0 * side * side] = partial(_BATCH_NORM, x, w, w, w, w, 0.1, 1e-5)
    return runs


def _gathered(x: Tensor) -> object:
    return aten.index_select.default(x, 0, torch.zeros(x.shape[0], dtype=torch.int64))


_OTHERS: Mapping[str, Callable[[Make], dict[float, Run]]] = {
    "elementwise": _over_elements(lambda x: aten.add.Tensor(x, x)),
    "function": _over_elements(lambda x: aten.gelu.default(x)),
    "norm": _over_elements(_norm),
    "softmax": _over_elements(lambda x: _SOFTMAX(x, -1, False)),
    "reduction": _over_elements(lambda x: aten.mean.dim(x, [-1])),
    "copy": _over_elements(lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format)),
    "gather": _over_elements(_gathered),
    "pool": partial(_pools, torch.contiguous_format),
    "channels-last pool": partial(_pools, torch.channels_last),
    "batch norm": _batch_norms,
}


def _call_s(rates: Rates) -> float:
    """Measures what the call of a wide program takes beside its kernels, with an artifact of two members."""
    with tempfile.TemporaryDirectory(prefix="widepack-rates-") as folder:
        paths = write_checkpoints(mlp, 2, folder)
        path = f"{folder}/small.wide"
        widepack.build(
            paths, path, model=f"{MODELS}.mlp:mlp", inputs=["input=float32[B,64]"], pt2=False, budget=0
        )
        ens = widepack.load(path, backend="eager")
        program = entry_of(ens).programs.for_sizes("shared", {"B": 1}).program
        kernels = [work_of(k) for k in kernels_at(program, {"B": 1})]
        with torch.inference_mode():
            return max(0.0, seconds(partial(ens, torch.ones(1, 64))) - rates.kernels(kernels, 0.0))
