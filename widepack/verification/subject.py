"""Describes what a verification runs: the members, their programs and modules, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from widepack_artifacts import guards as guard_forms
from widepack_artifacts import tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Parameter
from widepack_artifacts.program import Program

from ..capture.named_fields import Make
from ..ir.cast import raise_value, raised
from ..ir.fake_values import CPU
from ..runtime.graph_module import Function, graph_module
from ..spec.draws import NOISES, InputSource, draw, draw_all
from ..spec.entries import FORWARD
from ..spec.state import CarriedState
from .entries import VerifiedEntry
from .same_program import SameProgram
from .tolerance import ErrorStats

Weights = Mapping[str, Any]
ACCEPTED = 3  # draws that a member must answer to
LATE_BYTES = 16 * 2**20  # of a member's weights: larger ones are raised to float64 layer by layer


@dataclass(frozen=True)
class CallCase:
    """Identifies a call among those of a pattern. Calls of two patterns with equal cases have equal sizes.

    Attributes:
        sizes: The named dims that the call is about, with their sizes; empty if the program has none.
        step: 1 for a first call, 2 for the call that continues with its states.
        repeat: 0, or the number of the call among further ones of the same sizes.
        name: What the call is, if sizes do not say it: "the example", "the probe".
    """

    sizes: tuple[tuple[str, int], ...] = ()
    step: int = 1
    repeat: int = 0
    name: str = ""

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int], *, repeat: int = 0) -> CallCase:
        """Returns the case of a first call at these sizes."""
        return cls(tuple(sizes.items()), repeat=repeat)

    @property
    def label(self) -> str:
        """The text for the record and for messages: `B=2`, `B=2, step 2`, `size=fixed`."""
        text = self.name or ", ".join(f"{d}={size}" for d, size in self.sizes) or "size=fixed"
        step = f", step {self.step}" if self.step > 1 else ""
        return text + step + (f", again {self.repeat}" if self.repeat else "")


@dataclass(frozen=True)
class VerifiedCall:
    """One call of a verification.

    Attributes: case: Which call it is. pattern: `shared` or `each`. inputs: For each member the tensors of
        the call, leaf by leaf. user: Whether the user's own module runs this call too. carried: The numbers
        of the inputs that are states. They have one value for each member in every pattern. after: The number
        of the call whose new states this one starts with; None for a first call.
    """

    case: CallCase
    pattern: str
    inputs: list[list[torch.Tensor]]
    user: bool
    carried: frozenset[int] = frozenset()
    after: int | None = None

    @property
    def label(self) -> str:
        """The call's name in the record and in messages."""
        return self.case.label

    def stacked(self, members: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Returns the inputs as the wide program takes them. members: their numbers; default all."""
        one = self.pattern == "shared"
        chosen = self.inputs if members is None else [self.inputs[i] for i in members]
        return [v[0] if one and i not in self.carried else torch.stack(v) for i, v in enumerate(zip(*chosen))]


@dataclass
class MemberAnswers:
    """The answers of one call: for each member, then for each output, its own answer and its float64
    answer.
    """

    own: list[list[torch.Tensor]] = field(default_factory=list)
    truth: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """What a verification is about: the members of one entry, and how to run them.

    Attributes, the members and their programs:
        members: The members' names.
        programs: The member programs.
        signatures: For each member the number of its program.
        method: The method of the user's module that the programs were captured from.
        states: The states that the caller carries.
        rests: Whether the programs and the modules run without their random draws.

    Attributes, the inputs and outputs of a call:
        sources: How each input is drawn.
        outputs: The names of the outputs.
        numbers: What the member returns beside tensors, in order.
        sizes: The example's size of each named dim.
        batch: The letter of the batch dim; "" if the entry has none.

    Attributes, functions (i is a member's number):
        weights(i): Returns the weights of member i by source name.
        module(i): Builds the user's own module with the weights of member i. None: no module is available.
        bind(leaves): Returns the positional and keyword arguments of the module.
        fits(sizes): Returns whether sizes are within all bounds and satisfy all guards.
        initial(i, state): Returns the value that a state begins with in member i; None for an input.
        readahead(members): Starts to read the weights of these members from the disk, before they are used.

        before_call(inputs): Checks what a member takes on one member's inputs, before it runs. It raises
            where the program is of an untrusted file and takes too much.

    Attributes, bounds:
        float64_ulps: The least bound of comparison (a) for outputs in float64, in ulp of their rms. Default:
            none, as in builds.

    Attributes, shared work:
        same_program: Compares what the members' modules do; None if they are not compared.
        functions: The programs as functions, made once. `run` fills it.
    """

    members: tuple[str, ...]
    programs: Sequence[Program]
    signatures: Sequence[int]
    sources: Sequence[InputSource]
    outputs: Sequence[str]
    sizes: Mapping[str, int]
    batch: str
    weights: Callable[[int], Weights]
    module: Callable[[int], nn.Module] | None
    bind: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    fits: Callable[[Mapping[str, int]], bool]
    numbers: Sequence[Any] = ()
    method: str = FORWARD
    states: Sequence[CarriedState] = ()
    rests: bool = False
    initial: Callable[[int, CarriedState], torch.Tensor | None] = lambda i, state: None
    float64_ulps: int = 0
    same_program: SameProgram | None = None
    readahead: Callable[[Sequence[int]], None] = lambda members: None
    before_call: Callable[[Sequence[torch.Tensor]], None] = lambda inputs: None
    functions: dict[tuple[int, bool, bool], Function] = field(default_factory=dict)

    @property
    def carried(self) -> frozenset[int]:
        """The numbers of the inputs that are states."""
        return frozenset(s.input for s in self.states)

    def program(self, i: int) -> Program:
        """Returns the program of member i."""
        return self.programs[self.signatures[i]]

    def arguments(self, i: int) -> list[Any]:
        """Returns the weights of member i in the order in which its program takes them."""
        weights = self.weights(i)
        return [weights[s.source] for s in self.program(i).weights]

    def run(self, i: int, *, exact: bool = False, late: bool = False) -> Function:
        """Returns the program of member i as a function of its weights, then its inputs. It is made once.

        exact: in float64, of weights that are float64. late: in float64, of weights that it raises one by
        one.
        """
        key = self.signatures[i], exact, late
        if key not in self.functions:
            program = self.program(i)
            self.functions[key] = graph_module(
                raised(program, late) if exact or late else program, CPU
            ).forward
        return self.functions[key]

    def answers(self, i: int, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the outputs of member i for its inputs of a call."""
        with torch.inference_mode():
            return list(self.run(i)(*self.arguments(i), *inputs))

    def float64_function(
        self, i: int, weights: Sequence[Any] | None = None
    ) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
        """Returns what computes the outputs of member i in float64 from its inputs.

        weights: in the order of its program. Default: its own.
        """
        weights = self.arguments(i) if weights is None else weights
        # To raise all weights at once is faster, but takes twice a member's memory.
        late = sum(w.nbytes for w in weights) > LATE_BYTES
        doubles = weights if late else [raise_value(w) for w in weights]

        def answers(inputs: Sequence[torch.Tensor]) -> list[Any]:
            run = self.run(i, exact=not late, late=late)
            with torch.inference_mode():
                return list(run(*doubles, *map(raise_value, inputs)))

        return answers

    def first_like(self, i: int) -> int:
        """Returns the member from which the program of member i was captured: the first with its shapes."""
        return list(self.signatures).index(self.signatures[i])

    def explain(self, i: int) -> str:
        """Returns how member i's module differs from the captured one; "" if nothing is known."""
        return self.same_program.explain(i) if self.same_program is not None else ""

    def with_states(self, inputs: Sequence[torch.Tensor], before: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the inputs of a call, with the states that the call before it returned.

        before: the outputs of that call; empty for a first call.
        """
        values = list(inputs)
        for s in self.states if before else ():
            values[s.input] = before[s.output]
        return values

    def draw(
        self, sizes: Mapping[str, int], seed: int, pattern: str, members: int
    ) -> list[list[torch.Tensor]]:
        """Returns the inputs of a call for each member.

        In the pattern `shared` all members get equal inputs, except for states. A state that is a buffer
        starts with the member's value. A state that is an input is drawn for each member.
        """
        inputs = [
            draw_all(self.sources, sizes, seed + (i if pattern == "each" else 0)) for i in range(members)
        ]
        for state in self.states:
            for i, leaves in enumerate(inputs):
                initial = self.initial(i, state)
                leaves[state.input] = (
                    draw(self.sources[state.input], sizes, (seed + i) * 1009 + state.input)
                    if initial is None
                    else initial.clone()
                )
        return inputs


def with_accepted_inputs(subject: Subject) -> Subject:
    """Returns the subject with inputs that member 0 answers to.

    Noise may leave the domain of a member, for example of a loss over probabilities. The sources take the
    first of `NOISES` with which member 0 answers at the example's sizes; without any, they do not change.
    """
    tried = replace(subject, functions={})  # the caller may replace the programs of the subject
    for noise in NOISES:
        sources = [replace(s, noise=noise) for s in subject.sources]
        try:
            with torch.random.fork_rng(devices=[]):
                for seed in range(1, 1 + ACCEPTED):
                    tried.answers(0, draw_all(sources, subject.sizes, seed))
        except (RuntimeError, ValueError, IndexError):
            continue
        return replace(subject, sources=sources) if noise != NOISES[0] else subject
    return subject


@dataclass
class AnsweredCalls:
    """Calls of members, and their answers.

    Attributes:
        subject: The members.
        calls: The calls.
        found: For each call the members' own and float64 answers.
        stats: For each output the members' own errors.
        captured: For each output the errors that comparison (a) measured.
        float64: Whether the reference is float64. If not, the members' own answers are the reference.
    """

    subject: Subject
    calls: Sequence[VerifiedCall]
    found: list[MemberAnswers]
    stats: list[ErrorStats]
    captured: list[ErrorStats]
    float64: bool = True

    @classmethod
    def of(cls, subject: Subject, calls: Sequence[VerifiedCall]) -> AnsweredCalls:
        """Returns calls that no member has answered."""
        stats, captured = ([ErrorStats(name) for name in subject.outputs] for _ in range(2))
        return cls(subject, calls, [MemberAnswers() for _ in calls], stats, captured)

    def earlier(self, call: VerifiedCall, i: int) -> MemberAnswers | None:
        """Returns the answers of an earlier call with the same inputs of member i; None if there is none.

        Calls with states are never the same: each pattern has its own chain of states.
        """
        for other, answer in zip(self.calls, self.found):
            if other is call or call.carried:
                return None
            if other.case == call.case and all(
                torch.equal(a, b) for a, b in zip(other.inputs[i], call.inputs[i])
            ):
                return answer
        return None


def subject_of(
    entry: VerifiedEntry,
    members: Sequence[str],
    files: weight_files.Weights,
    *,
    module: Callable[[int], nn.Module] | None = None,
    before: Callable[[Subject], None] = lambda subject: None,
    makes: Mapping[str, Make] = MappingProxyType({}),
) -> Subject:
    """Returns the subject of the comparisons of an entry.

    members: their names. files: their weights. module: as `Subject` has it. before: is called
    before a member's program runs for the first time. makes: what makes the objects of a call that are of a
    class with named fields; without it, modules get dicts.
    """

    def initial(i: int, state: CarriedState) -> torch.Tensor | None:
        weight = entry.initial(state)
        return entry.weight(weight, i, files) if weight else None

    made = Subject(
        members=tuple(members),
        programs=entry.programs,
        signatures=entry.signatures,
        sources=entry.sources,
        outputs=entry.output_names,
        sizes=entry.sizes,
        batch=entry.batch,
        weights=lambda i: entry.weights_of(i, files),
        module=module,
        method=entry.entry,
        states=entry.states,
        initial=initial,
        bind=lambda leaves: caller_arguments(entry.signature, leaves, entry.buffer_inputs, makes),
        numbers=tree.numbers(entry.returned),
        fits=fitting(entry.bounds, entry.conditions),
    )
    before(made)
    return with_accepted_inputs(made)


def caller_arguments(
    signature: Sequence[Parameter],
    leaves: Sequence[torch.Tensor],
    carried: Collection[int] = (),
    makes: Mapping[str, Make] = MappingProxyType({}),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments that a caller of the module writes for these leaves.

    signature: the parameters of the method. carried: the numbers of the leaves that are buffers of the
    module; a parameter of these alone is left out. makes: as `subject_of` takes it.
    """

    def made(name: str, rows: list[tuple[str, Any]]) -> Any:
        return makes[name]([v for _, v in rows]) if name in makes else dict(rows)

    arguments = []
    for parameter in signature:
        numbers = set(tree.leaves(parameter.tree))
        if not numbers or not numbers <= set(carried):
            arguments.append(parameter)
    # A wrapper may pass a trailing default by name, so an argument that the caller left out stays out.
    while arguments and arguments[-1].default and "const" in arguments[-1].tree:
        arguments.pop()
    values = [(p.name, p.kind, tree.build(p.tree, list(leaves), made)) for p in arguments]
    return tuple(v for _, kind, v in values if kind == "positional"), {
        name: v for name, kind, v in values if kind == "keyword"
    }


def fitting(
    dims: Mapping[str, tuple[int, int | None]], guards: Sequence[Any]
) -> Callable[[Mapping[str, int]], bool]:
    """Returns a function that tells whether sizes are within the dims' bounds and satisfy the guards."""

    def fits(sizes: Mapping[str, int]) -> bool:
        inside = all(
            least <= sizes[d] and (most is None or sizes[d] <= most) for d, (least, most) in dims.items()
        )
        return inside and all(guard_forms.holds(g, sizes) for g in guards)

    return fits
