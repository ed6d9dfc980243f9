"""Runs one request of each model of all members without a socket, and describes the models."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import torch

from ..catalog.layout import zeros
from ..catalog.metadata import model_metadata
from ..catalog.served import ALL, EACH, ServedModel
from ..lifecycle.service import Service
from ..protocol.request import InferRequest, Value


def example_tensors(model: ServedModel) -> list[torch.Tensor]:
    """Returns inputs of zeros for a model, the smallest that it takes."""
    members = len(model.artifact.members)
    found = zeros(model.layout, model.layout.least_rows, members if model.kind == EACH else None)
    if model.kind == ALL:
        inputs = model.layout.inputs
        return [x.expand(members, *x.shape) if i.state else x for i, x in zip(inputs, found)]
    return found


def curl(address: str, model: ServedModel) -> str:
    """Returns a command line with one request, which works as it stands if the inputs are small."""
    inputs = []
    for described, value in zip(model.layout.inputs, example_tensors(model)):
        data = "[" + ",".join(map(_number, value.reshape(-1).tolist())) + "]"
        shape = ",".join(map(str, value.shape))
        type_ = f'"name":"{described.name}","datatype":"{described.datatype.name}","shape":[{shape}]'
        inputs.append(f'{{{type_},"data":{data}}}')
    body = shlex.quote(f'{{"inputs":[{",".join(inputs)}]}}')
    if address.startswith("unix:"):
        address = f"--unix-socket {shlex.quote(address[5:])} http://localhost"
    return f"curl {address}/v2/models/{quote(model.name, safe='')}/infer -d {body}"


def _number(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def check(service: Service) -> Iterator[str]:
    """Runs one request of each model of all members. Yields: a line for each model.

    Raises: RequestError if a request is refused.
    """
    asyncio.run(_run_all(service))
    members = 0
    for model in service.catalog:
        if model.kind not in (ALL, EACH):
            members += 1
            continue
        document = model_metadata(model)
        yield f"{model.name}: {_tensors(document['inputs'])} -> {_tensors(document['outputs'])}"
    if members:
        yield f"and {members} names of single members, for example {_single(service)}"


def _tensors(rows: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{r['name']} {r['datatype']}[{','.join('?' if s < 0 else str(s) for s in r['shape'])}]" for r in rows
    )


def _single(service: Service) -> str:
    return next(m.name for m in service.catalog if m.kind not in (ALL, EACH))


async def _run_all(service: Service) -> None:
    service.start()
    for model in service.catalog:
        if model.kind not in (ALL, EACH):
            continue
        tensors = example_tensors(model)
        inputs: dict[str, Value] = {i.name: t for i, t in zip(model.layout.inputs, tensors)}
        shapes = {name: list(t.shape) for name, t in inputs.items() if isinstance(t, torch.Tensor)}
        await service.infer(model, InferRequest(None, inputs, shapes, [], binary=True, timeout=None))
    await service.stop()
