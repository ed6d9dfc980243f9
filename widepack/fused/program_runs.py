"""Runs a wide program on live weights: differentiably, or with a prologue that runs when a weight changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import register_optimizer_step_post_hook

from widepack_artifacts.program import Program

from ..ir.random_ops import uses_random_ops
from ..runtime.executable import Executable
from ..runtime.graph_module import graph_module
from .gradients import error_above, gradients_of, largest_of, relative_bound, weighted_sum
from .torch_module import write_count


def difference(compiled: Callable[..., Any], plain: Callable[..., Any], given: Sequence[Any]) -> str:
    """Returns how the answers or gradients of a compiled program differ; an empty text if they do not.

    Args:
        compiled: The compiled function of weights and inputs.
        plain: The same function without compilation.
        given: The weights and inputs of a call.
    """
    found, expected = (_answers_and_gradients(run, given) for run in (compiled, plain))
    largest = largest_of(expected)
    for a, b in zip(found, expected):
        if (a is None) != (b is None):
            return "a gradient is missing"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result is {list(a.shape)} {a.dtype} in place of {list(b.shape)} {b.dtype}"
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "whole numbers differ"
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return "NaN or infinity in other places"
        if (above := error_above(a, b, relative_bound([b]), largest)) is not None:
            return f"a result is off by {above[0]:.2e} at a size of {above[1]:.2e}"
    return ""


def _answers_and_gradients(run: Callable[..., Any], given: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns the answers, then the gradients of a weighted sum of them by each value that needs one."""
    copies = pytree.tree_map(_copied, list(given))
    tensors = [v for v in pytree.tree_leaves(copies) if isinstance(v, torch.Tensor) and v.requires_grad]
    needed = {str(k): v for k, v in enumerate(tensors)}
    with torch.enable_grad():
        answers = [y for y in pytree.tree_leaves(run(*copies)) if isinstance(y, torch.Tensor)]
        gradients = gradients_of(weighted_sum(answers, 0), needed, list(needed))
    return [*(y.detach() for y in answers), *gradients.values()]


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor that is a parameter if it is one: torch compiles others once more."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_(value.requires_grad)


ProgramRun = Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], list[Any]]
"""Takes the weights by source name and the inputs, and returns the outputs."""

_FUSED_STEPS = "_widepack_steps"  # an attribute of parameters


def _count_fused_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts steps of an optimizer's fused kernels, because torch does not count their writes."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                setattr(p, _FUSED_STEPS, getattr(p, _FUSED_STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_fused_steps)


class DifferentiableProgram:
    """Runs a program as one function of weights and inputs that autograd can differentiate.

    compiled: options of `torch.compile`, which then compiles the function. Default: None, not compiled. A
    compiled function is compared with the other at the first call of each size.
    """

    def __init__(
        self, program: Program, device: torch.device, compiled: Mapping[str, Any] | None = None
    ) -> None:
        self.sources = [s.source for s in program.weights]
        self.plain: Callable[..., Any] = graph_module(program, device, checks="none").forward
        self.compiled: Callable[..., Any] | None = None
        self._right: set[Any] = set()  # the sizes at which both functions were compared
        if compiled is not None:
            self.compiled = torch.compile(self.plain, **compiled)
            self._random = uses_random_ops(program)

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        given = [*(weights[s] for s in self.sources), *inputs]
        if self.compiled is None:
            return list(self.plain(*given))
        sizes = tuple(x.shape for x in inputs)
        if sizes not in self._right and not self._random:
            why = difference(self.compiled, self.plain, given)
            if why:
                warnings.warn(
                    f"torch.compile gives other answers than the program without compilation: {why}. "
                    "The program runs without compilation",
                    stacklevel=2,
                )
                self.compiled = None
                return list(self.plain(*given))
        self._right.add(sizes)
        return list(self.compiled(*given))


class RebindingProgram:
    """Runs a program over bound weights, and binds them again when one of them has changed."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self.sources = [s.source for s in program.weights]
        self.bound: list[tuple[int, int, int, int]] | None = (
            None  # the versions of the weights that are bound
        )
        self.executable: Executable | None = None

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        own = [weights[s] for s in self.sources]
        versions = [(id(w), w.data_ptr(), write_count(w), getattr(w, _FUSED_STEPS, 0)) for w in own]
        if self.executable is None or versions != self.bound:
            values = {s: w.detach() for s, w in zip(self.sources, own)}
            self.executable, self.bound = Executable(self.program, values, self.device), versions
        return self.executable.run_for_autograd(*inputs)
