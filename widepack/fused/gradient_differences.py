"""Compares a member's gradients with those of a wide program, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..errors import VerificationError
from .gradients import PART, Gradients, error_and_size, relative_bound

TERMS = 16  # ulp of a bias's terms that the rounding of their sum may cost
OWN_ERRORS = 4  # the error over float64 that is accepted, as a multiple of the member's own
DECIDED = 0.1  # the part of a gradient that a near-tie may change, if the program is right in float64
WAY_OUT = (
    'Please report it; strategy="loop" runs members one after the other, and validate=False skips this check'
)


@dataclass(frozen=True)
class ExactGradients:
    """Gradients in float64, computed where they are needed.

    Attributes:
        i: The member; None for shared weights.
        own: Returns those of member i's module, or their sums over all members.
        wide: Returns those of the wide program, of all members.
        terms: The sizes of the terms of biases' gradients, which `own` fills (`gradients.py`).
    """

    i: int | None
    own: Callable[[], Gradients]
    wide: Callable[[], Gradients]
    terms: Mapping[str, float] = field(default_factory=dict)

    def agree(self, name: str) -> bool:
        """Returns whether the two are the same up to the rounding of float64."""
        own, computed = self.own().get(name), self.wide().get(name)
        if own is None or computed is None:
            return False
        error, size = error_and_size(computed if self.i is None else computed[self.i], own)
        return error <= relative_bound([own]) * size


def _is_as_exact(
    name: str, computed: torch.Tensor, own: Gradients, truth: Gradients, terms: Mapping[str, float]
) -> bool:
    """Returns whether a gradient's error over float64 is of the size of the member's own errors, or of the
    rounding of its terms.
    """
    pairs = [(g, t) for n, t in truth.items() if t is not None and (g := own.get(n)) is not None]
    errors = [e for g, t in pairs if math.isfinite(e := error_and_size(g.double(), t)[0])]
    exact = truth.get(name)
    if exact is None or not errors:
        return False
    rounding = TERMS * torch.finfo(computed.dtype).eps * terms.get(name, 0.0)
    return error_and_size(computed.double(), exact)[0] <= max(OWN_ERRORS * max(errors), rounding)


def compare_gradients(
    i: int | None,
    wide: Gradients,
    own: Gradients,
    scale: Gradients,
    exact: ExactGradients | None = None,
    way_out: Callable[[], str] | None = None,
) -> set[str]:
    """Returns the names of gradients that a near-tie may have changed.

    A gradient that is zero but for rounding, such as that of a bias before a BatchNorm, has an error of
    another size. So where two gradients differ, the error over float64 may be `OWN_ERRORS` times the largest
    error of the member's own gradients, or `TERMS` ulp of the sum of its absolute terms: a term that is lost
    changes it by more. A near-tie of a `max_pool` or a `relu` may be decided by rounding.
    Such a decision changes a part of a gradient, and the gradients are equal in float64. Other inputs have no
    tie at the same place, so the caller compares these gradients again.

    `i` is the member, or None for shared weights. `scale` has the gradients whose dtypes set the bound.
    `exact` computes gradients in float64. `way_out` returns the end of the message.

    Raises:
        VerificationError: Two gradients differ by more than rounding, or a near-tie, explains.
    """
    near_ties: set[str] = set()
    bound = relative_bound([g for g in scale.values() if g is not None])
    largest = max((error_and_size(g, g)[1] for g in own.values() if g is not None), default=0.0)
    zero = torch.zeros(())
    for name, expected in own.items():
        computed = wide[name]
        b = zero if expected is None else expected
        error, size = error_and_size(zero if computed is None else computed, b)
        if expected is None and computed is not None:
            error = float(computed.abs().max()) if computed.numel() else 0.0
        size = max(size, PART * largest)
        if error > bound * size + torch.finfo(b.dtype).tiny:
            if exact is not None and computed is not None:
                if _is_as_exact(name, computed, own, exact.own(), exact.terms):
                    continue
                if error <= DECIDED * size and exact.agree(name):
                    near_ties.add(name)
                    continue
            whose = "all members" if i is None else f"member {i}"
            raise VerificationError(
                f"the gradient of {name} of {whose} differs from its module's by {error:.2e} at a "
                f"size of {size:.2e} (bound {bound:.0e} of it). {way_out() if way_out else WAY_OUT}"
            )
    return near_ties
