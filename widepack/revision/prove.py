"""What is proved again of an artifact whose members come and go: comparison (b) of every wide program for all members, and the probe.

Comparison (a), of a member's own module with the captured program, is made where the caller gives the module, or a checkpoint brings its program; else the program
that was captured when the artifact was built stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Program

from ..verification import probe
from ..verification import answers as verify
from ..system.readahead import asking
from ..verification.tolerance import Pool
from ..spec.entries import PATTERNS
from ..errors import VerificationError
from ..lowering.lower import Lowered
from ..planning.plan import Plan
from ..system.progress import Stages
from .artifact_entry import Standing
from ..verification.reference import Compared, Truth

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
    """The answers that an entry's wide programs are held to, made once. held, files: their weights. places: as `Standing.probe_calls` takes them. modules: of members that come, by number.

    Raises: VerificationError for a member that fails where others answer, and for a wrong capture.
    """

    def __init__(
        self,
        entry: Standing,
        members: Sequence[str],
        held: weight_files.Weights,
        files: Sequence[Path],
        places: Sequence[int],
        stages: Stages,
        modules: Mapping[int, Callable[[], nn.Module]],
    ) -> None:
        self._entry = entry
        subject = replace(entry.subject(members, held), ask=asking([entry.table[name] for name in sorted(entry.reads())], files, entry.count))
        self._probed = entry.probe_calls(places, subject)
        self._truth = Truth(entry, subject, held, [*verify.calls(subject, PATTERNS), *self._probed], stages)
        self._capture = self._own(modules)

    def _own(self, modules: Mapping[int, Callable[[], nn.Module]]) -> list[dict[str, Any]]:
        """Comparison (a) of the members whose modules there are. Raises: VerificationError."""
        numbers = sorted(modules)
        if not numbers:
            return []
        whole = self._truth.subject
        some = replace(
            whole,
            members=tuple(whole.members[i] for i in numbers),
            signatures=[whole.signatures[i] for i in numbers],
            weights=lambda i: whole.weights(numbers[i]),
            module=lambda i: modules[numbers[i]](),
            initial=lambda i, state: whole.initial(numbers[i], state),
            ask=lambda chosen: whole.ask([numbers[i] for i in chosen]),
        )
        asked = [replace(c, inputs=[c.inputs[i] for i in numbers]) for c in self._truth.made]
        pools = [Pool(o.name) for o in self._entry.row.outputs]
        return [p.record() for p in verify.answers(some, asked, pools)[1]]

    def check(self, tried: Sequence[Tried]) -> tuple[dict[str, Compared], dict[str, str]]:
        """Comparison (b). Returns: what was found, by pattern and number; which measured programs are wrong, and why. Raises: VerificationError."""
        found: dict[str, Compared] = {}
        wrong: dict[str, str] = {}
        for number, one in enumerate(tried):
            try:
                found[f"{one.pattern}.{number}"] = self._truth.hold(
                    one.pattern, one.program, one.plan, one.lowered, "Nothing was published; please report it"
                )
            except VerificationError as e:
                if not one.measured:
                    raise
                wrong[one.measured] = str(e)
        return found, wrong

    def record(self, wide: Mapping[str, Compared], before: Mapping[str, Any], stay: Collection[str]) -> dict[str, Any]:
        """The record for the manifest. before: the one that is there; what it says of the capture stays, since the captured program does, and what it says of later ones
        for the members that `stay`."""
        again = [*_of(before.get("capture_again"), stay), *self._capture]
        return self._truth.record({"capture": before.get("capture", []), **({"capture_again": again} if again else {})}, wide)

    def probed(self) -> dict[str, probe.Answers]:
        """The calls of the new probe, by pattern with the entry's prefix."""
        return self._truth.probed(self._probed)


def _of(rows: Any, members: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a record as far as they are of these members. rows: as a manifest has them, whatever they are."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        own = row.get("members") if isinstance(row, dict) else None
        if kept := {name: errors for name, errors in own.items() if name in members} if isinstance(own, dict) else {}:
            found.append({**row, "members": kept})
    return found
