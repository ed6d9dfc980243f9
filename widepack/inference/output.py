"""Builds the results of a wide call: the member's own structure, with a member axis on every leaf.

`check_rows` compares the sizes of answers with what an entry says of them: artifacts may be untrusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.entry import OutputLeaf
from widepack_artifacts.program import Output as Leaf

from ..errors import ArtifactError
from ..ir.tensor_type import sizes_of
from ..ir.torch_tuples import torch_tuple
from ..runtime.executable import storage
from ..spec.input_spec import DimExpr


class Output(Mapping[str, Any]):
    """What a member returned as a dataclass, named tuple or mapping class.

    Fields are read by key, by attribute, or by number in the order of the class. A number counts the fields
    that are not None. A field hides a method of the same name: `y.values` is the field `values` if the
    member's class has one. An `Output` is a pytree node of torch.

    Attributes:
        kind: The name of the member's class.

    Example:
        >>> y = ens(input_ids)  # the member returns a dataclass with logits
        >>> y.logits.shape == y["logits"].shape == y[0].shape
        True
    """

    __module__ = "widepack"  # pickles name the public place

    _rows: dict[str, Any]

    def __init__(self, kind: str, rows: Sequence[tuple[str, Any]]) -> None:
        self.__dict__["_kind"] = kind
        self.__dict__["_rows"] = dict(rows)

    def __getattribute__(self, name: str) -> Any:
        rows: dict[str, Any] = object.__getattribute__(self, "__dict__").get("_rows", {})
        return (
            rows[name] if name in rows and not name.startswith("_") else object.__getattribute__(self, name)
        )

    @property
    def kind(self) -> str:
        """The name of the member's class.

        Example:
            >>> ens(input_ids).kind  # the member returns a `ModelOutput` of its own
            'ModelOutput'
        """
        return str(self.__dict__["_kind"])

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return self._rows[key]
        return [v for v in self._rows.values() if v is not None][key]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_rows"][name]
        except KeyError:
            raise AttributeError(
                f"{self.__dict__['_kind']} has no {name!r}; it has {', '.join(self._rows)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={type(v).__name__}" for k, v in self._rows.items())
        return f"Output({self.__dict__['_kind']}: {fields})"


def named_values(kind: str, rows: Sequence[tuple[str, Any]]) -> Any:
    """Returns an `Output`, or the named tuple of torch that a member returned (`x.max(1)`)."""
    found = torch_tuple(kind, rows)
    return Output(kind, rows) if found is None else found


def _flatten(output: Output) -> tuple[list[Any], tuple[str, tuple[str, ...]]]:
    return list(Mapping.values(output)), (output.__dict__["_kind"], tuple(output))


def _unflatten(values: Iterable[Any], context: tuple[str, tuple[str, ...]]) -> Output:
    return Output(context[0], list(zip(context[1], values)))


pytree.register_pytree_node(Output, _flatten, _unflatten, serialized_type_name="widepack.Output")


def new_states(
    values: Sequence[Any],
    states: Sequence[tuple[int, int, str]],
    outputs: Sequence[Leaf],
    members: int,
    inputs: Sequence[Any],
) -> dict[str, torch.Tensor]:
    """Returns the new states of a call, `[N, ...]`, by name.

    The caller may write into a state, so its memory is neither that of the answer nor that of another input.

    values: the program's outputs. states: (input, output, name) of each. inputs: of the call.
    outputs: of a wide program; empty for a single member, whose states have no member axis.
    """
    state_inputs, state_outputs = {i for i, _, _ in states}, {o for _, o, _ in states}
    taken = {storage(v) for i, v in enumerate(inputs) if i not in state_inputs} | {
        storage(v) for i, v in enumerate(values) if i not in state_outputs
    }
    found = {}
    for _, o, name in states:
        value = values[o]
        if outputs and outputs[o].kind == "shared":
            value = (
                value.unsqueeze(0).expand(members, *value.shape).clone(memory_format=torch.contiguous_format)
            )
        elif storage(value) in taken:
            value = value.clone()
        taken.add(storage(value))
        found[name] = writable(value)
    return found


def writable(value: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor that code outside of `torch.inference_mode` may write into."""
    if not value.is_inference() or torch.is_inference_mode_enabled():
        return value
    memory = value.untyped_storage()
    plain = torch.empty(0, dtype=value.dtype, device=value.device)
    return plain.set_(memory, value.storage_offset(), value.shape, value.stride())


def build_answer(
    values: Sequence[Any],
    outputs: Sequence[Leaf],
    members: int,
    result: tree.Tree,
    lists: Collection[int] = (),
) -> Any:
    """Builds the caller's answer from a program's outputs.

    A Shared leaf is expanded to `[N, ...]`. A Ragged leaf is a list of N tensors. result: the form of the
    answer. lists: the numbers of other leaves that become lists of N tensors.
    """
    leaves = [
        v.expand(members, *v.shape) if o.kind == "shared" and isinstance(v, torch.Tensor) else v
        for v, o in zip(values, outputs)
    ]
    for k in lists:
        leaves[k] = list(leaves[k].unbind(0))
    return built(result, leaves)


def built(result: tree.Tree, leaves: list[Any]) -> Any:
    """Returns a member's own structure over the leaves of an answer. result: the form of the answer."""
    return leaves[result["leaf"]] if "leaf" in result else tree.build(result, leaves, named_values)


def check_rows(title: str, leaves: Sequence[Any], dims: Sequence[int], rows: int) -> None:
    """Checks that each leaf of an answer has as many rows as the call.

    title: the entry in messages. dims: in which dim of each leaf the rows are. rows: of the call. Raises:
    ArtifactError.
    """
    for number, (leaf, dim) in enumerate(zip(leaves, dims)):
        shape = getattr(leaf, "shape", ())
        if len(shape) <= dim or shape[dim] != rows:
            raise ArtifactError(
                f"{title}: output {number} of a program is {list(shape)} for {rows} rows; "
                f"the entry says that its rows are in dim {dim}"
            )


class AnswerSizes:
    """The sizes of an entry's outputs that are dims of its inputs."""

    def __init__(self, outputs: Sequence[OutputLeaf]) -> None:
        self._named = [
            (number, dim, size)
            for number, output in enumerate(outputs)
            for dim, size in enumerate(sizes_of(output.type))
            if isinstance(size, DimExpr)
        ]

    def check(self, title: str, leaves: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Checks the leaves of a member's answer. sizes: of the dims in the call. Raises: ArtifactError."""
        for number, dim, size in self._named:
            if size.letter in sizes:
                shape = getattr(leaves[number], "shape", ())
                expected = sizes[size.letter] * size.factor
                if len(shape) <= dim or shape[dim] != expected:
                    raise ArtifactError(
                        f"{title}: output {number} of its program is {list(shape)}; the entry says that dim "
                        f"{dim} is {size}, which is {expected} in this call"
                    )
