"""ASGD, averaged stochastic gradient descent, with options for each member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .member_wise import MemberWise, Params, nonzero, numbers_of, pairs, real_views, step_count
from .rates import PerMember


class ASGD(MemberWise):
    """`torch.optim.ASGD` with options for each member.

    The state `ax` of a parameter is the average of its values.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-2.
        lambd: The decay of the weights and of the rate: one number, or N numbers. Default: 1e-4.
        alpha: The power of the rate's decay: one number, or N numbers. Default: 0.75.
        t0: The step at which averaging starts: one number, or N numbers. Default: 1e6.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.ASGD(fused.parameters(), lr=[1e-2, 1e-3, 1e-4], t0=100)
        >>> fused(x).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[fused.get_parameter("head.weight")]["ax"]  # [N, ...], the average
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "lambd", "alpha", "t0")
    step_states = ("step", "eta", "mu")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        lambd: Any = 1e-4,
        alpha: Any = 0.75,
        t0: Any = 1e6,
        weight_decay: Any = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options, "maximize": maximize})

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        counts = {"step": step_count(), "mu": step_count(1.0), "eta": step_count(group["lr"])}
        return {**counts, "ax": torch.zeros_like(p)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        step, lr, lambd = numbers_of(state["step"]), group["lr"], group["lambd"]
        p, grad, average = real_views(p, grad, state["ax"])
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        eta, mu = numbers_of(state["eta"]), numbers_of(state["mu"])
        p.mul_(self._factor(1 - lambd * eta, p))
        self._move(p, grad, eta)
        if isinstance(mu, PerMember):
            share = self._rate(mu, p)
            average.copy_(torch.where(share == 1, p, average + (p - average) * share))
        elif mu != 1:
            average.add_(p.sub(average).mul_(state["mu"]))
        else:
            average.copy_(p)
        state["eta"] = step_count(lr / ((1 + lambd * lr * step) ** group["alpha"]))
        t0 = group["t0"]
        shares = [_share(k, t) for k, t in pairs(step, t0)]
        state["mu"] = step_count(PerMember(shares) if len(shares) > 1 else shares[0])


def _share(step: float, start: float) -> float:
    """Returns the share of a new value in the average of the values since a step."""
    return 1 / max(1, step - start)
