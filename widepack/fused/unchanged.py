"""Leaves all that can be reached from the user's modules as it was, after they ran.

What is put back, also after an error or an interrupt: attributes, items of containers, closures and defaults
of functions, for each tensor its memory, its numbers, its gradient and whether it requires one, the states of
random generators of torch, Python and NumPy.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..capture.reachable import contents_of, walk
from ..ir.overlapping import copy_into
from ..ir.torch_internals import memory_id

_PutBack = Callable[[], object]


@contextmanager
def unchanged(modules: Sequence[nn.Module], *, own_numbers: bool = False) -> Iterator[None]:
    """Puts back, at the end of a with block, all that can be reached from modules and differs then.

    Args:
        modules: The modules.
        own_numbers: Whether the block may write into tensors. All of them have other memory meanwhile, with
            the same numbers; those made in inference mode keep theirs and get their numbers again.
    """
    values = [reached.value for reached in walk(list(modules))][1:]
    with ExitStack() as put_back:  # the last first, each even if another fails
        put_back.callback(_random_states())
        for value in values:
            for step in _of(value):
                put_back.callback(step)
        if own_numbers:
            for step in _other_memory([v for v in values if isinstance(v, torch.Tensor)]):
                put_back.callback(step)
        yield


def _of(value: Any) -> list[_PutBack]:
    """Returns what puts one value back."""
    if isinstance(value, torch.Tensor):
        return [_tensor(value)]
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return [functools.partial(value.set_state, state)]
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return [lambda: value.setstate(numbers)]
    if isinstance(value, types.FunctionType):
        return [_function(value), *_attributes(value)]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "flags"):
        return _array(value)
    steps = _attributes(value)
    return [*steps, _container(value)] if isinstance(value, (dict, list, deque, set)) else steps


def _attributes(value: Any) -> list[_PutBack]:
    own = getattr(value, "__dict__", None)
    steps = [_container(own)] if type(own) is dict else []
    slots = {
        name: member
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if "__slots__" in vars(cls) and isinstance(member, types.MemberDescriptorType)
    }
    return [*steps, *(_slot(value, member) for member in slots.values())]


def _slot(value: Any, member: Any) -> _PutBack:
    missing = object()

    def read() -> Any:
        try:
            return member.__get__(value)
        except AttributeError:
            return missing

    before = read()

    def put_back() -> None:
        if read() is not before:
            if before is missing:
                member.__delete__(value)
            else:
                member.__set__(value, before)

    return put_back


def _container(value: Any) -> _PutBack:
    """Puts back the items of a dict, a list, a deque or a set."""

    def items() -> list[Any]:
        return list(itertools.chain(*value.items())) if isinstance(value, dict) else list(value)

    before = items()

    def put_back() -> None:
        if _same(items(), before):
            return
        value.clear()
        if isinstance(value, dict):
            value.update(zip(before[::2], before[1::2]))
        else:
            (value.update if isinstance(value, set) else value.extend)(before)

    return put_back


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before))


def _array(value: Any) -> list[_PutBack]:
    if not value.flags.writeable:
        return []
    before = value.copy()

    def put_back() -> None:
        value[...] = before

    return [put_back]


def _function(value: types.FunctionType) -> _PutBack:
    cells = [(cell, contents_of(cell)) for cell in value.__closure__ or ()]
    defaults, named = value.__defaults__, value.__kwdefaults__
    in_named = None if named is None else dict(named)

    def put_back() -> None:
        for cell, before in cells:
            if not _same(contents_of(cell), before):
                if before:
                    cell.cell_contents = before[0]
                else:
                    del cell.cell_contents
        value.__defaults__, value.__kwdefaults__ = defaults, named
        if named is not None and in_named is not None:
            named.clear()
            named.update(in_named)

    return put_back


def _tensor(value: torch.Tensor) -> _PutBack:
    gradient = value.grad if value.is_leaf else None
    numbers = None if gradient is None else gradient.detach().clone()
    requires_grad, leaf = value.requires_grad, value.is_leaf

    def put_back() -> None:
        if not leaf:
            return
        if value.is_leaf and value.requires_grad != requires_grad:
            value.requires_grad_(requires_grad)
        if value.grad is not gradient:
            value.grad = gradient
        if gradient is None or numbers is None:
            return
        if gradient.layout is not torch.strided or not torch.equal(gradient, numbers):
            with torch.no_grad():  # `data` of a sparse tensor is another tensor
                copy_into(gradient, numbers)

    return put_back


def _other_memory(tensors: Sequence[torch.Tensor]) -> list[_PutBack]:
    """Gives tensors other memory with the same numbers, and returns what gives them theirs again.

    Tensors that share memory share it still.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    steps: list[_PutBack] = []
    for value in tensors:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            continue
        if value.is_inference():  # torch gives it no other memory
            steps.append(_numbers(value))
            continue
        key = memory_id(value)
        if key not in copies:
            copies[key] = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
        storage = copies[key]
        own = torch.empty(0, dtype=value.dtype, device=value.device)
        own.set_(storage, value.storage_offset(), value.size(), value.stride())
        before = value.data
        try:
            value.data = own
        except (RuntimeError, TypeError):  # of a class that allows no other memory
            steps.append(_numbers(value))
        else:
            steps.append(functools.partial(setattr, value, "data", before))
    return steps


def _numbers(value: torch.Tensor) -> _PutBack:
    before = value.detach().clone()
    return lambda: None if torch.equal(value, before) else copy_into(value.data, before)


def _random_states() -> _PutBack:
    own, devices = torch.get_rng_state(), []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all()
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(own)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)

    return put_back
