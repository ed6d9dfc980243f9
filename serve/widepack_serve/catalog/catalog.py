"""Finds the model that a name on the wire means.

| name | model |
|---|---|
| `ens` | all members on the same rows; the entry `forward` |
| `ens.each` | each member on its own rows |
| `ens.fold3`, `ens.3` | one member |
| `ens.encode`, `ens.encode.each`, `ens.encode.fold3` | the same for another entry |

If names of one artifact are equal, the artifact goes before an entry, an entry before `each`, `each` before a
member's name, a name before a number. Two artifacts must not have models of one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from widepack.errors import UsageError
from widepack.inference.feature_record import read_features
from widepack.inference.model import WideModel
from widepack.spec.entries import FORWARD
from widepack_artifacts.errors import some

from ..errors import NotFound, RequestError
from .layout import EntryLayout
from .outputs import Defaults, Wanted, answers, wanted_output
from .served import ALL, EACH, ONE, ServedArtifact, ServedModel

CURRENT = "1"
"""The version that stands for the current one, for clients that send a number as Triton has them."""
_COMPARED = 1_000
_SHOWN = 4


def served_artifact(name: str, model: WideModel, defaults: Defaults) -> ServedArtifact:
    """Describes a loaded model for the wire.

    Args:
        name: Its name on the wire.
        model: The loaded model.
        defaults: What the server was started with.

    Raises:
        UsageError: No entry can be served, or a default output does not exist.
    """
    layouts: dict[str, EntryLayout] = {}
    left_out: dict[str, str] = {}
    for entry in model.entries:
        try:
            layouts[entry] = EntryLayout(model.entry(entry))
        except UsageError as e:
            left_out[entry] = str(e)
    if not layouts:
        raise UsageError(f"{name} cannot be served: {'; '.join(left_out.values())}")
    return ServedArtifact(
        name,
        model,
        model.manifest.digest.removeprefix("sha256:")[:12],
        layouts,
        {entry: answers(layout) for entry, layout in layouts.items()},
        {entry: _defaults(entry, layout, defaults) for entry, layout in layouts.items()},
        left_out,
        read_features(model.manifest),
    )


def _defaults(entry: str, layout: EntryLayout, defaults: Defaults) -> Wanted:
    """Returns the default outputs of an entry. Entries other than `forward` answer as they are."""
    if not defaults.outputs or entry != FORWARD:
        return answers(layout)
    if twice := [n for k, n in enumerate(defaults.outputs) if n in defaults.outputs[:k]]:
        raise UsageError(f"outputs: {twice[0]} is named twice")
    states = tuple(w for w in answers(layout) if layout.outputs[w.leaf].state)
    try:
        return tuple(wanted_output(layout, n, {}, defaults, figures=True) for n in defaults.outputs) + states
    except RequestError as e:
        raise UsageError(f"outputs: {e}") from None


class Catalog:
    """All models on the wire, by name.

    Args:
        artifacts: The served artifacts.
        members: Whether each member is a model, too.

    Attributes:
        artifacts: The served artifacts by name.

    Raises:
        UsageError: Two artifacts have models of one name.
    """

    def __init__(self, artifacts: Sequence[ServedArtifact], *, members: bool) -> None:
        self.artifacts = {a.name: a for a in artifacts}
        self._members = members
        self._models: dict[str, ServedModel] = {}
        for find in (_of_artifact, _of_entries, *((_of_members,) if members else ())):
            for artifact in artifacts:
                for model in find(artifact):
                    held = self._models.setdefault(model.name, model).artifact
                    if held is not artifact:
                        raise UsageError(
                            f"the artifacts {held.name} and {artifact.name} both have a model {model.name}; "
                            "give one another name: NAME=PATH"
                        )

    def replaced(self, artifact: ServedArtifact) -> Catalog:
        """Returns a catalog with an artifact in the place of the one of its name."""
        return Catalog(list({**self.artifacts, artifact.name: artifact}.values()), members=self._members)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Returns a model by its name on the wire.

        Args:
            name: The name.
            version: The version; "" or `CURRENT` for the current one.

        Raises:
            NotFound: There is no such model, or not in this version.
        """
        found = self._models.get(name)
        if found is None:
            raise NotFound(f"there is no model {name[:80]!r}{self._hint(name)}")
        if version not in ("", CURRENT, found.artifact.version):
            raise NotFound(
                f"model {name[:80]} has no version {version[:40]!r}; its version is "
                f"{found.artifact.version}, and {CURRENT} means the current one"
            )
        return found

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def _hint(self, name: str) -> str:
        names = [n for _, n in zip(range(_COMPARED), self._models)]
        near = get_close_matches(name[:80], names, 1)
        if near:
            return f"; did you mean {near[0]}?"
        return f"; the models are {some(self._models, _SHOWN)}"


def _prefixes(artifact: ServedArtifact) -> Mapping[str, EntryLayout]:
    """Returns the name on the wire of each entry. The first entry has that of the artifact without
    `forward`.
    """
    first = FORWARD if FORWARD in artifact.layouts else next(iter(artifact.layouts))
    others = {f"{artifact.name}.{e}": layout for e, layout in artifact.layouts.items() if e != first}
    return {artifact.name: artifact.layouts[first], **others}


def _of_artifact(artifact: ServedArtifact) -> Iterator[ServedModel]:
    name, layout = next(iter(_prefixes(artifact).items()))
    if not layout.ragged:
        yield ServedModel(name, artifact, layout, ALL)


def _of_entries(artifact: ServedArtifact) -> Iterator[ServedModel]:
    prefixes = _prefixes(artifact)
    for prefix, layout in prefixes.items():
        if not layout.ragged:
            yield ServedModel(prefix, artifact, layout, ALL)
    for prefix, layout in prefixes.items():
        if not layout.ragged:
            yield ServedModel(f"{prefix}.{EACH}", artifact, layout, EACH)


def _of_members(artifact: ServedArtifact) -> Iterator[ServedModel]:
    prefixes = _prefixes(artifact)
    for prefix, layout in prefixes.items():
        for number, name in enumerate(artifact.members):
            yield ServedModel(f"{prefix}.{name}", artifact, layout, ONE, number)
    for prefix, layout in prefixes.items():
        for number in range(len(artifact.members)):
            yield ServedModel(f"{prefix}.{number}", artifact, layout, ONE, number)
