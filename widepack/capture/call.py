"""Describes one call of a member: its arguments, tensor by tensor, with a name for every dynamic dim."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn

from widepack_artifacts.entry import Parameter
from widepack_artifacts.tree import Tree

from ..errors import CaptureError
from ..ir.guards import Axis, InputLeaf, factor_of
from ..ir.tensor_type import TensorType
from ..spec.dtypes import dtype_name
from ..spec.entries import FORWARD, method_of
from ..spec.input_spec import DimExpr
from .named_fields import Make, named_fields


@dataclass(frozen=True)
class MemberCall:
    """A call of a member.

    leaves: its tensors, in order. signature: the parameters of the method that the call uses. sizes: letter
    -> size in the example. makes: name of a class in the signature -> what makes an object of it of the
    values
    of its fields.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[InputLeaf, ...]
    signature: tuple[Parameter, ...]
    sizes: dict[str, int]
    makes: Mapping[str, Make] = field(default_factory=dict)


def arrange(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: Mapping[str, Any],
    sizes: Mapping[str, int],
    entry: str = FORWARD,
    by_name: bool = False,
) -> MemberCall:
    """Binds a call to the parameters of forward, or of another method, and names every tensor in it.

    Args:
        module: The member.
        args: The positional arguments.
        kwargs: The keyword arguments.
        axes: Input name -> {axis: letter}; nested as the input is, where it is no tensor.
        sizes: Letter -> its size in the example.
        entry: The method.
        by_name: Whether hooks that take keywords get what the call gives by name. Otherwise a module with
            hooks is called by position, as a comparison of its answers calls it.

    Raises:
        CaptureError: The method does not take these inputs.
    """
    signature = inspect.signature(method_of(module, entry))
    if entry == FORWARD and not args and _has_hooks(module, by_name):
        args, kwargs = _positional(signature, kwargs)
    bound = _bound(module, signature, args, kwargs, entry)
    call = _CallReader(entry, axes, dict(sizes))
    positional = True  # until one that a caller may give by keyword only, or that is not in the program
    for name, parameter in signature.parameters.items():
        by_position = (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        positional = positional and parameter.kind in by_position
        if name in bound.arguments:
            call.add(parameter, bound.arguments[name], positional)
        else:
            positional = call.add_default(parameter, positional) and positional
    ordered = {p.name: kwargs[p.name] for p in call.signature if p.name in kwargs}
    return MemberCall(tuple(args), ordered, tuple(call.leaves), tuple(call.signature), call.sizes, call.makes)


def _has_hooks(module: nn.Module, positional: bool = False) -> bool:
    """Returns whether the module has hooks of forward. positional: of those that see no keywords."""
    found = vars(module)
    return any(
        not positional or number not in found.get(f"{kind}_with_kwargs", ())
        for kind in ("_forward_pre_hooks", "_forward_hooks")
        for number in found.get(kind, ())
    )


def _positional(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the inputs of a call by position as far as possible, and the others by keyword."""
    args: list[Any] = []
    rest = dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name not in rest:
            break
        args.append(rest.pop(name))
    return args, rest


def _bound(
    module: nn.Module,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    entry: str,
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as e:
        for_one = f"{entry}:{next(iter(signature.parameters), 'x')}=..."
        several = f", and with several entries write {for_one} for one of them alone"
        several = "" if entry == FORWARD else several
        raise CaptureError(
            f"{type(module).__name__}.{entry}{signature} does not take the inputs {_names(args, kwargs)}: "
            f"{e}; name each input as {entry} does{several}"
        ) from e


class _CallReader:
    """Reads the arguments of a call. leaves, signature, sizes and makes grow with each argument."""

    def __init__(self, entry: str, axes: Mapping[str, Any], sizes: dict[str, int]) -> None:
        self.entry = entry
        self.axes = axes
        self.sizes = sizes
        self.leaves: list[InputLeaf] = []
        self.signature: list[Parameter] = []
        self.makes: dict[str, Make] = {}

    def add(self, parameter: inspect.Parameter, value: Any, positional: bool) -> None:
        """Adds a parameter that the call gives a value."""
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            for i, v in enumerate(value):
                every = self.axes.get(name)  # for all positions, or a list with one entry for each
                one = every[i] if isinstance(every, (list, tuple)) and i < len(every) else every
                tree = self._tree(v, f"{name}_{i}", self.axes.get(f"{name}_{i}", one))
                self.signature.append(Parameter(f"{name}_{i}", "positional", tree))
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, v in value.items():
                self.signature.append(Parameter(key, "keyword", self._tree(v, key, self.axes.get(key))))
        else:
            tree, default = self._tree(value, name, self.axes.get(name)), parameter.default
            is_default = "const" in tree and type(tree["const"]) is type(default) and tree["const"] == default
            kind = "positional" if positional else "keyword"
            self.signature.append(Parameter(name, kind, tree, is_default))

    def add_default(self, parameter: inspect.Parameter, positional: bool) -> bool:
        """Adds a parameter that the call leaves out. Returns whether the next one may still be positional.

        The default belongs to the program: it keeps its position, and no other value is accepted.
        """
        default = parameter.default
        infinite = isinstance(default, float) and not math.isfinite(default)  # JSON cannot hold it
        if default is None or (isinstance(default, (bool, int, float, str)) and not infinite):
            kind = "positional" if positional else "keyword"
            self.signature.append(Parameter(parameter.name, kind, {"const": default}, True))
            return True
        return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)

    def _tree(self, value: Any, name: str, dims: Any) -> Tree:
        """Returns the tree of one value, and adds its tensors to the leaves. dims: letters of its axes."""
        if isinstance(value, torch.Tensor):
            return self._leaf(value, name, dims or {})
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"const": value}
        if (found := named_fields(value)) is not None:
            rows, make = found
            kind = self._class_name(type(value).__name__, make)
            dims = dims if isinstance(dims, dict) else {}
            fields = [[k, self._tree(v, f"{name}.{k}", dims.get(k))] for k, v in rows]
            return {"output": [kind, fields]}
        if isinstance(value, (list, tuple)):
            each = [dims[i] if isinstance(dims, (list, tuple)) else dims for i in range(len(value))]
            parts = [self._tree(v, f"{name}.{i}", each[i]) for i, v in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": parts}
        if isinstance(value, dict):
            dims = dims if isinstance(dims, dict) else {}
            return {"dict": [[k, self._tree(v, f"{name}.{k}", dims.get(k))] for k, v in value.items()]}
        way = ""
        if is_dataclass(value):
            way = (
                f"; register this dataclass with torch.export.register_dataclass({type(value).__name__}), or "
                f"let {self.entry} take its fields as separate inputs, or as a dict"
            )
        raise CaptureError(
            f"input {name} is a {type(value).__name__}; inputs are tensors, numbers, strings, None, and "
            f"lists, tuples, named tuples and dicts of them{way}"
        )

    def _class_name(self, name: str, make: Make) -> str:
        """Returns the name of a class in the signature, and notes what makes its objects.

        Each object in a call has an entry of its own, because a class may hold more than its fields.
        """
        names = itertools.chain([name], (f"{name}_{k}" for k in itertools.count(2)))
        free = next(n for n in names if n not in self.makes)
        self.makes[free] = make
        return free

    def _leaf(self, value: torch.Tensor, name: str, dims: Mapping[Any, Any]) -> Tree:
        axes: dict[int, str] = {}
        for axis, letter in ((int(a), str(d)) for a, d in dims.items()):
            axis += value.ndim if -value.ndim <= axis < 0 else 0
            known = 0 <= axis < value.ndim
            axes[axis] = _free_letter(letter, value.shape[axis], self.sizes) if known else letter
        self.leaves.append(InputLeaf(name, leaf_type(value, axes, name, self.sizes), value, axes))
        return {"leaf": len(self.leaves) - 1}


def keywords_beyond(module: nn.Module, call: MemberCall, entry: str) -> tuple[str, ...]:
    """Returns the inputs of a call that the entry takes as `**kwargs`."""
    parameters = inspect.signature(method_of(module, entry)).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(k for k in call.kwargs if k not in parameters)


def _free_letter(text: str, size: int, sizes: Mapping[str, int]) -> str:
    """Returns a dim's letter, or a new one if the example has another size under this letter: `B2` for `B`.

    With one letter, two dims would have to be equal, which the user may not have meant.
    """
    factor, letter = factor_of(text)
    if size % factor or sizes.get(letter, size // factor) == size // factor:
        return text
    others = (f"{letter}{k}" for k in itertools.count(2))
    free = next(n for n in others if sizes.get(n, size // factor) == size // factor)
    return str(DimExpr(free, factor))


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"argument {i}" for i in range(len(args))] + list(kwargs)) or "(none)"


def leaf_type(value: torch.Tensor, axes: Axis, name: str, sizes: dict[str, int]) -> str:
    """Returns a tensor's type, for example `float32[B,16]`, and adds the sizes of its letters to `sizes`.

    Raises:
        CaptureError: An axis does not exist, or a letter has two sizes.
    """
    shape: list[str] = [str(s) for s in value.shape]
    for axis, text in axes.items():
        if not -value.ndim <= axis < value.ndim:
            raise CaptureError(
                f"input {name}: axis {axis} is named {text}, but the example has {value.ndim} dims, "
                f"{list(value.shape)}; name only axes that it has"
            )
        factor, letter = factor_of(text)
        size = value.shape[axis]
        if size % factor:
            raise CaptureError(
                f"input {name}: axis {axis} is {text} and has {size} in the example, which is not a "
                f"multiple of {factor}; give an example of another size, or another factor"
            )
        if sizes.setdefault(letter, size // factor) != size // factor:
            raise CaptureError(
                f"input {name}: axis {axis} is {text} and has {size} in the example, but {letter} = "
                f"{sizes[letter]} elsewhere; equal letters are equal sizes: give this axis another letter"
            )
        shape[axis] = text
    return str(TensorType(dtype_name(value.dtype), tuple(shape)))
