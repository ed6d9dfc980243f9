"""The machine that something is measured on, and that a measured plan is for."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def name_of(device: str) -> str:
    """`AMD EPYC 9R14, AVX512`, or the GPU's name. device: as torch names it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """The processor's name as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # another system: what Python says
    return platform.processor() or platform.machine()
