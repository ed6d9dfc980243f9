"""Makes the calls of a verification: their batches and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..spec.draws import NOISES, InputSource, draw_all, rows, spread_of
from ..system.memory import bytes_lacking
from .subject import CallCase, Subject, VerifiedCall
from .tolerance import floating

SAMPLES = 64  # numbers per output and member that a comparison needs, at least
MORE = 32  # at most so many calls are added to reach them, if an output has few numbers at any batch
BATCHES = (1, 2, 5)  # that are cut out of the large batch
OFFSETS = (10.0, 30.0)
"""How many times the example's spread is added to the floats of shifted calls.

Formulas that lose digits where the mean is larger than the deviation, such as `mean(x^2) - mean(x)^2`, are as
exact as others on numbers around 0. Their error grows with the square of the offset, and the members' own
error with the offset: six rows of a norm may by chance show none of it at the smaller offset, but not at the
larger one. The smaller offset shows it behind layers that saturate, or do not answer, at the larger one.
"""
LEAST = 6  # rows of the large batch, at least
FLOPS = 1e12
"""Floating point operations of all members' calls. Beyond them the large batch has fewer rows than `SAMPLES`
numbers need, and no further call is added.
"""


def calls(subject: Subject, patterns: Iterable[str]) -> list[VerifiedCall]:
    """Returns the calls of a verification.

    For each pattern: a large batch and its first 1, 2 and 5 rows, with a second step of each if the caller
    carries states; other sizes of the other dims; a size of 1 of each other dim.
    """
    patterns = list(patterns)
    rows_left = FLOPS / max(1.0, _flops(subject) * len(subject.members) * len(patterns)) - sum(BATCHES)
    large = _large(subject, rows_left) if subject.batch else 0
    at_large = {**subject.sizes, **({subject.batch: large} if subject.batch else {})}
    affordable = max(0, math.floor(rows_left / max(large, 1)) - 1)
    smallest = min(_numbers(subject, at_large) or [SAMPLES])
    repeats = min(MORE, affordable, math.ceil(SAMPLES / smallest) - 1)
    found: list[VerifiedCall] = []
    for pattern in patterns:
        found += _batches(subject, pattern, large, at_large, len(found))
        found += [c for c in _other(subject, pattern) if _accepted(subject, c)]
        found += [c for c in _repeated(subject, pattern, large, at_large, repeats) if _accepted(subject, c)]
        if not any(c.user for c in found if c.pattern == pattern):
            found.append(_example(subject, pattern))
    return found


def shifted(subject: Subject, made: Sequence[VerifiedCall]) -> list[list[VerifiedCall]]:
    """Returns, for each of `OFFSETS`, calls of the large batch with so many spreads added to all floats.

    The further calls of the large batch are divided between the offsets. Nothing is shifted if no input has
    floats that members take with noise. States are not shifted.

    subject: The members. made: what `calls` returned.
    """
    spreads = {
        k: spread
        for k, s in enumerate(subject.sources)
        if k not in subject.carried and (spread := _spread(s)) > 0
    }
    found: list[list[VerifiedCall]] = [[] for _ in OFFSETS]
    for pattern in dict.fromkeys(c.pattern for c in made) if spreads else ():
        first = [c for c in made if c.pattern == pattern and c.after is None]
        large = [c for c in first if c.case.sizes == first[0].case.sizes]
        for number, offset in enumerate(OFFSETS):
            own = large[number :: len(OFFSETS)] or large[:1]
            moved = [_with_offset(c, spreads, offset) for c in own]
            found[number] += [c for c in moved if _accepted(subject, c)]
    return found


def _with_offset(call: VerifiedCall, spreads: Mapping[int, float], offset: float) -> VerifiedCall:
    """Returns a call with `offset` spreads added to its inputs. spreads: by the numbers of the inputs."""
    inputs = [
        [v + offset * spreads[k] if k in spreads else v for k, v in enumerate(leaves)]
        for leaves in call.inputs
    ]
    name = f"{call.label}, inputs + {offset:g} x their spread"
    return replace(call, case=replace(call.case, name=name, repeat=0), inputs=inputs, user=False)


def _spread(source: InputSource) -> float:
    """Returns the spread of an input's floats; 0 if they may not change, or there is none."""
    if source.noise == NOISES[-1]:
        return 0.0
    if source.example is None:
        return 1.0 if source.type.startswith(("float", "bfloat")) else 0.0
    numbers = source.example
    if not numbers.is_floating_point() or numbers.numel() < 2 or not bool(torch.isfinite(numbers).all()):
        return 0.0
    return spread_of(numbers)


def _case(subject: Subject, batch: int, *, repeat: int = 0) -> CallCase:
    """Returns the case of a call that differs from the example in the batch alone."""
    return CallCase.of_sizes({subject.batch: batch} if subject.batch else {}, repeat=repeat)


def _batches(
    subject: Subject, pattern: str, large: int, at_large: Mapping[str, int], start: int
) -> list[VerifiedCall]:
    """Returns the calls of a large batch and of its first rows, as far as members accept them.

    The user's module does not run the large batch. start: the number of the first of these calls.
    """
    members, carried, letter = len(subject.members), subject.carried, subject.batch
    whole = subject.draw(at_large, 1, pattern, members)
    tried = {large: VerifiedCall(_case(subject, large), pattern, whole, not letter, carried)}
    for batch in BATCHES if letter else ():
        if batch < large and subject.fits({**subject.sizes, letter: batch}):
            cut = [rows(v, subject.sources, letter, batch) for v in whole]
            tried[batch] = VerifiedCall(_case(subject, batch), pattern, cut, True, carried)
    first = {batch: call for batch, call in tried.items() if _accepted(subject, call)}
    steps = []
    if carried:  # the next step of each call: other inputs, and the states that the first step left
        following = subject.draw(at_large, 5, pattern, members)
        for number, (batch, call) in enumerate(first.items(), start):
            cut = (
                following if batch == large else [rows(v, subject.sources, letter, batch) for v in following]
            )
            steps.append(replace(call, case=replace(call.case, step=2), inputs=cut, after=number))
    return [*first.values(), *steps]


def _other(subject: Subject, pattern: str) -> Iterator[VerifiedCall]:
    """Yields calls at other sizes of the other dims, and with a size of 1 of each, which ops may drop or
    broadcast.
    """
    other = _other_sizes(subject)
    ones = [
        sizes for d in subject.sizes if d != subject.batch and subject.fits(sizes := {**subject.sizes, d: 1})
    ]
    for sizes in [*([other] if other != dict(subject.sizes) else []), *ones]:
        inputs = subject.draw(sizes, 7, pattern, len(subject.members))
        yield VerifiedCall(CallCase.of_sizes(sizes), pattern, inputs, True, subject.carried)


def _repeated(
    subject: Subject, pattern: str, large: int, at_large: Mapping[str, int], count: int
) -> Iterator[VerifiedCall]:
    """Yields further calls of the large batch, so that `SAMPLES` numbers of every output are compared."""
    for k in range(count):
        inputs = subject.draw(at_large, 101 + 7 * k, pattern, len(subject.members))
        yield VerifiedCall(_case(subject, large, repeat=k + 1), pattern, inputs, False, subject.carried)


def _example(subject: Subject, pattern: str) -> VerifiedCall:
    """Returns the call with the example's own integers, which the export has run."""
    inputs = [like_example(subject, i if pattern == "each" else 0) for i in range(len(subject.members))]
    return VerifiedCall(CallCase(name="the example"), pattern, inputs, True, subject.carried)


def like_example(subject: Subject, seed: int) -> list[torch.Tensor]:
    """Returns one member's inputs: the example's integers, and floats that are drawn."""
    drawn = draw_all(subject.sources, subject.sizes, 1 + seed)
    return [
        v if x.example is None or v.is_floating_point() else x.example.clone()
        for x, v in zip(subject.sources, drawn)
    ]


def _accepted(subject: Subject, call: VerifiedCall) -> bool:
    """Returns whether members answer to a call's inputs."""
    return all(_answers_to(subject, x) for x in (call.inputs if call.pattern == "each" else call.inputs[:1]))


def _answers_to(subject: Subject, inputs: Sequence[torch.Tensor]) -> bool:
    """Returns whether member 0 answers.

    A member may reject indices that were drawn for other sizes, for example the edges of a graph with fewer
    nodes.
    """
    subject.before_call(inputs)
    try:
        subject.answers(0, inputs)
    except (RuntimeError, ValueError, IndexError) as e:
        if bytes_lacking(e):
            raise
        return False
    return True


def _flops(subject: Subject) -> float:
    """Returns the floating point operations of member 0 for one row, or for the call without a batch.

    An op that torch's counter does not know, such as an LSTM layer, counts as none.
    """
    sizes = {**subject.sizes, **({subject.batch: 1} if subject.batch else {})}
    counter = FlopCounterMode(display=False)
    with counter:
        answered = subject.fits(sizes) and _answers_to(subject, draw_all(subject.sources, sizes, 1))
    return float(counter.get_total_flops()) if answered else 0.0


def _large(subject: Subject, affordable: float) -> int:
    """Returns the large batch: it gives at least `SAMPLES` numbers in each output that grows with the batch.

    affordable: rows that a verification of usual length can have. `LEAST` rows are always possible.
    """
    few = _numbers(subject, {**subject.sizes, subject.batch: LEAST})
    if few is None:
        return subject.sizes[subject.batch]
    more = _numbers(subject, {**subject.sizes, subject.batch: 2 * LEAST}) or [n + 1 for n in few]
    growing = [n for n, m in zip(few, more) if m > n]  # a sum over the batch has one number at any batch
    needed = min(SAMPLES, math.ceil(SAMPLES * LEAST / min(growing))) if growing else LEAST
    return next(
        (
            b
            for b in range(max(LEAST, math.floor(min(needed, affordable))), 0, -1)
            if subject.fits({**subject.sizes, subject.batch: b})
        ),
        subject.sizes[subject.batch],
    )


def _numbers(subject: Subject, sizes: Mapping[str, int]) -> list[int] | None:
    """Returns how many numbers each floating output of a call has; None if member 0 does not answer."""
    drawn = draw_all(subject.sources, sizes, 1)
    if not _answers_to(subject, drawn):
        return None
    values = subject.answers(0, drawn)
    return [v.numel() for v in values if isinstance(v, torch.Tensor) and v.numel() and floating(v)]


def _other_sizes(subject: Subject) -> dict[str, int]:
    """Returns sizes of the other dims that differ from the example's, if bounds and guards allow them."""
    found = dict(subject.sizes)
    for letter, size in subject.sizes.items():
        if letter == subject.batch:
            continue
        for other in (size + 2, size - 2, size + 1, size - 1, 2 * size, size // 2):
            if other > 0 and subject.fits({**found, letter: other}):
                found[letter] = other
                break
    if found != dict(subject.sizes) and subject.batch and subject.fits({**found, subject.batch: 3}):
        found[subject.batch] = 3
    return found
