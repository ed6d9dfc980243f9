"""Makes baselines with `torch.compile`, each specialized to the shapes of its calls."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..measure.answers import Run, members_of, stack
from .members import loop
from .vmap import function_of, tables, vmap

# Compiled forms of one function. A run over several networks and batches makes more than torch's default
# limit.
MANY = 1024


def compiled_member(modules: Sequence[nn.Module], each: bool) -> Run:
    """Compiles one member and calls it N times. Members of different shapes are compiled one by one."""
    try:
        rows = tables(modules)
    except ValueError:
        return loop([_Compiled(m) for m in modules], each)
    one = torch.compile(function_of(modules[0]), dynamic=False)
    if each:
        return lambda *args, **kwargs: stack(
            [one(w, members_of(args, i), members_of(kwargs, i)) for i, w in enumerate(rows)]
        )
    return lambda *args, **kwargs: stack([one(w, args, kwargs) for w in rows])


class _Compiled(nn.Module):
    """Wraps a module so that its call is compiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._call = torch.compile(module, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def compiled_loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """Compiles all N calls and the stacking as one graph."""
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
    """Compiles `vmap` as one graph."""
    return torch.compile(vmap(modules, each), dynamic=False)


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Raises an error where torch's limit of compiled forms is reached.

    Without this setting torch would run the call eagerly without a message, and the time would be wrong.
    """
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=8 * MANY):
        yield


NOT_COMPILED = "it was not compiled within"


class TooLong(Exception):
    """Compilation took longer than its limit."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stops the body after `seconds`, if the system and the thread allow it.

    Python ignores an exception in a function that it calls itself, such as the callback of a weak reference
    or `__del__`. The limit is then tried again, without a message of Python.

    Raises: TooLong.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, frame: FrameType | None) -> None:
        if _must_end(frame):
            again()
            return
        raise TooLong(f"{NOT_COMPILED} {round(seconds, 2):g} s")

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 5.0)

    def ignored(found: sys.UnraisableHookArgs) -> None:
        if isinstance(found.exc_value, TooLong):
            again()
        else:
            hook(found)

    before, hook = signal.signal(signal.SIGALRM, stop), sys.unraisablehook
    sys.unraisablehook = ignored
    signal.setitimer(
        signal.ITIMER_REAL, seconds, 5.0
    )  # Repeats, because a compiler may catch the first exception.
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _must_end(frame: FrameType | None) -> bool:
    """Returns whether a function runs that must not end half-way: one that the garbage collector calls, such
    as the compiler's, where Python would ignore the exception; or an import, which would leave half a module.
    """
    functions = {getattr(f, "__code__", None) for f in gc.callbacks}
    while frame is not None:
        if frame.f_code in functions or frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
