"""Previews a build without checkpoints: the member program, and for N members the kinds, the plan and the
wide program.

A preview needs what makes one member, and input specs. It assumes that weights which a checkpoint stores
differ between the members, and that everything else is equal (tables that are not saved, literals). It reads
no weights and verifies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from widepack_artifacts.program import Kind

from ..capture.capture import Captured, capture
from ..capture.example import example_sizes
from ..ir.tensor_type import parse_slot
from ..lowering.pattern_programs import PatternPrograms, simplified
from ..simplify.canonical import plain
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
        self, members: int, pattern: str = "shared", kinds: Mapping[str, Kind] | None = None
    ) -> PatternPrograms:
        """Returns the programs of N members. kinds: of the weights; default `self.kinds()`."""
        stacked = [pattern == "each"] * len(self.program.inputs)
        kinds = kinds or self.kinds()
        return simplified([self.program], [0] * members, kinds, stacked, self.sizes, self.batch, pattern)
