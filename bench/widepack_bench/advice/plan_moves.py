"""Moves that write another artifact: measured plans, and weights that are shared or factored."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import widepack
from widepack.errors import WidepackError
from widepack.kernel_times.program import compiled_seconds, wide_seconds
from widepack.planning.plan import Plan, for_size, scaled
from widepack.registry.registry import REGISTRY
from widepack.system.machine import CHOOSABLE, backends_here, name_of
from widepack_artifacts.program import Program

from ..measure.loading import entry_of, load_on
from .move import Move, NotPossible, Opened, opened
from .subject import AdvisedArtifact

TUNE_S = 20.0
"""Seconds of measuring that a move gives `widepack tune`."""
COMPILE_S = 120.0
REBUILT = "rebuilt.wide"


def plan_moves(subject: AdvisedArtifact, backends: Sequence[str] | None = None) -> Iterator[Move]:
    """Yields the moves that measure plans, where this machine has not measured this batch yet.

    backends: that a plan may name; default all that this machine has.
    """
    tuned, work = is_tuned(subject), subject.work
    best = cache(partial(_best_plan, subject))
    command = f"widepack tune {shlex.quote(str(work.path))} --batch {work.batch} --pattern {work.pattern}"
    command += f" --entry {shlex.quote(subject.entry.name)} --threads {work.threads}"
    if not tuned:
        yield _tuned("plan", f"{command} --backend eager --write", ("eager",), best)
    here = () if tuned else backends_here("cpu")
    for backend in dict.fromkeys(here if backends is None else backends):
        if backend not in CHOOSABLE or backend == "eager":
            continue
        yield _tuned(
            f"plan on {backend}",
            f"{command} --backend eager --backend {backend} --write",
            ("eager", backend),
            partial(_best_compiled, subject, best),
        )


def plan_in_use(subject: AdvisedArtifact) -> Plan:
    """Returns the plan that a call of now runs."""
    return subject.entry.programs.for_sizes(subject.work.pattern, subject.sizes).plan


def is_tuned(subject: AdvisedArtifact) -> bool:
    """Whether the plan of now was measured on this machine, with these threads, at this batch."""
    plan = plan_in_use(subject)
    here = plan.machine == name_of("cpu") and plan.threads == subject.work.threads
    return here and plan.at == subject.sizes.get(subject.entry.programs.inputs.letter, 0)


def _tuned(name: str, how: str, backends: Sequence[str], predict: Callable[[], float]) -> Move:
    artifact = f"{name.replace(' ', '-')}.wide"

    def open_(subject: AdvisedArtifact) -> Opened:
        work, out = subject.work, subject.folder / artifact
        copied(work.path, out)
        widepack.tune(
            out,
            batches=(work.batch,),
            patterns=(work.pattern,),
            entries=(subject.entry.name,),
            budget_s=TUNE_S,
            threads=work.threads,
            backends=backends,
            compile_s=COMPILE_S,
            write=True,
            progress=subject.progress,
        )
        return opened(subject, entry_of(load_on(out, "cpu", "auto"), work.entry))

    return Move(name=name, how=how, predict=lambda _: predict(), open=open_, artifact=artifact)


def _candidates(subject: AdvisedArtifact) -> Mapping[str, float]:
    """Predicts the plans of which one strategy is preferred wherever it applies. Returns seconds by name."""
    source = subject.entry.programs.source
    found = {"now": wide_seconds(subject.program, subject.sizes, subject.times)}
    ops = {n.op for i in range(subject.count) for n in source.member_program(i).nodes if n.op in REGISTRY}
    names = {s for op in ops for s in REGISTRY[op].strategies}
    for name in ["wide", "loop", *sorted(names)]:
        try:
            lowered = source.lower(subject.work.pattern, [name])
            program = _serving(lowered, subject)
            found[name] = wide_seconds(program, subject.sizes, subject.times)
        except (WidepackError, RuntimeError):  # the strategy applies nowhere, or a size depends on values
            continue
    return found


def _serving(lowered: Sequence[tuple[Program, Plan]], subject: AdvisedArtifact) -> Program:
    inputs = subject.entry.programs.inputs
    size = scaled(subject.sizes, inputs.letter, inputs.example)
    return for_size(lowered, size, lambda row: row[1])[0]


def _best_plan(subject: AdvisedArtifact) -> float:
    return min(_candidates(subject).values())


def _best_compiled(subject: AdvisedArtifact, plan: Callable[[], float]) -> float:
    return min(plan(), compiled_seconds(subject.program, subject.sizes, subject.times))


def copied(path: Path, out: Path) -> None:
    """Copies an artifact. Its files are never written again, so links serve where the system has them."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(path, out, copy_function=link)


def rebuilt(subject: AdvisedArtifact, model: str, model_args: Mapping[str, Any]) -> Iterator[Move]:
    """Yields the build that shares equal weights and factors fine-tunes, if the factory is known.

    model: the factory, as `widepack build` takes it.
    """
    manifest = subject.entry.programs.artifact.manifest
    stacked = any(w.kind == "stacked" for w in manifest.weights)
    if len(manifest.entries) > 1 or not stacked or subject.entry.programs.artifact.factors:
        return
    words = ["--model", model, *(f"--model-arg={k}={json.dumps(v)}" for k, v in model_args.items())]
    words += [f"--input={spec}" for spec in specs_of(subject)]
    how = f"widepack build CHECKPOINTS -o better.wide --unmerge {shlex.join(words)}"
    targets = sorted({w.device for w in subject.entry.entry.wide} | {"cpu"})

    def open_(subject: AdvisedArtifact) -> Opened:
        out, folder = subject.folder / REBUILT, subject.folder / "members"
        ens = widepack.load(subject.work.path, warmup=False)
        folder.mkdir()
        paths = [folder / f"{i}.pt" for i in range(len(ens.members))]
        for i, path in enumerate(paths):
            torch.save(ens.state_dict(i), path)
        widepack.build(
            [str(p) for p in paths],
            out,
            model=model,
            model_args=dict(model_args),
            inputs=specs_of(subject),
            names=list(ens.members),
            unmerge=True,
            pt2=False,
            targets=targets,
            progress=subject.progress,
        )
        entry = entry_of(load_on(out, "cpu", "auto"), subject.work.entry)
        if not entry.programs.artifact.factors and not _shares_more(subject, entry):
            raise NotPossible("no weight is equal in all members, or a base plus thin factors")
        return opened(subject, entry, subject.seconds(entry))

    yield Move(name="share and unmerge", how=how, predict=lambda _: None, open=open_, artifact=REBUILT)


def _shares_more(subject: AdvisedArtifact, entry: Any) -> bool:
    def shared(e: Any) -> int:
        return sum(w.kind == "shared" for w in e.programs.artifact.manifest.weights)

    return shared(entry) > shared(subject.entry)


def specs_of(subject: AdvisedArtifact) -> list[str]:
    """Returns the inputs of the entry as specs that a build takes."""
    return [
        f"{i.name}={i.type}" + (f":{i.low}..{i.high}" if i.low is not None and i.high is not None else "")
        for i in subject.entry.entry.inputs
    ]
