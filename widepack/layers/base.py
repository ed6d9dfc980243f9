"""Faces: wide layers that a person uses by themselves, `WideLinear` for N `nn.Linear`, and so on.

A face is the primitive that lowering uses, with parameters: its forward calls the op's strategies in the registry on `[N, ...]` values, and notes the ops that they
wrote (steps.py), for the next call with values of the same form. What runs an op:

1. the strategy that `strategy` names; where it does not apply, the call is refused in words
2. with `auto` the first strategy that applies; of those with a derivative where gradients are asked for
3. `sequential`, the op once a member

Before the first call with inputs of new shapes the member itself is asked, on tensors without memory, whether it takes them, and what it would answer:
its errors are the face's, and an answer of another shape or dtype is an error of the face.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..ir import ops
from ..ir.encoding import type_of
from ..errors import InputError, LoweringError, UsageError
from ..registry.sequential import sequential
from ..fused.skeleton import Hollow
from ..lowering.interpreter import shared
from ..registry.registry import REGISTRY, Strategy, full_name
from ..fused.same_members import refuse_others
from ..fused.stacked_parameters import filled, rows_of, stack
from .recorder import Recorder, Steps
from ..ir.values import Shared, Stacked, Value, Wide
from ..registry.writer import EagerWriter, wide_items

if TYPE_CHECKING:
    from typing_extensions import Self

_SIGNATURES = 256  # shapes of calls that are remembered


class Face(nn.Module):
    """Base of the faces. N modules of one class as one, `[N, B, ...]` in and out, parameters `[N, ...]` under the module's own names.

    modules: of class `member` exactly, alike but for their numbers; they are copied. strategy: a registered one of `ops`, `sequential`, or `auto`.
    Raises: UsageError; MemberMismatch with all differences between the modules.
    """

    member: ClassVar[type[nn.Module]]
    ops: ClassVar[tuple[str, ...]]
    draws: ClassVar[bool] = False  # random numbers: one draw a member, whatever the members share

    def __init__(self, modules: Sequence[nn.Module], strategy: str = "auto") -> None:
        super().__init__()
        if not isinstance(modules, Iterable):
            raise UsageError(f"{self.name} takes a list of modules, not a {_class(modules)}")
        modules = list(modules)
        if not modules:
            raise UsageError(f"{self.name}: there are no modules; give at least one {self.member.__name__}")
        if type(modules[0]) is not self.member:
            raise UsageError(
                f"{self.name} takes modules of class torch.nn.{self.member.__name__}, and member 0 is of class {_class(modules[0])}. For a class of your own, or one "
                f"whose parameters are computed, widepack.fuse takes whole modules"
            )
        _refuse_own_forwards(modules, self.name)
        refuse_others(modules, self.name, options=True)
        self.members = len(modules)
        self._hollow, self._rows = Hollow(modules[0]), rows_of(modules, ())
        with torch.inference_mode(False), torch.no_grad():
            stack(self, modules, self._rows)
        self.training = modules[0].training
        self.refuse_options()
        self._seen: dict[Any, list[tuple[Any, ...]] | None] = {}
        self._steps: dict[Any, Steps] = {}
        self.strategy = strategy

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module], strategy: str = "auto") -> Self:
        """N modules as one. Raises: as the class."""
        return cls(modules, strategy)

    def to_modules(self) -> list[nn.Module]:
        """N modules with the numbers that the face has now, in its mode; nothing is shared with it."""
        return [filled(self, self._hollow, self._rows, i) for i in range(self.members)]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what calls have left."""
        return {**self.__dict__, "_seen": {}, "_steps": {}}

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def options(self) -> Any:
        """The member's options under their names: a module of its class whose tensors have no memory."""
        return self._hollow.module

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names that `strategy` may have."""
        names = [s for op in self.ops if (p := REGISTRY.get(full_name(op))) for s in p.strategies if s not in self.without]
        return tuple(dict.fromkeys([*names, "sequential", "auto"]))

    without: ClassVar[frozenset[str]] = frozenset()  # strategies that mean nothing for a layer

    @property
    def strategy(self) -> str:
        return self._strategy

    @strategy.setter
    def strategy(self, name: str) -> None:
        if name not in self.strategies:
            raise UsageError(f"{self.name} has no strategy {name!r}; it has {', '.join(self.strategies)}")
        self._strategy = name

    def refuse_options(self) -> None:
        """Refuse options that no wide layer can have. Raises: UsageError."""

    def wide(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, after its inputs were looked at. Arguments are the module's own."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward for all members. Arguments: the module's, each tensor `[N, ...]`. Returns: the module's, each tensor `[N, ...]`.

        An input that all members see is `x.expand(N, *x.shape)`; where no gradient of it is asked for it counts as one input.
        Raises: InputError; UsageError where `strategy` does not apply; what the module itself raises.
        """
        plain = not kwargs and all(isinstance(a, Tensor) for a in args)
        at: int | str | None = None
        for at, x in enumerate(args) if plain else _named(self._takes((args, kwargs))):
            if not x.ndim or x.shape[0] != self.members:
                raise InputError(
                    f"{self.name} takes every input as [{self.members}, ...], one a member in front, and input {at} is {type_of(x)}; "
                    f"one that all members see is x.expand({self.members}, *x.shape)"
                )
        if at is None and (args or kwargs):  # without any the member says what is missing
            words = ", ".join(_class(v) for v in (*args, *kwargs.values()))
            raise InputError(f"{self.name} takes tensors [{self.members}, ...], one member after the other in front, and was given {words}")
        cast = torch.is_autocast_enabled(_device(args, kwargs))
        want = None if torch.compiler.is_compiling() else self._expected(args, kwargs, cast)
        made = self.wide(*args, **kwargs)
        if want is not None:
            have = [_form(made, 1)] if isinstance(made, Tensor) else [_form(t, 1) for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
            if (have if not cast else [h[:-1] for h in have]) != want:
                raise LoweringError(f"{self.name} came out wrong: {have} where a member has {want}. This is an error of widepack; please report it")
        return made

    def _takes(self, given: Any) -> Any:
        """A call's arguments as far as their first axis is looked at."""
        return given

    def _expected(self, args: Any, kwargs: Any, cast: bool) -> list[tuple[Any, ...]] | None:
        """Shape and dtype of each tensor that a member answers with, as it says itself on tensors without memory; None where it cannot tell.

        cast: under autocast, which chooses dtypes by the device: shapes alone.
        """
        key: Any = self.training, cast, *(p.dtype for p in self._parameters.values() if p is not None)
        if not kwargs and all(isinstance(a, Tensor) for a in args):
            key += tuple((a.shape, a.dtype) for a in args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key += (str(spec), *((v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves))
        if key not in self._seen:
            if len(self._seen) >= _SIGNATURES:
                self._seen.clear()
            leaves, spec = pytree.tree_flatten((args, kwargs))
            given = [_empty(v, cast) if isinstance(v, Tensor) else v for v in leaves]
            own = {n: _empty(t, cast) for n, t in (*self.named_parameters(), *self.named_buffers())}
            found = self._alone(own, *pytree.tree_unflatten(given, spec))
            self._seen[key] = found if found is None or not cast else [f[:-1] for f in found]
        return self._seen[key]

    def _alone(self, own: dict[str, Tensor], args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
        """The forms of a member's answer. own: its parameters and buffers, without memory as all inputs."""
        self.options.train(self.training)
        try:
            with torch.no_grad():
                made = torch.func.functional_call(self.options, own, args, kwargs)
        except NotImplementedError:  # an op that has no form without memory
            return None
        return [_form(t) for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]

    def run(self, op: str, *args: Any, main: bool = True, **kwargs: Any) -> Any:
        """One op for all members. Tensors are Stacked `[N, ...]`, or `Shared`. main: a strategy that is named and not the op's is refused.

        Returns: a tensor `[N, ...]`, or a tuple of them, None for what a strategy leaves out.
        """
        op = full_name(op)
        given, named = self._values(list(args)), self._values(kwargs)
        wides = wide_items([given, named])
        values = [v.value for v in wides]  # type: ignore[union-attr]  # no Ragged
        tensors = [v.held for v in values]
        device = tensors[0].device.type
        plain = torch.is_autocast_enabled(device) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        key = None
        if not torch.compiler.is_compiling():
            forms = tuple((type(v), t.shape, t.stride(), t.dtype, t.device) for v, t in zip(wides, tensors))
            key = op, self._strategy, plain, main, forms, _literals(given), _literals(named)
            if key in self._steps:
                return self._steps[key].run(tensors)
        w = Recorder(self.members, device, values)
        w.op = op
        if all(isinstance(v, Shared) for v in wides) and ops.pure(op, given, named):
            made = w.shared(w.call(op, *shared(given), **shared(named)))
        else:
            chosen = self._chosen(w, given, named, plain, main)
            made = sequential(w, op, given, named) if chosen is None else chosen.rule(w, *given, **named)
        result = _stacked(w, made)
        steps = w.recorded(result)
        if key is not None and steps is not None:
            if len(self._steps) >= _SIGNATURES:
                self._steps.clear()
            self._steps[key] = steps
        return _held(result)

    def _chosen(self, w: EagerWriter, args: Any, kwargs: Any, plain: bool, main: bool) -> Strategy | None:
        """The strategy; None for `sequential`. plain: of torch's own ops alone, which have derivatives and which autocast knows. Raises: UsageError."""
        known = {n: s for n, s in REGISTRY[w.op].strategies.items() if n not in self.without} if w.op in REGISTRY else {}
        if self.strategy == "sequential":
            return None
        fits = [s for s in known.values() if (s.derivative or not plain) and s.when(w, *args, **kwargs)]
        if self.strategy in known or (main and self.strategy != "auto"):
            found = next((s for s in fits if s.name == self.strategy), None)
            if found is None:
                why = ""
                if self.strategy in known and plain and not known[self.strategy].derivative:
                    why = ", which has no derivative and knows no autocast (call under torch.no_grad() and without it)"
                read = ", ".join(f"{type(v).__name__} {type_of(v.value.held)}" for v in wide_items([args, kwargs]))  # type: ignore[union-attr]
                raise UsageError(
                    f"{self.name}: strategy {self.strategy!r}{why} does not apply to {w.op} over {read}; those that do: {', '.join([*(s.name for s in fits), 'sequential', 'auto'])}"
                )
            return found
        return self.automatic([s for s in fits if not s.asked], args)

    def automatic(self, fits: list[Strategy], args: Any) -> Strategy | None:
        """What `auto` takes of the strategies that apply: the first; None for `sequential`."""
        return next(iter(fits), None)

    def _values(self, given: Any) -> Any:
        """Tensors as wide values, in lists too."""
        if isinstance(given, Tensor):
            one = given.shape[0] > 1 and given.stride(0) == 0 and given.numel() > 0 and not self.draws
            if one and not (given.requires_grad and torch.is_grad_enabled()):
                return Shared(Value(None, given[0]))
            return Stacked(Value(None, given))
        if isinstance(given, (list, tuple)):
            return [self._values(v) for v in given]
        return {k: self._values(v) for k, v in given.items()} if isinstance(given, dict) else given

    def __repr__(self) -> str:
        return f"{self.name}({self.members} members, {', '.join(filter(None, [self.sizes(), f'strategy={self.strategy!r}']))})"

    def sizes(self) -> str:
        """Sizes and options, for a person."""
        return str(self.options.extra_repr())


def one_for_all(value: Tensor) -> Wide:
    """A tensor `[...]` that all members see."""
    return Shared(Value(None, value))


def numbers(given: Any, count: int) -> list[int]:
    """An option that is one number or `count` of them, as a list."""
    each = list(given) if isinstance(given, (list, tuple)) else [given]
    return each * count if len(each) == 1 else each


def _stacked(w: EagerWriter, made: Any) -> Any:
    """What a rule gives as Values `[N, ...]`."""
    if isinstance(made, (list, tuple)):
        return tuple(_stacked(w, m) for m in made)
    return None if made is None else w.stack(made)


def _held(result: Any) -> Any:
    return tuple(_held(r) for r in result) if isinstance(result, tuple) else None if result is None else result.held


def _literals(given: Any) -> Any:
    """What of arguments is no tensor, as something with a hash; a mark in the place of each tensor."""
    if isinstance(given, (Shared, Stacked)):
        return Value
    if isinstance(given, (list, tuple)):
        return tuple(map(_literals, given))
    return tuple((k, _literals(v)) for k, v in given.items()) if isinstance(given, dict) else (type(given), given)


def _named(given: Any) -> Iterator[tuple[int | str, Tensor]]:
    args, kwargs = given
    for i, x in enumerate(args):
        for leaf in pytree.tree_leaves(x):
            if isinstance(leaf, Tensor):
                yield i, leaf
    for name, x in kwargs.items():
        for leaf in pytree.tree_leaves(x):
            if isinstance(leaf, Tensor):
                yield name, leaf


def _device(args: Any, kwargs: Any) -> str:
    """The kind of device of a call's inputs."""
    if args and isinstance(args[0], Tensor):
        return args[0].device.type
    return next((t.device.type for _, t in _named((args, kwargs))), "cpu")


def _empty(t: Tensor, cast: bool) -> Tensor:
    """A member's part of a tensor, without memory. cast: floats of one dtype, as autocast brings them together."""
    return torch.empty(t.shape[1:], dtype=torch.float32 if cast and t.is_floating_point() else t.dtype, device="meta")


def _form(t: Tensor, first: int = 0) -> tuple[Any, ...]:
    return (*t.shape[first:], t.dtype)


def _refuse_own_forwards(modules: Sequence[nn.Module], who: str) -> None:
    for i, module in enumerate(modules):
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if any(getattr(part, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")):
                at = f"{name} of member {i}" if name else f"member {i}"
                raise UsageError(f"{who}: {at} has hooks, which nobody would call here; remove them (weight_norm of torch.nn.utils is one)")
            if "forward" in vars(part):
                at = f"{name} of member {i}" if name else f"member {i}"
                raise UsageError(f"{who}: {at} has a forward of its own, which nobody would call here; widepack.fuse takes such modules whole")


def _class(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
