"""Tests that a program of one member, run for each member, gives what the program with loops gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from widepack.backends import backend
from widepack.backends.flat import flatten_loops
from widepack.backends.member_inputs import canonical, with_member_inputs
from widepack.backends.member_loops import cut, is_divisible, of_members, one_member
from widepack.backends.onnx_backend import Sessions
from widepack.backends.task import Sizes, Task
from widepack.runtime.graph_module import graph_module
from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot

CPU = torch.device("cpu")
N = 3


def slot(name: str, kind: Kind = "shared", type_: str = "") -> Slot:
    return Slot(name, name, kind, type_)


def body(*nodes: Node, reads: dict[str, Kind], gives: dict[str, Kind]) -> Program:
    outputs = tuple(Output(Ref(name), kind) for name, kind in gives.items())
    return Program((), tuple(slot(n, k) for n, k in reads.items()), nodes, outputs)


def op(name: str, op: str, *args: Any) -> Node:
    return Node(name, op, args)


def loop(name: str, body: Program, *args: Any) -> Node:
    return Node(name, "loop", args, body=body)


def part(name: str, loop: str, number: int = 0) -> Node:
    return op(name, "operator.getitem", Ref(loop), number)


X, W, Y = Ref("x"), Ref("w"), Ref("y")
LINEAR = body(op("y", "aten.mm.default", X, W), reads={"x": "shared", "w": "stacked"}, gives={"y": "stacked"})
EACH = body(op("y", "aten.mm.default", X, W), reads={"x": "stacked", "w": "stacked"}, gives={"y": "stacked"})
LIST = body(
    op("y", "aten.mm.default", X, W),
    reads={"x": "shared", "w": "stacked"},
    gives={"y": "ragged", "x": "ragged"},
)
FROM_LIST = body(op("y", "aten.relu.default", X), reads={"x": "ragged"}, gives={"y": "stacked"})
WEIGHT, INPUT = slot("w", "stacked", "float32[4,4]"), slot("x", type_="float32[B,4]")
INPUTS = slot("x", "stacked", "float32[B,4]")

PROGRAMS: dict[str, Any] = {
    "one loop": ((INPUT,), (loop("l", LINEAR, X, W), part("y", "l")), Y),
    "inputs of each member": ((INPUTS,), (loop("l", EACH, X, W), part("y", "l")), Y),
    "nodes before, between and after": (
        (INPUT,),
        (
            op("z", "aten.sin.default", X),
            loop("l", LINEAR, Ref("z"), W),
            part("a", "l"),
            op("b", "aten.tanh.default", Ref("a")),
            loop("m", EACH, Ref("b"), W),
            part("c", "m"),
            op("y", "aten.add.Tensor", Ref("c"), Ref("b")),
        ),
        Y,
    ),
    "a list that another loop reads": (
        (INPUT,),
        (loop("l", LIST, X, W), part("a", "l"), loop("m", FROM_LIST, Ref("a")), part("y", "m")),
        Y,
    ),
    "lists as outputs": ((INPUT,), (loop("l", LIST, X, W), part("y", "l"), part("z", "l", 1)), Ref("z"), Y),
}

DEPENDENT = ("nodes before, between and after", "sums of members")
"""The programs whose members cannot run without the others."""


def program(inputs: tuple[Slot, ...], nodes: tuple[Node, ...], *outputs: Ref) -> Program:
    return Program((WEIGHT,), inputs, nodes, tuple(Output(o, "stacked") for o in outputs), N)


def rows(value: Any, member: int) -> Any:
    return value[member]  # of a tensor of all members, or of a list


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_member_of_the_program_of_one(name: str) -> None:
    inputs, nodes, *outputs = PROGRAMS[name]
    wide = program(inputs, nodes, *outputs)
    w, x = torch.randn(N, 4, 4), torch.randn(N, 2, 4) if inputs[0].kind == "stacked" else torch.randn(2, 4)
    want = graph_module(wide, CPU).forward(w, x)
    made = one_member(wide, {"w": w})
    assert made is not None
    one, loops, shape = made
    assert not any(n.body for n in one.nodes) and loops.members == N
    for i in range(N):
        weights = [loops.weights[s.name][i] if s.name in loops.weights else w for s in one.weights]
        results = graph_module(one, CPU).forward(*weights, x.roll(-i, 0) if x.dim() == 3 else x)
        for whole, leaves in zip(want, shape):
            numbers = leaves if isinstance(leaves, list) else [leaves] * N
            member = loops.outputs[numbers[i].number]
            found = results[numbers[i].number]
            assert member in (-1, i)
            torch.testing.assert_close(found[0] if member < 0 else found, rows(whole, i))


def test_a_program_is_cut_at_its_loops() -> None:
    wide = program(*PROGRAMS["nodes before, between and after"][:2], Y)
    made = one_member(wide, {"w": torch.randn(N, 4, 4)})
    assert made is not None
    one, loops, _ = made
    inner = cut(one, loops)
    assert len(inner.inputs) == 1 + len(loops.selects) + len(loops.joins) == 4
    names = {s.name for s in (*inner.weights, *inner.inputs)} | {n.name for n in inner.nodes}
    assert {o.value.name for o in inner.outputs} <= names
    assert "z" not in of_members(one, loops) and "y" not in of_members(one, loops)
    assert {n.name for n in one.nodes if n.op == "aten.mm.default"} <= of_members(one, loops)


def differing_numbers() -> tuple[Program, Any]:
    scaled = body(
        op("y", "aten.mul.Tensor", W, Ref("k")), reads={"w": "stacked", "k": "ragged"}, gives={"y": "stacked"}
    )
    return program((INPUT,), (loop("l", scaled, W, [1, 2, 2]), part("y", "l")), Y), torch.randn(N, 4, 4)


def differing_shapes() -> tuple[Program, Any]:
    wide = program((INPUT,), (loop("l", LINEAR, X, W), part("y", "l")), Y)
    return wide, [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 5)]


def a_list_read_outside() -> tuple[Program, Any]:
    nodes = (loop("l", LIST, X, W), part("a", "l"), op("y", "aten.stack.default", Ref("a")))
    return program((INPUT,), nodes, Y), torch.randn(N, 4, 4)


def all_results_returned() -> tuple[Program, Any]:
    return program((INPUT,), (loop("l", LINEAR, X, W),), Ref("l")), torch.randn(N, 4, 4)


def a_list_of_values() -> tuple[Program, Any]:
    nodes = (loop("l", LINEAR, X, W), part("a", "l"), loop("m", FROM_LIST, [Ref("a")] * N), part("y", "m"))
    return program((INPUT,), nodes, Y), torch.randn(N, 4, 4)


def random_numbers() -> tuple[Program, Any]:
    drawn = body(
        op("r", "aten.rand_like.default", X),
        op("y", "aten.mm.default", Ref("r"), W),
        reads={"x": "shared", "w": "stacked"},
        gives={"y": "stacked"},
    )  # each member draws its own
    return program((INPUT,), (loop("l", drawn, X, W), part("y", "l")), Y), torch.randn(N, 4, 4)


@pytest.mark.parametrize(
    "make",
    [
        differing_numbers,
        differing_shapes,
        a_list_read_outside,
        random_numbers,
        all_results_returned,
        a_list_of_values,
    ],
)
def test_bodies_that_differ_between_members_are_written_out(make: Any) -> None:
    wide, weight = make()
    assert one_member(wide, {"w": weight}) is None
    assert flatten_loops(wide, [weight], "onnxruntime", "the program").loops is None


def test_a_part_of_a_weight_has_its_numbers_in_memory() -> None:
    weight = torch.randn(N, 4, 4, dtype=torch.complex64).conj().imag
    assert weight.is_neg()
    made = one_member(program(*PROGRAMS["one loop"][:2], Y), {"w": weight})
    assert made is not None
    for parts in made[1].weights.values():
        assert not any(p.is_neg() for p in parts) and torch.equal(torch.stack([*parts]), weight)


def task(wide: Program, weight: torch.Tensor, example: torch.Tensor, cache: Path, workers: int) -> Task:
    graph = graph_module(wide, CPU)

    def draw(sizes: Sizes) -> list[torch.Tensor]:
        shape = [*example.shape[:-2], sizes["B"], 4]
        return [torch.randn(shape) if example.is_floating_point() else torch.randint(0, 4, shape)]

    def differ(found: Any, want: Any) -> str:
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(list(a), list(b), rtol=1e-4, atol=1e-5)
        return ""

    return Task(
        program=wide,
        weights=lambda: [weight],
        device=CPU,
        content="a program",
        pattern="shared",
        title="the program",
        eager=lambda *inputs: list(graph.forward(weight, *inputs)),
        dims={"B": (1, None, 2)},
        example={"B": 2},
        guards=(),
        inputs=draw,
        differ=differ,
        compile=True,
        cache=cache,
        workers=workers,
    )


SIZES = body(
    op("n", "aten.sym_size.int", W, 0),
    op("y", "aten.mul.Tensor", X, Ref("n")),
    reads={"x": "shared", "w": "stacked"},
    gives={"y": "stacked"},
)
WEIGHTS = body(
    op("y", "aten.mm.default", X, W),
    reads={"x": "shared", "w": "stacked"},
    gives={"y": "stacked", "w": "stacked"},
)
WHOLE = body(
    op("s", "aten.sum.dim_IntList", Ref("all"), [0]),
    op("y", "aten.add.Tensor", X, Ref("s")),
    reads={"x": "stacked", "all": "shared"},
    gives={"y": "stacked"},
)
OF_ALL_MEMBERS: dict[str, Any] = {
    "sums of members": (
        (INPUT,),
        (
            loop("l", LINEAR, X, W),
            part("a", "l"),
            op("b", "aten.cumsum.default", Ref("a"), 0),
            loop("m", EACH, Ref("b"), W),
            part("y", "m"),
        ),
        Y,
    ),
    "an input that other nodes read": (
        (INPUTS,),
        (loop("l", EACH, X, W), part("y", "l"), op("z", "aten.sum.dim_IntList", X, [0])),
        Y,
        Ref("z"),
    ),
    "an input that a body reads whole": ((INPUTS,), (loop("l", WHOLE, X, X), part("y", "l")), Y),
    "an input as an output": ((INPUTS,), (loop("l", EACH, X, W), part("y", "l")), Y, X),
}
OF_WEIGHTS: dict[str, Any] = {
    "weights as an output": (
        (INPUT,),
        (loop("l", WEIGHTS, X, W), part("y", "l"), part("z", "l", 1)),
        Y,
        Ref("z"),
    ),
    "sizes of weights": ((INPUT,), (loop("l", SIZES, X, W), part("y", "l")), Y),
}
SESSIONS = PROGRAMS | OF_ALL_MEMBERS | OF_WEIGHTS


@pytest.mark.filterwarnings("ignore")  # warnings of torch's exporter about its own code
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_of_all_members_and_one_of_each_threads_share(
    name: str, workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    inputs, nodes, *outputs = SESSIONS[name]
    wide = program(inputs, nodes, *outputs)
    weight = torch.randn(N, 4, 4)
    x = torch.randn(N, 5, 4) if inputs[0].kind == "stacked" else torch.randn(5, 4)
    given = task(wide, weight, x, tmp_path, workers)
    bound = backend("onnxruntime").bind(given)
    flat = canonical(with_member_inputs(flatten_loops(wide, [weight], "onnxruntime", "the program")))
    assert flat.loops is not None
    assert is_divisible(flat.program, flat.loops) == (name not in DEPENDENT)
    with torch.inference_mode():
        for rows in (1, 5):
            one = x[..., :rows, :]
            given.differ(bound(one), given.eager(one))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_of_one_member_that_is_out_of_range_is_an_error(workers: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    table = body(
        op("y", "aten.embedding.default", W, X),
        reads={"x": "stacked", "w": "stacked"},
        gives={"y": "stacked"},
    )
    indices = slot("x", "stacked", "int64[B,4]")
    wide = program((indices,), (loop("l", table, X, W), part("y", "l")), Y)
    given = task(wide, torch.randn(N, 4, 4), torch.zeros(N, 5, 4, dtype=torch.int64), tmp_path, workers)
    bound = backend("onnxruntime").bind(given)
    x = torch.randint(0, 4, (N, 5, 4))
    given.differ(bound(x), given.eager(x))
    for member in range(N):
        wrong = x.clone()
        wrong[member, 2, 1] = 4
        with pytest.raises(IndexError):
            bound(wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_member_with_other_weights_gets_its_share_anew(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    wide = program((INPUT,), (loop("l", LINEAR, X, W), part("y", "l")), Y)
    weight, x = torch.randn(N, 4, 4), torch.randn(5, 4)
    first = backend("onnxruntime").bind(task(wide, weight, x, tmp_path, 2))
    other = weight.clone()
    other[N - 1] = torch.randn(4, 4)
    given = replace(task(wide, other, x, tmp_path, 2), before=first, member=N - 1)
    second = backend("onnxruntime").bind(given)
    assert isinstance(first, Sessions)
    assert isinstance(second, Sessions)
    assert second.runs[0] is first.runs[0]
    assert second.runs[1] is not first.runs[1]
    with torch.inference_mode():
        given.differ(second(x), given.eager(x))
