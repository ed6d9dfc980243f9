"""Writes into a part of a tensor, where the part is reached by a chain of views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir import ops

SCATTERS = {
    "aten.select_scatter.default": "aten.select.int",
    "aten.slice_scatter.default": "aten.slice.Tensor",
}
"""The op that reads the part which each op writes. Both have the same arguments after the tensors."""

RESHAPES = frozenset({"aten.view.default", "aten.reshape.default"})
"""Ops that keep the order of the elements."""

Place = tuple[Any, ...]
"""The arguments of a view after its tensor, with their defaults."""

_FUNCTIONS = {name: ops.function(name) for name in (*SCATTERS, *SCATTERS.values())}
_SCATTER_OF = {view: scatter for scatter, view in SCATTERS.items()}


def write_part(
    base: torch.Tensor, source: torch.Tensor, views: Sequence[str], places: Sequence[Place]
) -> torch.Tensor:
    """Writes into a part of a tensor.

    base: no other value may be in its memory. source: what is written. views: the names of the ops that lead
    to the part, the outermost first. places: the arguments of each of them. With gradients, for a source of
    another shape, and where a reshape must copy, the ops that copy run.

    Returns: `base`, or a tensor with other memory.
    """
    plain = type(base) is torch.Tensor and type(source) is torch.Tensor and not torch.is_grad_enabled()
    parts = [base]
    for view, place in zip(views, places):
        part = parts[-1].reshape(*place) if view in RESHAPES else _FUNCTIONS[view](parts[-1], *place)
        plain = plain and (view not in RESHAPES or part.data_ptr() == parts[-1].data_ptr())
        parts.append(part)
    if plain and parts[-1].shape == source.shape:
        parts[-1].copy_(source)
        return base
    for view, place, part in zip(reversed(views), reversed(places), reversed(parts[:-1])):
        if view in RESHAPES:
            source = source.reshape(part.shape)
        else:
            source = _FUNCTIONS[_SCATTER_OF[view]](part, source, *place)
    return source
