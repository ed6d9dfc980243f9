"""Makes members of the entries of torch's own test databases: `module_db` and `op_db`.

| database | members of a case | ways |
|---|---|---|
| `module_db` | modules of a sample, with different weights | `fuse eval`, `fuse train`, `build` |
| `op_db` | a module that calls the op on a sample's tensors | `weights`, `inputs`, `build` |

An op becomes a module in two forms. In the way `weights`, the first floating tensor of the sample is a
parameter, and the other tensors are inputs. In the way `inputs`, all tensors are inputs. Each member has its
own draw of the sample, so that weights and inputs differ and every value is one that the op accepts.

torch's databases import the package `expecttest`, which they need for a base class only. Without it, that
class is `unittest.TestCase`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

MEMBERS = 3
SAMPLES = 3
MODULE_WAYS = ("fuse eval", "fuse train", "build")
OP_WAYS = ("weights", "inputs", "build")
WITHOUT_VALUES = ("empty", "new_empty")  # the values of these ops are what the memory had before


class AloneFails(Exception):
    """A case that cannot be compared: the member fails by itself, or torch cannot export it."""


@dataclass
class Case:
    """One sample of one entry in one way.

    Attributes:
        key: `module/nn.Linear/0/build`: the database, the entry, the number of the sample, and the way.
        members: The members, in eval or train mode.
        inputs: For each member the positional and the keyword inputs of its call.
        process: What torch's tests apply to a result before they compare it (for signs that may differ).
        gradients: Whether gradients are compared.
        build: Whether the members are built and loaded. Otherwise they are fused.
        ulps: The error of a weight's gradient that is accepted beyond the bound, in ulp of its largest
            number: such a gradient is a long sum, which kernels add in different orders. In float64, whose
            reference is no more exact, it is for every gradient.
    """

    key: str
    members: list[nn.Module]
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    process: Callable[[Any], Any] = field(default=lambda result: result)
    gradients: bool = False
    build: bool = False
    ulps: float = 0.0


class OpModule(nn.Module):
    """Calls an op on tensors, of which some are parameters.

    Args:
        call: Takes all tensors of the sample in order.
        tensors: The tensors.
        own: The numbers of the tensors that are parameters.
    """

    def __init__(
        self, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], own: Sequence[int]
    ) -> None:
        super().__init__()
        self.call = call
        self.count = len(tensors)
        for k in own:
            self.register_parameter(f"weight{k}", nn.Parameter(tensors[k].detach().clone()))

    def forward(self, **inputs: Tensor) -> Any:
        weights = dict(self.named_parameters(recurse=False))
        return self.call(
            [weights[f"weight{k}"] if f"weight{k}" in weights else inputs[f"x{k}"] for k in range(self.count)]
        )


def database(kind: str) -> dict[str, Any]:
    """Returns the float32 entries of `module` or `op` by name."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    module, attribute = {
        "module": ("common_modules", "module_db"),
        "op": ("common_methods_invocations", "op_db"),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = importlib.import_module(f"torch.testing._internal.{module}")
    if kind == "op":  # some ops seed the generator first, which no export sees
        loaded.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    entries = getattr(loaded, attribute)
    if kind == "module":
        return {e.name: e for e in entries if torch.float32 in e.dtypes}
    return {
        ".".join(part for part in (e.name, e.variant_test_name) if part): e
        for e in entries
        if torch.float32 in e.dtypes
    }


def seed(number: int) -> None:
    """Seeds every generator that a database draws from."""
    import numpy

    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def first_samples(entry: Any, draw: int, count: int = SAMPLES) -> list[Any]:
    """Returns the first samples of an entry. draw: the number of the drawing."""
    seed(1000 + draw)
    if hasattr(entry, "module_cls"):
        rows = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        )
    else:
        rows = entry.sample_inputs("cpu", torch.float32, requires_grad=False)
    found: list[Any] = []
    for row in rows:
        if len(found) == count:
            break
        found.append(row)
    return found


def cases_of(
    kind: str, name: str, entry: Any, numbers: Sequence[int] = range(SAMPLES)
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yields (key, a function that makes the case) for an entry.

    The function raises AloneFails if the members cannot be made. numbers: the samples, by number.
    """
    draws = [first_samples(entry, i) for i in range(MEMBERS)]
    make = _module_case if kind == "module" else _op_case
    for number in (n for n in numbers if n < min(map(len, draws))):
        rows = [draw[number] for draw in draws]
        for way in _ways(kind, entry, rows, number):
            key = f"{kind}/{name}/{number}/{way}"
            yield key, partial(make, key, entry, rows, way)


def _ways(kind: str, entry: Any, rows: Sequence[Any], number: int) -> tuple[str, ...]:
    """Returns the ways of a sample. Members without tensors have no checkpoints to build from.

    Of an op, the first sample is built.
    """
    if kind == "op":
        tensors = [v for v in pytree.tree_leaves((rows[0].input, rows[0].args, rows[0].kwargs)) if _floats(v)]
        return ("inputs",) if not tensors else OP_WAYS[: 2 if number else 3]
    made = rows[0].constructor_input
    seed(0)
    try:
        state = entry.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs)).state_dict()
    except Exception:  # noqa: BLE001  # the case reports it
        return MODULE_WAYS
    return MODULE_WAYS if state else MODULE_WAYS[:2]


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


# ---------------------------------------------------------------- modules


def _module_case(key: str, entry: Any, rows: Sequence[Any], way: str) -> Case:
    members, inputs = [], []
    for i, row in enumerate(rows):
        seed(2000 + i)
        made = rows[0].constructor_input  # weights of a loss differ between draws; the first is for all
        try:
            member = entry.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs))
            call = row.forward_input or rows[0].forward_input
            args, kwargs = (call.args, call.kwargs) if call is not None else ((), {})
            args, kwargs = _detached((args, kwargs))
            _distinct(member, i)
            if entry.is_lazy:
                member.eval()(*args, **kwargs)
        except Exception as e:
            raise AloneFails(f"{type(e).__name__}: {first_line(e)}") from e
        members.append(member.train(way == "fuse train"))
        inputs.append((tuple(args), dict(kwargs)))
    _same_literals(inputs)
    return Case(key, members, inputs, gradients=way == "fuse train", build=way == "build")


def _distinct(member: nn.Module, i: int) -> None:
    """Makes weights and statistics differ between members, where a constructor makes equal ones."""
    generator = torch.Generator().manual_seed(i)
    with torch.no_grad():
        for parameter in member.parameters():
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        for name, buffer in member.named_buffers():
            if name.endswith("running_mean"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
            elif name.endswith("running_var"):
                buffer *= 0.5 + torch.rand(buffer.shape, generator=generator)


def _same_literals(inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Gives all members the inputs of member 0, if their draws differ in more than the values of tensors."""
    if len({_form(row) for row in inputs}) > 1:
        inputs[:] = [copy.deepcopy(inputs[0]) for _ in inputs]


def _form(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    return repr([(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]) + repr(spec)


def _detached(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


# ---------------------------------------------------------------- ops


def _op_case(key: str, entry: Any, rows: Sequence[Any], way: str) -> Case:
    if entry.name.startswith(WITHOUT_VALUES):
        raise AloneFails("its values are what the memory had before")
    drawn = [pytree.tree_flatten((row.input, row.args, dict(row.kwargs))) for row in rows]
    leaves, spec = drawn[0]
    places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor)]
    tensors = [[leaves_of[k] for k in places] for leaves_of, _ in drawn] if _alike(drawn) else None
    if tensors is None:  # the draws differ in sizes or numbers: the first is scaled instead
        first = [leaves[k] for k in places]
        tensors = [[_scaled(t, i) for t in first] for i in range(len(rows))]
    op = entry.op

    def call(values: Sequence[Tensor]) -> Any:
        arguments = list(leaves)
        for n, (k, value) in enumerate(zip(places, values)):
            arguments[k] = value.clone() if n in written else value
        first, args, kwargs = pytree.tree_unflatten(arguments, spec)
        return op(first, *args, **kwargs)

    written: set[int] = set()
    written = _written(call, tensors[0])
    own: list[int] = []
    if way != "inputs":
        own = [k for k, t in enumerate(tensors[0]) if _floats(t)][:1]
    members = [OpModule(call, row, own).train(way == "weights") for row in tensors]
    inputs = [
        ((), {f"x{k}": t.detach().clone() for k, t in enumerate(row) if k not in own}) for row in tensors
    ]
    return Case(
        key,
        list(members),
        inputs,
        process=rows[0].output_process_fn_grad,
        gradients=way == "weights" and entry.supports_autograd,
        build=way == "build",
    )


def _written(call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> set[int]:
    """Returns the tensors that an op writes into (`uniform_`, running statistics): its module copies them."""
    given = [t.detach().clone() for t in tensors]
    try:
        with torch.no_grad():
            call(given)
    except Exception:  # noqa: BLE001  # the case reports it
        return set()
    return {k for k, (a, b) in enumerate(zip(given, tensors)) if a.shape != b.shape or not _equal(a, b)}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.layout != torch.strided or torch.equal(a.nan_to_num(), b.detach().nan_to_num())


def _alike(drawn: Sequence[tuple[list[Any], Any]]) -> bool:
    """Returns whether the draws differ in the values of tensors only."""
    return len({_form(pytree.tree_unflatten(leaves, spec)) for leaves, spec in drawn}) == 1


def _scaled(value: Tensor, i: int) -> Tensor:
    value = value.detach()
    if not _floats(value) or value.layout != torch.strided:
        return value.clone()
    return value * (1 + i / 16)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, cut to 160 characters."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def named(inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a copy of a call's inputs."""
    args, kwargs = _detached(inputs)
    return tuple(args), dict(kwargs)
