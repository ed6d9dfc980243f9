"""Shows the section `Example:` of docstrings as code, like `Examples:` (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section before griffe parses the docstring. Without it, griffe shows text."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Renames the section in every module, class, function and attribute that griffe reads."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
