"""SGD, ASGD, Rprop, Adadelta, Adagrad and RMSprop with options for each member.

    fused = widepack.fuse(models, sample)  # or wide layers: any module with parameters [N, ...]
    optimizer = widepack.optim.AdamW(fused.parameters(), lr=[1e-3, 3e-4, 1e-4], weight_decay=[0.0, 0.01, 0.1])

The update of these optimizers is elementwise, so one step over `[N, ...]` is a step of N optimizers. If all
members have one rate, torch's own optimizers do the same. Here each number of an option may be N numbers: the
rate, the weight decay, the momentum, the betas, rho and eps. Everything else is as in torch: the arithmetic,
the names of states and options, parameter groups, hooks, schedulers that compute with rates, and state dicts
(the options of N members are lists).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .member_wise import MemberWise, Options, Params, State, nonzero, step_count, step_values
from .rates import PerMember, combined, numbers


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
        super().__init__(params, locals())

    def _check_options(self, group: Options, who: str) -> None:
        least = min(numbers(group.get("momentum", 0.0)))
        if group.get("nesterov") and (least <= 0 or nonzero(group["dampening"])):
            raise UsageError(f"{who}: nesterov needs a momentum above zero and no dampening")

    def _start(self, p: Tensor, group: Options) -> State:
        return {}  # the first step makes the buffer of the momentum

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        momentum, taken = group["momentum"], 1 - group["dampening"]
        if nonzero(momentum):
            if isinstance(momentum, PerMember):  # without momentum torch does not dampen
                taken = combined(lambda t, m: t if m else 1.0, taken, momentum)
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad.detach().clone()
            else:
                buffer.mul_(self._factor(momentum, buffer))
                self._move(buffer, grad, -1 * taken)
            grad = self._plus(grad, buffer, momentum) if group["nesterov"] else buffer
        self._move(p, grad, group["lr"])


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

    step_states = ("step", "eta", "mu")
    buffers = ("ax",)

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
        super().__init__(params, locals())

    def _start(self, p: Tensor, group: Options) -> State:
        return {**super()._start(p, group), "mu": step_count(1.0), "eta": step_count(group["lr"])}

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        (average,), lr, lambd = buffers, group["lr"], group["lambd"]
        step, eta, mu = (step_values(state[name]) for name in self.step_states)
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
        state["mu"] = step_count(combined(_share, step, group["t0"]))


def _share(step: float, start: float) -> float:
    """Returns the share of a new value in the average of the values since a step."""
    return 1 / max(1, step - start)


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

    buffers = ("prev", "step_size")

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        etas: tuple[Any, Any] = (0.5, 1.2),
        step_sizes: tuple[Any, Any] = (1e-6, 50.0),
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _check_options(self, group: Options, who: str) -> None:
        less, more = map(numbers, group.get("etas", (0.5, 1.2)))
        if not (min(less) > 0 and max(less) < 1 < min(more)):
            raise UsageError(
                f"{who}: etas are {group['etas']}; the first must be between 0 and 1, the second above 1"
            )
        least, most = map(numbers, group.get("step_sizes", (1e-6, 50.0)))
        if len(least) == len(most) or 1 in (len(least), len(most)):
            count = max(len(least), len(most))
            pairs = zip(least * (count // len(least)), most * (count // len(most)))
            if any(low > high for low, high in pairs):
                raise UsageError(
                    f"{who}: step_sizes are {group['step_sizes']}; the first cannot be above the second"
                )

    def _start(self, p: Tensor, group: Options) -> State:
        return {**super()._start(p, group), "step_size": self._filled(p, group["lr"])}

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        before, size = buffers
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

    buffers = ("square_avg", "acc_delta")

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
        super().__init__(params, locals())

    def _check_options(self, group: Options, who: str) -> None:
        if max(numbers(rho := group.get("rho", 0.0))) > 1:
            raise UsageError(f"{who}: rho is {rho}; it must be at least 0 and at most 1")

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        (square, moved), rho, eps = buffers, group["rho"], self._factor(group["eps"], p)
        self._average_square(square, grad, rho)
        delta = ((moved + eps).sqrt_() / (square + eps).sqrt_()).mul_(grad)
        self._average_square(moved, delta, rho)
        self._move(p, delta, group["lr"])


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

    buffers = ("sum",)

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
        super().__init__(params, locals())

    def _start(self, p: Tensor, group: Options) -> State:
        return {"step": step_count(), "sum": self._filled(p, group["initial_accumulator_value"])}

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        (total,) = buffers
        total.addcmul_(grad, grad)
        size = total.sqrt()
        size.add_(self._factor(group["eps"], size))
        steps_before = step_values(state["step"]) - 1
        self._move(p, grad / size, group["lr"] / (group["lr_decay"] * steps_before + 1))


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

    buffers = ("square_avg", "momentum_buffer", "grad_avg")

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
        super().__init__(params, locals())

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        (square, buffer, mean), alpha = buffers, group["alpha"]
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
