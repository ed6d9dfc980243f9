"""Measures what this machine can do at most, as a device of `widepack/system/devices.py`.

This module imports torch only to measure.
"""

from __future__ import annotations

from widepack.system.devices import Device

HERE = "here"
"""The name by which `widepack analyze --device` takes this machine."""


def measured_here(dtype: str, moved_bytes: int) -> Device:
    """Measures this machine's processor with the threads of this process. Takes about a second.

    dtype: of the products. moved_bytes: the size of the data that is streamed.
    """
    import torch

    from widepack.system.machine import name_of

    from .roofline import ceilings

    threads = torch.get_num_threads()
    found = ceilings(moved_bytes, getattr(torch, dtype), "cpu", threads)
    name = f"{name_of('cpu')}, {threads} thread{'' if threads == 1 else 's'}"
    return Device(name, {dtype: found.gemm}, found.stream, "measured")
