"""Writes requests of the Open Inference Protocol, and reads its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from asgi import InProcess, Request, Response
from torch import Tensor

NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
HEADER = "inference-header-content-length"
Given = Tensor | Sequence[str]


def to_bytes(value: Given) -> bytes:
    """Returns a tensor, or texts, as the binary extension has them."""
    if isinstance(value, Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    words = [w.encode() for w in value]
    return b"".join(len(w).to_bytes(4, "little") + w for w in words)


def tensor(datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Returns a tensor of the binary extension."""
    if not data:
        return torch.empty(tuple(shape), dtype=DTYPES[datatype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[datatype]).reshape(tuple(shape))


def described(name: str, value: Given) -> dict[str, Any]:
    """Returns an input without its data."""
    if isinstance(value, Tensor):
        return {"name": name, "datatype": NAMES[value.dtype], "shape": list(value.shape)}
    return {"name": name, "datatype": "BYTES", "shape": [len(value)]}


def document(
    inputs: Mapping[str, Given],
    outputs: Sequence[str | Mapping[str, Any]] = (),
    *,
    nested: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Returns a request as a JSON document."""
    rows = []
    for name, value in inputs.items():
        plain = value if not isinstance(value, Tensor) else value if nested else value.reshape(-1)
        data = plain.tolist() if isinstance(plain, Tensor) else list(plain)
        rows.append({**described(name, value), "data": data})
    found: dict[str, Any] = {"inputs": rows, **more}
    if outputs:
        found["outputs"] = [{"name": o} if isinstance(o, str) else dict(o) for o in outputs]
    return found


def json_request(
    model: str,
    inputs: Mapping[str, Given],
    outputs: Sequence[str | Mapping[str, Any]] = (),
    *,
    headers: Mapping[str, str] | None = None,
    leaves_after: float | None = None,
    **more: Any,
) -> Request:
    """Returns a request in JSON. more: members of the JSON object, such as `id`."""
    body = orjson.dumps(document(inputs, outputs, **more))
    return Request("POST", f"/v2/models/{model}/infer", body, headers or {}, leaves_after=leaves_after)


def binary_request(
    model: str,
    inputs: Mapping[str, Given],
    outputs: Sequence[str | Mapping[str, Any]] = (),
    *,
    in_json: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Request:
    """Returns a request with binary inputs. in_json: the names of the inputs that are JSON all the same."""
    rows: list[dict[str, Any]] = []
    tail = b""
    for name, value in inputs.items():
        if name in in_json:
            rows += document({name: value})["inputs"]
            continue
        data = to_bytes(value)
        rows.append({**described(name, value), "parameters": {"binary_data_size": len(data)}})
        tail += data
    found: dict[str, Any] = {"parameters": {"binary_data_output": True}, "inputs": rows, **more}
    if outputs:
        found["outputs"] = [{"name": o} if isinstance(o, str) else dict(o) for o in outputs]
    text = orjson.dumps(found)
    return Request(
        "POST", f"/v2/models/{model}/infer", text + tail, {HEADER: str(len(text)), **(headers or {})}
    )


@dataclass(frozen=True)
class Answer:
    """The outputs of an answer by name, and its JSON document."""

    outputs: dict[str, Tensor]
    document: Any


def read(response: Response | None) -> Answer:
    """Reads an answer. It must be complete and well formed."""
    assert response is not None
    assert response.status == 200, response.body[:500]
    length = int(response.headers.get(HEADER, len(response.body)))
    found = orjson.loads(response.body[:length])
    outputs: dict[str, Tensor] = {}
    at = length
    for row in found["outputs"]:
        size = row.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = [float("nan") if v is None else v for v in row["data"]]
            outputs[row["name"]] = torch.tensor(values, dtype=DTYPES[row["datatype"]]).reshape(row["shape"])
        else:
            outputs[row["name"]] = tensor(row["datatype"], row["shape"], response.body[at : at + size])
            at += size
    assert at == len(response.body)
    return Answer(outputs, found)


def infer(server: InProcess, model: str, inputs: Mapping[str, Given], *outputs: str) -> dict[str, Tensor]:
    """Sends a binary request, whose answer has every bit, and returns the outputs."""
    return read(server.maybe(binary_request(model, inputs, outputs))).outputs
