"""What export takes for granted of small sizes, asked of the member itself.

Export takes every dynamic dim to be at least 2, follows `if x.shape[0] > 1` without a condition, and holds on to conditions of its own that say nothing of
what is computed. Only the member can tell whether its program holds where a dim is 1, or where such a condition does not.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms

from .tolerance import floating, same_places
from ..ir.float64 import double_by_default, raise_value
from .answers import Subject, fitting, run_module

_LARGER = 64  # as many sizes are looked at where no small one breaks a condition


def way_at_one(subject: Subject, letter: str) -> str:
    """Why the program is not known to hold where a dim is 1, in words; empty when it holds there.

    Export takes every dynamic dim to be at least 2, and follows `if x.shape[0] > 1` without a condition: only the member itself can tell. It is asked at the
    example's sizes of the other dims, then at small ones and a larger one of each: `if B == 1 and T <= 3` leaves no condition on T behind.
    """
    sizes = {**subject.sizes, letter: 1}
    if not subject.fits(sizes):
        return ""
    if why := _way_at(subject, sizes):
        return why
    for other, size in subject.sizes.items():
        for n in (1, 2, 3, 2 * size + 1) if other != letter else ():
            at = {**sizes, other: n}
            if n != size and subject.fits(at) and _takes(subject, at) and (why := _way_at(subject, at)):
                return f"{why} (at {other} = {n})"
    return ""


def needless(subject: Subject, dims: Mapping[str, tuple[int, int | None]], guards: Sequence[Any]) -> set[int]:
    """Which of the conditions are export's own and not the member's.

    Export asks of every size whether it is 0 or 1, of every two strides whether they are equal, and holds on to the answer: most such conditions say nothing
    of what is computed, and would refuse a batch of 1. The member itself is asked at small sizes where they do not hold: those stay where its answer, or its
    failure, is another than its program's.
    """
    letters = list(subject.sizes)
    if not letters or subject.module is None:
        return set()
    least = {d: max(1, dims.get(d, (1, None))[0]) for d in letters}  # where the user's bounds begin, small sizes do
    small = [range(least[d], least[d] + (6 if len(letters) <= 3 and (d != subject.batch or len(letters) < 3) else 3)) for d in letters]
    choices = [sorted({*s, subject.sizes[d]}) for d, s in zip(letters, small)]
    grid = [dict(zip(letters, picked)) for picked in itertools.islice(itertools.product(*choices), 1000)]
    whole = [sizes for sizes in grid if min(sizes.values()) > 1]
    own = {i for i, g in enumerate(guards) if guard_forms.of_small_sizes(g) or all(guard_forms.holds(g, sizes) for sizes in whole)}
    inside = fitting(dims, [g for i, g in enumerate(guards) if i not in own])
    tried: dict[frozenset[int], list[dict[str, int]]] = {}
    for sizes in grid:
        broken = frozenset(i for i in own if not guard_forms.holds(guards[i], sizes))
        if broken and inside(sizes):
            tried.setdefault(broken, []).append(sizes)
    for i in own - {i for broken in tried for i in broken}:  # what small sizes do not break: `T // 4 - 1 != 1` of a member that takes no T below 8
        for letter in sorted(guard_forms.letters(guards[i])) if guard_forms.of_small_sizes(guards[i]) else ():
            for size in range(least[letter], least[letter] + _LARGER):
                sizes = {**subject.sizes, letter: size}
                broken = frozenset(k for k in own if not guard_forms.holds(guards[k], sizes))
                if i in broken and inside(sizes):
                    tried.setdefault(broken, []).append(sizes)
    gone, kept = set[int](), set[int]()
    failed: list[frozenset[int]] = []
    for broken, where in sorted(tried.items(), key=lambda row: len(row[0])):
        if broken & kept:  # what breaks one that stays is refused anyway
            continue
        if not any(_way_at(subject, sizes) for sizes in (where[0], where[-1])):
            gone |= broken
            continue
        failed.append(broken)
        if len(blamed := broken - gone) == 1:  # the others were found needless where this one holds
            kept |= blamed
    for broken in failed:
        if broken <= gone - kept:  # needless one by one, needed together: one of them refuses these sizes, rather one that leaves batches alone
            refuses = {i: sum(len(where) for other, where in tried.items() if i in other) for i in broken}
            kept.add(min(broken, key=lambda i: (subject.batch in guard_forms.letters(guards[i]), refuses[i], i)))
    return gone - kept


def _takes(subject: Subject, sizes: Mapping[str, int]) -> bool:
    """Whether member 0 answers at these sizes at all: what it does not take, its program need not."""
    if subject.module is None:
        return False
    (inputs,) = subject.draw(sizes, 3, "shared", 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_module(subject.module(0), subject, inputs)
    except Exception:  # noqa: BLE001  # whatever the user's code raises
        return False
    return True


def _way_at(subject: Subject, sizes: Mapping[str, int]) -> str:
    """How member 0 and its program differ at these sizes, in words; empty where they do not."""
    if subject.module is None:
        return ""
    module, weights = subject.module(0), subject.weights(0)
    program = subject.programs[subject.signatures[0]]
    (inputs,) = subject.draw(sizes, 3, "shared", 1)
    failed = "the captured program"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the member warns of at such a size is no news of this build
            with torch.inference_mode():
                own = subject.run(0)(*(weights[s.source] for s in program.weights), *inputs)
            try:
                with torch.inference_mode(), double_by_default():
                    truths: Sequence[Any] = subject.run(0, late=True)(
                        *(weights[s.source] for s in program.weights), *(raise_value(x) for x in inputs)
                    )
            except RuntimeError:
                truths = [None] * len(own)
            failed = "the member itself"
            theirs = [x for x in run_module(module, subject, inputs) if isinstance(x, torch.Tensor)]
    except (RuntimeError, ValueError, IndexError, AssertionError) as e:
        return f"{failed} fails there: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}".rstrip(": ")
    for o, t, truth in zip(own, theirs, truths):
        if o.shape != t.shape:
            return f"the member gives {list(t.shape)} there, its program {list(o.shape)}"
        if not (_close(o, t, truth) if floating(t) else torch.equal(o, t)):
            return "the member's own answer there is not its captured program's"
    return ""


def _close(own: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor | None) -> bool:
    """Whether two runs of one member in one dtype agree but for rounding. truth: the float64 answer, where there is one."""
    if not same_places(own, theirs):
        return False
    noise = _largest(own.to(truth.dtype) - truth) if truth is not None else 0.0
    return _largest(own - theirs) <= max(8 * noise, max(2e-5, 8 * torch.finfo(theirs.dtype).eps) * _largest(theirs))


def _largest(t: torch.Tensor) -> float:
    """The largest finite number's absolute value."""
    fine = t[torch.isfinite(t)].abs()
    return float(fine.max()) if fine.numel() else 0.0
