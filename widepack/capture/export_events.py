"""Records what happens inside torch.export while it exports a member.

Torch keeps only its own lines of these moments, so its functions are wrapped while an export runs.

| moment | what is recorded |
|---|---|
| torch names a size | the name (`s27`), and which size of which input it is |
| a dynamic dim becomes one size | the user's line |
| torch assumes a condition on sizes | the condition and the user's line |
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .explain import user_frame


@dataclass
class ExportEvents:
    """The events of one export.

    names: torch's name of a size -> `L['x'].size()[1]`. fixed: torch's name, and the size -> user's line.
    conditions: (sympy condition, user's line), in order.
    """

    names: dict[str, str] = field(default_factory=dict)
    fixed: dict[str | int, str] = field(default_factory=dict)
    conditions: list[tuple[Any, str]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[ExportEvents]:
    """Records the events of the export that runs inside a with block.

    In a torch without these functions nothing is recorded, and messages name sizes without lines.
    """
    seen = ExportEvents()
    recorders: dict[str, Callable[..., None]] = {  # names of torch 2.11 to 2.13
        "create_symbol": lambda symbol, val, source, *_: _record_name(seen, symbol, source),
        "_set_replacement": lambda _, symbol, target, *__: _record_fixed(seen, symbol, target),
        "_log_guard": lambda _, prefix, condition, *__: seen.conditions.append((condition, _line())),
    }
    originals = {name: getattr(ShapeEnv, name) for name in recorders if hasattr(ShapeEnv, name)}

    def wrap(original: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
        def run(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            record(result, *args, *kwargs.values())
            return result

        return run

    for name, original in originals.items():
        setattr(ShapeEnv, name, wrap(original, recorders[name]))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(ShapeEnv, name, original)


def _record_name(seen: ExportEvents, symbol: Any, source: Any) -> None:
    name = getattr(source, "name", "")
    seen.names.setdefault(str(symbol), str(name() if callable(name) else name))


def _record_fixed(seen: ExportEvents, symbol: Any, target: Any) -> None:
    if getattr(target, "is_number", False):
        line = _line()
        for key in (str(symbol), int(target)):
            seen.fixed.setdefault(key, line)


def _line() -> str:
    return user_frame(traceback.extract_stack())
