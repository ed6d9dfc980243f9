"""SGD, Adam, AdamW and Adadelta with options for each member.

    fused = widepack.fuse(models, sample)  # or wide layers: any module with parameters [N, ...]
    optimizer = widepack.optim.AdamW(fused.parameters(), lr=[1e-3, 3e-4, 1e-4], weight_decay=[0.0, 0.01, 0.1])

The update of these optimizers is elementwise, so one step over `[N, ...]` is a step of N optimizers. If all
members have one rate, torch's own optimizers do the same. Here each number of an option may be N numbers: the
rate, the weight decay, the momentum, the betas, rho and eps. Everything else is as in torch: the arithmetic,
the names of states and options, parameter groups, hooks, schedulers that compute with rates, and state dicts
(the options of N members are lists).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .member_wise import MemberWise, Params, nonzero, numbers_of, step_count
from .rates import PerMember


class SGD(MemberWise):
    """`torch.optim.SGD` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        momentum: The momentum factor: one number, or N numbers. Default: 0.
        dampening: The dampening of the momentum: one number, or N numbers. Default: 0.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        nesterov: Whether to use Nesterov momentum. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.SGD(fused.parameters(), lr=[0.1, 0.01, 0.001], momentum=0.9)
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "momentum", "dampening")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        momentum: Any = 0.0,
        dampening: Any = 0.0,
        weight_decay: Any = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, {"lr": lr, **options})

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        momentum = group.get("momentum", 0.0)
        least = min(momentum) if isinstance(momentum, PerMember) else momentum
        if group.get("nesterov") and (least <= 0 or nonzero(group["dampening"])):
            raise UsageError(f"{who}: nesterov needs a momentum above zero and no dampening")

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # the first step makes the buffer of the momentum

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        momentum, taken = group["momentum"], 1 - group["dampening"]
        if nonzero(momentum):
            if isinstance(momentum, PerMember):  # without momentum torch does not dampen
                each = taken if isinstance(taken, PerMember) else [taken] * len(momentum)
                taken = PerMember(t if m else 1.0 for t, m in zip(each, momentum))
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad.detach().clone()
            else:
                buffer.mul_(self._factor(momentum, buffer))
                self._move(buffer, grad, -1 * taken)
            grad = self._plus(grad, buffer, momentum) if group["nesterov"] else buffer
        self._move(p, grad, group["lr"])


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

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "eps")
    decoupled = False  # whether weight decay is separate from the gradient

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
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
            },
        )

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        zeros = {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names}
        return {"step": step_count(), **zeros}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        step, (beta1, beta2) = numbers_of(state["step"]), group["betas"]
        grad = self._decayed(p, grad, group, self.decoupled)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        most = state["max_exp_avg_sq"] if group["amsgrad"] else None
        if p.is_complex():
            p, grad, mean, square = (torch.view_as_real(t) for t in (p, grad, mean, square))
            most = None if most is None else torch.view_as_real(most)
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

    __module__ = "widepack.optim"  # pickles name the public place
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


class Adadelta(MemberWise):
    """`torch.optim.Adadelta` with options for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With options of N numbers each
            parameter is `[N, ...]`.
        lr: The factor of each step: one number, or N numbers, one for each member. Default: 1.0.
        rho: The decay rate of the running averages: one number, or N numbers. Default: 0.9.
        eps: The number added to the averages: one number, or N numbers. Default: 1e-6.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where an option has N numbers.

    Example:
        >>> optimizer = widepack.optim.Adadelta(fused.parameters(), lr=[1.0, 0.5, 0.1], rho=[0.9, 0.9, 0.95])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    member_options = ("lr", "initial_lr", "weight_decay", "rho", "eps")

    def __init__(
        self,
        params: Params,
        lr: Any = 1.0,
        rho: Any = 0.9,
        eps: Any = 1e-6,
        weight_decay: Any = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options})

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        rho = group.get("rho", 0.0)
        if (max(rho) if isinstance(rho, PerMember) else rho) > 1:
            raise UsageError(f"{who}: rho is {rho}; it must be at least 0 and at most 1")

    def _start(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": step_count(), "square_avg": torch.zeros_like(p), "acc_delta": torch.zeros_like(p)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        state["step"] += 1
        if nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        square, moved, rho = state["square_avg"], state["acc_delta"], group["rho"]
        if p.is_complex():
            p, grad, square, moved = (torch.view_as_real(t) for t in (p, grad, square, moved))
        eps = self._factor(group["eps"], p)
        self._average_square(square, grad, rho)
        delta = ((moved + eps).sqrt_() / (square + eps).sqrt_()).mul_(grad)
        self._average_square(moved, delta, rho)
        self._move(p, delta, group["lr"])
