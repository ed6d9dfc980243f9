"""Changes JSON documents at random, and draws the values that replace others."""

from __future__ import annotations

import copy
import random
from typing import Any

INTS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    255,
    65536,
    2**20,
    2**30,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
]
TEXTS = [
    "",
    "x",
    "../../etc/passwd",
    "os.system",
    "__import__('os').system('touch canary')",
    "\x1b[2J",
    "forward",
    "float32[B,3]",
    "é" * 3,
    "a" * 2000,
    "nan",
    "cpu",
    "aot",
    "__class__",
]


def paths(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """Returns every place in a document, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < limit:
        part = waiting.pop()
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            found.append((part, key))
            if isinstance(part[key], (dict, list)):
                waiting.append(part[key])
    return found


def junk(draw: random.Random) -> Any:
    """Returns a value that is wrong in most places."""
    deep: Any = 1
    for _ in range(draw.choice([3, 40, 150])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return draw.choice(
        [
            draw.choice(INTS),
            draw.choice(TEXTS),
            None,
            True,
            False,
            1.5,
            -0.0,
            1e308,
            [],
            {},
            [[]],
            [1, 2],
            {"ref": "x"},
            {"str": "x"},
            {"float": "nan"},
            deep,
            ["a"] * 300,
        ]
    )


def mutate_json(draw: random.Random, document: Any, donors: list[Any]) -> None:
    """Changes a document once, in place."""
    places = paths(document)
    if not places:
        return
    part, key = draw.choice(places)
    how = draw.randrange(8)
    if how <= 2:
        part[key] = junk(draw)
    elif how == 3 and isinstance(part[key], int):
        part[key] = draw.choice([part[key] + 1, -part[key], part[key] * 2**31, draw.choice(INTS)])
    elif how == 4:
        del part[key]
    elif how == 5:
        part[key] = copy.deepcopy(_at(draw.choice(paths(draw.choice(donors)) or places)))
    elif isinstance(part, list) and len(part) > 1:
        other = draw.randrange(len(part))
        if how == 6:
            part[key], part[other] = part[other], part[key]
        else:
            part.insert(other, copy.deepcopy(part[key]))
    elif isinstance(part, dict):
        part[draw.choice(TEXTS)] = part.pop(key)


def _at(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]
