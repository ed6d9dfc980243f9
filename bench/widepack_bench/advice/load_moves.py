"""Moves that load the artifact in another way: threads, backend, dtype, memory of factored weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import widepack
from widepack.kernel_times.program import compiled_seconds
from widepack.spec.dtypes import find_dtype

from ..measure.loading import entry_of
from .machine_times import times_here
from .move import Move, Opened, opened
from .plan_moves import is_tuned
from .subject import AdvisedArtifact


def thread_moves(subject: AdvisedArtifact, cores: int) -> Iterator[Move]:
    """Yields other numbers of threads, up to the number of cores."""
    for threads in sorted({1, 2, cores // 2, cores} - {0, subject.work.threads}):
        if threads <= cores:
            yield Move(
                name=f"{threads} thread{'' if threads == 1 else 's'}",
                how=f"widepack.load({str(subject.work.path)!r}, threads={threads})",
                predict=partial(_with_threads, threads=threads),
                open=partial(_open_threads, threads=threads),
                measures_machine=True,
            )


def _with_threads(subject: AdvisedArtifact, threads: int) -> float | None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return subject.seconds(subject.entry, times_here(threads, subject.times.dtype))
    finally:
        torch.set_num_threads(before)


def _open_threads(subject: AdvisedArtifact, threads: int) -> Opened:
    return replace(opened(subject, subject.entry), threads=threads)


def compile_moves(subject: AdvisedArtifact, named: bool = False) -> Iterator[Move]:
    """Yields the backend `compile`, unless `tune` has measured plans already. named: the user asks for it."""
    if named or not is_tuned(subject):
        yield _loaded(subject, "compile", _compiled, backend="compile", compile="now")


def memory_moves(subject: AdvisedArtifact) -> Iterator[Move]:
    """Yields the ways to keep weights that are stored as a base and factors."""
    if subject.entry.programs.artifact.factors:
        for memory in ("least", "most"):
            yield _loaded(subject, f"memory {memory}", lambda _: None, memory=memory)


def dtype_moves(subject: AdvisedArtifact, dtypes: Sequence[str]) -> Iterator[Move]:
    """Yields other dtypes of weights and values."""
    for dtype in dict.fromkeys(dtypes):
        yield _loaded(subject, dtype, partial(_in_dtype, dtype=dtype), dtype=dtype)


def _loaded(
    subject: AdvisedArtifact, name: str, predict: Callable[[AdvisedArtifact], float | None], **options: Any
) -> Move:
    """Returns the move that loads the artifact with other arguments."""

    def open_(subject: AdvisedArtifact) -> Opened:
        entry = entry_of(widepack.load(subject.work.path, device="cpu", **options), subject.work.entry)
        dtype = find_dtype(options.get("dtype"))
        if dtype is None:
            return opened(subject, entry, subject.seconds(entry))
        return replace(opened(subject.in_dtype(dtype), entry), other_dtype=True)

    arguments = ", ".join([repr(str(subject.work.path)), *(f"{k}={v!r}" for k, v in options.items())])
    return Move(name=name, how=f"widepack.load({arguments})", predict=predict, open=open_)


def _compiled(subject: AdvisedArtifact) -> float:
    return compiled_seconds(subject.program, subject.sizes, subject.times)


def _in_dtype(subject: AdvisedArtifact, dtype: str) -> float | None:
    name = str(find_dtype(dtype)).removeprefix("torch.")
    return subject.seconds(subject.entry, times_here(subject.work.threads, name))
