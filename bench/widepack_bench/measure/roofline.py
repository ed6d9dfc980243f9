"""Computes the roofline: counts the work of a wide program's nodes, and measures the limits of this machine.

| what | how |
|---|---|
| FLOP | `torch.utils.flop_counter` on fake tensors; recurrent layers: 2 for each weight, step, sample |
| least bytes | what the program must read or write: weights after the prologue, inputs, outputs |
| moved bytes | what every node that is no view reads and writes, each by itself |
| memory ceiling | the best rate of a sum, a matrix-vector product and a copy over the least bytes |
| ceiling of arithmetic | the best rate of a square product in the program's dtype |

A loop region counts once for each member. Limits are measured with the run's threads, in the same
process.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from widepack.ir import ops
from widepack.ir.encoding import decode
from widepack.ir.fake_values import CPU, Fakes, member_slice, replay
from widepack.ir.kinds import weights_only
from widepack.ir.limits import tensors as tensors_in
from widepack.ir.tensor_type import dtype_in
from widepack.ir.torch_internals import memory_id
from widepack.runtime.flop_formulas import kernel_formula, own_formula
from widepack.runtime.kernel_count import is_view
from widepack.runtime.prologue import split
from widepack_artifacts.program import Node, Program, refs, substitute

from .figures import Ceilings, Roof, Work
from .loading import entry_of

SECONDS = 0.15  # Seconds of measuring each limit.


def roof_of(
    ens: Any, entry: str, pattern: str, sizes: Mapping[str, int], median_ms: float, device: str
) -> Roof:
    """Compares a loaded model's call at these sizes with this machine's limits."""
    program = entry_of(ens, entry).programs.for_sizes(pattern, sizes).program
    done = work(program, sizes)
    return Roof(done, ceilings(done.least_bytes, _dtype(program), device, torch.get_num_threads()), median_ms)


def work(program: Program, sizes: Mapping[str, int]) -> Work:
    """Counts the work of one call of a wide program without its prologue. sizes: of every named dim."""
    fakes = Fakes(sizes, static=True)
    values = replay(program, fakes)
    early = weights_only(program)
    total = _Total()
    for node in program.nodes:
        if node.name not in early:
            total.add(node, values, fakes, program.members)
    touched = [values[name] for name in split(program).names] + [values[s.name] for s in program.inputs]
    touched += [values[r] for o in program.outputs for r in refs(o.value)]
    return Work(total.flop, sum(map(_bytes, touched)), total.moved, total.kernels)


class _Total:
    """Sums the work of a program's nodes."""

    def __init__(self) -> None:
        self.flop = self.moved = self.kernels = 0

    def add(self, node: Node, values: Mapping[str, Any], fakes: Fakes, members: int) -> None:
        if node.body is not None:
            inner = _Total()
            args = decode(substitute(node.args, values.__getitem__), CPU)
            one = {
                s.name: member_slice(fakes, a, s.kind, 0) for s, a in zip(node.body.inputs, args, strict=True)
            }
            body_values = replay(node.body, fakes, one)
            for body_node in node.body.nodes:
                inner.add(body_node, body_values, fakes, members)
            self.flop += inner.flop * members
            self.moved += inner.moved * members
            self.kernels += inner.kernels * members
            return
        op = ops.resolve(node.op)
        if not isinstance(op, torch._ops.OpOverload) or is_view(op) or _aliases(node, values):
            return
        self.kernels += 1
        self.moved += _bytes(values[node.name]) + sum(
            _bytes(values[r]) for r in set(refs((node.args, node.kwargs)))
        )
        self.flop += _flop(node, values, fakes)


def _aliases(node: Node, values: Mapping[str, Any]) -> bool:
    """Whether an op that may copy (`reshape`, `flatten`) returned a view."""
    made = values[node.name]
    if not isinstance(made, Tensor):
        return not isinstance(made, (tuple, list))
    if node.op.split(".")[1] not in ("reshape", "flatten", "contiguous", "expand_as", "unflatten"):
        return False
    read = [values[r] for r in refs(node.args)]
    return any(isinstance(v, Tensor) and memory_id(v) == memory_id(made) for v in read)


def _flop(node: Node, values: Mapping[str, Any], fakes: Fakes) -> int:
    args = decode(substitute(node.args, values.__getitem__), CPU)
    kwargs = decode(substitute(node.kwargs, values.__getitem__), CPU)
    formula = own_formula(node.op)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=values[node.name]))
    if not node.op.startswith("aten."):
        return 0
    counter = _Flop()
    with fakes.on(), counter:
        ops.resolve(node.op)(*args, **kwargs)
    return counter.total


class _Flop(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Sums FLOP over the ops of composite ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = kernel_formula(func)
        if formula is None and func.namespace == "aten":
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=made))
        return made


def _bytes(value: Any) -> int:
    """Returns the bytes of a value's tensors; an expanded dim counts once."""
    total = 0
    for t in tensors_in(value):
        total += (
            math.prod(int(n) for n, step in zip(t.shape, t.stride(), strict=True) if step) * t.element_size()
        )
    return total


def _dtype(program: Program) -> torch.dtype:
    """Returns the floating dtype that most weights have."""
    dtypes = [dtype_in(s.type) for s in program.weights]
    floating = [t for t in dtypes if t in ("float32", "float64", "float16", "bfloat16")]
    return getattr(torch, max(set(floating), key=floating.count)) if floating else torch.float32


def ceilings(least_bytes: int, dtype: torch.dtype, device: str, threads: int) -> Ceilings:
    """Measures the limits of this machine. least_bytes: the size of the streamed data."""
    rounded = 1 << max(16, min(30, math.ceil(math.log2(max(least_bytes, 1)))))
    return Ceilings(_stream(rounded, device, threads), _gemm(dtype, device, threads))


@functools.cache
def _stream(size: int, device: str, threads: int) -> float:
    """Measures bytes for each second over `size` bytes of float32."""
    count = size // 4
    width = 1 << (count.bit_length() // 2)
    data = torch.ones(count // width, width, device=device)
    vector, other = torch.ones(width, device=device), torch.empty_like(data[: max(1, data.shape[0] // 2)])
    half = data[: other.shape[0]]
    product = torch.empty(data.shape[0], device=device)
    runs: list[tuple[Callable[[], object], int]] = [
        (lambda: data.sum(), data.nbytes),
        (lambda: torch.mv(data, vector, out=product), data.nbytes),
        (lambda: other.copy_(half), half.nbytes + other.nbytes),
    ]
    return max(count / _shortest(run, device) for run, count in runs)


@functools.cache
def _gemm(dtype: torch.dtype, device: str, threads: int) -> float:
    """Measures FLOP for each second of the best square product."""
    best = 0.0
    for n in (256, 512, 1024) if not device.startswith("cuda") else (2048, 4096, 8192):
        a, b, c = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(3))
        best = max(best, 2 * n**3 / _shortest(functools.partial(torch.mm, a, b, out=c), device))
    return best


def _shortest(run: Callable[[], object], device: str) -> float:
    """Returns the seconds of the fastest call in `SECONDS`, at least three calls."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    run()
    wait()
    shortest, begin, count = math.inf, time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        run()
        wait()
        shortest = min(shortest, time.perf_counter() - start)
        count += 1
    return shortest
