"""Counts rows that are computed and are of no call: rows that run again, so that members have as many rows as
a program needs.
"""

from __future__ import annotations

import threading


class _Count(threading.local):
    rows = 0


_COUNT = _Count()


def padding_rows() -> int:
    """Returns how many such rows the calls of `route` on this thread have computed so far."""
    return _COUNT.rows


def count_padding(rows: int) -> None:
    """Counts rows of a call that runs on this thread."""
    _COUNT.rows += rows
