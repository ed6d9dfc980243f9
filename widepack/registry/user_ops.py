"""Strategies for ops of others: `widepack.primitives.register`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..ir import ops
from ..errors import UsageError
from .registry import REGISTRY, WHOLE, Rule, When, always
from .registry import register as add
from .samples import SAMPLES, Draw, Make, samples

_TAKEN = (*WHOLE, "sequential")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")  # as --strategy and tables take it


def register(
    op: Any, name: str, *, samples_of: Make | None = None, when: When = always, family: str = "", derivative: bool = True
) -> Callable[[Rule], Rule]:
    """Make the decorated function a strategy of an op, and let this process's members have that op.

    op: `mylib::op`, `mylib::op.overload`, or the op itself, as torch.library.custom_op gives it; functional, with a fake kernel. name: what a person types for
    `strategy=`. samples_of: takes a `Draw` and gives calls of the op (`call(...)`), which `widepack_bench.selftest.check_primitives` reads in this process (no command of widepack imports your library); once an op. when: takes what the strategy takes, and
    says from kinds, sizes, dtypes and `w.device` whether it applies. family: the heading in `widepack primitives`; default the library's name. derivative: whether
    gradients flow through what it writes.

    The strategy takes a writer `w`, then the op's arguments in their order: literals, `Shared` and `Stacked`. It gives a `Stacked` (a tuple of them for several results), written
    with `w.call("relu", value)`. What no strategy takes runs once a member.

    Returns: the function. Raises: UsageError for what is no op, writes into what it is given, or has a strategy of this name, and for names that are none.
    """
    if not isinstance(name, str) or not _NAME.match(name) or name in _TAKEN:
        raise UsageError(
            f"{name!r} cannot be a strategy's name: letters, digits and _, and none of {', '.join(_TAKEN)}, which mean something already"
        )
    (full,) = ops.allow([op])
    if full in REGISTRY and name in REGISTRY[full].strategies:
        raise UsageError(f"{full} has a strategy {name!r} already, in {REGISTRY[full].strategies[name].rule.__code__.co_filename}")
    if samples_of is not None and full in SAMPLES:
        raise UsageError(f"{full} has samples already, in {SAMPLES[full].__code__.co_filename}; give them once, with its first strategy")
    if samples_of is not None and not samples_of(Draw(0)):
        raise UsageError(f"the samples of {full} are none; give at least one call(...)")

    def put(rule: Rule) -> Rule:
        add(full, name, rule, family=family or full.partition(".")[0], when=when, derivative=derivative)
        if samples_of is not None:
            samples(full)(samples_of)
        return rule

    return put
