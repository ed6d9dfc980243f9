"""Patterns of everyday code as small modules, one file for each family. `CASES` has all of them by name."""

from __future__ import annotations

from networks.patterns import (
    activations,
    arithmetic,
    attention,
    blocks,
    convolutions,
    dynamic_dims,
    embeddings,
    fourier,
    in_place,
    inputs_and_outputs,
    losses,
    masks,
    norms,
    recurrent,
    resampling,
    shapes,
    weights,
)
from networks.patterns.case import Case

_FAMILIES = (
    shapes,
    arithmetic,
    masks,
    inputs_and_outputs,
    weights,
    in_place,
    convolutions,
    norms,
    attention,
    recurrent,
    embeddings,
    resampling,
    activations,
    blocks,
    fourier,
    losses,
    dynamic_dims,
)
CASES: dict[str, Case] = {name: case for family in _FAMILIES for name, case in family.CASES.items()}
assert len(CASES) == sum(len(family.CASES) for family in _FAMILIES), "two patterns have the same name"
