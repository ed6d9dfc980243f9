"""Defines a model on the wire: an entry of an artifact for all members, for each on its own rows, or for
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from widepack.inference.feature_record import Features
from widepack.inference.model import WideModel

from .layout import EntryLayout
from .outputs import Wanted

ALL, EACH, ONE = "all", "each", "one"
"""The kinds of models on the wire: all members on the same rows, each member on its own rows, one member."""


@dataclass(frozen=True, slots=True)
class ServedArtifact:
    """A loaded artifact under its name on the wire.

    Attributes:
        name: The name.
        model: The loaded model.
        version: The version on the wire: the first 12 digits of the artifact's digest.
        layouts: The entries that can be served, by name.
        answers: The outputs of each entry that are its members' answers themselves.
        defaults: The outputs of each entry for all members if a client requests none.
        left_out: The entries that cannot be served, with the reason.
        features: The names of the numbers of a row that the artifact records, by input.
    """

    name: str
    model: WideModel
    version: str
    layouts: Mapping[str, EntryLayout]
    answers: Mapping[str, Wanted]
    defaults: Mapping[str, Wanted]
    left_out: Mapping[str, str]
    features: Features

    @property
    def members(self) -> tuple[str, ...]:
        """The members' names."""
        return self.model.members


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on the wire.

    Attributes:
        name: Its name, for example `ens`, `ens.each`, `ens.fold3`.
        artifact: The artifact.
        layout: The entry.
        kind: `all`, `each` or `one`.
        member: The number of the member; -1 for several.
    """

    name: str
    artifact: ServedArtifact
    layout: EntryLayout
    kind: str
    member: int = -1

    @property
    def routes(self) -> bool:
        """Whether the model takes the input `member`, which chooses a member for each row."""
        return (
            self.kind == ALL
            and bool(self.layout.batch)
            and not any(i.name == "member" for i in self.layout.inputs)
        )
