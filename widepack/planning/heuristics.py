"""Plans without a device: rules of thumb.

1. What reads a Ragged value runs as a `loop` region, whatever else.
2. `strategy="wide"` forbids other loops, `strategy="loop"` asks for one around all that differs by member and depends on an input.
3. On a GPU, wide: launches are what N members cost there.
4. On a CPU, wide up to the batch at which one op's activations of all members, on average over the ops, no longer fit the second-level cache (`CACHE_BYTES`),
   or are so many that a pass over them in memory takes longer than starting an op (`MEMBER_BYTES` of each member); from there on members run one after the other, each in
   the cache. What depends on weights alone, and what is Shared, stays outside the loop and runs once.
   Steps of a recurrent op follow one another, and what counts of it is one step. A program of a single op that reads and writes all once (`ONE_PASS`) has no values to keep in the
   cache: it runs wide at every batch, straight into the answer, which a loop would copy there.
5. On a CPU ids of the members' own are looked up in one table of all (`flat_index`): a gather along each table takes twice as long.
6. On a CPU convolutions run over packed weights (conv.py), up to `PACKED_BYTES` of them. Those of one batch class alone, since the loop has them in another order than the wide
   region and would hold them twice: of networks that may go wide up to `OFTEN` then (their limits are `PACKED` times as high), the wide region's, else the loop's, from the
   batch on at which an op of one member has `LOOP_BYTES` (a call over packed weights takes longer to start). A convolution by itself, which has no neighbour in its own memory
   order, only up to `LONE_BYTES`.

Measured for 4 and 6, with the figures of each network and batch: bench/results/rules-cpu.json (scripts/rules_cpu.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Kind, Node, Program, Ref, refs

from ..ir import ops
from ..ir.kinds import kinds, reaches, weights_only
from .plan import Choice, Plan, Region
from ..registry.registry import REGISTRY
from ..registry.registry import Choice as Asked
from ..ir.fake_values import Fakes, replay
from ..spec.input_spec import parse_type

CACHE_BYTES = 1 << 20
MEMBER_BYTES = 64 << 10
ONE_PASS = {"attention", "bag", "embedding", "pool"}  # families
PACKED_BYTES = 1 << 30
MOST_PADDED = 4  # times the plain weight's bytes that a packed one may take, and
SMALL_BYTES = 4 << 20  # what it may take anyway, as a first layer's few channels
PACKED = 4  # convolutions over packed weights are worth going wide for with this many times the activations
OFTEN = 16  # a batch that most calls are below
LOOP_BYTES = 128 << 10
LONE_BYTES = 3 << 19
_CONVOLUTION = re.compile(r"aten\.conv[123]d\.(default|padding)")
_PRODUCTS = re.compile(
    r"aten\.(linear|bilinear|matmul|mm|bmm|addmm|baddbmm|einsum|conv_transpose\dd|scaled_dot_product_attention|lstm|gru|rnn_\w+)\."
)
_RECURRENT = re.compile(r"aten\.(lstm|gru|rnn_\w+)\.input")
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
        return Plan(device, pattern, (least, most), tuple(regions + components(program, found, set(ragged), because)), choices, plain=asked.plain)

    def loop(because: str, least: int, most: int | None) -> Plan:
        rest = components(program, found, inside, "depends on weights alone: made once, at load")
        return Plan(
            device, pattern, (least, most), (*([Region("members", "loop", looped, because)] if looped else []), *rest), choices, plain=asked.plain
        )

    if asked.whole == "wide":
        return [wide("asked for", 1, None)]
    if asked.whole == "loop" or not looped:
        return [loop("asked for", 1, None)] if looped else [wide("nothing differs by member", 1, None)]
    if device != "cpu":
        return [wide(f"on {device} N members cost N times the launches; one op for all costs one", 1, None)]
    choices = {**looked_up(program, found), **choices}
    if one_pass(program, found):
        return [wide("one op, which reads and writes all once, straight into the answer", 1, None)]
    grows = activations(program, found, members, sizes, batch)
    packs = {} if asked.plain else packable(program, found, members)
    products = sum(found[n.name] == "stacked" and bool(_PRODUCTS.match(n.op)) for n in program.nodes)
    often = grows.crossover(PACKED) if len(packs) > products else 0  # else convolutions are not what takes the time
    packs_wide = often is None or often >= OFTEN
    times = PACKED if packs_wide and packs else 1
    at, because = grows.crossover(times), grows.because(times)
    in_loop = {n.name: packs[n.name] for n in program.nodes if n.name in packs and "conv1d" not in n.op}  # loops pack weights of two and three dims
    if at is None:
        return [replace(wide(because, 1, None), choices={**packs, **choices})]
    small = [replace(wide(because, 1, at), choices={**(packs if packs_wide else {}), **choices})] if at >= 1 else []
    if (packs_wide and small) or not in_loop:
        return [*small, loop(because, at + 1, None)]
    enough = max(at + 1, grows.reaches(members * LOOP_BYTES))
    plain = [loop(because, at + 1, enough - 1)] if enough > at + 1 else []
    far = max(enough, grows.reaches(members * LONE_BYTES)) if alone(program, found) and grows.slope > 0 else None
    packed = [replace(loop(because, enough, None if far is None else far - 1), choices={**in_loop, **choices})] if far != enough else []
    return [*small, *plain, *packed, *([loop(because, far, None)] if far is not None else [])]


def looked_up(program: Program, found: Mapping[str, Kind]) -> dict[str, Choice]:
    """Embeddings in which tables and ids are the members' own."""
    chosen = {}
    for node in program.nodes:
        if node.op == "aten.embedding.default":
            given = ops.bind(node.op, node.args, node.kwargs)
            if all(isinstance(given[k], Ref) and found[given[k].name] == "stacked" for k in ("weight", "indices")):
                chosen[node.name] = Choice("flat_index", "one look-up in all members' tables takes half as long as a gather along each")
    return chosen


def alone(program: Program, found: Mapping[str, Kind]) -> Node | None:
    """The one op that differs by member at every call, views and sizes aside; None where there are several."""
    early = weights_only(program)
    own = [n for n in program.nodes if found[n.name] == "stacked" and n.name not in early and n.op.split(".")[1] not in _VIEWS]
    return own[0] if len(own) == 1 else None


def one_pass(program: Program, found: Mapping[str, Kind]) -> bool:
    """Whether the program is a single op that reads and writes all once."""
    node = alone(program, found)
    return node is not None and node.op in REGISTRY and REGISTRY[node.op].family in ONE_PASS


def packable(program: Program, found: Mapping[str, Kind], members: int) -> dict[str, Choice]:
    """The convolutions that are worth packing the weights of: float32, without dilation (which packed kernels are slow at), a weight that no other node reads (it would be packed
    for each), not many times as large packed (`_packed_bytes`), all of them within `PACKED_BYTES`."""
    types = {s.name: s.type for s in program.weights} | {n.name: n.out for n in program.nodes}
    early = weights_only(program)
    readers = Counter(r for n in program.nodes for r in set(refs((n.args, n.kwargs))))
    total, packs = 0, {}
    for node in program.nodes:
        if not _CONVOLUTION.fullmatch(node.op) or found[node.name] != "stacked" or node.name in early:
            continue
        given = ops.bind(node.op, node.args, node.kwargs)
        x, weight, groups = given["input"], given["weight"], given.get("groups", 1)
        if (
            not isinstance(x, Ref)
            or not isinstance(weight, Ref)
            or weight.name not in early
            or found[weight.name] != "stacked"
            or readers[weight.name] > 1
        ):
            continue
        dtype, dims = parse_type(types[weight.name]) if types[weight.name] else ("", ())  # a simplification's own values have no type
        sizes = [d for d in dims if isinstance(d, int)]
        even = given.get("padding") == "same" and any(s % 2 == 0 for s in sizes[2:])
        if (
            dtype != "float32"
            or not isinstance(groups, int)
            or _other_than_one(given.get("dilation", 1))
            or even
            or (found[x.name] == "shared" and groups > 1)
        ):
            continue
        plain, packed = 4 * members * math.prod(sizes), members * _packed_bytes(sizes, groups)
        if packed > MOST_PADDED * plain and packed > SMALL_BYTES:
            continue
        total += packed
        packs[node.name] = Choice("packed", "packed weights save a convolution from bringing them in order at every call")
    return packs if total <= PACKED_BYTES else {}


def _other_than_one(numbers: Any) -> bool:
    return any(n != 1 for n in (numbers if isinstance(numbers, (list, tuple)) else [numbers]))


def _packed_bytes(sizes: Sequence[int], groups: int) -> int:
    """Bytes of a member's packed weight `[O, C/groups, *k]`: each group's channels are filled up to blocks of 16, and groups of one channel to blocks of 16 groups."""
    inputs, outputs = sizes[1], sizes[0] // groups

    def blocks(n: int) -> int:
        return -(-n // 16) * 16

    numbers = blocks(groups) if inputs == outputs == 1 else groups * blocks(inputs) * blocks(outputs)
    return 4 * numbers * math.prod(sizes[2:])


@dataclass(frozen=True)
class Activations:
    """Bytes that an op of all members reads and writes, on average over the ops: fixed + slope * batch. batch: its dim's name. why: words, where sizes are not known."""

    members: int
    batch: str
    fixed: float = 0.0
    slope: float = 0.0
    why: str = ""

    def _limit(self, times: int) -> int:
        return times * max(CACHE_BYTES, self.members * MEMBER_BYTES)

    def crossover(self, times: int = 1) -> int | None:
        """The largest batch to run wide on a CPU; None: every batch. times: the limits are this many times as high."""
        if self.why:
            return None
        if self.slope <= 0:
            return None if self.fixed <= self._limit(times) else 0
        return max(0, int((self._limit(times) - self.fixed) / self.slope))

    def reaches(self, size: int) -> int:
        """The least batch at which they are so many bytes; 1 where the batch does not tell."""
        return max(1, math.ceil((size - self.fixed) / self.slope)) if self.slope > 0 else 1

    def because(self, times: int = 1) -> str:
        """The crossover in words."""
        if self.why:
            return self.why
        batch, at, limit = self.batch, self.crossover(times), f"{self._limit(times) // 1024} KiB"
        words = f"an op's activations of all {self.members} members are {(self.fixed + self.slope) / 1024:.0f} KiB on average at {f'{batch} = 1' if batch else 'this size'}"
        return (
            f"{words}, the limit is {limit}"
            if self.slope <= 0
            else f"{words}; up to {batch} = {at} they are within {limit}, above that members run one after the other"
        )


def activations(program: Program, found: Mapping[str, Kind], members: int, sizes: Mapping[str, int], batch: str) -> Activations:
    """How an op's activations grow with the batch."""
    try:
        low, high = (working_set(program, found, {**sizes, batch: b} if batch else sizes) for b in (4, 8))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Activations(members, batch, why="a size depends on values, and so does the memory that the members' activations take")
    except RuntimeError:  # the batch cannot change alone: a condition ties it to another dim
        low = high = working_set(program, found, sizes)
    slope = (high - low) / 4 * members
    return Activations(members, batch, low * members - 4 * slope, slope)


def working_set(program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> float:
    """Bytes of activations that one member's op reads and writes, on average over the ops that differ by member and are no views."""
    values = replay(program, Fakes(sizes, static=True))
    early = weights_only(program)
    total, count = 0.0, 0

    def size(value: Any) -> int:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    for node in program.nodes:
        if node.name in early or found[node.name] == "shared" or node.op.split(".")[1] in _VIEWS:
            continue
        touched = size(values[node.name]) + sum(size(values[r]) for r in refs((node.args, node.kwargs)) if r not in early and found[r] != "shared")
        total += touched / steps(node, values)
        count += 1
    return total / max(count, 1)


def steps(node: Node, values: Mapping[str, Any]) -> int:
    """How many steps a recurrent op takes over its input, each of which touches one step's values; 1 for any other op."""
    if not _RECURRENT.match(node.op):
        return 1
    given = ops.bind(node.op, node.args, node.kwargs)
    x = values[given["input"].name]
    return max(1, int(x.shape[1 if x.ndim == 3 and given.get("batch_first") else 0]))


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
