"""`Gate`: calls pass it, many at once; a swap closes it, waits for those inside, and holds new ones until it opens.

The way in and out of a call is a handful of operations that Python does whole (a dict's item set and taken away), no lock: a caller writes down that it is inside and
looks whether the gate is closed; who closes it says so and looks who is inside. One of the two sees the other. A closed gate lets nobody in, so a swap waits for
the calls that were inside when it closed and for no others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

LOOK_S = 0.05  # how often a closed gate looks for threads that have ended inside


class Runs(Protocol):
    """What a call runs. It is looked at inside the gate: a swap may put another function there."""

    @property
    def run(self) -> Any: ...


class Gate:
    """closed: whether calls wait."""

    def __init__(self) -> None:
        self.closed = False
        self._inside: dict[int, bool] = {}
        self._opened = threading.Event()
        self._opened.set()
        self._left = threading.Event()
        self._one = threading.Lock()

    def run(self, program: Runs, values: Sequence[Any]) -> Any:
        """`program.run(*values)`, and no swap meanwhile. Not from inside another such call of this thread."""
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
        """The same for a block."""
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
        """Nobody is inside while the block runs."""
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
        """Step out until the gate opens, and in again."""
        self._inside.pop(me, None)
        self._left.set()
        self._opened.wait()
        self._inside[me] = True

    def _forget_the_dead(self) -> None:
        """Threads that are no more hold nothing open: those of the parent after a fork."""
        alive = sys._current_frames()
        for thread in [t for t in list(self._inside) if t not in alive]:
            self._inside.pop(thread, None)

    def __deepcopy__(self, memo: Any) -> Gate:
        """A copy of what is behind the gate has one of its own."""
        return Gate()

    def __reduce__(self) -> Any:
        return Gate, ()
