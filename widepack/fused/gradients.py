"""Computes gradients of a weighted sum of outputs, and compares them up to rounding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VerificationError

Gradients = dict[str, Tensor | None]

BOUND = 1e-3  # the relative error of float32 that is accepted; a wrong program is off by more
PART = 0.01  # a gradient of less than this part of the largest one is compared with this part
TERMS = 16  # ulp of a bias's terms that the rounding of their sum may cost
OWN_ERRORS = 4  # the error over float64 that is accepted, as a multiple of the member's own
DECIDED = 0.1  # the part of a gradient that a near-tie may change, if the program is right in float64
WAY_OUT = (
    'Please report it; strategy="loop" runs members one after the other, and validate=False skips this check'
)


@contextlib.contextmanager
def terms_of(module: nn.Module, names: Collection[str]) -> Iterator[dict[str, float]]:
    """Collects the sums of the absolute terms of the gradients of biases, while the module runs.

    The gradient of a bias is the sum of the gradients that come into its layer. In front of a BatchNorm, or
    of a softmax over the same dim, these cancel: the sum is as small as its rounding error, and says nothing
    of its size. The terms do.

    Args:
        module: The member.
        names: The weights whose gradients are computed.

    Yields:
        for each bias `[C]` the sum of the absolute gradients of its layer's outputs, for one of the C numbers
        on average. It is complete after the backward pass.
    """
    found: dict[str, float] = {}
    handles = []
    for path, part in module.named_modules():
        bias = dict(part.named_parameters(recurse=False, remove_duplicate=False)).get("bias")
        name = f"{path}.bias" if path else "bias"
        if bias is not None and name in names and bias.dim() == 1 and bias.numel():
            handles.append(part.register_forward_hook(_collecting(found, name, bias.numel())))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _collecting(found: dict[str, float], name: str, count: int) -> Any:
    def hook(part: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(add)  # type: ignore[no-untyped-call]

    def add(gradient: Tensor) -> None:
        terms = gradient.detach().abs()
        terms = terms.where(torch.isfinite(terms), 0)
        found[name] = found.get(name, 0.0) + float(terms.sum()) / count

    return hook


def weighted_sum(outputs: Sequence[torch.Tensor], i: int) -> torch.Tensor:
    """Returns a weighted sum of outputs. The weights are random, the same for the same `i`."""
    g = torch.Generator().manual_seed(17 + i)
    pairs = [
        (y, torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.device, y.dtype))
        for y in outputs
        if y.is_floating_point()
    ]
    terms = [(y * r).sum().double() for y, r in pairs if y.requires_grad]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def gradients_of(total: torch.Tensor, weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> Gradients:
    """Returns the gradient of a sum by each named weight; None if the sum does not depend on it."""
    if not names or not total.requires_grad:
        return dict.fromkeys(names)
    return dict(zip(names, torch.autograd.grad(total, [weights[n] for n in names], allow_unused=True)))


def relative_bound(values: Sequence[torch.Tensor]) -> float:
    """Returns the relative error that is accepted for values of these dtypes."""
    eps = max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point()), default=0.0)
    return BOUND * max(math.sqrt(eps / torch.finfo(torch.float32).eps), 1e-6)


def error_and_size(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Returns the largest difference of two values where the second is finite, and its largest number there.

    The difference is inf if the first is not finite where the second is.
    """
    if not b.is_floating_point() or not b.numel() or not a.numel():
        return 0.0, 0.0
    finite = torch.isfinite(b)
    error = float((a - b).where(finite, 0).abs().max())
    return math.inf if math.isnan(error) else error, float(b.where(finite, 0).abs().max())


def largest_of(values: Iterable[torch.Tensor | None]) -> float:
    """Returns the largest finite number of some values; 0 if there is none."""
    return max((error_and_size(v, v)[1] for v in values if v is not None), default=0.0)


def error_above(
    a: torch.Tensor, b: torch.Tensor, bound: float, largest: float = 0.0
) -> tuple[float, float] | None:
    """Returns the error of a value over another one and the size of that, if the error is out of bounds.

    bound: the part of the size that is accepted. largest: of all values, a part of which is a size too.
    """
    error, size = error_and_size(a, b)
    size = max(size, PART * largest)
    return (error, size) if error and error > bound * size + torch.finfo(b.dtype).tiny else None


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
        computed = computed if self.i is None else computed[self.i]
        return error_above(computed, own, relative_bound([own])) is None


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
    largest = largest_of(own.values())
    zero = torch.zeros(())
    for name, expected in own.items():
        computed = wide[name]
        a, b = (zero if g is None else g for g in (computed, expected))
        if (found := error_above(a, b, bound, largest)) is None:
            continue
        error, size = found
        if exact is not None and computed is not None:
            if _is_as_exact(name, computed, own, exact.own(), exact.terms):
                continue
            if error <= DECIDED * size and exact.agree(name):
                near_ties.add(name)
                continue
        raise VerificationError(
            f"the gradient of {name} of {whose(i)} differs from its module's by {error:.2e} at a "
            f"size of {size:.2e} (bound {bound:.0e} of it). {way_out() if way_out else WAY_OUT}"
        )
    return near_ties


def whose(i: int | None) -> str:
    """Returns in words of which member a gradient is; None: of a weight that all share."""
    return "all members" if i is None else f"member {i}"
