"""`widepack info`: shows versions and devices, for example for a bug report."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from typing import Any

import click

from ..shared.options import emit, example, json_option

PACKAGES = (
    "widepack",
    "torch",
    "safetensors",
    "click",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "transformers",
    "scikit-learn",
)


@click.command(epilog=example("widepack info", "widepack info --json"))
@json_option
def command(as_json: bool) -> None:
    """Show the versions and devices that widepack sees here."""
    found = collect()
    if as_json:
        emit(found)
        return
    for group, rows in found.items():
        click.echo(group)
        width = max(map(len, rows))
        for name, value in rows.items():
            click.echo(f"  {name:<{width}}  {value if value not in (None, '') else '-'}")


def collect() -> dict[str, dict[str, Any]]:
    """Returns packages, system and devices."""
    import torch

    from widepack.system.machine import cpu_name
    from widepack_bench.report.environment import commit

    devices: dict[str, Any] = {
        "cpu": f"{cpu_name()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = (
                f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}"
            )
    compiler = next(
        (
            path
            for name in (os.environ.get("CXX"), "g++", "clang++", "cl")
            if name and (path := shutil.which(name))
        ),
        None,
    )
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "C++ compiler": compiler,
            "torch CUDA": torch.version.cuda,
            "source commit": commit(),
        },
        "devices": devices,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
