"""Binds wide programs to weights and to a backend.

`CompiledChoice` chooses a compiled program that is in the cache, where it was measured to be faster than
`eager`.

`widepack compile` and `load(compile="now")` race each compiled program against the same plan on `eager`: with
one thread, and with the current number of threads. If the compiled one is faster by `GAIN`, a note says so in
the folder of compiled programs. A load without a backend takes the compiled program then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from ... import backends
from ...errors import ArtifactError, UsageError
from ...ir.random_ops import uses_random_ops
from ...runtime.executable import Executable
from ...runtime.value_checks import ValueChecks, checked_nodes
from ...system.compiled_cache import CompiledCache, default_folder
from ...system.machine import name_of
from ...system.timing import LEAST_ROUNDS, race, ratio, waited
from ..open_artifact import LoadOptions, OpenArtifact
from .bound_program import BoundProgram, Runnable, StoredProgram
from .entry_inputs import EntryInputs
from .merged_weights import fits_memory, merged_bytes
from .probe_check import ProbeCheck
from .program_source import ProgramAdmission

GAIN = 0.95
RACE_S, MOST_S = 0.2, 5.0


class CompiledChoice:
    """The notes on compiled programs of one artifact.

    artifact: the open artifact, whose options name the folder of compiled programs.
    """

    def __init__(self, artifact: OpenArtifact) -> None:
        self.artifact = artifact
        self._cache = CompiledCache(artifact.options.cache or default_folder())

    def backend(self, pattern: str, stored: StoredProgram) -> str:
        """Returns the backend that was measured to be faster for a program; "" without a note."""
        if not self._cache.folder.is_dir():
            return ""
        try:
            return self._cache.note(self._key(pattern, stored, torch.get_num_threads()))
        except UsageError:  # other users may write in the folder: nothing in it is used
            return ""

    def measure(
        self,
        pattern: str,
        stored: StoredProgram,
        compiled: BoundProgram,
        eager: BoundProgram,
        inputs: Sequence[Tensor],
    ) -> None:
        """Races a compiled program against the plan on `eager`, and notes where it is faster.

        Args:
            pattern: The pattern of inputs.
            stored: The program of the artifact.
            compiled: The program on its backend.
            eager: The program on `eager`.
            inputs: The inputs of one call. If the program refuses them, for example an index out of range,
                nothing is noted.
        """
        try:
            eager.run(*inputs)
        except (IndexError, RuntimeError, ValueError):
            return
        current = torch.get_num_threads()
        try:
            for threads in sorted({1, current}):
                torch.set_num_threads(threads)
                calls = {
                    "compiled": waited(lambda: compiled.run(*inputs), self.artifact.device),
                    "eager": waited(lambda: eager.run(*inputs), self.artifact.device),
                }
                times = race(calls, RACE_S, LEAST_ROUNDS, limit_s=MOST_S)
                faster = ratio(times, "compiled", "eager") <= GAIN
                self._cache.write_note(
                    self._key(pattern, stored, threads), compiled.backend if faster else ""
                )
        finally:
            torch.set_num_threads(current)

    def _key(self, pattern: str, stored: StoredProgram, threads: int) -> str:
        content = stored.content or strict_json.digest(stored.program.to_json())
        machine = name_of(str(self.artifact.device))
        return strict_json.digest([content, pattern, threads, machine, torch.__version__])


class _StoredWeights(Mapping[str, Any]):
    """The weights that a program reads, taken from the artifact when somebody asks for them."""

    def __init__(self, artifact: OpenArtifact, program: Program) -> None:
        self._artifact, self._names = artifact, [s.source for s in program.weights]

    def __getitem__(self, name: str) -> Any:
        return self._artifact.weights.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ProgramBinder:
    """Binds the programs of one entry."""

    def __init__(self, inputs: EntryInputs, admission: ProgramAdmission, probe_check: ProbeCheck) -> None:
        self.inputs, self.admission, self.probe_check = inputs, admission, probe_check
        self.artifact, self.entry = inputs.artifact, inputs.entry
        self.choice = CompiledChoice(inputs.artifact)

    def bind(
        self,
        pattern: str,
        stored: StoredProgram,
        options: LoadOptions | None = None,
        fallback: StoredProgram | None = None,
        weights: Mapping[str, Any] | None = None,
        before: BoundProgram | None = None,
        member: int = -1,
    ) -> BoundProgram:
        """Makes a wide program ready to run.

        options: default those of the load. fallback: what runs on `eager` if the plan's own backend is not
        available; default the same program. weights: by name; default those of the model. before: what is
        bound now, from which the weights differ for one member, at this place among the loaded ones. Raises:
        ArtifactError, also if a mapped file was changed in place; UsageError.
        """
        options = options or self.artifact.options
        program = stored.program
        self.artifact.check_unchanged()
        self.admission.check_slots(pattern, program)
        self._check_merged(pattern, program)
        others = weights is not None
        if weights is None:
            weights = {s.source: self.artifact.weights.get(s.source) for s in program.weights}
        backend = self._backend(pattern, stored, options)
        noted = options.backend == "auto" and not stored.plan.backend
        if backend != "eager":
            from ...kernels.decompose import for_compiler  # a program on `eager` does not need it

            program = for_compiler(program, backend, self.artifact.device)
            content = f"{stored.content} for {backend}" if stored.content else ""
            self.admission.check(pattern, program, weights, content)
            made = backends.backend(backend)
            stored_weights = _StoredWeights(self.artifact, program) if made.COPIES else weights
            run = self.artifact.executable(program, stored_weights, lazy=True)
            checks = ValueChecks(run.main, lambda: run.given)
            try:
                self._refuse_unchecked(pattern, backend, run, checks)
                task = self._task(pattern, stored, run, options)
                if made.COPIES:  # what it copied needs no second copy
                    task = replace(task, weights=lambda: run.derived(weights))
                task = replace(task, weights_key="" if others else self.artifact.weights_key)
                if before is not None:
                    task = replace(task, before=before.runnable.function, member=member)
                function = made.bind(task)
            except (backends.Unavailable, ArtifactError, UsageError) as e:
                if options.backend != "auto":
                    raise
                removed = noted and isinstance(e, backends.Unavailable)  # the compiled program
                if not removed:
                    warnings.warn(
                        f"the plan was measured on backend {backend!r}, which cannot be used here, so "
                        f"'eager' runs instead: {e}",
                        stacklevel=8,
                    )
                return self.bind(pattern, fallback or stored, replace(options, backend="eager"))
            run.call = checks.before(function, task.eager) if checks.needed else function
            runnable = Runnable(run, function, None if checks.needed else function.members)
        else:
            self.admission.check(pattern, program, weights, stored.content)
            workers = min(stored.plan.workers, torch.get_num_threads())
            runnable = Runnable(self.artifact.executable(program, weights, workers))
        ragged = [k for k, o in enumerate(self.entry.outputs) if o.kind == "ragged"]
        bound = replace(stored, program=program)
        return BoundProgram(bound, runnable, self.entry.result, backend, ragged)

    def _check_merged(self, pattern: str, program: Program) -> None:
        """Refuses a program that merges more weights than fit, and raises the budget for another one.

        Raises: UsageError.
        """
        size = merged_bytes(self.artifact, program)
        if not size:
            return
        if not fits_memory(self.artifact, size):
            raise UsageError(
                f"{self.inputs.title(pattern)} merges the factors of weights into {size:,} bytes; the memory"
                " that is available, or the size of the artifact's files, does not allow it. Load fewer"
                " members, or if you trust its makers with limit=None"
            )
        self.artifact.limits.justify_merged(size)

    def _refuse_unchecked(self, pattern: str, backend: str, run: Executable, checks: ValueChecks) -> None:
        """Raises: Unavailable for a program whose indices or divisors the backend would not check."""
        from ...backends.index_flags import unguarded

        if not checks.possible:
            checked = next(checked_nodes(run.main))
            raise backends.Unavailable(
                f"{self.inputs.title(pattern)}: node {checked.name} ({checked.op}) reads places that are "
                "computed inside the program; only 'eager' checks them"
            )
        if (node := unguarded(run.main)) is not None:
            raise backends.Unavailable(
                f"{self.inputs.title(pattern)}: node {node.name} ({node.op}) reads or writes at indices, "
                f"or divides by a number, that {backend!r} does not check; use backend='eager'"
            )

    def rebind(self, pattern: str, bound: BoundProgram, weights: Mapping[str, Any], member: int) -> Runnable:
        """Binds a bound program on the same backend to other weights of one member.

        weights: of all members, by name. member: its place among the loaded ones.
        """
        options = replace(self.artifact.options, backend=bound.backend)
        made = self.bind(pattern, bound.stored, options, weights=weights, before=bound, member=member)
        return made.runnable

    def _backend(self, pattern: str, stored: StoredProgram, options: LoadOptions) -> str:
        """Returns the name of the backend for a program."""
        name = options.backend
        planned = stored.plan.backend or (self.choice.backend(pattern, stored) if name == "auto" else "")
        chosen = (planned if planned in backends.NAMES else "eager") if name == "auto" else name
        if chosen == "eager" or not uses_random_ops(stored.program):
            return chosen
        if name != "auto":
            warnings.warn(
                f"{self.inputs.title(pattern)} draws random numbers, so its answers differ from call to "
                f"call, and backend {name!r} can only be checked on equal answers: 'eager' runs instead",
                stacklevel=8,
            )
        return "eager"

    def _task(
        self, pattern: str, stored: StoredProgram, run: Executable, options: LoadOptions
    ) -> backends.Task:
        """Returns what a backend needs to bind a wide program."""
        artifact, inputs, plan = self.artifact, self.inputs, stored.plan
        batches = ""
        if plan.batch != (1, None):
            batches = f", batch {plan.batch[0]} to {'any' if plan.batch[1] is None else plan.batch[1]}"
        return backends.Task(
            program=run.main,
            weights=lambda: run.given,
            device=artifact.device,
            # The digest of what is compiled: the prologue may have taken a part of the program.
            content=strict_json.digest(run.main.to_json()),
            pattern=pattern,
            title=f"{inputs.title(pattern)}{batches}",
            eager=lambda *inputs: run.eager(*inputs),
            dims={d: (v.min, v.max, v.example) for d, v in self.entry.dims.items()},
            example=inputs.sizes_of(plan),
            guards=[g.expr for g in self.entry.guards],
            inputs=lambda sizes: inputs.drawn(pattern, sizes),
            differ=partial(self.probe_check.differ, pattern),
            compile=options.compile,
            cache=options.cache,
            progress=options.progress,
            graph=artifact.trusted_graph,
            workers=min(plan.workers, torch.get_num_threads()),
            most_nodes=options.most_nodes,
        )
