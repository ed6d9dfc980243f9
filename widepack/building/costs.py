"""Derives costs: of the entries of a build, of an entry of an artifact, and of a model without checkpoints.

A build writes them to the file `costs-<hash>.json`. The costs of an artifact are those of its member program,
or of its wide program for any number of members. No weight is read; the file of costs, if the artifact has
one, gives the paths of the modules.

A model is made with fake tensors, which take no memory. A constructor that needs values, and code that cannot
be captured without them, are tried again with real tensors. Where the model cannot run on inputs that are
drawn, it is captured without a run.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from widepack_artifacts import strict_json
from widepack_artifacts.costs import STEM, Costs, documents, stored_costs
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

from ..capture.capture import Captured
from ..costs.derive import ModelFacts, derive, derive_wide
from ..errors import CaptureError, UsageError, WidepackError
from ..ir.kinds import slot_kinds
from ..planning.plan import Plan, of_this_machine
from ..planning.request import StrategyRequest
from ..simplify.pipeline import MemberPrograms
from ..spec.entries import FORWARD
from ..system.memory import available_bytes
from ..verification.entries import ArtifactEntry
from .preview import Preview


def facts_of(captured: Captured, name: str) -> ModelFacts:
    """Returns what a capture tells of a model. name: of the model."""
    return ModelFacts(
        sizes=captured.sizes,
        model=name,
        dims={d: (least, most) for d, (least, most, _) in captured.dims.items()},
        guards=[g.expr for g in captured.guards],
        modules=captured.modules,
        classes=captured.classes,
    )


def write_costs(writer: Writer, entries: Iterable[tuple[str, MemberPrograms, ModelFacts]]) -> None:
    """Writes the costs of entries. entries: the name of each, its programs, what is known of its model."""
    found = {name: _costs(entry, facts) for name, entry, facts in entries}
    kept = {name: costs for name, costs in found.items() if costs is not None}
    if kept:
        writer.file(STEM, "json", strict_json.canonical(documents(kept)))


def _costs(entry: MemberPrograms, facts: ModelFacts) -> Costs | None:
    """Returns the costs of an entry. None if its members have different shapes, or a size has no formula: no
    answer depends on them.
    """
    if len(entry.programs) > 1:
        return None
    (program,) = entry.programs
    try:
        return derive(program, slot_kinds(program, entry.kind, {s.input for s in entry.states}), facts)
    except (WidepackError, RuntimeError):  # torch raises a RuntimeError for sizes that are data
        return None


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
        plan = preview.of(wide).plan(_DEVICE)
        return derive_wide({n: preview.of(n).lower(plan).program for n in _TWO}, facts)


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


_PATTERN, _DEVICE = "shared", "cpu"


def program_costs(reader: Reader, entry: str) -> Costs:
    """Derives the costs of an entry from its member program.

    Args:
        reader: The artifact.
        entry: The name of the entry.

    Returns:
        The costs. Weights that are stored as factors count as whole weights.

    Raises:
        ArtifactError: A file is damaged.
        UsageError: The members have different shapes.
        WidepackError: A size has no formula.
    """
    known = _stored_entry(reader, entry)
    states = {s.input for s in known.states}
    (program,) = known.programs
    return derive(program, slot_kinds(program, known.kind, states), artifact_facts(known))


def wide_program_costs(reader: Reader, entry: str, sizes: Mapping[str, int]) -> Costs:
    """Derives the costs of the wide program of an entry, for a CPU and inputs that all members share.

    The plan is the artifact's: the one that was measured on this machine, else the predicted one. It
    was made for the artifact's number of members, and the formulas hold for any number.

    Args:
        reader: The artifact.
        entry: The name of the entry.
        sizes: The sizes of a call. They choose the plan among those for different batches. A dim that is
            missing has its example size.

    Returns:
        The costs. Weights whose factors the program reads count as factors.

    Raises:
        ArtifactError: A file is damaged.
        UsageError: The members have different shapes.
        LoweringError: A node cannot run for all members.
        WidepackError: A size has no formula, or the programs for two numbers of members differ.
    """
    known = _stored_entry(reader, entry)
    programs = known.of_pattern(_PATTERN)
    rows = [
        (w, Plan.from_json(w.plan))
        for w in known.row.wide
        if (w.pattern, w.device) == (_PATTERN, _DEVICE) and w.part is None
    ]
    found = [plan for _, plan in of_this_machine(rows, _DEVICE)]
    nodes = {n.name for n in programs.program.nodes}
    if not found or not all(nodes.issuperset(n for r in p.regions for n in r.nodes) for p in found):
        # an artifact without a plan for a CPU, or whose nodes have other names than in this version
        request = StrategyRequest("auto", plain=any(w.plan.get("plain") for w in known.row.wide))
        found = programs.plans(_DEVICE, request)
    at = {d: sizes.get(d, n) for d, n in known.sizes.items()}
    plan = programs.serving(sorted(found, key=lambda p: p.batch[0]), at)
    return derive_wide(
        {n: programs.of_members([0] * n).lower(plan).program for n in _TWO}, artifact_facts(known)
    )


def _stored_entry(reader: Reader, name: str) -> ArtifactEntry:
    """Returns an entry of an artifact whose members have one shape. Raises: UsageError for others."""
    manifest = reader.manifest
    files = manifest.entries[name].member
    if len(files) > 1:
        raise UsageError(
            f"{reader.root}: the members of entry {name} have {len(files)} different shapes, and costs"
            " are formulas over N equal members; analyze the model of one member instead"
        )
    members = range(len(manifest.members))
    return ArtifactEntry(name, reader, members, manifest.weights, manifest.factored.weights)


def artifact_facts(entry: ArtifactEntry) -> ModelFacts:
    """Returns what an artifact tells of the model of an entry."""
    known = stored_costs(entry.reader).get(entry.entry)
    return ModelFacts(
        sizes=entry.sizes,
        model=entry.reader.root.name if known is None else known.model,
        dims=entry.bounds,
        guards=entry.conditions,
        modules={} if known is None else known.modules,
        classes={} if known is None else known.classes,
    )
