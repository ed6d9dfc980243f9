"""Results of a wide call: the member's own structure with a member axis on every leaf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.program import Output as Leaf

from ..runtime.graph_module import storage


class Output(Mapping[str, Any]):
    """What a member returned as a dataclass, named tuple or mapping class: by key, by attribute, and by number, in the class's order.

    A field hides what else there is under its name: `y.values` is the field where there is one. `kind` is the name of the member's class.
    """

    _rows: dict[str, Any]

    def __init__(self, kind: str, rows: Sequence[tuple[str, Any]]) -> None:
        self.__dict__["_kind"] = kind
        self.__dict__["_rows"] = dict(rows)

    def __getattribute__(self, name: str) -> Any:
        rows: dict[str, Any] = object.__getattribute__(self, "__dict__").get("_rows", {})
        return rows[name] if name in rows and not name.startswith("_") else object.__getattribute__(self, name)

    @property
    def kind(self) -> str:
        return str(self.__dict__["_kind"])

    def __getitem__(self, key: str | int) -> Any:
        return self._rows[key] if isinstance(key, str) else [v for v in self._rows.values() if v is not None][key]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_rows"][name]
        except KeyError:
            raise AttributeError(f"{self.__dict__['_kind']} has no {name!r}; it has {', '.join(self._rows)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Output({self.__dict__['_kind']}: {', '.join(f'{k}={type(v).__name__}' for k, v in self._rows.items())})"


def _flatten(output: Output) -> tuple[list[Any], tuple[str, tuple[str, ...]]]:
    return list(Mapping.values(output)), (output.__dict__["_kind"], tuple(output))


def _unflatten(values: Iterable[Any], context: tuple[str, tuple[str, ...]]) -> Output:
    return Output(context[0], list(zip(context[1], values)))


pytree.register_pytree_node(Output, _flatten, _unflatten, serialized_type_name="widepack.Output")


def carried(
    values: Sequence[Any], states: Sequence[tuple[int, int, str]], outputs: Sequence[Leaf], members: int, given: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """The new states of a call, `[N, ...]`, each in memory that is neither the answer's nor that of another input: the caller may write into those.

    values: the program's outputs. states: (input, output, name). outputs: of a wide program; empty for one member's, whose states have no member axis.
    """
    own, out = {i for i, _, _ in states}, {o for _, o, _ in states}
    taken = {storage(v) for i, v in enumerate(given) if i not in own} | {storage(v) for i, v in enumerate(values) if i not in out}
    made = {}
    for _, o, name in states:
        value = values[o]
        if outputs and outputs[o].kind == "shared":
            value = value.unsqueeze(0).expand(members, *value.shape).clone(memory_format=torch.contiguous_format)
        elif storage(value) in taken:
            value = value.clone()
        taken.add(storage(value))
        made[name] = value
    return made


def present(values: Sequence[Any], outputs: Sequence[Leaf], members: int, result: tree.Tree) -> Any:
    """Output values of a program as the caller sees them: a Shared leaf is expanded to `[N, ...]`, a Ragged one is a list of N."""
    leaves = [v.expand(members, *v.shape) if o.kind == "shared" and isinstance(v, torch.Tensor) else v for v, o in zip(values, outputs)]
    if "leaf" in result:
        return leaves[result["leaf"]]
    return tree.build(result, leaves, Output)
