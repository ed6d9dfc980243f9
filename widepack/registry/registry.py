"""The one registry: an op's overload -> its strategies, in the order in which they are tried.

A strategy is a function that reads like the op: same arguments, same order, after the writer `w`. Arguments are literals, `Shared` or `Stacked`; it
gives a `Shared` or `Stacked` (a tuple of them where the op gives a tuple). `when` says from kinds, shapes, dtypes and the device alone whether it applies.

    @strategy("linear", "bmm")                       # aten.linear.default
    def bmm(w: Writer, x: Wide, weight: Wide, bias: Wide | None = None) -> Wide: ...

Lowering, tests, `widepack selftest` and `widepack primitives` all walk `REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError

Rule = Callable[..., Any]
When = Callable[..., bool]
WHOLE = ("auto", "wide", "loop")  # strategies of a whole region, not of an op


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op for all members.

    note: one line for `widepack primitives`. derivative: whether the gradients of what it writes are the op's own; widepack's own ops have none, so members that train do without these.
    asked: it answers other numbers than `sequential` (one draw for all members), so it runs where a person names it and nowhere else.
    """

    name: str
    rule: Rule
    when: When
    note: str
    derivative: bool = True
    asked: bool = False


@dataclass(slots=True)
class Primitive:
    """An op and its strategies. family: the primitive's name for a person (linear, conv, pointwise, ...); file: where it is registered."""

    op: str
    family: str
    file: str
    strategies: dict[str, Strategy] = field(default_factory=dict)


REGISTRY: dict[str, Primitive] = {}


def full_name(op: str) -> str:
    """`linear` -> `aten.linear.default`, `max.dim` -> `aten.max.dim`; full names and Python's operators stay."""
    if op.startswith(("operator.", "torch.", "math.")) or op.count(".") == 2:
        return op
    return f"aten.{op}" if "." in op else f"aten.{op}.default"


def always(*_: Any, **__: Any) -> bool:
    return True


def register(
    op: str, name: str, rule: Rule, *, family: str, when: When = always, note: str = "", derivative: bool = True, asked: bool = False
) -> None:
    """Add a strategy to an op. Raises: ValueError for a second one of the same name, naming both files."""
    op, file = full_name(op), rule.__code__.co_filename
    primitive = REGISTRY.setdefault(op, Primitive(op, family, file))
    if name in primitive.strategies:
        other = primitive.strategies[name].rule.__code__.co_filename
        raise ValueError(f"{op}: strategy {name!r} is registered twice, in {other} and in {file}")
    primitive.strategies[name] = Strategy(name, rule, when, note or (rule.__doc__ or "").strip().split("\n")[0], derivative, asked)


def strategy(
    ops: str | Iterable[str], name: str, *, family: str, when: When = always, derivative: bool = True, asked: bool = False
) -> Callable[[Rule], Rule]:
    """Register the decorated rule as a strategy of these ops (a space-separated string or a list)."""

    def add(rule: Rule) -> Rule:
        for op in ops.split() if isinstance(ops, str) else ops:
            register(op, name, rule, family=family, when=when, derivative=derivative, asked=asked)
        return rule

    return add


def strategy_names() -> set[str]:
    """Every name that `--strategy` understands."""
    return {*WHOLE, "sequential"} | {s for p in REGISTRY.values() for s in p.strategies}


def families() -> Iterator[tuple[str, list[Primitive]]]:
    """Primitives by family, both in the order of their names."""
    by: dict[str, list[Primitive]] = {}
    for primitive in REGISTRY.values():
        by.setdefault(primitive.family, []).append(primitive)
    for name in sorted(by):
        yield name, sorted(by[name], key=lambda p: p.op)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user asked for: a strategy of whole regions (`auto`, `wide`, `loop`) and preferred strategies of ops, in order. plain: no packed convolutions by rules of thumb."""

    whole: str = "auto"
    preferred: tuple[str, ...] = ()
    plain: bool = False

    @classmethod
    def parse(cls, asked: str | Iterable[str]) -> Choice:
        """From `--strategy` as typed. Raises: UsageError naming the known ones."""
        names = [asked] if isinstance(asked, str) else list(asked)
        known = strategy_names()
        unknown = [n for n in names if n not in known]
        if unknown:
            raise UsageError(
                f"unknown strategy {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))} (`widepack primitives` says what each does)"
            )
        whole = [n for n in names if n in WHOLE]
        if len(set(whole)) > 1:
            raise UsageError(f"strategies {' and '.join(map(repr, whole))} exclude each other: give one of {', '.join(WHOLE)}")
        return cls(whole[0] if whole else "auto", tuple(n for n in names if n not in WHOLE))
