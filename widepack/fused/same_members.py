"""Checks that live modules can be members of one fused module.

They must have one architecture, dtype, device and mode, which is visible without running anything. Whether
they have one program, captures tell (captures.py). One error lists all differences.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from widepack_artifacts.errors import some

from ..capture.attributes import Difference, attributes_of, differences, texts_of_values
from ..capture.reachable import class_functions, edges
from ..errors import MemberMismatch, UsageError
from ..spec.dtypes import dense_instead, dtype_name
from .skeleton import first_names, weights_of
from .torch_module import buffer_dict, hooks_of_gradients, parameter_dict

_OWN = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"}


def same_class(one: type, other: type) -> bool:
    """Returns whether two classes have one name, the same bases and the same code.

    A factory that defines its class makes a new class at every call. `torch.fx` makes one for each
    GraphModule, and torch's parametrizations for each module. Such classes of one code are one class.
    """
    return one is other or not other_code(one, other)


def other_code(one: type, other: type) -> str:
    """Returns in words where two classes have other code; an empty text if they have the same."""
    if one is other:
        return ""
    if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
        return "another name"
    if len(one.__bases__) != len(other.__bases__):
        return "other bases"
    for a, b in zip(one.__bases__, other.__bases__):
        if why := other_code(a, b):
            return f"a base {b.__qualname__} that has {why}"
    ours, theirs = _own_code(one), _own_code(other)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return f"other code in {name}"
    return ""


def _own_code(cls: type) -> dict[str, Any]:
    """Returns the code of the functions of one class, without lines."""
    if issubclass(cls, fx.GraphModule):  # its forward is text that torch has compiled
        return {}
    names = vars(cls)
    return {n: _code(f.__code__) for n, f in class_functions(cls) if n in names}


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Returns what code does: two codes that do the same at other lines are equal."""
    constants = tuple(
        _code(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


def class_differences(one: nn.Module, other: nn.Module) -> tuple[Difference, ...]:
    """Returns what the classes of two modules' parts have in their bodies, closures and graphs, and differs.

    Only parts whose classes are two objects are compared. Two classes of one code may have other values in
    their bodies and closures.
    """
    parts = dict(other.named_modules(remove_duplicate=False))
    found: list[Difference] = []
    for path, part in one.named_modules(remove_duplicate=False):
        theirs = parts.get(path)
        if theirs is None or type(part) is type(theirs):
            continue
        prefix = f"{path}." if path else ""
        if isinstance(part, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
            texts = {f"{prefix}_code": repr(part.code)}, {f"{prefix}_code": repr(theirs.code)}
        else:
            texts = _texts(prefix, part), _texts(prefix, theirs)
        found += differences(*texts)
    return tuple(found)


def _texts(prefix: str, part: nn.Module) -> dict[str, str]:
    return texts_of_values([(f"{prefix}{name}", value) for name, value in _values(part)])


def _values(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what the class of a part has in its body and in the closures of its functions."""
    for base in type(part).__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, value in vars(base).items():
            if (
                name not in _OWN
                and not name.startswith("_abc_")
                and not isinstance(value, types.FunctionType)
            ):
                yield name, value
    yield from ((e.name, e.value) for e in edges(part) if e.how == "class")


MAX_DIFFERENCES = 400  # the most differences that one error lists
SAME_MODULES = "Members of one module differ in the values of their weights only"


def module_differences(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yields how `other` differs from `one`, which is member 0, in its modules and weights."""
    parts, other_parts = (dict(m.named_modules(remove_duplicate=False)) for m in (one, other))
    for name in dict.fromkeys([*parts, *other_parts]):
        label, a, b = name or "it", parts.get(name), other_parts.get(name)
        if a is None or b is None or not same_class(type(a), type(b)):
            if a is not None and b is not None and _class_words(a) == _class_words(b):
                yield f"{label} is {_class_words(b)}, in member 0 too, with {other_code(type(a), type(b))}"
            else:
                yield f"{label} is {_class_words(b)}, in member 0 {_class_words(a)}"
        elif a.training != b.training and not _parent_says_so(parts, other_parts, name):
            yield f"{label} is in {_mode(b)} mode, in member 0 in {_mode(a)} mode"
    yield from _weight_differences(weights_of(one), weights_of(other))


def _weight_differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Iterator[str]:
    ties, other_ties = first_names(one), first_names(other)
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        if a is None or b is None:
            yield f"{name} is {_weight_words(b)}, in member 0 {_weight_words(a)}"
            continue
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            yield f"{name} is {_weight_words(b)}, in member 0 {_weight_words(a)}"
        if _role(a) != _role(b) or a.requires_grad != b.requires_grad:
            yield f"{name} is {_role(b)}, in member 0 {_role(a)}"
        if ties[name] != other_ties[name]:
            yield f"{name} is {_tie(name, other_ties)}, in member 0 {_tie(name, ties)}"


def attributes_of_matching_parts(
    differences: Sequence[Difference], one: nn.Module, other: nn.Module
) -> list[Difference]:
    """Returns the attribute differences of parts that have one class and the same weight shapes in both
    members.

    Those of other parts follow from differences that the message names anyway.
    """
    parts, other_parts = (dict(m.named_modules(remove_duplicate=False)) for m in (one, other))
    matching = {
        n
        for n in parts
        if n in other_parts
        and same_class(type(parts[n]), type(other_parts[n]))
        and _shapes(parts[n]) == _shapes(other_parts[n])
    }

    def owner(path: str) -> str:
        while path and path not in parts and path not in other_parts:
            path = path.rpartition(".")[0]
        return path

    return [d for d in differences if owner(d.path) in matching]


def grouped_by_text(differences: Sequence[tuple[int, str]]) -> list[str]:
    """Returns `member 1: ...`; one row for several members with the same text: `members 1, 3-9: ...`."""
    members: dict[str, list[int]] = {}
    for i, words in differences:
        members.setdefault(words, []).append(i)
    return [
        f"member{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}: {words}"
        for words, numbers in members.items()
    ]


def numbered(title: str, rows: Sequence[str]) -> str:
    """Returns `title: (1) ...; (2) ...`."""
    return f"{title}: " + some((f"({k}) {words}" for k, words in enumerate(rows, 1)), MAX_DIFFERENCES, "; ")


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text: `1, 3-9`."""
    runs: list[list[int]] = []
    for k in numbers:
        if runs and runs[-1][-1] == k - 1:
            runs[-1] = [runs[-1][0], k]
        else:
            runs.append([k])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _shapes(part: nn.Module) -> dict[str, torch.Size | None]:
    tensors = (*parameter_dict(part).items(), *buffer_dict(part).items())
    return {n: None if v is None else v.shape for n, v in tensors}


def _parent_says_so(parts: Mapping[str, nn.Module], other_parts: Mapping[str, nn.Module], name: str) -> bool:
    """Whether the parents have the same two modes, so that the message of the parent includes this part."""
    parent = name.rpartition(".")[0]
    if not name or parent not in parts or parent not in other_parts:
        return False
    modes = parts[name].training, other_parts[name].training
    return modes == (parts[parent].training, other_parts[parent].training)


def _class_words(module: nn.Module | None) -> str:
    return "not there" if module is None else f"a {type(module).__module__}.{type(module).__qualname__}"


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _weight_words(value: torch.Tensor | None) -> str:
    return "not there" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)} on {value.device}"


def _role(value: torch.Tensor) -> str:
    if not isinstance(value, nn.Parameter):
        return "a buffer"
    return "a parameter that trains" if value.requires_grad else "a parameter that is frozen"


def _tie(name: str, ties: Mapping[str, str]) -> str:
    return "a separate tensor" if ties[name] == name else f"the same tensor as {ties[name]}"


def refuse_mismatches(models: Sequence[nn.Module], who: str = "", options: bool = False) -> None:
    """Refuses modules that differ from the first in more than their weights.

    Args:
        models: The members.
        who: What the error message begins with.
        options: Whether plain attributes must be equal too.

    Raises:
        MemberMismatch: Members differ. The message lists all differences.
        UsageError: A weight is lazy, or not a plain dense tensor.
    """
    for i, model in enumerate(models):
        _refuse_special_weights(i, model)
    own = attributes_of(models[0])
    found: list[tuple[int, str]] = []
    for i, model in enumerate(models[1:], 1):
        words = list(module_differences(models[0], model))
        if options or words:  # where members differ anyway, the message names the attributes too
            other = differences(own, attributes_of(model))
            listed = other if options else attributes_of_matching_parts(other, models[0], model)
            words += [
                f"{d.path} is {d.other or 'not there'}, in member 0 {d.one or 'not there'}" for d in listed
            ]
        found += [(i, w) for w in words]
    if found:
        title = f"{who}{': ' if who else ''}the members differ from member 0"
        raise MemberMismatch(f"{numbered(title, grouped_by_text(found))}. {SAME_MODULES}")
    _refuse_one_object(models)


def _refuse_one_object(models: Sequence[nn.Module]) -> None:
    """Raises UsageError if two members are one object that has weights or buffers."""
    first: dict[int, int] = {}
    for i, model in enumerate(models):
        if next(itertools.chain(model.parameters(), model.buffers()), None) is None:
            continue  # a pool or an activation
        if (k := first.setdefault(id(model), i)) != i:
            raise UsageError(
                f"members {k} and {i} are one module object. Give each member its own module, for example "
                "copy.deepcopy(model), or fuse(model, sample, n=...) for fresh copies"
            )


def _refuse_special_weights(i: int, model: nn.Module) -> None:
    """Raises UsageError for a weight of member i that cannot be stacked."""
    for name, value in weights_of(model).items():
        if is_lazy(value):
            raise UsageError(
                f"member {i}: {name} has no size yet; run a lazy module once, on an example, "
                "before you fuse it"
            )
        if value.layout is not torch.strided:
            raise UsageError(f"member {i}: {dense_instead(name, value.layout)}")
        if not _is_plain(type(value)):
            raise UsageError(
                f"member {i}: {name} is a {type(value).__name__}; fuse stacks only tensors and parameters "
                "whose class leaves torch's operations as they are"
            )
        if hooks_of_gradients(value):
            raise UsageError(
                f"member {i}: {name} has a hook of its gradient (register_hook, or "
                "register_post_accumulate_grad_hook), which would not run in a fused module. Remove it "
                f"before fuse, and register one on the fused module's {name}, whose gradient is [N, ...]"
            )


def _is_plain(cls: type[torch.Tensor]) -> bool:
    """Returns whether tensors of a class compute as torch's own do."""
    return cls in (nn.Buffer, torch.Tensor) or (
        issubclass(cls, nn.Parameter)
        and cls.__torch_function__ is nn.Parameter.__torch_function__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def refuse_gradients(module: nn.Module, trained: Collection[str]) -> None:
    """Refuses to train embeddings whose gradients a fused module cannot give.

    `trained` has the names of the parameters that train. Raises UsageError.
    """
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if f"{name}.weight".lstrip(".") not in trained:
            continue
        label = f"{name or 'the module'} ({type(part).__name__})"
        if part.max_norm is not None:
            raise UsageError(
                f"{label} has max_norm={part.max_norm}: torch writes the bounded rows into its weight at "
                "every call, without the optimizer. A fused module bounds them only in eval mode without "
                "gradients. To train it, set max_norm=None and bound the rows after each step (torch.renorm)"
            )
        if part.sparse:
            raise UsageError(
                f"{label} has sparse gradients, with the rows of one member. The weight of a fused module "
                "has the gradient of all members, which is dense. Set sparse=False"
            )
