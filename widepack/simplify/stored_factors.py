"""Names the factors of an artifact's weights, as `with_factors` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest_weights import Weight

from .factored_weights import FactorNames


def stored_factors(
    factored: Iterable[FactoredWeight], table: Mapping[str, Weight], dtypes: Mapping[str, str] | None = None
) -> dict[str, FactorNames]:
    """Returns the factors of all factored weights, by the weights' names.

    Args:
        factored: The weights.
        table: The stored weights by name.
        dtypes: For each dtype that a load casts the new one. Default: none is cast.
    """
    found = {}
    for w in factored:
        left = table[w.left]
        dtype = (dtypes or {}).get(left.dtype, left.dtype)
        shape = tuple(table[w.scale].shape) if w.scale else ()
        found[w.name] = FactorNames(w.base, w.left, w.right, int(left.shape[1]), dtype, w.scale, shape)
    return found
