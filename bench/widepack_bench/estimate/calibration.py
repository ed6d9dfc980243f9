"""Measures the rates of this machine with the threads of this process. Takes about ten seconds.

Every kind of kernel runs alone at a few general sizes, which are those of no network. A small artifact gives
what a call takes beside its kernels.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

import widepack
from widepack.costs.amounts import kernels_at
from widepack.ir import ops
from widepack.system.timing import without_gc

from ..measure.programs import entry_of
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


def _one(_: tuple[float, float]) -> float:
    return 1.0


def _members(_: tuple[float, float]) -> float:
    return float(MEMBERS)


def _product(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for rows, width in itertools.product(ROWS, WIDTHS):
        x, w, b = make(rows, width), make(width, width), make(width)
        runs[rows, width * width] = partial(aten.addmm.default, b, x, w.t())
    return _one, runs


def _batched(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for rows, width in itertools.product(ROWS, WIDTHS[:-1]):
        x, w, b = make(MEMBERS, rows, width), make(MEMBERS, width, width), make(MEMBERS, 1, width)
        runs[rows, width * width] = partial(aten.baddbmm.default, b, x, w.transpose(1, 2))
    return _members, runs


def _streamed(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for width in WIDTHS[:-1]:
        x, w, b = make(MEMBERS, 1, width), make(MEMBERS, width, width), make(MEMBERS, width)
        runs[1, width * width] = partial(own.streamed_linear.default, x, w, b)
    return _members, runs


def _packed(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for rows, width in itertools.product(ROWS, WIDTHS[:-1]):
        x, w, b = make(MEMBERS, rows, width), make(MEMBERS, width, width), make(MEMBERS, width)
        packed = own.pack_linear.default(w, rows)
        runs[rows, width * width] = partial(own.linear.default, x, packed, b)
    return _members, runs


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


def _recurrent(name: str, gates: int, make: Make) -> Sized:
    """All steps of a layer of torch. A step multiplies rows by [gates * H, I + H]."""
    runs: dict[tuple[float, float], Run] = {}
    steps = 8
    for rows, width in itertools.product((1, 8, 64), (32, 128, 256)):
        x, h = make(steps, rows, width), make(1, rows, width)
        weights = [make(gates * width, width), make(gates * width, width), make(gates * width)]
        weights.append(make(gates * width))
        state = [h, h] if name == "lstm" else h
        op = getattr(aten, name).input
        runs[rows, 2 * gates * width * width] = partial(
            op, x, state, weights, True, 1, 0.0, False, False, False
        )
    return lambda _: float(steps), runs


def _steps(name: str, gates: int, make: Make) -> Sized:
    """All steps of a layer of widepack, for all members."""
    runs: dict[tuple[float, float], Run] = {}
    steps = 8
    for rows, width in itertools.product((1, 8, 64), (32, 128, 256)):
        x, h = make(MEMBERS, steps, rows, width), make(MEMBERS, rows, width)
        w, b = make(MEMBERS, width, gates * width), make(MEMBERS, gates * width)
        runs[rows, 2 * gates * width * width] = partial(_STEPS[name], x, h, w, b)
    return lambda _: float(steps * MEMBERS), runs


def _packed_lstm(x: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Callable[[], object]:
    packed = own.pack_lstm.default(w, w, False, list(x.shape[1:]))
    return partial(own.packed_lstm.default, x, h, h, packed, b, b, False)


_STEPS: dict[str, Callable[..., object]] = {
    "rnn_steps": lambda x, h, w, b: own.rnn_steps.default(x, h, w, w, b, b, False, "tanh"),
    "gru_steps": lambda x, h, w, b: own.gru_steps.default(x, h, w, w, b, b, False),
    "lstm_steps": lambda x, h, w, b: own.lstm_steps.default(x, h, h, w, w, b, b, None, False),
}


def _packed_lstm_steps(make: Make) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    steps = 8
    for rows, width in itertools.product((1, 8, 64), (32, 128, 256)):
        x, h = make(MEMBERS, steps, rows, width), make(MEMBERS, rows, width)
        w, b = make(MEMBERS, width, 4 * width), make(MEMBERS, 4 * width)
        runs[rows, 8 * width * width] = _packed_lstm(x, h, w, b)
    return lambda _: float(steps * MEMBERS), runs


_PRODUCTS: Mapping[str, Callable[[Make], Sized]] = {
    "product": _product,
    "batched product": _batched,
    "packed product": _packed,
    "streamed product": _streamed,
    "convolution": _convolution,
    "grouped convolution": partial(_convolution, groups=GROUPS),
    "packed convolution": partial(_convolution, packed=True),
    "packed grouped convolution": partial(_convolution, groups=GROUPS, packed=True),
    "depthwise convolution": _depthwise,
    "attention": _attention,
    "lstm": partial(_recurrent, "lstm", 4),
    "gru": partial(_recurrent, "gru", 3),
    "rnn_tanh": partial(_recurrent, "rnn_tanh", 1),
    "rnn_relu": partial(_recurrent, "rnn_relu", 1),
    "lstm_steps": partial(_steps, "lstm_steps", 4),
    "gru_steps": partial(_steps, "gru_steps", 3),
    "rnn_steps": partial(_steps, "rnn_steps", 1),
    "packed_lstm": _packed_lstm_steps,
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


RECURRENT = (
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_steps",
    "gru_steps",
    "rnn_steps",
    "packed_lstm",
)


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
            paths, path, model=f"{MODELS}.mlp:mlp", inputs=["input=float32[B,64]"], pt2=False, race=False
        )
        ens = widepack.load(path, backend="eager")
        program = entry_of(ens).programs.for_sizes("shared", {"B": 1}).program
        kernels = [work_of(k) for k in kernels_at(program, {"B": 1})]
        with torch.inference_mode():
            return max(0.0, seconds(partial(ens, torch.ones(1, 64))) - rates.kernels(kernels, 0.0))
