"""Derives the costs of an entry of an artifact: of its member program, or of its wide program for any number
of members.

No weight is read. The file of costs, if the artifact has one, gives the paths of the modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from widepack_artifacts.costs import Costs
from widepack_artifacts.costs_file import stored_costs
from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.reader import Reader

from ..costs.derive import ModelFacts, derive, derive_wide
from ..errors import UsageError
from ..ir.kinds import slot_kinds
from ..ir.tensor_type import parse_slot
from ..lowering.lower import lower
from ..planning.heuristics import plans
from ..planning.plan import Plan, for_size, of_this_machine, scaled
from ..planning.request import StrategyRequest
from ..simplify.factored_weights import stored_factors
from ..simplify.member_programs import SimplifiedPrograms, simplified
from ..spec.input_spec import batch_letter

_TWO = (2, 3)
"""The numbers of members through which the costs of a wide program are a line."""
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
    stored = reader.manifest.entries[entry]
    program = _member_program(reader, entry)
    rows: dict[str, Kind] = {w.name: w.kind for w in reader.manifest.member_weights}  # type: ignore[misc]  # checked
    slots = slot_kinds(program, rows.__getitem__, {s.input for s in stored.state})
    return derive(program, slots, _facts(reader, entry))


def wide_program_costs(reader: Reader, entry: str, sizes: Mapping[str, int]) -> Costs:
    """Derives the costs of the wide program of an entry, for a CPU and inputs that all members share.

    The plan is the artifact's: the one that was measured on this machine, else the one by rules of thumb. It
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
    stored = reader.manifest.entries[entry]
    example = {name: dim.example for name, dim in stored.dims.items()}
    plan = _plan(reader, entry, {**example, **{d: n for d, n in sizes.items() if d in example}})
    programs = {}
    for members in _TWO:
        simple = _simple(reader, entry, members)
        lowered = lower(simple.programs, simple.signatures, simple.slots, plan, example)
        programs[members] = lowered.program
    return derive_wide(programs, _facts(reader, entry))


def _plan(reader: Reader, entry: str, sizes: Mapping[str, int]) -> Plan:
    """Returns the plan of a call of these sizes."""
    stored = reader.manifest.entries[entry]
    example = {name: dim.example for name, dim in stored.dims.items()}
    batch = batch_letter(parse_slot(x.type).dims for x in stored.inputs)
    rows = [
        (w, Plan.from_json(w.plan))
        for w in stored.wide
        if (w.pattern, w.device) == (_PATTERN, _DEVICE) and w.part is None
    ]
    found = [plan for _, plan in of_this_machine(rows, _DEVICE)]
    members = len(reader.manifest.members)
    simple = _simple(reader, entry, members)
    nodes = {n.name for n in simple.programs[0].nodes}
    if not found or not all(nodes.issuperset(n for r in p.regions for n in r.nodes) for p in found):
        # an artifact without a plan for a CPU, or whose nodes have other names than in this version
        request = StrategyRequest("auto", plain=any(w.plan.get("plain") for w in stored.wide))
        found = plans(simple.programs[0], simple.slots, members, example, batch, _DEVICE, _PATTERN, request)
    in_order = sorted(found, key=lambda p: p.batch[0])
    return for_size(in_order, scaled(sizes, batch, example), lambda p: p)


def _simple(reader: Reader, entry: str, members: int) -> SimplifiedPrograms:
    """Returns the simplified member program, for a number of members."""
    stored, manifest = reader.manifest.entries[entry], reader.manifest
    states = {s.input for s in stored.state}
    kinds: dict[str, Kind] = {w.name: w.kind for w in manifest.weights}  # type: ignore[misc]  # checked
    factors = stored_factors(manifest.factored.weights, {w.name: w for w in manifest.weights})
    return simplified(
        [_member_program(reader, entry)],
        [0] * members,
        kinds,
        [i in states for i in range(len(stored.inputs))],
        {name: dim.example for name, dim in stored.dims.items()},
        factors=factors or None,
    )


def _member_program(reader: Reader, entry: str) -> Program:
    """Returns the member program of an entry. Raises: UsageError for members of different shapes."""
    files = reader.manifest.entries[entry].member
    if len(files) > 1:
        raise UsageError(
            f"{reader.root}: the members of entry {entry} have {len(files)} different shapes, and "
            "costs are formulas over N equal members; analyze the model of one member instead"
        )
    return reader.program(files[0])


def _facts(reader: Reader, entry: str) -> ModelFacts:
    """Returns what the artifact tells of the model."""
    stored: Entry = reader.manifest.entries[entry]
    known = stored_costs(reader).get(entry)
    return ModelFacts(
        sizes={name: dim.example for name, dim in stored.dims.items()},
        model=reader.root.name if known is None else known.model,
        dims={name: (dim.min, dim.max) for name, dim in stored.dims.items()},
        guards=[g.expr for g in stored.guards],
        modules={} if known is None else known.modules,
        classes={} if known is None else known.classes,
    )
