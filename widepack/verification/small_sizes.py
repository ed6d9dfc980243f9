"""Finds out on the member itself what torch.export assumes about small sizes.

The export assumes that every dynamic dim is at least 2, follows `if x.shape[0] > 1` without a guard, and adds
guards that do not concern what is computed. Only the member can tell whether its program is valid where a dim
is 1, or where a guard of that kind does not hold.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms

from ..system.memory import bytes_lacking
from .entries import VerifiedEntry
from .module_run import run_module
from .subject import Subject, fitting
from .tolerance import floating, same_places

_LARGER = 64  # so many sizes of a dim are tried if no small one breaks a guard
_MOST_TRIED = 1000  # combinations of small sizes

_Run = Callable[[Subject, Sequence[torch.Tensor]], list[torch.Tensor]]
_MOST_CUT = 27  # combinations of cut integer inputs
_INDICES = (torch.int64, torch.int32)

_Tried = dict[frozenset[int], list[dict[str, int]]]
"""For each set of guards the sizes that break these guards and no others."""


def corrections(subject: Subject, entry: VerifiedEntry) -> tuple[set[int], dict[str, str]]:
    """Returns how the conditions of an entry are corrected by what member 0 does at small sizes: the numbers
    of the needless guards; the dims where the program is not valid at 1, and why.
    """
    gone = needless(subject, entry.bounds, entry.conditions)
    kept = [guard for i, guard in enumerate(entry.conditions) if i not in gone]
    bounds, not_at_one = dict(entry.bounds), {}
    for letter in entry.sizes:
        if why := difference_at_one(replace(subject, fits=fitting(bounds, kept)), letter):
            not_at_one[letter] = why
            bounds[letter] = 2, bounds[letter][1]
    return gone, not_at_one


def difference_at_one(subject: Subject, letter: str) -> str:
    """Returns why the program is not known to be valid where a dim is 1; "" if it is valid.

    It is tried at the example's sizes of the other dims, then at small sizes and a larger one of each:
    `if B == 1 and T <= 3` leaves no guard on T.
    """
    sizes = {**subject.sizes, letter: 1}
    if not subject.fits(sizes):
        return ""
    if why := _difference_at(subject, sizes):
        return why
    for other, size in subject.sizes.items():
        for n in (1, 2, 3, 2 * size + 1) if other != letter else ():
            at = {**sizes, other: n}
            if (
                n != size
                and subject.fits(at)
                and _accepts(subject, at)
                and (why := _difference_at(subject, at))
            ):
                return f"{why} (at {other} = {n})"
    return ""


def needless(subject: Subject, dims: Mapping[str, tuple[int, int | None]], guards: Sequence[Any]) -> set[int]:
    """Returns the numbers of the guards that are the export's own and not the member's.

    The export compares each size with 0 and 1 and pairs of strides with each other, and turns the results
    into guards. Most of these do not concern what is computed, and would refuse a batch of 1. The member is
    run at small sizes that break them. A guard stays if the member's answer differs from its program's there,
    or if one of them fails.
    """
    letters = list(subject.sizes)
    if not letters or subject.module is None:
        return set()
    least = {d: max(1, dims.get(d, (1, None))[0]) for d in letters}  # small sizes begin at the user's bounds
    grid = _small_sizes(subject, least)
    whole = [sizes for sizes in grid if min(sizes.values()) > 1]
    export_guards = {
        i
        for i, g in enumerate(guards)
        if guard_forms.of_small_sizes(g) or all(guard_forms.holds(g, sizes) for sizes in whole)
    }
    return _judge(subject, _breaking(subject, dims, guards, export_guards, least, grid), guards)


def _small_sizes(subject: Subject, least: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns combinations of small sizes and the example's. least: of each dim."""
    letters = list(subject.sizes)

    def small(d: str) -> range:
        many = len(letters) <= 3 and (d != subject.batch or len(letters) < 3)
        return range(least[d], least[d] + (6 if many else 3))

    choices = [sorted({*small(d), subject.sizes[d]}) for d in letters]
    return [dict(zip(letters, sizes)) for sizes in itertools.islice(itertools.product(*choices), _MOST_TRIED)]


def _breaking(
    subject: Subject,
    dims: Mapping[str, tuple[int, int | None]],
    guards: Sequence[Any],
    export_guards: set[int],
    least: Mapping[str, int],
    grid: Sequence[dict[str, int]],
) -> _Tried:
    """Returns sizes that break guards of `export_guards`, and satisfy bounds and all other guards."""
    inside = fitting(dims, [g for i, g in enumerate(guards) if i not in export_guards])
    tried: _Tried = {}

    def broken_at(sizes: Mapping[str, int]) -> frozenset[int]:
        return frozenset(i for i in export_guards if not guard_forms.holds(guards[i], sizes))

    for sizes in grid:
        if (broken := broken_at(sizes)) and inside(sizes):
            tried.setdefault(broken, []).append(sizes)
    # Small sizes may not break a guard: `T // 4 - 1 != 1` of a member that accepts no T below 8.
    for i in export_guards - {i for broken in tried for i in broken}:
        for letter in sorted(guard_forms.letters(guards[i])) if guard_forms.of_small_sizes(guards[i]) else ():
            for size in range(least[letter], least[letter] + _LARGER):
                sizes = {**subject.sizes, letter: size}
                broken = broken_at(sizes)
                if i in broken and inside(sizes):
                    tried.setdefault(broken, []).append(sizes)
    return tried


def _judge(subject: Subject, tried: _Tried, guards: Sequence[Any]) -> set[int]:
    """Runs the member where guards are broken, and returns the needless ones."""
    gone, kept = set[int](), set[int]()
    failed: list[frozenset[int]] = []
    for broken, where in sorted(tried.items(), key=lambda row: len(row[0])):
        if broken & kept:  # a guard that stays refuses these sizes anyway
            continue
        if not any(_difference_at(subject, sizes, answered=True) for sizes in (where[0], where[-1])):
            gone |= broken
            continue
        failed.append(broken)
        if len(blamed := broken - gone) == 1:  # the others were found needless elsewhere
            kept |= blamed
    for broken in failed:
        # Each guard alone is needless, but together they are needed. One must refuse these sizes, preferably
        # one that
        # does not limit the batch.
        if broken <= gone - kept:
            refused = {i: sum(len(where) for other, where in tried.items() if i in other) for i in broken}
            kept.add(
                min(broken, key=lambda i: (subject.batch in guard_forms.letters(guards[i]), refused[i], i))
            )
    return gone - kept


def _valid_inputs(subject: Subject, sizes: Mapping[str, int]) -> Iterator[list[torch.Tensor]]:
    """Yields inputs of member 0 at these sizes, of which some may be valid for it.

    Integers are drawn as rows of the example. Where they are positions in a dim (the node of an edge, the
    structure of an atom) or lengths of it, they may be too large for a smaller size of that dim. So each
    integer input is also cut to the positions and to the lengths of the smallest dim that changes.
    """
    (drawn,) = subject.draw(sizes, 3, "shared", 1)
    yield drawn
    size = min((n for d, n in sizes.items() if n != subject.sizes.get(d)), default=0)
    whole = [i for i, x in enumerate(drawn) if x.dtype in _INDICES and i not in subject.carried]
    if not whole or not size or not any(int(drawn[i].max()) >= size for i in whole if drawn[i].numel()):
        return
    for most in itertools.islice(itertools.product((size - 1, size, None), repeat=len(whole)), _MOST_CUT):
        cut = dict(zip(whole, most))
        if any(m is not None for m in most):
            yield [_cut(x, subject.sources[i].low, cut.get(i)) for i, x in enumerate(drawn)]


def _cut(x: torch.Tensor, least: int | None, most: int | None) -> torch.Tensor:
    """Returns integers that are at most `most`, within the user's lower bound."""
    return x if most is None else x.clamp(max=max(most, least or 0))


def _accepts(subject: Subject, sizes: Mapping[str, int]) -> bool:
    """Returns whether member 0 answers at these sizes. If it does not, its program need not either."""
    if subject.module is None:
        return False
    return any(not _failure(_of_module, subject, x)[0] for x in _valid_inputs(subject, sizes))


def _failure(
    run: _Run, subject: Subject, inputs: Sequence[torch.Tensor]
) -> tuple[str, Sequence[torch.Tensor]]:
    """Returns the error of a run, in one line, or its answers."""
    try:
        with warnings.catch_warnings():
            # Warnings of members at trial sizes do not concern the user of this build.
            warnings.simplefilter("ignore")
            return "", run(subject, inputs)
    except Exception as e:  # noqa: BLE001  # the user's code may raise anything
        line = (str(e).splitlines() or [""])[0][:200]
        return f"{type(e).__name__}: {line}".rstrip(": "), ()


def _of_module(subject: Subject, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that member 0 itself answers."""
    assert subject.module is not None
    return [x for x in run_module(subject.module(0), subject, inputs) if isinstance(x, torch.Tensor)]


def _difference_at(subject: Subject, sizes: Mapping[str, int], *, answered: bool = False) -> str:
    """Returns how member 0 and its program differ at these sizes; "" if they do not.

    Inputs that neither of the two takes show no difference if there are integers among them, which may be
    invalid at these sizes. Other inputs show that the member itself refuses the sizes. answered: then both
    must answer to some inputs.
    """
    if subject.module is None:
        return ""
    refusal = ""
    for inputs in _valid_inputs(subject, sizes):
        of_member, theirs = _failure(_of_module, subject, inputs)
        of_program, answers = _failure(lambda s, x: s.answers(0, x), subject, inputs)
        if not of_member and not of_program:
            return _difference_of(subject, inputs, theirs, answers)
        if of_program and not of_member:
            return f"the captured program fails there: {of_program}"
        integers = any(x.dtype in _INDICES for i, x in enumerate(inputs) if i not in subject.carried)
        if of_member and not (of_program and integers):
            refusal = refusal or f"the member itself fails there: {of_member}"
    return refusal or ("neither answers there" if answered else "")


def _difference_of(
    subject: Subject,
    inputs: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    answers: Sequence[torch.Tensor],
) -> str:
    """Returns how the answers of member 0 and of its program differ; "" if by rounding only."""
    truths: Sequence[torch.Tensor | None]
    try:
        truths = subject.float64_function(0)(inputs)
    except RuntimeError as e:  # an op has no float64 kernel
        if bytes_lacking(e):
            raise
        truths = [None] * len(answers)
    for o, t, truth in zip(answers, theirs, truths):
        if o.shape != t.shape:
            return f"the member gives {list(t.shape)} there, its program {list(o.shape)}"
        if not (_close(o, t, truth) if floating(t) else torch.equal(o, t)):
            return "the member's own answer there is not its captured program's"
    return ""


def _close(answer: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor | None) -> bool:
    """Returns whether two runs of one member in one dtype differ by rounding only. truth: the float64 answer,
    if any.
    """
    if not same_places(answer, theirs):
        return False
    noise = _largest(answer.to(truth.dtype) - truth) if truth is not None else 0.0
    relative = max(2e-5, 8 * torch.finfo(theirs.dtype).eps)
    return _largest(answer - theirs) <= max(8 * noise, relative * _largest(theirs))


def _largest(t: torch.Tensor) -> float:
    """Returns the largest absolute value of the finite numbers."""
    finite = t[torch.isfinite(t)].abs()
    return float(finite.max()) if finite.numel() else 0.0
