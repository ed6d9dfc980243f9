"""Small member programs, written by hand, and a check of a wide program against the members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack.ir.cast import raise_program
from widepack.ir.edit import all_nodes
from widepack.ir.ops import full_name
from widepack.ir.tensor_type import parse_slot
from widepack.kernels.decompose import decompose
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
    """weights and inputs: name -> type. The name in the program is also the source."""
    result = Program(
        tuple(Slot(n, n, "shared", t) for n, t in weights.items()),
        tuple(Slot(n, n, "shared", t) for n, t in inputs.items()),
        tuple(nodes),
        tuple(Output(Ref(o), "shared") for o in outputs),
    )
    result.check()
    return result


def classifier() -> Program:
    """Returns a trunk, a head with a computed weight, a size, an unused value, and three outputs."""
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
    """Returns [slot][member]: the same tensor N times where the slot is Shared. Variances are positive."""
    drawn = [
        [draw(s.type, 97 * j + (0 if kinds[s.name] == "shared" else 1 + i), sizes) for i in range(members)]
        for j, s in enumerate(slots)
    ]
    return [[v.abs() + 0.1 for v in row] if s.name == "var" else row for s, row in zip(slots, drawn)]


def of_kind(members: Sequence[torch.Tensor], kind: Kind) -> Any:
    """Returns the values of N members in the form that a wide program takes."""
    return (
        members[0] if kind == "shared" else torch.stack(list(members)) if kind == "stacked" else list(members)
    )


def all_kinds(member_program: Program, **others: Kind) -> dict[str, Kind]:
    """Returns kinds with every slot Shared except those given."""
    return {s.name: others.get(s.name, "shared") for s in (*member_program.weights, *member_program.inputs)}


def plan(**regions: Sequence[str]) -> Plan:
    """Returns a plan with these loop regions. All other nodes are wide."""
    return Plan(
        "cpu",
        "shared",
        (1, None),
        tuple(Region(n, "loop", tuple(nodes), "requested") for n, nodes in regions.items()),
    )


def lowered(member_program: Program, kinds: Mapping[str, Kind], chosen: Plan, members: int = 3) -> Lowered:
    return lower([member_program], [0] * members, kinds, chosen, SIZES)


def check(
    member_program: Program,
    wide: Program,
    kinds: Mapping[str, Kind],
    members: int = 3,
    sizes: Mapping[str, int] = SIZES,
    *,
    prologue: bool = True,
) -> None:
    """Checks that the outputs of the wide program equal those of each member.

    Where they differ by more than 1e-5, both are compared with the member in float64. The largest error of
    the wide program may be four times the largest error of the member, plus four ulp of the output's rms
    (DESIGN, "Correct means").
    """
    weights, inputs = (
        values(member_program.weights, kinds, members, sizes),
        values(member_program.inputs, kinds, members, sizes),
    )
    by_name = {s.source: of_kind(w, kinds[s.name]) for s, w in zip(member_program.weights, weights)}
    run = Executable(wide, by_name, CPU, prologue=prologue)
    got = run.run(*(of_kind(x, kinds[s.name]) for s, x in zip(member_program.inputs, inputs)))
    member, raised = graph_module(member_program, CPU), graph_module(raise_program(member_program), CPU)
    for i in range(members):
        with torch.inference_mode():
            expected = member(*(w[i] for w in weights), *(x[i] for x in inputs))
        assert len(got) == len(expected)
        for number, (g, w, o) in enumerate(zip(got, expected, wide.outputs)):
            answer = g if o.kind == "shared" else g[i]
            if not torch.allclose(answer, w, rtol=1e-5, atol=1e-6):
                exact = raised(*(v[i].double() for v in (*weights, *inputs)))[number]
                member_error = float((w.double() - exact).abs().max())
                ulp = torch.finfo(w.dtype).eps * float(exact.square().mean().sqrt())
                assert float((answer.double() - exact).abs().max()) <= 4 * member_error + 4 * ulp


def stacked_weights(member_program: Program, **others: Kind) -> dict[str, Kind]:
    """Returns kinds with every weight Stacked and every input Shared except those given."""
    weights: dict[str, Kind] = {s.name: "stacked" for s in member_program.weights}
    return all_kinds(member_program, **{**weights, **others})


def check_forms(
    member_program: Program,
    wide: Program,
    kinds: Mapping[str, Kind],
    members: int = 3,
    sizes: Sequence[Mapping[str, int]] = (SIZES,),
) -> None:
    """Checks a wide program as it is, after a round trip, and as ATen ops, with weights that are computed at
    load or in each call.
    """
    again, plain = Program.from_json(wide.to_json()), decompose(wide)
    for form in (again, plain):
        form.check()
    assert not [n.op for n in all_nodes(plain) if n.op.startswith("widepack.")]
    for form in (wide, again, plain):
        for prologue in (True, False):
            for size in sizes:
                check(member_program, form, kinds, members, size, prologue=prologue)
