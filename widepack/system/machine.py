"""The machine that something is measured on, and that a measured plan is for: its name, and which backends it can run."""

from __future__ import annotations

import os
import platform
import shutil
from functools import cache
from importlib.util import find_spec
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


CHOOSABLE = ("eager", "aot", "onnxruntime")
"""Backends that a measured plan may name: what runs in a fresh process without compiling there."""


def backends_here(device: str) -> tuple[str, ...]:
    """Those of `CHOOSABLE` that can be measured here: `aot` needs a C++ compiler once, now."""
    found = ["eager"]
    if not device.startswith("cpu"):
        return tuple(found)
    if all(find_spec(name) is not None for name in ("onnxruntime", "onnx", "onnxscript")):
        found.append("onnxruntime")
    if shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++"):
        found.append("aot")
    return tuple(found)
