"""Checks the operands of ops of untrusted programs before an op reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import ops
from .encoding import iter_arguments
from .op_records import RECURRENT_LAYERS, RECURRENT_STEPS

OBJECT = 1024
LARGEST = 2**31
LISTED = 2**18


class LimitExceeded(Exception):
    """An op exceeds a limit. The message completes a sentence that begins with the node."""


# Arguments that may exceed `LARGEST`: ends of slices, which are clamped, and bounds of drawn values.
_ANY = frozenset({"start", "end", "low", "high"})


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an argument or a result."""
    return (v for v in iter_arguments(value) if isinstance(v, torch.Tensor))


def size(value: Any) -> int:
    """The bytes of the tensors of a result, as if no two shared memory."""
    return sum(t.numel() * t.element_size() + OBJECT for t in tensors(value))


_REJECTING = frozenset(f"aten.{n}" for n in ("_standard_gamma", "_sample_dirichlet", "binomial", "poisson"))


def refuse_numbers(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of an op: numbers larger than any size, and too many results.

    Raises: LimitExceeded.
    """
    name = op.rpartition(".")[0]
    if op in ops.PYTHON:
        refuse_operands(op, args)
        return
    if name in _REJECTING:
        raise LimitExceeded("draws numbers until it accepts one, which may never end")
    given = ops.bind(op, tuple(args), dict(kwargs))
    for argument in ops.enumerations(op):
        if isinstance(given.get(argument), (int, float, str, torch.Tensor, list, tuple)):
            raise LimitExceeded(f"has {given[argument]!r} as {argument}, which is not a number")
    for argument, type_, _ in ops.arguments(op):
        if argument in given and "int" in type_.lower() and argument not in _ANY:
            _within(argument, given[argument])
    rule = _LISTS.get(name)
    if rule is not None and (count := rule(given)) > LISTED:
        raise LimitExceeded(f"returns {count:,} tensors; at most {LISTED:,} are allowed")
    if name in RECURRENT_LAYERS or name in RECURRENT_STEPS:
        _within("steps", recurrent_steps(name, given), 2**24)


def _within(name: str, value: Any, most: int = LARGEST) -> None:
    for number in iter_arguments(value):
        if isinstance(number, int) and abs(number) > most:
            raise LimitExceeded(f"has {number:,} as {name}; numbers up to {most:,} are allowed there")


def refuse_operands(op: str, args: Sequence[Any]) -> None:
    """Checks that Python's operators get numbers: of lists or texts they would make longer ones.

    Raises: LimitExceeded.
    """
    if op == "operator.getitem":
        return
    found = [_example(value) for value in args]
    for value, number in zip(args, found):
        if number is None and value is not None:
            continue  # a size that values determine has no example
        if not isinstance(number, (int, float)) or (isinstance(number, int) and abs(number) >= 2**63):
            raise LimitExceeded(f"reads {str(value)[:40]!r}, which is not a number of 64 bits")
    exponent = found[1] if op == "operator.pow" and len(found) == 2 else None
    if isinstance(exponent, (int, float)) and abs(exponent) > 64:
        raise LimitExceeded(f"has the exponent {exponent:,}; at most 64 is allowed")


def _example(value: Any) -> Any:
    """Returns a number; of a symbolic one its example, which torch computes with it. None if it has none."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _dim_size(given: Mapping[str, Any], of: str = "self") -> int:
    x, dim = given.get(of), given.get("dim", 0)
    if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return 0  # the op refuses it
    return int(x.shape[dim])


def _splits(given: Mapping[str, Any]) -> int:
    part = given.get("split_size")
    return -(-_dim_size(given) // max(1, part)) if isinstance(part, int) else 0


def _chunks(given: Mapping[str, Any]) -> int:
    count = given.get("chunks")
    return count if isinstance(count, int) else 0


_LISTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "aten.unbind": _dim_size,
    "aten.unbind_copy": _dim_size,
    "aten.split": _splits,
    "aten.split_copy": _splits,
    "aten.unsafe_split": _splits,
    "aten.chunk": _chunks,
    "aten.unsafe_chunk": _chunks,
    "widepack.pack_convolutions": lambda given: _dim_size(given, "weight"),
    "widepack.pack_inner_products": lambda given: _dim_size(given, "weight"),
    "widepack.pack_lstm": lambda given: 2 * _dim_size(given, "w_x"),
}


def recurrent_steps(name: str, given: Mapping[str, Any]) -> int:
    """The steps of a recurrent op, over all layers, directions and members."""
    if name in RECURRENT_STEPS:
        x, h = given.get("x"), given.get("h")
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not isinstance(h, torch.Tensor) or not h.dim():
            return 0
        return int(x.shape[1]) * (int(h.shape[0]) if name == "widepack.packed_lstm" else 1)
    x = given.get("input", given.get("data"))
    if not isinstance(x, torch.Tensor) or not x.dim():
        return 0
    layers, both = given.get("num_layers", 1), given.get("bidirectional", False)
    steps = int(max(x.shape[:2])) if x.dim() > 1 else int(x.shape[0])
    return steps * max(1, layers if isinstance(layers, int) else 1) * (2 if both else 1)


def integers(value: Any) -> list[int]:
    """The integers of an argument that is one integer or a list."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, int)]


def recurrent_result(op: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    """Returns the result of a recurrent layer, on the meta device or with fake tensors.

    torch itself would run one step after the other: seconds for a long sequence.

    Args:
        op: The name of the op, with overload.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The answer, with the strides that torch gives it, and the states. None if the arguments have no such
        result.
    """
    given = ops.bind(op, tuple(args), dict(kwargs))
    x, h = given.get("input", given.get("data")), given.get("hx")
    given_states = list(h) if isinstance(h, (list, tuple)) else [h]
    states = [s for s in given_states if isinstance(s, torch.Tensor) and s.dim()]
    if not isinstance(x, torch.Tensor) or not x.dim() or not states or len(states) < len(given_states):
        return None
    width = states[0].shape[-1] * (2 if given.get("bidirectional") else 1)
    if given.get("batch_first") and x.dim() == 3:  # the steps are made one after the other, then transposed
        answer = x.new_empty([x.shape[1], x.shape[0], width]).transpose(0, 1)
    else:
        answer = x.new_empty([*x.shape[:-1], width])
    return (answer, *(s.new_empty(s.shape) for s in states))
