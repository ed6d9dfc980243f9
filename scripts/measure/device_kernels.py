"""Times the ops that the cost model of a device predicts, beside what it predicts from the data sheet.

    python scripts/measure/device_kernels.py
    python scripts/measure/device_kernels.py --device cpu --scale 16

A row is one op at one size and dtype. On a CUDA device its time is that of a replay of a CUDA graph with
`RUNS` calls, over `RUNS`: the device's time, without the host. Each call has operands of its own, which are
together larger than the device's second-level cache where one call's are not small. `predicted_us` is the
device's time by `widepack.kernel_times.cuda`. The last row is the time in which the host starts a kernel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from runner import parser, run
from torch import Tensor

import widepack  # noqa: F401  defines its ops
from widepack.ir import ops
from widepack.kernel_times.cuda import CudaModel, call_time
from widepack.runtime.meta_values import metas, run_on_meta
from widepack.system.devices import DEVICES, Device
from widepack.system.timing import once

RUNS, SAMPLES = 20, 7
CACHE_BYTES = 2**27
MEMBERS = (8, 32, 100)
Case = tuple[str, tuple[Any, ...]]


def cases(scale: int) -> Iterator[tuple[str, Case]]:
    """Yields the key and the op, the function and the shapes (or options) of each row.

    scale: what the sizes are divided by, for a rehearsal.
    """

    def size(value: int) -> int:
        return max(1, value // scale)

    for n in MEMBERS:
        for rows in (1, 32, 512):
            for width in (64, 768, 2048):
                shapes = (n, size(rows), size(width)), (n, size(width), size(width))
                yield f"bmm {n} x {rows} x {width}", ("aten.bmm.default", shapes)
    for rows, width in ((32, 768), (4096, 768), (4096, 4096), (8192, 8192)):
        shapes_of_two = (size(rows), size(width)), (size(width), size(width))
        yield f"mm {rows} x {width}", ("aten.mm.default", shapes_of_two)
    for count in (2**14, 2**20, 2**24, 2**27):
        yield f"add {count}", ("aten.add.Tensor", ((size(count),), (size(count),)))
        yield f"gelu {count}", ("aten.gelu.default", ((size(count),),))
    for rows, width in ((256, 768), (8192, 768), (65536, 768)):
        x = (size(rows), size(width))
        norm = (x, [x[1]], (x[1],), (x[1],), 1e-5)
        yield f"layer_norm {rows} x {width}", ("aten.native_layer_norm.default", norm)
        yield f"softmax {rows} x {width}", ("aten._softmax.default", (x, -1, False))
    for n, batch, channels, side in ((8, 8, 64, 56), (32, 1, 64, 28), (32, 32, 64, 28), (8, 1, 256, 14)):
        c, s = size(channels), max(3, side // scale)
        options, where = ([1, 1], [1, 1], [1, 1]), f"{batch} x {channels} x {side}"
        grouped = ((batch, n * c, s, s), (n * c, c, 3, 3), (n * c,), *options, n)
        plain = ((batch, c, s, s), (c, c, 3, 3), (c,), *options, 1)
        own = ((n, batch, c, s, s), (n, c, c, 3, 3), (n, c), *options, 1)
        yield f"grouped conv {n}: {where}", ("aten.conv2d.default", grouped)
        yield f"conv: {where}", ("aten.conv2d.default", plain)
        yield f"member_convs {n}: {where}", ("widepack.member_convs.default", own)


def drawn(given: tuple[Any, ...], device: str, dtype: torch.dtype) -> list[Any]:
    """Returns arguments: each tuple of sizes becomes a random tensor."""
    return [torch.randn(v, device=device, dtype=dtype) if isinstance(v, tuple) else v for v in given]


def device_seconds(run: Callable[..., Any], sets: list[list[Any]], device: str) -> list[float]:
    """Returns the seconds of one call, for each of several samples. sets: the arguments of the calls."""

    def calls() -> None:
        for i in range(RUNS):
            run(*sets[i % len(sets)])

    calls()
    if not device.startswith("cuda"):
        return [once(calls) / RUNS for _ in range(3)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    graph.replay()
    samples = []
    for _ in range(SAMPLES):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e-3 * begin.elapsed_time(end) / RUNS)
    return samples


def row_of(case: Case, device: str, dtype: torch.dtype, model: CudaModel) -> dict[str, Any]:
    """Returns the measured and the predicted time of an op."""
    op, given = case
    first = drawn(given, device, dtype)
    bytes_ = sum(v.nbytes for v in first if isinstance(v, Tensor))
    count = 1 if bytes_ > CACHE_BYTES else min(RUNS, CACHE_BYTES // bytes_ + 1)
    sets = [first, *(drawn(given, device, dtype) for _ in range(count - 1))]
    samples = device_seconds(ops.resolve(op), sets, device)
    meta = metas(first)
    predicted = call_time(op, meta, {}, run_on_meta(op, meta, {}), model)
    return {
        "op": op,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": [list(v) for v in given if isinstance(v, tuple)],
        "us": 1e6 * statistics.median(samples),
        "spread": (max(samples) - min(samples)) / statistics.median(samples),
        "predicted_us": 1e6 * predicted.device,
        "predicted_kernels": predicted.kernels,
    }


def device_of(device: str) -> Device:
    """Returns the data sheet of a device; the H100's if it is not listed."""
    if not device.startswith("cuda"):
        return DEVICES["h100"]
    model = torch.cuda.get_device_name(device).split()[1]
    return next((d for d in DEVICES.values() if d.name.split()[1] == model), DEVICES["h100"])


def start_us(device: str) -> float:
    """Returns the microseconds of the host for each kernel of a loop of small ones."""
    x, count = torch.ones(8, device=device), 2000
    wait: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    found = []
    for _ in range(SAMPLES):
        wait()
        began = time.perf_counter()
        for _ in range(count):
            torch.add(x, x)
        found.append((time.perf_counter() - began) / count)
        wait()
    return 1e6 * statistics.median(found)


def main() -> int:
    options = parser(__doc__, "device/kernels.json", device="cuda")
    options.add_argument("--scale", type=int, default=1, help="what sizes are divided by (default: 1)")
    given = options.parse_args()
    model = CudaModel(device_of(given.device), tf32_products=False, tf32_convolutions=False)

    def rows() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        yield "start", lambda: {"op": "add", "host_us": start_us(given.device)}
        for dtype in (torch.float32, torch.bfloat16):
            for name, case in cases(given.scale):
                key = f"{name}, {str(dtype).removeprefix('torch.')}"
                yield key, partial(row_of, case, given.device, dtype, model)
                if given.device.startswith("cuda"):
                    torch.cuda.empty_cache()

    with torch.inference_mode():
        return run(given, rows(), predicted_for=model.limits.name)


if __name__ == "__main__":
    sys.exit(main())
