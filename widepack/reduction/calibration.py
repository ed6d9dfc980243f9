"""Calibrates figures of the members' answers by one fitted number.

| kind | of | formula |
|---|---|---|
| `temperature` | the mean probabilities p over members | softmax(log max(p, 1e-12) / T) |
| `variance` | the variance v over members, divided by N | factor * v |

The temperature is of the mean, and not of each member's scores: members that are calibrated alone give a mean
that is too unsure (Rahaman and Thiery, 2021). So it needs no scores, leaves the most probable class as it is,
and its log likelihood is convex in 1 / T: there is one best temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import UsageError
from .sums import entropies

TEMPERATURE, VARIANCE = "temperature", "variance"
BOUNDS = {TEMPERATURE: (0.01, 100.0), VARIANCE: (1e-8, 1e8)}
"""The least and the largest number of each kind."""
OF: dict[str, tuple[str | None, ...]] = {TEMPERATURE: ("softmax", "probabilities"), VARIANCE: (None,)}
"""What the figures of each kind are computed of, as `reduce` takes it."""
LEAST = 1e-12
"""The least probability, and the least variance, that counts."""

_OF_CHOICES = ("vote", "votes", "disagreement", "variation_ratio")
_FIGURES = {TEMPERATURE: ("mean", "entropy", *_OF_CHOICES), VARIANCE: ("mean", "var", "std")}
"""The figures that are defined for each kind. A temperature does not change what members choose."""


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration of the figures of all members, with equal weights.

    Attributes:
        kind: `temperature` or `variance`.
        value: The temperature, or the factor of the variance.
        output: The output of the members, by name.
        of: What the figures are computed of, as `reduce` takes it.
        dim: The dim of the classes in a member's answer, not negative.
        rank: The number of dims of a member's answer.
    """

    kind: str
    value: float
    output: str
    of: str | None
    dim: int
    rank: int

    def check(self, figures: Sequence[str], of: str | None, dim: int, output: str, some: bool) -> None:
        """Refuses figures that this calibration is not of.

        figures, of, dim: as `reduce` takes them. output: the name of the output. some: whether members have
        weights, or only some of them count. Raises: UsageError.
        """
        if some:
            raise UsageError(
                "the calibration is of all members with equal weights; leave weights= and members= out, or "
                "calibrated="
            )
        both: dict[str, tuple[Any, Any]] = {"output": (self.output, output), "of": (self.of, of)}
        if self.kind == TEMPERATURE:
            both["dim"] = self.dim, dim % max(1, self.rank)
        if other := {name: pair for name, pair in both.items() if pair[0] != pair[1]}:
            own, given = (", ".join(f"{n}={pair[k]!r}" for n, pair in other.items()) for k in (0, 1))
            options = " ".join(
                f"--{'answer' if n == 'output' else n} {pair[0]}" if pair[0] is not None else f"no --{n}"
                for n, pair in other.items()
            )
            raise UsageError(
                f"the calibration is for {own}, and this call has {given}. Give {own} ({options}), or leave "
                "calibrated= (--calibrated) out"
            )
        known = _FIGURES[self.kind]
        if unknown := [name for name in figures if name not in known]:
            raise UsageError(
                f"{unknown[0]} has no calibrated value by a {self.kind}; those are {', '.join(known)}. Leave "
                "calibrated= out for it"
            )

    def applied(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Returns calibrated figures by name. `entropy` needs `mean` beside it. figures: of all members."""
        found = dict(figures)
        if self.kind == VARIANCE:
            factors = {"var": self.value, "std": self.value**0.5}
            return {name: v * factors[name] if name in factors else v for name, v in found.items()}
        if "mean" in found:
            found["mean"] = tempered(found["mean"], self.value, self.dim)
        if "entropy" in found:
            found["entropy"] = entropies(found["mean"], "softmax", self.dim)
        return found


def tempered(probabilities: Tensor, temperature: float, dim: int) -> Tensor:
    """Returns probabilities of classes at a temperature. dim: of the classes."""
    scores: Tensor = probabilities.clamp_min(LEAST).log() / temperature
    return scores.softmax(dim)
