"""Compiles variants of a program until they cover its sizes, and checks each against the flat graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LoweringError, WidepackError
from .flat import Flat
from .index_flags import is_flagged
from .task import Sizes, Task, sizes_to_try, words
from .variants import Checked, Variant

if TYPE_CHECKING:
    from .tracing import TracedGraph

VARIANTS = 2
"""The most variants of a program."""


@dataclass(frozen=True)
class Compiled:
    """A variant that gave the answers of the flat graph.

    example: the sizes that it was compiled at.
    """

    variant: Variant
    example: Sizes


def covering(task: Task, flat: Flat, compile_at: Callable[[int, Sizes], Variant]) -> list[Compiled]:
    """Compiles variants until all trial sizes are covered.

    Args:
        task: The program.
        flat: Its flat form.
        compile_at: Compiles the variant with a number, at sizes.

    Returns:
        The variants, in the order in which they are tried.

    Raises:
        LoweringError: A variant gives other answers than the flat graph. Also what `compile_at` raises.
    """
    tried, made = list(sizes_to_try(task)), list[Compiled]()
    for number in range(VARIANTS):
        open_ = (
            s for s in tried if min(s.values(), default=2) >= 2 and not any(c.variant.holds(s) for c in made)
        )
        example = dict(task.example) if number == 0 else next(open_, None)
        if example is None or any(c.variant.fixed for c in made):
            break
        if task.progress:
            task.progress(f"compiling {task.title}{f', again for {words(example)}' if number else ''}", 0, 1)
        variant = compile_at(number, example)
        made.append(Compiled(replace(variant, least=_agree(task, flat, variant, tried)), example))
    return made


def traced_for(
    task: Task, flat: Flat, example: Sizes, compile_: Callable[[TracedGraph], Any]
) -> tuple[Any, TracedGraph]:
    """Compiles a program for all sizes, or for the example's sizes of all dims but one if that fails.

    Inductor's arithmetic over two symbols of image sizes fails for some networks. The dim that stays open is
    the first, which most programs have as their batch.

    Returns:
        What `compile_` returned, and what it was given.

    Raises:
        Exception: What the compiler raised for all sizes.
    """
    from .tracing import traced  # imports torch's compiler, which a compiled program does not need

    try:
        made = traced(flat, example, task.dims, task.device)
        return compile_(made), made
    except WidepackError:
        raise
    except Exception:
        if len(task.dims) < 2:
            raise
        with contextlib.suppress(Exception):
            made = traced(flat, example, task.dims, task.device, list(task.dims)[1:])
            return compile_(made), made
        raise


def _agree(task: Task, flat: Flat, variant: Variant, tried: Sequence[Sizes]) -> dict[str, int]:
    """Checks a variant against the flat graph at all sizes at which it should be valid.

    Returns: the dims at which it is wrong at size 1, with the smallest valid size. Raises: LoweringError.
    """
    run = Checked(task.device, flat, [variant], task.eager, flagged=is_flagged(flat.program))
    least: dict[str, int] = {}
    for sizes in tried:
        if not variant.holds(sizes):
            continue
        try:
            inputs = task.inputs(sizes)
            with torch.inference_mode():
                want = task.eager(*inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # members do not accept inputs of these sizes
        with torch.inference_mode():
            wrong = task.differ(run(*inputs), want)
        ones = [d for d, s in sizes.items() if s == 1 and task.example[d] != 1]
        if wrong and ones:
            least.update(dict.fromkeys(ones, 2))
        elif wrong:
            raise LoweringError(
                f"{task.title}: the compiled program differs from the flat graph at "
                f"{words(sizes) or 'its sizes'}: {wrong}. It is not used; load with backend='eager'"
            )
    return least
