"""Makes chains of linear layers and activations for tests, with each member's own answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from recurrent_cases import OWN, rand
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Chain:
    """A chain of N members: the arguments of `mlp_chain`, and the answers of each member alone."""

    def __init__(
        self,
        members: int,
        rows: int,
        widths: Sequence[int],
        activations: Sequence[str],
        biases: str = "all",
        shared: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.x = rand(1, 1 if shared else members, rows, widths[0], dtype=dtype)
        self.weights = [
            (rand(10 + k, members, o, i) / i**0.5).to(dtype) for k, (i, o) in enumerate(pairwise(widths))
        ]
        self.biases = [
            rand(20 + k, members, o, dtype=dtype) if biases == "all" or (biases == "some" and k % 2) else None
            for k, o in enumerate(widths[1:])
        ]
        self.activations = list(activations)

    def run(self) -> Tensor:
        """Returns the answers of the op."""
        y: Tensor = OWN.mlp_chain(self.x, self.weights, self.biases, self.activations)
        return y

    def members(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Returns the answers of the members, each alone, in a dtype."""
        runs = []
        for i in range(len(self.weights[0])):
            y = self.x[i if len(self.x) > 1 else 0].to(dtype)
            for weight, bias, name in zip(self.weights, self.biases, self.activations):
                y = functional.linear(y, weight[i].to(dtype), None if bias is None else bias[i].to(dtype))
                y = ACTIVATIONS[name](y) if name else y
            runs.append(y)
        return torch.stack(runs)


def closeness(found: Tensor, truth: Tensor, own: Tensor) -> None:
    """Checks that errors are at most twice those of the members in their own dtype, and an ulp.

    found: the answers of an op. truth: those of the members in float64. own: those in their own dtype.
    """
    assert found.dtype == own.dtype and found.shape == truth.shape
    errors = [(t.double() - truth).square().mean().sqrt().item() for t in (found, own)]
    ulp = torch.finfo(own.dtype).eps * truth.square().mean().sqrt().item()
    assert errors[0] <= 2 * errors[1] + ulp, f"the rms error is {errors[0]}, that of the members {errors[1]}"
