"""Compares the answers of `route` with those of the baselines, and times them in one race."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import widepack
from widepack_bench.measure.race import OURS, race


def raced(
    ens: widepack.WideModel,
    inputs: Sequence[Tensor],
    ids: Sequence[int],
    calls: Mapping[str, Callable[[], Any]],
    seconds: float,
    limit_s: float = math.inf,
) -> dict[str, Any]:
    """Returns the figures of a row.

    Args:
        ens: The model.
        inputs: The inputs of the call.
        ids: The member of each row.
        calls: The baselines by name, `dict` and `sorted` among them.
        seconds: The time of the race, as `race` takes it.
        limit_s: The seconds after which no round starts.

    Raises:
        AssertionError: A baseline answers otherwise than `route`.
    """
    right = tree_leaves(ens.route(*inputs, member=ids))
    for call in calls.values():
        for a, b in zip(tree_leaves(call()), right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(b.abs().max())))
    sync = torch.cuda.synchronize if inputs[0].is_cuda else None
    run = race(partial(ens.route, *inputs, member=ids), calls, budget_s=seconds, sync=sync, limit_s=limit_s)
    better = run.ratio("dict"), run.ratio("sorted")
    return {
        "active": len(set(ids)),
        "ms": run.median_ms(OURS),
        "baselines_ms": {k: run.median_ms(k) for k in calls},
        "fastest": run.fastest,
        "ratio": run.ratio(run.fastest).to_json(),
        "over_dict": min(better, key=lambda r: r.value).to_json(),
        "noise": run.noise.to_json(),
        "quiet": run.quiet,
    }
