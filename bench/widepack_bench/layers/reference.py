"""Compares the answers of a layer's programs with the members' reference answers.

The reference is each member alone in float64. The bound comes from the members' own errors in their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widepack.ir.torch_internals import without_fast_path
from widepack.verification.tolerance import ErrorStats

from ..measure.answers import leaves
from .in_memory import double


@dataclass(frozen=True)
class LayerReference:
    """The answers `[member][output]` of each member alone: in its dtype (`own`) and in float64 (`exact`)."""

    own: list[list[Tensor]]
    exact: list[list[Tensor]]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], inputs: Sequence[Tensor], each: bool) -> LayerReference:
        """Runs every member in both dtypes.

        inputs: each `[N, ...]`. each: every member has its own inputs; else all have those of the first
        member.
        """
        own, exact = [], []
        with torch.inference_mode(), without_fast_path():
            for i, (module, precise) in enumerate(zip(modules, double(modules), strict=True)):
                args = [v[i if each else 0] for v in inputs]
                own.append(leaves(module(*args)))
                exact.append(
                    [
                        o.clone()
                        for o in leaves(precise(*(v.double() if v.is_floating_point() else v for v in args)))
                    ]
                )
        return cls(own, exact)

    def wrong(self, answer: Any) -> str:
        """Returns what is wrong with the answers of all members; empty where they are right.

        answer: on any device. The members' answers are on the CPU.
        """
        outputs = [output.detach().cpu() for output in leaves(answer)]
        if len(outputs) != len(self.own[0]):
            return f"{len(outputs)} outputs, each member gives {len(self.own[0])}"
        for k, wide in enumerate(outputs):
            if wide.shape[0] != len(self.own):
                return f"output {k}: {list(wide.shape)} for {len(self.own)} members"
            stats = ErrorStats(str(k))
            for own, exact in zip(self.own, self.exact, strict=True):
                stats.add_own(own[k], exact[k])
            for i, (own, exact) in enumerate(zip(self.own, self.exact, strict=True)):
                stats.add_wide(str(i), "this call", wide[i], own[k], exact[k])
            if message := stats.wrong():
                return message
        return ""
