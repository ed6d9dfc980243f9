"""Holds what the table of kernel times needs to know of a kernel. It imports nothing, since a load reads
profiles without predicting anything.
"""

from __future__ import annotations

from dataclasses import dataclass

ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel.

    kind: of the times that apply. count, rows, width: of products; count is 0 for another kernel. elements:
    what another kernel goes through. weight_bytes: the bytes of weights that it reads. made_bytes: the bytes
    of new memory that it writes. passes: how often it reads its weights.
    """

    kind: str
    count: float = 0.0
    rows: float = 0.0
    width: float = 0.0
    elements: float = 0.0
    weight_bytes: float = 0.0
    made_bytes: float = 0.0
    passes: float = 1.0
