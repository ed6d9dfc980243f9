"""Registers strategies for ops of other libraries: `widepack.primitives.register`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..ir import ops
from .registry import WHOLE, Rule, When, always, strategies_of
from .registry import register as add
from .samples import SAMPLES, Draw, Make, samples

_TAKEN = (*WHOLE, "sequential")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")  # --strategy and tables need such names


def register(
    op: Any,
    name: str,
    *,
    samples_of: Make | None = None,
    when: When = always,
    family: str = "",
    derivative: bool = True,
) -> Callable[[Rule], Rule]:
    """Returns a decorator that makes a function a strategy of an op, and allows the op in this process.

    The function takes a writer `w`, then the op's arguments in the order of its schema: literals, `Shared`
    and `Stacked` values. It returns a `Stacked` value, or a tuple of them for several results, that it
    computes with `w.call("relu", value)`. Arguments that no strategy applies to run once for each member.

    Args:
        op: The op: `"mylib::op"`, `"mylib::op.overload"`, or the object that `torch.library.custom_op`
            returns. It must be functional and have a fake kernel (`register_fake`).
        name: The name of the strategy, which users pass as `strategy=` or `--strategy`.
        samples_of: A function that takes a `Draw` and returns calls of the op, made with `call(...)`.
            `widepack_bench.selftest.check_primitives` runs the strategies with them. Give it once for each
            op. Default: no samples.
        when: A function with the arguments of the strategy. It returns whether the strategy applies, and may
            read only kinds, sizes, dtypes and `w.device`. Default: always.
        family: The heading in `widepack primitives`. Default: the name of the library.
        derivative: Whether gradients flow through the nodes that the strategy writes. Default: True.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UsageError: `op` is not an op, or it writes into its inputs; `name` is not allowed, or the op has a
            strategy of this name; the op has samples already, or `samples_of` returns no calls.

    Example:
        >>> @torch.library.custom_op("mylib::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @twice.register_fake
        ... def _(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.empty_like(x)
        >>> @register(twice, "stacked", samples_of=lambda draw: [call(draw.normal(5, 3))])
        ... def stacked(w, x):
        ...     return Stacked(w.call(w.op, x.value))
    """
    if not isinstance(name, str) or not _NAME.match(name) or name in _TAKEN:
        raise UsageError(
            f"{name!r} cannot be a strategy's name. Use letters, digits and _. "
            f"These names have another meaning: {', '.join(_TAKEN)}."
        )
    (full,) = ops.allow([op])
    if name in strategies_of(full):
        file = strategies_of(full)[name].rule.__code__.co_filename
        raise UsageError(f"{full} has a strategy {name!r} already, in {file}. Choose another name.")
    if samples_of is not None and full in SAMPLES:
        file = SAMPLES[full].__code__.co_filename
        raise UsageError(
            f"{full} has samples already, in {file}. Give samples_of only with the op's first strategy."
        )
    if samples_of is not None and not samples_of(Draw(0)):
        raise UsageError(f"samples_of of {full} returned no calls. Return at least one call(...).")

    def put(rule: Rule) -> Rule:
        add(full, name, rule, family=family or full.partition(".")[0], when=when, derivative=derivative)
        if samples_of is not None:
            samples(full)(samples_of)
        return rule

    return put
