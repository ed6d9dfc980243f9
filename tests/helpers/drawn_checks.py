"""Checks drawn modules against the members alone: fuse with ten steps, build, extract, swap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drawn_modules import WIDTH, Drawn
from loaded import files_of
from torch import Tensor, nn

import widepack
from widepack import WidepackError

N = 3
STEPS = 10
BATCH = 5


def members(kind: Drawn, own: bool) -> list[nn.Module]:
    """Returns members with different weights. own: whether their constants differ too."""
    torch.manual_seed(kind.seed)
    modules = [kind.member(i if own else None) for i in range(N)]
    torch.manual_seed(kind.seed + 1)
    for module in modules:
        module.train()(torch.randn(2 * BATCH, WIDTH))  # statistics that differ
    return modules


def inputs(kind: Drawn, count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(kind.seed + 2)
    return [torch.randn(BATCH, WIDTH, generator=g) for _ in range(count)]


def close(found: Tensor, expected: Tensor, what: str, bound: float = 1e-4) -> None:
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    size = max(float(expected.abs().max()), 1.0) if found.numel() else 1.0
    assert error <= bound * size, f"{what} is off by {error:.1e} at a size of {size:.1e}"


def step(outputs: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    outputs.square().mean((-2, -1)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def fuse_and_train(kind: Drawn) -> None:
    """Compares ten steps of SGD of a fused module with those of each member alone."""
    modules = members(kind, own=True)
    before = [snapshot(m) for m in modules]
    xs = inputs(kind, STEPS + 1)
    fused = widepack.fuse(modules, xs[0])
    for module, values in zip(modules, before):
        same_snapshot(module, values)
    optimizer = torch.optim.SGD(fused.parameters(), 0.02)
    for x in xs[:STEPS]:
        step(fused(x), optimizer)
    copies, x = fused.unfuse(), xs[STEPS]
    with torch.no_grad():
        together = fused.eval()(x)
    for i, module in enumerate(modules):
        own = torch.optim.SGD(module.parameters(), 0.02)
        for batch in xs[:STEPS]:
            step(module(batch), own)
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor) and value.is_floating_point():
                close(copies[i].state_dict()[name], value, f"{name} of member {i}")
        close(together[i], module.eval()(x), f"the answer of member {i} in eval mode")
        for mode in (False, True):  # a call in train mode changes statistics
            close(copies[i].train(mode)(x), module.train(mode)(x), f"unfused member {i}, train({mode})")


def fuse_copies(kind: Drawn) -> None:
    """Compares the copies of `fuse(model, n=3)` in train mode with modules of their own."""
    (model, *_), (x, *_) = members(kind, own=False), inputs(kind, 1)
    fused = widepack.fuse(model, x, n=N)
    states = [copy.state_dict() for copy in fused.unfuse()]
    with torch.no_grad():
        together = fused(x)
        for i, state in enumerate(states):
            alone = kind()
            alone.load_state_dict(state)
            close(together[i], alone.train()(x), f"copy {i}")


def build_extract_swap(kind: Drawn, folder: Path) -> None:
    """Compares an artifact of three files, what is extracted from it, and a swapped member."""
    modules = [m.eval() for m in members(kind, own=False)]
    files = files_of(folder, modules)
    x, y = inputs(kind, 2)
    widepack.build(files[:2], folder / "e.wide", model=kind, sample=(x,), pt2=False, targets=("cpu",))
    ens = widepack.load(folder / "e.wide")
    with torch.no_grad():
        for i in range(2):
            close(ens(y)[i], modules[i](y), f"member {i} of the artifact")
            fresh = kind().eval()
            fresh.load_state_dict(ens.state_dict(i))
            close(fresh(y), modules[i](y), f"the extracted member {i}")
        ens.swap(1, files[2], model=kind)
        close(ens(y)[1], modules[2](y), "the swapped member")
        close(ens(y)[0], modules[0](y), "the other member after a swap")


def refusal(check: Callable[..., None], *args: Any) -> str:
    """Runs a check and returns the message of a refusal; an empty text where all is right."""
    try:
        check(*args)
    except WidepackError as e:
        return f"{type(e).__name__}: {e}"
    return ""


# ---------------------------------------------------------------- what can be reached from a module


def snapshot(root: nn.Module) -> dict[str, Any]:
    """Returns what can be reached from a module: the identity of each object, and numbers of tensors."""
    rows: dict[str, Any] = {}
    seen: set[int] = set()

    def add(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            gradient = None if not value.is_leaf or value.grad is None else value.grad.clone()
            rows[path] = value, value.detach().clone(), gradient, value.requires_grad, value.data_ptr()
            return
        rows[path] = value
        if id(value) in seen or isinstance(value, (type, str, bytes, int, float)):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            for i, (key, v) in enumerate(list(value.items())):
                add(f"{path}[{i}:{key!r:.20}]", v)
        elif isinstance(value, (list, tuple, set)):
            for i, v in enumerate(value):
                add(f"{path}[{i}]", v)
        elif callable(value) and hasattr(value, "__closure__"):
            for i, cell in enumerate(value.__closure__ or ()):
                add(f"{path}.<{i}>", cell.cell_contents)
            add(f"{path}.defaults", value.__defaults__)
        elif hasattr(value, "__self__") and not isinstance(value.__self__, type(copy)):
            add(f"{path}.self", value.__self__)
        if hasattr(value, "func"):
            add(f"{path}.func", value.func)
        if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type(copy)):
            for key, v in list(vars(value).items()):
                add(f"{path}.{key}", v)

    add("module", root)
    rows["random"] = torch.get_rng_state()
    return rows


def same_snapshot(root: nn.Module, before: dict[str, Any]) -> None:
    """Asserts that a module is as it was."""
    now = snapshot(root)
    assert list(now) == list(before), sorted(set(now) ^ set(before))
    for path, value in before.items():
        other = now[path]
        if path == "random":
            assert torch.equal(value, other), path
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor) and isinstance(other, tuple):
            assert value[0] is other[0] and value[3:] == other[3:], path
            assert torch.equal(value[1].nan_to_num(), other[1].nan_to_num()), path
            assert (value[2] is None) == (other[2] is None), path
            assert value[2] is None or torch.equal(value[2], other[2]), path
        elif isinstance(value, (bool, int, float, str)):
            assert value == other and type(value) is type(other), path
        elif ".defaults" not in path and "method" not in type(value).__name__:
            assert value is other, path
