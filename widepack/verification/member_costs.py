"""Checks what the member programs of an untrusted file take, before one of them runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    for number in range(len(subject.programs)):
        for at in sizes:
            check_call(title, subject, draw_all(subject.sources, at, 1), number)


def check_call(title: str, subject: Subject, inputs: Sequence[torch.Tensor], number: int = 0) -> None:
    """Checks what a member program takes on these inputs: `Subject.before_call`.

    number: of the program. Raises: OverBudget.
    """
    weights = subject.arguments(list(subject.signatures).index(number))
    check_member_run(title, subject.programs[number], [*weights, *inputs])
