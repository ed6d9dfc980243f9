"""Describes the services that gRPC itself defines: health and reflection.

Probes of Kubernetes ask `grpc.health.v1.Health`. By `grpc.reflection.v1.ServerReflection` tools such as
grpcurl find the services and their messages. Older tools ask for it as `v1alpha`, with the same messages.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from .messages import FILE, classes_of, file_of

HEALTH, REFLECTION = "grpc.health.v1", ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_NOT_FOUND, _UNIMPLEMENTED = 5, 12

_HEALTH_FILE = file_of(
    {"HealthCheckRequest": ("string service = 1",), "HealthCheckResponse": ("ServingStatus status = 1",)},
    HEALTH,
    {"HealthCheckResponse.ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")},
    {
        "Health": {
            "Check": ("HealthCheckRequest", "HealthCheckResponse"),
            "Watch": ("HealthCheckRequest", "stream HealthCheckResponse"),
        }
    },
)
HEALTH_CLASSES = classes_of(_HEALTH_FILE)

_NAME = "string name = 1"
_REFLECTION_MESSAGES = {
    "ServerReflectionRequest": (
        "string host = 1",
        "oneof message_request: string file_by_filename = 3",
        "oneof message_request: string file_containing_symbol = 4",
        "oneof message_request: ExtensionRequest file_containing_extension = 5",
        "oneof message_request: string all_extension_numbers_of_type = 6",
        "oneof message_request: string list_services = 7",
    ),
    "ExtensionRequest": ("string containing_type = 1", "int32 extension_number = 2"),
    "ServerReflectionResponse": (
        "string valid_host = 1",
        "ServerReflectionRequest original_request = 2",
        "oneof message_response: FileDescriptorResponse file_descriptor_response = 4",
        "oneof message_response: ListServiceResponse list_services_response = 6",
        "oneof message_response: ErrorResponse error_response = 7",
    ),
    "FileDescriptorResponse": ("repeated bytes file_descriptor_proto = 1",),
    "ListServiceResponse": ("repeated ServiceResponse service = 1",),
    "ServiceResponse": (_NAME,),
    "ErrorResponse": ("int32 error_code = 1", "string error_message = 2"),
}
_REFLECTION_FILES = [
    file_of(
        _REFLECTION_MESSAGES,
        package,
        services={
            "ServerReflection": {
                "ServerReflectionInfo": ("stream ServerReflectionRequest", "stream ServerReflectionResponse")
            }
        },
    )
    for package in REFLECTION
]
REFLECTION_CLASSES = classes_of(_REFLECTION_FILES[0])
"""The same bytes for both packages: a message does not carry the name of its package."""

_FILES: dict[str, FileDescriptorProto] = {f.name: f for f in (FILE, _HEALTH_FILE, *_REFLECTION_FILES)}
_POOL = DescriptorPool()
for _file in _FILES.values():
    _POOL.AddSerializedFile(_file.SerializeToString())


def reflected(question: Any) -> Any:
    """Returns the answer to a `ServerReflectionRequest`: a `ServerReflectionResponse`."""
    kind = question.WhichOneof("message_request")
    asked = "" if kind is None else getattr(question, kind)
    answer: dict[str, Any]
    if kind == "list_services":
        names = sorted(f"{f.package}.{s.name}" for f in _FILES.values() for s in f.service)
        answer = {"list_services_response": {"service": [{"name": n} for n in names]}}
    elif kind in ("file_by_filename", "file_containing_symbol"):
        found = _FILES.get(asked if kind == "file_by_filename" else _file_of_symbol(asked))
        if found is None:
            answer = _error(_NOT_FOUND, f"there is no {asked[:80]!r}")
        else:
            data = found.SerializeToString()
            answer = {"file_descriptor_response": {"file_descriptor_proto": [data]}}
    else:
        answer = _error(_UNIMPLEMENTED, "the messages have no extensions")
    return REFLECTION_CLASSES["ServerReflectionResponse"](
        valid_host=question.host, original_request=question, **answer
    )


def _error(code: int, text: str) -> dict[str, Any]:
    return {"error_response": {"error_code": code, "error_message": text}}


def _file_of_symbol(name: str) -> str:
    """Returns the name of the file that has a message, an enumeration, a service or a method; "" for none."""
    for symbol in (name, name.rpartition(".")[0]):  # a method is found by its service
        try:
            return str(_POOL.FindFileContainingSymbol(symbol).name)
        except KeyError:
            continue
    return ""
