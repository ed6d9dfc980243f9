"""Checks what the member programs of an untrusted file take, before one of them runs."""

from __future__ import annotations

from ..runtime.admission import check_member_run
from ..spec.draws import draw_all
from .calls import SAMPLES
from .subject import Subject


def check_costs(title: str, subject: Subject) -> None:
    """Checks the member programs at the sizes of the example, and at the largest batch of a verification.

    title: what the programs are, in messages. Raises: ArtifactError naming the node that takes too much.
    """
    sizes = [subject.sizes]
    if subject.batch and subject.fits(large := {**subject.sizes, subject.batch: SAMPLES}):
        sizes.append(large)
    for number, program in enumerate(subject.programs):
        weights = subject.arguments(list(subject.signatures).index(number))
        for at in sizes:
            check_member_run(title, program, [*weights, *draw_all(subject.sources, at, 1)])
