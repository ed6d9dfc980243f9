"""Reads the document of a suite, which a later run goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widepack.errors import UsageError


def read_document(out: Path, form: str, what: str) -> dict[str, Any]:
    """Reads the document of a suite; a new one where the file does not exist.

    form: the document's format and version. what: the suite in words. Raises: UsageError for another kind of
    file.
    """
    if not out.exists():
        return {"format": form, "rows": {}, "summary": {}}
    try:
        document: Any = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{out} cannot be read as JSON ({error}); give another path, or remove it"
        ) from error
    if not isinstance(document, dict) or document.get("format") != form:
        raise UsageError(f"{out} is no document of {what} ({form}); give another path")
    return document
