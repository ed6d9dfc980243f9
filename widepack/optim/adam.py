"""Adam, AdamW, Adamax, NAdam and RAdam with options for each member.

Each divides a running average of the gradients by a running size of them, number by number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .member_wise import MemberWise, Options, Params, State, nonzero, step_count, step_values
from .rates import PerMember, combined, numbers


class Adam(MemberWise):
    """`torch.optim.Adam` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        betas: The decay rates of the two running averages. Each is one number, or N numbers:
            `([0.9, 0.8, 0.5], 0.999)`. Default: (0.9, 0.999).
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        amsgrad: Whether to use the AMSGrad variant. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.Adam(fused.parameters(), lr=[1e-3, 3e-4, 1e-4])
    """

    buffers = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        step, (beta1, beta2), (mean, square, most) = step_values(state["step"]), group["betas"], buffers
        self._average(mean, grad, beta1)
        self._average_square(square, grad, beta2)
        if most is not None:
            square = torch.maximum(most, square, out=most)
        root = square.sqrt() / self._factor((1 - beta2**step) ** 0.5, square)
        root.add_(self._factor(group["eps"], root))
        self._move_by_quotient(p, mean, root, group["lr"] / (1 - beta1**step))


class AdamW(Adam):
    """`torch.optim.AdamW` with options for each member.

    The weight decay is separate from the gradient.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        betas: The decay rates of the two running averages. Each is one number, or N numbers:
            `([0.9, 0.8, 0.5], 0.999)`. Default: (0.9, 0.999).
        eps: The number added to the denominator: one number, or N numbers. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 1e-2.
        amsgrad: Whether to use the AMSGrad variant. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.AdamW(fused.parameters(), lr=1e-3, weight_decay=[0.0, 0.01, 0.1])
    """

    decoupled = True

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


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

    buffers = ("exp_avg", "exp_inf")

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
        super().__init__(params, locals())

    def _check_options(self, group: Options, who: str) -> None:
        if not all(numbers(eps := group.get("eps", 0.0))):
            raise UsageError(f"{who}: eps is {eps}; it must be above 0")

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        step, (beta1, beta2), (mean, most) = step_values(state["step"]), group["betas"], buffers
        self._average(mean, grad, beta1)
        most.mul_(self._factor(beta2, most))
        torch.maximum(most, grad.abs().add_(self._factor(group["eps"], most)), out=most)
        self._move(p, mean / most, group["lr"] / (1 - beta1**step))


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

    step_states = ("step", "mu_product")
    decoupled = None
    buffers = ("exp_avg", "exp_avg_sq")

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
        super().__init__(params, locals())

    def _start(self, p: Tensor, group: Options) -> State:
        return {**super()._start(p, group), "mu_product": step_count(1.0)}

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        step, (beta1, beta2), (mean, square) = step_values(state["step"]), group["betas"], buffers
        mu, next_mu = (_momentum(beta1, group["momentum_decay"], k) for k in (step, step + 1))
        state["mu_product"] = state["mu_product"] * (step_count(mu) if isinstance(mu, PerMember) else mu)
        product = step_values(state["mu_product"])
        self._average(mean, grad, beta1)
        self._average_square(square, grad, beta2)
        root = (square / self._factor(1 - beta2**step, square)).sqrt_()
        root.add_(self._factor(group["eps"], root))
        self._move_by_quotient(p, grad, root, group["lr"] * (1.0 - mu) / (1.0 - product))
        self._move_by_quotient(p, mean, root, group["lr"] * next_mu / (1.0 - product * next_mu))


def _momentum(beta1: float | PerMember, decay: float | PerMember, step: float | PerMember) -> Any:
    """Returns the momentum of a step: it grows with the steps, to beta1."""
    return beta1 * (1.0 - 0.5 * (0.96 ** (step * decay)))


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

    decoupled = None
    buffers = ("exp_avg", "exp_avg_sq")

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
        super().__init__(params, locals())

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        step, (beta1, beta2), (mean, square) = step_values(state["step"]), group["betas"], buffers
        self._average(mean, grad, beta1)
        self._average_square(square, grad, beta2)
        by = mean / self._factor(1 - beta1**step, mean) * self._factor(group["lr"], mean)
        factor = combined(_rectification, beta2, step)
        if nonzero(factor):
            root = square.sqrt()
            root.add_(self._factor(group["eps"], root))
            scale, each = self._factor((1 - beta2**step) ** 0.5, root) / root, self._factor(factor, by)
            scaled = by * scale * each
            by = scaled if all(numbers(factor)) else torch.where(each > 0, scaled, by)
        p.add_(by, alpha=-1.0)


def _rectification(beta2: float, step: float) -> float:
    """Returns the factor of a step by the second moment; 0 while there are too few steps for one."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (beta2**step) / (1 - beta2**step)
    if not length > 5.0:
        return 0.0
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return float(ratio**0.5)
