"""Baselines under `torch.compile`, each specialised to the shapes that it is called with."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..measure.answers import Run, members_of, stack
from .vmap import function_of, tables, vmap
from .loop import loop

MANY = 1024  # compiled forms of one function: a run over several networks and batches makes more of them than torch's own limit


def compiled_member(modules: Sequence[nn.Module], each: bool) -> Run:
    """One compiled member called N times; members whose shapes differ are compiled one by one."""
    try:
        rows = tables(modules)
    except ValueError:
        return loop([_Compiled(m) for m in modules], each)
    one = torch.compile(function_of(modules[0]), dynamic=False)
    if each:
        return lambda *args, **kwargs: stack([one(w, members_of(args, i), members_of(kwargs, i)) for i, w in enumerate(rows)])
    return lambda *args, **kwargs: stack([one(w, args, kwargs) for w in rows])


class _Compiled(nn.Module):
    """A module whose call is compiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._call = torch.compile(module, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def compiled_loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """N calls in one compiled graph."""
    try:
        rows = tables(modules)
    except ValueError:
        return torch.compile(loop(modules, each), dynamic=False)
    one = function_of(modules[0])

    def run(*args: Any, **kwargs: Any) -> Any:
        if each:
            return stack([one(w, members_of(args, i), members_of(kwargs, i)) for i, w in enumerate(rows)])
        return stack([one(w, args, kwargs) for w in rows])

    return torch.compile(run, dynamic=False)


def vmap_compiled(modules: Sequence[nn.Module], each: bool) -> Run:
    """`vmap` in one compiled graph."""
    return torch.compile(vmap(modules, each), dynamic=False)


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What compiled baselines run under: a call that meets the limit of compiled forms would run eagerly without a word, and be timed so."""
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=8 * MANY):
        yield


class TooLong(Exception):
    """Compilation took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stop what runs inside after so many seconds, where the system and the thread allow it. Raises: TooLong."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooLong(f"it was not compiled within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # again and again: a compiler may swallow what is raised inside it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
