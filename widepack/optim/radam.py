"""RAdam with options for each member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .member_wise import MemberWise, Params, numbers_of, pairs, real_views, step_count
from .rates import PerMember


class RAdam(MemberWise):
    """`torch.optim.RAdam` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        betas: The decay rates of the two running averages. Each is one number, or N numbers. Default:
            (0.9, 0.999).
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        decoupled_weight_decay: Whether the weight decay is separate from the gradient, as in AdamW. Default:
            False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.RAdam(fused.parameters(), lr=[1e-3, 3e-4, 1e-4])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "eps")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        forms = {"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options, **forms})

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": step_count(), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        step, (beta1, beta2) = numbers_of(state["step"]), group["betas"]
        p, grad, mean, square = real_views(p, grad, state["exp_avg"], state["exp_avg_sq"])
        grad = self._decayed(p, grad, group, group["decoupled_weight_decay"])
        self._average(mean, grad, beta1)
        self._average_square(square, grad, beta2)
        by = mean / self._factor(1 - beta1**step, mean) * self._factor(group["lr"], mean)
        several = isinstance(beta2, PerMember) or isinstance(step, PerMember)
        factors = [_rectification(b, k) for b, k in pairs(beta2, step)]
        if any(factors):
            root = square.sqrt()
            root.add_(self._factor(group["eps"], root))
            scale = self._factor((1 - beta2**step) ** 0.5, root) / root
            factor = PerMember(factors) if several else factors[0]
            scaled = by * scale * self._factor(factor, by)
            by = scaled if all(factors) else torch.where(self._factor(factor, by) > 0, scaled, by)
        p.add_(by, alpha=-1.0)


def _rectification(beta2: float, step: float) -> float:
    """Returns the factor of a step by the second moment; 0 while there are too few steps for one."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (beta2**step) / (1 - beta2**step)
    if not length > 5.0:
        return 0.0
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return float(ratio**0.5)
