"""Compares the copies that a fused module works on with the user's own modules, under the same weights.

Each member runs once with changed weights, forward and backward, and so does its copy. Whatever in a copy
still used the original (a global name, an object of C) would run with the weights of before, and be found.
The weights are swapped into the user's own tensors and out again, and all else is put back (`unchanged.py`).
"""

from __future__ import annotations

import contextvars
import itertools
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts.errors import some

from ..capture.call import MemberCall
from ..capture.export import calm, clone
from ..capture.named_fields import known_forms
from ..capture.reachable import walk
from ..errors import UsageError
from ..ir.overlapping import copy_into, overlaps
from ..ir.torch_internals import memory_id
from .gradients import Gradients, error_above, gradients_of, largest_of, relative_bound, weighted_sum
from .skeleton import ModuleSkeleton, first_names, weights_of
from .unchanged import unchanged

_NOT_FOUND = "Where the copy reads the original was not found."
_Answer = tuple[list[torch.Tensor], Gradients]


def refuse_other_copies(
    members: Sequence[nn.Module], skeletons: Sequence[ModuleSkeleton], call: MemberCall
) -> None:
    """Refuses members whose copies answer otherwise, or have other gradients.

    Args:
        members: The user's own modules, which are afterwards as before.
        skeletons: Their copies without weights.
        call: The sample.

    Raises:
        UsageError: A copy differs. The message says in what, and what in it still belongs to the original.
    """
    for i, (member, skeleton) in enumerate(zip(members, skeletons)):
        words = _difference(member, skeleton, call)
        torch.clear_autocast_cache()  # it would keep casts of the changed weights
        if words:
            raise UsageError(
                f"a copy of member {i} does not do what member {i} does: {words}.\n"
                f"{_shared_memory(member) or _still_used(member, skeleton) or _NOT_FOUND}\n"
                "fuse makes its programs from copies. Hold the parts of a member in attributes, closures or "
                "arguments of its own functions"
            )


def _difference(member: nn.Module, skeleton: ModuleSkeleton, call: MemberCall) -> str:
    """Returns in words how a copy differs from its original; an empty text if it does not."""
    for change in (True, False):  # a member may refuse changed weights
        values = {n: _changed(n, v) if change else v.detach().clone() for n, v in weights_of(member).items()}
        expected = _own_answer(member, values, call)
        if expected is not None:
            break
    else:
        return ""  # it does not run, with widepack or without, and the capture says why
    copy = skeleton.fill(values)
    for part, other in zip(member.modules(), copy.modules()):
        other.training = part.training
    try:
        with unchanged([copy]):
            found = _run(copy, call)
    except Exception as e:  # noqa: BLE001  # whatever the user's code raises
        words = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    else:
        words = _words(found, expected)
    again = _own_answer(member, values, call) if words else None
    return "" if again is not None and _words(again, expected) else words


def _changed(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns other numbers for a weight, of the same signs."""
    value = value.detach()
    if not value.is_floating_point() or overlaps(value):
        return value.clone()
    g = torch.Generator("cpu").manual_seed(sum(name.encode()))
    factor = 1.05 + 0.2 * torch.rand(value.shape, generator=g, dtype=torch.float64, device="cpu")
    return (value.double() * factor.to(value.device)).to(value.dtype)


def _own_answer(member: nn.Module, values: Mapping[str, torch.Tensor], call: MemberCall) -> _Answer | None:
    """Returns what the user's own module answers with these weights; None if it fails."""
    with unchanged([member], own_numbers=True):
        own = weights_of(member)
        with torch.no_grad():
            for name, first in first_names(own).items():
                if name == first:
                    copy_into(own[name].data, values[name])
        try:
            return _run(member, call)
        except Exception:  # noqa: BLE001  # whatever the user's code raises
            return None


def _run(module: nn.Module, call: MemberCall) -> _Answer:
    """Returns the output of a module and the gradients of its parameters, from one random state.

    A module whose weights were made in inference mode runs there and has no gradients.
    """
    torch.manual_seed(11)
    random.seed(11)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(11)
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    parameters = dict(module.named_parameters())
    names = [n for n, p in parameters.items() if p.requires_grad]
    trains = not any(value.is_inference() for value in weights_of(module).values())
    with calm(), torch.enable_grad() if trains else torch.inference_mode():
        output = known_forms(module(*args, **kwargs))
        outputs = [y for y in pytree.tree_leaves(output) if isinstance(y, torch.Tensor)]
        gradients: Gradients = {}
        with suppress(RuntimeError):  # torch has no derivative of an op
            if trains:
                gradients = gradients_of(weighted_sum(outputs, 0), parameters, names)
    dense = {n: g.to_dense() if g is not None and g.is_sparse else g for n, g in gradients.items()}
    return [y.detach().clone() for y in outputs], dense


def _words(found: _Answer, expected: _Answer) -> str:
    """Returns in words how two outputs differ; an empty text if they do not."""
    (outputs, gradients), (own, own_gradients) = found, expected
    if [y.shape for y in outputs] != [y.shape for y in own]:
        return f"it returns {[list(y.shape) for y in outputs]}, and the member {[list(y.shape) for y in own]}"
    bound = relative_bound(own)
    for k, (a, b) in enumerate(zip(outputs, own)):
        if (above := error_above(a, b, bound)) is not None:
            return f"with the same weights, output {k} differs by {above[0]:.1e} at a size of {above[1]:.1e}"
    bound = relative_bound([g for g in own_gradients.values() if g is not None])
    largest = largest_of(own_gradients.values())
    for name in own_gradients.keys() & gradients.keys():
        ours, theirs = gradients[name], own_gradients[name]
        if ours is None or theirs is None:
            if ours is not theirs:
                has, lacks = ("member", "copy") if ours is None else ("copy", "member")
                return f"{name} gets a gradient in the {has}, and none in the {lacks}"
        elif (above := error_above(ours, theirs, bound, largest)) is not None:
            return f"the gradient of {name} differs by {above[0]:.1e} at a size of {above[1]:.1e}"
    return ""


def _still_used(member: nn.Module, skeleton: ModuleSkeleton) -> str:
    """Returns in words what in a copy still leads to the original's parts and weights."""
    own = {id(v): n for n, v in weights_of(member).items()}
    own |= {id(part): n or "the member itself" for n, part in member.named_modules()}
    found = [f"{own[id(r.value)]} (as {r.path})" for r in walk(skeleton.module) if id(r.value) in own]
    found = found or [f"{own[id(value)]} (as {path})" for path, value in _in_classes(skeleton.module, own)]
    if found:
        return f"What the copy reads of the original: {some(found, 4)}."
    hidden = [f"{r.path} is a {kind}" for r in walk(skeleton.module) if (kind := _hidden_kind(r.value))]
    what = f"{some(hidden, 4)}, whose content cannot be followed"
    return f"Where the copy reads the original was not found. A possible place: {what}." if hidden else ""


def _shared_memory(member: nn.Module) -> str:
    """Returns in words which weights have numbers in the same memory; empty if none have."""
    weights = weights_of(member)
    by_memory: dict[int, list[str]] = {}
    for name, first in first_names(weights).items():
        if name == first and weights[name].layout is torch.strided:
            by_memory.setdefault(memory_id(weights[name]), []).append(name)
    for names in by_memory.values():
        for one, other in itertools.combinations(names, 2):
            if _places(weights[one]) & _places(weights[other]):
                return (
                    f"{one} and {other} share memory: what is written into one changes the other. In a fused "
                    "module each weight has its own; give the member two tensors, or one for both."
                )
    return ""


def _places(value: torch.Tensor) -> set[int]:
    """Returns the bytes of its storage at which the elements of a tensor begin."""
    extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride()))
    places = torch.arange(extent if value.numel() else 0).as_strided(value.shape, value.stride())
    return {(k + value.storage_offset()) * value.element_size() for k in places.flatten().tolist()}


def _hidden_kind(value: Any) -> str:
    """Returns the kind of a value whose content cannot be followed; "" for any other value."""
    if isinstance(value, threading.local):
        return "threading.local"
    return "ContextVar" if isinstance(value, contextvars.ContextVar) else ""


def _in_classes(module: nn.Module, own: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yields what the bodies of the classes of a module's parts hold of the original, with its path."""
    for cls in dict.fromkeys(base for part in module.modules() for base in type(part).__mro__):
        for name, body in vars(cls).items() if not cls.__module__.startswith("torch.") else ():
            for r in walk(body, ("strong", "weak")):
                if id(r.value) in own:
                    yield f"{cls.__qualname__}.{name}" + (f".{r.path}" if r.path else ""), r.value
