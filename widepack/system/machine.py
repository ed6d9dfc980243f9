"""Names this machine, for measured plans, and lists the backends that it can run."""

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
    """`AMD EPYC 9R14, AVX512`, or the name of the GPU. device: a device name of torch."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """The name of the processor, from the operating system."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the name that Python knows
    return platform.processor() or platform.machine()


@cache
def instructions() -> str:
    """The instruction sets of this processor, for code that is compiled for all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {cpu_name()}"
    flags = next((x.partition(":")[2] for x in lines if x.startswith(("flags", "Features"))), "")
    return " ".join([platform.machine(), *sorted(flags.split())])


CHOOSABLE = ("eager", "aot", "onnxruntime")
"""Backends that a measured plan may name: they run in a new process without compiling there."""


def backends_here(device: str) -> tuple[str, ...]:
    """The backends of `CHOOSABLE` that can be measured here. `aot` needs a C++ compiler."""
    backends = ["eager"]
    if not device.startswith("cpu"):
        return tuple(backends)
    if all(find_spec(name) is not None for name in ("onnxruntime", "onnx", "onnxscript")):
        backends.append("onnxruntime")
    if shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++"):
        backends.append("aot")
    return tuple(backends)
