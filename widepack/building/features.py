"""Reads the feature names that a user gives to a build: as texts, lists, or the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack_artifacts.errors import some

from ..errors import UsageError
from ..inference.feature_record import Features, row_numbers, wrong_features
from ..prediction.column_choice import column_range
from ..prediction.formats import open_table
from ..spec.names import names_in


def features_of(features: Any, inputs: Mapping[str, str]) -> Features:
    """Returns the names of the features by input.

    Args:
        features: For an input its names: a text such as `a,b,"c,d"` or `f0..f63`, a list, or the path of a
            table with these columns. Without an input they are those of the only one. None for no names.
        inputs: The types of all inputs.

    Raises:
        UsageError: They cannot be the names of these inputs.
    """
    if features is None:
        return {}
    if not isinstance(features, Mapping):
        taking = [name for name, type_ in inputs.items() if row_numbers(type_) is not None]
        if len(taking) != 1:
            first = next(iter(taking or inputs))
            raise UsageError(
                f"features are given for no input, and the inputs are {', '.join(taking or inputs)}; name "
                f"the input: {{{first!r}: [...]}} (--features {first}=a,b,c)"
            )
        features = {taking[0]: features}
    found = {name: _names(words) for name, words in features.items()}
    if why := wrong_features(found, inputs):
        raise UsageError(f"features: {why}{_given(found, inputs) if why.endswith(' given') else ''}")
    return found


def _given(found: Features, inputs: Mapping[str, str]) -> str:
    """Returns the names that are too many or too few, and how to name the right ones."""
    name = next(n for n, w in found.items() if len(w) != row_numbers(inputs[n]))
    words = [str(w) for w in found[name]]
    # the first column of a table is often its index
    example = ",".join(words[1:3] if len(words) > 3 else ["a", "b"])
    return (
        f": {some(words, 12)}\nName only those of the input, without identifiers and targets, in the order "
        f"of the model: features={{{name!r}: [...]}} (--features {name}={example},...)"
    )


def _names(words: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of a text, a list, or the columns of a table. Raises: UsageError, InputError."""
    if isinstance(words, Path) or (isinstance(words, str) and Path(words).exists()):
        return tuple(open_table(Path(words)).columns)
    if isinstance(words, str):
        return tuple(name for part in names_in(words, "features") for name in column_range(part))
    return tuple(words)
