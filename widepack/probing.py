"""`Probing`: the artifact's probe as one entry of a loaded model is held to it, and what its members answer to the probe's inputs on their own.

A member that was swapped has other answers than the artifact recorded: its own stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.manifest import Entry
from widepack_artifacts.program import Program
from widepack_artifacts.weights import Weights

from . import probe as probes
from .compare import Pool, floating
from .errors import ArtifactError, VerificationError
from .held import Held
from .inputs import Binder
from .runtime import Function, graph_module
from .samples import Source, draw

Weight = Callable[[str], Tensor]
"""A weight of one member by name."""


@dataclass(frozen=True)
class Own:
    """What one member answers in one call, output by output: on its own, and in float64. record: how far they are apart, as the probe's record has it."""

    own: list[Tensor]
    truth: list[Tensor]
    record: list[dict[str, Any]]


class Probing:
    """held, name, entry, binder: of the entry."""

    def __init__(self, held: Held, name: str, entry: Entry, binder: Binder) -> None:
        self.held, self.name, self.entry, self.binder = held, name, entry, binder
        self._made: dict[tuple[int, bool], tuple[Program, Function]] = {}
        self._kept: Weights | None = None

    def at(self, pattern: str) -> str:
        """What the probe's names of a call begin with."""
        return f"{probes.prefix(self.name)}{pattern}"

    def letters(self, pattern: str) -> str:
        """For each input `s` or `e`: one for all members, or one each."""
        return {"shared": "s" * len(self.binder.leaves), "each": "e" * len(self.binder.leaves)}.get(pattern) or pattern.partition(":")[2]

    def own(self, pattern: str) -> list[bool]:
        """For each input whether it is one a member: states are in every pattern."""
        return [letter == "e" or k in self.binder.carried for k, letter in enumerate(self.letters(pattern))]

    def initial(self) -> dict[int, Tensor]:
        """The states that begin as weights, `[N, ...]`, by the number of their input."""
        found = {}
        for s in self.entry.state:
            if s.initial:
                value = self.held.weight(s.initial)
                one = self.held.row(s.initial).kind == "shared"
                found[s.input] = value.expand(len(self.held.chosen), *value.shape) if one else value
        return found

    def tensors(self) -> Weights | None:
        """The probe's tensors; None where the artifact has none."""
        if self._kept is None and self.held.manifest.probe:
            self._kept = Weights([self.held.reader.path(self.held.manifest.probe)])
        return self._kept

    def inputs(self, pattern: str) -> list[Tensor]:
        """The inputs of a wide call: the probe's, and drawn ones where the artifact has none."""
        held, kept, begun = self.held, self.tensors(), self.initial()
        made: list[Tensor] = []
        for k, own in enumerate(self.own(pattern)):
            if k in begun:
                made.append(begun[k])
                continue
            if kept is None:
                made.append(self._drawn(k, own))
                continue
            x = kept.get(f"{self.at('each' if own and (pattern == 'each' or k not in self.binder.carried) else 'shared')}.x{k}")
            made.append((x[list(held.chosen)] if own and not held.whole else x).to(held.device))
        return made

    def _drawn(self, k: int, own: bool) -> Tensor:
        spec, sizes = self.entry.inputs[k], {d: max(2, v.example) for d, v in self.entry.dims.items()}
        made = [draw(Source(spec.name, spec.type, spec.low, spec.high), sizes, 7919 * k + i) for i in range(len(self.held.chosen) if own else 1)]
        return (torch.stack(made) if own else made[0]).to(self.held.device)

    def record(self, pattern: str) -> list[Mapping[str, Any]] | None:
        """The bounds of a pattern's answers, one an output: the artifact's, or what swapped members need beside. None where there are none."""
        records = probes.record_of(self.held.manifest.verification, self.name).get("wide", {})
        found: Sequence[Mapping[str, Any]] | None = next((r for k, r in records.items() if k.startswith(pattern)), None)
        if found is None:
            return None
        rows = [dict(r) for r in found]
        for number in self.held.chosen:
            if (swapped := self.held.swapped.get(number)) is not None:
                rows = [wider(a, b) for a, b in zip(rows, swapped.records.get(self.at(pattern), rows))]
        return list(rows)

    def answers(self, pattern: str) -> dict[str, Tensor]:
        """The probe's answers of the loaded members, by name."""
        kept, at = self.tensors(), self.at(pattern)
        found = {n: kept.get(n) for n in kept.names if n.startswith(f"{at}.y")} if kept is not None else {}
        for number in self.held.chosen:
            if (swapped := self.held.swapped.get(number)) is not None:
                found.update({n: t for n, t in swapped.tensors.items() if n.startswith(f"{at}.y")})
        return found

    def check(self, pattern: str, outputs: Sequence[Any], kinds: Sequence[str]) -> None:
        """Hold a wide program's answers to `inputs(pattern)` to the probe. kinds: of its outputs. Raises: VerificationError; ArtifactError."""
        record = self.record(pattern)
        if record is None:
            raise VerificationError("the artifact has a probe but no record of its verification; build it again")
        try:
            probes.check(self.answers(pattern), self.at(pattern), outputs, kinds, record, self.held.chosen)
        except (KeyError, TypeError, ValueError) as e:
            raise ArtifactError(f"the probe and the record of the artifact's verification do not belong together ({e!r}); build it again") from e

    # ---------------------------------------------------------------- members on their own

    def ask(self, pattern: str, place: int, given: Weight, exact: Weight) -> Own:
        """Ask one member the probe's inputs. place: among the loaded ones. given: its weights as programs take them. exact: as the checkpoint has them.

        Raises: RuntimeError and others that torch raises where the member's program does not run on them.
        """
        number = self.held.chosen[place]
        inputs = [x[place] if own else x for own, x in zip(self.own(pattern), self.inputs(pattern))]
        begun = {s.input: s.initial for s in self.entry.state if s.initial}
        program, run = self._function(number, False)
        with torch.inference_mode():
            own = list(run(*(given(s.source) for s in program.weights), *(given(begun[k]) if k in begun else x for k, x in enumerate(inputs))))
            truth = self._truth(number, inputs, begun, exact) or [_double(o) for o in own]
        pools = [Pool(o.name) for o in self.entry.outputs]
        for pool, a, b in zip(pools, own, truth):
            pool.add_own(a, b)
        if not self.exactly:
            for pool in pools:
                pool.own_max, pool.own_square = max(pool.own_max, 1e-5 * pool.scale), max(pool.own_square, (1e-5 * pool.scale) ** 2 * pool.count)
        return Own(own, truth, [{"output": p.name, "own_max": p.own_max, "own_rms": p.own_rms, "scale": p.scale, "eps": p.eps} for p in pools])

    @property
    def exactly(self) -> bool:
        """Whether float64 is the truth for these members: the build found out."""
        return str(probes.record_of(self.held.manifest.verification, self.name).get("truth", "float64")).startswith("float64")

    def _truth(self, number: int, inputs: Sequence[Tensor], begun: Mapping[int, str], exact: Weight) -> list[Tensor] | None:
        """A member's float64 answers; None where an op has no float64 kernel, or decides otherwise in it."""
        if not self.exactly:
            return None
        from .raise64 import raise_value

        program, run = self._function(number, True)
        try:
            weights = [raise_value(exact(s.source)) for s in program.weights]
            found = run(*weights, *(raise_value(exact(begun[k]) if k in begun else x) for k, x in enumerate(inputs)))
        except RuntimeError:
            return None
        return [_double(t) for t in found]

    def _function(self, number: int, exact: bool) -> tuple[Program, Function]:
        """A member's program, and as a function of its weights and inputs; made once."""
        signature = self.entry.signatures[number]
        if (signature, exact) not in self._made:
            program = self.held.reader.program(self.entry.member[signature])
            if exact:
                from .recast import raised  # the rules come with it

                program = raised(program)
            self._made[signature, exact] = program, graph_module(program, self.held.device).forward
        return self._made[signature, exact]


def _double(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64) if floating(t) else t


def wider(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that both records need."""
    return {**a, **{k: max(float(a[k]), float(b[k])) for k in ("own_max", "own_rms", "scale")}}
