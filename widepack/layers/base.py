"""Defines `WideLayer`, the base class of the wide layers: `WideLinear` for N `nn.Linear`, and so on.

A wide layer is the primitive that lowering uses, with parameters. Its forward calls the strategies of the op
in the registry on `[N, ...]` values. It records the ops that the strategy called (`Recorder`), and repeats
them for the next call with inputs of the same form. A strategy is chosen in this order:

1. The strategy that `strategy` names. If it does not apply, the call is refused with an error.
2. With `auto`, the first strategy that applies. If gradients are computed, it must have a derivative.
3. `sequential`, which runs the op once for each member.

Before the first call with inputs of new shapes, the member runs on the meta device. If it refuses the inputs,
the wide layer raises the member's error. If the wide layer's output has another shape or dtype than the
member's, this is an error of widepack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..errors import InputError, LoweringError, UsageError
from ..fused.same_members import refuse_mismatches
from ..fused.skeleton import ModuleSkeleton
from ..fused.stacked_parameters import member_module, plan_weights, stack
from ..ir import ops
from ..ir.encoding import map_arguments, type_of
from ..ir.ops import full_name
from ..ir.values import Shared, Stacked, Value
from ..registry.registry import Strategy, strategies_of
from ..registry.sequential import sequential
from ..registry.writer import EagerWriter, put_shared, unwrap, wide_items
from .arguments import (
    Form,
    checked_modules,
    class_name,
    device_type,
    form_of,
    literals,
    member_on_meta,
    named_tensors,
    stack_results,
    tensors_in,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_SIGNATURES = 256  # the most forms of calls that a layer remembers
_PUBLIC = "widepack.primitives"  # where a user finds the layers, and where pickles name them


class WideLayer(nn.Module):
    """Base class of the wide layers: N modules of one `torch.nn` class as one module.

    The parameters are stacked to `[N, ...]` and keep the module's names, for example `weight`. Inputs and
    outputs have the member axis in front: `[N, B, ...]`. The modules are copied, and they do not change.

    A subclass sets the class attributes and `wide`. Two follow from its name: `member`, the class of
    `torch.nn` that is named after `Wide`, and `spatial`, the digit in it: 2 for `WideConv2d`.

    - `ops`: the ops whose strategies the layer runs. `{n}` in a name stands for `spatial`.
    - `draws`: whether the layer draws random numbers, for each member its own.
    - `excluded_strategies`: strategies that make no sense in a layer.

    Args:
        modules: The N modules. Each is exactly of the class `member`. They differ in their weights only.
        strategy: A registered strategy of `ops`, `"sequential"`, or `"auto"`. Default: `"auto"`.

    Raises:
        UsageError: There are no modules, a module is of another class, or no such strategy exists.
        MemberMismatch: The modules differ in more than their weights. The message lists all differences.

    Example:
        >>> from widepack.primitives import WideLinear
        >>> layer = WideLinear.from_modules([nn.Linear(64, 10) for _ in range(8)])
        >>> y = layer(torch.randn(8, 32, 64))  # [N, B, 64] -> [N, B, 10]
        >>> linears = layer.to_modules()       # 8 nn.Linear
    """

    member: ClassVar[type[nn.Module]]
    spatial: ClassVar[int] = 0
    ops: ClassVar[tuple[str, ...]]
    draws: ClassVar[bool] = False
    excluded_strategies: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(f"{__package__}.") and not cls.__name__.startswith("_"):
            cls.__module__ = _PUBLIC  # pickles name the public place
            cls.member = getattr(nn, cls.__name__.removeprefix("Wide"))
            cls.spatial = int("".join(filter(str.isdigit, cls.__name__)) or 0)
            cls.ops = tuple(op.format(n=cls.spatial) for op in cls.ops)

    def __init__(self, modules: Sequence[nn.Module], strategy: str = "auto") -> None:
        super().__init__()
        modules = checked_modules(modules, self.member, self.name)
        refuse_mismatches(modules, self.name, options=True)
        self.members = len(modules)
        self._skeleton, self._weights = ModuleSkeleton(modules[0]), plan_weights(modules, ())
        with torch.inference_mode(False), torch.no_grad():
            stack(self, modules, self._weights)
        self.training = modules[0].training
        self.refuse_options()
        self._member_forms: dict[Any, list[Form] | None] = {}  # by the form of a call
        self._recorded: dict[Any, Steps] = {}  # by op and the form of its arguments
        self.strategy = strategy

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module], strategy: str = "auto") -> Self:
        """Makes a wide layer of N modules.

        Args:
            modules: The N modules, for example N `nn.Linear` of the same sizes.
            strategy: A registered strategy, `"sequential"`, or `"auto"`. Default: `"auto"`.

        Returns:
            The wide layer. Its parameters are copies, stacked to `[N, ...]`.

        Raises:
            UsageError: There are no modules, a module is of another class, or no such strategy exists.
            MemberMismatch: The modules differ in more than their weights.

        Example:
            >>> layer = WideConv2d.from_modules([nn.Conv2d(3, 16, 3) for _ in range(4)])
        """
        return cls(modules, strategy)

    def to_modules(self) -> list[nn.Module]:
        """Returns the members as N modules of `torch.nn`.

        Returns:
            N modules of the class `member`, with the weights and the mode that the layer has now. They are
            copies: a change of one does not change the layer.

        Example:
            >>> first, *others = layer.to_modules()
        """
        return [member_module(self, self._skeleton, self._weights, i) for i in range(self.members)]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out of copies and pickles what earlier calls stored."""
        return {**self.__dict__, "_member_forms": {}, "_recorded": {}}

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def options(self) -> Any:
        """The member's options under their names: a module of its class on the meta device."""
        return self._skeleton.module

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names that `strategy` accepts.

        Example:
            >>> layer.strategies[-1]
            'auto'
        """
        names = [s for op in self.ops for s in self._strategies_of(full_name(op))]
        return tuple(dict.fromkeys([*names, "sequential", "auto"]))

    @property
    def strategy(self) -> str:
        """The name of the strategy. Setting an unknown name raises UsageError.

        Example:
            >>> layer.strategy = "sequential"
        """
        return self._strategy

    @strategy.setter
    def strategy(self, name: str) -> None:
        if name not in self.strategies:
            raise UsageError(f"{self.name} has no strategy {name!r}; it has {', '.join(self.strategies)}")
        self._strategy = name

    def refuse_options(self) -> None:
        """Raises UsageError for options that no wide layer can have. A subclass overrides it."""

    def wide(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members after the inputs were checked. A subclass defines it with the module's own
        arguments.
        """
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of all members.

        For an input that all members share, give `x.expand(N, *x.shape)`. If no gradient of it is computed,
        the layer runs it as one Shared value.

        Args:
            *args: The module's own arguments. Each tensor is `[N, ...]`, with the member axis in front.
            **kwargs: The same, by name.

        Returns:
            What the module returns, each tensor `[N, ...]`.

        Raises:
            InputError: An input has no member axis of length N.
            UsageError: The strategy does not apply to these inputs.
            Exception: What the member itself raises for these inputs.

        Example:
            >>> y = layer(torch.randn(8, 32, 64))  # [N, B, 64] -> [N, B, 10]
        """
        self._check_member_axes(args, kwargs)
        autocast = torch.is_autocast_enabled(device_type(args, kwargs))
        expected = None if torch.compiler.is_compiling() else self._expected_forms(args, kwargs, autocast)
        output = self.wide(*args, **kwargs)
        if expected is not None:
            leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
            forms = [form_of(t, 1) for t in leaves if isinstance(t, Tensor)]
            if ([f[:-1] for f in forms] if autocast else forms) != expected:
                raise LoweringError(
                    f"{self.name} returned {forms}, but a member returns {expected}. "
                    "This is an error of widepack; please report it"
                )
        return output

    def _check_member_axes(self, args: Any, kwargs: Any) -> None:
        """Raises InputError for an input whose axis 0 is not the member axis."""
        only_tensors = not kwargs and all(isinstance(a, Tensor) for a in args)
        name: int | str | None = None
        for name, x in enumerate(args) if only_tensors else named_tensors(*self._batched(args, kwargs)):
            if not x.ndim or x.shape[0] != self.members:
                raise InputError(
                    f"{self.name} takes every input as [{self.members}, ...], with the member axis in front, "
                    f"and input {name} is {type_of(x)}. For an input that all members share, give "
                    f"x.expand({self.members}, *x.shape)"
                )
        if name is None and (args or kwargs):  # without arguments the member's own error says what is missing
            classes = ", ".join(class_name(v) for v in (*args, *kwargs.values()))
            raise InputError(
                f"{self.name} takes tensors [{self.members}, ...], with the member axis in front, "
                f"and was given {classes}"
            )

    def _batched(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments whose tensors must have the member axis in front."""
        return args, kwargs

    def _expected_forms(self, args: Any, kwargs: Any, autocast: bool) -> list[Form] | None:
        """Returns shape and dtype of each tensor that a member answers, or None where the meta device cannot
        tell.

        Under autocast, which chooses dtypes by the device, the forms have no dtypes.
        """
        key: Any = (
            self.training,
            autocast,
            *(p.dtype for p in self._parameters.values() if p is not None),
        )
        if not kwargs and all(isinstance(a, Tensor) for a in args):
            key += tuple((a.shape, a.dtype) for a in args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key += (str(spec), *((v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves))
        if key not in self._member_forms:
            if len(self._member_forms) >= _MAX_SIGNATURES:
                self._member_forms.clear()
            leaves, spec = pytree.tree_flatten((args, kwargs))
            inputs = [member_on_meta(v, autocast) if isinstance(v, Tensor) else v for v in leaves]
            tensors = (*self.named_parameters(), *self.named_buffers())
            weights = {n: member_on_meta(t, autocast) for n, t in tensors}
            forms = self._run_member_on_meta(weights, *pytree.tree_unflatten(inputs, spec))
            self._member_forms[key] = forms if forms is None or not autocast else [f[:-1] for f in forms]
        return self._member_forms[key]

    def _run_member_on_meta(self, weights: dict[str, Tensor], args: Any, kwargs: Any) -> list[Form] | None:
        """Returns the forms of a member's output. Weights and inputs are on the meta device."""
        self.options.train(self.training)
        try:
            with torch.no_grad():
                output = torch.func.functional_call(self.options, weights, args, kwargs)
        except NotImplementedError:  # an op without a meta kernel
            return None
        return [form_of(t) for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]

    def run(self, op: str, *args: Any, main: bool = True, **kwargs: Any) -> Any:
        """Runs one op for all members.

        Args:
            op: The op's name, for example `"linear"`.
            *args: The op's arguments. A tensor is `[N, ...]`; a wide value is taken as it is.
            main: Whether the strategy that the user named must be one of this op. If False, an op without a
                strategy of this name runs with `auto`.
            **kwargs: The op's arguments by name.

        Returns:
            A tensor `[N, ...]`, or a tuple of them with None for each value that a strategy leaves out.

        Raises:
            UsageError: The named strategy does not apply.
        """
        op = full_name(op)
        positional, named = self._wide_values(list(args)), self._wide_values(kwargs)
        wides = wide_items([positional, named])
        values = [v.value for v in wides]  # type: ignore[union-attr]  # no Ragged
        tensors = [v.fake for v in values]
        device = tensors[0].device.type
        torch_only = torch.is_autocast_enabled(device) or (
            torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        )
        key = None
        if not torch.compiler.is_compiling():
            forms = tuple((type(v), t.shape, t.stride(), t.dtype, t.device) for v, t in zip(wides, tensors))
            key = op, self._strategy, torch_only, main, forms, literals(positional), literals(named)
            if key in self._recorded:
                return self._recorded[key].run(tensors)
        writer = Recorder(self.members, device, values)
        writer.op = op
        if all(isinstance(v, Shared) for v in wides) and ops.pure(op, positional, named):
            output = writer.shared(writer.call(op, *put_shared(positional), **put_shared(named)))
        else:
            chosen = self._choose(writer, positional, named, torch_only, main)
            output = (
                sequential(writer, op, positional, named)
                if chosen is None
                else chosen.rule(writer, *positional, **named)
            )
        result = stack_results(writer, output)
        steps = writer.recorded(result)
        if key is not None and steps is not None:
            if len(self._recorded) >= _MAX_SIGNATURES:
                self._recorded.clear()
            self._recorded[key] = steps
        return tensors_in(result)

    def _strategies_of(self, op: str) -> dict[str, Strategy]:
        """Returns the strategies of an op that a layer can use, by name."""
        return {name: s for name, s in strategies_of(op).items() if name not in self.excluded_strategies}

    def _choose(
        self, writer: EagerWriter, args: Any, kwargs: Any, torch_only: bool, main: bool
    ) -> Strategy | None:
        """Returns the strategy, or None for `sequential`.

        `torch_only` requires a strategy of torch's own ops, which have derivatives and follow autocast.
        Raises UsageError where the strategy that the user named does not apply.
        """
        if self.strategy == "sequential":
            return None
        known = self._strategies_of(writer.op)
        fits = [
            s for s in known.values() if (s.derivative or not torch_only) and s.when(writer, *args, **kwargs)
        ]
        if self.strategy not in known and (not main or self.strategy == "auto"):
            return self.automatic([s for s in fits if not s.on_request], args)
        named = next((s for s in fits if s.name == self.strategy), None)
        if named is not None:
            return named
        why = ""
        if self.strategy in known and torch_only and not known[self.strategy].derivative:
            why = (
                " has no derivative and ignores autocast (call it under torch.no_grad(), without "
                "autocast). It"
            )
        operands = ", ".join(
            f"{type(v).__name__} {type_of(v.value.fake)}"  # type: ignore[union-attr]  # no Ragged
            for v in wide_items([args, kwargs])
        )
        raise UsageError(
            f"{self.name}: strategy {self.strategy!r}{why} does not apply to {writer.op} over {operands}; "
            f"those that do: {', '.join([*(s.name for s in fits), 'sequential', 'auto'])}"
        )

    def automatic(self, fits: list[Strategy], args: Any) -> Strategy | None:
        """Returns the strategy that `auto` takes of those that apply: the first. None means `sequential`."""
        return next(iter(fits), None)

    def _wide_values(self, arguments: Any) -> Any:
        """Returns the arguments with every tensor as a wide value, in lists and dicts too."""
        if isinstance(arguments, Tensor):
            x = arguments
            expanded = x.shape[0] > 1 and x.stride(0) == 0 and x.numel() > 0 and not self.draws
            if expanded and not (x.requires_grad and torch.is_grad_enabled()):
                return Shared(Value(None, x[0]))
            return Stacked(Value(None, x))
        if isinstance(arguments, (list, tuple)):
            return [self._wide_values(v) for v in arguments]
        if isinstance(arguments, dict):
            return {k: self._wide_values(v) for k, v in arguments.items()}
        return arguments

    def __repr__(self) -> str:
        parts = [f"{self.members} members", self.sizes(), f"strategy={self.strategy!r}"]
        return f"{self.name}({', '.join(filter(None, parts))})"

    def sizes(self) -> str:
        """Returns the sizes and options as text, as `repr` shows them."""
        return str(self.options.extra_repr())


# ---------------------------------------------------------------- recorded strategies
# A strategy looks at kinds, sizes, strides, dtypes and the device, never at data. For inputs that agree in
# these, its steps are the same.


@dataclass(frozen=True, slots=True)
class ValueIndex:
    """The number of a value. Inputs are counted first, then the result of each step."""

    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """A recorded strategy.

    Attributes:
        steps: For each step the op, its arguments and its keyword arguments. A `ValueIndex` stands for a
        tensor.
        result: The structure of the result, with a `ValueIndex` for each tensor.
    """

    steps: Sequence[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]]
    result: Any

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Runs the steps on other inputs, in the order of the recorded ones, and returns the result."""
        values: list[Any] = list(inputs)
        for op, args, kwargs in self.steps:
            positional = [values[a.number] if type(a) is ValueIndex else _fill(a, values) for a in args]
            if kwargs:
                values.append(op(*positional, **{k: _fill(v, values) for k, v in kwargs.items()}))
            else:
                values.append(op(*positional))
        return _fill(self.result, values)


class Recorder(EagerWriter):
    """Runs each op of a strategy at once, and records it. `inputs` are the values that the strategy reads."""

    def __init__(self, members: int, device: str, inputs: Sequence[Value]) -> None:
        super().__init__(members, device)
        self._indices = {value: ValueIndex(i) for i, value in enumerate(inputs)}
        self._steps: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []
        self._repeatable = True  # False once an argument is a tensor that no input and no step gave

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        function = ops.function(op)
        value = Value(None, function(*unwrap(args), **unwrap(kwargs)))
        positional = [self._with_indices(a) for a in args]
        self._steps.append((function, positional, {k: self._with_indices(v) for k, v in kwargs.items()}))
        self._indices[value] = ValueIndex(len(self._indices))
        return value

    def recorded(self, result: Any) -> Steps | None:
        """Returns the steps that computed `result`, or None if they cannot be repeated."""
        steps = Steps(self._steps, self._with_indices(result))
        return steps if self._repeatable else None

    def _with_indices(self, argument: Any) -> Any:
        """Returns an argument with a `ValueIndex` for each value."""
        return map_arguments(argument, self._index_of)

    def _index_of(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            if leaf not in self._indices:
                self._repeatable = False
            return self._indices.get(leaf)
        if isinstance(leaf, (Tensor, Shared, Stacked)):
            self._repeatable = False
        return leaf


def _fill(argument: Any, values: Sequence[Any]) -> Any:
    """Returns an argument with the values in place of their indices."""
    if type(argument) is ValueIndex:
        return values[argument.number]
    if isinstance(argument, (list, tuple)):
        return type(argument)([_fill(a, values) for a in argument])
    return argument
