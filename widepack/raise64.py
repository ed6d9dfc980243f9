"""A member program raised to float64: the truth that a wide program is compared with.

Weights and inputs in float64 are not enough: a program holds dtypes of its own (`zeros(dtype=float32)`, a norm's float32 island). Every floating dtype in it
becomes float64, every complex one complex128.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Program, Tag

_UP = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex32": "complex128", "complex64": "complex128"}


def raise_program(program: Program) -> Program:
    """The program with every floating dtype in it raised."""

    def up(value: Any) -> Any:
        if isinstance(value, Tag):
            return Tag("dtype", _UP.get(value.name, value.name)) if value.kind == "dtype" else value
        if isinstance(value, (list, tuple)):
            return type(value)(up(v) for v in value)
        return value

    return replace(program, nodes=tuple(replace(n, args=up(n.args), kwargs={k: up(v) for k, v in n.kwargs.items()}) for n in program.nodes))


def raise_value(value: Any) -> Any:
    """A tensor in float64 or complex128 if it holds such numbers; lists item by item."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value
    return [raise_value(v) for v in value] if isinstance(value, list) else value


@contextmanager
def double_by_default() -> Iterator[None]:
    """Where an op makes floats of integers it takes the default dtype: float64 here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
