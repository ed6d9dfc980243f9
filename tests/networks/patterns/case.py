"""Defines a pattern: a small module, its input specs, and other sizes of its dims. Helpers make a module in
one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widepack.spec.input_spec import parse_inputs

N = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",), "strategy": "wide"}
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """make: makes a module with fresh weights. inputs: specs. sizes: letter -> sizes other than the
    example's. sample: replaces specs, (sizes, seed) -> arguments of a call.

    dynamic, example: used with sample, as in `build`.
    """

    make: Make
    inputs: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample: Callable[[Mapping[str, int], int], dict[str, Any]] | None = None
    dynamic: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, int] = field(default_factory=dict)

    def draw(self, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
        """Returns the inputs of one call, by name."""
        if self.sample is not None:
            return self.sample(sizes, seed)
        return {
            s.name: drawn(str(s), sizes, 100 * seed + i) for i, s in enumerate(parse_inputs(self.inputs)[0])
        }

    def calls(self) -> list[dict[str, int]]:
        """Returns the sizes of the calls. Each dim goes through its list, all dims at the same time."""
        letters = list(self.sizes)
        longest = max((len(v) for v in self.sizes.values()), default=1)
        return [{d: self.sizes[d][k % len(self.sizes[d])] for d in letters} for k in range(longest)]


def drawn(spec: str, sizes: Mapping[str, int], seed: int) -> Tensor:
    """Returns a random input. Floating-point numbers are normal, integers are within the bounds of the spec,
    booleans are mostly False and never all True along the last dim.
    """
    (given,), _ = parse_inputs([spec])
    shape = [d if isinstance(d, int) else sizes[d.letter] * d.factor for d in given.dims]
    g = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, given.dtype)
    if given.low is not None and given.high is not None:
        return torch.randint(given.low, given.high + 1, shape, generator=g).to(dtype)
    if dtype == torch.bool:
        mask = torch.rand(shape, generator=g) < 0.4
        if shape:
            mask[..., 0] = False
        return mask
    return torch.randn(shape, generator=g, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)


def case(make: Make, *inputs: str, **sizes: tuple[int, ...]) -> Case:
    """Makes a case from specs. By default, the sizes of the batch B are 5, 1 and 2, those of other letters 7,
    12 and 4.
    """
    letters = dict.fromkeys(letter for s in parse_inputs(inputs)[0] for letter in s.letters)
    return Case(make, inputs, {d: sizes.get(d, (5, 1, 2) if d == "B" else (7, 12, 4)) for d in letters})


def of(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Returns a callable that makes a new part."""
    return partial(kind, *args, **kwargs)


def net(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Make:
    """Returns a callable that makes a module with these parts and this forward of (self, inputs).

    Parts are modules and parameters. Plain tensors become buffers.
    """
    kind = type("Net", (nn.Module,), {"forward": forward})

    def make() -> nn.Module:
        module: nn.Module = kind()
        for name, part in parts.items():
            value = part()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                module.register_buffer(name, value)
            else:
                setattr(module, name, value)
        return module

    return make


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape, dtype=dtype) * 0.5)


def linear(i: int, o: int, **more: Any) -> Callable[[], nn.Linear]:
    return of(nn.Linear, i, o, **more)


def chain(*parts: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(*(p() for p in parts))
