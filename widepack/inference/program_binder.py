"""Binds wide programs to weights and to a backend."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from .. import backends
from ..errors import ArtifactError, UsageError
from ..ir.random_ops import uses_random_ops
from ..runtime.executable import Executable
from ..runtime.value_checks import ValueChecks, checked_nodes
from ..verification import probe as probes
from .bound_program import BoundProgram, Runnable, StoredProgram
from .compiled_choice import CompiledChoice
from .entry_inputs import EntryInputs
from .merged_weights import fits_memory, merged_bytes
from .open_artifact import BackendOptions
from .probe_check import ProbeCheck
from .program_admission import ProgramAdmission


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
        options: BackendOptions | None = None,
        fallback: StoredProgram | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> BoundProgram:
        """Makes a wide program ready to run.

        options: default those of the load. fallback: what runs on `eager` if the plan's own backend is not
        available; default the same program. weights: by name; default those of the model. Raises:
        ArtifactError, also if a mapped file was changed in place; UsageError.
        """
        options = options or self.artifact.options.backend
        program = stored.program
        self.artifact.check_unchanged()
        self.admission.check_slots(pattern, program)
        self._check_merged(pattern, program)
        if weights is None:
            weights = {s.source: self.artifact.weights.get(s.source) for s in program.weights}
        backend = self._backend(pattern, stored, options)
        noted = options.backend == "auto" and not stored.plan.backend
        if backend != "eager":
            from ..kernels.decompose import for_compiler  # a program on `eager` does not need it

            program = for_compiler(program, backend, self.artifact.device)
            content = f"{stored.content} for {backend}" if stored.content else ""
            self.admission.check(pattern, program, weights, content)
            run = self.artifact.executable(program, weights)
            checks = ValueChecks(run.main, run.given)
            try:
                if not checks.possible:
                    node = next(checked_nodes(run.main))
                    raise backends.Unavailable(
                        f"{self.inputs.title(pattern)}: node {node.name} ({node.op}) reads places that are "
                        "computed inside the program; only 'eager' checks them"
                    )
                self._check_indices(pattern, backend, run)
                task = self._task(pattern, stored, run, options)
                function = backends.backend(backend).bind(task)
            except (backends.Unavailable, ArtifactError, UsageError) as e:
                if options.backend != "auto":
                    raise
                if noted and isinstance(e, backends.Unavailable):  # the compiled program was removed
                    return self.bind(pattern, fallback or stored, replace(options, backend="eager"))
                warnings.warn(
                    f"the plan was measured on backend {backend!r}, which cannot be used here, so "
                    f"'eager' runs instead: {e}",
                    stacklevel=8,
                )
                return self.bind(pattern, fallback or stored, replace(options, backend="eager"))
            run.use(checks.before(function, run.eager) if checks.needed else function)
            runnable = Runnable(run, function)
        else:
            self.admission.check(pattern, program, weights, stored.content)
            workers = min(stored.plan.workers, torch.get_num_threads())
            runnable = Runnable(self.artifact.executable(program, weights, workers))
        ragged = [k for k, o in enumerate(self.entry.outputs) if o.kind == "ragged"]
        return BoundProgram(
            program, stored.plan, runnable, self.entry.result, backend, stored.content, ragged, stored.int8
        )

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

    def _check_indices(self, pattern: str, backend: str, run: Executable) -> None:
        """Raises: Unavailable for a program whose indices or divisors the backend would not check."""
        if backend == "eager":
            return
        from ..backends.index_flags import unguarded

        if (node := unguarded(run.main)) is not None:
            raise backends.Unavailable(
                f"{self.inputs.title(pattern)}: node {node.name} ({node.op}) reads or writes at indices, "
                f"or divides by a number, that {backend!r} does not check; use backend='eager'"
            )

    def rebind(self, pattern: str, bound: BoundProgram, weights: Mapping[str, Any]) -> Runnable:
        """Binds a bound program on the same backend to other weights. weights: by name."""
        options = replace(self.artifact.options.backend, backend=bound.backend)
        stored = StoredProgram(bound.program, bound.plan, bound.content)
        return self.bind(pattern, stored, options, weights=weights).runnable

    def _backend(self, pattern: str, stored: StoredProgram, options: BackendOptions) -> str:
        """Returns the name of the backend for a program. Raises: UsageError."""
        name = options.backend
        planned = stored.plan.backend or (self.choice.backend(pattern, stored) if name == "auto" else "")
        chosen = (planned if planned in backends.NAMES else "eager") if name == "auto" else name
        if chosen == "eager" or not uses_random_ops(stored.program):
            return chosen
        if name != "auto":
            raise UsageError(
                f"{self.inputs.title(pattern)} draws random numbers, so its answers differ from call "
                f"to call, and backend {name!r} can only be checked on equal answers: leave the "
                "backend out, and 'eager' runs"
            )
        return "eager"

    def _task(
        self, pattern: str, stored: StoredProgram, run: Executable, options: BackendOptions
    ) -> backends.Task:
        """Returns what a backend needs to bind a wide program."""
        artifact, inputs, plan = self.artifact, self.inputs, stored.plan
        batches = ""
        if plan.batch != (1, None):
            batches = f", batch {plan.batch[0]} to {'any' if plan.batch[1] is None else plan.batch[1]}"
        return backends.Task(
            program=run.main,
            weights=run.given,
            device=artifact.device,
            # The digest of what is compiled: the prologue may have taken a part of the program.
            content=strict_json.digest(run.main.to_json()),
            pattern=pattern,
            title=f"{inputs.title(pattern)}{batches}",
            eager=run.eager,
            dims={d: (v.min, v.max, v.example) for d, v in self.entry.dims.items()},
            example=inputs.sizes_of(plan),
            guards=[g.expr for g in self.entry.guards],
            inputs=lambda sizes: inputs.drawn(pattern, sizes),
            differ=lambda found, reference: self.differ(pattern, found, reference),
            compile=options.compile,
            cache=options.cache,
            located=artifact.weights.located,
            progress=options.progress,
            workers=min(plan.workers, torch.get_num_threads()),
            most_nodes=options.most_nodes,
        )

    def differ(self, pattern: str, found: Sequence[Any], reference: Sequence[Any]) -> str:
        """Returns where a program's outputs differ from the flat graph's by more than the probe's bounds;
        else "".
        """
        bounds = self.probe_check.bounds(pattern) or self.probe_check.bounds("shared") or []
        for k, (mine, right) in enumerate(zip(found, reference)):
            row = bounds[k] if k < len(bounds) else None
            for a, b in zip(mine, right) if isinstance(right, list) else [(mine, right)]:
                if words := probes.differs(a, b, row):
                    return f"output {self.entry.outputs[k].name or k} {words}"
        return ""
