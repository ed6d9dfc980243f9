"""Holds one entry of an existing artifact as lowering and the comparisons need it.

The manifest stores what a build knows from its capture: inputs, dims, conditions, parameters, the form of the
result, states. The member programs define what a member computes, so the user's module is not needed. Example
inputs come from the probe. The members may differ from those of the artifact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree
from widepack_artifacts.weight_table import Weight

from ..ir.tensor_type import parse_slot
from ..simplify.factored_weights import FactorNames
from ..simplify.member_programs import MemberPrograms
from ..spec.draws import InputSource
from ..spec.entries import PATTERNS
from ..spec.input_spec import batch_letter
from ..spec.state import BUFFER, OUTPUT, CarriedState
from ..verification import probe
from ..verification.member_costs import check_call, check_costs
from ..verification.subject import CallCase, Subject, VerifiedCall, subject_of


class ArtifactEntry(MemberPrograms):
    """One entry of an artifact.

    entry: its name. row: its row in the manifest. like: for each member the number of an artifact's member
    with its shapes. table: the weights of the revised artifact, by name. files, programs: the member programs
    that are used. probed: the tensors of the artifact's probe; None without a probe. factors: the weights
    that are stored as factors, by name.
    """

    def __init__(
        self,
        name: str,
        row: Entry,
        programs: Sequence[Program],
        like: Sequence[int],
        table: Mapping[str, Weight],
        probed: weight_files.Weights | None,
        factors: Mapping[str, FactorNames] | None = None,
    ) -> None:
        self._factors = dict(factors or {})
        of = [row.signatures[i] for i in like]
        used = sorted(set(of))
        self.entry, self.row, self.table, self.probed = name, row, table, probed
        self.files = [row.member[s] for s in used]
        self.count = len(like)
        self.sizes = {d: v.example for d, v in row.dims.items()}
        super().__init__(
            [programs[s] for s in used],
            lambda weight: cast(Kind, "stacked" if weight in self._factors else table[weight].kind),
            _states(row),
            self.sizes,
            [used.index(s) for s in of],
            factors,
        )
        self.bounds = {d: (v.min, v.max) for d, v in row.dims.items()}
        self.batch = batch_letter(parse_slot(x.type).dims for x in row.inputs)
        self.signature, self.result = row.signature, row.result
        self.sources = [
            InputSource(x.name, x.type, x.low, x.high, self._example(k)) for k, x in enumerate(row.inputs)
        ]

    @property
    def returned(self) -> Tree:
        """The form of the result. The manifest does not store where the member returns its states."""
        return self.row.result

    @property
    def output_names(self) -> Sequence[str]:
        """The names of the leaves of the result, then of the states."""
        return [o.name for o in self.row.outputs]

    @property
    def conditions(self) -> Sequence[Any]:
        """The expressions of the guards."""
        return [g.expr for g in self.row.guards]

    @property
    def buffer_inputs(self) -> frozenset[int]:
        """The numbers of the inputs that are buffers of the member."""
        return frozenset(s.input for s in self.states if s.how == BUFFER)

    def reads_stored(self) -> set[str]:
        """Returns the names of the stored weights that the programs read and the states begin with."""
        read = {s.source for p in self.programs for s in p.weights}
        read |= {s.initial for s in self.row.state if s.initial}
        split = {name: self._factors[name] for name in read if name in self._factors}
        return (read - set(split)) | {part for f in split.values() for part in f.parts}

    def subject(self, members: Sequence[str], files: weight_files.Weights) -> Subject:
        """Returns the subject of the comparisons, without modules. members: their names. files: their
        weights.
        """
        buffers = {s.input: s.initial for s in self.row.state if s.initial}

        def initial(i: int, state: CarriedState) -> torch.Tensor | None:
            return self.weight(buffers[state.input], i, files) if state.input in buffers else None

        title = f"a member program of entry {self.entry}"
        subject = subject_of(self, members, files, initial=initial, before=partial(check_costs, title))
        return replace(
            subject, sizes=self._call_sizes(), before_call=lambda inputs: check_call(title, subject, inputs)
        )

    def _example(self, k: int) -> torch.Tensor | None:
        """Returns input k of the first member in the probe; None if the probe does not store it."""
        name = f"{probe.prefix(self.entry)}each.x{k}"
        return self.probed.get(name)[0].clone() if self.probed is not None and name in self.probed else None

    def _call_sizes(self) -> dict[str, int]:
        """Returns sizes at which the example inputs form a valid call.

        Integers without bounds, for example indices, may fit only the sizes of the probe. Then these are
        returned, else the sizes of the manifest.
        """
        free = [
            s
            for s in self.sources
            if s.example is not None
            and not s.example.is_floating_point()
            and (s.low is None or s.high is None)
        ]
        if not free:
            return self.sizes
        sizes = dict(self.sizes)
        for source in self.sources:
            shape = source.example.shape if source.example is not None else ()
            for size, dim in zip(shape, parse_slot(source.type).dims):
                if not isinstance(dim, int):
                    sizes[dim.letter] = size // dim.factor
        return sizes

    def probe_calls(self, places: Sequence[int], subject: Subject) -> list[VerifiedCall]:
        """Returns the probe's calls for other members; empty without a probe.

        places: for each member the number of the artifact's member whose inputs it takes. The probe keeps its
        inputs: if each revision drew inputs out of the last ones, all rows would become equal.
        """
        if self.probed is None:
            return []
        carried = frozenset(s.input for s in self.states)
        buffers = {s.input: s for s in self.states if s.how == BUFFER}
        calls = []
        for pattern in PATTERNS:
            inputs: list[list[torch.Tensor]] = [[] for _ in places]
            for k in range(len(self.sources)):
                stacked = pattern == "each" or k in carried
                for i, place in enumerate(places):
                    value = (
                        subject.initial(i, buffers[k])
                        if k in buffers
                        else self._probe_input(pattern, k, place if stacked else None)
                    )
                    if value is None:
                        return []
                    inputs[i].append(value.clone())
            calls.append(VerifiedCall(CallCase(name="the probe"), pattern, inputs, True, carried))
        return calls

    def _probe_input(self, pattern: str, k: int, place: int | None) -> torch.Tensor | None:
        """Returns input k in the probe, of one member where it is stacked; None if the probe does not store
        it.
        """
        name = f"{probe.prefix(self.entry)}{pattern}.x{k}"
        if self.probed is None or name not in self.probed:
            return None
        value = self.probed.get(name)
        return value if place is None else value[place]


def _states(row: Entry) -> list[CarriedState]:
    """Returns the states of an entry. The manifest does not store whether an input is changed in place."""
    return [
        CarriedState(row.inputs[s.input].name, s.input, s.output, BUFFER if s.initial else OUTPUT)
        for s in row.state
    ]
