"""Random structures and their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def crystal(atoms: int, seed: int, least: float = 0.9, spacing: float = 1.9) -> Any:
    """Returns positions `[A, 3]` in angstrom, four kinds `[A]`, and a cubic cell `[3, 3]`, as arrays."""
    rng = np.random.default_rng(seed)
    edge = spacing * atoms ** (1 / 3)
    placed: list[Any] = []
    while len(placed) < atoms:
        point = rng.uniform(0, edge, 3)
        apart = np.array(placed).reshape(-1, 3) - point
        apart -= edge * np.round(apart / edge)
        if not placed or np.linalg.norm(apart, axis=1).min() > least:
            placed.append(point)
    return np.array(placed), rng.integers(0, 4, atoms), np.eye(3) * edge


def periodic_pairs(positions: Any, cell: Any, cutoff: float) -> Any:
    """Returns rows (i, j, image of j in three directions) of all pairs within the cutoff, sorted by i."""
    images = int(np.ceil(cutoff / cell[0, 0]))
    found = []
    for image in np.ndindex(*(2 * images + 1,) * 3):
        place = np.array(image) - images
        near = np.linalg.norm(positions[None] + place @ cell - positions[:, None], axis=-1) < cutoff
        if not place.any():
            np.fill_diagonal(near, False)
        i, j = near.nonzero()
        found.append(np.stack([i, j, *(np.full(len(i), n) for n in place)], 1))
    pairs = np.concatenate(found)
    return pairs[np.lexsort(pairs.T[::-1])]


def cluster(
    atoms: int, seed: int, least: float = 0.85, elements: tuple[int, ...] = (1, 6, 7, 8)
) -> tuple[Tensor, Tensor]:
    """Returns atomic numbers `[A]` and positions `[A, 3]` of a cluster in which each element is present."""
    generator = torch.Generator().manual_seed(seed)
    side = 1.75 * (atoms ** (1 / 3)) + 0.5
    positions = torch.rand(1, 3, generator=generator) * side
    while len(positions) < atoms:
        point = torch.rand(1, 3, generator=generator) * side
        if torch.cdist(positions, point).min() > least:
            positions = torch.cat([positions, point])
    numbers = torch.tensor(elements)[torch.randint(0, len(elements), (atoms,), generator=generator)]
    numbers[: len(elements)] = torch.tensor(elements)
    return numbers, positions


def pairs(positions: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Returns the two atoms of each pair within the cutoff."""
    distance = torch.cdist(positions, positions).fill_diagonal_(1e9)
    i, j = (distance < cutoff).nonzero().unbind(1)
    return i.contiguous(), j.contiguous()


def molecules(atoms: int, seed: int, cutoff: float, count: int = 2) -> dict[str, Tensor]:
    """Returns several clusters of together `atoms` atoms: numbers, positions, pairs, cluster of each atom."""
    sizes = [atoms // count] * (count - 1) + [atoms - (count - 1) * (atoms // count)]
    found: dict[str, list[Tensor]] = {k: [] for k in ("numbers", "positions", "i", "j", "of")}
    first = 0
    for number, size in enumerate(sizes):
        numbers, positions = cluster(size, 10 * seed + number)
        i, j = pairs(positions, cutoff)
        parts = (numbers, positions, i + first, j + first, torch.full((size,), number))
        for key, value in zip(found, parts):
            found[key].append(value)
        first += size
    return {**{k: torch.cat(v) for k, v in found.items()}, "sizes": torch.tensor(sizes)}
