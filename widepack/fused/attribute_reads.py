"""Which plain attributes of its modules a member reads while it is captured: what it does not read makes no other program, whatever its value.

| what is read | counts as read |
|---|---|
| an attribute, by name, `getattr` or `hasattr`, there or not | that attribute of that part, with all that hangs on its value |
| the `__dict__` of a part, by code that is not torch's (`vars(self)`); its `__getstate__` (`copy.copy(self)`) | every attribute of that part |

So a member whose attributes have the same texts as those that a captured one read runs the same code to the same program, and is not captured itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..capture.attributes import texts_of

_WHOLE = "__dict__"
_BLIND = ("torch.", "widepack.")  # modules of Python whose looks into a part's __dict__ are for its weights and hooks
_LOCK = threading.RLock()


class Reads:
    """The attributes that parts of one member read. found: (path of the part, name)."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._paths: dict[int, list[str]] = {}
        self._kept: list[nn.Module] = []  # so that no id is used again meanwhile

    def of(self, module: nn.Module) -> nn.Module:
        """The same module, whose parts are watched from here on."""
        self._kept.append(module)
        for path, part in module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(part), []).append(path)
        return module

    def note(self, part: nn.Module, name: str, reader: str) -> None:
        """reader: the name of the Python module whose code reads it."""
        paths = self._paths.get(id(part), ())
        if name == "__getstate__":  # it takes the __dict__ past all lookups, whoever asks
            name, reader = _WHOLE, ""
        if paths and not (name == _WHOLE and f"{reader}.".startswith(_BLIND)):
            self.found.update([(path, name) for path in paths])

    def close(self) -> None:
        """Let go of the modules."""
        self._kept.clear()
        self._paths.clear()

    def texts(self, module: nn.Module) -> dict[tuple[str, str], dict[str, str]]:
        """What a member, watched or not, has where these reads were."""
        parts = dict(module.named_modules(remove_duplicate=False))
        return {(path, name): texts_of(parts[path], None if name == _WHOLE else name, parts.values()) for path, name in sorted(self.found)}


@contextmanager
def reads() -> Iterator[Reads]:
    """While a member is captured: give every module that is made of it to `of`."""
    seen, before = Reads(), nn.Module.__getattribute__
    own = "__getattribute__" in vars(nn.Module)

    def read(self: nn.Module, name: str) -> Any:
        seen.note(self, name, sys._getframe(1).f_globals.get("__name__", ""))
        return before(self, name)

    with _LOCK:
        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        try:
            yield seen
        finally:
            if own:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]
            else:
                del nn.Module.__getattribute__
            seen.close()
