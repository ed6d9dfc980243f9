"""Bounds the memory that the code of a model may ask for while a member is made.

The sizes come from a file that an untrusted source may have written. Without a bound, a size of 10^12 ends
the process, or all others of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UsageError
from ..ir.torch_internals import is_fake, op_base_name
from ..system.memory import available_bytes

_MAKERS = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"})
_BY_COUNT = frozenset({"arange", "eye", "linspace"})


@contextmanager
def bounded_memory(title: str) -> Iterator[None]:
    """Refuses tensors for which this machine has no memory, before they are made, inside a with block.

    title: what describes the model, in the error. Raises: UsageError.
    """
    free = available_bytes()
    if free is None or is_fake(torch.empty(0)):  # tensors without memory
        yield
        return
    with _Bounded(title, free):
        yield


class _Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Adds up the bytes of new tensors. title: as for `bounded_memory`. free: the bytes that there are."""

    def __init__(self, title: str, free: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._title, self._free, self._used = title, free, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        count = _numbers(op_base_name(func), args)
        if count and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            self._used += count * dtype.itemsize
            if self._used > self._free:
                raise UsageError(
                    f"{self._title} describes a model of at least {self._used:,} bytes, and {self._free:,} "
                    "bytes of memory are free. Compare its sizes, such as vocab_size, with those of the "
                    "checkpoint"
                )
        return func(*args, **named)


def _numbers(name: str, args: Any) -> int:
    """Returns how many numbers an op makes; 0 if it is none that makes a tensor of given sizes."""
    if name in _MAKERS and args and isinstance(args[0], (list, tuple, torch.Size)):
        return math.prod(args[0])
    numbers = [v for v in args if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if name not in _BY_COUNT or not numbers:
        return 0
    if name == "arange":
        start, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        return max(0, int((end - start) / (numbers[2] if len(numbers) > 2 else 1)))
    return int(numbers[0]) * int(numbers[-1]) if name == "eye" else int(numbers[-1])
