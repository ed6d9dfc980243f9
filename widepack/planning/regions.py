"""Makes the wide plan and the loop plan of a member program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from widepack_artifacts.program import Kind, Program, refs

from ..ir.kinds import reaches, weights_only
from .plan import MEMBERS, NodeChoice, Plan, Region


@dataclass(frozen=True)
class Regions:
    """The nodes of a member program by region, for one device kind and pattern.

    `found` are the kinds of all values. `ragged` are the nodes with Ragged values, which always run in a
    loop. `looped` are the nodes that a loop over all members would contain.
    """

    program: Program
    found: Mapping[str, Kind]
    device: str
    pattern: str
    plain: bool
    ragged: tuple[str, ...]
    looped: tuple[str, ...]

    @classmethod
    def of(
        cls,
        program: Program,
        found: Mapping[str, Kind],
        slots: Mapping[str, Kind],
        device: str,
        pattern: str,
        plain: bool,
    ) -> Regions:
        """Finds the nodes of each region. `slots` are the kinds of weights and inputs."""
        ragged = tuple(n.name for n in program.nodes if found[n.name] == "ragged")
        start = {s.name for s in (*program.weights, *program.inputs) if slots[s.name] != "shared"}
        inside = (reaches(program, start) - weights_only(program)) | set(ragged)
        looped = tuple(n.name for n in program.nodes if n.name in inside)
        return cls(program, found, device, pattern, plain, ragged, looped)

    def wide(
        self, because: str, choices: Mapping[str, NodeChoice], least: int = 1, most: int | None = None
    ) -> Plan:
        """Returns the plan of a batch class with a loop for Ragged values only."""
        why = "values whose shapes differ by member run member after member"
        loops = [Region("ragged", "loop", self.ragged, why)] if self.ragged else []
        rest = components(self.program, self.found, set(self.ragged), because)
        return self._plan((*loops, *rest), choices, least, most)

    def loop(
        self, because: str, choices: Mapping[str, NodeChoice], least: int = 1, most: int | None = None
    ) -> Plan:
        """Returns the plan of a batch class with one loop around all that differs between members."""
        why = "depends on weights only: computed once, at load"
        rest = components(self.program, self.found, set(self.looped), why)
        loops = [Region(MEMBERS, "loop", self.looped, because)] if self.looped else []
        return self._plan((*loops, *rest), choices, least, most)

    def _plan(
        self, regions: tuple[Region, ...], choices: Mapping[str, NodeChoice], least: int, most: int | None
    ) -> Plan:
        return Plan(self.device, self.pattern, (least, most), regions, choices, plain=self.plain)


def components(program: Program, found: Mapping[str, Kind], leave: set[str], because: str) -> list[Region]:
    """Returns the connected parts of the Stacked values outside `leave`, as wide regions."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    chosen = [n for n in program.nodes if found[n.name] == "stacked" and n.name not in leave]
    for node in chosen:
        parent[node.name] = node.name
        for r in refs((node.args, node.kwargs)):
            if r in parent:
                parent[root(r)] = root(node.name)
    groups: dict[str, list[str]] = {}
    for node in chosen:
        groups.setdefault(root(node.name), []).append(node.name)
    return [Region(f"wide_{i}", "wide", tuple(names), because) for i, names in enumerate(groups.values())]
