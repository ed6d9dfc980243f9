"""Divides the members into adjacent parts of about equal bytes of weights, one for each device or process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

from widepack_artifacts.manifest_weights import ITEM_BYTES, Weight

from ..errors import UsageError


def member_bytes(weights: Iterable[Weight], count: int) -> list[int]:
    """Returns the bytes of each member's own weights. Weights that all members share are not counted.

    count: N.
    """
    sizes = [0] * count
    for weight in weights:
        if weight.kind == "shared":
            continue
        shapes = weight.shape if weight.kind == "ragged" else [weight.shape] * len(sizes)
        for i, shape in enumerate(shapes):
            sizes[i] += prod(shape) * ITEM_BYTES[weight.dtype]
    return sizes


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


def parts_in(weights: Sequence[Weight], members: int, counts: Iterable[int]) -> list[range]:
    """Returns the parts of all divisions of the members, each part once.

    Args:
        weights: The table of weights.
        members: N.
        counts: The number of parts of each division.

    Raises:
        UsageError: There are more parts than members.
    """
    sizes = member_bytes(weights, members)
    return list(dict.fromkeys(part for count in counts for part in divided(sizes, count, "shards")))
