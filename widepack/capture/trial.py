"""Runs a member that cannot be exported as it is: whether it takes the example, and at which other sizes it
would.

The sizes of an example that widepack makes from input specs are arbitrary: a member that adds a table of 8
positions fails at 16. The member is run at other sizes of one dim at a time, then of all dims but the batch
together. The message says what it takes: one size, multiples of a number, or a range.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.guards import InputLeaf, factor_of
from ..ir.tensor_type import TensorType, parse_slot
from ..spec.entries import callable_of, method_of
from ..spec.input_spec import DimExpr
from .derivatives import weights_fixed
from .explain import control_flow, first_line, user_frame, way_out

_SECONDS = 5.0  # for all runs together: a slow member is run at fewer sizes
_NOT_A_TENSOR = re.compile(r"argument .* must be (bool|int|float), not Tensor")
_SMALL = 32  # all sizes up to this one are tried
_COMMON = (48, 49, 50, 64, 96, 100, 128, 192, 196, 197, 224, 256, 384, 512, 577, 1024)


@dataclass(frozen=True)
class Trial:
    """A member that can be run at any sizes of its dims.

    args, kwargs: the example. leaves: its tensors, in order. sizes: letter -> size in the example.
    """

    module: nn.Module
    entry: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[InputLeaf]
    sizes: Mapping[str, int]

    def failure(self, sizes: Mapping[str, int], longer: Mapping[int, int] | None = None) -> Exception | None:
        """Returns what the member raises at these sizes; None if it runs.

        longer: number of an input -> size of one more axis, which it gets at its end.
        """
        it = iter(enumerate(self.leaves))

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensor = value.detach()
            number, leaf = next(it)
            for axis, text in leaf.axes.items():
                factor, letter = factor_of(text)
                # the example's own values, repeated: others could be outside of what the member takes
                rows = torch.arange(factor * sizes[letter]) % tensor.shape[axis]
                tensor = tensor.index_select(axis, rows)
            if longer and number in longer:
                tensor = tensor.unsqueeze(-1).expand(*tensor.shape, longer[number])
            return tensor.clone()

        args, kwargs = pytree.tree_map(resized, (self.args, dict(self.kwargs)))
        call = callable_of(self.module, self.entry)
        try:
            with warnings.catch_warnings(), weights_fixed(self.module):
                warnings.simplefilter("ignore")
                call(*args, **kwargs)
        except Exception as e:  # noqa: BLE001  # whatever the user's code raises
            return e
        return None

    def runs_by_name(self) -> bool:
        """Returns whether the member runs on the example if all inputs are given by name."""
        names = list(inspect.signature(method_of(self.module, self.entry)).parameters)
        named = dict(zip(names, self.args))
        by_name = replace(self, args=(), kwargs={**named, **self.kwargs})
        return bool(named) and by_name.failure(self.sizes) is None

    def accepted(self, together: Sequence[str], candidates: Sequence[int], until: float) -> list[int]:
        """Returns the candidate sizes at which the member runs.

        The dims in `together` all get the candidate; the others keep the example's size.
        """
        return [
            n
            for n in candidates
            if time.monotonic() < until and self.failure({**self.sizes, **dict.fromkeys(together, n)}) is None
        ]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How a member fails at the example. line: the user's line. reason: the error, in one line."""

    name: str
    line: str
    reason: str

    @property
    def at(self) -> str:
        return f" at {self.line}" if self.line else ""


def why_not(trial: Trial) -> str:
    """Explains in one paragraph why the member does not take the example, and which sizes it takes.

    Returns an empty text if the member takes the example.
    """
    error = trial.failure(trial.sizes)
    if error is None:
        return ""
    line = user_frame(traceback.extract_tb(error.__traceback__))
    if words := control_flow(error, trial.module, f" at {line}" if line else ""):
        return words
    failure = _Failure(
        name=type(trial.module).__name__,
        line=line,
        reason=f"{type(error).__name__}: {first_line(str(error))}".rstrip(":. "),
    )
    until = time.monotonic() + _SECONDS
    if pair := _equal_pair(trial, until):
        return _takes_equal(trial, failure, *pair)
    candidates = sorted({*range(2, _SMALL + 1), *_COMMON, *_sizes_in(str(error), trial)})
    others = list(trial.sizes)[1:]
    groups = [[letter] for letter in trial.sizes] + ([others] if len(others) > 1 else [])
    for group in groups:
        if sizes := trial.accepted(group, candidates, until):
            return _takes_sizes(trial, failure, group, sizes)
    if longer := _longer(trial, candidates, until):
        return (
            f"{failure.name} does not take the example{failure.at}: {failure.reason}. It takes {longer}: "
            "write that if a row has so many numbers"
        )
    return _takes_nothing(trial, failure)


def _takes_equal(trial: Trial, failure: _Failure, kept: str, other: str) -> str:
    """The message for a member that takes two dims at equal sizes only."""
    places = [f"{leaf.name} at axis {axis} ({text})" for leaf, axis, text in _places(trial, [kept, other])]
    example = ", ".join(f"{d} = {n}" for d, n in trial.sizes.items())

    return (
        f"{failure.name} takes {kept} and {other} where they are equal only{failure.at}: "
        f"{' and '.join(places)}; it fails at the example's {example}: {failure.reason}. Equal letters are "
        f"equal sizes: write {_types(trial, [other], lambda text: str(DimExpr(kept, factor_of(text)[0])))}"
    )


def _takes_nothing(trial: Trial, failure: _Failure) -> str:
    """The message for a member that fails at all sizes that were tried."""
    example = ", ".join(f"{d} = {n}" for d, n in trial.sizes.items())
    sizes = "; where its sizes are wrong, give a sample, a number for a letter, or bounds such as T=2..8"
    way = f"Describe inputs that it takes{sizes if example else ''}{_values(trial)}"
    if trial.runs_by_name():
        way = "It runs if its inputs are given by name, but an artifact calls it by position: see its hooks"
    if wanted := _NOT_A_TENSOR.search(failure.reason):
        way = f"torch takes no tensor there: write {wanted[1]}(...) around it, if it is the member's own"
    return (
        f"{failure.name} fails on the example{f' ({example})' if example else ''}, also without "
        f"widepack{failure.at}: {failure.reason}. {way}"
    )


def _values(trial: Trial) -> str:
    """Returns advice on the values of integers: 0 and 1 where the spec of an input has no bounds."""
    found = [
        leaf
        for leaf in trial.leaves
        if leaf.example.dtype in (torch.int32, torch.int64)
        and ((leaf.example == 0) | (leaf.example == 1)).all()
    ]
    if not found:
        return ""
    names = ", ".join(leaf.name for leaf in found)
    bounds = f"{found[-1].name}={found[-1].type}:1..8"
    return f"; where the values 0 and 1 of {names} are wrong, give bounds such as {bounds}"


def _takes_sizes(trial: Trial, failure: _Failure, group: Sequence[str], sizes: Sequence[int]) -> str:
    """The message for a member that takes other sizes of these dims: one size, multiples, or some."""
    name, at, reason = failure.name, failure.at, failure.reason
    example = ", ".join(f"{d} = {trial.sizes[d]}" for d in group)
    step = math.gcd(*sizes)
    if len(sizes) == 1:
        (size,) = sizes
        places = [
            f"{leaf.name} has {_whole(text, size)} at axis {axis} ({text})"
            for leaf, axis, text in _places(trial, group)
        ]
        by = f", fixed by {failure.line}" if failure.line else ""
        if longer := _longer(trial, [size], time.monotonic() + _SECONDS / 2):
            return (
                f"{name} does not take the example's {example}{at}: {reason}. It takes {longer} at any "
                f"{next(iter(trial.sizes))}: write that if a row has {size} numbers. Write "
                f"{_types(trial, group, lambda text: str(_whole(text, size)))} if the size is fixed"
            )
        return (
            f"{name} fixes a size that the inputs name as a dynamic dim: {' and '.join(places)}{by}; it "
            f"fails at the example's {example}: {reason}. Write "
            f"{_types(trial, group, lambda text: str(_whole(text, size)))}, or change the member's "
            f"code{way_out(failure.line)}"
        )
    if step > 1 and len(sizes) > 2:
        return (
            f"{name} takes {' and '.join(group)} in multiples of {step} only{at}; it fails at the example's "
            f"{example}: {reason}. Write "
            f"{_types(trial, group, lambda text: f'{_whole(text, step)}*{factor_of(text)[1]}')}"
        )
    listed = ", ".join(map(str, sizes[:6])) + (f", ... {sizes[-1]}" if len(sizes) > 6 else "")
    bounds = ", ".join(f"{d}={sizes[0]}..{sizes[-1]}" for d in group)
    return (
        f"{name} fails on the example's {example}, also without widepack{at}: {reason}. Of "
        f"the sizes that were tried it takes {' = '.join(group)} = {listed}: give a sample, or bounds such "
        f"as {bounds}"
    )


def _longer(trial: Trial, sizes: Sequence[int], until: float) -> str:
    """Returns the spec of an input with one more axis at its end, if the member takes that; else "".

    A spec that leaves out the numbers of a row, such as `x=float32[B]` for `[B, 8]`, looks like a size that
    the member fixes.
    """
    for number, leaf in enumerate(trial.leaves):
        type_ = parse_slot(leaf.type)
        if not leaf.axes or max(leaf.axes) != len(type_.sizes) - 1:
            continue  # its last axis has a number already
        for size in sizes:
            calls = [{d: n + more for d, n in trial.sizes.items()} for more in (0, 1)]
            if time.monotonic() < until and all(trial.failure(c, {number: size}) is None for c in calls):
                return f"{leaf.name}={type_.with_sizes([*type_.sizes, str(size)])}"
    return ""


def _equal_pair(trial: Trial, until: float) -> tuple[str, str] | None:
    """Returns two dims that the member takes at any equal sizes, and at no others; None if there are none."""
    for kept, other in itertools.combinations(trial.sizes, 2):
        n = trial.sizes[kept]
        equal = trial.accepted([kept, other], sorted({n, n + 2, 2 * n, 3 * n}), until)
        if len(equal) > 2 and all(
            trial.failure({**trial.sizes, kept: a, other: b}) is not None
            for a, b in itertools.permutations(equal[:3], 2)
        ):
            return kept, other
    return None


def _sizes_in(text: str, trial: Trial) -> set[int]:
    """Returns the sizes that an error message suggests.

    These are its numbers and their square roots, and each number divided by a factor of a dim or by a size of
    the example, because the number may be a product.
    """
    text = re.sub(r"(?<=\d)x(?=\d)", " ", text)  # torch writes the shape of a matrix as 1x4
    numbers = {int(n) for n in re.findall(r"(?<![\w.])\d{1,6}(?![\w.])", text)}
    factors = {factor_of(text)[0] for leaf in trial.leaves for text in leaf.axes.values()} | {
        s for leaf in trial.leaves for s in leaf.example.shape
    }
    parts = {n // f for n in numbers for f in factors if f and n % f == 0}
    return {n for n in numbers | parts | {math.isqrt(n) for n in numbers} if 2 <= n <= 4096}


def _places(trial: Trial, group: Sequence[str]) -> list[tuple[InputLeaf, int, str]]:
    return [
        (leaf, axis, text)
        for leaf in trial.leaves
        for axis, text in leaf.axes.items()
        if factor_of(text)[1] in group
    ]


def _whole(text: str, size: int) -> int:
    return factor_of(text)[0] * size


def _types(trial: Trial, group: Sequence[str], put: Callable[[str], str]) -> str:
    """Returns the inputs that have these dims, each as a spec in which `put` replaces the dims."""
    specs: dict[str, TensorType] = {}
    for leaf, axis, text in _places(trial, group):
        type_ = specs.get(leaf.name) or parse_slot(leaf.type)
        sizes = list(type_.sizes)
        sizes[axis] = put(text)
        specs[leaf.name] = type_.with_sizes(sizes)
    return " and ".join(f"{name}={spec}" for name, spec in specs.items())


_RUNS, _MOST_RUNS = 12, 64  # more runs than the first if a selection was never empty
_RTOL, _ATOL = 1e-3, 1e-5  # a wrong branch changes whole rows


class _Selections(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which selections were empty. empty: (line, how many selections came before it there)."""

    def __init__(self, lines: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines = lines
        self.seen: dict[str, int] = defaultdict(int)
        self.empty: set[tuple[str, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.dynamic_output_shape in func.tags:
            line = user_frame(traceback.extract_stack()[:-1])
            if line in self.lines:
                if any(t.numel() == 0 for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
                    self.empty.add((line, self.seen[line]))
                self.seen[line] += 1
        return result


def same_without_rows(
    member: Callable[..., Any], program: Callable[..., Any], lines: set[str], inputs: Any
) -> bool:
    """Whether a program gives the member's answers also where a selection has no rows.

    False too if a selection was never empty.

    Args:
        member, program: The two to call.
        lines: The user's lines that select rows.
        inputs: (args, kwargs) of the example.
    """
    places: set[tuple[str, int]] = set()
    empty: set[tuple[str, int]] = set()
    for run in range(_MOST_RUNS):
        if run >= _RUNS and places <= empty:
            break
        args, kwargs = pytree.tree_map(lambda x, run=run: _changed(x, run), inputs)
        selections = _Selections(lines)
        try:
            with selections:
                expected = member(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the member need not take every changed input
            continue
        args, kwargs = pytree.tree_map(lambda x, run=run: _changed(x, run), inputs)
        try:
            for mine, own in zip(
                pytree.tree_leaves(program(*args, **kwargs)), pytree.tree_leaves(expected), strict=True
            ):
                torch.testing.assert_close(mine, own, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        except Exception:  # noqa: BLE001  # another answer, or an error where the member has none
            return False
        places |= {(line, k) for line, count in selections.seen.items() for k in range(count)}
        empty |= selections.empty
    return {line for line, _ in places} == lines and places <= empty


def _changed(value: Any, run: int) -> Any:
    """Returns an input for the run of this number: integers and booleans become equal to one of them, and
    numbers are moved, reflected, or set to one of them or all rows to the same multiples of some of them.
    """
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    if value.is_floating_point() or value.is_complex():
        if not value.ndim:
            return value.clone()
        turn, kind = divmod(run, 4)
        size = value.shape[1:] if turn else ()  # all rows are one row, or one number
        places = torch.randint(value.numel(), size, generator=torch.Generator().manual_seed(turn))
        same = value.flatten()[places] * (-1) ** turn * (1 + turn // 2)
        return (value.clone(), -value, same.expand_as(value).clone(), value.roll(1, 0))[kind]
    if run == 0:
        return value.clone()
    distinct: Tensor = value.unique()  # type: ignore[no-untyped-call]
    return torch.full_like(value, distinct[run % len(distinct)].item())
