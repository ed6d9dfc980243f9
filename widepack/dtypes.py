"""The dtypes that the weights of members can be brought into, by the names that people write."""

from __future__ import annotations

import torch

from .errors import UsageError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SHORT = {
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
}


def find_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that `--dtype` names. Raises: UsageError."""
    text = str(name).removeprefix("torch.") if name is not None else ""
    if name is not None and _SHORT.get(text, text) not in DTYPES:
        raise UsageError(f"unknown dtype {text!r}; the weights of a member can be {', '.join(DTYPES)}")
    return None if name is None else DTYPES[_SHORT.get(text, text)]
