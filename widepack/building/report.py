"""Defines `BuildReport` and `EntryReport`, and computes reports of entries and fleets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from widepack_artifacts.entry import absent_inputs
from widepack_artifacts.manifest_weights import KINDS

from ..ir.kinds import kinds
from ..lowering.wide_programs import LoweredProgram, wide_share
from .build_weights import BuildEntry, BuildWeights

OF_FIRST = ("wide_share", "kernels_member", "kernels_wide", "kinds", "strategies", "plans")
"""The fields of a build's report that are those of its first entry."""


@dataclass(frozen=True)
class EntryReport:
    """What `widepack.build` measured of one entry.

    Args:
        wide_share: Of the nodes that read a Stacked weight, the part that runs in a strategy other than
            `sequential` and `loop`, from 0 to 1.
        kernels_member: The number of kernels of one call of one member at batch 2, without the weight
            prologue.
        kernels_wide: The number of kernels of one call of the wide program at batch 2, without the weight
            prologue.
        kinds: The number of nodes of each kind: `shared`, `stacked`, `ragged`.
        strategies: The number of nodes of each strategy, in the pattern `shared` on the CPU at the smallest
            batch class.
        plans: One dict for each plan, with `device`, `pattern`, `batch`, `strategies` and `because`.
        bounds: A sentence for each dim that the members' own code bounds: calls of other sizes are refused.
        absent: The parameters of the method that no input was described for, and whose default None is part
            of the program: `attention_mask`, for example.

    Example:
        >>> report = widepack.build(["a.pt", "b.pt"], "ens.wide", model="net.py:make",
        ...                         inputs=["x=float32[B,8]"])
        >>> report.entries["forward"].wide_share
        1.0
    """

    wide_share: float
    kernels_member: int
    kernels_wide: int
    kinds: dict[str, int]
    strategies: dict[str, int]
    plans: list[dict[str, Any]] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildReport:
    """What `widepack.build` built and measured.

    Args:
        path: The artifact's folder.
        members: The names of the members, in order.
        wide_share: As in `EntryReport`, of the first entry.
        kernels_member: As in `EntryReport`, of the first entry.
        kernels_wide: As in `EntryReport`, of the first entry.
        kinds: As in `EntryReport`, of the first entry.
        strategies: As in `EntryReport`, of the first entry.
        seconds: The time of each stage, in seconds.
        verification: The record of the two comparisons, as the manifest has it. Empty after a dry run.
        weights: The bytes of the weights, by kind.
        bytes_disk: The size of all files of the artifact, in bytes; after a dry run of the weights alone.
        bytes_memory: The size of the weights in memory, in bytes.
        plans: As in `EntryReport`, of the first entry.
        digest: The SHA-256 of the manifest. Empty after a dry run.
        left_out: The checkpoints that `skip_bad` left out, with `number` (from 0), `path` and `why`.
        unused: How many names in the checkpoints no member uses, by patterns such as `model_ema.*`.
        contradicted: The model arguments that contradict the `hyper_parameters` of the checkpoints and change
            the program, with `given` and `stored`.
        entries: The report of each entry, by name.
        tuned: The measurements of `tune`, as `TuneReport.to_json` returns them; None without `tune`.
        measured: The measurements of the plans, as `TuneReport.to_json` returns them, or `failed` with the
            message; None if none were measured.
        not_finite: The members whose own answers have NaN or inf in an output in which all others are finite,
            with `entry`, `member`, `output`, `numbers` (how many are not finite), `of` (how many there
            are) and `places` (`any` if the member's weights are not finite: then NaN and inf may be at other
            places of its answers than its own module has them; else `own`).
        fleet: For members that are fine-tunes of one base: `factored`, a row for each weight that is stored
            as factors (`weight`, `rank`, `ranks` of the members, `base`: `given`, `recovered` or a member's
            name, `residual` in units of rounding, `bytes`), and `stacked`, a row for each that is not
            (`weight`, `why`, `rank`, `residual`). None for other members.

    Example:
        >>> report = widepack.build(["a.pt", "b.pt"], "ens.wide", model="net.py:make",
        ...                         inputs=["x=float32[B,8]"])
        >>> report.members
        ('a', 'b')
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    members: tuple[str, ...]
    wide_share: float
    kernels_member: int
    kernels_wide: int
    kinds: dict[str, int]
    strategies: dict[str, int]
    seconds: dict[str, float]
    verification: dict[str, Any]
    weights: dict[str, int]
    bytes_disk: int
    bytes_memory: int
    plans: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[str, EntryReport] = field(default_factory=dict)
    tuned: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    not_finite: list[dict[str, Any]] = field(default_factory=list)
    fleet: dict[str, Any] | None = None
    unused: dict[str, int] = field(default_factory=dict)
    contradicted: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with a key for each field; entries are dicts too.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


def entry_report(entry: BuildEntry, wides: Sequence[LoweredProgram], kernels: tuple[int, int]) -> EntryReport:
    """Returns the report of an entry. kernels: of a member, and of the wide program."""
    wide = next(w for w in wides if w.pattern == "shared")
    of = entry.of_pattern("shared")
    program, by_node = of.program, kinds(of.program, of.slots)
    return EntryReport(
        wide_share=wide_share(program, by_node, wide.lowered.used),
        kernels_member=kernels[0],
        kernels_wide=kernels[1],
        kinds={k: sum(by_node[n.name] == k for n in program.nodes) for k in KINDS},
        strategies=dict(Counter(wide.lowered.used.values())),
        plans=[
            {
                "device": p.device,
                "pattern": p.pattern,
                "batch": list(p.batch),
                "strategies": p.strategies(),
                "because": p.regions[0].because if p.regions else "",
            }
            for w in wides
            if not w.members
            for p in w.uses
        ],
        bounds=[
            f"{least} <= {d}{'' if most is None else f' <= {most}'}: {source}"
            for d, (least, most, source) in entry.captured.dims.items()
            if source
        ],
        absent=absent_inputs(entry.signature),
    )


def fleet_report(table: BuildWeights) -> dict[str, Any] | None:
    """Returns what was found of a fleet; None if the members are none."""
    if not table.factored and not table.kept:
        return None
    return {
        "factored": [
            {
                "weight": row.weight.name,
                "rank": row.factors.rank,
                "ranks": list(row.factors.ranks),
                "base": table.aligned.names[source]
                if isinstance(source := row.factors.source, int)
                else source,
                "residual": row.factors.residual.rms,
                "bytes": row.factors.bytes,
                "approximate": row.factors.approximate,
            }
            for row in table.factored
        ],
        "stacked": [
            {
                "weight": name,
                "why": kept.reason,
                "rank": kept.rank,
                "residual": None if kept.residual is None else kept.residual.rms,
            }
            for name, kept in table.kept.items()
        ],
    }
