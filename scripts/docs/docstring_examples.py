"""Changes what griffe reads of the source, for the pages of the Python API.

- The section `Example:` of docstrings is shown as code, like `Examples:`.
- A method or property without a docstring has the one that it overrides, as in Python (`ModelCalls`).
- A function with overloads has one signature: its own, with all options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe


class ReadableDocstrings(griffe.Extension):
    """Changes docstrings and signatures before griffe parses them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Renames the section in every module, class, function and attribute that griffe reads."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Completes the classes of a package, when all its modules are read."""
        for module in (pkg, *(m for m in _modules(pkg))):
            for found in module.members.values():
                if found.is_alias:
                    continue
                if found.is_function:
                    found.overloads = None
                elif found.is_class:
                    _inherit(found)


def _modules(package: Any) -> Iterator[Any]:
    """Yields the modules of a package, of its packages too."""
    for module in package.modules.values():
        if not module.is_alias:
            yield module
            yield from _modules(module)


def _inherit(cls: Any) -> None:
    """Gives members of a class the docstrings of those that they override."""
    for name, member in cls.members.items():
        if member.is_alias or name.startswith("_") or member.docstring is not None:
            continue
        overridden = (base.members[name] for base in cls.mro() if name in base.members)
        member.docstring = next((o.docstring for o in overridden if o.docstring is not None), None)
