"""Makes and reads the JSON document of `widepack bench-layers`, and checks the paths it is written to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widepack.errors import UsageError

from ..report.json_file import resumed

FORMAT = "widepack.primitives/1"


def document_of(path: Path | None, preset: str, pattern: str, tune: bool) -> dict[str, Any]:
    """Reads the document of an earlier run; a new one without a path, or where the file does not exist.

    Raises: UsageError for another kind of file, or a document of other options.
    """
    head = {"preset": preset, "pattern": pattern, "tuned": tune}
    if path is None:
        return {"format": FORMAT, **head, "rows": {}, "summary": {}}
    return resumed(path, FORMAT, "bench-layers", head)


def check_environment(path: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to mix rows of two machines: a document has one environment. Raises: UsageError."""
    before = {"memory": {}, **before}
    different = [
        f"{key} {before.get(key)} and now {now[key]}"
        for key in ("device", "threads", "memory")
        if before.get(key) != now[key]
    ]
    if different:
        raise UsageError(
            f"{path} has rows measured elsewhere: {', '.join(different)}; give each its own file"
        )


def check_artifacts_folder(folder: Path) -> None:
    """Makes the folder for tuned artifacts, and checks that it is writable. Raises: UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"{folder}: files cannot be written there ({error.strerror}). Give another folder to --artifacts."
        ) from error
