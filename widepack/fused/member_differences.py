"""Describes in words how a live module differs from member 0: in classes, modes, weights and tied weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ..capture.attributes import Difference
from ..spec.dtypes import dtype_name
from .class_differences import other_code, same_class
from .skeleton import first_names, weights_of
from .torch_module import buffer_dict, parameter_dict

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
    text = "; ".join(f"({k}) {words}" for k, words in enumerate(rows[:MAX_DIFFERENCES], 1))
    more = len(rows) - MAX_DIFFERENCES
    return f"{title}: {text}" + (f"; and {more} more" if more > 0 else "")


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
