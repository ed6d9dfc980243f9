"""The base of the optimizers: options for each member, state dicts, frozen members, arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import UsageError
from .rates import FROZEN, ONE_FOR_ALL, PerMember, numbers, parse_rate, plain_numbers

Params = Iterable[Any]  # tensors, (name, tensor) pairs, or groups, as torch takes them
Options = Mapping[str, Any]  # of a parameter group, by name
State = dict[str, Any]  # of a parameter, by name
_MAX_CACHED_RATES = 64
_SWITCHES = ("foreach", "capturable", "differentiable", "fused")  # that only torch's optimizers have
_OPTION_OF_BUFFER = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
_NO_OPTIONS = ("self", "params", "__class__")
_EXAMPLES = {
    "betas": "(0.9, 0.999)",
    "etas": "(0.5, 1.2)",
    "step_sizes": "(1e-6, 50)",
}  # of one value, in messages


class MemberWise(torch.optim.Optimizer):
    """Base of the optimizers: options for each member, and the checks of parameters against them.

    A subclass has torch's options and their defaults in its `__init__`. Of these, one with a number as its
    default may be N numbers, and so may each part of a pair. One that is True or False is for all members.
    """

    member_options: ClassVar[tuple[str, ...]] = ("initial_lr",)
    """The options that may be N numbers. torch's schedulers add `initial_lr`."""
    pair_options: ClassVar[tuple[str, ...]] = ()
    """The options that are a pair. Each part may be N numbers."""
    switches: ClassVar[tuple[str, ...]] = _SWITCHES
    """The options that are True or False."""
    step_states: ClassVar[tuple[str, ...]] = ("step",)
    """The states that depend on the number of steps alone: one number, or `[N]`. They have torch's dtype of
    such states, whatever the parameter's dtype is.
    """
    buffers: ClassVar[tuple[str, ...]] = ()
    """The states that have the parameter's shape, and begin with zeros."""
    decoupled: ClassVar[bool | None] = False
    """Whether the weight decay is separate from the gradient; None if an option says so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(f"{__package__}."):
            cls.__module__ = "widepack.optim"  # pickles name the public place
        defaults = {k: p.default for k, p in inspect.signature(cls.__init__).parameters.items()}
        for listed, kind in (("member_options", float), ("pair_options", tuple), ("switches", bool)):
            own = [k for k, value in defaults.items() if type(value) is kind]
            setattr(cls, listed, tuple(dict.fromkeys([*getattr(cls, listed), *own])))

    def __init__(self, params: Params, given: Mapping[str, Any]) -> None:
        """Checks the options. given: the local names of a subclass's `__init__`, which are its options."""
        self._tensors: dict[Any, Tensor] = {}
        self._accepted: dict[int, dict[str, Any]] = {}  # the options of each group at the last step
        defaults = {k: v for k, v in given.items() if k not in _NO_OPTIONS}
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's optimizers do.

        Args:
            param_group: The group: `params`, and options that differ from the defaults.

        Raises:
            UsageError: A parameter has no member axis of the rates' length, or an option is invalid.

        Example:
            >>> weights = [torch.nn.Parameter(torch.zeros(3, 4))]
            >>> optimizer.add_param_group({"params": weights, "lr": [0.1, 0.2, 0.3]})
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except UsageError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Parses the options of a group, or the defaults, in place. Raises UsageError for invalid ones."""
        who = type(self).__name__
        for key in self.member_options:
            if key in group:
                group[key] = parse_rate(group[key], f"{who}: {key}")
        for key in self.pair_options:
            if key in group:
                group[key] = _parse_pair(key, group[key], who)
        for key in self.switches:
            if not isinstance(plain_numbers(group.get(key)), (bool, int, type(None))):
                raise UsageError(
                    f"{who}: {key} is {group[key]!r}; it is True or False for all members. Give members that "
                    "differ in it a fused module and an optimizer of their own"
                )
        self._check_options(group, who)
        if "params" in group:
            self._check_members(group)

    def _check_options(self, group: Options, who: str) -> None:
        """Raises UsageError for parsed options that do not fit."""

    def _check_members(self, group: Options) -> None:
        """Raises UsageError if an option of N numbers does not fit a parameter of the group."""
        named = [(k, group[k]) for k in self.member_options if k in group]
        named += [(k, part) for k in self.pair_options for part in group.get(k, ())]
        options = [(k, v) for k, v in named if isinstance(v, PerMember)]
        if len({len(v) for _, v in options}) > 1:
            lengths = ", ".join(f"{k} has {len(v)} numbers" for k, v in options)
            raise UsageError(f"{type(self).__name__}: {lengths}; give one number for each member")
        for key, values in options:
            for i, p in enumerate(group["params"]):
                if has_member_axis(p, len(values)):
                    continue
                name = group["param_names"][i] if "param_names" in group else f"parameter {i} of its group"
                raise UsageError(
                    f"{type(self).__name__}: {key} has {len(values)} numbers, one for each member, and "
                    f"{name} is {list(p.shape)}, {_why_not(p, key)}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch's optimizers do. The rates of N members are lists of N numbers.

        Returns:
            The state, as torch's optimizers return it.

        Example:
            >>> torch.save(optimizer.state_dict(), "optimizer.pt")
        """
        state = super().state_dict()
        state["param_groups"] = [{k: _plain(v) for k, v in g.items()} for g in state["param_groups"]]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this optimizer, or of torch's optimizer of the same name.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            UsageError: The rates are of another number of members, or it is no optimizer's state. The
                optimizer does not change.

        Example:
            >>> optimizer.load_state_dict(optimizer.state_dict())
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            keys = ", ".join(map(repr, state_dict)) if isinstance(state_dict, Mapping) else ""
            raise UsageError(
                f"{type(self).__name__}.load_state_dict: the state has {keys[:80] or 'nothing'}, and a state "
                "of an optimizer has 'state' and 'param_groups'; give what its state_dict() returned"
            )
        before = [dict(g) for g in self.param_groups]
        super().load_state_dict(dict(state_dict))
        try:
            for group in self.param_groups:
                self._check(group)
        except UsageError:
            self.param_groups = before
            raise
        self._restore_step_states(state_dict)

    def _restore_step_states(self, state_dict: Mapping[str, Any]) -> None:
        """Gives the step states the dtypes that they were saved with. torch loads them in the parameter's."""
        keys = [k for g in state_dict["param_groups"] for k in g["params"]]
        own = [p for g in self.param_groups for p in g["params"]]
        for k, p in zip(keys, own):
            for name in set(self.step_states[1:]) & set(state_dict["state"].get(k, ())):
                self.state[p][name] = torch.as_tensor(state_dict["state"][k][name]).detach().clone()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tensors, self._accepted = {}, {}
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != "differentiable":  # torch adds it to the defaults; these optimizers do not have it
                    group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step for every member that is not frozen (`Fused.freeze`).

        Args:
            closure: Computes the loss again and returns it. Default: None.

        Returns:
            What the closure returns, or None without a closure.

        Raises:
            UsageError: A gradient is sparse, or an option that was set since the last step is invalid. No
                parameter and no state has changed then.

        Example:
            >>> loss.backward()
            >>> optimizer.step()
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for k, group in enumerate(self.param_groups):  # all before the first parameter changes
            self._check_step(k, group)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state, frozen = self.state[p], list(getattr(p, FROZEN, ()))
                if not state:
                    state.update(self._start(p, group))
                if frozen:
                    self._update_others(p, grad, state, group, frozen)
                else:
                    self._update(p, grad, state, group)
        return loss

    def _check_step(self, k: int, group: dict[str, Any]) -> None:
        """Checks the gradients of group k, and its options if one was set since the last step: by a
        scheduler, or by hand. Raises UsageError.
        """
        names = [n for n in (*self.member_options, *self.pair_options, *self.switches) if n in group]
        known = self._accepted.get(k, {})
        if any(n not in known or group[n] is not known[n] for n in names):
            before = dict(group)
            try:
                self._check(group)
            except UsageError:
                group.update(before)
                raise
            self._accepted[k] = {n: group[n] for n in names}
        for i, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.is_sparse:
                raise UsageError(
                    f"{type(self).__name__}: parameter {i} has a sparse gradient; "
                    "set sparse=False in its layer"
                )

    def _start(self, p: Tensor, group: Options) -> State:
        """Returns the state of a parameter before its first step."""
        names = [b for b in self.buffers if nonzero(group.get(_OPTION_OF_BUFFER.get(b, ""), 1.0))]
        return {"step": step_count(), **{name: torch.zeros_like(p) for name in names}}

    def _update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        """Performs the step of one parameter: counts it, applies the weight decay, moves it."""
        if "step" in state:
            state["step"] += 1
        if nonzero(decay := group.get("weight_decay", 0.0)):
            if group["decoupled_weight_decay"] if self.decoupled is None else self.decoupled:
                p.mul_(self._factor(1 - group["lr"] * decay, p))
            else:
                grad = self._plus(grad, p, decay)
        if self.buffers:  # without these, a complex parameter needs no real arithmetic
            p, grad, *buffers = real_views(p, grad, *map(state.get, self.buffers))
            self._advance(p, grad, buffers, state, group)
        else:
            self._advance(p, grad, [], state, group)

    def _advance(self, p: Tensor, grad: Tensor, buffers: list[Any], state: State, group: Options) -> None:
        """Moves a parameter. buffers: the states of `buffers`, real; None for one that is not there."""
        raise NotImplementedError

    def _update_others(
        self, p: Tensor, grad: Tensor, state: State, group: Options, frozen: list[int]
    ) -> None:
        """Updates a parameter and its state, except for the rows of the frozen members.

        Step states are `[N]` where the members differ in them. A buffer that the step makes has zeros in the
        frozen members' rows.
        """
        before = {k: torch.as_tensor(v).clone() for k, v in state.items() if k in self.step_states}
        rows = {k: v[frozen].clone() for k, v in state.items() if k not in before and _has_rows_of(v, p)}
        own = p[frozen].clone()
        self._update(p, grad, state, group)
        p[frozen] = own
        for key, value in state.items():
            if key in before:
                each, last = (torch.as_tensor(v).expand(p.shape[0]).clone() for v in (value, before[key]))
                each[frozen] = last[frozen]
                state[key] = each[0].clone() if (each == each[0]).all() else each
            elif _has_rows_of(value, p):
                value[frozen] = rows.get(key, 0)

    # ---------------------------------------------------------------- arithmetic of the updates

    def _rate(self, rate: PerMember, like: Tensor) -> Tensor:
        """Returns a rate as a tensor `[N, 1, ..., 1]`, from a cache."""
        key = (rate.values, like.dtype, like.device, like.ndim)
        if key not in self._tensors:
            if len(self._tensors) >= _MAX_CACHED_RATES:
                self._tensors.clear()
            self._tensors[key] = rate.tensor(like)
        return self._tensors[key]

    def _factor(self, rate: float | PerMember, like: Tensor) -> Any:
        """Returns what a tensor like `like` is multiplied with: the number, or `[N, 1, ..., 1]`."""
        return self._rate(rate, like) if isinstance(rate, PerMember) else rate

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

    def _move_by_quotient(self, p: Tensor, x: Tensor, y: Tensor, rate: float | PerMember) -> None:
        """Computes `p -= rate * x / y` in place."""
        if isinstance(rate, PerMember):
            self._move(p, x / y, rate)
        else:
            p.addcdiv_(x, y, value=-rate)

    def _filled(self, p: Tensor, number: float | PerMember) -> Tensor:
        """Returns a state with an option's number at each place, in both parts of a complex one."""
        state = torch.zeros_like(p)
        (real,) = real_views(state)
        real.add_(self._factor(number, real))
        return state

    def _average(self, average: Tensor, x: Tensor, kept: float | PerMember) -> None:
        """Computes `average = kept * average + (1 - kept) * x` in place."""
        if isinstance(kept, PerMember):
            self._move(average, average - x, 1 - kept)
        else:
            average.lerp_(x, 1 - kept)

    def _average_square(self, average: Tensor, x: Tensor, kept: float | PerMember) -> None:
        """Computes `average = kept * average + (1 - kept) * x * x` in place."""
        average.mul_(self._factor(kept, average))
        if isinstance(kept, PerMember):
            average.addcmul_(x * x, self._rate(1 - kept, x))
        else:
            average.addcmul_(x, x, value=1 - kept)


def nonzero(rate: float | PerMember) -> bool:
    """Whether a rate is not zero, for any member."""
    return any(rate) if isinstance(rate, PerMember) else rate != 0


def has_member_axis(p: Tensor, members: int) -> bool:
    """Whether axis 0 of a parameter is the member axis."""
    return not getattr(p, ONE_FOR_ALL, False) and p.ndim > 0 and p.shape[0] == members


def _why_not(p: Tensor, key: str) -> str:
    """Returns why a parameter has no rates of so many members, and what to do."""
    group = f"[{{'params': own}}, {{'params': shared, {key!r}: {_EXAMPLES.get(key, '1e-3')}}}]"
    if getattr(p, ONE_FOR_ALL, False):
        return f"one weight for all members. Put it in a group with one number: {group}"
    if hasattr(p, ONE_FOR_ALL):  # of a fused module, which knows its members
        return f"of {p.shape[0]} members. Give {p.shape[0]} numbers, or one for all members"
    if not p.ndim:
        return f"without a member axis. Put it in a group with one number: {group}"
    return (
        f"whose axis 0 has {p.shape[0]}. If this is the member axis, give {p.shape[0]} numbers; if it is one "
        f"weight for all members, put it in a group with one number: {group}"
    )


def _has_rows_of(value: Any, p: Tensor) -> bool:
    """Whether a state has a number for each number of a parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _parse_pair(key: str, pair: Any, who: str) -> tuple[Any, Any]:
    """Returns an option of two parts, each one number or one for each member. Raises UsageError."""
    pair = plain_numbers(pair)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(
            f"{who}: {key} are {pair!r}; give a pair whose parts are a number, or one for each member"
        )
    parsed = (parse_rate(pair[0], f"{who}: {key}[0]"), parse_rate(pair[1], f"{who}: {key}[1]"))
    if key == "betas" and not all(number < 1 for part in parsed for number in numbers(part)):
        raise UsageError(f"{who}: betas are {pair}; each must be at least 0 and below 1")
    return parsed


def step_count(start: float | PerMember = 0.0) -> Tensor:
    """Returns a step state as torch's optimizers store it: `[]`, or `[N]` for one number for each member."""
    double = torch.get_default_dtype() == torch.float64
    return torch.tensor(
        list(start) if isinstance(start, PerMember) else start,
        dtype=torch.float64 if double else torch.float32,
    )


def step_values(count: Tensor) -> float | PerMember:
    """Returns the numbers of a step state."""
    return PerMember(count.tolist()) if isinstance(count, Tensor) and count.ndim else float(count)


def real_views(p: Tensor, *others: Tensor | None) -> list[Any]:
    """Returns a parameter and its states as real tensors: a complex number as two."""
    if not p.is_complex():
        return [p, *others]
    return [None if t is None else torch.view_as_real(t) for t in (p, *others)]


def _plain(option: Any) -> Any:
    """Returns an option with lists in place of the numbers for each member, also inside a pair."""
    if isinstance(option, PerMember):
        return list(option)
    return tuple(_plain(part) for part in option) if isinstance(option, tuple) else option
