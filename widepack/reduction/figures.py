"""Defines the figures of an ensemble: how they are computed, and what they need.

The docstring of `ModelCalls.reduce` has the formulas. The names follow torch-uncertainty and Fortuna, except
for their words "aleatoric" and "epistemic", of which they give different definitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

import torch

from ..errors import InputError, UsageError
from .sums import Sums


@dataclass(frozen=True)
class Figure:
    """One figure of an ensemble.

    Attributes:
        name: Its name in a request.
        compute: Computes it. The second argument is the number in parentheses, as in `quantile(0.9)`.
        reads: What it reads: names of properties of `Block`.
        needs: `answers`, `real` answers, `probabilities`, or `votes`.
        classes: Whether the result has the dim of the classes.
        weighted: Whether members can have weights.
    """

    name: str
    compute: Callable[[Sums, float], torch.Tensor]
    reads: tuple[str, ...]
    needs: str = "answers"
    classes: bool = True
    weighted: bool = True

    @property
    def streamed(self) -> bool:
        """Whether it can be computed while members answer one after the other."""
        return "quantile" not in self.reads


def _vote(sums: Sums, _: float) -> torch.Tensor:
    if sums.of == "sigmoid":
        return (sums.counts * 2 > sums.total).long()
    return sums.counts.argmax(sums.dim)


def _mutual_information(sums: Sums, _: float) -> torch.Tensor:
    return (sums.entropy - sums.expected_entropy).clamp_min(0)


def _disagreement(sums: Sums, _: float) -> torch.Tensor:
    counts, members = sums.counts.to(sums.dtype), sums.members
    if sums.of == "sigmoid":
        same = counts * (counts - 1) + (members - counts) * (members - counts - 1)
    else:
        same = (counts * (counts - 1)).sum(sums.dim)
    return 1 - same / (members * (members - 1)) if members > 1 else torch.zeros_like(same)


def _variation_ratio(sums: Sums, _: float) -> torch.Tensor:
    counts = sums.counts.to(sums.dtype)
    if sums.of == "sigmoid":
        return 1 - torch.maximum(counts, sums.total - counts) / sums.total
    return 1 - counts.amax(sums.dim) / sums.total


_ALL = (
    Figure("mean", lambda s, _: s.mean, ("mean",)),
    Figure("var", lambda s, _: s.var, ("var",)),
    Figure("std", lambda s, _: s.var.sqrt(), ("var",)),
    Figure("min", lambda s, _: s.least, ("least",), "real", weighted=False),
    Figure("max", lambda s, _: s.greatest, ("greatest",), "real", weighted=False),
    Figure("median", lambda s, _: s.quantile(0.5), ("quantile",), "real", weighted=False),
    Figure("quantile", lambda s, q: s.quantile(q), ("quantile",), "real", weighted=False),
    Figure("vote", _vote, ("counts",), "votes", classes=False),
    Figure("votes", lambda s, _: s.counts, ("counts",), "votes"),
    Figure("entropy", lambda s, _: s.entropy, ("entropy",), "probabilities", classes=False),
    Figure(
        "expected_entropy",
        lambda s, _: s.expected_entropy,
        ("expected_entropy",),
        "probabilities",
        classes=False,
    ),
    Figure(
        "mutual_information",
        _mutual_information,
        ("entropy", "expected_entropy"),
        "probabilities",
        classes=False,
    ),
    Figure("disagreement", _disagreement, ("counts",), "votes", classes=False, weighted=False),
    Figure("variation_ratio", _variation_ratio, ("counts",), "votes", classes=False),
)

FIGURES = {figure.name: figure for figure in _ALL}
"""Every figure by its name. `mixture` reads two outputs, and is not among them."""


OF = ("softmax", "sigmoid", "probabilities")
_CALL = re.compile(r"(\w+)\((.*)\)")
_NO_PROBABILITIES = (
    "needs probabilities. Say what the answers are: of='softmax' for the scores of classes, of='sigmoid' for "
    "the scores of labels, of='probabilities' if they are probabilities already"
)


@dataclass(frozen=True)
class Requested:
    """One requested figure. text: as the caller wrote it. number: the one in parentheses, else 0."""

    text: str
    figure: Figure
    number: float = 0.0


def requested(texts: Sequence[str], of: str | None, weighted: bool) -> list[Requested]:
    """Reads the names of figures.

    Args:
        texts: Names, such as `mean` or `quantile(0.9)`.
        of: What the figures are computed of.
        weighted: Whether the members have weights.

    Raises:
        UsageError: A name is unknown, needs probabilities that `of` does not give, or has no weights.
    """
    if of is not None and of not in OF:
        raise UsageError(f"of={of!r} is unknown; known: {', '.join(OF)}, None")
    found = [_one(text) for text in dict.fromkeys(texts)]
    for one in found:
        if one.figure.needs == "probabilities" and of is None:
            raise UsageError(f"{one.text} {_NO_PROBABILITIES}")
        if weighted and not one.figure.weighted:
            raise UsageError(
                f"{one.text} is not defined for members with weights; request it without weights"
            )
    return found


def _one(text: str) -> Requested:
    call = _CALL.fullmatch(text.replace(" ", ""))
    name, number = (call[1], call[2]) if call else (text, None)
    if name not in FIGURES:
        near = get_close_matches(name, [*FIGURES, "mixture"], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        known = ", ".join("quantile(0.9)" if n == "quantile" else n for n in FIGURES)
        raise UsageError(f"there is no figure {text[:60]!r}{hint}. Known: {known}, mixture")
    figure = FIGURES[name]
    if (number is not None) != (name == "quantile"):
        raise UsageError(
            "quantile needs the share of members in parentheses, for example quantile(0.9)"
            if name == "quantile"
            else f"{name} has no number in parentheses"
        )
    if number is None:
        return Requested(text, figure)
    try:
        q = float(number)
    except ValueError:
        q = -1.0
    if not 0 <= q <= 1:
        raise UsageError(
            f"{text[:60]}: the share of members is a number from 0 to 1, for example quantile(0.9)"
        )
    return Requested(text, figure, q)


def normalised(weights: Any, members: int, answers: torch.Tensor) -> torch.Tensor | None:
    """Returns weights that sum to 1, on the device of the answers; None for None.

    Raises: UsageError unless they are N numbers that are not negative and not all 0.
    """
    if weights is None:
        return None
    try:
        given = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"weights={weights!r:.60} is not a list of numbers") from None
    if given.dim() != 1 or given.shape[0] != members:
        raise UsageError(
            f"{given.numel()} weights for {members} members; give a list with one for each member"
        )
    total = float(given.sum())
    if bool((given < 0).any()) or not (isfinite(total) and total > 0):
        raise UsageError("weights must be finite and not negative, and at least one must be above 0")
    wide = torch.float64 if answers.dtype in (torch.float64, torch.complex128) else torch.float32
    return (given / total).to(wide).to(answers.device)


def check_answers(
    answers: torch.Tensor, wanted: Sequence[Requested], of: str | None, dim: int, rows: bool
) -> int:
    """Checks that figures are defined for answers.

    Args:
        answers: `[N, ...]`.
        wanted: The requested figures.
        of: What they are computed of.
        dim: The dim of the classes in a member's answer.
        rows: Whether that dim has one entry for each row of the batch.

    Returns:
        The dim of the classes in `answers`.

    Raises:
        InputError: The answers are whole numbers; complex, or without classes, where a figure cannot be.
        UsageError: There is no such dim.
    """
    if not (answers.is_floating_point() or answers.is_complex()):
        raise InputError(
            f"the members' answers are {str(answers.dtype).removeprefix('torch.')}: they have no mean, and "
            "no scores to vote with. Combine them in your own code, for example ens(x).mode(0).values"
        )
    if answers.is_complex() and (real := [w.text for w in wanted if w.figure.needs != "answers"]):
        raise InputError(f"the members' answers are complex: {', '.join(real)} is defined for real numbers")
    sizes = answers.dim() - 1
    by_class = [w.text for w in wanted if w.figure.needs in ("votes", "probabilities") and of != "sigmoid"]
    if of == "softmax":
        by_class.append("softmax")
    if not -sizes <= dim < sizes:
        if not by_class:
            return answers.dim() - 1
        if sizes:
            raise UsageError(
                f"dim={dim}: a member's answer has {sizes} dims, so dim is {-sizes} to {sizes - 1}"
            )
        raise InputError(f"a member answers one number: {by_class[0]} needs scores of classes")
    if by_class and not answers.shape[dim % sizes + 1]:
        raise InputError(f"the members' answers have no classes: dim {dim} has the size 0")
    if by_class and rows:
        raise InputError(
            f"dim {dim} of the members' answers is the batch: {by_class[0]} needs a dim of classes. For two "
            "classes with one score use of='sigmoid'; for classes in another dim use dim="
        )
    return dim % sizes + 1
