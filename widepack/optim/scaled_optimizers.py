"""RMSprop, Adagrad and Adamax with options for each member.

Each divides a gradient by a running size of the gradients before it, number by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .member_wise import MemberWise, Params, nonzero, numbers_of, real_views, step_count
from .rates import PerMember


class RMSprop(MemberWise):
    """`torch.optim.RMSprop` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-2.
        alpha: The decay rate of the running averages: one number, or N numbers. Default: 0.99.
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        momentum: The momentum factor: one number, or N numbers. Default: 0.
        centered: Whether to divide by the standard deviation of the gradients. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.RMSprop(fused.parameters(), lr=[1e-2, 1e-3, 1e-4], alpha=0.9)
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "alpha", "eps", "momentum")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        alpha: Any = 0.99,
        eps: Any = 1e-8,
        weight_decay: Any = 0.0,
        momentum: Any = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {"lr": lr, **options, "centered": centered, "maximize": maximize})

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        names = ["square_avg"]
        names += ["momentum_buffer"] * nonzero(group["momentum"]) + ["grad_avg"] * bool(group["centered"])
        return {"step": step_count(), **{name: torch.zeros_like(p) for name in names}}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        kept = (state.get(name) for name in ("square_avg", "momentum_buffer", "grad_avg"))
        p, grad, square, buffer, mean = real_views(p, grad, *kept)
        alpha = group["alpha"]
        self._average_square(square, grad, alpha)
        if mean is None:
            size = square.sqrt()
        else:
            self._average(mean, grad, alpha)
            size = square.addcmul(mean, mean, value=-1).sqrt_()
        size.add_(self._factor(group["eps"], size))
        if buffer is None:
            self._move(p, grad / size, group["lr"])
        else:
            buffer.mul_(self._factor(group["momentum"], buffer)).addcdiv_(grad, size)
            self._move(p, buffer, group["lr"])


class Adagrad(MemberWise):
    """`torch.optim.Adagrad` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-2.
        lr_decay: The decay of the learning rate: one number, or N numbers. Default: 0.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        initial_accumulator_value: The sum of squares at the start: one number, or N numbers. Default: 0.
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-10.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.Adagrad(fused.parameters(), lr=[1e-1, 1e-2, 1e-3])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = (
        "lr", "initial_lr", "weight_decay", "lr_decay", "initial_accumulator_value", "eps",
    )  # fmt: skip

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        lr_decay: Any = 0.0,
        weight_decay: Any = 0.0,
        initial_accumulator_value: Any = 0.0,
        eps: Any = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        start = {"initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, {"lr": lr, **options, **start})

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        filled = torch.ones_like(p) * complex(1, 1) if p.is_complex() else torch.ones_like(p)
        start = self._factor(group["initial_accumulator_value"], p.real)
        return {"step": step_count(), "sum": filled.mul_(start)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        step = numbers_of(state["step"])
        state["step"] += 1
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        p, grad, total = real_views(p, grad, state["sum"])
        total.addcmul_(grad, grad)
        size = total.sqrt()
        size.add_(self._factor(group["eps"], size))
        self._move(p, grad / size, group["lr"] / (group["lr_decay"] * step + 1))


class Adamax(MemberWise):
    """`torch.optim.Adamax` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 2e-3.
        betas: The decay rates of the running average and of the largest gradient. Each is one number, or N
            numbers. Default: (0.9, 0.999).
        eps: The number added to the gradients' sizes: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.Adamax(fused.parameters(), lr=[2e-3, 1e-3, 5e-4])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "eps")

    def __init__(
        self,
        params: Params,
        lr: Any = 2e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options})

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        eps = group.get("eps", 0.0)
        if not nonzero(eps) or (isinstance(eps, PerMember) and not all(eps)):
            raise UsageError(f"{who}: eps is {eps}; it must be above 0")

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": step_count(), "exp_avg": torch.zeros_like(p), "exp_inf": torch.zeros_like(p)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        step, (beta1, beta2) = numbers_of(state["step"]), group["betas"]
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        p, grad, mean, most = real_views(p, grad, state["exp_avg"], state["exp_inf"])
        self._average(mean, grad, beta1)
        most.mul_(self._factor(beta2, most))
        torch.maximum(most, grad.abs().add_(self._factor(group["eps"], most)), out=most)
        self._move(p, mean / most, group["lr"] / (1 - beta1**step))
