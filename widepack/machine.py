"""What a measured plan is for: the machine that it was measured on."""

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
    found = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                found = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # another system: what Python says
    return f"{found}, {torch.backends.cpu.get_cpu_capability()}"
