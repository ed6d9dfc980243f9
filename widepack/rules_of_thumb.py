"""Plans without a device: rules of thumb.

1. What reads a Ragged value runs as a `loop` region, whatever else.
2. `strategy="wide"` forbids other loops, `strategy="loop"` asks for one around all that differs by member and depends on an input.
3. On a GPU, wide: launches are what N members cost there.
4. On a CPU, wide up to the batch at which one op's activations of all members, on average over the ops, no longer fit the second-level cache (`CACHE_BYTES`);
   from there on members run one after the other, each in the cache. Measured on twelve networks: below 1 MiB wide was 1.05-4x faster than the loop,
   above it 0.7-1.2x. What depends on weights alone, and what is Shared, stays outside the loop and runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Kind, Program, refs

from .kinds import kinds, reaches, weights_only
from .plan import Choice, Plan, Region
from .registry import REGISTRY
from .registry import Choice as Asked
from .replay import Fakes, replay

CACHE_BYTES = 1 << 20
_VIEWS = {
    "reshape",
    "view",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "expand",
    "split",
    "split_with_sizes",
    "unbind",
    "flatten",
    "unflatten",
    "getitem",
    "sym_size",
    "alias",
    "detach",
    "t",
}


def plans(
    program: Program, slots: Mapping[str, Kind], members: int, sizes: Mapping[str, int], batch: str, device: str, pattern: str, asked: Asked
) -> list[Plan]:
    """The plans of one device kind and pattern, one a batch class, least batch first.

    sizes: an example size of each dim; batch: the dim that batch classes are made of, or "".
    """
    found = kinds(program, slots)
    ragged = tuple(n.name for n in program.nodes if found[n.name] == "ragged")
    start = {s.name for s in (*program.weights, *program.inputs) if slots[s.name] != "shared"}
    inside = (reaches(program, start) - weights_only(program)) | set(ragged)
    looped = tuple(n.name for n in program.nodes if n.name in inside)
    choices = preferred(program, found, asked)

    def wide(because: str, least: int, most: int | None) -> Plan:
        regions = [Region("ragged", "loop", ragged, "values whose shapes differ by member run member after member")] if ragged else []
        return Plan(device, pattern, (least, most), tuple(regions + components(program, found, set(ragged), because)), choices)

    def loop(because: str, least: int, most: int | None) -> Plan:
        rest = components(program, found, inside, "depends on weights alone: made once, at load")
        return Plan(device, pattern, (least, most), (*([Region("members", "loop", looped, because)] if looped else []), *rest), choices)

    if asked.whole == "wide":
        return [wide("asked for", 1, None)]
    if asked.whole == "loop" or not looped:
        return [loop("asked for", 1, None)] if looped else [wide("nothing differs by member", 1, None)]
    if device != "cpu":
        return [wide(f"on {device} N members cost N times the launches; one op for all costs one", 1, None)]
    at, because = crossover(program, found, members, sizes, batch)
    if at is None:
        return [wide(because, 1, None)]
    small = [wide(because, 1, at)] if at >= 1 else []
    return [*small, loop(because, at + 1, None)]


def crossover(program: Program, found: Mapping[str, Kind], members: int, sizes: Mapping[str, int], batch: str) -> tuple[int | None, str]:
    """The largest batch to run wide on a CPU (None: every batch), and why."""
    try:
        low, high = (working_set(program, found, {**sizes, batch: b} if batch else sizes) for b in (4, 8))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None, "a size depends on values, and so does the memory that the members' activations take"
    except RuntimeError:  # the batch cannot change alone: a condition ties it to another dim
        low = high = working_set(program, found, sizes)
    slope = (high - low) / 4 * members
    fixed = low * members - 4 * slope
    words = f"an op's activations of all {members} members are {(fixed + slope) / 1024:.0f} KiB on average at {batch or 'this size'}{' = 1' if batch else ''}"
    if slope <= 0:
        return (None if fixed <= CACHE_BYTES else 0), f"{words}, the cache is taken as {CACHE_BYTES // 1024} KiB"
    at = max(0, int((CACHE_BYTES - fixed) / slope))
    return at, f"{words}; up to {batch} = {at} they fit a cache of {CACHE_BYTES // 1024} KiB, above that one member after the other does"


def working_set(program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> float:
    """Bytes of activations that one member's op reads and writes, on average over the ops that differ by member and are no views."""
    values = replay(program, Fakes(sizes, static=True))
    early = weights_only(program)
    total, count = 0, 0

    def size(value: Any) -> int:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    for node in program.nodes:
        if node.name in early or found[node.name] == "shared" or node.op.split(".")[1] in _VIEWS:
            continue
        total += size(values[node.name]) + sum(size(values[r]) for r in refs((node.args, node.kwargs)) if r not in early and found[r] != "shared")
        count += 1
    return total / max(count, 1)


def preferred(program: Program, found: Mapping[str, Kind], asked: Asked) -> dict[str, Choice]:
    """The strategies that the user prefers, for the nodes whose ops have them."""
    choices: dict[str, Choice] = {}
    for node in program.nodes:
        known: Sequence[str] = tuple(REGISTRY[node.op].strategies) if node.op in REGISTRY else ()
        for name in asked.preferred:
            if found[node.name] == "stacked" and (name in known or name == "sequential"):
                choices[node.name] = Choice(name, "asked for")
                break
    return choices


def components(program: Program, found: Mapping[str, Kind], leave: set[str], because: str) -> list[Region]:
    """The connected parts of what differs by member, outside `leave`, as wide regions."""
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
