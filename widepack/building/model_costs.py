"""Derives the costs of a model that has no checkpoints.

A model is made with fake tensors, which take no memory. A constructor that needs values, and code that cannot
be captured without them, are tried again with real tensors. Where the model cannot run on inputs that are
drawn, it is captured without a run.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from widepack_artifacts.costs import Costs

from ..costs.derive import derive, derive_wide
from ..errors import CaptureError
from ..ir.kinds import slot_kinds
from ..spec.entries import FORWARD
from ..system.memory import available_bytes
from .costs_file import facts_of
from .preview import Preview

_TWO = (2, 3)
"""The numbers of members through which the costs of a wide program are a line."""


def model_costs(
    make: Callable[[], nn.Module], inputs: Sequence[str], *, entry: str = FORWARD, wide: int = 0
) -> Costs:
    """Derives the costs of a model.

    Args:
        make: Returns a fresh member.
        inputs: Specs as `widepack build --input` takes them.
        entry: The method.
        wide: Derive the costs of the wide program, planned for this number of members; 0: of the model as it
            is written, once for each member.

    Returns:
        The costs. Weights that a checkpoint stores are assumed to differ between the members.

    Raises:
        UsageError: The specs do not fit the model.
        CaptureError: The model cannot be captured.
        LoweringError: An op cannot run for all members.
        WidepackError: A size has no formula.
    """
    with _rare_collections():
        preview, name = model_preview(make, inputs, entry)
        facts = facts_of(preview.captured, name)
        if not wide:
            captured = preview.captured
            states = {s.input for s in captured.states}
            return derive(captured.program, slot_kinds(captured.program, preview.kind, states), facts)
        plan = preview.of(wide).plan()
        return derive_wide({n: preview.of(n).lowered(plan).program for n in _TWO}, facts)


def model_preview(
    make: Callable[[], nn.Module], inputs: Sequence[str], entry: str = FORWARD
) -> tuple[Preview, str]:
    """Captures the model with fake tensors, or with real ones. Returns the capture and the model's class.

    Raises: UsageError; CaptureError.
    """

    def make_fake() -> nn.Module:
        # torch.export takes the mode of the module's tensors for the whole export, and needs this list
        mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
        with mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # of a deepcopy
            return make()

    try:
        return Preview(make_fake, inputs, entry=entry, fake=True), type(make_fake()).__name__
    except Exception as e:  # code that gets no values may raise anything
        if _is_large(make_fake):
            raise CaptureError(
                f"the model cannot be captured without its weights, which take too much memory here: {e}"
            ) from e
        # the reason may be the missing values; what is wrong with values too is reported then
        name = type(make()).__name__
        try:
            return Preview(make, inputs, entry=entry), name
        except CaptureError:
            # drawn values may not fit, such as floats that are numbers of categories; costs need none
            with suppress(CaptureError):
                return Preview(make, inputs, entry=entry, fake=True), name
            raise


def _is_large(make_fake: Callable[[], nn.Module]) -> bool:
    """Whether the weights of a model would take over a third of the memory that is free."""
    free = available_bytes()
    try:
        size = sum(t.nbytes for t in make_fake().state_dict().values())
    except Exception:  # noqa: BLE001  # as above
        return False  # its constructor needs values
    return free is not None and 3 * size > free


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collects garbage rarely in the block: a capture makes millions of objects that stay."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
