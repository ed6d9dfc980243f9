"""Records where an artifact comes from: versions, system, date, command, git commit."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.factory import Factory
from ..planning.request import StrategyRequest
from ..version import __version__

SHARD_SIZE = "max_shard_size"
"""The field of the provenance with the requested size of a weights file."""
PART_COUNTS = "shards"
"""The field with the numbers of parts of the members that have programs of their own."""


def provenance_of(
    factory: Factory, strategies: StrategyRequest, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the provenance of a build. seconds: the time of each stage so far."""
    return {
        "widepack": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": timestamp(),
        "command": command_line(),
        "model": factory.call[:500],
        "dtype": str(factory.dtype or "").removeprefix("torch."),
        "strategy": [strategies.whole, *strategies.preferred],
        "git": _git_commit(),
        "seconds": dict(seconds),
    }


def timestamp() -> str:
    """Returns the time now, in UTC, as ISO 8601 text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def command_line() -> str:
    """Returns the command line of this process, at most 2000 characters."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000]


def _git_commit() -> str:
    """Returns the commit of the working folder; "" if it is not in a git checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
