"""How widepack's own ops are made known: to torch, which traces and exports them, and to the flat graph, which calls the function behind an op without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("widepack", "DEF")  # type: ignore[no-untyped-call]
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""`widepack.linear.default` -> the function."""


def define(schema: str, rule: Callable[..., Any], fake: Callable[..., Any] | None) -> None:
    """An op of the namespace `widepack`. schema: as `torch.library` takes it. rule: computes it. fake: gives an answer of the right sizes; None where rule does on fakes, too."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, rule, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"widepack::{name}", fake, lib=_LIBRARY)
    FUNCTIONS[f"widepack.{name}.default"] = rule
