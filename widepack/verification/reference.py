"""What the members of an entry answer to the calls of a verification, made once, and what is held to it: wide programs (comparison (b)), the record, the probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Program

from . import probe
from . import answers as verify
from .tolerance import Pool
from ..spec.entries import PATTERNS
from ..errors import VerificationError
from ..building.entry import all_weights
from ..lowering.lower import Lowered
from ..system.memory import give_back
from .parts import Part, parts
from ..planning.plan import Plan
from ..system.progress import Stages
from ..spec.state import BUFFER
from ..lowering.wide_programs import Entry

NOT_FINITE = "not_finite"
"""Where a record names members whose answers are NaN or inf where the others' are not."""


@dataclass(frozen=True)
class Compared:
    """pools: what was found, by output. at_once: how many members were compared at a time, where it was not all."""

    pools: Sequence[Pool]
    at_once: int | None


class Truth:
    """entry: whose programs are compared. subject: its members. held: their weights. made: the calls. stages: told of each member.

    captured: comparison (a) of the modules that the subject has. Raises: VerificationError for a member that fails where others answer, and for a wrong capture.
    """

    def __init__(self, entry: Entry, subject: verify.Subject, held: weight_files.Weights, made: Sequence[verify.Call], stages: Stages) -> None:
        self.entry, self.subject, self.held, self.made = entry, subject, held, made
        self.pools = [Pool(name) for name in subject.outputs]
        self.found, self.captured, self.raised = verify.answers(subject, made, self.pools, stages.step)
        if not self.raised:
            verify.widen(self.pools)

    def hold(self, pattern: str, program: Program, plan: Plan, lowered: Lowered | None, way_out: str) -> Compared:
        """Comparison (b) of a wide program. plan: what it was lowered by. lowered: where it was made just now. way_out: the end of the error.

        Raises: VerificationError naming the first wrong node.
        """
        checked = [Pool(p.name, p.eps, p.own_square, p.own_max, p.scale_square, p.count) for p in self.pools]
        divided = parts(self.entry, pattern, program, plan, lowered)
        for part in divided:
            weights = all_weights(part.program, self.held, self.entry.count, part.members)
            give_back()
            self.subject.ask(part.members)
            verify.check_wide(self.subject, part.program, weights, pattern, self.made, self.found, checked, part.members)
            if wrong := next((w for p in checked if (w := p.wrong())), ""):
                raise VerificationError(
                    f"the wide program ({self.entry.entry}, {pattern}) is wrong: {wrong}. {self._where(part, pattern, weights)}. {way_out}"
                )
        return Compared(checked, len(divided[0].members) if len(divided) > 1 else None)

    def _where(self, part: Part, pattern: str, weights: verify.Weights) -> str:
        if part.lowered is None:
            return "It is the program that was there before"
        call = next(c for c in self.made if c.pattern == pattern)
        simplified = self.entry.simple(pattern)
        node = verify.bisect(self.subject, simplified, part.lowered, weights, call, part.members)
        return (node or "no single node is out of bounds") + verify.of_bits(simplified[0])

    def record(self, capture: Mapping[str, Any], wide: Mapping[str, Compared]) -> dict[str, Any]:
        """The record for the manifest. capture: what it says of comparison (a). wide: what was compared, by pattern and number."""
        in_parts = {key: one.at_once for key, one in wide.items() if one.at_once is not None}
        return {
            "calls": [f"{c.pattern} {c.label}" for c in self.made],
            "truth": "float64" if self.raised else "float32 (an op has no float64 kernel, or decides otherwise in it); bound 1e-5 of the scale",
            "nested_tensor_fast_path": "off",
            **capture,
            "wide": {key: [p.record() for p in one.pools] for key, one in wide.items()},
            **({NOT_FINITE: rows} if (rows := self.not_finite()) else {}),
            **({"parts": in_parts} if in_parts else {}),
            "torch": torch.__version__,
        }

    def not_finite(self) -> list[dict[str, Any]]:
        """The members whose own answers have NaN or inf in an output in which all others' are finite, a row for each: `member`, `output`, `numbers` of `of`."""
        rows = []
        for k, output in enumerate(self.subject.outputs):
            bad = [sum(int((~torch.isfinite(a.own[i][k])).sum()) for a in self.found) for i in range(len(self.subject.members))]
            if 0 < sum(map(bool, bad)) < len(bad):  # where all have some, a mask of -inf may well be meant
                counts = [sum(a.own[i][k].numel() for a in self.found) for i in range(len(bad))]
                rows += [
                    {"member": m, "output": output or str(k), "numbers": n, "of": of} for m, n, of in zip(self.subject.members, bad, counts) if n
                ]
        return rows

    def small(self, pattern: str) -> verify.Call:
        """The call at batch 2, or the first smaller or larger one that there is."""
        order = [f"{self.entry.batch}={n}" for n in (2, 1, 5)]
        return min((c for c in self.made if c.pattern == pattern), key=lambda c: order.index(c.label) if c.label in order else len(order))

    def probed(self, own: Sequence[verify.Call] = ()) -> dict[str, probe.Answers]:
        """The calls of the probe, by their place in it. own: those that it shall hold, by their patterns; a small one where there is none."""
        begun = {s.input for s in self.entry.states if s.how == BUFFER}
        found: dict[str, probe.Answers] = {}
        for pattern in PATTERNS:
            call = next((c for c in own if c.pattern == pattern), None) or self.small(pattern)
            inputs = [None if k in begun else x for k, x in enumerate(call.stacked())]
            truth = next(answer.truth for c, answer in zip(self.made, self.found) if c is call)
            found[f"{probe.prefix(self.entry.entry)}{pattern}"] = inputs, truth
        return found


def not_finite(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the records of all entries say of members whose answers are NaN or inf where the others' are not. records: by entry."""
    return [{"entry": entry, **row} for entry, record in records.items() for row in record.get(NOT_FINITE, [])]
