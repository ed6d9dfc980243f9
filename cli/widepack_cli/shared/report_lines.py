"""Lines that several commands print about a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def damaged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each output in which only some members answer NaN or inf."""
    return [
        f"{'not finite':<13}member {r['member']}: {r['numbers']:,} of {r['of']:,} numbers "
        f"of output {r['output']} "
        f"of {r['entry']} are NaN or inf, and the answers of all other members are finite: check its weights"
        for r in rows
    ]


def unused_lines(unused: Mapping[str, int]) -> list[str]:
    """Returns a line about the names in the checkpoints that no member uses; none if there are none."""
    from widepack.checkpoints.unused_names import unused_text

    return [f"{'left out':<13}{unused_text(unused)}: names that the model does not have"] if unused else []


def contradicted_lines(contradicted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each model argument that contradicts the checkpoints' hyperparameters."""
    return [
        f"{'contradicted':<13}{name}={row['given']!r} was given, the checkpoints' hyper_parameters have"
        f" {row['stored']!r}, which is another program"
        for name, row in contradicted.items()
    ]
