"""Maps the overload of each op to its strategies, in the order in which they are tried.

A strategy is a function with the arguments of the op, in the op's order, after the writer `w`. Each argument
is a literal, a `Shared` or a `Stacked` value. The strategy returns a `Shared` or `Stacked` value, or a tuple
of them where the op returns a tuple. Its `when` decides whether it applies, from kinds, shapes, dtypes and
the device alone.

    @strategy("linear", "bmm", family="linear")      # aten.linear.default
    def bmm(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue: ...

Lowering, tests, `widepack selftest` and `widepack primitives` read `REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..ir.ops import full_name

Rule = Callable[..., Any]
When = Callable[..., bool]
WHOLE = ("auto", "wide", "loop")  # strategies of a whole region, not of one op


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op for all members.

    name: what `--strategy` takes.
    rule: the function that writes the nodes.
    when: whether it applies to given arguments.
    note: one line for `widepack primitives`.
    derivative: whether torch can differentiate the nodes that it writes. Some ops of widepack have no
        derivative; members that train do not use these strategies.
    on_request: whether only a user or a rule of thumb may choose it: because its numbers differ from those of
        `sequential`, for example one random draw for all members, or because it serves several nodes at once.
    """

    name: str
    rule: Rule
    when: When
    note: str
    derivative: bool = True
    on_request: bool = False


@dataclass(slots=True)
class Primitive:
    """An op and its strategies.

    op: the name of the overload, for example `aten.linear.default`.
    family: the heading in `widepack primitives`: linear, conv, pointwise, ...
    file: the source file that registered its first strategy.
    strategies: by name, in the order in which they are tried.
    """

    op: str
    family: str
    file: str
    strategies: dict[str, Strategy] = field(default_factory=dict)


REGISTRY: dict[str, Primitive] = {}


def strategies_of(op: str) -> dict[str, Strategy]:
    """Returns the strategies of an op by name; none if the op has no primitive."""
    return REGISTRY[op].strategies if op in REGISTRY else {}


def family_of(op: str) -> str:
    """Returns the family of an op; "" if it has no primitive."""
    return REGISTRY[op].family if op in REGISTRY else ""


def always(*_: Any, **__: Any) -> bool:
    """The `when` of a strategy that always applies."""
    return True


def register(
    op: str,
    name: str,
    rule: Rule,
    *,
    family: str,
    when: When = always,
    note: str = "",
    derivative: bool = True,
    on_request: bool = False,
) -> None:
    """Adds a strategy to an op.

    Raises:
        ValueError: The op has a strategy of this name; the message names both files.
    """
    op, file = full_name(op), rule.__code__.co_filename
    primitive = REGISTRY.setdefault(op, Primitive(op, family, file))
    if name in primitive.strategies:
        other = primitive.strategies[name].rule.__code__.co_filename
        raise ValueError(f"{op}: strategy {name!r} is registered twice, in {other} and in {file}")
    primitive.strategies[name] = Strategy(
        name, rule, when, note or (rule.__doc__ or "").strip().split("\n")[0], derivative, on_request
    )


def strategy(
    ops: str | Iterable[str],
    name: str,
    *,
    family: str,
    when: When = always,
    derivative: bool = True,
    on_request: bool = False,
) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule as a strategy of these ops.

    ops: their names, in a list or in a string with spaces between them.
    """

    def add(rule: Rule) -> Rule:
        for op in ops.split() if isinstance(ops, str) else ops:
            register(op, name, rule, family=family, when=when, derivative=derivative, on_request=on_request)
        return rule

    return add


def strategy_names() -> set[str]:
    """Returns all names that `--strategy` accepts."""
    return {*WHOLE, "sequential"} | {s for p in REGISTRY.values() for s in p.strategies}


def families() -> Iterator[tuple[str, list[Primitive]]]:
    """Yields each family with its primitives, both sorted by name."""
    by_family: dict[str, list[Primitive]] = {}
    for primitive in REGISTRY.values():
        by_family.setdefault(primitive.family, []).append(primitive)
    for name in sorted(by_family):
        yield name, sorted(by_family[name], key=lambda p: p.op)
