"""What is proved again of an artifact whose members come and go: comparison (b) of every wide program for all members, and the probe.

Comparison (a), of a member's own module with the captured program, is made where the caller gives the module, or a checkpoint brings its program; else the program
that was captured when the artifact was built stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Program

from . import probe, verify
from .compare import Pool
from .errors import VerificationError
from .job import all_weights
from .lower import Lowered
from .memory import give_back
from .parts import Part, parts
from .plan import Plan
from .progress import Stages
from .standing import Standing
from .state import BUFFER
from .wides import PATTERNS

Module = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Tried:
    """A wide program to be proved. plan: what it was lowered by. measured: the hash of its file, of plans that were measured alone: they may be left out, others must be right. lowered: where it was
    made just now."""

    pattern: str
    program: Program
    plan: Plan
    measured: str = ""
    lowered: Lowered | None = None


class Proof:
    """The answers that an entry's wide programs are held to, made once. places: as `Standing.probe_calls` takes them. modules: of members that come, by number.

    Raises: VerificationError for a member that fails where others answer, and for a wrong capture.
    """

    def __init__(
        self,
        entry: Standing,
        members: Sequence[str],
        held: weight_files.Weights,
        places: Sequence[int],
        stages: Stages,
        modules: Mapping[int, Callable[[], nn.Module]],
    ) -> None:
        self.entry, self.held = entry, held
        self.subject = subject = entry.subject(members, held)
        probed = entry.probe_calls(places, subject)
        self.made = [*verify.calls(subject, PATTERNS), *probed]
        self.pools = [Pool(o.name) for o in entry.row.outputs]
        self.found, _, self.raised = verify.answers(subject, self.made, self.pools, stages.step)
        if not self.raised:
            verify.widen(self.pools)
        self._probed = {p: next((c for c in probed if c.pattern == p), None) or self._small(p) for p in PATTERNS}
        self.capture = self._own(modules)

    def _small(self, pattern: str) -> verify.Call:
        """The call at batch 2, or the first smaller or larger one that there is."""
        order = [f"{self.entry.batch}={n}" for n in (2, 1, 5)]
        return min((c for c in self.made if c.pattern == pattern), key=lambda c: order.index(c.label) if c.label in order else len(order))

    def _own(self, modules: Mapping[int, Callable[[], nn.Module]]) -> list[dict[str, Any]]:
        """Comparison (a) of the members whose modules there are. Raises: VerificationError."""
        numbers = sorted(modules)
        if not numbers:
            return []
        whole = self.subject
        some = replace(
            whole,
            members=tuple(whole.members[i] for i in numbers),
            signatures=[whole.signatures[i] for i in numbers],
            weights=lambda i: whole.weights(numbers[i]),
            module=lambda i: modules[numbers[i]](),
            initial=lambda i, state: whole.initial(numbers[i], state),
        )
        asked = [replace(c, inputs=[c.inputs[i] for i in numbers]) for c in self.made]
        pools = [Pool(o.name) for o in self.entry.row.outputs]
        return [p.record() for p in verify.answers(some, asked, pools)[1]]

    def check(self, tried: Sequence[Tried]) -> tuple[dict[str, Any], dict[str, str]]:
        """Comparison (b). Returns: the record by pattern and number; which measured programs are wrong, and why. Raises: VerificationError."""
        records: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for number, one in enumerate(tried):
            checked = [Pool(p.name, p.eps, p.own_square, p.own_max, p.scale_square, p.count) for p in self.pools]
            try:
                for part in parts(self.entry, one.pattern, one.program, one.plan, one.lowered):
                    weights = all_weights(part.program, self.held, self.entry.count, part.members)
                    give_back()
                    verify.check_wide(self.subject, part.program, weights, one.pattern, self.made, self.found, checked, part.members)
                    if words := next((w for p in checked if (w := p.wrong())), ""):
                        raise VerificationError(
                            f"the wide program ({self.entry.entry}, {one.pattern}) is wrong: {words}. {self._where(part, one.pattern, weights)}. Nothing was published; please report it"
                        )
            except VerificationError as e:
                if not one.measured:
                    raise
                wrong[one.measured] = str(e)
                continue
            records[f"{one.pattern}.{number}"] = [p.record() for p in checked]
        return records, wrong

    def _where(self, part: Part, pattern: str, weights: verify.Weights) -> str:
        if part.lowered is None:
            return "It is the program that was there before"
        call = next(c for c in self.made if c.pattern == pattern)
        simplified = self.entry.simple(pattern)
        return (
            verify.bisect(self.subject, simplified, part.lowered, weights, call, part.members) or "no single node is out of bounds"
        ) + verify.of_bits(simplified[0])

    def record(self, wide: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """The record for the manifest. before: the one that is there; what it says of the capture stays, since the captured program does."""
        return {
            "calls": [f"{c.pattern} {c.label}" for c in self.made],
            "truth": "float64" if self.raised else "float32 (an op has no float64 kernel, or decides otherwise in it); bound 1e-5 of the scale",
            "nested_tensor_fast_path": "off",
            "capture": before.get("capture", []),
            **({"capture_again": self.capture} if self.capture else {}),
            "wide": dict(wide),
            "torch": torch.__version__,
        }

    def probed(self) -> dict[str, probe.Answers]:
        """The calls of the new probe, by pattern with the entry's prefix."""
        begun = {s.input for s in self.entry.states if s.how == BUFFER}
        found: dict[str, probe.Answers] = {}
        for pattern, call in self._probed.items():
            inputs = [None if k in begun else x for k, x in enumerate(call.stacked())]
            truth = next(answer.truth for c, answer in zip(self.made, self.found) if c is call)
            found[f"{probe.prefix(self.entry.entry)}{pattern}"] = inputs, truth
        return found
