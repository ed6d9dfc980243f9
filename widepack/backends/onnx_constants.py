"""Reads and adds constants of an ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def numbers(value: Any) -> list[Any] | None:
    """The numbers of a constant, flat; None for a value that is not constant."""
    import onnx_ir

    tensor = onnx_ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else list(tensor.numpy().ravel().tolist())


def number(value: Any) -> int | None:
    """The number of a constant of one number; None for any other value."""
    found = numbers(value)
    return int(found[0]) if found is not None and len(found) == 1 else None


def whole(node: Any, name: str) -> int:
    """An integer attribute of a node; 0 if it is absent."""
    return int(node.attributes[name].value) if name in node.attributes else 0


def constant(model: Any, name: str, sizes: Sequence[int]) -> Any:
    """Adds a constant of sizes to a model.

    name: is extended if another initialiser has it, which would be lost.
    """
    import onnx_ir

    while name in model.graph.initializers:
        name += "_"
    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(list(sizes), dtype=onnx_ir.DataType.INT64))
    value.shape, value.dtype = onnx_ir.Shape([len(sizes)]), onnx_ir.DataType.INT64
    model.graph.initializers[name] = value
    return value
