"""Measures errors of answers against float64, and defines the bound that decides whether a wide answer is
right.

The bound of an output is computed from the members' own error: their answers in their own dtype against
float64. The own errors are pooled over all members and calls. For members in float64, the own error is that
of float32, scaled by the ratio of the two dtypes' eps.

| error of a wide answer | bound | taken over |
|---|---|---|
| rms error | 2x the members' own rms error + 1 ulp | all calls of one member |
| largest error | 4x the members' own largest error + 4 ulp | each call |

The bound of a member's rms error uses the member's own rms error over the same calls if that is larger than
the pooled one. An ulp is the eps of the dtype, scaled by the output's rms in float64, pooled over members and
calls.

NaN, inf and the largest number of the dtype (which replaces inf after `nan_to_num`) must be at the same
positions as in the member's own answer. They do not count in an rms. Integers and booleans must be equal.

Answers that are zero but for rounding (the batch mean of numbers that a norm has centered) have no size of
their own. Their scale is that of the terms whose sum they are (`rounding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import VerificationError
from ..spec.dtypes import at_limit
from .record import OutputBounds


@dataclass
class RootMeanSquare:
    """The root mean square of numbers of any size that are added in several parts.

    The square of a float64 number over 1e154 is inf, and that of a number below 1e-162 is 0. So the numbers
    are divided by the largest of them before they are squared.

    Attributes:
        largest: The largest absolute value so far, by which the numbers are divided before they are squared.
        squares: The sum of the squares of the divided numbers.
        count: How many numbers were added.
    """

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        """The root mean square; 0 without numbers."""
        return self.largest * math.sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, numbers: torch.Tensor) -> None:
        """Adds the numbers of a tensor. Numbers in float32 or a coarser dtype are raised to float64."""
        if numbers.numel():
            sizes = numbers.abs().double()
            largest = float(sizes.max())
            divided = sizes / largest if 0 < largest < math.inf else (sizes > 0).double()  # inf / inf is NaN
            self._add(largest, float(divided.square_().sum()), numbers.numel())

    def add_value(self, value: float, count: int) -> None:
        """Adds `count` numbers whose root mean square is `value`."""
        if count:
            self._add(value, float(count), count)

    def raise_to(self, value: float) -> None:
        """Raises the root mean square to at least this one. The count stays."""
        if self.count and self.value < value:
            self.largest, self.squares = value, float(self.count)

    def _add(self, size: float, squares: float, count: int) -> None:
        self.count += count
        if size > self.largest:
            self.largest, self.squares, size, squares = size, squares, self.largest, self.squares
        if size:
            self.squares += squares * (size / self.largest) ** 2 if self.largest < math.inf else 0.0


def few_count(values: torch.Tensor) -> bool:
    """Returns whether the sum of squares of many numbers is mostly that of one to three of them.

    Their count is (sum of squares)^2 / (sum of fourth powers), and less than 4. The rms error of such answers
    is that of one or two numbers.
    """
    if not floating(values):
        return False
    sizes = values.abs().double().reshape(-1)
    sizes = sizes[torch.isfinite(sizes)]
    if sizes.numel() <= 16 or not bool(sizes.any()):
        return False
    squares = (sizes / sizes.max()) ** 2
    return float(squares.sum()) ** 2 < 4 * float((squares**2).sum())


def root_mean_square(numbers: torch.Tensor) -> float:
    """Returns the root mean square of the numbers of a tensor; 0 for an empty one."""
    found = RootMeanSquare()
    found.add(numbers)
    return found.value


PART = 1 << 18  # numbers that are compared at once

WITHOUT_FLOAT64 = 1e-5
"""The part of an output's rms that replaces the members' own error if no float64 reference exists."""

FLOAT64_EPS = torch.finfo(torch.float64).eps
ROUNDING = 100
"""The error of a sum that is rounding, in eps of its terms, at most."""


@dataclass
class ErrorStats:
    """Collects the errors of one output over members and calls, and finds the first answer out of bounds.

    Attributes:
        name: The name of the output.
        eps: The eps of the output's dtype; 0 before a floating answer was added.
        own: The members' own errors.
        own_max: The largest of the members' own errors.
        answers: The float64 answers.
        terms: The rms of the terms of answers that are zero but for rounding; else 0.
        assumed: Whether the members' own errors are a part of the scale, as no float64 reference exists.
        doubt: Why rounding alone may explain an answer out of bounds, as a sentence; else "".
        wide: The errors of the wide answers that were added.
    """

    name: str
    eps: float = 0.0
    own: RootMeanSquare = field(default_factory=RootMeanSquare)
    own_max: float = 0.0
    answers: RootMeanSquare = field(default_factory=RootMeanSquare)
    terms: float = 0.0
    assumed: bool = False
    doubt: str = ""
    wide: list[MeasuredError] = field(default_factory=list)

    @classmethod
    def from_bounds(cls, bounds: OutputBounds, eps: float) -> ErrorStats:
        """Returns the statistics that a manifest recorded for an output. eps: of the dtype it is computed in
        now.
        """
        stats = cls(bounds.output, eps, own_max=bounds.own_max)
        stats.own.add_value(bounds.own_rms, 1)
        stats.answers.add_value(bounds.scale, 1)
        return stats

    @property
    def scale(self) -> float:
        """The rms of the float64 answers, or of the terms of answers that are zero but for rounding."""
        return max(self.answers.value, self.terms)

    @property
    def count(self) -> int:
        """How many numbers were compared with float64."""
        return self.own.count

    @property
    def cancels(self) -> bool:
        """Whether the float64 answers are rounding of float64 for the size of their terms."""
        return 0 < self.answers.value <= ROUNDING * FLOAT64_EPS * self.terms

    @property
    def _recorded_scale(self) -> float:
        """The scale as a record stores it: small enough for the loader's check of the recorded answers.

        Answers that cancel are recorded as 0.
        """
        return self.scale if self.cancels else min(self.scale, max(1e3 * self.answers.value, self.own_rms))

    @property
    def own_rms(self) -> float:
        """The rms of the members' own errors."""
        return self.own.value

    def rms_bound(self, own: float = 0.0) -> float:
        """Returns the bound of a member's rms error.

        own: the member's own rms error over the same calls. One member may be worse conditioned than the
        others.
        """
        return 2 * max(self.own_rms, own) + self.eps * self.scale

    @property
    def max_bound(self) -> float:
        """The bound of the largest error of a call."""
        return 4 * self.own_max + 4 * self.eps * self.scale

    def bounds(self) -> OutputBounds:
        """Returns what the bounds are computed from, as a record stores it."""
        return OutputBounds(self.name, self.own_max, self.own_rms, self.scale)

    # ---------------------------------------------------------------- the members' own errors

    def add_own(self, own: torch.Tensor, truth: torch.Tensor) -> None:
        """Adds the error of one member's own answer. truth: its float64 answer."""
        if not floating(own):
            return
        self.eps = torch.finfo(own.dtype).eps
        for mine, exact in parts(own, truth):
            mine, exact = only(torch.isfinite(mine) & torch.isfinite(exact) & ~at_limit(mine), mine, exact)
            if exact.numel():
                error = (mine.to(exact.dtype) - exact).abs()
                self.own.add(error)
                self.own_max = max(self.own_max, float(error.max()))
                self.answers.add(exact)

    def restart(self) -> None:
        """Forgets the members' own errors and the scale, but not the wide answers."""
        self.own, self.answers = RootMeanSquare(), RootMeanSquare()
        self.own_max = self.terms = 0.0

    def raise_own(self, rms: float, largest: float) -> None:
        """Raises the members' own errors to at least these."""
        self.own.raise_to(rms)
        self.own_max = max(self.own_max, largest)

    def widen(self) -> None:
        """Sets the bound of an output without a float64 reference: the own error is at least 1e-5 of the
        scale.
        """
        self.assumed = True
        self.raise_own(WITHOUT_FLOAT64 * self.scale, WITHOUT_FLOAT64 * self.scale)

    def accept_float64(self, ulps: int) -> None:
        """Raises the own errors of an output in float64 to a number of ulp of its rms.

        No dtype is finer, so the size of float64's rounding error is known only roughly.
        """
        if self.eps == FLOAT64_EPS:
            error = ulps * self.eps * self.scale
            self.raise_own(error, error)

    def say_doubt(self, error: float) -> None:
        """Notes that rounding changes the members' own answers by this error, which is too large."""
        self.doubt = (
            f"Rounding alone changes the members' own answers by {error:.1e}, at a scale of "
            f"{self.scale:.1e}: too much to tell"
        )

    def doubt_rounding(self, error: float) -> None:
        """Notes that rounding may be why wide answers are out of bounds. error: the largest of the members'
        equal evaluations.
        """
        if (
            not any(w.words for w in self.wide)
            and max((w.largest for w in self.wide), default=0.0) <= 2 * error
        ):
            self.say_doubt(error)

    def without_wide(self) -> ErrorStats:
        """Returns a copy that has the members' own errors and no wide answer."""
        return self.with_wide(())

    def with_wide(self, rows: Iterable[MeasuredError]) -> ErrorStats:
        """Returns a copy that has the members' own errors and these errors of wide answers."""
        return replace(self, own=replace(self.own), answers=replace(self.answers), wide=list(rows))

    def take_own(self, other: ErrorStats) -> None:
        """Replaces the members' own errors and the scale by those of other statistics of the same output."""
        self.eps, self.own, self.own_max = other.eps, replace(other.own), other.own_max
        self.answers, self.terms, self.assumed = replace(other.answers), other.terms, other.assumed

    def unsteady(self, eps: float = 0.0) -> str:
        """Returns why the members' own answers are too far from float64 to compare anything with them, or "".

        State and random numbers make answers like that. eps: of the coarsest dtype that the output is
        computed through. A value that was rounded to bfloat16 is as far off in float32.
        """
        if self.own_rms > max(1e-3, 100 * max(self.eps, eps)) * self.scale:
            return (
                f"output {self.name or '0'}: the members' own answers are off by {self.own_rms:.1e} from"
                f" float64, at a scale of {self.scale:.1e}"
            )
        return ""

    # ---------------------------------------------------------------- the wide answers

    def add_wide(
        self,
        member: str,
        call: str,
        wide: torch.Tensor,
        own: torch.Tensor,
        truth: torch.Tensor,
        least_own: float = 0.0,
    ) -> None:
        """Adds the error of one member's wide answer. own, truth: the member's own answer, and its float64
        answer. least_own: the least rms error that counts as the member's own.
        """
        row = measure(member, call, wide, own, truth)
        self.wide.append(replace(row, own=max(row.own, least_own)))

    def wrong(self) -> str:
        """Returns a description of the first answer out of bounds, or "" if all are right.

        A member's rms error is pooled over its calls. The largest error is taken from each call.
        """
        return self.first_wrong()[1]

    def first_wrong(self) -> tuple[str, str]:
        """Returns the member whose answer is the first out of bounds, and what `wrong` returns."""
        for w in self.wide:
            if w.words:
                return w.member, f"output {self.name or '0'}, member {w.member}, {w.call}: {w.words}"
            if not w.largest <= self.max_bound:
                own_text = f"the members' own largest error in their own dtype is {self.own_max:.2e}"
                return w.member, (
                    f"output {self.name or '0'}, member {w.member}, {w.call}: largest error {w.largest:.2e} "
                    f"(bound {self.max_bound:.2e}); {self._assumed_text or own_text}"
                )
        for member, (rms, own) in self.pooled().items():
            if not rms <= self.rms_bound(own):
                own_text = f"the member's own is {own:.2e}, all members' {self.own_rms:.2e}"
                return member, (
                    f"output {self.name or '0'}, member {member}: rms error over all calls {rms:.2e} "
                    f"(bound {self.rms_bound(own):.2e}); {self._assumed_text or own_text}"
                )
        return "", ""

    @property
    def _assumed_text(self) -> str:
        """What a message says of the members' own errors if they were not measured, else ""."""
        reference = "errors are measured from the members' own answers, as float64 is no reference"
        return (
            f"{reference}, and {WITHOUT_FLOAT64:g} of their scale counts as their own" if self.assumed else ""
        )

    def pooled(self) -> dict[str, tuple[float, float]]:
        """Returns each member's rms error over all its calls: of the wide answers, and of its own answers."""
        sums: dict[str, tuple[RootMeanSquare, RootMeanSquare]] = {}
        for w in self.wide:
            wide, own = sums.setdefault(w.member, (RootMeanSquare(), RootMeanSquare()))
            wide.add_value(w.rms, w.count)
            own.add_value(w.own, w.count)
        return {m: (wide.value, own.value) for m, (wide, own) in sums.items()}

    def record(self) -> dict[str, Any]:
        """Returns the row of the manifest's record."""
        by_member: dict[str, list[MeasuredError]] = {}
        for w in self.wide:
            by_member.setdefault(w.member, []).append(w)
        pooled = self.pooled()
        return {
            "output": self.name,
            "scale": self._recorded_scale,
            "eps": self.eps,
            "own_rms": self.own_rms,
            "own_max": self.own_max,
            "samples": self.count,
            "members": {
                m: {"rms": pooled[m][0], "max": max(w.largest for w in ws)} for m, ws in by_member.items()
            },
        }


@dataclass(frozen=True)
class MeasuredError:
    """The error of one member's wide answer in one call, against float64.

    Attributes:
        member: The member's name.
        call: The call's label.
        rms: The rms error.
        largest: The largest error.
        words: What is wrong independent of any bound (a shape, a dtype, NaN), or "".
        count: How many numbers were compared.
        own: The rms error of the member's own answer over the same numbers.
    """

    member: str
    call: str
    rms: float
    largest: float
    words: str
    count: int = 0
    own: float = 0.0


def floating(t: torch.Tensor) -> bool:
    """Returns whether a tensor has a floating or complex dtype."""
    return t.is_floating_point() or t.is_complex()


def reference_of(own: torch.Tensor) -> torch.Tensor:
    """Returns a member's own answer as a reference: in float64 if it is floating."""
    return own.to(torch.complex128 if own.is_complex() else torch.float64) if floating(own) else own


def measure(
    member: str, call: str, wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor
) -> MeasuredError:
    """Compares a wide answer with the member's own (shape, dtype, NaN and inf) and with its float64 answer
    (error).
    """
    words = _mismatch(wide, own, truth)
    if words or not floating(own):
        return MeasuredError(member, call, 0.0, 0.0, words)
    errors, own_errors = RootMeanSquare(), RootMeanSquare()
    for found, mine, exact in parts(wide, own, truth):
        most = at_limit(mine)
        if bool(most.any()) and not bool(
            ((found[most] / mine[most] - 1).abs() <= torch.finfo(own.dtype).eps).all()
        ):
            words = f"another number where the member's own answer is the largest of {own.dtype}"
            return MeasuredError(member, call, 0.0, 0.0, words)
        found, mine, exact = only(torch.isfinite(mine) & torch.isfinite(exact) & ~most, found, mine, exact)
        if exact.numel():
            errors.add(found.to(exact.dtype) - exact)
            own_errors.add(mine.to(exact.dtype) - exact)
    return MeasuredError(member, call, errors.value, errors.largest, "", errors.count, own_errors.value)


def _mismatch(wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor) -> str:
    """Returns how a wide answer differs from the member's own in more than rounding, or ""."""
    if wide.shape != own.shape:
        return f"shape {list(wide.shape)}, the member's own {list(own.shape)}"
    if wide.dtype != own.dtype:
        return f"{wide.dtype}, the member's own {own.dtype}"
    if not floating(own):
        differ = int((wide != own).sum())
        return f"{differ} of {own.numel()} values differ from the member's own" if differ else ""
    if not same_places(wide, own):
        return "NaN or inf in other places than in the member's own answer"
    if own.shape != truth.shape:
        return f"shape {list(own.shape)}, in float64 {list(truth.shape)}: rounding decides a size"
    return ""


def parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields flat pieces of tensors of one shape, `PART` numbers at a time.

    Intermediate values of a piece stay in the CPU's cache. Those of whole outputs in float64 would be read
    from memory several times.
    """
    if any(t.shape != tensors[0].shape for t in tensors):
        raise VerificationError(
            f"answers of shapes {', '.join(str(list(t.shape)) for t in tensors)} cannot be compared: "
            "rounding decides a size, and float64 decides otherwise"
        )
    flat = [t.reshape(-1) for t in tensors]
    for at in range(0, flat[0].numel(), PART):
        yield tuple(t[at : at + PART] for t in flat)


def only(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the numbers of each tensor where `mask` is true."""
    return tensors if bool(mask.all()) else tuple(t[mask] for t in tensors)


def with_same_places(wide: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both answers with NaN wherever one of them is not finite.

    A kernel that multiplies NaN or inf by zeros of a padding, or that transforms tiles, spreads it to other
    places than another kernel does. Answers stay as they are if `wide` is finite, or if they cannot be
    compared.
    """
    if wide.shape != own.shape or not floating(own) or bool(torch.isfinite(wide).all()):
        return wide, own
    finite = torch.isfinite(wide) & torch.isfinite(own)
    return tuple(t.masked_fill(~finite, math.nan) for t in (wide, own))  # type: ignore[return-value]  # two


def same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether NaN, inf and -inf are at the same positions of both tensors."""
    if a.is_complex():
        return same_places(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    return a.shape == b.shape and all(_same_places(*some) for some in parts(a, b))


def _same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    if bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()):
        return True
    return (
        torch.equal(torch.isnan(a), torch.isnan(b))
        and torch.equal(torch.isposinf(a), torch.isposinf(b))
        and torch.equal(torch.isneginf(a), torch.isneginf(b))
    )
