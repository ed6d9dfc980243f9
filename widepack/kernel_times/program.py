"""Predicts the time of a call of a whole program: of a wide program, and of the members in a loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Program, Slot, substitute

from ..ir import ops
from ..ir.encoding import decode
from ..ir.kinds import weights_only
from ..ir.limits import tensors
from ..ir.tensor_type import member_types, parse_slot
from ..ir.torch_internals import memory_id
from ..runtime.meta_values import META
from ..spec.dtypes import dtype_of
from .calibration import MODULE_BYTES
from .kernel_work import KernelWork
from .profile import Profile
from .work import works_of


@dataclass(frozen=True)
class ProgramWork:
    """The work of one call. works: of each kernel, with how often it runs. views: how many it makes."""

    works: tuple[tuple[KernelWork, int], ...]
    views: int

    @property
    def weight_bytes(self) -> float:
        """The bytes of weights that the kernels read."""
        return sum(w.weight_bytes * times for w, times in self.works)

    def large_results(self, least: int) -> float:
        """Returns the bytes of all results that have at least `least` bytes."""
        return sum(w.made_bytes * times for w, times in self.works if w.made_bytes >= least)

    def seconds(self, profile: Profile, streamed: float) -> float:
        """Returns the seconds of the kernels and views. streamed: the bytes of weights that a call reads."""
        kernels = sum(profile.kernel(w, streamed) * times for w, times in self.works)
        return kernels + self.views * profile.view_s


@torch.inference_mode(False)  # in inference mode torch does not split composite ops
@torch.no_grad()
def work_at(program: Program, sizes: Mapping[str, int], *, prologue: bool = True) -> ProgramWork:
    """Returns the work of one call of a program.

    Args:
        program: A wide program, or a member program.
        sizes: The size of each named dim.
        prologue: Leave out the nodes that depend on weights alone, as a loaded model does.

    Raises:
        RuntimeError: A size depends on values, or a guard does not hold at these sizes.
    """
    values: dict[str, Any] = {}
    for slot in (*program.weights, *program.inputs):
        values[slot.name] = _slot_value(slot, sizes, program.members)
    weights = {s.name for s in program.weights}
    early = weights_only(program) if prologue else weights
    return _work(program, values, early, {memory_id(t) for n in weights for t in tensors(values[n])})


def _work(program: Program, values: dict[str, Any], early: Collection[str], weights: set[int]) -> ProgramWork:
    """Returns the work of the nodes. values: of the slots. weights: the memory of weights."""
    found: list[tuple[KernelWork, int]] = []
    views = 0
    for node in program.nodes:
        args = decode(substitute(list(node.args), values.__getitem__), META)
        if node.body is not None:
            pairs = zip(node.body.inputs, args, strict=True)
            inner = {s.name: a if s.kind == "shared" else a[0] for s, a in pairs}
            once = _work(node.body, inner, (), weights)
            found += [(work, program.members * times) for work, times in once.works]
            views += program.members * once.views
            outs = [substitute(o.value, inner.__getitem__) for o in node.body.outputs]
            values[node.name] = [_joined(o, k.kind, program.members) for o, k in zip(outs, node.body.outputs)]
            continue
        kwargs = decode(substitute(node.kwargs, values.__getitem__), META)
        result, works = works_of(node.op, args, kwargs, weights)
        values[node.name] = result
        if node.name in early:
            weights |= {memory_id(t) for t in tensors(result)}
            continue
        found += [(work, 1) for work in works]
        views += not works and node.op not in ops.PYTHON
    return ProgramWork(tuple(found), views)


def _joined(value: Any, kind: str, members: int) -> Any:
    """Returns the results of all members of a loop."""
    if kind != "stacked" or not isinstance(value, torch.Tensor):
        return [value] * members
    return torch.empty([members, *value.shape], dtype=value.dtype, device=META)


def _slot_value(slot: Slot, sizes: Mapping[str, int], members: int) -> Any:
    """Returns a weight or an input on the meta device; a list for Ragged values."""

    def one(type_: str, lead: list[int]) -> torch.Tensor:
        parsed = parse_slot(type_)
        return torch.empty([*lead, *parsed.shape(sizes)], dtype=dtype_of(parsed.dtype), device=META)

    if slot.kind == "ragged":
        return [2 + i if t == "int" else one(t, []) for i, t in enumerate(member_types(slot.type))]
    return one(slot.type, [members] if slot.kind == "stacked" and members else [])


def wide_seconds(
    program: Program, sizes: Mapping[str, int], profile: Profile, *, between: float = 0.0
) -> float:
    """Predicts a call of a wide program on the backend `eager`.

    Args:
        program: The wide program, with its prologue.
        sizes: The size of each named dim.
        profile: The kernel times.
        between: The bytes of other weights that are read between two calls.

    Returns:
        Seconds.

    Raises:
        RuntimeError: As `work_at`.
    """
    work = work_at(program, sizes)
    return profile.call_s + work.seconds(profile, work.weight_bytes + between)


def compiled_seconds(program: Program, sizes: Mapping[str, int], profile: Profile) -> float:
    """Predicts a call of a wide program on a backend that compiles it, from above.

    A compiler joins kernels that are no products, so that these need no start of their own. What it saves of
    their memory traffic is left out.

    Args:
        program, sizes, profile: As `wide_seconds` takes them.

    Raises:
        RuntimeError: As `work_at`.
    """
    work = work_at(program, sizes)
    total = profile.call_s
    for one, times in work.works:
        started = 0.0 if one.count else profile.start(one)
        total += times * max(0.0, profile.kernel(one, work.weight_bytes) - started)
    return total


def loop_seconds(
    programs: Sequence[Program], sizes: Mapping[str, int], profile: Profile, *, modules: int
) -> float:
    """Predicts a call of the members' own modules, one after the other.

    Args:
        programs: The program of each member.
        sizes: The size of each named dim.
        profile: The kernel times.
        modules: The number of modules that a member calls.

    Returns:
        Seconds.

    Raises:
        RuntimeError: As `work_at`.
    """
    works = {key: work_at(p, sizes, prologue=False) for key, p in {id(p): p for p in programs}.items()}
    streamed = sum(works[id(p)].weight_bytes for p in programs)
    one = profile.modules.at(streamed + len(programs) * modules * MODULE_BYTES)
    return sum(modules * one + works[id(p)].seconds(profile, streamed) for p in programs)
