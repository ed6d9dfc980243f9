"""Aligns N checkpoints in one table of weights.

The kind of a weight is determined here once, from the bits:

| kind | when |
|---|---|
| shared | N > 1, `share="auto"`, and all members have the same bits (NaN equals itself; 0.0 is not -0.0) |
| stacked | all members have one shape |
| ragged | the shapes differ, and the factory takes `state_dict=`, or the model sets sizes when it loads |

All other differences between the checkpoints, or between them and the model, are one `MemberMismatch` that
lists them all (differences.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from widepack_artifacts.manifest_weights import Weight

from ..errors import MemberMismatch, UsageError
from ..spec.names import refuse_duplicates
from .checkpoint import Checkpoint
from .differences import Compared, bit_equal, differences, under_model_names


@dataclass(frozen=True)
class Alignment:
    """N checkpoints of one architecture, and the table of their weights in the model's order.

    names: of the members. checkpoints: under the model's names. weights: without their roles.
    """

    names: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    weights: tuple[Weight, ...]

    def tensor(self, member: int, name: str) -> Tensor:
        """Returns one member's weight, mapped if its file allows.

        `name` may be an alias. Raises: KeyError.
        """
        canonical = next((w.name for w in self.weights if name in w.aliases), name)
        return self.checkpoints[member].get(canonical)

    def state_dict(self, member: int) -> dict[str, Any]:
        """Returns one member's state under all names that the model has, ready for `load_state_dict`."""
        checkpoint = self.checkpoints[member]
        tensors: dict[str, Tensor] = {}
        for w in self.weights:
            tensor = checkpoint.get(w.name)
            tensors.update(dict.fromkeys((w.name, *w.aliases), tensor))
        return checkpoint.versioned(tensors)

    @property
    def signatures(self) -> tuple[int, ...]:
        """For each member the number of its shapes, as `signatures_of` returns it."""
        return signatures_of(self.weights, len(self.names))


def signatures_of(weights: Sequence[Weight], members: int) -> tuple[int, ...]:
    """Returns for each member the number of its shapes: equal ones have equal numbers, from 0 in order."""
    ragged = [w for w in weights if w.kind == "ragged"]
    rows = [tuple(tuple(w.of(i)) for w in ragged) for i in range(members)]
    order = list(dict.fromkeys(rows))
    return tuple(order.index(row) for row in rows)


def repeated(one: Alignment, names: Sequence[str]) -> Alignment:
    """Returns one member N times, with all weights Shared. names: of the N members."""
    weights = tuple(replace(w, kind="shared") for w in one.weights)
    return Alignment(tuple(names), one.checkpoints * len(names), weights)


def align(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[str],
    share: str = "auto",
    model_state: Mapping[str, Tensor] | None = None,
    ragged: bool = False,
) -> Alignment:
    """Aligns N checkpoints in one table of weights.

    names: of the members, unique. share: `auto`, or `none`: no weight is Shared. model_state: the state dict
    of a fresh member, which defines the names and the tied weights. ragged: whether shapes may differ (the
    factory takes `state_dict=`). Raises: UsageError; MemberMismatch with all differences.
    """
    if share not in ("auto", "none"):
        raise UsageError(f"share={share!r} is unknown; known: auto, none")
    if not checkpoints or len(names) != len(checkpoints):
        raise UsageError(
            f"{len(checkpoints)} checkpoints and {len(names)} names; every member needs one "
            "checkpoint and one name"
        )
    refuse_duplicates(names)
    if model_state is not None:
        checkpoints = [c if c.given else under_model_names(c, model_state) for c in checkpoints]
    labels = [f"checkpoint {i} ({c.label})" for i, c in enumerate(checkpoints)]
    compared = Compared.of(checkpoints, labels, model_state, ragged)
    if (different := differences(compared)).lines:
        raise MemberMismatch(different.describe())

    weights = []
    infos = compared.infos
    for name in infos[0] if compared.model is None else compared.model:
        if compared.canonical.get(name, name) == name:
            kind, shape = _kind(checkpoints, name, [info[name].shape for info in infos], share)
            aliases = list(compared.aliases.get(name, ()))
            weights.append(Weight(name, kind, infos[0][name].dtype, shape, "", aliases))
    return Alignment(tuple(names), tuple(checkpoints), tuple(weights))


def _kind(
    checkpoints: Sequence[Checkpoint], name: str, shapes: list[tuple[int, ...]], share: str
) -> tuple[str, list[Any]]:
    """Returns the kind of a weight and its shape, or N shapes."""
    if len(set(shapes)) > 1:
        return "ragged", [list(shape) for shape in shapes]
    if share == "none" or len(shapes) == 1:
        return "stacked", list(shapes[0])
    begin = checkpoints[0].first_numbers(name)  # trained members differ there, so the rest is not read
    same = all(bit_equal(begin, other.first_numbers(name)) for other in checkpoints[1:])
    if same:
        first = checkpoints[0].get(name)
        same = all(bit_equal(first, other.get(name)) for other in checkpoints[1:])
    return "shared" if same else "stacked", list(shapes[0])
