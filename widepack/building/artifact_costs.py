"""Derives the costs of an entry of an artifact: of its member program, or of its wide program for any number
of members.

No weight is read. The file of costs, if the artifact has one, gives the paths of the modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from widepack_artifacts.costs import Costs, stored_costs
from widepack_artifacts.program import Kind
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
    known = _StoredEntry(reader, entry)
    rows: dict[str, Kind] = {w.name: w.kind for w in reader.manifest.member_weights}  # type: ignore[misc]  # checked
    return derive(known.program, slot_kinds(known.program, rows.__getitem__, known.states), known.facts)


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
    known = _StoredEntry(reader, entry)
    plan = known.plan({**known.example, **{d: n for d, n in sizes.items() if d in known.example}})
    programs = {}
    for members in _TWO:
        simple = known.simple(members)
        lowered = lower(simple.programs, simple.signatures, simple.slots, plan, known.example)
        programs[members] = lowered.program
    return derive_wide(programs, known.facts)


class _StoredEntry:
    """An entry of an artifact whose members have one shape.

    program: the member program. example: the size of each dim in the example. states: the numbers of the
    inputs that are states. facts: what the artifact tells of the model.
    """

    def __init__(self, reader: Reader, name: str) -> None:
        """Reads the entry. Raises: UsageError for members of different shapes."""
        self.manifest, self.stored = reader.manifest, reader.manifest.entries[name]
        files = self.stored.member
        if len(files) > 1:
            raise UsageError(
                f"{reader.root}: the members of entry {name} have {len(files)} different shapes, and costs"
                " are formulas over N equal members; analyze the model of one member instead"
            )
        self.program = reader.program(files[0])
        self.example = {d: dim.example for d, dim in self.stored.dims.items()}
        self.states = {s.input for s in self.stored.state}
        known = stored_costs(reader).get(name)
        self.facts = ModelFacts(
            sizes=self.example,
            model=reader.root.name if known is None else known.model,
            dims={d: (dim.min, dim.max) for d, dim in self.stored.dims.items()},
            guards=[g.expr for g in self.stored.guards],
            modules={} if known is None else known.modules,
            classes={} if known is None else known.classes,
        )

    def simple(self, members: int) -> SimplifiedPrograms:
        """Returns the simplified member program, for a number of members."""
        weights = {w.name: w for w in self.manifest.weights}
        kinds: dict[str, Kind] = {n: w.kind for n, w in weights.items()}  # type: ignore[misc]  # checked
        factors = stored_factors(self.manifest.factored.weights, weights) or None
        stacked = [i in self.states for i in range(len(self.stored.inputs))]
        return simplified([self.program], [0] * members, kinds, stacked, self.example, factors=factors)

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """Returns the plan of a call of these sizes."""
        stored, example = self.stored, self.example
        batch = batch_letter(parse_slot(x.type).dims for x in stored.inputs)
        rows = [
            (w, Plan.from_json(w.plan))
            for w in stored.wide
            if (w.pattern, w.device) == (_PATTERN, _DEVICE) and w.part is None
        ]
        found = [plan for _, plan in of_this_machine(rows, _DEVICE)]
        members = len(self.manifest.members)
        simple = self.simple(members)
        nodes = {n.name for n in simple.programs[0].nodes}
        if not found or not all(nodes.issuperset(n for r in p.regions for n in r.nodes) for p in found):
            # an artifact without a plan for a CPU, or whose nodes have other names than in this version
            request = StrategyRequest("auto", plain=any(w.plan.get("plain") for w in stored.wide))
            found = plans(
                simple.programs[0], simple.slots, members, example, batch, _DEVICE, _PATTERN, request
            )
        in_order = sorted(found, key=lambda p: p.batch[0])
        return for_size(in_order, scaled(sizes, batch, example), lambda p: p)
