"""What "right" means: the bound that a wide answer is held to.

For each output, with the members' own error (in their own dtype against float64; of members in float64, that of float32 scaled by the two dtypes' eps) pooled
over all members and calls:

    rms error      at most 2x the members' own + 1 ulp       over all calls of a member; its own over these calls, where that is more than the pooled
    largest error  at most 4x the members' own + 4 ulp       of the output's rms (float64, pooled)

NaN, inf and the largest number of the dtype, which stands for inf after `nan_to_num`, stand in the same places as in the member's own answer and have no
part in a scale; integers and booleans are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..spec.dtypes import at_limit
from ..errors import VerificationError

PART = 1 << 18  # numbers that are compared at once


@dataclass
class Pool:
    """Errors of one output, pooled over members and calls. eps: of the output's dtype."""

    name: str
    eps: float = 0.0
    own_square: float = 0.0
    own_max: float = 0.0
    scale_square: float = 0.0
    count: int = 0
    wide: list[Wrong] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return math.sqrt(self.scale_square / self.count) if self.count else 0.0

    @property
    def own_rms(self) -> float:
        return math.sqrt(self.own_square / self.count) if self.count else 0.0

    def rms_bound(self, own: float = 0.0) -> float:
        """own: the member's own rms error over the same calls: one member may be worse conditioned than the others, and its wide answer is no worse for it."""
        return 2 * max(self.own_rms, own) + self.eps * self.scale

    @property
    def max_bound(self) -> float:
        return 4 * self.own_max + 4 * self.eps * self.scale

    def add_own(self, own: torch.Tensor, truth: torch.Tensor) -> None:
        """One member's own answer beside its float64 answer."""
        if not floating(own):
            return
        self.eps = torch.finfo(own.dtype).eps
        for mine, exact in parts(own, truth):
            mine, exact = only(torch.isfinite(mine) & torch.isfinite(exact) & ~at_limit(mine), mine, exact)
            if exact.numel():
                error = (mine.to(exact.dtype) - exact).abs()
                self.own_square += float(error.square().sum())
                self.own_max = max(self.own_max, float(error.max()))
                self.scale_square += float(exact.abs().square().sum())
                self.count += error.numel()

    def add_wide(self, member: str, call: str, wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor) -> None:
        """One member's wide answer beside its own and its float64 answer."""
        self.wide.append(measure(member, call, wide, own, truth))

    def wrong(self) -> str:
        """The first answer out of bounds, in words; empty when all are right. A member's rms error is pooled over its calls, its largest error is of each."""
        return self.first_wrong()[1]

    def first_wrong(self) -> tuple[str, str]:
        """Whose answer is the first out of bounds, and `wrong`."""
        for w in self.wide:
            if w.words:
                return w.member, f"output {self.name or '0'}, member {w.member}, {w.call}: {w.words}"
            if not w.largest <= self.max_bound:
                return w.member, (
                    f"output {self.name or '0'}, member {w.member}, {w.call}: largest error {w.largest:.2e} (bound {self.max_bound:.2e}); "
                    f"the members' own largest error in their own dtype is {self.own_max:.2e}"
                )
        for member, (rms, own) in self.pooled().items():
            if not rms <= self.rms_bound(own):
                return member, (
                    f"output {self.name or '0'}, member {member}: rms error over all calls {rms:.2e} (bound {self.rms_bound(own):.2e}); "
                    f"the member's own is {own:.2e}, all members' {self.own_rms:.2e}"
                )
        return "", ""

    def pooled(self) -> dict[str, tuple[float, float]]:
        """Each member's rms error over all its calls, and its own answers' over the same."""
        sums: dict[str, tuple[float, float, int]] = {}
        for w in self.wide:
            square, own, count = sums.get(w.member, (0.0, 0.0, 0))
            sums[w.member] = square + w.rms**2 * w.count, own + w.own**2 * w.count, count + w.count
        return {m: (math.sqrt(square / count), math.sqrt(own / count)) if count else (0.0, 0.0) for m, (square, own, count) in sums.items()}

    def unsteady(self, eps: float = 0.0) -> str:
        """Why the members' own answers cannot be held to anything, in words: they are far from float64, as state or random numbers make them; else empty.

        eps: of the coarsest dtype on the way to this output, where that is coarser than its own: what was rounded to bfloat16 is as far off in float32.
        """
        if self.own_rms > max(1e-3, 100 * max(self.eps, eps)) * self.scale:
            return f"output {self.name or '0'}: the members' own answers are off by {self.own_rms:.1e} from float64, at a scale of {self.scale:.1e}"
        return ""

    def record(self) -> dict[str, Any]:
        """What the manifest keeps."""
        by: dict[str, list[Wrong]] = {}
        for w in self.wide:
            by.setdefault(w.member, []).append(w)
        pooled = self.pooled()
        return {
            "output": self.name,
            "scale": self.scale,
            "eps": self.eps,
            "own_rms": self.own_rms,
            "own_max": self.own_max,
            "samples": self.count,
            "members": {m: {"rms": pooled[m][0], "max": max(w.largest for w in ws)} for m, ws in by.items()},
        }


@dataclass(frozen=True)
class Wrong:
    """One answer's error against float64 over `count` numbers. words: what is wrong whatever the bound. own: the rms error of the member's own answer."""

    member: str
    call: str
    rms: float
    largest: float
    words: str
    count: int = 0
    own: float = 0.0


def floating(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def measure(member: str, call: str, wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor) -> Wrong:
    """A wide answer against the member's own (shape, dtype, NaN and inf) and its float64 answer (error)."""
    words = ""
    if wide.shape != own.shape:
        words = f"shape {list(wide.shape)}, the member's own {list(own.shape)}"
    elif wide.dtype != own.dtype:
        words = f"{wide.dtype}, the member's own {own.dtype}"
    elif not floating(own):
        differ = int((wide != own).sum())
        words = f"{differ} of {own.numel()} values differ from the member's own" if differ else ""
    elif not same_places(wide, own):
        words = "NaN or inf in other places than in the member's own answer"
    elif own.shape != truth.shape:
        words = f"shape {list(own.shape)}, in float64 {list(truth.shape)}: rounding decides a size"
    if words or not floating(own):
        return Wrong(member, call, 0.0, 0.0, words)
    square = itself = largest = 0.0
    count = 0
    for found, mine, exact in parts(wide, own, truth):
        most = at_limit(mine)
        if bool(most.any()) and not bool(((found[most] / mine[most] - 1).abs() <= torch.finfo(own.dtype).eps).all()):
            return Wrong(member, call, 0.0, 0.0, f"another number where the member's own answer is the largest of {own.dtype}")
        found, mine, exact = only(torch.isfinite(mine) & torch.isfinite(exact) & ~most, found, mine, exact)
        if exact.numel():
            error = (found.to(exact.dtype) - exact).abs()
            square += float(error.square().sum())
            largest = max(largest, float(error.max()))
            itself += float((mine.to(exact.dtype) - exact).abs().square().sum())
            count += error.numel()
    return (
        Wrong(member, call, math.sqrt(square / count), largest, "", count, math.sqrt(itself / count)) if count else Wrong(member, call, 0.0, 0.0, "")
    )


def parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, so many numbers at a time that what is made of them stays in a cache: whole outputs in float64 would come from memory several times."""
    if any(t.shape != tensors[0].shape for t in tensors):
        raise VerificationError(
            f"answers of shapes {', '.join(str(list(t.shape)) for t in tensors)} cannot be compared: a size is decided by rounding, and float64 decides otherwise"
        )
    flat = [t.reshape(-1) for t in tensors]
    for at in range(0, flat[0].numel(), PART):
        yield tuple(t[at : at + PART] for t in flat)


def only(fine: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The numbers where `fine` is true."""
    return tensors if bool(fine.all()) else tuple(t[fine] for t in tensors)


def same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether NaN, inf and -inf stand in the same places."""
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
