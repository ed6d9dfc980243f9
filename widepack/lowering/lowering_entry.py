"""Defines what lowering and the comparisons need to know of an entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from widepack_artifacts.entry import Parameter
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree

from ..ir.fake_values import Shapes
from ..spec.draws import InputSource
from ..spec.state import CarriedState


class LoweringEntry(Protocol):
    """An entry that can be lowered and written: of a build (`building.entry`), of an existing artifact
    (`revision.artifact_entry`), or of a part of the members (`EntryOfPart`).

    entry: the name.
    count: N.
    signatures: for each member its index into the member programs.
    sizes: the size of each dim in the example.
    batch: the dim that batch classes are made of, or "".
    bounds: the least and the largest size of each dim.
    signature, result: the parameters of the call, and the form of the result.
    slots: the kinds of weights and inputs by value name, for a pattern.
    simple: the member programs, simplified for a pattern.
    """

    @property
    def entry(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def signatures(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def batch(self) -> str: ...
    @property
    def bounds(self) -> Mapping[str, tuple[int, int | None]]: ...
    @property
    def signature(self) -> Sequence[Parameter]: ...
    @property
    def result(self) -> Tree: ...
    @property
    def sources(self) -> Sequence[InputSource]: ...
    @property
    def states(self) -> Sequence[CarriedState]: ...
    @property
    def shapes(self) -> Sequence[Shapes]: ...
    def slots(self, pattern: str) -> dict[str, Kind]: ...
    def simple(self, pattern: str) -> list[Program]: ...


class EntryOfPart:
    """An entry for adjacent members only. All that does not depend on the members is that of the whole entry:
    the kinds of weights, too, are those of all members, as in the artifact.

    Attributes:
        whole: The entry for all members.
        members: The numbers of the members.
        count: The number of members of the part.
        signatures: For each of them the index of its program in `simple`.
        shapes: The shapes of the values of each member program of the part.
    """

    entry: str
    sizes: Mapping[str, int]
    batch: str
    bounds: Mapping[str, tuple[int, int | None]]
    signature: Sequence[Parameter]
    result: Tree
    sources: Sequence[InputSource]
    states: Sequence[CarriedState]

    def __init__(self, whole: LoweringEntry, members: range) -> None:
        self.whole, self.members, self.count = whole, members, len(members)
        signatures = [whole.signatures[i] for i in members]
        self._used = sorted(set(signatures))
        self.signatures: Sequence[int] = [self._used.index(s) for s in signatures]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    @property
    def shapes(self) -> Sequence[Shapes]:
        return [self.whole.shapes[s] for s in self._used]

    def slots(self, pattern: str) -> dict[str, Kind]:
        """Returns the kinds of weights and inputs by value name, for a pattern."""
        return self.whole.slots(pattern)

    def simple(self, pattern: str) -> list[Program]:
        """Returns the member programs of the part, simplified for a pattern."""
        programs = self.whole.simple(pattern)
        return [programs[s] for s in self._used]
