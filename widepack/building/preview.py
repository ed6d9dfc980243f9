"""What a build would make of a model, from what makes one member and the inputs alone: the member program, and for N members kinds, plan and wide program.

Whatever a checkpoint would hold is taken to differ by member; all else (tables that are not saved, literals) to be the same. Nothing is verified, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from widepack_artifacts.program import Kind, Program

from ..capture.call import Call, arrange
from ..capture.capture import Captured, FixedSize, capture
from ..spec.entries import FORWARD
from ..errors import CaptureError
from ..lowering.lower import Lowered, lower
from ..simplify.canonical import plain
from ..planning.plan import Plan, for_size, scaled
from ..registry.registry import Choice
from ..lowering.relower import Simple, simplified
from ..planning.heuristics import plans
from ..capture.example import example_sizes, from_specs
from ..spec.input_spec import Bounds, InputSpec, parse_inputs
from ..lowering.wide_programs import filled_plan


class Foreseen:
    """A model, captured once.

    program: the member program in plain ops. sizes: each dim's in the example. batch: the dim that batch classes are made of, or "". saved: names of the weights that a
    checkpoint holds. captured: all of the capture.
    """

    def __init__(self, make: Callable[[], nn.Module], inputs: Sequence[str], *, entry: str = FORWARD, sizes: Mapping[str, int] | None = None) -> None:
        """make: gives a fresh member. inputs: specs as `widepack build --input` takes them. sizes: of dims, in the example. Raises: UsageError; CaptureError."""

        def make_one() -> nn.Module:
            return make().eval()

        specs, bounds = parse_inputs(inputs, entry, [entry])
        self.captured = _captured(make_one, specs, bounds, {**example_sizes(specs, bounds), **(sizes or {})}, entry)
        self.program = plain(self.captured.program)
        self.sizes = dict(self.captured.sizes)
        self.batch = next((leaf.axes[axis].rpartition("*")[2] for leaf in self.captured.inputs for axis in sorted(leaf.axes)), "")
        self.saved = frozenset(make().state_dict(keep_vars=True))

    def kinds(self) -> dict[str, Kind]:
        """The kind of every weight, by its name in the table."""
        return {s.source: "stacked" if s.source in self.saved else "shared" for s in self.program.weights}

    def of(self, members: int, *, pattern: str = "shared", device: str = "cpu", kinds: Mapping[str, Kind] | None = None) -> Members:
        """The model in so many members. kinds: of the weights, where they are known. Raises: LoweringError."""
        own = [pattern == "each"] * len(self.program.inputs)
        simple = simplified([self.program], [0] * members, kinds or self.kinds(), own, self.sizes)
        return Members(simple, members, self.sizes, self.batch, pattern, device)


class Members:
    """N members of a foreseen model. simple: their programs, simplified."""

    def __init__(self, simple: Simple, count: int, sizes: Mapping[str, int], batch: str, pattern: str, device: str) -> None:
        self.simple, self.count, self.sizes, self.batch, self.pattern, self.device = simple, count, dict(sizes), batch, pattern, device

    @property
    def program(self) -> Program:
        """The member program, simplified."""
        return self.simple.programs[0]

    def plan(self, asked: str | Sequence[str] = "auto", size: int | None = None) -> Plan:
        """The plan by rules of thumb, or with the strategies that are asked for, as `widepack build --strategy` takes them. size: of the batch; the example's without it."""
        found = plans(self.program, self.simple.slots, self.count, self.sizes, self.batch, self.device, self.pattern, Choice.parse(asked))
        at = {**self.sizes, self.batch: size} if size is not None and self.batch else self.sizes
        return for_size(found, scaled(at, self.batch, self.sizes), lambda p: p)

    def lowered(self, plan: Plan) -> Lowered:
        """The wide program. Raises: LoweringError."""
        return lower(self.simple.programs, self.simple.signatures, self.simple.slots, plan, self.sizes)

    def filled(self, plan: Plan, lowered: Lowered) -> Plan:
        """The plan with the strategy of every node, and why."""
        return filled_plan(plan, lowered, self.program)


def _captured(
    make: Callable[[], nn.Module], specs: Sequence[InputSpec], bounds: Mapping[str, Bounds], sizes: Mapping[str, int], entry: str
) -> Captured:
    """The capture; at larger sizes where the example's were met by chance (`view(4, -1)` and a batch of 4)."""

    def call(at: Mapping[str, int]) -> Call:
        values, axes = from_specs(specs, at)
        return arrange(make(), (), values, axes, at, entry)

    try:
        return capture(make, call(sizes), entry=entry)
    except FixedSize as e:
        larger = {d: 2 * n if d in e.letters and (bounds.get(d, (1, None))[1] or 2 * n) >= 2 * n else n for d, n in sizes.items()}
        if larger == sizes:
            raise
        try:
            return capture(make, call(larger), entry=entry)
        except CaptureError:
            raise e from None
