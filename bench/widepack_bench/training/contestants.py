"""The training steps by name. Each changes its own copy of the members' weights.

All have the same optimizer, torch's AdamW with `fused=True`, over all weights of all members at once: the
fastest form on a CPU. Without this, the loop would pay for N optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import widepack

from ..baselines.vmap import function_of, tables
from .task import RATE, TrainingTask
from .worker import step_in_processes

Step = Callable[[], Any]
"""Trains all members by one step. Returns their losses before it: `[N]`, or a list of N numbers."""

_Table = dict[str, Tensor]


def _optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=RATE, fused=True)


def _at_once(losses_of_all: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Step:
    """Returns a step with one backward pass of all members. losses_of_all: computes the losses, `[N]`."""
    optimizer = _optimizer(parameters)

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = losses_of_all()
        torch.autograd.backward(losses.sum())
        optimizer.step()
        return losses.detach()

    return step


def _in_turn(loss_of: Callable[[int], Tensor], members: int, parameters: Iterable[Tensor]) -> Step:
    """Returns a step that trains one member after the other. loss_of: computes the loss of a member."""
    optimizer = _optimizer(parameters)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        losses = []
        for i in range(members):
            loss = loss_of(i)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        return losses

    return step


def fused(task: TrainingTask, compiled: bool = False) -> Step:
    """Trains the module that `widepack.fuse` makes."""
    module = widepack.fuse(task.fresh_modules(), task.data(0)[0]).train()
    if compiled:
        module.compile()
    call = module.each if task.each else module
    return _at_once(lambda: task.loss_of_all(call(task.x)), module.parameters())


def fused_compiled(task: TrainingTask) -> Step:
    """Trains the same module after its `compile()`."""
    return fused(task, compiled=True)


def loop(task: TrainingTask) -> Step:
    """Trains the members one after the other."""
    modules = task.fresh_modules()

    def loss_of(i: int) -> Tensor:
        x, labels = task.data(i)
        return cross_entropy(modules[i](x), labels)

    return _in_turn(loss_of, len(modules), (p for m in modules for p in m.parameters()))


def compiled_member(task: TrainingTask) -> Step:
    """Compiles forward and loss of one member, and trains the members one after the other."""
    rows, one = _functions(task.fresh_modules())
    run = torch.compile(one, dynamic=False)
    return _in_turn(lambda i: run(rows[i], *task.data(i)), len(rows), _trained(rows))


def compiled_loop(task: TrainingTask) -> Step:
    """Compiles forward and loss of all members as one graph."""
    rows, one = _functions(task.fresh_modules())

    def losses(rows: list[_Table], x: Tensor, labels: Tensor) -> Tensor:
        if task.each:
            return torch.stack([one(row, x[i], labels[i]) for i, row in enumerate(rows)])
        return torch.stack([one(row, x, labels) for row in rows])

    run = torch.compile(losses, dynamic=False)
    return _at_once(lambda: run(rows, task.x, task.labels), _trained(rows))


def vmap(task: TrainingTask, compiled: bool = False) -> Step:
    """Trains stacked weights through `torch.func.vmap` of `functional_call`."""
    rows, one = _functions(task.fresh_modules())
    weights = {
        name: torch.stack([row[name].detach() for row in rows]).requires_grad_(value.requires_grad)
        for name, value in rows[0].items()
    }
    data = 0 if task.each else None
    run = torch.vmap(one, in_dims=(0, data, data), randomness="different")
    run = torch.compile(run, dynamic=False) if compiled else run
    return _at_once(lambda: run(weights, task.x, task.labels), _trained([weights]))


def vmap_compiled(task: TrainingTask) -> Step:
    """Compiles `vmap` as one graph."""
    return vmap(task, compiled=True)


def _trained(rows: Sequence[_Table]) -> list[Tensor]:
    """Returns the weights that train."""
    return [t for row in rows for t in row.values() if t.requires_grad]


def _functions(modules: Sequence[nn.Module]) -> tuple[list[_Table], Callable[..., Tensor]]:
    """Returns each member's weights, and one member's loss as a function of (weights, x, labels)."""
    trained = {name for name, p in modules[0].named_parameters() if p.requires_grad}
    rows = [{k: t.requires_grad_(k in trained) for k, t in table.items()} for table in tables(modules)]
    one = function_of(modules[0])

    def loss(weights: _Table, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(one(weights, (x,), {}), labels)

    return rows, loss


CONTESTANTS: Mapping[str, Callable[[TrainingTask], Step]] = {
    "loop": loop,
    "compiled-member": compiled_member,
    "compiled-loop": compiled_loop,
    "vmap": vmap,
    "vmap-compiled": vmap_compiled,
    "processes": step_in_processes,
}
"""The baselines."""
COMPILED = ("compiled-member", "compiled-loop", "vmap-compiled")
