"""Stores an ONNX model's weights in the model, in a file beside it, or as references into the artifact.

Weights `inside`: weights that are larger than a protobuf message may be are in one more file beside the
model, which is named by its content. Weights `beside`: every initializer points into the artifact's weights
files.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..backends.flat import Flat
from ..backends.onnx_model import Initializer, OnnxModel, where_mapped
from ..errors import LoweringError
from ..system import atomic_file
from .subject import ExportSubject, Written

INSIDE_BYTES = 2_000_000_000
"""The most bytes of weights in the model's own file: a protobuf message ends at 2 GiB."""
_CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = 64


def point_into_artifact(subject: ExportSubject, flat: Flat, translated: OnnxModel, folder: str) -> None:
    """Points every weight into the artifact's files.

    folder: of the artifact, as seen from the model's folder. Raises: LoweringError for a weight that is not
    in one piece in a file.
    """
    located = subject.artifact.weights.located()
    for initializer in translated.weights:
        weight = flat.weights[initializer.number]
        name = initializer.value.name
        size = weight.numel() * weight.element_size()
        if not size:
            translated.give(initializer, tensor_inside(weight, name))
            continue
        place = where_mapped(weight, located)
        if place is None:
            raise LoweringError(
                f"{subject.title}: the weight {name} is not in one piece in the artifact's files, "
                "as it is for all members or a single one; "
                "write its weights inside (weights='inside', --self-contained)"
            )
        file, offset = place
        translated.give(initializer, _tensor_outside(initializer, f"{folder}{file}", offset, size))


def store_weights(flat: Flat, translated: OnnxModel, out: Path, written: Written) -> None:
    """Stores the weights inside the model. If they are too large for it, they go into one file beside it."""
    weights = {w.number: flat.weights[w.number].detach().contiguous() for w in translated.weights}
    if sum(w.numel() * w.element_size() for w in weights.values()) <= INSIDE_BYTES:
        for w in translated.weights:
            translated.give(w, tensor_inside(weights[w.number], w.value.name))
        return
    data_file, offsets = _write_data_file(weights, out, written)
    for w in translated.weights:
        translated.give(w, _tensor_outside(w, data_file.name, *offsets[w.number]))


def _write_data_file(
    weights: Mapping[int, torch.Tensor], out: Path, written: Written
) -> tuple[Path, dict[int, tuple[int, int]]]:
    """Writes weights into a file beside the model. Returns it, and each weight's offset and size in bytes."""
    offsets: dict[int, tuple[int, int]] = {}
    digest = hashlib.sha256()
    with atomic_file.temporary(out, ".data") as temporary:
        with open(temporary, "wb") as file:
            for number, weight in weights.items():
                padding = memoryview(bytes(-file.tell() % _ALIGNMENT))
                offsets[number] = file.tell() + len(padding), weight.numel() * weight.element_size()
                for part in (padding, *_chunks(weight)):
                    digest.update(part)
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
        data_file = out.parent / f"{out.name}.{digest.hexdigest()[:16]}.data"
        written.data_files.append(data_file)
        if not data_file.exists():
            written.new_files.append(data_file)
        os.replace(temporary, data_file)
    return data_file, offsets


def _chunks(weight: torch.Tensor) -> Iterator[memoryview]:
    """Yields a contiguous tensor's memory in pieces. They are valid while the tensor exists."""
    size = weight.numel() * weight.element_size()
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        yield memoryview((ctypes.c_char * length).from_address(weight.data_ptr() + start)).cast("B")


def tensor_inside(weight: torch.Tensor, name: str) -> Any:
    """Returns a tensor of onnx_ir whose bytes are in the model's file."""
    from onnx_ir.tensor_adapters import TorchTensor

    return TorchTensor(weight, name=name)


def _tensor_outside(initializer: Initializer, file: str, offset: int, size: int) -> Any:
    """Returns a tensor of onnx_ir whose bytes are in another file. file: relative to the model's folder."""
    import onnx_ir

    return onnx_ir.ExternalTensor(
        file,
        offset,
        size,
        initializer.dtype,
        shape=initializer.shape,
        name=initializer.value.name,
        base_dir="",
    )
