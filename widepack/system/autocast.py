"""Switches `torch.autocast` off where programs are made and where they run in the dtypes that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda")  # where programs run


@contextmanager
def autocast_off() -> Iterator[None]:
    """Switches autocast off for every device on which programs run, inside a with block."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
