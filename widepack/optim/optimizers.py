"""SGD, Adam and AdamW with a learning rate and a weight decay for each member.

    fused = widepack.fuse(models, sample)                 # or wide layers: any module with parameters [N,
    ...] optimizer = widepack.optim.AdamW(fused.parameters(), lr=[1e-3, 3e-4, 1e-4], weight_decay=[0.0, 0.01,
    0.1])

The update of these optimizers is elementwise, so one step over `[N, ...]` is a step of N optimizers. If all
members have one rate, torch's own optimizers do the same. Here `lr` and `weight_decay` may be N numbers.
Everything else is as in torch: the arithmetic, the names of states and options, parameter groups, hooks,
schedulers that compute with rates, and state dicts (the rates of N members are lists).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .rates import ONE_FOR_ALL, PerMember, parse_rate

_RATES = ("lr", "initial_lr", "weight_decay")
Params = Iterable[Any]  # tensors, (name, tensor) pairs, or groups, as torch takes them
_MAX_CACHED_RATES = 64


class _MemberWise(torch.optim.Optimizer):
    """Base of the optimizers: rates for each member, and the checks of parameters against them."""

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._tensors: dict[Any, Tensor] = {}
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's optimizers do.

        Args:
            param_group: The group: `params`, and options that differ from the defaults.

        Raises:
            UsageError: A parameter has no member axis of the rates' length, or an option is invalid.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            self._check_members(group)
        except UsageError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Parses the rates of a group in place. Raises UsageError for invalid options."""
        who = type(self).__name__
        for key in _RATES:
            if key in group:
                group[key] = parse_rate(group[key], f"{who}: {key}")
        self._check_options(group, who)

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        raise NotImplementedError

    def _check_members(self, group: Mapping[str, Any]) -> None:
        """Raises UsageError if a rate of N numbers does not fit a parameter of the group."""
        rates = {k: group[k] for k in _RATES if isinstance(group.get(k), PerMember)}
        if len({len(r) for r in rates.values()}) > 1:
            lengths = ", ".join(f"{k} has {len(r)} numbers" for k, r in rates.items())
            raise UsageError(f"{type(self).__name__}: {lengths}; give one number for each member")
        for key, rate in rates.items():
            for i, p in enumerate(group["params"]):
                shared = getattr(p, ONE_FOR_ALL, False)
                if shared or p.ndim == 0 or p.shape[0] != len(rate):
                    name = (
                        group["param_names"][i] if "param_names" in group else f"parameter {i} of its group"
                    )
                    what = "one weight for all members" if shared else f"without a member axis of {len(rate)}"
                    raise UsageError(
                        f"{type(self).__name__}: {key} has {len(rate)} numbers, one for each member, and "
                        f"{name} is "
                        f"{list(p.shape)}, {what}. Put it in a group with one number: "
                        f"[{{'params': own}}, {{'params': shared, {key!r}: 1e-3}}]"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch's optimizers do. The rates of N members are lists of N numbers."""
        state = super().state_dict()
        state["param_groups"] = [
            {k: list(v) if isinstance(v, PerMember) else v for k, v in g.items()}
            for g in state["param_groups"]
        ]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this optimizer, or of torch's optimizer of the same name.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            UsageError: The rates are of another number of members. The optimizer does not change.
        """
        before = [dict(g) for g in self.param_groups]
        super().load_state_dict(dict(state_dict))
        try:
            for group in self.param_groups:
                self._check(group)
                self._check_members(group)
        except UsageError:
            self.param_groups = before
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tensors = {}
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step for every member.

        Args:
            closure: Computes the loss again and returns it. Default: None.

        Returns:
            What the closure returns, or None without a closure.

        Raises:
            UsageError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise UsageError(
                        f"{type(self).__name__}: parameter {i} has a sparse gradient; "
                        "set sparse=False in its layer"
                    )
                self._update(p, -p.grad if group["maximize"] else p.grad, self.state[p], group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _rate(self, rate: PerMember, like: Tensor) -> Tensor:
        """Returns a rate as a tensor `[N, 1, ..., 1]`, from a cache."""
        key = (rate.values, like.dtype, like.device, like.ndim)
        if key not in self._tensors:
            if len(self._tensors) >= _MAX_CACHED_RATES:
                self._tensors.clear()
            self._tensors[key] = rate.tensor(like)
        return self._tensors[key]

    def _plus(self, x: Tensor, y: Tensor, factor: float | PerMember) -> Tensor:
        """Returns `x + factor * y`."""
        if not isinstance(factor, PerMember):
            return x.add(y, alpha=factor)
        return x.addcmul(y, self._rate(factor, y)).to(x.dtype)

    def _move(self, p: Tensor, by: Tensor, rate: float | PerMember, factor: float = 1.0) -> None:
        """Computes `p -= rate * factor * by` in place."""
        if isinstance(rate, PerMember):
            p.addcmul_(by, self._rate(rate, p), value=-factor)
        else:
            p.add_(by, alpha=-rate * factor)


def _nonzero(rate: float | PerMember) -> bool:
    return any(rate) if isinstance(rate, PerMember) else rate != 0


class SGD(_MemberWise):
    """`torch.optim.SGD` with a learning rate and a weight decay for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With N rates each parameter is `[N,
            ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        momentum: The momentum factor. Default: 0.
        dampening: The dampening of the momentum. Default: 0.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        nesterov: Whether to use Nesterov momentum. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where a rate has N numbers.

    Example:
        >>> optimizer = widepack.optim.SGD(fused.parameters(), lr=[0.1, 0.01, 0.001], momentum=0.9)
    """

    __module__ = "widepack.optim"  # pickles name the public place

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
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
        if not group.get("momentum", 0) >= 0:
            raise UsageError(f"{who}: momentum is {group['momentum']}; it cannot be below zero")
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise UsageError(f"{who}: nesterov needs a momentum above zero and no dampening")

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if _nonzero(group["weight_decay"]):
            grad = self._plus(grad, p, group["weight_decay"])
        momentum = group["momentum"]
        if momentum != 0:
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad.detach().clone()
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - group["dampening"])
            grad = grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        self._move(p, grad, group["lr"])


class Adam(_MemberWise):
    """`torch.optim.Adam` with a learning rate and a weight decay for each member.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With N rates each parameter is `[N,
            ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        betas: The decay rates of the two running averages. Default: (0.9, 0.999).
        eps: The number added to the denominator. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 0.
        amsgrad: Whether to use the AMSGrad variant. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where a rate has N numbers.

    Example:
        >>> optimizer = widepack.optim.Adam(fused.parameters(), lr=[1e-3, 3e-4, 1e-4])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    decoupled = False  # whether weight decay is separate from the gradient

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
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

    def _check_options(self, group: Mapping[str, Any], who: str) -> None:
        if "betas" in group and not all(0 <= b < 1 for b in group["betas"]):
            raise UsageError(f"{who}: betas are {group['betas']}; each must be at least 0 and below 1")
        if not group.get("eps", 0) >= 0:
            raise UsageError(f"{who}: eps is {group['eps']}; it cannot be below zero")

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(
                0.0, dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            )
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
            state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names})
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if _nonzero(decay) and self.decoupled:
            kept = 1 - lr * decay
            p.mul_(self._rate(kept, p) if isinstance(kept, PerMember) else kept)
        elif _nonzero(decay):
            grad = self._plus(grad, p, decay)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        most = state["max_exp_avg_sq"] if group["amsgrad"] else None
        if p.is_complex():
            p, grad, mean, square = (torch.view_as_real(t) for t in (p, grad, mean, square))
            most = None if most is None else torch.view_as_real(most)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if most is not None:
            square = torch.maximum(most, square, out=most)
        root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        if isinstance(lr, PerMember):
            self._move(p, mean / root, lr, 1 / (1 - beta1**step))
        else:
            p.addcdiv_(mean, root, value=-lr / (1 - beta1**step))


class AdamW(Adam):
    """`torch.optim.AdamW` with a learning rate and a weight decay for each member.

    The weight decay is separate from the gradient.

    Args:
        params: Tensors, `(name, tensor)` pairs, or parameter groups. With N rates each parameter is `[N,
            ...]`.
        lr: The learning rate: one number, or N numbers, one for each member. Default: 1e-3.
        betas: The decay rates of the two running averages. Default: (0.9, 0.999).
        eps: The number added to the denominator. Default: 1e-8.
        weight_decay: One number, or N numbers, one for each member. Default: 1e-2.
        amsgrad: Whether to use the AMSGrad variant. Default: False.
        maximize: Whether to maximize the objective. Default: False.

    Raises:
        UsageError: An option is invalid, or a parameter has no member axis where a rate has N numbers.

    Example:
        >>> optimizer = widepack.optim.AdamW(fused.parameters(), lr=1e-3, weight_decay=[0.0, 0.01, 0.1])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    decoupled = True

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
