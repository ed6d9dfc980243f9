"""Makes wide layers and their modules, and compares them, for the tests of wide layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from layer_cases import CASES, Case
from support import leaves
from torch import Tensor, nn

from widepack import primitives
from widepack.ir.torch_internals import without_fast_path
from widepack.layers.base import WideLayer

N = 3
FIRST = {name.partition("-")[0]: name for name in reversed(CASES)}  # one case for each module class
DROPOUTS = [
    nn.Dropout(0.4),
    nn.Dropout1d(0.4),
    nn.Dropout2d(0.4),
    nn.Dropout3d(0.4),
    nn.AlphaDropout(0.4),
    nn.FeatureAlphaDropout(0.4),
]


def members(make: Callable[[], nn.Module], count: int = N) -> list[nn.Module]:
    """Returns modules in float64 that differ in every number, including statistics."""
    modules = []
    for i in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(31 + i)
            module = make().double()
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                with torch.no_grad():
                    t.copy_(
                        torch.full_like(t, 3)
                        if not t.is_floating_point()
                        else torch.rand_like(t) + 0.5
                        if name.endswith("var")
                        else torch.randn_like(t) / 2
                    )
        modules.append(module)
    return modules


def wide_layer_of(modules: list[nn.Module], strategy: str = "auto") -> WideLayer:
    layer_class = getattr(primitives, f"Wide{type(modules[0]).__name__}")
    layer = layer_class.from_modules(modules, strategy=strategy)
    assert isinstance(layer, WideLayer)
    return layer


def calls(case: Case) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns one call for each member."""
    drawn = []
    for i in range(N):
        g = torch.Generator().manual_seed(5 + i)
        drawn.append((case.draw(g), {**case.call, **dict(case.named(g) if case.named else ())}))
    return drawn


def stacked(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(values)
    return tuple(stacked(list(v)) for v in zip(*values)) if isinstance(first, tuple) else first


def wide_call(member_calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    for place, column in enumerate(zip(*(a for a, _ in member_calls))):
        # a tensor that is passed as two inputs stays one tensor
        same = next((j for j in range(place) if column[0] is member_calls[0][0][j]), None)
        args.append(stacked(list(column)) if same is None else args[same])
    return args, {k: stacked([kw[k] for _, kw in member_calls]) for k in member_calls[0][1]}


def floats(value: Any) -> list[Tensor]:
    return [t for t in leaves(value) if t.is_floating_point()]


def loss(result: Any) -> Tensor:
    """Returns a weighted sum of all outputs. Each number has another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for t in floats(result):
        total = total + (t * torch.linspace(0.5, 2, t.numel(), dtype=t.dtype).reshape(t.shape)).sum()
    return total


def answers(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Returns a module's answer and the gradients of its inputs. The parameters get gradients too."""
    inputs = [
        a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]
    for i, a in enumerate(args):
        for j in range(i):
            if args[j] is a:
                inputs[i] = inputs[j]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched|dropout option")
        answer = module(*inputs, **kwargs)
    total = loss(answer)
    if total.requires_grad:
        torch.autograd.backward(total)
    return answer, [t.grad for t in inputs if isinstance(t, Tensor) and t.grad is not None]


def assert_members(answer: Any, expected: list[Any], tolerance: float = 1e-11) -> None:
    rows = [leaves(w) for w in expected]
    wide_leaves = leaves(answer)
    assert len(wide_leaves) == len(rows[0])
    for k, wide in enumerate(wide_leaves):
        torch.testing.assert_close(
            wide, torch.stack([r[k] for r in rows]), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def check(case: Case, train: bool, strategy: str = "auto") -> WideLayer:
    """Compares a wide layer with its modules: answer, gradients, buffers."""
    alone = [m.train(train) for m in members(case.make)]
    wide_layer = wide_layer_of([copy.deepcopy(m) for m in alone], strategy)
    member_calls = calls(case)
    args, kwargs = wide_call(member_calls)
    with without_fast_path():
        results = [answers(m, *call) for m, call in zip(alone, member_calls)]
    rows = len(leaves(args)) and N
    answer, grads = wide_answers(wide_layer, args, kwargs)
    assert rows
    assert_members(answer, [r for r, _ in results])
    for k, grad in enumerate(grads):
        assert_members(grad, [g[k] for _, g in results])
    for name, p in wide_layer.named_parameters():
        assert p.grad is not None, name
        assert_members(p.grad, [m.get_parameter(name).grad for m in alone])
    for name, b in wide_layer.named_buffers():
        assert_members(b, [m.get_buffer(name) for m in alone])
    return wide_layer


def wide_answers(wide_layer: WideLayer, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Does what `answers` does, for a wide layer, with one loss for each member."""
    inputs: list[Any] = [
        a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]
    for i, a in enumerate(args):
        for j in range(i):
            if args[j] is a:
                inputs[i] = inputs[j]
    answer = wide_layer(*inputs, **kwargs)
    total = sum((loss([t[i] for t in leaves(answer)]) for i in range(N)), torch.zeros(()))
    if total.requires_grad:
        torch.autograd.backward(total)
    return answer, [t.grad for t in inputs if isinstance(t, Tensor) and t.grad is not None]


def for_all(value: Any) -> Any:
    """Expands an input of one member to all members."""
    if isinstance(value, Tensor):
        return value.expand(N, *value.shape)
    return tuple(map(for_all, value)) if isinstance(value, tuple) else value
