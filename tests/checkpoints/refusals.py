"""Checks the errors of checkpoints that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from widepack.checkpoints.discovery import open_checkpoint
from widepack.errors import CheckpointError


def refusal(path: Path, key: str | None = None) -> str:
    """Checks that a file is refused. Returns the message, which is one paragraph, after the file's name."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, key)
    text = str(caught.value)
    assert text.startswith(f"checkpoint {path}: ")
    assert "\n" not in text
    assert caught.value.exit_code == 1
    return text.removeprefix(f"checkpoint {path}: ")
