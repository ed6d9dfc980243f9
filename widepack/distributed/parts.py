"""Divides the members into adjacent parts of about equal bytes of weights, one for each device or process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import prod

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weight_table import ITEM_BYTES

from ..errors import UsageError


def member_bytes(manifest: Manifest) -> list[int]:
    """Returns the bytes of each member's own weights. Weights that all members share are not counted."""
    found = [0] * len(manifest.members)
    for weight in manifest.weights:
        if weight.kind == "shared":
            continue
        shapes = weight.shape if weight.kind == "ragged" else [weight.shape] * len(found)
        for i, shape in enumerate(shapes):
            found[i] += prod(shape) * ITEM_BYTES[weight.dtype]
    return found


def divided(sizes: Sequence[int], count: int, what: str) -> list[range]:
    """Divides members into adjacent parts.

    Args:
        sizes: The bytes of each member's own weights, in the order in which they are loaded.
        count: The number of parts.
        what: What has a part, for messages: `devices`.

    Returns:
        The places of the members of each part; each part has at least one.

    Raises:
        UsageError: There are more parts than members.
    """
    members = len(sizes)
    if count > members:
        raise UsageError(
            f"{count} {what} for {members} member{'s' * (members > 1)}; each takes at least one member, "
            f"so give at most {members}"
        )
    sums = list(accumulate((size or 1) for size in sizes))  # members without own weights count the same
    ends = [0]
    for part in range(1, count):
        share = sums[-1] * part / count
        end = bisect_left(sums, share) + 1
        before = sums[end - 2] if end > 1 else 0
        if share - before < sums[end - 1] - share:  # the member at the border belongs to the later part
            end -= 1
        ends.append(min(max(end, ends[-1] + 1), members - (count - part)))
    return [range(a, b) for a, b in zip(ends, [*ends[1:], members])]
