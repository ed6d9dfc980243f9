"""Makes the inputs of an entry's wide calls: from the probe, drawn at other sizes, or without values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.entry import Entry

from ...errors import ArtifactError, InputError
from ...planning.plan import Plan
from ...runtime.budget import Budget
from ...spec.draws import InputSource, draw
from ...spec.input_spec import batch_letter
from ...verification import probe as probes
from ..binder import Binder
from ..open_artifact import OpenArtifact

_SEED = 7919  # of input k of member i: _SEED * k + i


class EntryInputs:
    """The inputs of one entry, and the names of its programs and probe tensors.

    Attributes:
        artifact: The open artifact.
        name: The entry's name.
        entry: The entry in the requested dtype.
        binder: Binds calls of the entry.
        example: The example's size of each dim.
        letter: The dim that batch classes are ranges of; "" if the entry has no dim.
    """

    def __init__(self, artifact: OpenArtifact, name: str, binder: Binder) -> None:
        self.artifact, self.name, self.binder = artifact, name, binder
        self.entry: Entry = artifact.entry(name)
        self.example = {d: dim.example for d, dim in self.entry.dims.items()}
        self.letter = batch_letter(leaf.dims for leaf in binder.leaves)

    # ---------------------------------------------------------------- names and flags

    def title(self, pattern: str) -> str:
        """Returns what messages call the wide program of a pattern."""
        return f"{self.artifact.reader.root}: the program of entry {self.name}, pattern {pattern}"

    def probe_prefix(self, pattern: str) -> str:
        """Returns what the names of a call's probe tensors begin with."""
        return f"{probes.prefix(self.name)}{pattern}"

    def letters(self, pattern: str) -> str:
        """Returns for each input `s` (one for all members) or `e` (one for each member)."""
        count = len(self.binder.leaves)
        return {"shared": "s" * count, "each": "e" * count}.get(pattern) or pattern.partition(":")[2]

    def per_member(self, pattern: str) -> list[bool]:
        """Returns for each input whether it has one value for each member, as states always have."""
        return [letter == "e" or k in self.binder.carried for k, letter in enumerate(self.letters(pattern))]

    # ---------------------------------------------------------------- values

    def initial(self) -> dict[int, Tensor]:
        """Returns the states that begin as weights, `[N, ...]`, by the number of their input."""
        weights = self.artifact.weights
        found = {}
        for s in self.entry.state:
            if s.initial:
                value = weights.get(s.initial)
                shared = weights.row(s.initial).kind == "shared"
                found[s.input] = value.expand(len(self.artifact.chosen), *value.shape) if shared else value
        return found

    def of_probe(self, pattern: str, exact: bool = False) -> list[Tensor]:
        """Returns the probe's inputs of a wide call; drawn ones if the artifact has no probe.

        exact: in the artifact's dtype, even if another one is requested.
        Raises: ArtifactError if the probe's tensors are no call of this entry.
        """
        probe, initial = self.artifact.probe, self.initial()
        values: list[Tensor] = []
        for k, stacked in enumerate(self.per_member(pattern)):
            if k in initial:
                values.append(initial[k])
            elif probe is None:
                values.append(
                    self._drawn(k, stacked, {d: max(2, v.example) for d, v in self.entry.dims.items()})
                )
            else:
                x = self._stored(pattern, k, stacked)
                name = f"input {self.entry.inputs[k].name} of the probe"
                values.append(x.to(self.artifact.device) if exact else self.artifact.weights.place(x, name))
        if probe is not None and not exact:
            try:
                self.binder.check(values, self.per_member(pattern))
            except InputError as e:
                raise ArtifactError(f"{self.title(pattern)}: the probe does not match its inputs: {e}") from e
        return values

    def _stored(self, pattern: str, k: int, stacked: bool) -> Tensor:
        """Returns an input of the probe for the loaded members. stacked: with a value for each member."""
        artifact = self.artifact
        assert artifact.probe is not None
        each = stacked and (pattern == "each" or k not in self.binder.carried)
        x = artifact.probe.get(f"{self.probe_prefix('each' if each else 'shared')}.x{k}")
        if not stacked or artifact.whole:
            return x
        count = len(artifact.manifest.members)
        if not x.dim() or x.shape[0] != count:
            raise ArtifactError(
                f"{self.title(pattern)}: the probe's input {k} does not have one value for each of "
                f"{count} members"
            )
        return x[list(artifact.chosen)]

    def drawn(self, pattern: str, sizes: Mapping[str, int]) -> list[Tensor]:
        """Returns drawn inputs of a wide call at these sizes, like the probe's, different for each member."""
        initial = self.initial()
        return [
            initial[k] if k in initial else self._drawn(k, stacked, sizes)
            for k, stacked in enumerate(self.per_member(pattern))
        ]

    def source(self, k: int) -> InputSource:
        """Returns how input k is drawn: like the probe's."""
        spec, probe, name = self.entry.inputs[k], self.artifact.probe, f"{self.probe_prefix('each')}.x{k}"
        example = None
        if probe is not None and name in probe:
            example = self.artifact.weights.place(probe.get(name)[0], f"input {spec.name}").cpu().clone()
        return InputSource(spec.name, spec.type, spec.low, spec.high, example)

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether sizes are within the bounds of the dims and satisfy the guards."""
        for d, size in sizes.items():
            least, most = self.entry.dims[d].min, self.entry.dims[d].max
            if size < least or (most is not None and size > most):
                return False
        return all(guard_forms.holds(g.expr, sizes) for g in self.entry.guards)

    def _drawn(self, k: int, stacked: bool, sizes: Mapping[str, int]) -> Tensor:
        """Draws an input of a wide call. stacked: whether it has one value for each member."""
        source = self.source(k)
        count = len(self.artifact.chosen) if stacked else 1
        values = [draw(source, sizes, _SEED * k + i) for i in range(count)]
        return (torch.stack(values) if stacked else values[0]).to(self.artifact.device)

    def without_values(self, pattern: str, budget: Budget, members: int) -> list[Tensor]:
        """Returns inputs of the example's sizes on the meta device. members: 0 for those of a single member.

        Raises: ArtifactError if they would take more than the budget.
        """
        letters, found = self.letters(pattern), []
        for k, leaf in enumerate(self.binder.leaves):
            shape = [d if isinstance(d, int) else d.factor * self.example[d.letter] for d in leaf.dims]
            many = members and (letters[k] == "e" or k in self.binder.carried)
            found.append(torch.empty([members, *shape] if many else shape, dtype=leaf.dtype, device="meta"))
        size = sum(x.numel() * x.element_size() for x in found)
        if size > budget.bytes:
            raise ArtifactError(
                f"{self.title(pattern)}: its example inputs would take {size:,} bytes, "
                f"and this artifact may take {budget.bytes:,.0f}"
            )
        return found

    def sizes_of(self, plan: Plan) -> dict[str, int]:
        """Returns sizes of at least 2 in a plan's batch class: the measured batch, or near the example."""
        sizes = {d: max(2, v.example) for d, v in self.entry.dims.items()}
        if self.letter in sizes:
            least, most = plan.batch
            dim = self.entry.dims[self.letter]
            batch = max(2, plan.at or max(least, min(sizes[self.letter], most or sizes[self.letter])))
            tried = {**sizes, self.letter: min(batch, dim.max or batch)}
            if all(guard_forms.holds(g.expr, tried) for g in self.entry.guards):
                return tried
        return sizes
