"""Writes a result document as one JSON file, and reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widepack.errors import UsageError


def write_whole(out: Path, document: Mapping[str, Any]) -> None:
    """Replaces the file in one step: an interruption never loses the earlier results."""
    temporary = out.with_name(f".{out.name}.new")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)


def read_document(path: Path, form: str, what: str) -> dict[str, Any] | None:
    """Reads the document of an earlier run; None where the file does not exist.

    form: the document's format and version. what: the command or suite in words. Raises: UsageError for
    another kind of file.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as JSON ({error}); give another path, or remove it"
        ) from error
    if not isinstance(document, dict) or document.get("format") != form:
        raise UsageError(f"{path} is no document of {what} ({form}); give another path")
    return document


def resumed(path: Path, form: str, what: str, head: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a document of rows that a run goes on with, or makes a new one.

    head: fields that all runs of a document have in common. Raises: UsageError for another document.
    """
    document = read_document(path, form, what)
    if document is None:
        return {"format": form, **head, "rows": {}, "summary": {}}
    rows = document.get("rows")
    if not isinstance(rows, dict) or not all(isinstance(row, dict) and row for row in rows.values()):
        raise UsageError(
            f"{path} is damaged: its format is {form}, but its rows are not those of this format; "
            "give another path, or remove it"
        )
    for name, value in head.items():
        if document.get(name) != value:
            raise UsageError(
                f"{path} has rows of the {name} {document.get(name)!r}, but this run is for {value!r}; "
                "give each its own file"
            )
    return document
