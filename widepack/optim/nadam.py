"""NAdam with options for each member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .member_wise import MemberWise, Params, numbers_of, real_views, step_count
from .rates import PerMember


class NAdam(MemberWise):
    """`torch.optim.NAdam` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 2e-3.
        betas: The decay rates of the two running averages. Each is one number, or N numbers. Default:
            (0.9, 0.999).
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        momentum_decay: The decay of the momentum: one number, or N numbers. Default: 4e-3.
        decoupled_weight_decay: Whether the weight decay is separate from the gradient, as in AdamW. Default:
            False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.NAdam(fused.parameters(), lr=[2e-3, 1e-3, 5e-4])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "eps", "momentum_decay")
    step_states = ("step", "mu_product")

    def __init__(
        self,
        params: Params,
        lr: Any = 2e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 0.0,
        momentum_decay: Any = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        forms = {"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options, **forms})

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        counts = {"step": step_count(), "mu_product": step_count(1.0)}
        return {**counts, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        step, (beta1, beta2) = numbers_of(state["step"]), group["betas"]
        p, grad, mean, square = real_views(p, grad, state["exp_avg"], state["exp_avg_sq"])
        grad = self._decayed(p, grad, group, group["decoupled_weight_decay"])
        mu, next_mu = (_momentum(beta1, group["momentum_decay"], k) for k in (step, step + 1))
        state["mu_product"] = state["mu_product"] * (step_count(mu) if isinstance(mu, PerMember) else mu)
        product = numbers_of(state["mu_product"])
        self._average(mean, grad, beta1)
        self._average_square(square, grad, beta2)
        root = (square / self._factor(1 - beta2**step, square)).sqrt_()
        root.add_(self._factor(group["eps"], root))
        self._move_by_quotient(p, grad, root, group["lr"] * (1.0 - mu) / (1.0 - product))
        self._move_by_quotient(p, mean, root, group["lr"] * next_mu / (1.0 - product * next_mu))


def _momentum(beta1: float | PerMember, decay: float | PerMember, step: float | PerMember) -> Any:
    """Returns the momentum of a step: it grows with the steps, to beta1."""
    return beta1 * (1.0 - 0.5 * (0.96 ** (step * decay)))
