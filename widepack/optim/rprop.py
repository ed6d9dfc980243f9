"""Rprop with options for each member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .member_wise import MemberWise, Params, real_views, step_count
from .rates import PerMember


class Rprop(MemberWise):
    """`torch.optim.Rprop` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The first step size: one number, or N numbers, one for each member. Default: 1e-2.
        etas: The factors that decrease and increase a step size. Each is one number, or N numbers. Default:
            (0.5, 1.2).
        step_sizes: The smallest and the largest step size. Each is one number, or N numbers. Default:
            (1e-6, 50).
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.Rprop(fused.parameters(), lr=[1e-2, 1e-3, 1e-4])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr")
    pair_options = ("etas", "step_sizes")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        etas: tuple[Any, Any] = (0.5, 1.2),
        step_sizes: tuple[Any, Any] = (1e-6, 50.0),
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "etas": etas, "step_sizes": step_sizes, "maximize": maximize}
        super().__init__(params, options)

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        less, more = map(_numbers, group.get("etas", (0.5, 1.2)))
        if not (min(less) > 0 and max(less) < 1 < min(more)):
            raise UsageError(
                f"{who}: etas are {group['etas']}; the first must be between 0 and 1, the second above 1"
            )
        least, most = map(_numbers, group.get("step_sizes", (1e-6, 50.0)))
        if len(least) == len(most) or 1 in (len(least), len(most)):
            count = max(len(least), len(most))
            pairs = zip(least * (count // len(least)), most * (count // len(most)))
            if any(low > high for low, high in pairs):
                raise UsageError(
                    f"{who}: step_sizes are {group['step_sizes']}; the first cannot be above the second"
                )

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        filled = torch.ones_like(p) * complex(1, 1) if p.is_complex() else torch.ones_like(p)
        size = filled.mul_(self._factor(group["lr"], p.real))
        return {"step": step_count(), "prev": torch.zeros_like(p), "step_size": size}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        p, grad, before, size = real_views(p, grad, state["prev"], state["step_size"])
        less, more = (self._bound(eta, size) for eta in group["etas"])
        sign = (grad * before).sign_()
        turned = sign < 0
        size.mul_(torch.where(sign > 0, more, torch.where(turned, less, torch.where(sign == 0, 1, sign))))
        size.clamp_(*(self._bound(bound, size) for bound in group["step_sizes"]))
        grad = torch.where(turned, 0, grad)
        p.addcmul_(grad.sign(), size, value=-1)
        before.copy_(grad)

    def _bound(self, number: float | PerMember, like: Tensor) -> Tensor:
        """Returns an option as a tensor of `like`'s dtype: `[N, 1, ..., 1]`, or `[]` for one number."""
        if isinstance(number, PerMember):
            return self._rate(number, like).to(like.dtype)
        return torch.tensor(number, dtype=like.dtype, device=like.device)


def _numbers(option: float | PerMember) -> list[float]:
    return list(option) if isinstance(option, PerMember) else [option]
