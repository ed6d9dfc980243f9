"""Makes wide programs of N modules in memory: captures one member, then lowers it for each strategy.

Nothing is written and nothing is verified. A call runs `Executable.run`. The input checks of a loaded model's
call are not part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from widepack import primitives as _primitives  # noqa: F401  # fills the registry
from widepack.building.preview import Preview
from widepack.capture.reachable import tensors_of
from widepack.checkpoints.differences import bit_equal
from widepack.lowering.lower import Lowered
from widepack.registry.registry import REGISTRY
from widepack.runtime.executable import Executable
from widepack.spec.draws import InputSource, draw_all
from widepack.spec.input_spec import parse_inputs, type_text
from widepack_artifacts.program import Program

from ..measure.answers import Run

BATCH = "B"
AUTO, WIDE, LOOP, SEQUENTIAL = "auto", "wide", "loop", "sequential"
COMPILED = "wide on compile"
MOVES = ("shape", "dim", "once", "part")  # Strategies of ops that only move values.


@dataclass(frozen=True)
class WideContestant:
    """A wide program that can be timed.

    name: the requested strategy. used: the strategies that compute in the program. same: other requests that
    gave the same program.
    """

    name: str
    used: tuple[str, ...]
    run: Run
    same: tuple[str, ...] = ()


def members(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """Makes N members in eval mode that differ in every weight.

    A tensor that a layer fills with one number (scales, shifts, statistics) gets random values, too.
    """
    modules = []
    for i in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7 * i + 1)
            module = make().eval()
            for _, value in (*module.named_parameters(), *module.named_buffers()):
                if value.is_floating_point() and value.numel() and bool((value == value.flatten()[0]).all()):
                    nn.init.uniform_(value, 0.5, 1.5)
        modules.append(module.requires_grad_(False))
    return modules


def inputs(specs: Sequence[str], batch: int, count: int) -> list[Tensor]:
    """Draws the inputs of one call, each `[N, ...]`: other values for each member."""
    parsed, _ = parse_inputs(specs)
    sources = [InputSource(s.name, type_text(s), s.low, s.high) for s in parsed]
    drawn = [draw_all(sources, {BATCH: batch}, 1 + i) for i in range(count)]
    return [torch.stack(v) for v in zip(*drawn, strict=True)]


class InMemory:
    """Lowers the wide programs of some members.

    make: makes a member in eval mode. modules: the members. specs: the inputs, as `inputs` takes them.
    stacked_inputs: what `inputs` returned. each: every member has its own inputs; else all have those of the
    first member.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        modules: Sequence[nn.Module],
        specs: Sequence[str],
        stacked_inputs: Sequence[Tensor],
        each: bool,
        device: str = "cpu",
    ) -> None:
        model = Preview(make, specs, sizes={BATCH: stacked_inputs[0].shape[1]})
        tables = [
            {**dict(tensors_of(m)), **dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules
        ]
        self.weights: dict[str, Any] = {}
        kinds = model.kinds()
        for name in kinds:
            values = [t[name].detach() for t in tables if name in t]
            if values and any(not bit_equal(v, values[0]) for v in values):
                kinds[name] = "stacked"
            if kinds[name] == "stacked":
                self.weights[name] = torch.stack(values).to(device)
            else:  # One value for all members, or a literal of the program.
                self.weights[name] = (values[0] if values else model.captured.weights[name][1]).to(device)
        self.device = torch.device(device)
        self.members = model.of(len(modules), "each" if each else "shared", kinds)

    def lowered(self, request: str | Sequence[str]) -> Lowered:
        """Returns the wide program of a request, as `build` takes it."""
        return self.members.lower(self.members.plan(self.device.type, request))

    def bound(self, lowered: Lowered) -> Run:
        """Returns a call of a program. It returns the only output, or a list of all outputs."""
        run = Executable(lowered.program, self.weights, self.device).run
        if len(lowered.program.outputs) == 1:
            return lambda *args: run(*args)[0]
        return run

    def compiled(self) -> WideContestant:
        """Returns the wide program under `torch.compile` for the exact shapes, as baselines are compiled.

        It compiles at its first call.
        """
        lowered = self.lowered(WIDE)
        run = Executable(lowered.program, self.weights, self.device)
        call = torch.compile(run.forward, dynamic=False)
        run.call = lambda *args: call(*run.weights, *args)
        single = len(lowered.program.outputs) == 1
        return WideContestant(
            COMPILED,
            tuple(dict.fromkeys(s for s in lowered.used.values() if s not in MOVES)),
            (lambda *args: run.run(*args)[0]) if single else run.run,
        )

    def names(self) -> list[str]:
        """Returns the strategies of those ops of the program that have more than one."""
        strategies = [REGISTRY[n.op].strategies for n in self.members.program.nodes if n.op in REGISTRY]
        return list(dict.fromkeys(s for names in strategies if len(names) > 1 for s in names))

    def contestants(self, names: Sequence[str] | None = None) -> tuple[list[WideContestant], dict[str, str]]:
        """Returns the programs of all strategies, `auto` first, and the reasons why others cannot run here.

        Strategies that give the same program give one contestant. names: of strategies; None for all.
        """
        names = self.names() if names is None else names
        requests: dict[str, list[str]] = {
            AUTO: [AUTO],
            WIDE: [WIDE],
            **{n: [WIDE, n] for n in names},
            LOOP: [LOOP],
        }
        requests |= {f"{LOOP} {n}": [LOOP, n] for n in names} | {SEQUENTIAL: [WIDE, SEQUENTIAL]}
        programs: list[tuple[Program, WideContestant]] = []
        refused: dict[str, str] = {}
        for name, request in requests.items():
            try:
                self._add(programs, name, request)
            except Exception as error:  # A strategy that cannot be lowered or bound is a result.
                if name == AUTO:
                    raise
                refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [contestant for _, contestant in programs], refused

    def _add(self, programs: list[tuple[Program, WideContestant]], name: str, request: Sequence[str]) -> None:
        """Lowers a request. Adds its program, or adds its name to the contestant with the same program."""
        lowered = self.lowered(request)
        used = tuple(dict.fromkeys(s for s in lowered.used.values() if s not in MOVES)) or tuple(
            dict.fromkeys(lowered.used.values())
        )
        if len(request) == 2 and request[1] not in used and request[0] == WIDE:
            return  # The strategy applies to no node.
        number = next((i for i, (p, _) in enumerate(programs) if p == lowered.program), -1)
        if number < 0:
            programs.append((lowered.program, WideContestant(name, used, self.bound(lowered))))
            return
        same = programs[number][1]
        # `loop NAME` equals another program if the strategy has no form inside loops: it is not worth a name.
        if not name.startswith(f"{LOOP} ") or (same.name == AUTO and not same.same):
            programs[number] = programs[number][0], replace(same, same=(*same.same, name))


def double(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns copies of the members in float64."""
    return [copy.deepcopy(m).double() for m in modules]
