"""Divides a rectangle into boxes with given areas, as square as is simple: a squarified treemap.

Bruls, Huizing, van Wijk: Squarified Treemaps, 2000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. x, y: its upper left corner."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], inside: Box) -> list[Box]:
    """Returns a box for each size, in order. sizes: positive, the largest first."""
    scale = inside.width * inside.height / sum(sizes) if sizes else 0.0
    areas = [s * scale for s in sizes]
    boxes: list[Box] = []
    while areas:
        side = min(inside.width, inside.height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
            count += 1
        row, inside = _row(areas[:count], inside)
        boxes += row
        areas = areas[count:]
    return boxes


def _worst(areas: Sequence[float], side: float) -> float:
    """Returns the largest ratio of sides, if these areas are one row along a side."""
    thickness = sum(areas) / side
    return max(max(a / thickness**2, thickness**2 / a) for a in areas)


def _row(areas: Sequence[float], inside: Box) -> tuple[list[Box], Box]:
    """Returns one row of boxes along the shorter side, and what is left."""
    x, y, width, height = inside.x, inside.y, inside.width, inside.height
    boxes = []
    if width >= height:
        thickness = sum(areas) / height
        for area in areas:
            boxes.append(Box(x, y, thickness, area / thickness))
            y += area / thickness
        return boxes, Box(x + thickness, inside.y, max(width - thickness, 1e-9), height)
    thickness = sum(areas) / width
    for area in areas:
        boxes.append(Box(x, y, area / thickness, thickness))
        x += area / thickness
    return boxes, Box(inside.x, y + thickness, width, max(height - thickness, 1e-9))
