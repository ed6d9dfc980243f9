"""`WideEntry`: one entry of a loaded artifact, N members that run as one; and `Held`, what the entries of a model have in common.

A wide program is lowered, bound to the weights and split from its prologue when it is first needed, once for each pattern and batch class; calls run the
bound function. Calls may come from several threads at once: nothing that a call writes to is shared.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Entry, Manifest
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.store import Reader
from widepack_artifacts.tree import Tree
from widepack_artifacts.weights import Weights

from . import backends, plan_cache, probe
from .errors import ArtifactError, InputError, UsageError, VerificationError, WidepackError
from .inputs import Binder, Each
from .machine import name_of
from .member import Member
from .output import Output, carried, present
from .packed import decompose
from .plan import Plan, nearest_threads
from .progress import Report
from .runtime import Executable
from .samples import Source, draw


@dataclass(frozen=True)
class Wide:
    """A wide program. content: the SHA-256 of its file; empty where it was lowered here."""

    program: Program
    plan: Plan
    content: str = ""


SEEN = 256
"""Shapes of calls that an entry remembers as checked."""


class Bound:
    """A wide program ready to run. batch: the sizes of the first dim that it is for. only: the number of the output that is the whole answer as it is, or -1.

    backend: what runs it. content: the SHA-256 of the program's file; empty where it is in none of the artifact.
    """

    def __init__(self, program: Program, plan: Plan, run: Executable, result: Tree, backend: str = "eager", content: str = "") -> None:
        self.program = program
        self.content = content
        self.plan = plan
        self.executable = run
        self.backend = backend
        self.run = run.run
        self.least, self.most = plan.batch
        alone = result.get("leaf", -1)
        self.only = alone if alone >= 0 and program.outputs[alone].kind != "shared" else -1

    @property
    def place(self) -> Path | None:
        """The folder of the compiled program that runs; None where none does."""
        return getattr(self.executable.call, "place", None)

    def fits(self, size: int | None) -> bool:
        return size is None or (self.least <= size and (self.most is None or size <= self.most))


@dataclass(frozen=True)
class Running:
    """What programs are to run on. backend: its name or `auto`. compile: whether it may compile, and most_nodes how long a program: 0 for any. cache: of compiled
    programs; None is the usual one."""

    backend: str = "eager"
    compile: bool = False
    cache: Path | None = None
    progress: Report | None = None
    most_nodes: int = 0


class Held:
    """An open artifact with its weights, and how it was asked to be loaded: what all entries of a model share.

    chosen: numbers of the members that are loaded. members: their names.
    """

    def __init__(
        self,
        reader: Reader,
        weights: Weights,
        chosen: Sequence[int],
        device: torch.device,
        *,
        prologue: bool,
        strategies: str | Sequence[str] | None,
        verified: bool,
        running: Running = Running(),
        simplify: bool = True,
    ) -> None:
        self.reader, self.weights, self.chosen, self.device = reader, weights, tuple(chosen), device
        self.prologue, self.strategies, self.verified, self.running = prologue, strategies, verified, running
        self.simplify = simplify
        self.manifest: Manifest = reader.manifest
        self.members: tuple[str, ...] = tuple(self.manifest.members[i].name for i in self.chosen)
        self.whole = len(self.chosen) == len(self.manifest.members)
        self.lock = threading.RLock()
        self.closed = False
        self._values: dict[str, Any] = {}

    def index(self, member: int | str) -> int:
        """A loaded member's place. Raises: UsageError."""
        if isinstance(member, str):
            if member not in self.members:
                raise UsageError(f"no member is called {member!r}; the members are {', '.join(self.members[:20])}")
            return self.members.index(member)
        if not -len(self.members) <= member < len(self.members):
            raise UsageError(f"member {member} of {len(self.members)}; members are numbered from 0")
        return member % len(self.members)

    def part(self, name: str, i: int) -> torch.Tensor:
        """Weight `name` of the artifact's member i, mapped."""
        row = next(w for w in self.manifest.weights if w.name == name)
        return (
            self.weights.get(name)
            if row.kind == "shared"
            else self.weights.get(f"{name}@{i}")
            if row.kind == "ragged"
            else self.weights.slice(name, i)
        )

    def weight(self, name: str) -> Any:
        """A weight of the loaded members, on the device: shared `[...]`, stacked `[N, ...]`, ragged a list of N."""
        row = next((w for w in self.manifest.weights if w.name == name), None)
        if row is None:
            raise ArtifactError(f"a program reads the weight {name!r}, which the manifest's table does not have")
        if name in self._values:
            return self._values[name]
        if row.kind == "ragged":
            value: Any = [self.weights.get(f"{name}@{i}").to(self.device) for i in self.chosen]
        elif row.kind == "stacked" and not self.whole:
            value = self._values[name] = torch.stack([self.weights.slice(name, i) for i in self.chosen]).to(
                self.device
            )  # a copy: one for all programs
        else:
            value = self.weights.get(name).to(self.device)
        return value

    def located(self) -> list[backends.Mapped]:
        """Every tensor of the weights files, where it is mapped."""
        found = []
        for path in self.reader.weights_files():
            with open(path, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            for name, row in header.items():
                if name != "__metadata__":
                    begin, end = row["data_offsets"]
                    found.append(backends.Mapped(self.weights.get(name).data_ptr(), end - begin, path.name, 8 + size + begin))
        return found

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._values.clear()


class WideEntry:
    """One entry of a wide model: called as a method of the member is. Made by `ens.entry(name)` or `ens.<name>`.

    name: the method's. entry: what the manifest says of it. members: the members' names.
    """

    def __init__(self, held: Held, name: str) -> None:
        self.name = name
        self.entry: Entry = held.manifest.entries[name]
        self.members = held.members
        self._held = held
        self._binder = Binder(self.entry, len(held.chosen), held.device, known=held.manifest.state)
        self._bound: dict[str, list[Bound]] = {}
        self._seen: dict[Any, Bound] = {}  # what a call was like that passed all checks -> the program that answers it
        self._letter = next((d.letter for leaf in self._binder.leaves for d in leaf.dims if not isinstance(d, int)), "")

    @property
    def plan(self) -> Plan:
        return self._programs("shared")[0].plan

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """The plans of a pattern, one a batch class."""
        return [b.plan for b in self._programs(pattern)]

    @property
    def backend(self) -> str:
        """What runs the programs of pattern `shared`: one name, or several where batch classes differ."""
        return "+".join(dict.fromkeys(b.backend for b in self._programs("shared")))

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"WideEntry({self.name} of {len(self)} members; {self._binder.takes_in}; {self._runs_on})"

    @property
    def _runs_on(self) -> str:
        """`cpu, aot`; binds nothing."""
        bound = self._bound.get("shared")
        found = "+".join(dict.fromkeys(b.backend for b in bound)) if bound else self._held.running.backend
        return f"{self._held.device}, {found}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Every member sees the same inputs, but for those marked with `widepack.each`.

        Inputs: as the member's forward takes them. Returns: the member's structure, every leaf `[N, *the member's shape]` (a list of N where shapes differ).
        An entry that carries state takes it as `state=` and returns (answer, new state): {name: `[N, ...]`}, one a member in every pattern.
        Raises: InputError before anything runs.
        """
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.none, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, marks = self._binder.bind(args, kwargs)
        return self._answer(values, marks, state)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Member i sees `[i]` of every input. Inputs: `[N, ...]`, or lists of N tensors. Returns and raises: as a call."""
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.all, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, marks = self._binder.bind(
            [Each(a) if _holds_tensor(a) else a for a in args], {k: Each(v) if _holds_tensor(v) else v for k, v in kwargs.items()}
        )
        return self._answer(values, [True] * len(marks), state)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """The states of this entry as they begin, `{name: [N, ...]}`: a buffer as each member's checkpoint has it, an input as zeros.

        sizes: of the dims that inputs among them have. Raises: UsageError.
        """
        return self._binder.fresh({self.entry.inputs[i].name: value for i, value in self._initial().items()}, sizes)

    def _initial(self) -> dict[int, torch.Tensor]:
        """The states that begin as weights, `[N, ...]`, by the number of their input."""
        found = {}
        for s in self.entry.state:
            if s.initial:
                value = self._held.weight(s.initial)
                one = next(w for w in self._held.manifest.weights if w.name == s.initial).kind == "shared"
                found[s.input] = value.expand(len(self), *value.shape) if one else value
        return found

    def _answer(self, values: Sequence[torch.Tensor], marks: Sequence[bool], state: Any) -> Any:
        carries = self._binder.carried
        if carries:
            values, marks = list(values), list(marks)
            self._binder.carry(values, marks, state)
        # All checks and the choice of the program hang on this alone: a call like one before is not looked at again.
        like = (tuple(marks), *[(v.shape, v.dtype, v.device, v.layout) for v in values])
        program = self._seen.get(like) or self._check(values, marks, like)
        found = program.run(*values)
        if program.only >= 0 and not carries:
            return found[program.only]
        outputs = program.program.outputs
        answer = present(found, outputs, len(self.members), self.entry.result)
        if not carries:
            return answer
        return answer, {**state, **carried(found, self._binder.states, outputs, len(self.members), values)}

    def _check(self, values: Sequence[torch.Tensor], marks: Sequence[bool], like: Any) -> Bound:
        """Hold a call to the entry and find its program. like: what is remembered of it. Raises: InputError."""
        carries = self._binder.carried
        sizes = self._binder.check(values, marks)
        free = [m for i, m in enumerate(marks) if i not in carries]
        pattern = "shared" if not any(free) else "each" if all(free) else "mixed:" + "".join("e" if m else "s" for m in marks)
        bound = self._programs(pattern)
        size = self._scaled(sizes) if len(bound) > 1 else None
        program = bound[0] if len(bound) == 1 else next((b for b in bound if b.fits(size)), bound[-1])
        with self._held.lock:
            if not self._held.closed:
                if len(self._seen) >= SEEN:
                    self._seen.clear()
                self._seen[like] = program
        return program

    def _scaled(self, sizes: Mapping[str, int]) -> int | None:
        """The batch, counted at the example's sizes of the other dims: batch classes are about how much a call has to work on."""
        if self._letter not in sizes:
            return None
        size = float(sizes[self._letter])
        for letter, dim in self.entry.dims.items():
            if letter != self._letter and letter in sizes:
                size *= sizes[letter] / max(dim.example, 1)
        return max(1, math.ceil(size))

    # ---------------------------------------------------------------- programs

    def _programs(self, pattern: str) -> list[Bound]:
        """The bound programs of a pattern; made, probed and kept on first use."""
        with self._held.lock:
            if self._held.closed:
                raise UsageError("this model was closed; widepack.load opens its artifact again")
            if pattern not in self._bound:
                kept = self._kept(pattern)
                try:
                    self._bound[pattern] = self._ready(pattern, kept or self._wide(pattern))
                except (WidepackError, RuntimeError) as e:
                    if not kept:
                        raise
                    warnings.warn(
                        f"the plan that was measured here is not used ({str(e).splitlines()[0] if str(e) else type(e).__name__}); measure it again: widepack tune",
                        stacklevel=4,
                    )
                    self._bound[pattern] = self._ready(pattern, self._wide(pattern))
            return self._bound[pattern]

    def _ready(self, pattern: str, wides: Sequence[Wide]) -> list[Bound]:
        """Wide programs, bound and probed."""
        made = [self._bind(pattern, wide) for wide in wides]
        if self._held.verified and pattern in ("shared", "each"):
            self._probe(pattern, made)
        return made

    def _kept(self, pattern: str) -> list[Wide]:
        """The wide programs that were measured on this machine and kept in the user's cache."""
        held = self._held
        if held.strategies is not None or not held.whole:
            return []
        return [Wide(program, plan) for program, plan in plan_cache.find(held.manifest.digest, self.name, pattern, str(held.device))]

    def _wide(self, pattern: str) -> list[Wide]:
        """The wide programs of a pattern: the artifact's that were measured on this machine, its other ones, else lowered here."""
        held = self._held
        if held.strategies is None and held.whole:
            every = [w for w in self.entry.wide if w.pattern == pattern and w.device == held.device.type]
            here = name_of(str(held.device)) if any("machine" in w.plan for w in every) else ""
            measured = nearest_threads([(w, w.plan.get("threads", 0)) for w in every if w.plan.get("machine", "") == here]) if here else []
            rows = measured or [w for w in every if "machine" not in w.plan]
            files = held.manifest.files
            made = [Wide(held.reader.program(w.file), Plan.from_json(w.plan), files[w.file].sha256) for w in rows]
            if made:
                return made
        return [Wide(program, plan) for program, plan in self._lower(pattern)]

    def _letters(self, pattern: str) -> str:
        """For each input `s` or `e`: one for all members, or one each."""
        return {"shared": "s" * len(self._binder.leaves), "each": "e" * len(self._binder.leaves)}.get(pattern) or pattern.partition(":")[2]

    def _lower(self, pattern: str) -> list[tuple[Program, Plan]]:
        from .relower import relower  # the rules are imported only when something has to be lowered

        programs = [self._held.reader.program(f) for f in self.entry.member]
        signatures = [self.entry.signatures[i] for i in self._held.chosen]
        own = [letter == "e" or i in self._binder.carried for i, letter in enumerate(self._letters(pattern))]
        kinds: dict[str, Kind] = {w.name: w.kind for w in self._held.manifest.weights}  # type: ignore[misc]
        sizes = {d: v.example for d, v in self.entry.dims.items()}
        held = self._held
        return relower(programs, signatures, kinds, own, sizes, self._letter, held.device.type, pattern, held.strategies or "auto", held.simplify)

    def _bind(self, pattern: str, wide: Wide, running: Running | None = None) -> Bound:
        program, held = wide.program, self._held
        running = running or held.running
        if program.members != len(held.chosen):
            raise ArtifactError(f"a wide program is for {program.members} members, the artifact has {len(held.chosen)}")
        weights = {s.source: held.weight(s.source) for s in program.weights}
        name, planned = running.backend, wide.plan.backend
        chosen = (planned if planned in backends.NAMES else "eager") if name == "auto" else name
        run: Executable | None = None
        if chosen != "eager":
            run = Executable(decompose(program), weights, held.device, prologue=held.prologue)  # packed weights are oneDNN's: no compiler takes them
            try:
                run.use(backends.backend(chosen).bind(self._task(pattern, wide, run, running)))
            except (backends.Unavailable, ArtifactError, UsageError) as e:
                if name != "auto":
                    raise
                if not isinstance(e, backends.Unavailable):
                    warnings.warn(f"backend {chosen!r}, which the plan names, is not taken: {e}", stacklevel=2)
                chosen, run = "eager", None
        run = run or Executable(program, weights, held.device, prologue=held.prologue)
        return Bound(program, wide.plan, run, self.entry.result, chosen, wide.content)

    def _task(self, pattern: str, wide: Wide, run: Executable, running: Running) -> backends.Task:
        """A wide program as backends take it."""
        held, plan = self._held, wide.plan
        classes = "" if plan.batch == (1, None) else f", batch {plan.batch[0]} to {'any' if plan.batch[1] is None else plan.batch[1]}"
        return backends.Task(
            program=run.main,
            weights=run.given,
            device=held.device,
            content=strict_json.digest(run.main.to_json()),  # of what is compiled: the prologue may have taken a part of the program
            pattern=pattern,
            said=f"{held.reader.root}: the program of entry {self.name}, pattern {pattern}{classes}",
            eager=run.eager,
            dims={d: (v.min, v.max, v.example) for d, v in self.entry.dims.items()},
            example=self._example(plan),
            guards=[g.expr for g in self.entry.guards],
            inputs=lambda sizes: self._drawn(pattern, sizes),
            differ=lambda found, wanted: self._differ(pattern, wide.program, found, wanted),
            compile=running.compile,
            cache=running.cache,
            located=held.located,
            progress=running.progress,
            most_nodes=running.most_nodes,
        )

    def _example(self, plan: Plan) -> dict[str, int]:
        """Sizes in the middle of a plan's batch class, or as it was measured, at least 2."""
        sizes = {d: max(2, v.example) for d, v in self.entry.dims.items()}
        if self._letter in sizes:
            least, most = plan.batch
            dim = self.entry.dims[self._letter]
            wanted = max(2, plan.at or max(least, min(sizes[self._letter], most or sizes[self._letter])))
            tried = {**sizes, self._letter: min(wanted, dim.max or wanted)}
            if all(guard_forms.holds(g.expr, tried) for g in self.entry.guards):
                return tried
        return sizes

    def _drawn(self, pattern: str, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Inputs of a wide call at these sizes, like the probe's where there is one; other ones for each member."""
        letters = self._letters(pattern)
        kept = Weights([self._held.reader.path(self._held.manifest.probe)]) if self._held.manifest.probe else None
        begun = self._initial()
        made: list[torch.Tensor] = []
        for k, (spec, letter) in enumerate(zip(self.entry.inputs, letters)):
            if k in begun:
                made.append(begun[k])
                continue
            name = f"{probe.prefix(self.name)}each.x{k}"
            example = kept.get(name)[0].clone() if kept is not None and name in kept else None
            source = Source(spec.name, spec.type, spec.low, spec.high, example)
            drawn = [draw(source, sizes, 7919 * k + i) for i in range(len(self) if letter == "e" or k in self._binder.carried else 1)]
            made.append((torch.stack(drawn) if letter == "e" or k in self._binder.carried else drawn[0]).to(self._held.device))
        return made

    def _differ(self, pattern: str, program: Program, found: Sequence[Any], wanted: Sequence[Any]) -> str:
        """Where a compiled program's outputs differ from the flat graph's by more than the probe's bounds, in words; empty where they do not."""
        records = probe.record_of(self._held.manifest.verification, self.name).get("wide", {})
        record: Sequence[Mapping[str, Any]] = next((r for k, r in records.items() if k.startswith(pattern)), next(iter(records.values()), []))
        for k, (mine, right) in enumerate(zip(found, wanted)):
            row = record[k] if k < len(record) else {}
            for a, b in zip(mine, right) if isinstance(right, list) else [(mine, right)]:
                if words := probe.differs(a, b, row):
                    return f"output {self.entry.outputs[k].name or k} {words}"
        return ""

    # ---------------------------------------------------------------- probe

    def _probe(self, pattern: str, made: Sequence[Bound], again: bool = False) -> None:
        """Run the artifact's probe through each program that has not passed it here; again: through all. Raises: VerificationError."""
        held, manifest = self._held, self._held.manifest
        if not manifest.probe:
            return
        at = f"{probe.prefix(self.name)}{pattern}"
        tensors: Weights | None = None
        for bound in made:
            program = bound.content or f"{at} {strict_json.digest(bound.program.to_json())} {held.chosen}"
            ran_on = [] if bound.backend == "eager" else [bound.backend, bound.place.name if bound.place else ""]
            key = probe.cache_key(manifest.digest, program, str(held.device), str(held.prologue), *ran_on)
            if not again and probe.passed(key):
                continue
            tensors = tensors or Weights([held.reader.path(manifest.probe)])
            begun = self._initial()
            inputs = []
            for k in range(len(self._binder.leaves)):
                x = begun[k] if k in begun else tensors.get(f"{at}.x{k}")
                own = not held.whole and k not in begun and (pattern == "each" or k in self._binder.carried)
                inputs.append((x[list(held.chosen)] if own else x).to(held.device))
            answers = bound.run(*inputs)
            records = probe.record_of(manifest.verification, self.name).get("wide", {})
            record = next((r for k, r in records.items() if k.startswith(pattern)), None)
            if record is None:
                raise VerificationError("the artifact has a probe but no record of its verification; build it again")
            try:
                kept = {n: tensors.get(n) for n in tensors.names if n.startswith(f"{at}.")}
                probe.check(kept, at, answers, [o.kind for o in bound.program.outputs], record, held.chosen)
            except (KeyError, TypeError, ValueError) as e:
                raise ArtifactError(f"the probe and the record of the artifact's verification do not belong together ({e!r}); build it again") from e
            probe.remember(key)

    def probe(self) -> None:
        """Run the probe of both presets now, whether or not it passed here before. Raises: VerificationError."""
        for pattern in ("shared", "each"):
            self._probe(pattern, self._programs(pattern), again=True)

    # ---------------------------------------------------------------- members and ensembles

    def member(self, member: int | str) -> Member:
        """One member, by number or name, as a plain module over the artifact's weights. Raises: UsageError."""
        i = self._held.chosen[self._held.index(member)]
        program = self._held.reader.program(self.entry.member[self.entry.signatures[i]])
        weights = {s.source: self._held.part(s.source, i).to(self._held.device) for s in program.weights}
        initial = {self.entry.inputs[s.input].name: self._held.part(s.initial, i).to(self._held.device) for s in self.entry.state if s.initial}
        return Member(self._held.manifest.members[i].name, self.entry, program, weights, self._held.device, initial)

    def mean(self, *args: Any, of: str | None = "softmax", weights: Sequence[float] | None = None, **kwargs: Any) -> Any:
        """The members' mean answer, `[*the member's shape]`; (mean, new state) where the entry carries state.

        of: `softmax` (over the last dim, the usual mean of classifiers), `sigmoid`, or None for the answers themselves. weights: one a member.
        """
        return self._of(lambda y: _average(_apply(y, of), weights), args, kwargs)

    def std(self, *args: Any, of: str | None = "softmax", **kwargs: Any) -> Any:
        """The members' standard deviation (divided by N), `[*the member's shape]`; with state as `mean`."""
        return self._of(lambda y: _apply(y, of).std(0, correction=0), args, kwargs)

    def vote(self, *args: Any, **kwargs: Any) -> Any:
        """The class that most members choose, ties to the lowest number: argmax over the last dim, then the mode over members; with state as `mean`."""
        return self._of(lambda y: y.argmax(-1).mode(0).values, args, kwargs)

    def _of(self, figure: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any) -> Any:
        result = self(*args, **kwargs)
        if not self._binder.states:
            return figure(self._leaf(result))
        answer, state = result
        return figure(self._leaf(answer)), state

    def _leaf(self, result: Any) -> torch.Tensor:
        if isinstance(result, (Output, Mapping)):
            result = result["logits"] if "logits" in result else next(iter(result.values()))
        while isinstance(result, (tuple, list)) and result and self.entry.outputs[0].kind != "ragged":
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise InputError("the members' outputs differ in shape, or are no tensor: there is no mean of them")
        return result

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Bind the programs of these patterns now instead of at the first call."""
        for pattern in patterns:
            self._programs(pattern)

    def compiled(self, pattern: str = "shared") -> list[Path]:
        """Where a pattern's compiled programs lie, one folder each; bound, and compiled where that was asked for, if they are not yet."""
        return [b.place for b in self._programs(pattern) if b.place is not None]

    def forget(self) -> None:
        """Let go of bound programs."""
        self._seen.clear()
        self._bound.clear()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensor, value)))


def _apply(x: torch.Tensor, of: str | None) -> torch.Tensor:
    if of == "softmax":
        return x.softmax(-1)
    if of == "sigmoid":
        return x.sigmoid()
    if of is not None:
        raise UsageError(f"of={of!r} is unknown; known: softmax, sigmoid, None")
    return x


def _average(x: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    if weights is None:
        return x.mean(0)
    if len(weights) != x.shape[0]:
        raise UsageError(f"{len(weights)} weights for {x.shape[0]} members; give one a member")
    w = torch.tensor(weights, dtype=x.dtype, device=x.device)
    averaged: torch.Tensor = torch.tensordot(w / w.sum(), x, 1)
    return averaged
