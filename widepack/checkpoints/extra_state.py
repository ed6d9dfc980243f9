"""Stores the extra state of members as data: JSON, and tensors beside it.

`get_extra_state` of a module may return anything. An artifact contains no code, so it stores what these forms
can describe, and refuses everything else.

| value | JSON |
|---|---|
| None, bool, int of 64 bits, finite float, str | itself |
| other int; other float | `{"int": "decimal digits"}`; `{"float": "nan"}`, `"inf"`, `"-inf"` |
| list; tuple; set; frozenset | `{"list": [...]}`, ... |
| dict; OrderedDict | `{"dict": [[key, value], ...]}`; `{"ordered": [...]}` |
| bytes; io.BytesIO | `{"bytes": base64}`; `{"bytes_io": base64}` |
| tensor; NumPy array; number of NumPy | `{"tensor": "0"}`; `{"array": "0"}`; `{"number": "0"}` |
| torch.Size; torch.dtype | `{"size": [...]}`; `{"dtype": "float32"}` |
"""

from __future__ import annotations

import base64
import io
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest_weights import ITEM_BYTES
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

from .state_dict import as_tensor, bytes_of

DOCUMENT = "json"
_MOST_LEVELS = 40
_MOST_DIGITS = 4000
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NAMES: dict[type, str] = {made: name for name, made in _SEQUENCES.items()}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class NotData(Exception):
    """Raised for a value that is not data; the message names its type."""


def tensors_of_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the tensors of a file of extra states. states: of each member, by name. Raises: NotData."""
    tensors: dict[str, Tensor] = {}
    rows = [{name: encode(value, tensors) for name, value in state.items()} for state in states]
    document = strict_json.canonical(rows)
    return {DOCUMENT: torch.frombuffer(bytearray(document), dtype=torch.uint8), **tensors}


def extra_file(reader: Reader) -> Weights | None:
    """Maps the file of the members' extra states; None if there is none. Raises: ArtifactError."""
    name = reader.manifest.state_dicts.extra
    return Weights([reader.path(name)]) if name else None


def extra_of_member(reader: Reader, file: Weights | None, member: int) -> dict[str, Any]:
    """Returns the extra state of one member, by name.

    file: what `extra_file` returned. member: its number. Raises: ArtifactError.
    """
    if file is None:
        return {}
    try:
        return _state_in(file, len(reader.manifest.members), member)
    except ArtifactError as e:
        raise ArtifactError(f"{reader.root / reader.manifest.state_dicts.extra}: {e}") from None


def _state_in(files: Weights, members: int, member: int) -> dict[str, Any]:
    """Returns the extra state of one member. files: the file of extra states. Raises: ArtifactError."""
    document = files.get(DOCUMENT)
    if document.dtype != torch.uint8 or document.ndim != 1:
        raise ArtifactError(f"extra state: {DOCUMENT} is {document.dtype}{list(document.shape)}, not bytes")
    rows = strict_json.parse(document.numpy().tobytes(), "extra state")
    if not isinstance(rows, list) or len(rows) != members or not all(isinstance(r, dict) for r in rows):
        raise ArtifactError(f"extra state: expected a list of {members} objects")
    return {name: decode(value, files.get) for name, value in rows[member].items()}


def encode(value: Any, tensors: dict[str, Tensor], level: int = 0) -> Any:
    """Returns a value as JSON. tensors: gets the tensors in it, under new names. Raises: NotData."""
    kind = type(value)
    if level > _MOST_LEVELS:
        raise NotData(f"values in over {_MOST_LEVELS} levels")
    if value is None or kind is bool:
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotData("a text that is not Unicode") from None
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"int": _digits(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in _NAMES:
        return {_NAMES[kind]: [encode(v, tensors, level + 1) for v in value]}
    if kind in (dict, OrderedDict):
        rows = [[encode(k, tensors, level + 1), encode(v, tensors, level + 1)] for k, v in value.items()]
        return {"dict" if kind is dict else "ordered": rows}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is io.BytesIO:
        return {"bytes_io": base64.b64encode(value.getvalue()).decode()}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    return _encode_tensor(value, tensors)


def _digits(value: int) -> str:
    if value.bit_length() > 3 * _MOST_DIGITS:
        raise NotData(f"an integer of {value.bit_length()} bits")
    return str(value)


def _encode_tensor(value: Any, tensors: dict[str, Tensor]) -> dict[str, str]:
    kind = type(value)
    if kind.__module__ == "numpy":
        tensor = as_tensor(value)
        form = "array" if kind.__name__ == "ndarray" else "number"
    else:
        tensor = value.detach() if kind in (Tensor, torch.nn.Parameter, torch.nn.Buffer) else None
        form = "tensor"
    if tensor is None:
        raise NotData(f"a {kind.__module__}.{kind.__qualname__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise NotData("a tensor that is not dense or has no data")
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise NotData(f"a tensor of {tensor.dtype}")
    name = str(len(tensors))
    tensors[name] = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return {form: name}


def decode(value: Any, tensor: Callable[[str], Tensor], level: int = 0) -> Any:
    """Returns the value of what `encode` returned. tensor: returns a tensor by name.

    Raises: ArtifactError for any other form.
    """
    if level > _MOST_LEVELS:
        raise ArtifactError(f"extra state: nested over {_MOST_LEVELS} deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((form, inner),) = value.items()
        try:
            if form in _SEQUENCES and isinstance(inner, list):
                return _SEQUENCES[form]([decode(v, tensor, level + 1) for v in inner])
            if form in ("dict", "ordered") and isinstance(inner, list):
                rows = [(decode(k, tensor, level + 1), decode(v, tensor, level + 1)) for k, v in inner]
                return dict(rows) if form == "dict" else OrderedDict(rows)
            if form == "size" and isinstance(inner, list) and all(type(n) is int and n >= 0 for n in inner):
                return torch.Size(inner)
            if isinstance(inner, str):
                return _decode_text(form, inner, tensor)
        except (TypeError, ValueError) as e:  # an unhashable key, a row that is no pair, invalid base64
            raise ArtifactError(f"extra state: {form[:20]}: {' '.join(str(e).split())[:100]}") from None
    raise ArtifactError(f"extra state: expected a value in a known form, got {str(value)[:60]}")


def _decode_text(form: str, text: str, tensor: Callable[[str], Tensor]) -> Any:
    """Returns a value that is written as a text. Raises: ArtifactError, ValueError."""
    if form == "int" and len(text) <= _MOST_DIGITS:
        return int(text)
    if form == "float" and text in _FLOATS:
        return _FLOATS[text]
    if form in ("bytes", "bytes_io"):
        data = base64.b64decode(text, validate=True)
        return data if form == "bytes" else io.BytesIO(data)
    if form == "dtype" and text in ITEM_BYTES:
        dtype: Any = getattr(torch, text)
        return dtype
    if form in ("tensor", "array", "number"):
        value = tensor(text).clone()  # the caller may write into it
        if form == "tensor":
            return value
        array = value.numpy()
        return array if form == "array" else array.reshape(-1)[0] if array.size == 1 else array
    raise ArtifactError(f"extra state: expected a value in a known form, got {form[:20]!r}")


def equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Returns whether two members have the same extra state, bit for bit. Raises: NotData."""
    return _bytes_of(a) == _bytes_of(b)


def _bytes_of(state: Mapping[str, Any]) -> tuple[bytes, list[tuple[Any, ...]]]:
    tensors: dict[str, Tensor] = {}
    document = strict_json.canonical({name: encode(value, tensors) for name, value in state.items()})
    rows = [
        (str(t.dtype), tuple(t.shape), bytes_of(t.reshape(-1)).numpy().tobytes()) for t in tensors.values()
    ]
    return document, rows


def differing_names(own: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """Returns the names of extra states that are not equal."""
    differing = []
    for name in sorted({*own, *extra}):
        try:
            same = name in own and name in extra and equal({name: own[name]}, {name: extra[name]})
        except NotData:
            same = False
        if not same:
            differing.append(name)
    return differing
