"""Finds the coarsest dtype that each output of a program is computed through."""

from __future__ import annotations

import torch

from widepack_artifacts.program import Program, refs

from ..ir.tensor_type import dtype_in, tensor_type
from ..spec.dtypes import dtype_of


def coarsest(program: Program) -> list[float]:
    """Returns for each output the largest eps of the floating dtypes that it is computed through.

    A cast back to float32 does not restore what was rounded. Integers and masks count 0: a decision is no
    rounding. Float64 may decide otherwise there, and then float64 is no reference.
    """
    found: dict[str, float] = {s.name: _eps(s.type) for s in (*program.weights, *program.inputs)}
    for node in program.nodes:
        decided = (dtype_in(node.out) or node.out).startswith(("int", "uint", "bool"))
        read = [found[r] for r in refs((node.args, node.kwargs))]
        found[node.name] = 0.0 if decided else max([_eps(node.out), *read])
    return [max((found[r] for r in refs(o.value)), default=0.0) for o in program.outputs]


def _eps(type_: str) -> float:
    """Returns the eps of a type text; 0 if it is not floating, or is of several values, each of which is a
    node.
    """
    tensor = tensor_type(type_)
    return torch.finfo(dtype_of(tensor.dtype)).eps if tensor is not None and tensor.is_rounded else 0.0
