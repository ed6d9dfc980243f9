"""Stub."""

from collections.abc import Sequence

from .checkpoints import Checkpoint
from .members import Factory


class Programs(Factory):
    def __init__(self, c: Sequence[Checkpoint]) -> None: ...
