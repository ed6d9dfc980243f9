"""Reads the parameters of a request, of an input and of an output. One that has no effect here is refused: a
client that sends it expects an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError
from .shown import shown

REQUEST = ("timeout", "binary_data_output")
FEATURES = "features"
"""The parameter of an input with the names of the numbers of its rows."""
INPUT = ("binary_data_size", FEATURES)
OUTPUT = ("binary_data", "of", "dim", "calibrated")
"""The parameters of a request, of an input and of an output."""

_EXTENSIONS = {
    "classification": "classification",
    "sequence_id": "sequence",
    "sequence_start": "sequence",
    "sequence_end": "sequence",
    "shared_memory_region": "shared_memory",
    "shared_memory_byte_size": "shared_memory",
    "shared_memory_offset": "shared_memory",
}
"""The parameters of extensions that the server does not support."""

_REASONS = {
    **{name: f"the extension {extension} is not supported" for name, extension in _EXTENSIONS.items()},
    "priority": "all requests have one priority",  # of `schedule_policy` the server has `timeout` alone
}
"""The parameters that would have no effect, and why."""


def parameters_of(one: Mapping[str, Any], title: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the parameters of a part of a request.

    Args:
        one: The part.
        title: The part in messages.
        known: The parameters that it may have. A parameter without effect may also be there with a value that
            asks for nothing, such as `"sequence_id": 0` or `"priority": 0`: some clients send it always.

    Raises:
        RequestError: One would have no effect.
    """
    found = one.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError(f"{title}: parameters is not a JSON object")
    for name, value in found.items():
        if name in known:
            continue
        if name == "member":
            raise RequestError(
                'member is a parameter of the request; it is an input: {"name": "member", "datatype": '
                '"BYTES", "shape": [1], "data": ["NAME"]}'
            )
        reason = _REASONS.get(name)
        if reason is None:
            raise RequestError(
                f"{title}: there is no parameter {shown(name, quoted=False)}; "
                f"known: {', '.join(known) or 'none'}"
            )
        if value is not None and value != 0 and value != "":
            raise RequestError(f"{title}: {reason}; leave out the parameter {name}")
    return found
