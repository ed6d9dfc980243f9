"""The programs of a fused module: one capture for each mode and dtype that its parts are in, lowered for each pattern of inputs when it is first called so.

| program | for | lowered | runs |
|---|---|---|---|
| eval | eval mode, no gradients asked for | as `load` does: simplified, planned | with the weight prologue, made again when a weight has changed |
| with gradients | train mode; eval mode while gradients are asked for | for_gradients.py | as one differentiable function of weights and inputs |

A buffer that the member changes (a batch norm's statistics) is an input and an output of the program, and is written back after the call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from widepack_artifacts import manifest as form
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree

from ..ir import ops
from ..verification.same_program import is_literal
from ..capture.call import Call, arrange
from ..capture.capture import Captured, capture
from ..errors import CaptureError, UsageError
from ..capture.export import calm, clone
from ..lowering.differentiable import for_gradients
from ..inference.binder import Binder
from ..lowering.lower import lower
from ..checkpoints.alignment import bit_equal
from ..simplify.canonical import plain
from ..planning.plan import Plan, for_size, scaled
from ..registry.registry import Choice
from ..planning.heuristics import plans
from ..runtime.graph_module import Executable, graph_module
from ..spec.draws import Source
from ..capture.example import default_axes
from ..simplify.member_programs import Simplified
from ..spec.state import Asked

CPU = torch.device("cpu")


def call_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Mapping[str, Any] | None) -> Call:
    """The sample as a call of the member. dynamic: {input: {axis: letter}}; by default axis 0 is "B". Raises: UsageError; CaptureError where forward
    does not take it."""
    parameters = inspect.signature(module.forward).parameters
    known = {*parameters, *kwargs}
    if unknown := sorted(set(dynamic or ()) - known):
        raise UsageError(f"dynamic names {', '.join(unknown)}, which forward does not take; it takes {', '.join(parameters)}")
    named = dynamic if dynamic is not None else default_axes(list(parameters), args, kwargs)
    return arrange(module, args, kwargs, named, {})


def changed_buffers(module: nn.Module, call: Call) -> list[str]:
    """The buffers that a module changes when it is called; it is used up."""
    before = {n: (b, b.clone(), b._version) for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    with calm(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            module(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the capture says what is wrong
            return []
    after = dict(module.named_buffers(remove_duplicate=False))
    return [n for n, (b, value, version) in before.items() if after.get(n) is not b or b._version != version or not bit_equal(b, value)]


def captured_of(make: Callable[[], nn.Module], call: Call, asked: bool, dropout: bool) -> Captured:
    """A member's program in the mode that it is in. make: fresh copies of it. asked: the user named the dims. dropout: on, whatever the mode."""
    states = [Asked(n) for n in changed_buffers(make(), call)]
    return capture(make, call, asked=asked, states=states, gradients=True, dropout=dropout)


@dataclass
class Runner:
    """A wide program of one batch class, ready to run.

    marks: which inputs are one a member. gradients: whether it can be differentiated. run: weights by source name and inputs -> outputs. checked: whether it has been
    compared with the members alone.
    """

    marks: tuple[bool, ...]
    gradients: bool
    plan: Plan
    program: Program
    run: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], list[Any]]
    checked: bool = False


class Entry(Simplified):
    """The members' forward in one mode, dtype and device: what was captured, and the wide programs that were made of it. Also what a verification asks of an entry.

    kinds: of the weights, by name. constants: tensors that are no parameters or buffers, by name, `[N, ...]` or for all. states: (number of input, of output, buffer).
    """

    entry = "forward"

    def __init__(
        self,
        captured: Captured,
        kinds: Mapping[str, Kind],
        first: Mapping[str, str],
        constants: Mapping[str, torch.Tensor],
        count: int,
        device: torch.device,
        strategies: str | Sequence[str],
    ) -> None:
        program = plain(captured.program)
        program = replace(program, weights=tuple(replace(s, source=first.get(s.source, s.source)) for s in program.weights))
        super().__init__([program], kinds.__getitem__, captured.states, captured.sizes)
        self.captured, self.kinds, self.constants = captured, dict(kinds), dict(constants)
        self.count, self.device, self.strategies = count, device, strategies
        self.carried = [(s.input, s.output, s.name) for s in captured.states]
        self.given = len(captured.inputs) - len(self.carried)  # the inputs of a call: states stand behind them
        self.binder = Binder(self._form(), count, device)
        self.random = not all(ops.pure(n.op, n.args, n.kwargs) for n in program.nodes)
        self._plans: dict[tuple[tuple[bool, ...], bool], tuple[Program, dict[str, Kind], list[Plan]]] = {}
        self._runners: dict[tuple[tuple[bool, ...], bool, tuple[int, int | None]], Runner] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        """An entry for a copy of the module: the same programs, bound to the copy's weights."""
        made = copy.copy(self)
        made._runners = {key: replace(r, run=self._run(r.program, r.gradients)) for key, r in self._runners.items()}
        return made

    @property
    def signatures(self) -> Sequence[int]:
        return [0] * self.count

    @property
    def bounds(self) -> dict[str, tuple[int, int | None]]:
        return {d: (least, most) for d, (least, most, _) in self.captured.dims.items()}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.captured.sizes

    @property
    def batch(self) -> str:
        """The dim that batch classes are made of."""
        return next((leaf.axes[a].rpartition("*")[2] for leaf in self.captured.inputs for a in sorted(leaf.axes)), "")

    @property
    def signature(self) -> Sequence[form.Parameter]:
        return self.captured.signature

    @property
    def result(self) -> Tree:
        return self.captured.result

    @property
    def sources(self) -> Sequence[Source]:
        return [Source(x.name, x.type, None, None, example=x.example) for x in self.captured.inputs]

    def _form(self) -> form.Entry:
        """What a call is held to."""
        c = self.captured
        return form.Entry(
            inputs=tuple(form.Input(leaf.name, leaf.type) for leaf in c.inputs[: self.given]),
            signature=list(c.signature),
            outputs=(),
            result=c.result,
            dims={d: form.Dim(least, most, source, c.sizes[d]) for d, (least, most, source) in c.dims.items()},
            guards=tuple(form.Guard(g.expr, g.source) for g in c.guards),
            fixed=list(c.fixed),
            member=[],
            signatures=[],
            wide=(),
        )

    def settle(self, needless: Collection[int], at_one: Mapping[str, str]) -> None:
        """Note what a member was asked. needless: the numbers of the conditions that are not its own. at_one: the dims where its program does not hold at 1, with why."""
        c = self.captured
        dims = dict(c.dims)
        for letter, why in at_one.items():
            _, most, line = dims[letter]
            dims[letter] = (
                2,
                most,
                f"at {letter} = 1 the program is not known to hold: {why}" + (f"; {letter} <= {most} is from {line}" if line else ""),
            )
        self.captured = replace(c, dims=dims, guards=tuple(g for k, g in enumerate(c.guards) if k not in needless))
        self.binder = Binder(self._form(), self.count, self.device)

    def runner(self, marks: Sequence[bool], sizes: Mapping[str, int], gradients: bool) -> Runner:
        """What runs a call. marks: which inputs are one a member. gradients: by a program that can be differentiated. Raises: LoweringError."""
        key = (tuple(marks), gradients)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        program, slots, planned = self._plans[key]
        plan = for_size(planned, scaled(sizes, self.batch, self.sizes), lambda p: p)
        if (at := (*key, plan.batch)) not in self._runners:
            if gradients:
                wide = for_gradients(program, self.count, slots, plan, self.sizes, self.shapes[0])
            else:
                wide = lower([program], self.signatures, slots, plan, self.sizes, self.shapes[0]).program
            self._runners[at] = Runner(*key, plan, wide, self._run(wide, gradients))
        return self._runners[at]

    def _planned(self, marks: tuple[bool, ...], gradients: bool) -> tuple[Program, dict[str, Kind], list[Plan]]:
        """The member program for a pattern of inputs, the kinds of its weights and inputs, and a plan for each batch class."""
        pattern = "shared" if not any(marks) else "each" if all(marks) else "mixed:" + "".join("e" if m else "s" for m in marks)
        own = dict(zip((s.name for s in self.programs[0].inputs), [*marks, *(True for _ in self.carried)]))
        slots: dict[str, Kind] = {
            **{s.name: self.kinds[s.source] for s in self.programs[0].weights},
            **{n: "stacked" if mark else "shared" for n, mark in own.items()},
        }
        (program,) = self.programs if gradients else self.folded(slots)
        asked = replace(Choice.parse(self.strategies), plain=gradients)  # packed weights are for those that are fixed
        return program, slots, plans(program, slots, self.count, self.sizes, self.batch, self.device.type, pattern, asked)

    def _run(self, program: Program, gradients: bool) -> Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], list[Any]]:
        return Differentiable(program, self.device) if gradients else _Bound(program, self.device)

    def on_cpu(self) -> Entry:
        """The same entry on the CPU."""
        if self.device == CPU:
            return self
        firsts = {s.source: s.source for s in self.programs[0].weights}
        return Entry(self.captured, self.kinds, firsts, {n: v.cpu() for n, v in self.constants.items()}, self.count, CPU, self.strategies)

    def forget(self) -> None:
        """Let go of what is made of weights."""
        self._runners = {key: r if r.gradients else replace(r, run=self._run(r.program, False)) for key, r in self._runners.items()}


class Differentiable:
    """A program as one function of weights and inputs, that autograd goes through."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.sources = [s.source for s in program.weights]
        self.forward = graph_module(program, device).forward

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        return list(self.forward(*(weights[s] for s in self.sources), *inputs))


_STEPS = "_widepack_steps"


def _count_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count the steps of an optimizer's fused kernels: they write into parameters and leave their versions as they were."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                setattr(p, _STEPS, getattr(p, _STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_steps)


class _Bound:
    """A program over the weights that it was bound to, bound again when one of them has changed."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self.sources = [s.source for s in program.weights]
        self.seen: list[tuple[int, int, int, int]] | None = None
        self.executable: Executable | None = None

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        own = [weights[s] for s in self.sources]
        now = [(id(w), w.data_ptr(), w._version, getattr(w, _STEPS, 0)) for w in own]
        if self.executable is None or now != self.seen:
            held = {s: w.detach() for s, w in zip(self.sources, own)}
            self.executable, self.seen = Executable(self.program, held, self.device), now
        return self.executable.run_for_autograd(*inputs)


def constants_of(captured: Captured, rows: Mapping[str, str], members: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, tuple[Kind, torch.Tensor]]:
    """The tensors that a program reads beside parameters and buffers: literals, and what each member holds in its plain attributes.

    rows: the names that are parameters or buffers. members: each one's own tensors by path. Raises: CaptureError.
    """
    found: dict[str, tuple[Kind, torch.Tensor]] = {}
    for name, (_, value) in captured.weights.items():
        if name in rows:
            continue
        own = [m.get(name, value if is_literal(name) else None) for m in members]
        if any(v is None or v.shape != value.shape or v.dtype != value.dtype for v in own):
            raise CaptureError(
                f"the tensor {name} is a plain attribute of member 0, and not in every member, or of another shape or dtype; make it a buffer with register_buffer"
            )
        same = all(bit_equal(v.detach().cpu(), own[0].detach().cpu()) for v in own)  # type: ignore[union-attr]
        found[name] = ("shared", own[0].detach()) if same else ("stacked", torch.stack([v.detach() for v in own]))  # type: ignore[union-attr]
    return found
