"""An entry of an artifact that is there, as lowering and the comparisons need it: its members may be others than the artifact's.

What a build knows from its capture stands in the manifest: inputs, dims, conditions, the way it is called, the form of the answer, states. The member programs are
the source of truth, so no module of the user's is needed. Example inputs are the probe's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Program

from ..verification import probe
from ..verification import answers as verify
from ..spec.entries import PATTERNS
from ..spec.draws import Source
from ..simplify.member_programs import Simplified
from ..spec.input_spec import parse_type
from ..spec.state import BUFFER, OUTPUT, Carried


class Standing(Simplified):
    """One entry of an artifact.

    entry: its name. row: what the manifest says of it. like: for each member the number of a member of the artifact whose shapes it has. table: the weights as they
    shall be, by name. files, programs: of the members' shapes, those that are used. probed: the artifact's probe; None where it has none.
    """

    def __init__(
        self,
        name: str,
        row: form.Entry,
        programs: Sequence[Program],
        like: Sequence[int],
        table: Mapping[str, form.Weight],
        probed: weight_files.Weights | None,
    ) -> None:
        of = [row.signatures[i] for i in like]
        used = sorted(set(of))
        self.entry, self.row, self.table, self.probed = name, row, table, probed
        self.files = [row.member[s] for s in used]
        self.signatures = tuple(used.index(s) for s in of)
        self.count = len(like)
        # whether an input's new value is an output or left in place is the module's own affair
        states = [Carried(row.inputs[s.input].name, s.input, s.output, BUFFER if s.initial else OUTPUT) for s in row.state]
        self.sizes = {d: v.example for d, v in row.dims.items()}
        super().__init__([programs[s] for s in used], lambda weight: table[weight].kind, states, self.sizes)  # type: ignore[arg-type,return-value]
        self.bounds = {d: (v.min, v.max) for d, v in row.dims.items()}
        self.batch = next((d.letter for x in row.inputs for d in parse_type(x.type)[1] if not isinstance(d, int)), "")
        self.signature, self.result = row.signature, row.result
        self.sources = [Source(x.name, x.type, x.low, x.high, self._example(k)) for k, x in enumerate(row.inputs)]

    def _example(self, k: int) -> torch.Tensor | None:
        """The input as the first member sees it in the probe; None where nothing of it is kept there."""
        name = f"{probe.prefix(self.entry)}each.x{k}"
        return self.probed.get(name)[0].clone() if self.probed is not None and name in self.probed else None

    def reads(self) -> set[str]:
        """The weights that its programs and states begin with."""
        return {s.source for p in self.programs for s in p.weights} | {s.initial for s in self.row.state if s.initial}

    def weight(self, name: str, i: int, held: weight_files.Weights) -> torch.Tensor:
        """A weight of member i, mapped."""
        kind = self.kind(name)
        return held.get(name) if kind == "shared" else held.slice(name, i) if kind == "stacked" else held.get(f"{name}@{i}")

    def subject(self, members: Sequence[str], held: weight_files.Weights, module: Callable[[int], nn.Module] | None = None) -> verify.Subject:
        """What the comparisons are made of. members: names. held: their weights. module: the user's own module of member i, where there is one."""
        begins = {s.input: s.initial for s in self.row.state if s.initial}
        return verify.Subject(
            members=tuple(members),
            programs=self.programs,
            signatures=self.signatures,
            sources=self.sources,
            outputs=[o.name for o in self.row.outputs],
            sizes=self._sizes(),
            batch=self.batch,
            weights=lambda i: {s.source: self.weight(s.source, i, held) for s in self.programs[self.signatures[i]].weights},
            module=module,
            method=self.entry,
            states=self.states,
            initial=lambda i, state: self.weight(begins[state.input], i, held) if state.input in begins else None,
            bind=self._bind,
            numbers=tree.numbers(self.result),
            fits=verify.fitting(self.bounds, [g.expr for g in self.row.guards]),
        )

    def _bind(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name, as the entry is called with these leaves."""
        carried = {s.input for s in self.states if s.how == BUFFER}
        given = [p for p in self.signature if not (paths := set(tree.paths(p.tree))) or not paths <= carried]
        while given and given[-1].default and "const" in given[-1].tree:  # what was left out stays out: a wrapper may fill it in by name
            given.pop()
        built = [(p.name, p.kind, tree.build(p.tree, list(leaves), lambda name, rows: dict(rows))) for p in given]
        return tuple(v for _, kind, v in built if kind == "positional"), {n: v for n, kind, v in built if kind == "keyword"}

    def _sizes(self) -> dict[str, int]:
        """Sizes at which the examples are a call: those of the probe where integers without bounds mean something together, as indices do."""
        free = [s for s in self.sources if s.example is not None and not s.example.is_floating_point() and (s.low is None or s.high is None)]
        if not free:
            return self.sizes
        found = dict(self.sizes)
        for source in self.sources:
            for size, dim in zip(source.example.shape if source.example is not None else (), parse_type(source.type)[1]):
                if not isinstance(dim, int):
                    found[dim.letter] = size // dim.factor
        return found

    def probe_calls(self, places: Sequence[int], subject: verify.Subject) -> list[verify.Call]:
        """The probe's own calls, for other members: empty where the artifact has no probe.

        places: for each member the number of the one in the artifact whose inputs it takes. A probe keeps its inputs: drawn out of each other again and again, inputs
        would become all one row.
        """
        made = []
        carried = frozenset(s.input for s in self.states)
        for pattern in PATTERNS if self.probed is not None else ():
            inputs: list[list[torch.Tensor]] = [[] for _ in places]
            for k in range(len(self.sources)):
                name = f"{probe.prefix(self.entry)}{pattern}.x{k}"
                kept = self.probed.get(name) if self.probed is not None and name in self.probed else None
                for i, place in enumerate(places):
                    state = next((s for s in self.states if s.input == k and s.how == BUFFER), None)
                    value = subject.initial(i, state) if state is not None else kept
                    if value is None:
                        return []
                    inputs[i].append((value[place] if state is None and (pattern == "each" or k in carried) else value).clone())
            made.append(verify.Call("the probe", pattern, inputs, True, carried))
        return made
