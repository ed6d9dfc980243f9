"""Counts the FLOP of a call with torch's own counter, and by hand for ops that the counter does not see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from widepack.ir.torch_internals import memory_id

Shape = Sequence[int]


def _matrix_vector(matrix: Shape, vector: Shape, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(matrix)


def _added_vector(start: Shape, matrix: Shape, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(matrix)


def _recurrent(x: Shape, inputs: Shape, states: Shape, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    """One layer in one direction: both weight matrices, for each step of each sample."""
    return 2 * math.prod(x[:-1]) * (math.prod(inputs) + math.prod(states))


def _trilinear(a: Shape, b: Shape, c: Shape, *at: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """One multiply-add for each product of three numbers."""
    sizes: list[list[int]] = []
    for shape, new in zip((a, b, c), at):
        sizes.append(list(shape))
        for dim in sorted(new):
            sizes[-1].insert(dim, 1)
    total: int = 2 * math.prod(max(dims) for dims in zip(*sizes))
    return total


def _grouped(x: Shape, weight: Shape, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(x) * int(weight[-1])


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    """Two products of matrices. Networks that choose their own kernel run attention as one op on the CPU."""
    return 2 * math.prod(query[:-1]) * int(key[-2]) * (int(query[-1]) + int(value[-1]))


_FORMULAS = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "vdot": _matrix_vector,
    "addmv": _added_vector,
    "mkldnn_rnn_layer": _recurrent,
    "_trilinear": _trilinear,
    "_grouped_mm": _grouped,
}
BY_HAND: dict[Any, Any] = {
    op: formula
    for name, formula in _FORMULAS.items()
    if (op := getattr(torch.ops.aten, name)) not in flop_registry
}
"""Ops that multiply and add, and that torch's counter takes for ops without FLOP. Formulas of shapes."""


@dataclass(frozen=True)
class Count:
    """The FLOP of a call.

    by_op: all that were counted, with the ops of `BY_HAND`. unseen: the part that torch's counter does not
    see. unread: the part of ops whose results reach no output. shared: the part of ops that read nothing of a
    weight, without the unread part.
    """

    by_op: Mapping[str, int]
    unseen: int
    unread: int
    shared: int

    @property
    def torch(self) -> int:
        """What torch's counter counts."""
        return sum(self.by_op.values()) - self.unseen

    @property
    def by_hand(self) -> int:
        """What the outputs of the call need."""
        return sum(self.by_op.values()) - self.unread


def counted(module: nn.Module, call: Any, device: str) -> Count:
    """Counts the FLOP of a call with `FlopCounterMode`.

    Attention runs as products of matrices, which the counter sees.

    Args:
        module: The network.
        call: Its `(args, kwargs)`.
        device: `meta`, or `cpu` for networks that need values.

    Returns:
        The count.

    Raises:
        Exception: Whatever the network raises on this device.
    """
    module = module.to(device)
    args, kwargs = pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, call)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    counter = FlopCounterMode(display=False, custom_mapping=BY_HAND)
    ops = _Ops(counter, module.state_dict(keep_vars=True).values())
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, ops:
            result = module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    found = counter.get_flop_counts().get("Global", {})
    unseen = sum(int(flop) for op, flop in found.items() if op in BY_HAND)
    unread, shared = ops.parts(result)
    return Count({str(op): int(flop) for op, flop in found.items()}, unseen, unread, shared)


@dataclass(frozen=True)
class _Op:
    """One op of a call. shared: it reads nothing of a weight. read, made: memory, as `memory_id` names it."""

    flop: int
    shared: bool
    read: frozenset[int]
    made: frozenset[int]


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Records the ops of a call, with the FLOP that a counter around it adds."""

    def __init__(self, counter: FlopCounterMode, weights: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._kept: list[Any] = []  # so that no memory is used again
        self._of_weights = set(self._memory([w for w in weights if isinstance(w, Tensor)]))
        self._ops: list[_Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flop = int(self._counter.get_total_flops() - before)
        of_sizes = func.name().split("::")[-1].split(".")[0] in _OF_SIZES
        read = frozenset() if of_sizes else self._memory(tensors_of((args, kwargs)))
        made = self._memory(tensors_of(result))
        shared = not read & self._of_weights
        if not shared:
            self._of_weights |= made
        self._ops.append(_Op(flop, shared, read, made))
        return result

    def parts(self, result: Any) -> tuple[int, int]:
        """Returns the FLOP of ops that no output reads, and of the others that read nothing of a weight."""
        needed = set(self._memory(tensors_of(_fields(result))))
        unread = shared = 0
        for op in reversed(self._ops):
            if op.made & needed:
                needed |= op.read
                shared += op.flop * op.shared
            else:
                unread += op.flop
        return unread, shared

    def _memory(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        self._kept += [t.untyped_storage() for t in tensors]
        return frozenset(memory_id(t) for t in tensors)


def _fields(result: Any) -> Any:
    """Returns a result with its dataclasses as dicts."""
    leaves = pytree.tree_leaves(result)
    return [vars(leaf) if is_dataclass(leaf) else leaf for leaf in leaves]


_OF_SIZES = frozenset(
    ["zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty"]
)
"""Ops that read only the size of their first argument."""


def tensors_of(call: Any) -> list[Tensor]:
    """Returns the tensors in arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
