"""Examines modules: whether the rows of a batch are independent in the program that is captured."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from widepack.capture.call import arrange
from widepack.capture.capture import capture
from widepack.ir.cast import raise_program, raise_value
from widepack.ir.fake_values import CPU
from widepack.ir.tensor_type import tensor_type
from widepack.rows.trials import RowTrials
from widepack.rows.verdict import ExaminedEntry
from widepack.runtime.graph_module import graph_module
from widepack.simplify.canonical import plain
from widepack.spec.draws import InputSource
from widepack.verification.subject import fitting
from widepack_artifacts.entry import Rows
from widepack_artifacts.program import Program


class Examined:
    """A captured module. dims: the letter of each dynamic dim of each input; default B for dim 0 of all."""

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], dims: Sequence[Mapping[int, str]] = ()
    ) -> None:
        module = module.eval()
        letters = list(dims) or [{0: "B"}] * len(inputs)
        names = list(inspect.signature(module.forward).parameters)
        axes: dict[str, Any] = {n: dict(d) for n, d in zip(names, letters)}
        sizes = {letter: x.shape[d] for x, own in zip(inputs, letters) for d, letter in own.items()}
        found = capture(lambda: copy.deepcopy(module), arrange(module, inputs, {}, axes, sizes))
        self.module, self.sizes = module, sizes
        bounds = {letter: (least, most) for letter, (least, most, _) in found.dims.items()}
        self.fits = fitting(bounds, [g.expr for g in found.guards])
        self.program: Program = plain(found.program)
        self.outputs = [type_ for _, type_ in found.outputs]
        self.sources = [
            InputSource(leaf.name, leaf.type, None, None, x) for leaf, x in zip(found.inputs, inputs)
        ]
        state = dict(module.state_dict(keep_vars=True))
        constants = {name: value for name, (_, value) in found.weights.items()}
        self.weights = [{**constants, **state}[s.source].detach() for s in self.program.weights]

    def trials(self, number: int = 0, letter: str = "B") -> RowTrials:
        """Returns the trials of the program along a dim."""
        assert number == 0
        run = graph_module(self.program, CPU).forward
        exact = graph_module(raise_program(self.program), CPU).forward
        weights64 = [raise_value(w) for w in self.weights]
        with torch.no_grad():
            return RowTrials(
                lambda inputs: run(*self.weights, *inputs),
                lambda inputs: exact(*weights64, *inputs),
                self.sources,
                [t for t in map(tensor_type, self.outputs) if t is not None],
                letter,
            )

    def verdict(self) -> Rows:
        """Returns the verdict."""
        return ExaminedEntry([self.program], self.sizes, self.fits, self.outputs, self.trials).rows()


class Of(nn.Module):
    """A module without weights that computes a function of its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)
