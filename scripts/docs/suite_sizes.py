"""Counts the sizes of the suite's networks: arguments, inputs and parameters of every row."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from widepack_bench.models.factory import factory_of
from widepack_bench.suite.rows import ROWS, Form, SuiteRow


def table() -> str:
    """Returns the sizes of all networks of the suite, one row for each."""
    lines = [
        "| network | sizes for a CPU | input of one sample | parameters of a member | in full |",
        "|---|---|---|---|---|",
    ]
    seen: set[tuple[str, str]] = set()
    for row in ROWS:
        small, full = row.forms
        line = (
            f"| {row.title} | {_arguments(row, small)} | {_input(small)} | {parameters(row, small):,} "
            f"| {parameters(row, full):,}, {_input(full)} |"
        )
        if (row.title, line) not in seen:
            seen.add((row.title, line))
            lines.append(line)
    return "\n".join(lines)


def parameters(row: SuiteRow, form: Form) -> int:
    """Returns the number of parameters of one member."""
    with torch.device("meta"):
        module: nn.Module = factory_of(row.model)(**form.options)
    return sum(p.numel() for p in module.parameters())


def _arguments(row: SuiteRow, form: Form) -> str:
    """Returns all arguments of the factory with their values: width, depth, heads and others."""
    values = {
        name: form.options.get(name, parameter.default)
        for name, parameter in inspect.signature(factory_of(row.model)).parameters.items()
    }
    return ", ".join(f"{name} {value}" for name, value in values.items() if not isinstance(value, bool))


def _input(form: Form) -> str:
    """Returns the sizes of a sample: `3x32x32` of `x=float32[B,3,32,32]`."""
    sizes = form.inputs[0].partition("[")[2].partition("]")[0].split(",")[1:]
    return "x".join(sizes)
