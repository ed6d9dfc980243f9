"""Reads and writes the parts of an ONNX file, in the wire format of protocol buffers.

A session needs onnxruntime alone: the package onnx is not imported. A message is a list of fields, each a
number and a value: an int for a varint, bytes for a text or a message. The numbers are those of `onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

Value = int | bytes
Field = tuple[int, Value]

MODEL_GRAPH, MODEL_METADATA = 7, 14
GRAPH_NODES, GRAPH_INITIALIZERS, GRAPH_INPUTS, GRAPH_OUTPUTS, GRAPH_VALUES = 1, 5, 11, 12, 13
NODE_INPUTS, NODE_OUTPUTS, NODE_NAME, NODE_OP, NODE_ATTRIBUTES, NODE_DOMAIN = 1, 2, 3, 4, 5, 7
NAME = 1
"""The name of a value, an attribute, or of the domain of an opset."""
TENSOR_NAME = 8
_INT, _GRAPH, _INTS, _GRAPHS, _TYPE = 3, 6, 8, 11, 20
_DIMS, _DTYPE, _RAW, _EXTERNAL, _LOCATION = 1, 2, 9, 13, 14
_INT64, _BYTES_EACH = 7, 8
_MEMORY = "memory"  # the file of tensors that a session is given


def read(data: bytes) -> list[Field]:
    """Reads the fields of a message, in their order. Raises: ValueError for damaged data."""
    found: list[Field] = []
    for number, kind, value in _fields(data):
        if kind not in (0, 2):
            raise ValueError(f"a field of an ONNX graph has the wire type {kind}")
        found.append((number, value))
    return found


_FIXED = {1: 8, 5: 4}
"""The bytes of a value of a wire type that has always as many."""


def _fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    """Yields the number, the wire type and the value of each field."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"a field of an ONNX graph has the wire type {kind}")
        if at + size > len(data):
            raise ValueError("the message ends within a field")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the message ends within a number")


def write(fields: Iterable[tuple[int, Value | str]]) -> bytes:
    """Writes a message."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_number(number << 3), _number(value)]
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += [_number(number << 3 | 2), _number(len(data)), data]
    return b"".join(parts)


def _number(value: int) -> bytes:
    value &= 2**64 - 1  # a negative number has ten bytes
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def texts(fields: Iterable[Field], number: int) -> list[str]:
    """The texts of the fields of a number."""
    return [v.decode() for n, v in fields if n == number and isinstance(v, bytes)]


def text(fields: Iterable[Field], number: int) -> str:
    """The text of the field of a number; empty if there is none."""
    return next(iter(texts(fields, number)), "")


def messages(fields: Iterable[Field], number: int) -> list[bytes]:
    """The messages of the fields of a number."""
    return [v for n, v in fields if n == number and isinstance(v, bytes)]


def renamed(value: bytes, name: str) -> bytes:
    """The description of an input, or of an output, under another name."""
    return write([(NAME, name), *((n, v) for n, v in read(value) if n != NAME)])


def names_read(node: Iterable[Field]) -> list[str]:
    """The values that a node reads, also in the graphs that it has as attributes."""
    found = texts(node, NODE_INPUTS)
    for data in messages(node, NODE_ATTRIBUTES):
        for number, _, value in _fields(data):
            if number in (_GRAPH, _GRAPHS) and isinstance(value, bytes):
                graph = read(value)
                for inner in messages(graph, GRAPH_NODES):
                    found += names_read(read(inner))
                found += [text(read(v), NAME) for v in messages(graph, GRAPH_OUTPUTS)]
    return found


def attribute(fields: Iterable[Field], name: str) -> list[int] | None:
    """The whole numbers of a node's attribute; None if the node has no such attribute."""
    for found in map(read, messages(fields, NODE_ATTRIBUTES)):
        if text(found, NAME) == name:
            listed: list[int] = []
            for number, value in found:
                if number == _INTS:  # one field each, or all in one
                    listed += [value] if isinstance(value, int) else _packed(value)
            return listed
    return None


def _packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def node(
    op: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    domain: str = "",
    **attributes: int | Sequence[int],
) -> bytes:
    """A node. attributes: whole numbers, or lists of them."""
    fields: list[tuple[int, Value | str]] = [(NODE_INPUTS, i) for i in inputs]
    fields += [(NODE_OUTPUTS, o) for o in outputs]
    fields += [(NODE_NAME, outputs[0]), (NODE_OP, op)]
    fields += [(NODE_DOMAIN, domain)] if domain else []
    for name, value in attributes.items():
        if isinstance(value, int):
            fields.append((NODE_ATTRIBUTES, write([(NAME, name), (_INT, value), (_TYPE, 2)])))
        else:
            numbers = [(_INTS, v) for v in value]
            fields.append((NODE_ATTRIBUTES, write([(NAME, name), *numbers, (_TYPE, 7)])))
    return write(fields)


def numbers(values: Sequence[int] | int, name: str) -> bytes:
    """A constant of whole numbers: of one dim, or of none for a single number."""
    listed = [values] if isinstance(values, int) else values
    raw = b"".join(v.to_bytes(_BYTES_EACH, "little", signed=True) for v in listed)
    dims = [] if isinstance(values, int) else [(_DIMS, len(values))]
    return write([*dims, (_DTYPE, _INT64), (TENSOR_NAME, name), (_RAW, raw)])


def from_memory(name: str, dtype: int, dims: Sequence[int], size: int) -> bytes:
    """A tensor that a session is given. dtype: as a number of ONNX. size: in bytes."""
    place: Mapping[str, str] = {"location": _MEMORY, "offset": "0", "length": str(size)}
    entries = [(_EXTERNAL, write([(1, key), (2, value)])) for key, value in place.items()]
    return write(
        [*((_DIMS, d) for d in dims), (_DTYPE, dtype), (TENSOR_NAME, name), *entries, (_LOCATION, 1)]
    )
