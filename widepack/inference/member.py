"""One member of an artifact as a plain module: its own program, its own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from widepack_artifacts import tree
from widepack_artifacts.manifest import Entry
from widepack_artifacts.program import Program

from ..system.gate import Gate
from .binder import Binder
from .output import Output, carried
from ..runtime.graph_module import graph_module, storage


class Member(nn.Module):
    """A member as a flat module, called as the original was and answering in its form; weights are buffers under flat names.

    They are those of the model that it is of: a member that is swapped answers as the new one. Where the entry carries state: `y, state = member(x, state=state)`, from `member.state()` on; no member axis.
    """

    def __init__(
        self,
        name: str,
        entry: Entry,
        program: Program,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        initial: Mapping[str, torch.Tensor] | None = None,
        gate: Gate | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._entry = entry
        self._binder = Binder(entry, 1, device, stacked=False)
        self._initial = dict(initial or {})
        self._gate = gate or Gate()
        self._run = graph_module(program, device).forward
        self._slots = [s.name for s in program.weights]
        for slot in program.weights:
            self.register_buffer(slot.name, weights[slot.source], persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The member's own answer. Raises: InputError."""
        states = self._binder.states
        state = kwargs.pop("state", None) if states else None
        values, marks = self._binder.bind(args, kwargs)
        if states:
            self._binder.carry(values, marks, state)
        self._binder.check(values, marks)
        with self._gate.passed():
            weights = [self._buffers[s] for s in self._slots]
            owned = {storage(w) for w in weights} - {0}
            outs = [o.clone() if storage(o) in owned else o for o in self._run(*weights, *values)]  # the caller may write into what it gets
        answer = outs[self._entry.result["leaf"]] if "leaf" in self._entry.result else tree.build(self._entry.result, outs, Output)
        return (answer, {**state, **carried(outs, states, (), 1, values)}) if state is not None else answer

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Its states as they begin, by name. sizes: of the dims that inputs among them have. Raises: UsageError."""
        with self._gate.passed():
            return self._binder.fresh(self._initial, sizes)
