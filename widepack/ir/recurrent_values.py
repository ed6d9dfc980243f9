"""Computes the shapes that torch's recurrent layers return, without a run of their steps."""

from __future__ import annotations

from typing import Any

import torch

from . import ops


def recurrent_result(op: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    """Returns the result of a recurrent layer, on the meta device or with fake tensors.

    torch itself would run one step after the other: seconds for a long sequence.

    Args:
        op: The name of the op, with overload.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The answer, with the strides that torch gives it, and the states. None if the arguments have no such
        result.
    """
    given = ops.bind(op, tuple(args), dict(kwargs))
    x, h = given.get("input", given.get("data")), given.get("hx")
    given_states = list(h) if isinstance(h, (list, tuple)) else [h]
    states = [s for s in given_states if isinstance(s, torch.Tensor) and s.dim()]
    if not isinstance(x, torch.Tensor) or not x.dim() or not states or len(states) < len(given_states):
        return None
    width = states[0].shape[-1] * (2 if given.get("bidirectional") else 1)
    if given.get("batch_first") and x.dim() == 3:  # the steps are made one after the other, then transposed
        answer = x.new_empty([x.shape[1], x.shape[0], width]).transpose(0, 1)
    else:
        answer = x.new_empty([*x.shape[:-1], width])
    return (answer, *(s.new_empty(s.shape) for s in states))
