"""Makes a new member's module with its own weights and the extra state of another member.

If it answers as with its own extra state, forward does not depend on the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .extra_state import NotData, equal
from .factory import Factory
from .loading import load
from .newcomer import Newcomer


def differing_names(own: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """Returns the names of extra states that are not equal."""
    found = []
    for name in sorted({*own, *extra}):
        try:
            same = name in own and name in extra and equal({name: own[name]}, {name: extra[name]})
        except NotData:
            same = False
        if not same:
            found.append(name)
    return found


def with_extra(factory: Factory, new: Newcomer, extra: Mapping[str, Any]) -> nn.Module:
    """Returns a new member's module in eval mode, with its own weights and other extra state."""
    checkpoint = new.aligned.checkpoints[0]
    given = checkpoint.given or checkpoint
    module, state = factory.fresh(checkpoint), given.state_dict()
    state.update(extra)
    load(module, given, state)
    return module.eval()
