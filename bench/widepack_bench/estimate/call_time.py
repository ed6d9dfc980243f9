"""Estimates the time of a call: of a wide program, and of the members one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from widepack.costs.amounts import kernels_at
from widepack.ir import ops
from widepack.ir.kinds import weights_only
from widepack.runtime.kernel_count import is_view
from widepack_artifacts.program import Program

from .kernel_work import KernelWork, work_of
from .rates import MODULE_BYTES, Rates


def wide_seconds(program: Program, sizes: Mapping[str, int], rates: Rates, *, between: float = 0.0) -> float:
    """Estimates a call of a wide program on the backend `eager`.

    Args:
        program: The wide program, with its prologue.
        sizes: The size of each named dim.
        rates: Of the machine.
        between: The bytes of other weights that are read between two calls.

    Returns:
        Seconds.

    Raises:
        RuntimeError: A size depends on values, or a guard does not hold at these sizes.
    """
    works = [work_of(k) for k in kernels_at(program, sizes)]
    views = _views(program, weights_only(program))
    return rates.call_s + views * rates.view_s + rates.kernels(works, _weight_bytes(works) + between)


def compiled_seconds(program: Program, sizes: Mapping[str, int], rates: Rates) -> float:
    """Estimates a call of a wide program on a backend that compiles it, from above.

    A compiler joins kernels that are no products, so that these need no start of their own. What it saves of
    their memory traffic is left out.

    Args:
        program, sizes, rates: As `wide_seconds` takes them.

    Raises:
        RuntimeError: As `wide_seconds`.
    """
    works = [work_of(k) for k in kernels_at(program, sizes)]
    streamed = _weight_bytes(works)
    total = rates.call_s
    for work in works:
        started = 0.0 if work.count else work.times * rates.others_start(work)
        total += max(0.0, rates.kernel(work, streamed) - started)
    return total


def loop_seconds(
    programs: Sequence[Program], sizes: Mapping[str, int], rates: Rates, *, modules: int
) -> float:
    """Estimates a call of the members' own modules, one after the other.

    Args:
        programs: The program of each member.
        sizes: The size of each named dim.
        rates: Of the machine.
        modules: The number of modules that a member calls.

    Returns:
        Seconds.

    Raises:
        RuntimeError: A size depends on values, or a guard does not hold at these sizes.
    """
    distinct = {id(p): p for p in programs}
    works = {k: [work_of(n) for n in kernels_at(p, sizes, prologue=False)] for k, p in distinct.items()}
    streamed = sum(_weight_bytes(works[id(p)]) for p in programs)
    one = rates.modules.at(streamed + len(programs) * modules * MODULE_BYTES)
    once = {
        k: modules * one + _views(p, ()) * rates.view_s + rates.kernels(works[k], streamed)
        for k, p in distinct.items()
    }
    return sum(once[id(p)] for p in programs)


def weight_bytes(program: Program, sizes: Mapping[str, int]) -> float:
    """Returns the bytes of weights that a call of a wide program reads.

    Args:
        program, sizes: As `wide_seconds` takes them.

    Raises:
        RuntimeError: As `wide_seconds`.
    """
    return _weight_bytes([work_of(k) for k in kernels_at(program, sizes)])


def large_results(program: Program, sizes: Mapping[str, int], least: int) -> float:
    """Returns the bytes of all results of kernels that have at least `least` bytes.

    Args:
        program, sizes: As `wide_seconds` takes them.
        least: Bytes.

    Raises:
        RuntimeError: As `wide_seconds`.
    """
    found = 0.0
    for kernel in kernels_at(program, sizes):
        written = float(sum(kernel.costs.get("acts_written", [0])))
        found += kernel.times * written if written >= least else 0.0
    return found


def _weight_bytes(works: Sequence[KernelWork]) -> float:
    return sum(w.weight_bytes * w.times for w in works)


def _views(program: Program, early: Sequence[str] | set[str]) -> int:
    """Returns how many views a call of a program makes."""
    count = 0
    for node in program.nodes:
        if node.body is not None:
            count += program.members * _views(node.body, ())
        elif node.name not in early and node.op.startswith("aten.") and is_view(ops.resolve(node.op)):
            count += 1
    return count
