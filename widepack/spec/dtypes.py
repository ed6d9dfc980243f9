"""Finds dtypes by name, and converts weights to them."""

from __future__ import annotations

import torch

from ..errors import ArtifactError, UsageError
from .input_spec import LONG_NAMES

_WEIGHTS = ("float32", "float64", "bfloat16", "float16")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _WEIGHTS}


def find_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that `--dtype` names. Raises: UsageError."""
    if name is None:
        return None
    text = str(name).removeprefix("torch.")
    if LONG_NAMES.get(text, text) not in DTYPES:
        raise UsageError(f"unknown dtype {text!r}; the weights of a member can be {', '.join(DTYPES)}")
    return DTYPES[LONG_NAMES.get(text, text)]


def dense_instead(name: str, layout: torch.layout) -> str:
    """Returns what to do about a tensor that is not dense, such as a sparse one. name: its path."""
    last = name.rpartition(".")[2]
    sparse = "a sparse tensor" if "sparse" in str(layout) else "no dense tensor"
    return (
        f"{name} is {sparse} (layout {layout}), and widepack stacks dense tensors only. In the model,"
        f" register {last}.to_dense(), and multiply by {last} @ x in place of torch.sparse.mm({last}, x)"
    )


class OutOfRange(ValueError):
    """Raised for a number that a dtype cannot represent.

    The message names the number and the dtype's limit.
    """


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a floating tensor in another dtype.

    The largest number of the old dtype, which code writes for "none", becomes the largest number of the new
    one.
    Raises: OutOfRange for another finite number that would become infinite.
    """
    result = value.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return result
    lost = torch.isinf(result) & torch.isfinite(value)
    if not bool(lost.any()):
        return result
    largest, new = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    if bool((lost & ~at_limit(value)).any()):
        raise OutOfRange(
            f"has {float(value[lost].abs().max()):.4g}, but the largest number of {new} is {largest:.4g}:"
            f" these members cannot run in {new}"
            + ("; bfloat16 has the range of float32" if new == "float16" else "")
        )
    return torch.where(lost, torch.sign(value).to(dtype) * largest, result)


def at_limit(t: torch.Tensor) -> torch.Tensor:
    """Returns where a tensor has its dtype's largest finite number, of either sign: it stands for "none"."""
    if t.is_complex():
        return at_limit(torch.view_as_real(t.resolve_conj())).any(-1)
    return t.abs() == torch.finfo(t.dtype).max


_DTYPES = {str(d).split(".")[1]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as torch prints it: `float32`."""
    return str(dtype).split(".")[1]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name. Raises: ArtifactError for a dtype that torch does not have."""
    if name not in _DTYPES:
        raise ArtifactError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return _DTYPES[name]
