"""Clips the gradients of N members, each by its own norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .rates import ONE_FOR_ALL, PerMember

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Sequence[float] | Tensor | PerMember,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of each member by the member's own norm, in place.

    Each member gets the gradients that `torch.nn.utils.clip_grad_norm_` gives it alone. A norm of NaN or inf
    reaches no other member.

    Args:
        parameters: The parameters `[N, ...]` of a fused module or of wide layers. Those without a gradient
            are left out.
        max_norm: The largest norm: one number, or N numbers, one for each member.
        norm_type: The p of the p-norm, also `inf` or `"inf"`. Default: 2.
        error_if_nonfinite: Whether a norm of NaN or inf raises an error. Then no gradient changes. Default:
            False.

    Returns:
        The norm of each member before clipping, `[N]`; an empty tensor if no parameter has a gradient.

    Raises:
        UsageError: What is given are no parameters; one has no member axis, such as one weight for all
            members; its gradient is sparse; the number of norms is not N; `norm_type` is no number; or, with
            `error_if_nonfinite`, a norm is NaN or inf.

    Example:
        >>> loss.backward()
        >>> norms = widepack.optim.clip_grad_norm_(fused.parameters(), 1.0)  # [N]
        >>> optimizer.step()
    """
    gradients, p = _gradients(_listed(parameters)), _power(norm_type)
    if not gradients:
        return torch.zeros(0)
    members, device = gradients[0].shape[0], gradients[0].device
    most = _most(max_norm, members).to(device)
    with torch.no_grad():
        parts = torch.stack(
            [torch.linalg.vector_norm(g.reshape(members, -1), p, 1).to(device) for g in gradients]
        )
        norms: Tensor = torch.linalg.vector_norm(parts, p, 0)
        if error_if_nonfinite and not torch.isfinite(norms).all():
            wrong = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()
            raise UsageError(
                f"clip_grad_norm_: the norm of member {wrong[0]} is {norms[wrong[0]].item()}"
                + (f", and {len(wrong) - 1} others are not finite" if len(wrong) > 1 else "")
                + "; no gradient was changed"
            )
        factors = (most.to(norms.dtype) / (norms + _EPS)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factors.to(g.device).reshape(-1, *[1] * (g.ndim - 1)))
    return norms


def _listed(parameters: Any) -> list[Tensor]:
    """Returns the parameters as a list. Raises UsageError for what are no parameters."""
    if isinstance(parameters, Tensor):
        return [parameters]
    of_module = isinstance(parameters, torch.nn.Module) or not isinstance(parameters, Iterable)
    listed = [] if of_module or isinstance(parameters, Mapping) else list(parameters)
    wrong = next((type(p).__name__ for p in listed if not isinstance(p, Tensor)), "")
    if of_module or wrong or isinstance(parameters, Mapping):
        what = f"has a {wrong}" if wrong else f"is a {type(parameters).__name__}"
        raise UsageError(
            f"clip_grad_norm_: parameters {what}; give a tensor, or tensors as fused.parameters() yields "
            "them (of a dict: its values())"
        )
    return listed


def _power(norm_type: float | str) -> float:
    """Returns the p of the p-norm. Raises UsageError."""
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if math.isnan(p):
        raise UsageError(f"clip_grad_norm_: norm_type is {norm_type!r}; give a number such as 2.0, or 'inf'")
    return p


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients. Raises UsageError for one that has no rows of members."""
    members = next((p.shape[0] for p in parameters if p.ndim and not getattr(p, ONE_FOR_ALL, False)), 0)
    gradients = []
    for i, p in enumerate(parameters):
        if p.grad is None:
            continue
        shared = getattr(p, ONE_FOR_ALL, False)
        if shared or p.ndim == 0 or p.shape[0] != members:
            what = "is one weight for all members" if shared else f"has no member axis of {members}"
            raise UsageError(
                f"clip_grad_norm_: parameter {i}, {list(p.shape)}, {what}, so no member has a norm of it; "
                "clip it by itself with torch.nn.utils.clip_grad_norm_"
            )
        if p.grad.is_sparse:
            raise UsageError(
                f"clip_grad_norm_: parameter {i} has a sparse gradient; set sparse=False in its layer"
            )
        gradients.append(p.grad)
    return gradients


def _most(max_norm: float | Sequence[float] | Tensor | PerMember, members: int) -> Tensor:
    """Returns the largest norms, `[N]` or `[]`. Raises UsageError."""
    values = list(max_norm) if isinstance(max_norm, PerMember) else max_norm
    try:
        most = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        most = torch.full((), -1.0)
    if most.ndim > 1 or (most.ndim and most.shape[0] != members) or not (most >= 0).all():
        raise UsageError(
            f"clip_grad_norm_: max_norm is {max_norm!r}; give a number of at least 0, or {members} of them, "
            "one for each member"
        )
    return most
