"""A member that cannot be exported, run as it is: whether it takes the example at all, and at which other sizes it would.

The sizes of an example made from input specs are nobody's choice; a member that adds a table of 8 positions fails at 16. It is run at other sizes of one dim
at a time, then of all dims but the batch together, and what it takes is said: one size, multiples of a number, or a range.
"""

from __future__ import annotations

import itertools
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .guards import Leaf, factor_of
from ..spec.entries import FORWARD, method_of
from .explain import first_line, user_frame, way_out

_SECONDS = 10.0  # for all runs together: a large member is tried at fewer sizes
_SMALL = 32
_COMMON = (48, 49, 50, 64, 96, 100, 128, 192, 196, 197, 224, 256, 384, 512, 577, 1024)


@dataclass(frozen=True)
class Trial:
    """A member that is run at sizes of its dims. args, kwargs: the example; leaves: its tensors in order; sizes: {letter: size in the example}."""

    module: nn.Module
    entry: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Leaf]
    sizes: Mapping[str, int]

    def failure(self, sizes: Mapping[str, int]) -> Exception | None:
        """What the member raises at these sizes."""
        it = iter(self.leaves)

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = value.detach()
            for axis, text in next(it).axes.items():
                factor, letter = factor_of(text)
                made = made.index_select(axis, torch.arange(factor * sizes[letter]) % made.shape[axis])  # the example's own values, again and again
            return made.clone()

        args, kwargs = pytree.tree_map(resized, (self.args, dict(self.kwargs)))
        call = self.module if self.entry == FORWARD else method_of(self.module, self.entry)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                call(*args, **kwargs)
        except Exception as e:  # noqa: BLE001  # whatever the user's code raises
            return e
        return None

    def taken(self, together: Sequence[str], tried: Sequence[int], until: float) -> list[int]:
        """Those of the tried sizes that the member takes, where these dims all have it and the others are the example's."""
        return [n for n in tried if time.monotonic() < until and self.failure({**self.sizes, **dict.fromkeys(together, n)}) is None]


def why_not(trial: Trial) -> str:
    """Why the member does not take the example, in one paragraph that says which sizes it takes; empty where it takes it."""
    error = trial.failure(trial.sizes)
    if error is None:
        return ""
    name = type(trial.module).__name__
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    line = f" at {frame}" if frame else ""
    said = f"{type(error).__name__}: {first_line(str(error))}".rstrip(":. ")
    given = ", ".join(f"{d} = {n}" for d, n in trial.sizes.items())
    until = time.monotonic() + _SECONDS
    tried = sorted({*range(2, _SMALL + 1), *_COMMON, *_asked(str(error), trial)})
    others = list(trial.sizes)[1:]
    groups = [[letter] for letter in trial.sizes] + ([others] if len(others) > 1 else [])
    if pair := _one_letter(trial, until):
        kept, other = pair
        places = [f"{leaf.name} at axis {axis} ({text})" for leaf, axis, text in _places(trial, pair)]
        return (
            f"{name} takes {kept} and {other} where they are equal only{line}: {' and '.join(places)}; it fails at the example's {given}: {said}. "
            f"Equal letters are equal sizes: write {_types(trial, [other], lambda text: kept if factor_of(text)[0] == 1 else f'{factor_of(text)[0]}*{kept}')}"
        )
    found = next(((group, taken) for group in groups if (taken := trial.taken(group, tried, until))), None)
    if found is None:
        sizes = "; where its sizes are wrong, give a sample, a number for a letter, or bounds such as T=2..8" if given else ""
        return f"{name} does not take the example{f', {given},' if given else ''} by itself either, without widepack{line}: {said}. Describe inputs that it takes{sizes}"
    group, taken = found
    own = ", ".join(f"{d} = {trial.sizes[d]}" for d in group)
    step = math.gcd(*taken)
    if len(taken) == 1:
        (size,) = taken
        places = [f"{leaf.name} has {_whole(text, size)} at axis {axis} ({text})" for leaf, axis, text in _places(trial, group)]
        by = f", fixed by {frame}" if frame else ""
        return (
            f"{name} fixes a size that the inputs name as a dynamic dim: {' and '.join(places)}{by}; it fails at the example's {own}: {said}. "
            f"Write {_types(trial, group, lambda text: str(_whole(text, size)))}, or change the member's code{way_out(frame)}"
        )
    if step > 1 and len(taken) > 2:
        return (
            f"{name} takes {' and '.join(group)} in multiples of {step} only{line}; it fails at the example's {own}: {said}. "
            f"Write {_types(trial, group, lambda text: _times(text, step))}"
        )
    some = ", ".join(map(str, taken[:6])) + (f", ... {taken[-1]}" if len(taken) > 6 else "")
    bounds = ", ".join(f"{d}={taken[0]}..{taken[-1]}" for d in group)
    return (
        f"{name} does not take the example's {own} by itself either, without widepack{line}: {said}. Of the sizes that were tried it takes "
        f"{' = '.join(group)} = {some}: give a sample, or bounds such as {bounds}"
    )


def _one_letter(trial: Trial, until: float) -> tuple[str, str] | None:
    """Two dims that the member takes at equal sizes, whatever these are, and at no others."""
    for kept, other in itertools.combinations(trial.sizes, 2):
        own = trial.sizes[kept]
        equal = trial.taken([kept, other], sorted({own, own + 2, 2 * own, 3 * own}), until)
        if len(equal) > 2 and all(trial.failure({**trial.sizes, kept: a, other: b}) is not None for a, b in itertools.permutations(equal[:3], 2)):
            return kept, other
    return None


def _asked(text: str, trial: Trial) -> set[int]:
    """Sizes that a failure speaks of: its numbers, and their shares where a dim stands for a multiple or the others are multiplied into one."""
    numbers = {int(n) for n in re.findall(r"(?<![\w.])\d{1,6}(?![\w.])", text)}
    factors = {factor_of(text)[0] for leaf in trial.leaves for text in leaf.axes.values()} | {s for leaf in trial.leaves for s in leaf.example.shape}
    parts = {n // f for n in numbers for f in factors if f and n % f == 0}
    return {n for n in numbers | parts | {math.isqrt(n) for n in numbers} if 2 <= n <= 4096}


def _places(trial: Trial, group: Sequence[str]) -> list[tuple[Leaf, int, str]]:
    return [(leaf, axis, text) for leaf in trial.leaves for axis, text in leaf.axes.items() if factor_of(text)[1] in group]


def _whole(text: str, size: int) -> int:
    return factor_of(text)[0] * size


def _times(text: str, step: int) -> str:
    factor, letter = factor_of(text)
    return f"{factor * step}*{letter}"


def _types(trial: Trial, group: Sequence[str], put: Callable[[str], str]) -> str:
    """The inputs that have these dims, each as a spec with something else in the dims' place."""
    specs: dict[str, str] = {}
    for leaf, axis, text in _places(trial, group):
        head, _, tail = specs.get(leaf.name, leaf.type).partition("[")
        dims = tail.rstrip("]").split(",")
        dims[axis] = put(text)
        specs[leaf.name] = f"{head}[{','.join(dims)}]"
    return " and ".join(f"{name}={spec}" for name, spec in specs.items())
