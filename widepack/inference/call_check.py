"""Checks the tensors of a call before anything runs.

Checked in this order: dtype, device, layout, the member axis of an input with one value for each member,
rank, static sizes, named dims (equal letters, bounds), guards. Each error is one sentence that names both
sides. Integer values are not checked: the op itself refuses an index out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.entry import Entry

from ..errors import InputError
from ..spec.input_spec import DimExpr


class NoRows(InputError):
    """Raised for a call in which a dim has size 0, and the model takes at least 1.

    Attributes:
        letter: The dim.
    """

    def __init__(self, message: str, letter: str) -> None:
        super().__init__(message)
        self.letter = letter


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What one tensor of a call must be.

    Attributes:
        name: The input's name.
        title: The name in messages: `input x`.
        dtype: Its dtype.
        dims: The sizes of the member's own shape: numbers and dim expressions.
        text: The type text: `float32[B,8]`.
    """

    name: str
    title: str
    dtype: torch.dtype
    dims: tuple[int | DimExpr, ...]
    text: str


def key_of(values: Sequence[torch.Tensor], entry: str) -> list[Any]:
    """Returns on what all checks of a call depend. entry: the name in messages.

    Raises: InputError for nested tensors, which have no shape.
    """
    try:
        return [(v.shape, v.dtype, v.device, v.layout, v.requires_grad) for v in values]
    except RuntimeError:
        for value in values:
            refuse_nested(value, f"an input of {entry}")
        raise


def refuse_nested(value: torch.Tensor, title: str) -> None:
    """Refuses a nested tensor, which has no shape. title: in messages. Raises: InputError."""
    if value.is_nested:
        raise InputError(f"{title} is a nested tensor, which has no shape; pad its parts to one size")


class CallCheck:
    """Checks calls of one entry.

    Args:
        entry: The entry.
        leaves: What each tensor must be.
        members: N of the loaded model.
        device: Where the tensors must be.
    """

    def __init__(self, entry: Entry, leaves: Sequence[LeafSpec], members: int, device: torch.device) -> None:
        self.leaves, self.members, self.device = leaves, members, device
        self.dims = {d: (v.min, v.max, v.source) for d, v in entry.dims.items()}
        self._guards = [(g.expr, g.source) for g in entry.guards]
        self._fixed = list(entry.fixed)

    def check(self, values: Sequence[torch.Tensor], per_member: Sequence[bool]) -> dict[str, int]:
        """Checks a call. per_member: for each tensor whether it has one value for each member.

        Returns: the size of each named dim. Raises: InputError.
        """
        sizes: dict[str, int] = {}
        from_: dict[str, str] = {}  # the input that each size was read from
        for leaf, value, stacked in zip(self.leaves, values, per_member):
            self._check_storage(leaf, value)
            shape = self._member_shape(leaf, value, stacked)
            for axis, (size, dim) in enumerate(zip(shape, leaf.dims)):
                if isinstance(dim, int):
                    if size != dim:
                        raise InputError(
                            f"{leaf.title} has {size} at axis {axis}, {list(shape)}; "
                            f"the model takes {dim} there, {leaf.text}{self._line(leaf.name, dim, axis)}"
                        )
                    continue
                if size % dim.factor:
                    raise InputError(
                        f"{leaf.title} has {size} at axis {axis}; "
                        f"the model takes {dim}, a multiple of {dim.factor}"
                    )
                got = size // dim.factor
                if sizes.setdefault(dim.letter, got) != got:
                    raise InputError(
                        f"{leaf.title} has {dim.letter} = {got} at axis {axis}, but {from_[dim.letter]} has "
                        f"{dim.letter} = {sizes[dim.letter]}; equal letters are equal sizes"
                    )
                from_.setdefault(dim.letter, leaf.title)
        self._check_sizes(sizes, from_)
        return sizes

    def _check_storage(self, leaf: LeafSpec, value: torch.Tensor) -> None:
        """Checks dtype, device and layout."""
        refuse_nested(value, leaf.title)
        if value.dtype != leaf.dtype:
            raise InputError(
                f"{leaf.title} is {_short(value.dtype)}, the model takes {_short(leaf.dtype)} ({leaf.text}); "
                f"convert it with .to(torch.{_short(leaf.dtype)})"
            )
        if value.device != self.device:
            raise InputError(
                f"{leaf.title} is on {value.device}, the model on {self.device}; "
                f"move it with .to({str(self.device)!r}), or load(..., device={str(value.device)!r})"
            )
        if value.layout != torch.strided:
            raise InputError(
                f"{leaf.title} is {_short(value.layout)}, the model takes a dense tensor ({leaf.text}); "
                "convert it with .to_dense()"
            )

    def _member_shape(self, leaf: LeafSpec, value: torch.Tensor, stacked: bool) -> torch.Size:
        """Returns the shape that one member gets. stacked: with one value for each member."""
        shape = value.shape
        if stacked:
            if not shape or shape[0] != self.members:
                rest = leaf.text[leaf.text.index("[") + 1 :]
                raise InputError(
                    f"{leaf.title} has shape {list(shape)}; one value for each member means a first axis of "
                    f"{self.members} members, [{self.members}, {rest}"
                )
            shape = shape[1:]
        if len(shape) != len(leaf.dims):
            hint = ""
            if not stacked and len(shape) == len(leaf.dims) + 1:
                hint = "; to give each member a separate input call ens.each"
            raise InputError(
                f"{leaf.title} has {len(shape)} dims, {list(shape)}; "
                f"the model takes {leaf.text}, {len(leaf.dims)} dims{hint}"
            )
        return shape

    def _check_sizes(self, sizes: dict[str, int], from_: dict[str, str]) -> None:
        """Checks the bounds of dims and the guards."""
        for letter, (least, most, source) in self.dims.items():
            if letter in sizes and not (least <= sizes[letter] and (most is None or sizes[letter] <= most)):
                bound = f"{least} <= {letter}" + ("" if most is None else f" <= {most}")
                text = f"{letter} = {sizes[letter]} ({from_[letter]}); the model is valid for "
                text += f"{bound}{_source(source)}"
                raise InputError(text) if sizes[letter] else NoRows(text, letter)
        for expr, source in self._guards:
            if not guard_forms.holds(expr, sizes):
                call = ", ".join(f"{d} = {s}" for d, s in sizes.items())
                raise InputError(
                    f"the model was captured under the condition {guard_forms.text(expr)}, and this "
                    f"call has {call}{_source(source)}; its program may be wrong there. Build an "
                    "artifact with a sample of such sizes"
                )

    def _line(self, name: str, size: int, axis: int) -> str:
        """Returns the member's line that fixes a size, if the build found one."""
        start = f"{name} has {size} at axis {axis} ("
        lines = (s.partition("), ")[2] for s in self._fixed if s.startswith(start))
        return next((f"; {line}" for line in lines if line), "")


def _short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).split(".")[1]


def _source(source: str) -> str:
    """Returns where a bound or guard comes from, in brackets."""
    if not source:
        return ""
    return f" ({source})" if " " in source.partition(":")[0] else f" (from {source})"
