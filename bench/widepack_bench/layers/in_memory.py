"""N modules of one architecture as wide programs in memory: captured once, then lowered for each strategy; nothing is written and nothing verified.

What a contestant takes beside its program is what `Executable.run` does; the checks of inputs that a loaded model's call makes are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from widepack import primitives as _primitives  # noqa: F401  # fills the registry
from widepack.building.preview import Foreseen
from widepack.lowering.lower import Lowered
from widepack.checkpoints.alignment import bit_equal
from widepack.capture.module_tensors import tensors_of
from widepack.registry.registry import REGISTRY
from widepack.runtime.graph_module import Executable
from widepack.spec.draws import Source, draw_all
from widepack.spec.input_spec import parse_inputs, type_text
from widepack_artifacts.program import Program

from ..measure.answers import Run

BATCH = "B"
AUTO, WIDE, LOOP, SEQUENTIAL = "auto", "wide", "loop", "sequential"
COMPILED = "wide on compile"
MOVES = ("shape", "dim", "once", "part")  # strategies of what only moves values about


@dataclass(frozen=True)
class Way:
    """One wide program. name: what was asked for; used: the strategies that compute in it; same: other names that came to the same program."""

    name: str
    used: tuple[str, ...]
    run: Run
    same: tuple[str, ...] = ()


def members(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """N members in eval mode that differ in everything: what a layer begins as one number throughout (scales, shifts, statistics) is drawn too."""
    made = []
    for i in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7 * i + 1)
            module = make().eval()
            for _, value in (*module.named_parameters(), *module.named_buffers()):
                if value.is_floating_point() and value.numel() and bool((value == value.flatten()[0]).all()):
                    nn.init.uniform_(value, 0.5, 1.5)
        made.append(module.requires_grad_(False))
    return made


def inputs(specs: Sequence[str], batch: int, count: int) -> list[Tensor]:
    """One call's inputs, each `[N, ...]`: every member has its own."""
    parsed, _ = parse_inputs(specs)
    sources = [Source(s.name, type_text(s), s.low, s.high) for s in parsed]
    drawn = [draw_all(sources, {BATCH: batch}, 1 + i) for i in range(count)]
    return [torch.stack(v) for v in zip(*drawn, strict=True)]


class InMemory:
    """make: a fresh member in eval mode. modules: the members. specs, given: the inputs, as `inputs` takes and gives them. each: every member has its own, else all have the first one's."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        modules: Sequence[nn.Module],
        specs: Sequence[str],
        given: Sequence[Tensor],
        each: bool,
        device: str = "cpu",
    ) -> None:
        model = Foreseen(make, specs, sizes={BATCH: given[0].shape[1]})
        tables = [{**dict(tensors_of(m)), **dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
        self.weights: dict[str, Any] = {}
        kinds = model.kinds()
        for name in kinds:
            own = [t[name].detach() for t in tables if name in t]
            if own and any(not bit_equal(v, own[0]) for v in own):
                kinds[name] = "stacked"
            if kinds[name] == "stacked":
                self.weights[name] = torch.stack(own).to(device)
            else:  # the same in all members, or a literal of the program
                self.weights[name] = (own[0] if own else model.captured.weights[name][1]).to(device)
        self.device = torch.device(device)
        self.members = model.of(len(modules), pattern="each" if each else "shared", device=self.device.type, kinds=kinds)

    def bound(self, lowered: Lowered) -> Run:
        """A program ready to run: its one output, or a list of all."""
        run = Executable(lowered.program, self.weights, self.device).run
        if len(lowered.program.outputs) == 1:
            return lambda *args: run(*args)[0]
        return run

    def compiled(self) -> Way:
        """The wide program under `torch.compile`, for the exact shapes, as baselines are; it compiles when it is first called."""
        lowered = self.members.lowered(self.members.plan(WIDE))
        run = Executable(lowered.program, self.weights, self.device)
        call = torch.compile(run.forward, dynamic=False)
        run.use(lambda *args: call(*run.weights, *args))
        single = len(lowered.program.outputs) == 1
        return Way(
            COMPILED,
            tuple(dict.fromkeys(s for s in lowered.used.values() if s not in MOVES)),
            (lambda *args: run.run(*args)[0]) if single else run.run,
        )

    def names(self) -> list[str]:
        """The strategies that some op of the program has, where it has more than one."""
        made = [REGISTRY[n.op].strategies for n in self.members.program.nodes if n.op in REGISTRY]
        return list(dict.fromkeys(s for known in made if len(known) > 1 for s in known))

    def ways(self, names: Sequence[str] | None = None) -> tuple[list[Way], dict[str, str]]:
        """`auto` first, then every other program that some strategy comes to, each once; and why others cannot be had here. names: of strategies; all without it."""
        names = self.names() if names is None else names
        asked: dict[str, list[str]] = {AUTO: [AUTO], WIDE: [WIDE], **{n: [WIDE, n] for n in names}, LOOP: [LOOP]}
        asked |= {f"{LOOP} {n}": [LOOP, n] for n in names} | {SEQUENTIAL: [WIDE, SEQUENTIAL]}
        made: list[tuple[Program, Way]] = []
        refused: dict[str, str] = {}
        for name, words in asked.items():
            try:
                lowered = self.members.lowered(self.members.plan(words))
                used = tuple(dict.fromkeys(s for s in lowered.used.values() if s not in MOVES)) or tuple(dict.fromkeys(lowered.used.values()))
                if len(words) == 2 and words[1] not in used and words[0] == WIDE:
                    continue  # it applies to no node here
                number = next((i for i, (p, _) in enumerate(made) if p == lowered.program), -1)
                if number >= 0:
                    same = made[number][1]
                    if not name.startswith(f"{LOOP} ") or (same.name == AUTO and not same.same):  # else one that has no form of its own inside loops
                        made[number] = made[number][0], replace(same, same=(*same.same, name))
                    continue
                made.append((lowered.program, Way(name, used, self.bound(lowered))))
            except Exception as error:  # a strategy that cannot be lowered or bound is a result, and the others stand
                if name == AUTO:
                    raise
                refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [way for _, way in made], refused


def double(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The members in float64."""
    import copy

    return [copy.deepcopy(m).double() for m in modules]
