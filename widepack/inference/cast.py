"""Casts an artifact to another dtype when it is loaded: `load(dtype=...)`. The files do not change.

Every floating dtype that the weights have becomes the requested one: in weights, inputs, outputs and
constants of programs. Member programs are cast, and wide programs are lowered again from them, because a plan
for one dtype may not be valid for another. The largest number of a dtype, which code uses for "none" (a mask
of `torch.finfo(x.dtype).min`), becomes the largest number of the new dtype. A dtype that no weight has stays,
for example float32 islands in a bfloat16 model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.program import Program

from ..errors import UsageError
from ..ir.tensor_type import with_dtypes
from ..spec.dtypes import OutOfRange, converted, dtype_name, dtype_of

FLOATING = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = {"float32": "complex64", "float64": "complex128"}


class Cast:
    """A cast to another dtype.

    Args:
        dtype: The requested dtype.
        table: For each dtype that changes the new one, by name.
    """

    def __init__(self, dtype: torch.dtype, table: Mapping[str, str]) -> None:
        self.dtype, self.table = dtype, dict(table)

    @classmethod
    def of(cls, manifest: Manifest, dtype: torch.dtype) -> Cast | None:
        """Returns the cast of an artifact; None if all weights have the dtype. Raises: UsageError."""
        name = dtype_name(dtype)
        present = {w.dtype for w in manifest.weights}
        if not present & set(FLOATING):
            raise UsageError(f"dtype {name}: no weight of this artifact is floating; load it without dtype")
        if name not in _COMPLEX and present & set(_COMPLEX.values()):
            raise UsageError(
                f"dtype {name}: the members hold complex numbers, which have no form in it; "
                "load without dtype, or with float32 or float64"
            )
        table = {old: name for old in FLOATING if old in present and old != name}
        if not table:
            return None
        return cls(
            dtype,
            table | {_COMPLEX[old]: _COMPLEX[name] for old in table if old in _COMPLEX and name in _COMPLEX},
        )

    @property
    def widens(self) -> bool:
        """Whether a dtype becomes one of more digits."""
        return any(
            torch.finfo(dtype_of(old)).eps > torch.finfo(self.dtype).eps
            for old in self.table
            if old in FLOATING
        )

    def entry(self, entry: Entry) -> Entry:
        """Returns an entry whose inputs and outputs have the new dtype."""
        return replace(
            entry,
            inputs=tuple(replace(i, type=with_dtypes(i.type, self.table)) for i in entry.inputs),
            outputs=tuple(replace(o, type=with_dtypes(o.type, self.table)) for o in entry.outputs),
        )

    def program(self, program: Program, sizes: Mapping[str, int]) -> Program:
        """Returns a member program in the new dtype.

        sizes: of an example. Raises: LoweringError, which names a node that cannot be cast.
        """
        from ..ir.cast import cast_program  # imports the registry of ops, which only a cast needs

        return cast_program(program, self.table, sizes)

    def value(self, value: Tensor, what: str) -> Tensor:
        """Returns a tensor in the new dtype.

        what: the tensor's name in messages. Raises: UsageError for a number that the dtype cannot represent.
        """
        new = self.table.get(dtype_name(value.dtype))
        if new is None:
            return value
        try:
            return converted(value, dtype_of(new))
        except OutOfRange as e:
            raise UsageError(f"{what} {e}") from e
