"""Runs the members alone, step after step, for an entry with state, and compares a wide model's steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from widepack.inference.entry import WideEntry
from widepack.spec.draws import InputSource, draw_all
from widepack_artifacts.tree import paths

from ..baselines.members import called
from ..baselines.table import difference, leaves, stack
from ..measure.inputs import arranged, sizes

STEPS = 2


def steps(run: WideEntry, modules: Sequence[nn.Module], batch: int, each: bool, device: str) -> str:
    """Steps the wide entry and the user's own modules from the checkpoints' first state, with new inputs each
    step.

    modules: in the members' order; they are not changed. Returns the difference as text; empty where the
    answers are the same. Raises: BenchError where no inputs can be made at this batch.
    """
    entry, named_sizes = run.entry, sizes(run.entry, batch)
    members = [called(copy.deepcopy(m), run.name) for m in modules]
    carried = {s.input: s for s in entry.state}
    state = run.state(**named_sizes)
    states: list[dict[int, Tensor]] = [
        {i: state[entry.inputs[i].name][m].clone() for i in carried} for m in range(len(members))
    ]
    sources = [InputSource(i.name, i.type, i.low, i.high) for i in entry.inputs]
    leave = {p.name for p in entry.signature if set(carried) & set(paths(p.tree))}
    for step in range(STEPS):
        drawn = [draw_all(sources, named_sizes, 100 * step + (m if each else 0)) for m in range(len(members))]
        values = [
            (torch.stack([d[i] for d in drawn]) if each else drawn[0][i]).to(device)
            for i in range(len(sources))
        ]
        args, kwargs = arranged(entry, values, leave)
        answer, state = (run.each if each else run)(*args, state=state, **kwargs)
        alone = [
            _step(run, member, [v.to(device) for v in d], member_state)
            for member, d, member_state in zip(members, drawn, states)
        ]
        wrong = difference([answer, [state[name] for name in entry.states]], stack([list(a) for a in alone]))
        if wrong:
            return f"step {step + 1}: {wrong}"
    return ""


def _step(run: WideEntry, member: nn.Module, values: list[Tensor], state: dict[int, Tensor]) -> list[Tensor]:
    """Calls one member. Returns the leaves of its answer without states, then its states.

    Updates `state` for the next step.
    """
    entry = run.entry
    for i, value in state.items():
        values[i] = value
    args, kwargs = arranged(entry, values)
    answer = leaves(member(*args, **kwargs))
    buffers = dict((member if run.name == "forward" else member.get_submodule("member")).named_buffers())
    for s in entry.state:
        if s.output < len(answer):
            state[s.input] = answer[s.output]
        else:  # The member left it in a buffer, or in the input itself.
            state[s.input] = buffers[entry.inputs[s.input].name].clone() if s.initial else values[s.input]
    out = {s.output for s in entry.state}
    return [v for k, v in enumerate(answer) if k not in out] + [state[s.input] for s in entry.state]
