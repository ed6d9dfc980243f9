"""Small member programs written by hand, run member by member and wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack.ir.float64 import raise_program
from widepack.ir.ops import full_name
from widepack.ir.tensor_type import parse_slot
from widepack.lowering.lower import Lowered, lower
from widepack.planning.plan import Plan, Region
from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack.spec.dtypes import dtype_of
from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot

CPU = torch.device("cpu")
SIZES = {"B": 4, "T": 6}


def node(
    name: str, op: str, *args: Any, out: str = "", source: str = "net.py:1 in forward", **kwargs: Any
) -> Node:
    return Node(name, full_name(op), args, kwargs, out, source)


def program(
    weights: Mapping[str, str], inputs: Mapping[str, str], nodes: Sequence[Node], outputs: Sequence[str]
) -> Program:
    """weights and inputs: name -> type; the name in the program is also its source."""
    made = Program(
        tuple(Slot(n, n, "shared", t) for n, t in weights.items()),
        tuple(Slot(n, n, "shared", t) for n, t in inputs.items()),
        tuple(nodes),
        tuple(Output(Ref(o), "shared") for o in outputs),
    )
    made.check()
    return made


def classifier() -> Program:
    """A trunk, a head with a computed weight, a size, a value that no node reads, and three outputs."""
    nodes = [
        node("h", "linear", Ref("w_trunk_in"), Ref("w_trunk")),
        node("made", "linear", Ref("x"), Ref("h")),
        node("r", "relu", Ref("made")),
        node("doubled", "mul.Scalar", Ref("w_head"), 2.0),
        node("y", "linear", Ref("r"), Ref("doubled"), Ref("w_bias")),
        node("dead", "exp", Ref("y")),
        node("z", "softmax.int", Ref("y"), -1),
        node("b", "sym_size.int", Ref("x"), 0),
        node("twice", "operator.mul", Ref("b"), 1),
        node("v", "reshape", Ref("z"), [Ref("twice"), 3, 1]),
        node("total", "sum", Ref("v")),
    ]
    weights = {
        "w_trunk": "float32[4,5]",
        "w_trunk_in": "float32[6,5]",
        "w_head": "float32[3,6]",
        "w_bias": "float32[3]",
        "w_unused": "float32[2]",
    }
    return program(weights, {"x": "float32[B,4]"}, nodes, ["v", "made", "total"])


def draw(type_: str, seed: int, sizes: Mapping[str, int] = SIZES) -> torch.Tensor:
    slot = parse_slot(type_)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(slot.shape(sizes), generator=generator).to(dtype_of(slot.dtype))


def values(
    slots: Sequence[Slot], kinds: Mapping[str, Kind], members: int, sizes: Mapping[str, int] = SIZES
) -> list[list[torch.Tensor]]:
    """[slot][member]: one tensor N times where the slot is Shared; variances are positive."""
    made = [
        [draw(s.type, 97 * j + (0 if kinds[s.name] == "shared" else 1 + i), sizes) for i in range(members)]
        for j, s in enumerate(slots)
    ]
    return [[v.abs() + 0.1 for v in row] if s.name == "var" else row for s, row in zip(slots, made)]


def held(own: Sequence[torch.Tensor], kind: Kind) -> Any:
    """N members' values as a wide program takes them."""
    return own[0] if kind == "shared" else torch.stack(list(own)) if kind == "stacked" else list(own)


def all_kinds(made: Program, **own: Kind) -> dict[str, Kind]:
    """Every slot Shared but these."""
    return {s.name: own.get(s.name, "shared") for s in (*made.weights, *made.inputs)}


def plan(**regions: Sequence[str]) -> Plan:
    """A plan with these loop regions, all else wide."""
    return Plan(
        "cpu",
        "shared",
        (1, None),
        tuple(Region(n, "loop", tuple(nodes), "requested") for n, nodes in regions.items()),
    )


def lowered(made: Program, kinds: Mapping[str, Kind], chosen: Plan, members: int = 3) -> Lowered:
    return lower([made], [0] * members, kinds, chosen, SIZES)


def check(
    made: Program,
    wide: Program,
    kinds: Mapping[str, Kind],
    members: int = 3,
    sizes: Mapping[str, int] = SIZES,
    *,
    prologue: bool = True,
) -> None:
    """Checks that the outputs of the wide program equal those of each member.

    Where they differ by more than 1e-5, both are compared with the member in float64: the largest error of
    the wide program must be within four times the member's own, plus four ulp of the output's rms (DESIGN,
    "Correct means").
    """
    weights, inputs = values(made.weights, kinds, members, sizes), values(made.inputs, kinds, members, sizes)
    by_name = {s.source: held(w, kinds[s.name]) for s, w in zip(made.weights, weights)}
    run = Executable(wide, by_name, CPU, prologue=prologue)
    got = run.run(*(held(x, kinds[s.name]) for s, x in zip(made.inputs, inputs)))
    member, raised = graph_module(made, CPU), graph_module(raise_program(made), CPU)
    for i in range(members):
        with torch.inference_mode():
            want = member(*(w[i] for w in weights), *(x[i] for x in inputs))
        assert len(got) == len(want)
        for number, (g, w, o) in enumerate(zip(got, want, wide.outputs)):
            mine = g if o.kind == "shared" else g[i]
            if not torch.allclose(mine, w, rtol=1e-5, atol=1e-6):
                exact = raised(*(v[i].double() for v in (*weights, *inputs)))[number]
                own = float((w.double() - exact).abs().max())
                ulp = torch.finfo(w.dtype).eps * float(exact.square().mean().sqrt())
                assert float((mine.double() - exact).abs().max()) <= 4 * own + 4 * ulp
