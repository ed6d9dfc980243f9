"""Calls a server with tritonclient, through REST or gRPC: `triton_calls.py KIND ADDRESS INPUTS RESULTS`.

KIND is `http` or `grpc`; for a server with `--dtype fp16`, `http-half` or `grpc-half`.

INPUTS is a file .npz with `x`, rows for the model `ens`. The members of the model are `mlp-0`, `mlp-1`, and
so on. `test_clients.py` runs it, and checks what `RESULTS` has.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import numpy
import tritonclient.grpc
import tritonclient.http
from recorder import Recorder
from tritonclient.utils import InferenceServerException

MEMBERS = [3, 0, 3, 7]


def as_json(kind: str) -> dict[str, Any]:
    return {"as_json": True} if kind == "grpc" else {}


def tensor(lib: Any, name: str, value: Any, datatype: str, **options: Any) -> Any:
    found = lib.InferInput(name, list(value.shape), datatype)
    found.set_data_from_numpy(value, **options)
    return found


def half(lib: Any, x: Any) -> Any:
    return tensor(lib, "input", x.astype("f2"), "FP16")


def describe(record: Recorder, client: Any, kind: str) -> None:
    """Calls what has no inference."""
    more = as_json(kind)
    record("live", client.is_server_live)
    record("ready", client.is_server_ready)
    record("model ready", lambda: client.is_model_ready("ens"))
    record("member ready", lambda: client.is_model_ready("ens.mlp-2"))
    record("unknown ready", lambda: client.is_model_ready("zz"))
    record("server", lambda: client.get_server_metadata(**more))
    record("model", lambda: client.get_model_metadata("ens", **more))
    version = record.values["model"]["value"]["versions"][0]
    record("version", lambda: client.get_model_metadata("ens", version, **more))
    record("unknown version", lambda: client.get_model_metadata("ens", "7", **more))
    record("config", lambda: client.get_model_config("ens", "1", **more))
    record("unknown model", lambda: client.get_model_metadata("enz", **more))
    record("index", lambda: client.get_model_repository_index(**more))


def infer(record: Recorder, lib: Any, client: Any, kind: str, x: Any) -> None:
    """Calls inferences in all forms that both interfaces have."""
    rows = tensor(lib, "input", x, "FP32")
    names = numpy.array([f"mlp-{n}".encode() for n in MEMBERS], dtype=object)
    numbers = numpy.array(MEMBERS, dtype=numpy.int64)
    out = lib.InferRequestedOutput

    def outputs(*inputs: Any, model: str = "ens", name: str = "output", **options: Any) -> Any:
        return client.infer(model, list(inputs), **options).as_numpy(name)

    record("binary", lambda: outputs(rows))
    record("one member", lambda: outputs(rows, model="ens.mlp-5"))
    record("members by name", lambda: outputs(rows, tensor(lib, "member", names, "BYTES")))
    record("members by number", lambda: outputs(rows, tensor(lib, "member", numbers, "INT64")))
    record("mean", lambda: outputs(rows, name="output.mean", outputs=[out("output.mean"), out("output.std")]))
    record("std", lambda: outputs(rows, name="output.std", outputs=[out("output.mean"), out("output.std")]))
    version = record.values["model"]["value"]["versions"][0]
    record("of the version", lambda: outputs(rows, model_version=version))
    record("of version 1", lambda: outputs(rows, model_version="1"))
    record("no rows", lambda: outputs(tensor(lib, "input", x[:0], "FP32")))

    def answered(**options: Any) -> Any:
        found = client.infer("ens", [rows], **options).get_response()
        found = {"id": found.id, "model_name": found.model_name} if kind == "grpc" else found
        return [found["id"], found["model_name"]]

    record("id", lambda: answered(request_id="request 42", timeout=5_000_000, priority=0))
    record("priority", lambda: answered(priority=1))
    record("unknown output", lambda: outputs(rows, outputs=[out("zz")]))
    record("unknown input", lambda: outputs(tensor(lib, "x", x, "FP32")))
    record("unknown name", lambda: outputs(rows, model="enz"))
    record("unknown member", lambda: outputs(rows, tensor(lib, "member", names[::-1] + b"9", "BYTES")))
    record("half", lambda: outputs(half(lib, x)))
    record("statistics", lambda: client.get_inference_statistics("ens.mlp-5", **as_json(kind)))


def infer_http(record: Recorder, client: Any, x: Any) -> None:
    """Calls the forms that only REST has: JSON, and compressed bodies."""
    lib = tritonclient.http
    plain = tensor(lib, "input", x, "FP32", binary_data=False)
    rows = tensor(lib, "input", x, "FP32")
    names = numpy.array([f"mlp-{n}" for n in MEMBERS], dtype=object)
    as_text = lib.InferRequestedOutput("output", binary_data=False)

    def outputs(*inputs: Any, **options: Any) -> Any:
        return client.infer("ens", list(inputs), **options).as_numpy("output")

    record("json", lambda: outputs(plain, outputs=[as_text]))
    record("json in", lambda: outputs(plain))
    record("json out", lambda: outputs(rows, outputs=[as_text]))
    member = tensor(lib, "member", names, "BYTES", binary_data=False)
    record("json members", lambda: outputs(plain, member, outputs=[as_text]))
    for name in ("gzip", "deflate"):
        request, answer = {"request_compression_algorithm": name}, {"response_compression_algorithm": name}
        record(f"{name} request", partial(outputs, rows, **request))
        record(f"{name} answer", partial(outputs, rows, **answer))
        record(f"{name} json", partial(outputs, plain, outputs=[as_text], **request, **answer))
    record("async", lambda: client.async_infer("ens", [rows]).get_result().as_numpy("output"))


def infer_grpc(record: Recorder, client: Any, x: Any) -> None:
    """Calls the forms that only gRPC has: compressed messages, deadlines, and the messages themselves."""
    rows = tensor(tritonclient.grpc, "input", x, "FP32")

    def output(**options: Any) -> Any:
        return client.infer("ens", [rows], **options).as_numpy("output")

    record("gzip", lambda: output(compression_algorithm="gzip"))
    record("deflate", lambda: output(compression_algorithm="deflate"))
    record("deadline", lambda: output(client_timeout=20))
    record("asynchronous", lambda: later(client, rows))
    record("contents", lambda: contents(client, x))
    record("messages", messages)


def later(client: Any, rows: Any) -> Any:
    """Returns the answer that a callback gets."""
    done = threading.Event()
    found: list[Any] = []

    def answered(result: Any, error: Any) -> None:
        found.append(error or result.as_numpy("output"))
        done.set()

    client.async_infer("ens", [rows], answered)
    done.wait(20)
    return found[0]


def contents(client: Any, x: Any) -> Any:
    """Returns the answer to a request with numbers in fields, in fields."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="ens")
    request.parameters["binary_data_output"].bool_param = False
    one = request.inputs.add(name="input", datatype="FP32", shape=x.shape)
    one.contents.fp32_contents.extend(x.reshape(-1).tolist())
    answer = client._client_stub.ModelInfer(request).outputs[0]  # noqa: SLF001  there is no public way
    return numpy.array(answer.contents.fp32_contents, dtype="f4").reshape(list(answer.shape))


def messages() -> dict[str, list[list[Any]]]:
    """Returns number, name, type and whether it is repeated of each field of all messages."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from tritonclient.grpc import model_config_pb2, service_pb2

    file, config = FileDescriptorProto(), FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(file)
    model_config_pb2.DESCRIPTOR.CopyToProto(config)
    found: dict[str, list[list[Any]]] = {}

    def add(prefix: str, message: Any) -> None:
        name = f"{prefix}{message.name}"
        found[name] = [
            [f.number, f.name, f.type, f.label == FieldDescriptorProto.LABEL_REPEATED, f.type_name]
            for f in message.field
        ]
        for nested in message.nested_type:
            add(f"{name}.", nested)

    for message in (*file.message_type, *config.message_type):
        add("", message)
    return found


def main(kind: str, address: str, inputs: str, results: str) -> None:
    """Makes all calls through REST or gRPC."""
    kind, _, datatype = kind.partition("-")
    lib = tritonclient.http if kind == "http" else tritonclient.grpc
    record = Recorder(InferenceServerException)
    x = numpy.load(inputs)["x"]
    with lib.InferenceServerClient(address) as client:
        if datatype:
            record("half", lambda: client.infer("ens", [half(lib, x)]).as_numpy("output"))
            single = tensor(lib, "input", x, "FP32")
            record("single", lambda: client.infer("ens", [single]).as_numpy("output"))
        else:
            describe(record, client, kind)
            infer(record, lib, client, kind, x)
            infer_http(record, client, x) if kind == "http" else infer_grpc(record, client, x)
    record.write(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
