"""What happens inside an export, seen while it runs: torch keeps its own lines only, so the moments themselves are watched.

| moment | what is kept |
|---|---|
| torch names a size | its name (`s27`) and which size of which input it is |
| a dynamic dim becomes one size | the member's line |
| torch takes a condition on sizes for granted | the condition and the member's line |
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
class Seen:
    """Of one export. names: torch's name of a size -> `L['x'].size()[1]`. fixed: name, and size -> line. conditions: (sympy condition, line), as they came."""

    names: dict[str, str] = field(default_factory=dict)
    fixed: dict[str | int, str] = field(default_factory=dict)
    conditions: list[tuple[Any, str]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Seen]:
    """While an export runs. In a torch without these moments nothing is seen, and messages name sizes without lines."""
    seen = Seen()
    moments: dict[str, Callable[..., None]] = {
        "create_symbol": lambda made, val, source, *_: _name(seen, made, source),
        "_set_replacement": lambda _, symbol, target, *__: _fix(seen, symbol, target),
        "_log_guard": lambda _, prefix, condition, *__: seen.conditions.append((condition, _line())),
    }
    originals = {name: getattr(ShapeEnv, name) for name in moments if hasattr(ShapeEnv, name)}

    def watch(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def run(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            note(result, *args, *kwargs.values())
            return result

        return run

    for name, original in originals.items():
        setattr(ShapeEnv, name, watch(original, moments[name]))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(ShapeEnv, name, original)


def _name(seen: Seen, made: Any, source: Any) -> None:
    name = getattr(source, "name", "")
    seen.names.setdefault(str(made), str(name() if callable(name) else name))


def _fix(seen: Seen, symbol: Any, target: Any) -> None:
    if getattr(target, "is_number", False):
        line = _line()
        for key in (str(symbol), int(target)):
            seen.fixed.setdefault(key, line)


def _line() -> str:
    return user_frame(traceback.extract_stack())
