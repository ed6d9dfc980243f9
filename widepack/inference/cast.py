"""`load(dtype=...)`: an artifact in another dtype, while its files stay as they are.

The floating dtypes that the weights have become the one that was asked for, in weights, inputs, outputs and all that programs hold of their own; a float32 island in a
bfloat16 model stays one. Member programs are recast and wide ones lowered again from them: what a plan chose for another dtype may not apply. The largest number
of a dtype, which code writes for "none" (a mask of `torch.finfo(x.dtype).min`), becomes that of the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from widepack_artifacts.manifest import Entry, Manifest
from widepack_artifacts.program import Program

from ..ir.encoding import dtype_name, dtype_of
from ..spec.dtypes import OutOfRange, converted
from ..errors import UsageError

FLOATING = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = {"float32": "complex64", "float64": "complex128"}


class Cast:
    """dtype: the one that was asked for. table: what becomes what, by name."""

    def __init__(self, dtype: torch.dtype, table: Mapping[str, str]) -> None:
        self.dtype, self.table = dtype, dict(table)

    @classmethod
    def of(cls, manifest: Manifest, dtype: torch.dtype) -> Cast | None:
        """What has to be cast; None where all weights have the dtype. Raises: UsageError."""
        name = dtype_name(dtype)
        held = {w.dtype for w in manifest.weights}
        if not held & set(FLOATING):
            raise UsageError(f"dtype {name}: no weight of this artifact is floating; load it without dtype")
        if name not in _COMPLEX and held & set(_COMPLEX.values()):
            raise UsageError(
                f"dtype {name}: the members hold complex numbers, which have no form in it; load without dtype, or with float32 or float64"
            )
        table = {old: name for old in FLOATING if old in held and old != name}
        if not table:
            return None
        return cls(dtype, table | {_COMPLEX[old]: _COMPLEX[name] for old in table if old in _COMPLEX and name in _COMPLEX})

    def entry(self, entry: Entry) -> Entry:
        """An entry that takes and gives the new dtype."""
        from ..ir.cast import retyped  # the registry of ops comes with it

        return replace(
            entry,
            inputs=tuple(replace(i, type=retyped(i.type, self.table)) for i in entry.inputs),
            outputs=tuple(replace(o, type=retyped(o.type, self.table)) for o in entry.outputs),
        )

    def program(self, program: Program, sizes: Mapping[str, int]) -> Program:
        """A member program in the new dtype. sizes: of an example. Raises: LoweringError naming the node that cannot be."""
        from ..ir.cast import cast_program

        return cast_program(program, self.table, sizes)

    def value(self, value: Tensor, said: str) -> Tensor:
        """A tensor in the new dtype. said: what it is, for messages. Raises: UsageError for a number that the dtype cannot hold."""
        new = self.table.get(dtype_name(value.dtype))
        if new is None:
            return value
        try:
            return converted(value, dtype_of(new))
        except OutOfRange as e:
            raise UsageError(f"{said} {e}") from e
