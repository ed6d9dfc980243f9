"""Keeps the collector of garbage from what lives as long as the process."""

from __future__ import annotations

import gc


def settle() -> None:
    """Leaves out of later collections what lives now: the modules of torch and the artifacts.

    A full collection looks at each object, which takes 0.2 seconds with them, and one client that sends
    deeply nested JSON would cause a collection each second.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def settle_again() -> None:
    """Collects what has lived since `settle` and is no longer used, such as an artifact that was replaced."""
    if gc.get_freeze_count():
        settle()
