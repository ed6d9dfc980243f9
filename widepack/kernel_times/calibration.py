"""Measures the kernel times of this machine with the threads of this process. Takes about ten seconds.

Every kind of kernel runs alone at a few general sizes, which are those of no network. With one thread the
clock is the processor time of the thread, so that other processes disturb less.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ir import ops
from ..kernels.pooling import max_pool2d
from ..system.machine import name_of
from ..system.timing import without_gc
from .curves import Curve, ProductTimes
from .profile import LARGE, LEAST_S, Profile

MODULE_BYTES = 4096
"""About what the Python objects of a module take, all in all."""
BLOCK_S = 2e-4
BLOCKS = 8
ROWS = (1, 2, 4, 16, 48, 64, 256)
WIDTHS = (32, 64, 128, 256, 512, 1024)
NARROW, NARROW_WIDTHS = 8, (32, 128, 512)
"""The outputs of narrow matrices, and their inputs."""
ELEMENTS = (1, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 21)
BYTES = (1 << 19, 1 << 20, 1 << 22, 3 << 22, 1 << 24, 3 << 23, 1 << 25, 1 << 26, 1 << 27)
COLD = 256
"""The rows and columns of the matrices that are read in turn."""
CHANNELS = (4, 16, 64, 128)
PLACES = ((1, 4), (1, 8), (1, 16), (4, 32))
"""Samples and the side of an image, for convolutions."""
LARGE_PLACES, LARGE_CHANNELS = (16, 48), (16, 64)
"""The same for images that no cache holds, and their channels."""
SMALL_PLACES, MOST_CHANNELS = ((1, 4), (1, 8)), 512
"""The same for convolutions with large weights."""
READ_CHANNELS, READ_SIDES = 256, (4, 8, 16)
"""The channels of convolutions whose weights are read from memory, and the sides of their images."""
MEMBERS = 8
STEPS = 8
FRESH = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 23)
LIVE = 4
"""The results that are in memory at the same time."""
READ_ROWS = (1, 4, 16, 48)
READ_WIDTHS = {"": 512, f"{LARGE} ": 1024}
"""The widths of the matrices that are read from memory, by what precedes their kind."""
READ_BYTES = 80 << 20
"""The bytes of all matrices that are read from memory: more than a cache holds."""
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


def measure(dtype: str = "float32", progress: Callable[[str, int, int], None] | None = None) -> Profile:
    """Measures the kernel times of this machine's processor, with torch's current number of threads.

    Args:
        dtype: Of all values.
        progress: Called with (what is measured, done, total).
    """
    make = _Drawn(getattr(torch, dtype))
    starts: dict[str, float] = {}
    products: dict[str, ProductTimes] = {}
    others: dict[str, Curve] = {}
    total = len(_PRODUCTS) + len(_OTHERS) + 1
    with torch.inference_mode(), without_gc():
        for kind, sized in _PRODUCTS.items():
            if progress is not None:
                progress(kind, len(starts), total)
            count, runs = sized(make)
            found = {at: seconds(run) for at, run in runs.items()}
            # each step of a recurrent layer starts kernels of its own
            starts[kind] = start = 0.0 if kind in RECURRENT else _start(found, count)
            products[kind] = ProductTimes.through(
                {at: max((s - start) / count(at), LEAST_S) for at, s in found.items()}
            )
        for kind, listed in _OTHERS.items():
            if progress is not None:
                progress(kind, len(starts) + len(others), total)
            others[kind] = Curve.through({n: seconds(run) for n, run in listed(make).items()})
        if progress is not None:
            progress("memory", total - 1, total)
        cold, fresh = _cold(make), _fresh(make)
        reading = {
            f"{size}{kind}": _reading(make, kind, products[kind], width)
            for size, width in READ_WIDTHS.items()
            for kind in _MATRICES
        }
        for form, groups in itertools.product(("", "packed "), (1, GROUPS)):
            kind = f"{form}{'grouped ' if groups > 1 else ''}convolution"
            reading[kind] = _reading_convolutions(make, groups, packed=bool(form))
        x = make(4, 4)
        view_s = seconds(partial(aten.view.default, x, [16]))
        modules = _modules(x, starts["product"])
    return Profile(
        machine=name_of("cpu"),
        torch=torch.__version__.partition("+")[0],
        threads=torch.get_num_threads(),
        dtype=dtype,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        starts=starts,
        products=products,
        others=others,
        cold=cold,
        reading=reading,
        fresh=fresh,
        view_s=view_s,
        modules=modules,
    )


def seconds(run: Run) -> float:
    """Returns the seconds of a call: the least of a few blocks of calls. Other processes only add time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    begin = clock()
    run()
    once = max(clock() - begin, 1e-7)
    inner = max(1, round(BLOCK_S / once))
    times = []
    for _ in range(BLOCKS if once < 20 * BLOCK_S else 3):
        begin = clock()
        for _ in range(inner):
            run()
        times.append((clock() - begin) / inner)
    return min(times)


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
    return Curve.through(found)


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
    return Curve.through({total: max(s - least, 1e-15) for total, s in found.items()})


def _fresh(make: Make) -> Curve:
    """Measures what a byte of a result takes more where each result has memory of its own, by its size."""
    found: dict[float, float] = {}
    hot = 0.0
    for before, count in zip((0, *FRESH), FRESH):
        x = make(count)
        once = seconds(partial(aten.add.Tensor, x, x))
        # the memory of a very large result is always new
        hot = once if count < FRESH[-1] else hot * count / before

        def run(x: Tensor = x) -> None:
            live = [x] * LIVE
            for _ in range(3 * LIVE):
                live = [*live[1:], aten.add.Tensor(live[-1], live[0])]

        found[x.nbytes] = max((seconds(run) / (3 * LIVE) - hot) / x.nbytes, 1e-15)
    return Curve.through(found)


def _reading(make: Make, kind: str, times: ProductTimes, width: int) -> Curve:
    """Measures what a byte of weights takes more from memory, by the rows of a product.

    torch reads large matrices in an order that processors foresee.
    """
    count = READ_BYTES // (4 * width * width)
    matrices = make(count, width, width)
    found: dict[float, float] = {}
    for n in READ_ROWS:
        once = seconds(_MATRICES[kind](make(count, n, width), matrices, make(count, width))) / count
        found[float(n)] = max(1e-15, (once - times.at(n, width * width)) / matrices[0].nbytes)
    return Curve.through(found)


def _reading_convolutions(make: Make, groups: int, *, packed: bool) -> Curve:
    """Measures what a byte of a convolution's weight takes more from memory, by the places of the result."""
    found: dict[float, float] = {}
    shape = (groups * READ_CHANNELS, READ_CHANNELS, 3, 3)
    count, b = max(2, READ_BYTES // (4 * math.prod(shape))), make(shape[0])
    for side in READ_SIDES:
        x = make(1, shape[0], side, side)
        x = _last(x) if packed else x
        runs = [_conv_run(x, make(*shape), b, [1, 1], groups, packed) for _ in range(count)]
        cold = seconds(lambda runs=runs: [run() for run in runs]) / count  # type: ignore[misc]
        found[float(side * side)] = max(1e-15, (cold - seconds(runs[0])) / (4 * math.prod(shape)))
    return Curve.through(found)


Sized = tuple[Callable[[tuple[float, float]], float], dict[tuple[float, float], Run]]
Sizes = Callable[[Make], Sized]


def _one(_: tuple[float, float]) -> float:
    return 1.0


def _members(at: tuple[float, float]) -> float:
    """Returns a number of members whose matrices a cache holds."""
    return float(MEMBERS if at[1] < WIDTHS[-2] ** 2 else MEMBERS // 4)


def _matrices(kind: str, outputs: int = 0) -> Sizes:
    """Returns products of rows with matrices of one kind: square, or with few outputs."""
    run, count = _MATRICES[kind], _one if kind in ("product", "inner product") else _members
    rows = ROWS[:1] if kind == "streamed product" else ROWS

    def sized(make: Make) -> Sized:
        runs: dict[tuple[float, float], Run] = {}
        for n, d in itertools.product(rows, NARROW_WIDTHS if outputs else WIDTHS):
            lead, shape = int(count((n, d * (outputs or d)))), (d, outputs or d)
            w = make(lead, *(shape if kind in ("turned product", "streamed product") else shape[::-1]))
            runs[n, d * shape[1]] = run(make(lead, n, d), w, make(lead, shape[1]))
        return count, runs

    return sized


def _convolution(
    make: Make, groups: int = 1, window: int = 3, packed: bool = False, last: bool = False
) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    pad = [window // 2] * 2
    sizes = [*itertools.product(PLACES, CHANNELS)]
    sizes += [(LARGE_PLACES, channels) for channels in LARGE_CHANNELS if groups == 1]
    sizes += [(places, MOST_CHANNELS) for places in SMALL_PLACES]
    for (samples, side), channels in sizes:
        x = make(samples, groups * channels, side, side)
        if last or packed:
            x = x.contiguous(memory_format=torch.channels_last)
        w, b = make(groups * channels, channels, window, window), make(groups * channels)
        runs[samples * side * side, (window * channels) ** 2] = _conv_run(x, w, b, pad, groups, packed)
    return (_one if groups == 1 else lambda _: float(groups)), runs


def _depthwise(make: Make, packed: bool = False, last: bool = False) -> Sized:
    runs: dict[tuple[float, float], Run] = {}
    for (samples, side), window in itertools.product((*PLACES, LARGE_PLACES), (3, 7)):
        x, w, b = make(samples, 64, side, side), make(64, 1, window, window), make(64)
        if last or packed:
            x = x.contiguous(memory_format=torch.channels_last)
        runs[samples * side * side, window * window] = _conv_run(x, w, b, [window // 2] * 2, 64, packed)
    return lambda _: 64.0, runs


def _conv_run(x: Tensor, w: Tensor, b: Tensor, pad: list[int], groups: int, packed: bool) -> Run:
    one = [1, 1]
    if packed:
        p = own.pack_convolution.default(w, one, pad, one, groups, list(x.shape))
        return partial(own.convolution.default, x, p, b, one, pad, one, groups)
    return partial(aten.convolution.default, x, w, b, one, pad, one, False, [0, 0], groups)


def _convolutions() -> dict[str, Sizes]:
    """Returns convolutions by kind: of one group or several, over 3x3 or 1x1 places, in torch's own memory
    order or with neighbouring channels, with plain or packed weights.
    """
    found: dict[str, Sizes] = {}
    forms: dict[str, dict[str, Any]] = {"": {}, "channels-last ": {"last": True}, "packed ": {"packed": True}}
    for form, options in forms.items():
        found[f"{form}depthwise convolution"] = partial(_depthwise, **options)
        for grouped, groups in (("", 1), ("grouped ", GROUPS)):
            for small, window in (("", 3), ("1x1 ", 1)):
                kind = f"{form}{grouped}{small}convolution"
                found[kind] = partial(_convolution, groups=groups, window=window, **options)
    return found


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
        for rows, width in itertools.product((1, 8, 64), (32, 128)):
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


def _inner_products(x: Tensor, w: list[Tensor], b: Tensor) -> Run:
    given = list(zip(x, w, b))
    return lambda: [own.inner_product.default(*one) for one in given]


_MATRICES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Run]] = {
    "product": lambda x, w, b: lambda: [aten.addmm.default(c, y, v.t()) for y, v, c in zip(x, w, b)],
    "batched product": lambda x, w, b: partial(aten.baddbmm.default, b[:, None], x, w.transpose(1, 2)),
    "turned product": lambda x, w, b: partial(aten.baddbmm.default, b[:, None], x, w),
    "packed product": lambda x, w, b: partial(
        own.linear.default, x, own.pack_linear.default(w, x.shape[1]), b
    ),
    "inner product": lambda x, w, b: _inner_products(x, own.pack_inner_products.default(w), b),
    "member product": lambda x, w, b: partial(own.member_products.default, x, w, b),
    "streamed product": lambda x, w, b: partial(own.streamed_linear.default, x[:, :1], w, b),
}
"""Products of all members with square matrices. Each takes x, w and b."""
_PRODUCTS: Mapping[str, Sizes] = {
    **{kind: _matrices(kind) for kind in _MATRICES},
    **{f"narrow {kind}": _matrices(kind, NARROW) for kind in _MATRICES},
    **_convolutions(),
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


def _pools(order: Callable[[Tensor], Tensor], make: Make) -> dict[float, Run]:
    """Returns pools of images in a memory order. The op takes slices from 16 or 64 of them on."""
    runs: dict[float, Run] = {}
    for samples in (1, 15, 16, 63, 64, 256):
        runs[1024.0 * samples] = partial(max_pool2d, order(make(samples, 16, 16, 16)), [2, 2], [2, 2])
    runs[4.0] = partial(max_pool2d, order(make(1, 4, 2, 2)), [2, 2], [2, 2])
    return runs


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _strided(x: Tensor) -> Tensor:
    """Returns images as a convolution of groups leaves those of members: all channels are neighbours."""
    together = _last(x.flatten(0, 1)[None])
    strided: Tensor = aten.unflatten.int(together, 1, list(x.shape[:2]))[0]
    return strided


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
    "joining": _over_elements(lambda x: aten.cat.default([x, x])),
    "copy": _over_elements(lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format)),
    "gather": _over_elements(_gathered),
    "pool": partial(_pools, Tensor.contiguous),
    "channels-last pool": partial(_pools, _last),
    "strided pool": partial(_pools, _strided),
    "batch norm": _batch_norms,
}
