"""Counts the kernels of a program at given sizes, one by one. `derive.py` gives formulas and sums instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Kind, Program

from ..ir.fake_values import Fakes
from ..ir.kinds import weights_only
from ..spec.dtypes import dtype_of
from .amounts import main_dtype
from .expressions import World
from .recorder import Kernel, KernelRecorder, record


class _Numbers(World):
    """Elements have the bytes of their dtypes, so that no count has a symbol."""

    def element(self, dtype: torch.dtype, weight: bool) -> Any:
        return sympy.Integer(dtype.itemsize)


def kernels_at(program: Program, sizes: Mapping[str, int], *, prologue: bool = True) -> list[Kernel]:
    """Returns the kernels of one call, in order. Their counts and sizes are numbers.

    Args:
        program: A wide program, or a member program.
        sizes: The size of each named dim.
        prologue: Leave out the nodes that depend on weights alone, as a loaded model does.

    Raises:
        RuntimeError: A size depends on values, or a guard does not hold at these sizes.
    """
    fakes = Fakes(sizes, static=True)
    world = _Numbers({}, dtype_of(main_dtype(program)))
    kinds: dict[str, Kind] = {s.name: "shared" for s in (*program.weights, *program.inputs)}
    kinds |= {n.name: "shared" for n in program.nodes}
    early = weights_only(program) - {s.name for s in program.weights} if prologue else set()
    recorder = KernelRecorder(world)
    record(program, fakes, kinds, recorder, early)
    return recorder.kernels
