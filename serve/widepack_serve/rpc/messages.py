"""Makes the classes of the messages that `schema.py` describes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ..errors import RequestError
from ..protocol.growing import Body
from .schema import ENUMS, MESSAGES, METHODS, PACKAGE, SERVICE

_FIELD = re.compile(
    r"(?:oneof (?P<oneof>\w+): )?"
    r"(?:(?P<repeated>repeated )?(?P<type>\w+)|map<string, (?P<values>\w+)>) "
    r"(?P<name>\w+) = (?P<number>\d+)"
)
_ENTRY, _STREAM = "Entry", "stream "


def file_of(
    messages: Mapping[str, Sequence[str]],
    package: str,
    enums: Mapping[str, Sequence[str]] | None = None,
    services: Mapping[str, Mapping[str, tuple[str, str]]] | None = None,
) -> FileDescriptorProto:
    """Describes a package as a .proto file does.

    Args:
        messages: The fields of each message, as `schema.MESSAGES` has them. A message comes after the one in
            which it is defined.
        package: The name of the package.
        enums: The names of each enumeration, as `schema.ENUMS` has them.
        services: The methods of each service by their names in the package, with what each takes and answers:
            `Message`, or `stream Message` for several.
    """
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    made: dict[str, DescriptorProto] = {}
    for name in messages:
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, words in (enums or {}).items():
        outer, _, inner = name.rpartition(".")
        enum = (made[outer] if outer else file).enum_type.add(name=inner)
        for number, word in enumerate(words):
            enum.value.add(name=word, number=number)
    for name, fields in messages.items():
        for field in fields:
            _add_field(name, field, made, package, enums or {})
    for name, methods in (services or {}).items():
        service = file.service.add(name=name)
        for method, (takes, gives) in methods.items():
            service.method.add(
                name=method,
                input_type=f".{package}.{takes.removeprefix(_STREAM)}",
                output_type=f".{package}.{gives.removeprefix(_STREAM)}",
                client_streaming=takes.startswith(_STREAM),
                server_streaming=gives.startswith(_STREAM),
            )
    return file


def classes_of(file: FileDescriptorProto) -> dict[str, Any]:
    """Returns the classes of the messages of a package by name. They are in a pool of their own, so that
    other packages of the process can define messages of these names.
    """
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())

    def names(messages: Any, prefix: str) -> Iterator[str]:
        for one in messages:
            if not one.options.map_entry:
                yield f"{prefix}{one.name}"
                yield from names(one.nested_type, f"{prefix}{one.name}.")

    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in names(file.message_type, "")
    }


def _add_field(
    name: str,
    text: str,
    made: Mapping[str, DescriptorProto],
    package: str,
    enums: Mapping[str, Sequence[str]],
) -> None:
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
    known = {*made, *enums}
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    if found["values"]:
        entry = found["name"].title().replace("_", "") + _ENTRY
        _add_entry(message.nested_type.add(name=entry), f".{package}.{found['values']}")
        field.type_name = f".{package}.{name}.{entry}"
    else:
        inner = f"{name}.{found['type']}"
        full = inner if inner in known else found["type"]
        field.type_name = f".{package}.{full}"
        if full in enums:
            field.type = FieldDescriptorProto.TYPE_ENUM


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

FILE = file_of(
    MESSAGES,
    PACKAGE,
    ENUMS,
    {SERVICE.rpartition(".")[2]: {name: (f"{name}Request", f"{name}Response") for name in METHODS}},
)
"""The package of the service."""
CLASSES = classes_of(FILE)
"""The class of each message, by its name in the schema."""


def parsed(kind: Any, data: Body) -> Any:
    """Returns a message of its bytes. kind: its class. Raises: RequestError."""
    try:
        return kind.FromString(data if isinstance(data, bytes) else memoryview(data))
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise RequestError(f"the message is not a {name} of the protocol") from None
