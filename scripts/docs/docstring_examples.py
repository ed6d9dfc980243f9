"""Shows the section `Example:` of docstrings as code, like `Examples:` (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section before griffe parses the docstring. Else griffe shows an `Example:` as text."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Runs for every module, class, function and attribute that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
