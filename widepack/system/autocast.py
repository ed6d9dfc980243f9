"""Switches modes of torch off that would change programs: autocast, and the default device."""

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


@contextmanager
def plain_modes() -> Iterator[None]:
    """Switches autocast off and makes the CPU the default device, inside a with block that makes programs."""
    with ExitStack() as stack:
        stack.enter_context(autocast_off())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
