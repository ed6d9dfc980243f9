"""Describes where a benchmark ran: the device, versions, threads, commit and command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(device: str, threads: int) -> dict[str, Any]:
    """Returns where and with what a run was made."""
    import safetensors
    import torch

    import widepack

    versions = {
        "widepack": str(getattr(widepack, "__version__", "")),
        "torch": str(torch.__version__),
        "safetensors": str(safetensors.__version__),
        "python": platform.python_version(),
        **_installed("onnxruntime"),
        **(_installed("triton") | {"cuda": str(torch.version.cuda)} if device.startswith("cuda") else {}),
    }
    return {
        **({"tf32": tf32()} if device.startswith("cuda") else {}),
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
        "threads": threads,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def tf32() -> dict[str, bool]:
    """Returns whether products and convolutions in float32 may round their factors to TF32.

    `NVIDIA_TF32_OVERRIDE=0` switches TF32 off for all libraries of the process, against torch's settings.
    """
    import torch

    from widepack.verification.tf32_bounds import tf32_kinds

    kinds = tf32_kinds(torch.device("cuda"))
    return {kind: kind in kinds for kind in ("products", "convolutions")}


def _installed(name: str) -> dict[str, str]:
    """Returns the version of a package that a baseline needs, if it is installed."""
    try:
        return {name: metadata.version(name)}
    except metadata.PackageNotFoundError:
        return {}


def device_name(device: str) -> str:
    """Returns the device with its name: `cpu (AMD EPYC)`, `cuda (NVIDIA H200)`."""
    if device.startswith("cuda"):
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    from widepack.system.machine import cpu_name

    return f"{device} ({cpu_name()})"


def commit() -> str:
    """Returns the git commit of this source tree, with `+` where files have changed; empty outside of a
    repository.
    """
    folder = Path(__file__).resolve().parents[2]
    if folder.name != "bench" or not (folder.parent / ".git").exists():
        return ""  # An installed package: a repository around it is not widepack's.
    try:
        git = ["git", "-C", str(folder)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if changed else "")
