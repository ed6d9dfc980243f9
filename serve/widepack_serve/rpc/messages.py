"""Makes the classes of the messages that `schema.py` describes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ..errors import RequestError
from ..protocol.growing import Body
from .schema import MESSAGES, PACKAGE

_FIELD = re.compile(
    r"(?:oneof (?P<oneof>\w+): )?"
    r"(?:(?P<repeated>repeated )?(?P<type>\w+)|map<string, (?P<values>\w+)>) "
    r"(?P<name>\w+) = (?P<number>\d+)"
)
_ENTRY = "Entry"


def message_classes(messages: Mapping[str, Sequence[str]], package: str) -> dict[str, Any]:
    """Returns the classes of messages by name. They are in a pool of their own, so that other packages of the
    process can define messages of these names.

    Args:
        messages: The fields of each message, as `schema.MESSAGES` has them. A message comes after the one in
            which it is defined.
        package: The name of the package.
    """
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    made: dict[str, DescriptorProto] = {}
    for name in messages:
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, fields in messages.items():
        for field in fields:
            _add_field(name, field, made, package)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _add_field(name: str, text: str, made: Mapping[str, DescriptorProto], package: str) -> None:
    """Adds a field to a message. made: all messages by name. Raises: ValueError if it cannot be read."""
    found = _FIELD.fullmatch(text)
    if found is None:
        raise ValueError(f"{name}: {text!r} is not a field")
    message = made[name]
    field = message.field.add(name=found["name"], number=int(found["number"]))
    field.label = FieldDescriptorProto.LABEL_REPEATED if not found["type"] or found["repeated"] else _ONE
    if found["oneof"]:
        names = [o.name for o in message.oneof_decl]
        if found["oneof"] not in names:
            message.oneof_decl.add(name=found["oneof"])
            names.append(found["oneof"])
        field.oneof_index = names.index(found["oneof"])
    if found["type"] in _SCALARS:
        field.type = _SCALARS[found["type"]]
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    if found["values"]:
        entry = found["name"].title().replace("_", "") + _ENTRY
        _add_entry(message.nested_type.add(name=entry), f".{package}.{found['values']}")
        field.type_name = f".{package}.{name}.{entry}"
    else:
        inner = f"{name}.{found['type']}"
        field.type_name = f".{package}.{inner if inner in made else found['type']}"


def _add_entry(entry: DescriptorProto, values: str) -> None:
    """Describes the entry of a map, which protobuf carries as a message with a key and a value."""
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_ONE, type=FieldDescriptorProto.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=_ONE, type=FieldDescriptorProto.TYPE_MESSAGE, type_name=values
    )


_ONE = FieldDescriptorProto.LABEL_OPTIONAL
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}

CLASSES = message_classes(MESSAGES, PACKAGE)
"""The class of each message, by its name in the schema."""


def parsed(name: str, data: Body) -> Any:
    """Returns a message of its bytes. name: in the schema. Raises: RequestError."""
    try:
        return CLASSES[name].FromString(data if isinstance(data, bytes) else memoryview(data))
    except DecodeError:
        raise RequestError(f"the message is not a {name} of the protocol") from None
