"""Previews a build without checkpoints: the member program, and for N members the kinds, the plan and the
wide program.

A preview needs what makes one member, and input specs. It assumes that weights which a checkpoint stores
differ between the members, and that everything else is equal (tables that are not saved, literals). It reads
no weights and verifies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from widepack_artifacts.program import Kind, Program

from ..capture.capture import Captured, capture
from ..capture.example import example_sizes
from ..ir.tensor_type import parse_slot
from ..lowering.lower import Lowered, lower
from ..lowering.wide_programs import filled_plan
from ..planning.heuristics import plans
from ..planning.plan import Plan, for_size, scaled
from ..planning.request import StrategyRequest
from ..simplify.canonical import plain
from ..simplify.pipeline import SimplifiedPrograms, simplified
from ..spec.entries import FORWARD
from ..spec.input_spec import batch_letter, parse_inputs
from .captures import captured_at, spec_call


class Preview:
    """A model that was captured once.

    program: the member program in plain ops. sizes: each dim's size in the example. batch: the dim that batch
    classes are made of, or "". saved: the names of the weights that a checkpoint stores. captured: the whole
    capture.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        inputs: Sequence[str],
        *,
        entry: str = FORWARD,
        sizes: Mapping[str, int] | None = None,
        fake: bool = False,
    ) -> None:
        """Captures the model.

        make: returns a fresh member. inputs: specs as `widepack build --input` takes them. sizes: of dims in
        the example. fake: members are not run: they have fake tensors, or cannot take values that are drawn.
        Raises: UsageError; CaptureError.
        """

        def make_one() -> nn.Module:
            return make().eval()

        specs, bounds = parse_inputs(inputs, entry, [entry])

        def capture_at(at: Mapping[str, int]) -> Captured:
            call = spec_call(make_one(), specs, at, entry)
            return capture(make_one, call, entry=entry, rehearse=not fake)

        self.captured = captured_at({**example_sizes(specs, bounds), **(sizes or {})}, bounds, capture_at)
        self.program = plain(self.captured.program)
        self.sizes = dict(self.captured.sizes)
        self.batch = batch_letter(parse_slot(leaf.type).dims for leaf in self.captured.inputs)
        self.saved = frozenset(make().state_dict(keep_vars=True))

    def kinds(self) -> dict[str, Kind]:
        """Returns the kind of every weight, by its name in the table."""
        return {s.source: self.kind(s.source) for s in self.program.weights}

    def kind(self, weight: str) -> Kind:
        """Returns the kind of a weight: a checkpoint's is assumed to differ between the members."""
        return "stacked" if weight in self.saved else "shared"

    def of(
        self,
        members: int,
        *,
        pattern: str = "shared",
        device: str = "cpu",
        kinds: Mapping[str, Kind] | None = None,
    ) -> PreviewMembers:
        """Returns the preview of N members. kinds: of the weights; default `self.kinds()`.

        Raises: LoweringError.
        """
        stacked = [pattern == "each"] * len(self.program.inputs)
        programs = simplified([self.program], [0] * members, kinds or self.kinds(), stacked, self.sizes)
        return PreviewMembers(programs, members, self.sizes, self.batch, pattern, device)


class PreviewMembers:
    """N members of a previewed model. simple: their simplified programs."""

    def __init__(
        self,
        simple: SimplifiedPrograms,
        count: int,
        sizes: Mapping[str, int],
        batch: str,
        pattern: str,
        device: str,
    ) -> None:
        self.simple, self.count, self.sizes, self.batch = simple, count, dict(sizes), batch
        self.pattern, self.device = pattern, device

    @property
    def program(self) -> Program:
        """The simplified member program."""
        return self.simple.programs[0]

    def plan(self, strategies: str | Sequence[str] = "auto", size: int | None = None) -> Plan:
        """Returns the plan by rules of thumb.

        strategies: as `widepack build --strategy` takes them. size: of the batch; default the
        example's.
        """
        by_class = plans(
            self.program,
            self.simple.slots,
            self.count,
            self.sizes,
            self.batch,
            self.device,
            self.pattern,
            StrategyRequest.parse(strategies),
        )
        at = {**self.sizes, self.batch: size} if size is not None and self.batch else self.sizes
        return for_size(by_class, scaled(at, self.batch, self.sizes), lambda p: p)

    def lowered(self, plan: Plan) -> Lowered:
        """Returns the wide program of a plan. Raises: LoweringError."""
        return lower(self.simple.programs, self.simple.signatures, self.simple.slots, plan, self.sizes)

    def filled(self, plan: Plan, lowered: Lowered) -> Plan:
        """Returns the plan with the strategy of every node and its reason."""
        return filled_plan(plan, lowered, self.program)
