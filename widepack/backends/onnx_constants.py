"""Numbers in an ONNX model: what a value always is, and values that always are some numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def numbers(value: Any) -> list[Any] | None:
    """What a value always is, flat; None where that is not known."""
    import onnx_ir

    held = onnx_ir.convenience.get_const_tensor(value) if value is not None else None
    return None if held is None else list(held.numpy().ravel().tolist())


def number(value: Any) -> int | None:
    """The one number that a value always is; None where it is none."""
    found = numbers(value)
    return int(found[0]) if found is not None and len(found) == 1 else None


def whole(node: Any, name: str) -> int:
    """An attribute that is a whole number, 0 where it is not given."""
    return int(node.attributes[name].value) if name in node.attributes else 0


def constant(model: Any, name: str, sizes: Sequence[int]) -> Any:
    """A value of a model that is always these sizes. name: made longer where another initialiser has it, which would be lost."""
    import onnx_ir

    while name in model.graph.initializers:
        name += "_"
    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(list(sizes), dtype=onnx_ir.DataType.INT64))
    value.shape, value.dtype = onnx_ir.Shape([len(sizes)]), onnx_ir.DataType.INT64
    model.graph.initializers[name] = value
    return value
