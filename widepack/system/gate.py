"""Lets calls run in parallel, and a swap wait for all of them, with a `Gate`.

Many calls pass the gate at once. A swap closes it, waits for the calls inside, and delays new ones.

Entering and leaving take no lock, only operations that Python does atomically: setting and deleting an item
of a dict. A call first records that it is inside and then checks whether the gate is closed. A swap first
closes the gate and then checks which calls are inside. One of the two always sees the other. No call enters a
closed gate, so a swap waits only for the calls that were inside when it closed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

LOOK_S = 0.05  # how often a closed gate looks for threads that ended inside


class Runs(Protocol):
    """An object with a function to run. `run` is read inside the gate, because a swap may replace it."""

    @property
    def run(self) -> Any: ...


class Gate:
    """Lets calls run in parallel, and a swap wait until no call runs. closed: whether new calls wait."""

    def __init__(self) -> None:
        self.closed = False
        self._inside: dict[int, bool] = {}
        self._opened = threading.Event()
        self._opened.set()
        self._left = threading.Event()
        self._one = threading.Lock()

    def run(self, program: Runs, values: Sequence[Any]) -> Any:
        """Runs `program.run(*values)` with no swap at the same time.

        Not reentrant: not from inside such a call of this thread.
        """
        me, inside = get_ident(), self._inside
        try:
            inside[me] = True
            while self.closed:
                self._wait(me)
            return program.run(*values)
        finally:
            inside.pop(me, None)
            if self.closed:
                self._left.set()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Runs a block with no swap at the same time."""
        me = get_ident()
        try:
            self._inside[me] = True
            while self.closed:
                self._wait(me)
            yield
        finally:
            self._inside.pop(me, None)
            if self.closed:
                self._left.set()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Runs a block while no call is inside."""
        with self._one:
            self._opened.clear()
            self.closed = True
            try:
                while self._inside:
                    self._left.clear()
                    if self._inside and not self._left.wait(LOOK_S):
                        self._forget_the_dead()
                yield
            finally:
                self.closed = False
                self._opened.set()

    def _wait(self, me: int) -> None:
        """Leaves until the gate opens, and enters again."""
        self._inside.pop(me, None)
        self._left.set()
        self._opened.wait()
        self._inside[me] = True

    def _forget_the_dead(self) -> None:
        """Removes calls of threads that no longer exist: after a fork, those of the parent."""
        alive = sys._current_frames()  # Python has no public name for it
        for thread in [t for t in list(self._inside) if t not in alive]:
            self._inside.pop(thread, None)

    def __deepcopy__(self, memo: Any) -> Gate:
        """A copy of a model has a new gate."""
        return Gate()

    def __reduce__(self) -> Any:
        return Gate, ()
