"""Records which plain attributes of its modules a member reads while it is captured.

An attribute that the capture does not read cannot change the program, whatever its value is.

| read by the code | recorded as |
|---|---|
| an attribute, by name, `getattr` or `hasattr`, if it exists or not | that attribute, with all of its value |
| the `__dict__` of a part, not by torch (`vars(self)`); its `__getstate__` | every attribute of that part |

If the attributes that a captured member read have the same values in another member, then both have the same
program, and the other member is not captured.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..capture.attributes import texts_of

_ALL_ATTRIBUTES = "__dict__"
_IGNORED_READERS = ("torch.", "widepack.")  # these read a part's __dict__ for its weights and hooks
_LOCK = threading.RLock()


class AttributeReads:
    """The attributes that the modules of one member read.

    Attributes:
        names: The path of a module and the name of an attribute, for each read.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self._paths: dict[int, list[str]] = {}
        self._modules: list[nn.Module] = []  # kept alive, because `_paths` goes by id

    def watch(self, module: nn.Module) -> nn.Module:
        """Watches all parts of a module from now on, and returns the module."""
        self._modules.append(module)
        for path, part in module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(part), []).append(path)
        return module

    def add(self, part: nn.Module, name: str, reader: str) -> None:
        """Records a read. `reader` is the name of the Python module whose code reads."""
        paths = self._paths.get(id(part), ())
        if name == "__getstate__":  # it reads the __dict__ without a lookup
            name, reader = _ALL_ATTRIBUTES, ""
        if paths and not (name == _ALL_ATTRIBUTES and f"{reader}.".startswith(_IGNORED_READERS)):
            self.names.update([(path, name) for path in paths])

    def close(self) -> None:
        """Releases the modules."""
        self._modules.clear()
        self._paths.clear()

    def texts(self, module: nn.Module) -> dict[tuple[str, str], dict[str, str]]:
        """Returns the values, as texts, that a member has in the attributes that were read."""
        parts = dict(module.named_modules(remove_duplicate=False))
        return {
            (path, name): texts_of(parts[path], None if name == _ALL_ATTRIBUTES else name, parts.values())
            for path, name in sorted(self.names)
        }


@contextmanager
def recorded_reads() -> Iterator[AttributeReads]:
    """Records attribute reads while a member is captured. Give each module of the member to `watch`."""
    reads, original = AttributeReads(), nn.Module.__getattribute__
    was_overridden = "__getattribute__" in vars(nn.Module)

    def read(self: nn.Module, name: str) -> Any:
        caller = sys._getframe(1)  # inspect.stack is too slow here
        reads.add(self, name, caller.f_globals.get("__name__", ""))
        return original(self, name)

    with _LOCK:
        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        try:
            yield reads
        finally:
            if was_overridden:
                nn.Module.__getattribute__ = original  # type: ignore[method-assign]
            else:
                del nn.Module.__getattribute__
            reads.close()
