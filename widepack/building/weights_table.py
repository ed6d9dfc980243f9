"""Makes the weights table of a build: a row for each weight of the members' checkpoints and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from widepack_artifacts.program import Kind
from widepack_artifacts.weight_table import Weight

from ..capture.module_tensors import tensors_of
from ..checkpoints.alignment import Alignment
from ..checkpoints.differences import bit_equal
from ..checkpoints.factory import Factory
from ..errors import CaptureError
from ..spec.dtypes import dtype_name
from ..verification.program_difference import is_literal
from .captures import Captures
from .members import filled_member


@dataclass(frozen=True)
class WeightRow:
    """A row of the weights table. value(i): returns member i's tensor."""

    weight: Weight
    value: Callable[[int], torch.Tensor]


class WeightsTable:
    """The weights that the entries of a build read.

    parameters: the names of the module's parameters; all other weights of the checkpoints are buffers.
    rows: a row for each weight. by_name: the rows by every name, aliases too.
    """

    def __init__(
        self, factory: Factory, aligned: Alignment, captures: Sequence[Captures], parameters: Sequence[str]
    ) -> None:
        self.factory, self.aligned, self.captures = factory, aligned, captures
        self.count = len(aligned.names)
        self.rows = self._table(parameters)
        self.by_name = {name: r for r in self.rows for name in (r.weight.name, *r.weight.aliases)}

    def kind(self, name: str) -> Kind:
        """Returns the kind of a weight."""
        return self.by_name[name].weight.kind  # type: ignore[return-value]

    def _table(self, parameters: Sequence[str]) -> list[WeightRow]:
        rows: list[WeightRow] = []
        roles = {
            n: role for entry in self.captures for c in entry.captured for n, (role, _) in c.weights.items()
        }
        known = set()
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            shape: list[Any] = [list(s) if isinstance(s, tuple) else s for s in w.shape]
            weight = Weight(w.name, w.kind, w.dtype, shape, role, list(w.aliases))
            rows.append(WeightRow(weight, partial(self.aligned.tensor, name=w.name)))
            known |= {w.name, *w.aliases}
        lifted = {
            n: value
            for entry in self.captures
            for n, (_, value) in entry.first.weights.items()
            if n not in known
        }
        return rows + [_constant(n, values) for n, values in self._lifted_values(lifted).items()]

    def _lifted_values(self, lifted: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Returns every member's values of tensors that no checkpoint has, by name.

        These are buffers that are not saved, and tensors in plain attributes. They are read from each
        member's module. A literal of the program is the same in all members.
        """
        values: dict[str, list[torch.Tensor]] = {n: [] for n in lifted}
        for i in range(self.count if lifted else 0):
            module = filled_member(self.factory, self.aligned, i)
            tensors = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in lifted:
                value = tensors.get(n, lifted[n] if is_literal(n) else None)
                if value is None:
                    raise CaptureError(
                        f"member {self.aligned.names[i]} has no tensor at {n}, but the captured member has"
                        " one;"
                        " the factory must make all members alike"
                    )
                values[n].append(value.detach().clone())
        return values


def _constant(name: str, values: Sequence[torch.Tensor]) -> WeightRow:
    """Returns the row of a tensor that no checkpoint has. values: one for each member.

    Raises: CaptureError.
    """
    first = values[0]
    if any(v.shape != first.shape or v.dtype != first.dtype for v in values):
        raise CaptureError(
            f"the constant {name} differs in shape or dtype between members;"
            " make it a buffer that is saved with the checkpoint"
        )
    kind = "shared" if all(bit_equal(v, first) for v in values) else "stacked"
    weight = Weight(name, kind, dtype_name(first.dtype), list(first.shape), "constant")
    return WeightRow(weight, values.__getitem__)
