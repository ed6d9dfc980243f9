"""The dtypes that the weights of members can be brought into, by the names that people write."""

from __future__ import annotations

import torch

from ..errors import UsageError

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


class OutOfRange(ValueError):
    """A number that a dtype cannot hold: what a tensor holds, what the dtype does, and which one would."""


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating tensor in another dtype. Its dtype's own largest number, which code writes for "none", becomes that of the new one.

    Raises: OutOfRange for a finite number that would become infinite.
    """
    made = value.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return made
    lost = torch.isinf(made) & torch.isfinite(value)
    if not bool(lost.any()):
        return made
    largest, new = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    if bool((lost & ~at_limit(value)).any()):
        raise OutOfRange(
            f"holds {float(value[lost].abs().max()):.4g}, and the largest number of {new} is {largest:.4g}: these members cannot run in {new}"
            + ("; bfloat16 has the range of float32" if new == "float16" else "")
        )
    return torch.where(lost, torch.sign(value).to(dtype) * largest, made)


def at_limit(t: torch.Tensor) -> torch.Tensor:
    """Where the dtype's largest finite number stands, of either sign: a number's error there is none of its own."""
    if t.is_complex():
        return at_limit(torch.view_as_real(t.resolve_conj())).any(-1)
    return t.abs() == torch.finfo(t.dtype).max
