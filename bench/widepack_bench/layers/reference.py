"""Whether answers are right, as DESIGN.md has it: each member alone in float64 is the truth, and the members' own errors in their dtype are the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widepack.verification.tolerance import Pool

from ..measure.answers import leaves, padding_kept
from .in_memory import double


@dataclass(frozen=True)
class Truth:
    """own, exact: `[member][output]`, what each member answers by itself, in its dtype and in float64."""

    own: list[list[Tensor]]
    exact: list[list[Tensor]]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], given: Sequence[Tensor], each: bool) -> Truth:
        """given: `[N, ...]` each. each: every member sees its own, else all see the first one's."""
        own, exact = [], []
        with torch.inference_mode(), padding_kept():
            for i, (module, precise) in enumerate(zip(modules, double(modules), strict=True)):
                mine = [v[i if each else 0] for v in given]
                own.append(leaves(module(*mine)))
                exact.append([o.clone() for o in leaves(precise(*(v.double() if v.is_floating_point() else v for v in mine)))])
        return cls(own, exact)

    def wrong(self, answer: Any) -> str:
        """What is wrong with the answers of all members, in words; empty where they are right."""
        found = leaves(answer)
        if len(found) != len(self.own[0]):
            return f"{len(found)} outputs, each member gives {len(self.own[0])}"
        for k, wide in enumerate(found):
            if wide.shape[0] != len(self.own):
                return f"output {k}: {list(wide.shape)} for {len(self.own)} members"
            pool = Pool(str(k))
            for own, exact in zip(self.own, self.exact, strict=True):
                pool.add_own(own[k], exact[k])
            for i, (own, exact) in enumerate(zip(self.own, self.exact, strict=True)):
                pool.add_wide(str(i), "this call", wide[i], own[k], exact[k])
            if said := pool.wrong():
                return said
        return ""
