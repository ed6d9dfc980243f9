"""Makes and reads the JSON document of `widepack bench-layers`, and checks the paths it is written to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widepack.errors import UsageError

from ..report import json_file

FORMAT = "widepack.primitives/1"


def new_document(preset: str, pattern: str, tune: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "preset": preset,
        "pattern": pattern,
        "tuned": tune,
        "environment": {},
        "rows": {},
        "summary": {},
    }


def read_document(path: Path, preset: str, pattern: str, tune: bool) -> dict[str, Any]:
    """Reads the document of an earlier run; a new one where the file does not exist.

    Raises: UsageError for another kind of file, or a document of other options.
    """
    document = json_file.read_document(path, FORMAT, "bench-layers")
    if document is None:
        return new_document(preset, pattern, tune)
    rows = document.get("rows")
    if not isinstance(rows, dict) or not all(
        isinstance(row, dict) and ("error" in row or "verdict" in row) for row in rows.values()
    ):
        raise UsageError(
            f"{path} is damaged: its format is {FORMAT}, but its rows are not those of this format; "
            "give another path, or remove it"
        )
    if document.get("tuned", False) is not tune:
        raise UsageError(
            f"{path} has rows measured {'with' if document.get('tuned') else 'without'} --tune; "
            "give each its own file"
        )
    for key, value in (("preset", preset), ("pattern", pattern)):
        if document.get(key) != value:
            raise UsageError(
                f"{path} has rows of the {key} {document.get(key)!r}, but this run is for {value!r}; "
                "give each its own file"
            )
    return document


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
