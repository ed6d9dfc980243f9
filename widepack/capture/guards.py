"""Reads the guards of an exported program: conditions on sizes, each with the user's line that it comes from.

torch.export writes a guard as Python text over the sizes of inputs. Here it becomes arithmetic over named
dims. Torch keeps only its own lines of what happens inside of an export, so its functions are wrapped while
an export runs (`watched`):

| moment | what is recorded |
|---|---|
| torch names a size | the name (`s27`), and which size of which input it is |
| a dynamic dim becomes one size | the user's line |
| torch assumes a condition on sizes | the condition and the user's line |
"""

from __future__ import annotations

import ast
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from widepack_artifacts.guards import Expr, holds, letters

from ..errors import CaptureError
from ..ir.guards import InputLeaf, always, arithmetic, expression, subscript_place
from ..ir.torch_internals import replaced
from .explain import user_frame, way_out

_MOST_POINTS = 600  # sizes at which two conditions are compared
_SHOWN = 200  # characters of a condition in a message
_MOST_LEVELS = 256  # of an expression; reading it takes a few calls for each level
_LARGEST = 2**40  # larger numbers in a condition are no sizes


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

    def wrap(original: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
        def run(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            record(result, *args, *kwargs.values())
            return result

        return run

    known = {n: wrap(getattr(ShapeEnv, n), r) for n, r in recorders.items() if hasattr(ShapeEnv, n)}
    with replaced({(ShapeEnv, name): value for name, value in known.items()}):
        yield seen


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


class GuardSource(NamedTuple):
    """A condition on sizes, and the user's line that it comes from (empty where it is unknown)."""

    expr: Expr
    source: str


def guards_from(
    codes: Sequence[str],
    inputs: Sequence[InputLeaf],
    name: str,
    sources: Sequence[GuardSource] = (),
    line: str = "",
) -> tuple[GuardSource, ...]:
    """Returns torch's guard texts as arithmetic over named dims.

    Args:
        codes: The texts.
        inputs: The tensors of the call, which name the dims.
        name: The member's class, for messages.
        sources: Conditions in the order in which the export met them, with the user's lines.
        line: The user's line of the first condition that is no arithmetic.

    Raises:
        CaptureError: A guard is no arithmetic over named dims.
    """
    leaves = {leaf.name: leaf for leaf in inputs}
    unique: dict[str, Expr] = {}
    for code in codes:
        try:
            expr = expression(_parsed(code), leaves)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise CaptureError(_not_arithmetic(name, code, e, line)) from e
        if expr is False:
            sizes = ", ".join(f"{leaf.name} is {leaf.type}" for leaf in inputs)
            raise CaptureError(
                f"{name}: the condition {code!r} does not hold for the example ({sizes or 'no inputs'}); "
                "give an example whose sizes fulfil it, or change the member's code"
            )
        plain = isinstance(expr, bool) or (expr[0] in ("eq", "le", "ge") and expr[1] == expr[2])
        if not plain and not always(expr):
            unique.setdefault(str(expr), expr)
    return tuple(GuardSource(expr, _line_of(expr, sources)) for expr in unique.values())


def _parsed(code: str) -> ast.expr:
    """Returns the tree of an expression. Raises: SyntaxError; ValueError if it is nested too deep."""
    tree = ast.parse(code.strip(), mode="eval").body
    level: list[ast.AST] = [tree]
    for _ in range(_MOST_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")


def _not_arithmetic(name: str, code: str, error: Exception, line: str) -> str:
    """The message for a guard that is not arithmetic over named dims."""
    code = code if len(code) <= _SHOWN else f"{code[:_SHOWN]}..."
    change = way_out(line) or ": compute with sizes in whole numbers, +, -, *, // and %"
    reason = str(error)[:_SHOWN]
    return (
        f"{name} holds only while {code!r}{f', at {line}' if line else ''}. This is a condition that cannot "
        f"be written as arithmetic over named dims ({reason}), so widepack cannot check it before a call; "
        f"change the member's code{change}"
    )


def names_of(seen: ExportEvents, inputs: Sequence[InputLeaf]) -> dict[str, Expr]:
    """Returns for each of torch's names of a size what the inputs call it: a letter, or a multiple of one."""
    leaves = {leaf.name: leaf for leaf in inputs}
    names: dict[str, Expr] = {}
    for symbol, place in seen.names.items():
        try:
            names[symbol] = expression(ast.parse(place, mode="eval").body, leaves)
        except (SyntaxError, ValueError):
            continue  # the size of a tensor that is no input
    return names


def place_of(symbol: str, seen: ExportEvents) -> tuple[str, int] | None:
    """Returns the input and the axis whose size torch calls by this name."""
    try:
        node = ast.parse(seen.names.get(symbol, ""), mode="eval").body
        return subscript_place(node) if isinstance(node, ast.Subscript) else None
    except (SyntaxError, ValueError):
        return None


def conditions_of(seen: ExportEvents, inputs: Sequence[InputLeaf]) -> tuple[list[GuardSource], str]:
    """Returns the conditions in the order in which an export met them, each with the user's line, and the
    line of the first condition that is no arithmetic over named dims; "" if all are.
    """
    names = names_of(seen, inputs)
    sources: dict[str, GuardSource] = {}
    unwritable = ""
    for condition, line in seen.conditions:
        if not line or str(condition) in sources:
            continue
        try:
            expr = arithmetic(condition, names)
        except ValueError:
            unwritable = unwritable or line
            continue
        if not isinstance(expr, (bool, int)):
            sources[str(condition)] = GuardSource(expr, line)
    return list(sources.values()), unwritable


def _line_of(expr: Expr, sources: Sequence[GuardSource]) -> str:
    """Returns the line of the first condition that is equivalent to a guard.

    Torch writes a guard and the condition behind it differently, so their truth is compared at many sizes.
    """
    named = letters(expr)
    for source in (s for s in sources if letters(s.expr) == named):
        points = list(_points(expr, source.expr))
        truth = [holds(expr, sizes) for sizes in points]
        if not all(truth) and truth == [holds(source.expr, sizes) for sizes in points]:
            return source.source
    return ""


def _points(*exprs: Expr) -> Iterator[dict[str, int]]:
    """Yields the sizes at which conditions are compared: small ones, and those around the numbers in them."""
    named = sorted({d for e in exprs for d in letters(e)})
    near = (n + step for e in exprs for n in _numbers(e) for step in (-1, 0, 1))
    around = sorted({n for n in near if 0 < n < _LARGEST})
    end, most = {1: (34, 400), 2: (9, 24)}.get(len(named), (5, 7))
    sizes = [*range(2, end), *around][:most]
    products = itertools.product(sizes, repeat=len(named))
    return (dict(zip(named, point)) for point in itertools.islice(products, _MOST_POINTS))


def _numbers(expr: Expr) -> set[int]:
    if isinstance(expr, list):
        return {n for part in expr[1:] for n in _numbers(part)}
    return {expr} if type(expr) is int else set()


_BEYOND = 64
"""Sizes outside of a bound at which a condition is tried."""


def bound_line(letter: str, size: int, outside: int, conditions: Sequence[GuardSource]) -> str:
    """Returns the line of the condition on one dim that holds at its bound and nowhere outside it; empty if
    there is none.

    outside: the first size outside. A condition such as `T % 2 == 0` holds again at the next one.
    """
    beyond = range(outside, outside + _BEYOND) if outside > size else range(outside, -1, -1)
    for c in conditions:
        if not c.source or letters(c.expr) != {letter} or not holds(c.expr, {letter: size}):
            continue
        if not any(holds(c.expr, {letter: n}) for n in beyond):
            return c.source
    return ""
