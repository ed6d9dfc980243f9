"""`Probing`: the artifact's probe as one entry of a loaded model is held to it, and what its members answer to the probe's inputs on their own.

A member that was swapped has other answers than the artifact recorded: its own stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.manifest import Entry
from widepack_artifacts.program import Output, Program, Ref, Slot
from widepack_artifacts.weights import Weights

from ..verification import probe as probes
from ..ir.encoding import dtype_name
from ..verification.tolerance import Pool, floating, same_places
from ..errors import ArtifactError, InputError, LoweringError, ProbeError, VerificationError
from .open_artifact import Held
from .binder import Binder
from ..ir.at_rest import draws, rested
from ..runtime.graph_module import Function, evaluate, graph_module
from ..spec.draws import Source, draw

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
        self._renewals: dict[str, tuple[list[dict[str, Any]], dict[str, Tensor]]] = {}

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
        return self.held.probe

    def inputs(self, pattern: str, exact: bool = False) -> list[Tensor]:
        """The inputs of a wide call: the probe's, and drawn ones where the artifact has none. exact: as the artifact has them, whatever dtype was asked for.

        Raises: ArtifactError where what the probe holds is no call of this entry.
        """
        held, kept, begun = self.held, self.tensors(), self.initial()
        made: list[Tensor] = []
        for k, own in enumerate(self.own(pattern)):
            if k in begun:
                made.append(begun[k])
                continue
            if kept is None:
                made.append(self._drawn(k, own, {d: max(2, v.example) for d, v in self.entry.dims.items()}))
                continue
            x = kept.get(f"{self.at('each' if own and (pattern == 'each' or k not in self.binder.carried) else 'shared')}.x{k}")
            if own and not held.whole:
                if not x.dim() or x.shape[0] != len(held.manifest.members):
                    raise ArtifactError(f"{self.said(pattern)}: the probe's input {k} is not one for each of {len(held.manifest.members)} members")
                x = x[list(held.chosen)]
            made.append(x.to(held.device) if exact else held.placed(x, f"input {self.entry.inputs[k].name} of the probe"))
        if kept is not None and not exact:
            try:
                self.binder.check(made, self.own(pattern))
            except InputError as e:
                raise ArtifactError(f"{self.said(pattern)}: the probe is no call of it: {e}") from e
        return made

    def said(self, pattern: str) -> str:
        """What an error calls a program."""
        return f"{self.held.reader.root}: the program of entry {self.name}, pattern {pattern}"

    def drawn(self, pattern: str, sizes: Mapping[str, int]) -> list[Tensor]:
        """Inputs of a wide call at these sizes, like the probe's where there is one; other ones for each member."""
        begun = self.initial()
        return [begun[k] if k in begun else self._drawn(k, own, sizes) for k, own in enumerate(self.own(pattern))]

    def _drawn(self, k: int, own: bool, sizes: Mapping[str, int]) -> Tensor:
        """An input of a wide call. own: one a member."""
        spec, kept, name = self.entry.inputs[k], self.tensors(), f"{self.at('each')}.x{k}"
        example = self.held.placed(kept.get(name)[0], f"input {spec.name}").cpu().clone() if kept is not None and name in kept else None
        source = Source(spec.name, spec.type, spec.low, spec.high, example)
        made = [draw(source, sizes, 7919 * k + i) for i in range(len(self.held.chosen) if own else 1)]
        return (torch.stack(made) if own else made[0]).to(self.held.device)

    def record(self, pattern: str) -> list[Mapping[str, Any]] | None:
        """The bounds of a pattern's answers, one an output: the artifact's, or what swapped members need beside. None where there are none."""
        kept = self.held.manifest.verification
        found: Sequence[Mapping[str, Any]] | None = probes.wide_record(kept, self.name, pattern)
        if found is None:
            return None
        if self.held.cast is not None:
            found = self._renewed(pattern)[0]
        rows = [dict(r) for r in found]
        for number in self.held.chosen:
            if (swapped := self.held.swapped.get(number)) is not None:
                rows = [wider(a, b) for a, b in zip(rows, swapped.records.get(self.at(pattern), rows))]
        return list(rows)

    def answers(self, pattern: str) -> dict[str, Tensor]:
        """The probe's answers of the loaded members, by name."""
        kept, at = self.tensors(), self.at(pattern)
        found = {n: kept.get(n) for n in kept.names if n.startswith(f"{at}.y")} if kept is not None else {}
        if found and self.held.cast is not None:
            found.update(self._renewed(pattern)[1])
        for number in self.held.chosen:
            if (swapped := self.held.swapped.get(number)) is not None:
                found.update({n: t for n, t in swapped.tensors.items() if n.startswith(f"{at}.y")})
        return found

    def check(self, pattern: str, run: Function, kinds: Sequence[str]) -> str:
        """Hold a wide program's answers to `inputs(pattern)` to the probe. kinds: of its outputs. Returns: how they leave the build's own bounds, as `probe.check`. Raises: ProbeError; ArtifactError; what the program raises."""
        record = self.record(pattern)
        if record is None or len(record) != len(kinds):
            raise ProbeError(f"{self.held.reader.root} has a probe of entry {self.name}, but no record of its verification; build it again")
        return probes.check(self.answers(pattern), self.at(pattern), run(*self.inputs(pattern)), kinds, record, self.held.chosen)

    def at_rest(self, program: Program) -> Program:
        """A program without its draws, of which the probe was made. Raises: ArtifactError."""
        found = rested(program) if draws(program) else program
        if found is None:
            raise ArtifactError(
                f"{self.held.reader.root}: a program of entry {self.name} draws random numbers by an op that no probe can be asked without"
            )
        return found

    # ---------------------------------------------------------------- members on their own

    def ask(self, pattern: str, place: int, given: Weight, exact: Weight) -> Own:
        """Ask one member the probe's inputs. place: among the loaded ones. given: its weights as programs take them. exact: as the checkpoint has them.

        Raises: RuntimeError and others that torch raises where the member's program does not run on them.
        """
        with torch.inference_mode():
            own = self._answered(pattern, place, given)
            truth = self._truth(pattern, place, exact) or [_double(o) for o in own]
        pools = [Pool(o.name) for o in self.entry.outputs]
        for pool, a, b in zip(pools, own, truth):
            pool.add_own(a, b)
        if not self.exactly:
            for pool in pools:
                pool.own_max, pool.own_square = max(pool.own_max, 1e-5 * pool.scale), max(pool.own_square, (1e-5 * pool.scale) ** 2 * pool.count)
        return Own(own, truth, [_row(p) for p in pools])

    @property
    def exactly(self) -> bool:
        """Whether float64 is the truth for these members: the build found out."""
        return str(probes.record_of(self.held.manifest.verification, self.name).get("truth", "float64")).startswith("float64")

    def _answered(self, pattern: str, place: int, given: Weight) -> list[Tensor]:
        """A member's own answers."""
        program, run = self._function(self.held.chosen[place], False)
        return list(run(*(given(s.source) for s in program.weights), *self._given(pattern, place, given)))

    def _given(self, pattern: str, place: int, weight: Weight, exact: bool = False) -> list[Tensor]:
        """One member's inputs of a call; a state that begins as a weight is that one."""
        begun = {s.input: s.initial for s in self.entry.state if s.initial}
        every = zip(self.own(pattern), self.inputs(pattern, exact))
        return [weight(begun[k]) if k in begun else x[place] if own else x for k, (own, x) in enumerate(every)]

    def _truth(self, pattern: str, place: int, exact: Weight) -> list[Tensor] | None:
        """A member's float64 answers; None where an op has no float64 kernel, or decides otherwise in it."""
        if not self.exactly:
            return None
        from ..ir.float64 import raise_value

        program, run = self._function(self.held.chosen[place], True)
        try:
            found = run(*(raise_value(exact(s.source)) for s in program.weights), *map(raise_value, self._given(pattern, place, exact, True)))
        except RuntimeError:
            return None
        return [_double(t) for t in found]

    def _renewed(self, pattern: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """The error record of the dtype that was asked for: the members' own programs in it, against the float64 answers of the probe; and their answers that are no floats.

        Raises: VerificationError where nothing could be held to them; LoweringError for an op that has no kernel in the dtype.
        """
        if pattern not in self._renewals:
            held, kept, at = self.held, self.tensors(), self.at(pattern)
            assert kept is not None and held.cast is not None  # nothing is held to a probe that is not there
            pools = [Pool(o.name) for o in self.entry.outputs]
            answers: dict[str, Tensor] = {}
            for place, number in enumerate(held.chosen):
                if number in held.swapped:
                    continue
                for k, own in enumerate(self._asked(pattern, place)):
                    name = f"{at}.y{k}.{number}"
                    stride, truth = probes.recorded(kept, name)
                    if (count := -(-own.numel() // stride)) != truth.numel() or own.is_complex() != truth.is_complex():
                        raise ProbeError(
                            f"probe: the answer {name} has {truth.numel()} numbers of {dtype_name(truth.dtype)}, member {held.members[place]} answers {count} of {dtype_name(own.dtype)} at its stride; "
                            "the artifact's probe and its programs do not belong together"
                        )
                    flat = own.cpu().reshape(-1)[::stride]
                    if not floating(own):
                        answers[name] = torch.cat([kept.get(name)[:1], flat.to(truth.dtype)])
                        continue
                    if not same_places(flat, truth):
                        raise VerificationError(
                            f"in {dtype_name(held.cast.dtype)} member {held.members[place]} answers NaN or inf in output {pools[k].name or k} (the probe's inputs, {pattern}), "
                            "where its float64 answer is a number: the dtype does not hold what it computes; load without dtype"
                        )
                    pools[k].add_own(flat, truth)
            for pool in pools:
                if far := pool.unsteady(pool.eps):
                    raise VerificationError(f"in {dtype_name(held.cast.dtype)}, {far}: nothing can be held to such answers; load without dtype")
            self._renewals[pattern] = [_row(p) for p in pools], answers
        return self._renewals[pattern]

    def renew(self) -> None:
        """Forget what members answered in the dtype that was asked for: other members stand there now."""
        self._renewals.clear()

    def in_dtype(self, error: RuntimeError) -> LoweringError:
        """What to say of programs that do not run in the dtype that was asked for: the members' own, or only the wide one."""
        try:
            for place in range(len(self.held.chosen)):
                self._asked("shared", place)
        except LoweringError as found:
            return found
        dtype = dtype_name(self.held.cast.dtype) if self.held.cast else ""
        return LoweringError(
            f"the wide program of entry {self.name} does not run in {dtype} on {self.held.device}, where the members do: {' '.join(str(error).split())[:300]}; "
            "load without dtype, or with strategies='loop'"
        )

    def _asked(self, pattern: str, place: int) -> list[Tensor]:
        """A loaded member's own answers. Raises: LoweringError for an op that has no kernel in the dtype."""
        held = self.held
        try:
            with torch.inference_mode():
                return self._answered(pattern, place, lambda name: held.own(name, place))
        except RuntimeError as error:  # NotImplementedError is one
            assert held.cast is not None
            raise LoweringError(
                f"entry {self.name} does not run in {dtype_name(held.cast.dtype)} on {held.device}{self._where(pattern, place)}: {' '.join(str(error).split())[:200]}; "
                "load without dtype, or in one that has it"
            ) from error

    def _where(self, pattern: str, place: int) -> str:
        """The first node of a member's program that does not run, in words."""
        held = self.held
        program, _ = self._function(held.chosen[place], False)
        values: dict[str, Any] = {s.name: held.own(s.source, place) for s in program.weights}
        values.update(zip((s.name for s in program.inputs), self._given(pattern, place, lambda name: held.own(name, place))))
        for node in program.nodes:
            one = replace(
                program,
                weights=(),
                inputs=tuple(Slot(n, n, "shared", "") for n in values),
                nodes=(node,),
                outputs=(Output(Ref(node.name), "shared"),),
            )
            try:
                with torch.inference_mode():
                    (values[node.name],) = evaluate(one, list(values.values()), held.device)
            except RuntimeError:
                return f": node {node.name} ({node.op}{f', from {node.source}' if node.source else ''})"
        return ""

    def _function(self, number: int, exact: bool) -> tuple[Program, Function]:
        """A member's program, and as a function of its weights and inputs; made once."""
        signature = self.entry.signatures[number]
        if (signature, exact) not in self._made:
            file = self.entry.member[signature]
            if exact:
                from ..ir.cast import raised  # the registry of ops comes with it

                program = raised(self.held.reader.program(file))
            else:
                program = self.held.program(file, self.name)
            program = self.at_rest(program)
            self._made[signature, exact] = program, graph_module(program, self.held.device).forward
        return self._made[signature, exact]


def _double(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64) if floating(t) else t


def _row(p: Pool) -> dict[str, Any]:
    return {"output": p.name, "own_max": p.own_max, "own_rms": p.own_rms, "scale": p.scale, "eps": p.eps}


def wider(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that both records need."""
    return {**a, **{k: max(float(a[k]), float(b[k])) for k in ("own_max", "own_rms", "scale")}}
