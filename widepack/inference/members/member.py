"""Defines one member of an artifact as a plain module: its own program over its own weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Program

from ...ir.edit import with_reshapes
from ...ir.torch_internals import needs_numbers_alone
from ...runtime.executable import storage
from ...runtime.graph_module import graph_module
from ...system.autocast import autocast_off
from ...system.gate import Gate
from ..binder import Binder, NamedInputs
from ..call_check import NoRows
from ..no_rows import EmptyCall
from ..output import AnswerSizes, built, new_states
from ..single_members import SingleMember, run_apart


class Member(nn.Module, NamedInputs):
    """One member of a loaded model as a plain `nn.Module`. `ens.member(i)` and `ens[i]` return it.

    It is called as the original module was, and returns the member's own structure without a member axis. Its
    weights are buffers under flat names, and share memory with the loaded model: after a swap it answers as
    the new member. For an entry with states, call `y, state = member(x, state=state)`, and start with
    `member.state()`.

    Attributes:
        name: The member's name.
        slots: The names of the weights, in the order in which `graph` takes them.
        sessions: What may run calls in the place of the member's own program.

    Example:
        >>> member = ens.member("fold0")
        >>> torch.testing.assert_close(member(x), ens(x)[0])
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
        sessions: SingleMember | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._entry = entry
        self._binder = Binder(entry, 1, device, stacked=False, model="member")
        self._sizes = AnswerSizes(entry.outputs)
        self._initial = dict(initial or {})
        self._gate = gate or Gate()
        self._program, self._device = with_reshapes(program), device
        self._run = graph_module(self._program, device, direct=True).forward
        self.slots = [s.name for s in program.weights]
        for slot in program.weights:
            self.register_buffer(slot.name, weights[slot.source], persistent=False)
        self.sessions, self._own = sessions or SingleMember(), tuple(self._buffers.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the member.

        Args:
            *args: The inputs as the member's method takes them, without a member axis.
            **kwargs: The same by name, and `state` for an entry with states.

        Returns:
            The member's own answer. For an entry with states: (answer, new state).

        Raises:
            InputError: The inputs do not match what the model was built for.
            ArtifactError: The answer has other sizes than the manifest says.

        Example:
            >>> y = ens.member("fold0")(x)  # x: [B, 8], y: [B, 3]
        """
        states = self._binder.states
        state = kwargs.pop("state", None) if states else None
        values, per_member = self._binder.bind(args, kwargs)
        if states:
            self._binder.carry(values, per_member, state)
        try:
            outs = self._outputs(values, per_member)
        except NoRows as e:
            empty = EmptyCall(e, self._entry, values)
            outs = empty.cut(empty.run(lambda: self._outputs(empty.values, per_member)))
        answer = built(self._entry.result, outs)
        return (answer, {**state, **new_states(outs, states, (), 1, values)}) if state is not None else answer

    def _outputs(self, values: Sequence[torch.Tensor], per_member: Sequence[bool]) -> list[Any]:
        """Returns the outputs of a call. Raises: InputError; ArtifactError."""
        sizes = self._binder.check(values, per_member)
        bound = self.sessions.program(sizes) if self._may_run_apart(values) else None
        with autocast_off(), self._gate.passed():
            found = run_apart(bound, self.sessions.place, values) if bound is not None else None
            outs = self._run_own(values) if found is None else found
        self._sizes.check(f"the member {self.name}", outs, sizes)
        return outs

    def _may_run_apart(self, values: Sequence[torch.Tensor]) -> bool:
        """Returns whether a function of a backend may run: it has the weights, and gives numbers alone."""
        same = all(a is b for a, b in zip(self._own, self._buffers.values()))
        return same and needs_numbers_alone(values)

    def _run_own(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the member's own program."""
        weights = [self._buffers[s] for s in self.slots]
        owned = {storage(w) for w in weights} - {0}
        # The caller may write into the answer, so it does not share memory with a weight.
        return [o.clone() if storage(o) in owned else o for o in self._run(*weights, *values)]

    def on_eager(self) -> Member:
        """Returns a module over the same weights whose calls all run the member's own program.

        A call may run in a session of ONNX Runtime else, if that was measured to be faster.
        """
        found = copy.copy(self)
        found.sessions = SingleMember()
        return found

    def extra_repr(self) -> str:
        return f"{self.name}; {self._binder.description}"

    @property
    def graph(self) -> fx.GraphModule:
        """The program as a graph of ops: it takes the weights of `slots`, then the tensors of a call.

        Example:
            >>> print(ens.member("fold0").graph.code)
        """
        return graph_module(self._program, self._device)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns the member's states as they begin.

        Args:
            **sizes: The size of each dim of the states that are inputs, for example `B=8`.

        Returns:
            For each state a tensor without a member axis: a buffer's value, or zeros for an input.

        Raises:
            UsageError: A size is missing.

        Example:
            >>> state = ens.member("fold0").state()
        """
        with self._gate.passed():
            return self._binder.fresh(self._initial, sizes)
