"""Holds the programs of a fused module for one mode, dtype and device: one capture, lowered once for each
pattern of inputs.

| program | for | lowered | runs |
|---|---|---|---|
| eval | eval mode without gradients | as `load` does: simplified, planned | with the weight prologue |
| with gradients | training, gradients, autocast, torch.func | lowering/differentiable.py | differentiably |

A buffer that the member changes (a batch norm's statistics) is an input and an output of the program. The
fused module writes it back after the call.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import register_optimizer_step_post_hook

from widepack_artifacts.entry import Entry, Input
from widepack_artifacts.program import Kind, Program

from ..capture.capture import Captured
from ..checkpoints.differences import bit_equal
from ..errors import CaptureError
from ..inference.binder import Binder
from ..ir import ops
from ..ir.edit import with_reshapes
from ..ir.random_ops import uses_random_ops
from ..lowering.differentiable import for_gradients
from ..lowering.pattern_programs import PatternPrograms
from ..planning.channels_last_plans import with_channels_last, without_channels_last
from ..planning.plan import Plan
from ..planning.request import StrategyRequest
from ..planning.training_plans import with_products
from ..runtime.executable import Executable
from ..runtime.graph_module import graph_module
from ..simplify.canonical import plain
from ..spec.draws import InputSource
from ..system.autocast import plain_modes
from ..verification.entries import CapturedEntry
from ..verification.same_program import is_literal
from .gradients import error_above, gradients_of, largest_of, relative_bound, weighted_sum
from .skeleton import ModuleSkeleton
from .torch_module import write_count

CPU = torch.device("cpu")
_Key = tuple[tuple[bool, ...], bool, bool]
"""For each input whether it has a member axis; whether there are gradients; and transforms."""
ProgramRun = Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], list[Any]]
"""Takes the weights by source name and the inputs, and returns the outputs."""


@dataclass
class Runner:
    """A wide program of one batch class, ready to run.

    Attributes:
        stacked: For each input, whether it has a member axis.
        gradients: Whether the program is differentiable.
        plan: The plan of the program.
        program: The wide program.
        run: Takes the weights by source name and the inputs, and returns the outputs.
        checked: Whether the program was compared with the members.
    """

    stacked: tuple[bool, ...]
    gradients: bool
    plan: Plan
    program: Program
    run: ProgramRun
    checked: bool = False


class FusedEntry(CapturedEntry):
    """The members' forward in one mode, dtype and device: the capture, and the wide programs made of it.

    It has what a verification needs of an entry.

    Args:
        captured: The capture of member 0.
        kinds: The kind of each weight, by name.
        first_names: For each name of a weight, the first name of the same tensor.
        constants: Tensors that are neither parameters nor buffers, by name: `[N, ...]`, or one for all
        members.
        count: The number of members, N.
        device: The device of the fused module.
        strategies: The strategies that the user named.

    Attributes:
        capture_compared: Whether the capture was compared with these members' modules, when there were more
        members.
    """

    entry = "forward"

    def __init__(
        self,
        captured: Captured,
        kinds: Mapping[str, Kind],
        first_names: Mapping[str, str],
        constants: Mapping[str, torch.Tensor],
        count: int,
        device: torch.device,
        strategies: str | Sequence[str],
    ) -> None:
        program = plain(captured.program)
        weights = tuple(replace(s, source=first_names.get(s.source, s.source)) for s in program.weights)
        program = replace(program, weights=weights)
        super().__init__([program], kinds.__getitem__, captured.states, captured.sizes, [0] * count)
        self.set_captured(captured)
        self.sources = [InputSource(x.name, x.type, None, None, example=x.example) for x in captured.inputs]
        self.kinds, self.constants = dict(kinds), dict(constants)
        self.first_names, self.capture_compared = dict(first_names), False
        self.device, self.strategies = device, strategies
        self.carried = [(s.input, s.output, s.name) for s in captured.states]
        self.input_count = len(captured.inputs) - len(self.carried)  # the states are the last inputs
        self.binder = Binder(self._manifest_entry(), count, device, model="fused")
        self.random = not all(ops.pure(n.op, n.args, n.kwargs) for n in program.nodes)
        self.compiled: Mapping[str, Any] | None = None  # options of torch.compile for programs with gradients
        self._read: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._plans: dict[_Key, tuple[PatternPrograms, list[Plan]]] = {}
        self._runners: dict[tuple[_Key, tuple[int, int | None], bool], Runner] = {}

    def reads_as_captured(self, tensor_of: Callable[[str], torch.Tensor]) -> bool:
        """Whether the weights whose values the members' code reads are as at the first call of this
        method.
        """
        read = {name for x in self.captured.literals for name in x.weights}
        names = {self.first_names[name] for name in read if name in self.first_names}
        for name in names:
            value = tensor_of(name)
            known, version, copy_ = self._read.get(name, (value, -1, value.detach().clone()))
            if known is not value or version != write_count(value):
                if not bit_equal(value, copy_):  # NaN equals NaN
                    return False
                self._read[name] = value, write_count(value), copy_
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedEntry:
        """Returns an entry for a copy of the module: the same programs, which bind the copy's weights."""
        other = copy.copy(self)
        other.forget(every=True)
        return other

    @property
    def runners(self) -> list[Runner]:
        """The wide programs that were made so far."""
        return list(self._runners.values())

    def _manifest_entry(self) -> Entry:
        """Returns what calls are checked against, in the form of a manifest's entry."""
        inputs = tuple(Input(leaf.name, leaf.type) for leaf in self.captured.inputs[: self.input_count])
        return self.row(inputs=inputs, outputs=(), member=[], signatures=[], wide=())

    def restrict(self, needless: Collection[int], not_at_one: Mapping[str, str]) -> None:
        """Corrects the conditions of the capture by what a member did at small sizes.

        Args:
            needless, not_at_one: As `corrected` takes them.
        """
        self.set_captured(self.corrected(needless, not_at_one))
        self.binder = Binder(self._manifest_entry(), self.count, self.device, model="fused")

    def runner(
        self,
        stacked: Sequence[bool],
        sizes: Mapping[str, int],
        gradients: bool,
        transforms: bool = False,
    ) -> Runner:
        """Returns what runs a call.

        Args:
            stacked: For each input, whether it has a member axis.
            sizes: The size of each dim in the call.
            gradients: Whether the program must be differentiable.
            transforms: Whether a differentiable program must run inside transforms of `torch.func`, in
                forward mode, or under autocast.

        Raises:
            LoweringError: No such program can be made.
        """
        key = (tuple(stacked), gradients, gradients and transforms)
        if key not in self._plans:
            with plain_modes():
                self._plans[key] = self._planned(*key)
        of, class_plans = self._plans[key]
        of_class = of.serving(class_plans, sizes)
        one = gradients and sizes.get(self.batch) == 1
        plan = without_channels_last(of_class) if one else of_class
        runner_key = (key, plan.batch, plan is of_class)
        if runner_key not in self._runners:
            with plain_modes():
                if gradients:
                    given = of.program, of.count, of.slots, plan, of.sizes, of.shapes[0]
                    wide = for_gradients(*given, transforms=key[2])
                else:
                    wide = of.lower(plan).program
            self._runners[runner_key] = Runner(*key[:2], plan, wide, self._run(wide, gradients))
        return self._runners[runner_key]

    def _planned(
        self, stacked: tuple[bool, ...], gradients: bool, transforms: bool
    ) -> tuple[PatternPrograms, list[Plan]]:
        """Returns the member program for a pattern of inputs, and a plan for each batch class."""
        if not any(stacked):
            pattern = "shared"
        elif all(stacked):
            pattern = "each"
        else:
            pattern = "mixed:" + "".join("e" if s else "s" for s in stacked)
        inputs = {i for i, own in enumerate(stacked) if own} | {s.input for s in self.states}
        slots = self.slots_for(inputs)
        programs = self.programs if gradients else self.folded(slots)
        of = PatternPrograms(programs, self.signatures, slots, self.sizes, self.batch, pattern, self.shapes)
        # strategies with packed weights are only for weights that do not change
        request = replace(StrategyRequest.parse(self.strategies), plain=gradients, training=gradients)
        class_plans = of.plans(self.device.type, request)
        if gradients and not transforms and self.device.type == "cpu":
            if self.compiled is None:  # torch's compiler chooses the memory order itself
                of = replace(of, programs=[with_reshapes(of.program)])  # of values in channels-last memory
                class_plans = with_channels_last(class_plans, of.program, slots, self.sizes, self.batch)
            class_plans = with_products(class_plans, of.program, slots, self.sizes, self.batch)
        return of, class_plans

    def _run(self, program: Program, gradients: bool) -> ProgramRun:
        if gradients:
            return DifferentiableProgram(program, self.device, self.compiled)
        return RebindingProgram(program, self.device)

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compiles programs with gradients, which are planned again. options: those of `torch.compile`."""
        self.compiled = options
        self.capture_compared = self.capture_compared or any(r.checked for r in self.runners)
        self._plans = {key: planned for key, planned in self._plans.items() if not key[1]}
        self._runners = {key: runner for key, runner in self._runners.items() if not runner.gradients}

    def on_cpu(self) -> FusedEntry:
        """Returns the same entry on the CPU."""
        if self.device == CPU:
            return self
        constants = {n: v.cpu() for n, v in self.constants.items()}
        return FusedEntry(
            self.captured, self.kinds, self.first_names, constants, self.count, CPU, self.strategies
        )

    def with_members(self, members: Sequence[int]) -> FusedEntry:
        """Returns the entry of some of the members. The capture and what was computed from it stay.

        Args:
            members: The numbers of the members.
        """
        other, rows = copy.copy(self), list(members)
        other.signatures = (0,) * len(rows)
        other.constants = {n: v[rows] if self.kinds[n] == "stacked" else v for n, v in self.constants.items()}
        other.binder = Binder(self._manifest_entry(), other.count, self.device, model="fused")
        other.capture_compared = self.capture_compared or any(r.checked for r in self.runners)
        other.clear()
        return other

    def clear(self) -> None:
        """Drops the plans and the wide programs, which are for another number of members."""
        self._plans, self._runners = {}, {}

    def forget(self, every: bool = False) -> None:
        """Drops what was computed from weights. every: programs with gradients are made anew, too."""
        self._runners = {
            key: replace(r, run=self._run(r.program, r.gradients)) if every or not r.gradients else r
            for key, r in self._runners.items()
        }


def constants_of(
    captured: Captured, weights: Mapping[str, str], skeletons: Sequence[ModuleSkeleton]
) -> dict[str, tuple[Kind, torch.Tensor]]:
    """Returns the tensors that a program reads and that are neither parameters nor buffers, with their kinds.

    They are literals of the code, and tensors in plain attributes of the members.

    Args:
        captured: The capture of member 0.
        weights: The names of parameters and buffers.
        skeletons: The members without their weights.

    Raises:
        CaptureError: A member has no such tensor, or one of another shape or dtype.
    """
    constants: dict[str, tuple[Kind, torch.Tensor]] = {}
    members = [s.plain_tensors() for s in skeletons]
    for name, (_, value) in captured.weights.items():
        if name in weights:
            continue
        own: list[torch.Tensor] = []
        for member in members:
            tensor = member.get(name, value if is_literal(name) else None)
            if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
                raise CaptureError(
                    f"the tensor {name} is a plain attribute of member 0, but another member has none, or "
                    "one of another shape or dtype; make it a buffer with register_buffer"
                )
            own.append(tensor.detach())
        same = all(bit_equal(v.cpu(), own[0].cpu()) for v in own)
        constants[name] = ("shared", own[0]) if same else ("stacked", torch.stack(own))
    return constants


def refuse_weights(captured: Captured, own: Collection[str], i: int, skeleton: ModuleSkeleton) -> None:
    """Refuses a member that reads a part of a weight as a constant, or a weight of another member.

    Args:
        captured: The capture of the member.
        own: The names of the member's parameters and buffers.
        i: The number of the member.
        skeleton: The member without its weights.

    Raises:
        CaptureError: It does.
    """
    views = skeleton.views()
    for name in captured.weights:
        if name in own:
            continue
        if name in views:
            raise CaptureError(
                f"forward reads {name}, a plain tensor that is a view of {views[name]}: training of the "
                f"member changes both. Take the view in forward, from {views[name]} itself"
            )
        if name in skeleton.foreign:
            raise CaptureError(
                f"member {i} reads {skeleton.foreign[name]}, as {name}, which is no weight of its own. "
                "Members of a fused module have weights of their own: give each member its own part, or "
                "register one part in all members, which then share it"
            )


# ---------------------------------------------------------------- programs on live weights


def difference(compiled: Callable[..., Any], plain: Callable[..., Any], given: Sequence[Any]) -> str:
    """Returns how the outputs or gradients of a compiled program differ; an empty text if they do not.

    Args:
        compiled: The compiled function of weights and inputs.
        plain: The same function without compilation.
        given: The weights and inputs of a call.
    """
    found, expected = (_answers_and_gradients(run, given) for run in (compiled, plain))
    largest = largest_of(expected)
    for a, b in zip(found, expected):
        if (a is None) != (b is None):
            return "a gradient is missing"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result is {list(a.shape)} {a.dtype} in place of {list(b.shape)} {b.dtype}"
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "whole numbers differ"
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return "NaN or infinity in other places"
        if (above := error_above(a, b, relative_bound([b]), largest)) is not None:
            return f"a result is off by {above[0]:.2e} at a size of {above[1]:.2e}"
    return ""


def _answers_and_gradients(run: Callable[..., Any], given: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns the outputs, then the gradients of a weighted sum of them by each value that needs one."""
    copies = pytree.tree_map(_copied, list(given))
    tensors = [v for v in pytree.tree_leaves(copies) if isinstance(v, torch.Tensor) and v.requires_grad]
    needed = {str(k): v for k, v in enumerate(tensors)}
    with torch.enable_grad():
        outputs = [y for y in pytree.tree_leaves(run(*copies)) if isinstance(y, torch.Tensor)]
        gradients = gradients_of(weighted_sum(outputs, 0), needed, list(needed))
    return [*(y.detach() for y in outputs), *gradients.values()]


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor that is a parameter if it is one: torch compiles others once more."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_(value.requires_grad)


_FUSED_STEPS = "_widepack_steps"  # an attribute of parameters


def _count_fused_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts steps of an optimizer's fused kernels, because torch does not count their writes."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                setattr(p, _FUSED_STEPS, getattr(p, _FUSED_STEPS, 0) + 1)


register_optimizer_step_post_hook(_count_fused_steps)


class DifferentiableProgram:
    """Runs a program as one function of weights and inputs that autograd can differentiate.

    compiled: options of `torch.compile`, which then compiles the function. Default: None, not compiled. A
    compiled function is compared with the other at the first call of each size.
    """

    def __init__(
        self, program: Program, device: torch.device, compiled: Mapping[str, Any] | None = None
    ) -> None:
        self.sources = [s.source for s in program.weights]
        self.plain: Callable[..., Any] = graph_module(program, device, checks="none").forward
        self.compiled: Callable[..., Any] | None = None
        self._right: set[Any] = set()  # the sizes at which both functions were compared
        if compiled is not None:
            self.compiled = torch.compile(self.plain, **compiled)
            self._random = uses_random_ops(program)

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        given = [*(weights[s] for s in self.sources), *inputs]
        if self.compiled is None:
            return list(self.plain(*given))
        sizes = tuple(x.shape for x in inputs)
        if sizes not in self._right and not self._random:
            why = difference(self.compiled, self.plain, given)
            if why:
                warnings.warn(
                    f"torch.compile gives other answers than the program without compilation: {why}. "
                    "The program runs without compilation",
                    stacklevel=2,
                )
                self.compiled = None
                return list(self.plain(*given))
        self._right.add(sizes)
        return list(self.compiled(*given))


class RebindingProgram:
    """Runs a program over bound weights, and binds them again when one of them has changed."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self.sources = [s.source for s in program.weights]
        self.bound: list[tuple[int, int, int, int]] | None = (
            None  # the versions of the weights that are bound
        )
        self.executable: Executable | None = None

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        own = [weights[s] for s in self.sources]
        versions = [(id(w), w.data_ptr(), write_count(w), getattr(w, _FUSED_STEPS, 0)) for w in own]
        if self.executable is None or versions != self.bound:
            values = {s: w.detach() for s, w in zip(self.sources, own)}
            self.executable, self.bound = Executable(self.program, values, self.device), versions
        return self.executable.run_for_autograd(*inputs)
