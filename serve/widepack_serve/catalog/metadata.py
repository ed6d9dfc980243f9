"""Describes models to clients: the metadata of the protocol, and Triton's configuration of a model."""

from __future__ import annotations

from typing import Any

from widepack.version import __version__

from .call import described_inputs
from .outputs import answers, described_output
from .served import ALL, EACH, ServedModel

PLATFORM = "widepack_wide"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


def server_metadata() -> dict[str, Any]:
    """Returns the document of `GET /v2`."""
    return {"name": "widepack", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: ServedModel) -> dict[str, Any]:
    """Returns the document of `GET /v2/models/NAME`: the inputs, and the outputs without a request of
    others.
    """
    layout = model.layout
    wanted = model.artifact.defaults[layout.entry.name] if model.kind == ALL else answers(layout)
    front = len(model.artifact.members) if model.kind in (ALL, EACH) else None
    outputs = []
    for one in wanted:
        datatype, sizes = described_output(layout, one, front)
        outputs.append({"name": one.name, "datatype": datatype, "shape": sizes})
    return {
        "name": model.name,
        "versions": [model.artifact.version],
        "platform": PLATFORM,
        "inputs": described_inputs(model),
        "outputs": outputs,
    }


def model_config(model: ServedModel) -> dict[str, Any]:
    """Returns the document of `GET /v2/models/NAME/config`, for clients of Triton.

    Its `max_batch_size` is 0: the dims are all dims of a tensor, as in the metadata, since the rows of an
    answer of all members are not in its first dim.
    """
    found = model_metadata(model)

    def tensors(rows: list[Any]) -> list[dict[str, Any]]:
        return [
            {"name": r["name"], "data_type": f"TYPE_{r['datatype']}", "dims": list(r["shape"])} for r in rows
        ]

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "widepack",
        "max_batch_size": 0,
        "input": tensors(found["inputs"]),
        "output": tensors(found["outputs"]),
    }
