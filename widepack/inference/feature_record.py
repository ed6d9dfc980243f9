"""Reads and checks the names of features that an artifact records: of the numbers of a row of an input.

The record is in the provenance, under `features`: `{"x": ["age", "height"]}`, in row-major order. `load`
checks its form and bounds. Columns of files are read by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from widepack_artifacts.fields import MAX_NAME, manifest_error, read_free_object
from widepack_artifacts.manifest import Manifest

from ..ir.tensor_type import parse_slot

FEATURES = "features"
"""The key of the provenance."""
Features = Mapping[str, tuple[str, ...]]


def row_numbers(type_: str) -> int | None:
    """Returns how many numbers a row of an input has; None if that is not fixed, or it has no rows."""
    sizes = parse_slot(type_).sizes
    fixed = [size for size in sizes if isinstance(size, int)]
    return prod(fixed) if len(fixed) == len(sizes) - 1 else None


def wrong_features(features: Mapping[str, object], inputs: Mapping[str, str]) -> str:
    """Returns why names cannot be those of the numbers of inputs; "" if they can.

    features: the names, by input. inputs: the types of all inputs.
    """
    for name, words in features.items():
        if name not in inputs:
            return f"there is no input {name[:60]!r}; the inputs are {', '.join(inputs)[:200]}"
        count = row_numbers(inputs[name])
        if count is None:
            return f"the input {name} is {inputs[name]}, whose rows have no fixed number of numbers"
        if not isinstance(words, (list, tuple)) or len(words) != count:
            given = len(words) if isinstance(words, (list, tuple)) else "no list"
            return f"the input {name} is {inputs[name]}, which takes {count} names; {given} given"
        for word in words:
            if not isinstance(word, str) or not word.isprintable() or not 0 < len(word) <= MAX_NAME:
                return f"{str(word)[:40]!r} is no name of a feature: 1 to {MAX_NAME} printable characters"
        if len(set(words)) != len(words):
            twice = next(w for k, w in enumerate(words) if w in words[:k])
            return f"two features of the input {name} are called {twice[:60]!r}"
    return ""


def input_types(manifest: Manifest) -> dict[str, str]:
    """Returns the type of each input of all entries."""
    return {i.name: i.type for entry in manifest.entries.values() for i in entry.inputs}


def read_features(manifest: Manifest) -> Features:
    """Returns the recorded names by input. Raises: ArtifactError for a record that no build writes."""
    if FEATURES not in manifest.provenance:
        return {}
    record = read_free_object(manifest.provenance[FEATURES], f"provenance: {FEATURES}")
    if why := wrong_features(record, input_types(manifest)):
        raise manifest_error(f"provenance: {FEATURES}: {why}")
    return {name: tuple(words) for name, words in record.items()}
