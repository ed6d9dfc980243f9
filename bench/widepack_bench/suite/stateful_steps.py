"""The members alone, step after step, for an entry that carries state: what a wide model's steps are held to."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from widepack.spec.draws import Source, draw_all
from widepack.inference.entry import WideEntry
from widepack_artifacts.tree import paths

from ..baselines.table import difference, leaves, stack
from ..measure.inputs import arranged, sizes
from .compare import called

STEPS = 2


def steps(run: WideEntry, modules: Sequence[nn.Module], batch: int, each: bool, device: str) -> str:
    """Step the wide entry and the user's own modules from where the checkpoints begin, with other inputs in each step.

    modules: in the members' order; they are left as they were. Returns: what differs, in words; empty where nothing does. Raises: BenchError where no inputs
    can be made at this batch.
    """
    entry, found = run.entry, sizes(run.entry, batch)
    members = [called(copy.deepcopy(m), run.name) for m in modules]
    carried = {s.input: s for s in entry.state}
    state = run.state(**found)
    own: list[dict[int, Tensor]] = [{i: state[entry.inputs[i].name][m].clone() for i in carried} for m in range(len(members))]
    sources = [Source(i.name, i.type, i.low, i.high) for i in entry.inputs]
    leave = {p.name for p in entry.signature if set(carried) & set(paths(p.tree))}
    for step in range(STEPS):
        drawn = [draw_all(sources, found, 100 * step + (m if each else 0)) for m in range(len(members))]
        given = [(torch.stack([d[i] for d in drawn]) if each else drawn[0][i]).to(device) for i in range(len(sources))]
        args, kwargs = arranged(entry, given, leave)
        answer, state = (run.each if each else run)(*args, state=state, **kwargs)
        alone = [_step(run, member, [v.to(device) for v in d], mine) for member, d, mine in zip(members, drawn, own)]
        wrong = difference([answer, [state[name] for name in entry.states]], stack([list(a) for a in alone]))
        if wrong:
            return f"step {step + 1}: {wrong}"
    return ""


def _step(run: WideEntry, member: nn.Module, values: list[Tensor], mine: dict[int, Tensor]) -> list[Tensor]:
    """One member's call: the leaves of its answer but for states, then its states; notes the states for the next step."""
    entry = run.entry
    for i, value in mine.items():
        values[i] = value
    args, kwargs = arranged(entry, values)
    found = leaves(member(*args, **kwargs))
    buffers = dict((member if run.name == "forward" else member.get_submodule("member")).named_buffers())
    for s in entry.state:
        if s.output < len(found):
            mine[s.input] = found[s.output]
        else:  # left in a buffer, or in the input itself
            mine[s.input] = buffers[entry.inputs[s.input].name].clone() if s.initial else values[s.input]
    out = {s.output for s in entry.state}
    return [v for k, v in enumerate(found) if k not in out] + [mine[s.input] for s in entry.state]
