"""Damages files of an artifact at random. Their hashes no longer match."""

from __future__ import annotations

import json
import random

from fuzz_files import Files
from fuzz_json import mutate_json


def damaged(draw: random.Random, files: Files, others: list[Files]) -> tuple[str, Files]:
    """Damages one file. Returns the kind of damage and the files."""
    names = sorted(files)
    name = "manifest.json" if draw.random() < 0.4 else draw.choice(names)
    data = bytearray(files[name])
    how = draw.choice(
        [
            "bits",
            "cut",
            "splice",
            "double",
            "json" if name.endswith(".json") else "bits",
            "gone",
            "zeros",
            "empty",
        ]
    )
    if how == "bits":
        for _ in range(draw.choice([1, 1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[draw.randrange(len(data)) :]
    elif how == "splice":
        other = draw.choice(others)
        part = other[draw.choice(sorted(other))]
        a, b = sorted(draw.randrange(len(part) + 1) for _ in range(2))
        at = draw.randrange(len(data))
        data[at : at + draw.choice([0, b - a])] = part[a:b]
    elif how == "double":
        a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data[b:b] = data[a:b]
    elif how == "json":
        found = json.loads(data)
        mutate_json(draw, found, [found])
        text = json.dumps(found, separators=(",", ":"), indent=draw.choice([None, None, 1]))
        data = bytearray(text.encode("utf-8", "surrogatepass"))
    elif how == "zeros":
        a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data[a:b] = bytes(b - a)
    elif how == "empty":
        data = bytearray()
    changed = {**files, name: bytes(data)}
    if how == "gone":
        del changed[name]
    return f"{how} {name.partition('-')[0]}", changed
