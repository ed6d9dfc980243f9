"""Tests the writes that overwrite a value: the answers are those of the ops that copy."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import widepack
from widepack.runtime.graph_module import evaluate, graph_module
from widepack.runtime.in_place_writes import in_place_writes
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

CPU = torch.device("cpu")
SHAPE = (3, 4, 5)


def program(nodes: list[Node], *outputs: str) -> Program:
    slot = Slot("x", "x", "shared", "")
    return Program((), (slot,), tuple(nodes), tuple(Output(Ref(o), "shared") for o in outputs))


def node(name: str, op: str, *args: Any) -> Node:
    return Node(name, f"aten.{op}", tuple(Ref(a) if isinstance(a, str) else a for a in args))


def same(made: Program) -> int:
    """Checks that a program answers as before, twice. Returns the number of writes in place."""
    x = torch.randn(SHAPE)
    kept = x.clone()
    run = graph_module(made, CPU, in_place=True).forward
    with torch.inference_mode():
        wanted = [v.clone() for v in evaluate(made, [x], CPU)]
        for _ in range(2):
            for found, want in zip(run(x), wanted, strict=True):
                assert torch.equal(found, want)
    assert torch.equal(x, kept)
    return len(in_place_writes(made)[0])


def test_a_loop_of_writes_copies_nothing() -> None:
    nodes = [node("v0", "zeros_like.default", "x")]
    for t in range(4):
        nodes += [
            node(f"p{t}", "select.int", "x", 1, t),
            node(f"h{t}", "exp.default", f"p{t}"),
            node(f"v{t + 1}", "select_scatter.default", f"v{t}", f"h{t}", 1, t),
        ]
    assert same(program(nodes, "v4")) == 4


def test_inputs_are_never_overwritten() -> None:
    first = node("a", "select.int", "x", 0, 1)
    written = node("b", "select_scatter.default", "x", "a", 0, 2)
    again = node("c", "select_scatter.default", "b", "a", 0, 0)
    made = program([first, written, again], "c")
    assert same(made) == 1 and set(in_place_writes(made)[0]) == {"c"}


def test_values_that_are_read_later_are_not_overwritten() -> None:
    nodes = [
        node("v", "exp.default", "x"),
        node("old", "select.int", "v", 0, 0),
        node("h", "select.int", "x", 0, 1),
        node("w", "select_scatter.default", "v", "h", 0, 0),
    ]
    assert same(program([*nodes, node("y", "add.Tensor", "w", "old")], "y")) == 0
    assert same(program(nodes, "w", "v")) == 0
    assert same(program(nodes, "w", "old")) == 0
    assert same(program(nodes, "w")) == 1


def test_a_part_that_is_written_over_another_part_of_the_same_value() -> None:
    nodes = [
        node("v", "exp.default", "x"),
        node("a", "slice.Tensor", "v", 1, 0, 3),
        node("w", "slice_scatter.default", "v", "a", 1, 1, 4),
    ]
    assert same(program(nodes, "w")) == 0


def test_an_expanded_value_is_not_overwritten() -> None:
    nodes = [
        node("v", "exp.default", "x"),
        node("r", "slice.Tensor", "v", 0, 0, 1),
        node("e", "expand.default", "r", [3, 4, 5]),
        node("h", "select.int", "x", 0, 1),
        node("w", "select_scatter.default", "e", "h", 0, 0),
    ]
    assert same(program(nodes, "w")) == 0


def test_the_size_of_a_value_is_no_part_of_its_memory() -> None:
    nodes = [
        node("v", "exp.default", "x"),
        node("n", "sym_size.int", "v", 1),
        Node("m", "operator.sub", (Ref("n"), 1)),
        node("h", "select.int", "x", 0, 1),
        Node("e", "aten.expand.default", (Ref("h"), [Ref("n"), 5])),
        node("w", "select_scatter.default", "v", "e", 0, 0),
        node("f", "slice.Tensor", "x", 1, 0, 1),
        Node("u", "aten.slice_scatter.default", (Ref("w"), Ref("f"), 1, Ref("m"), Ref("n"))),
    ]
    assert same(program(nodes, "u")) == 2


def test_a_part_of_a_part() -> None:
    nodes = [
        node("v", "exp.default", "x"),
        node("p", "slice.Tensor", "v", 1, 0, 3),
        node("q", "slice.Tensor", "p", 2, 1, 5, 2),
        node("h", "select.int", "x", 0, 1),
        node("i", "slice.Tensor", "h", 0, 0, 3),
        node("j", "slice.Tensor", "i", 1, 0, 2),
        node("r", "select_scatter.default", "q", "j", 0, 2),
        node("s", "slice_scatter.default", "p", "r", 2, 1, 5, 2),
        node("w", "slice_scatter.default", "v", "s", 1, 0, 3),
    ]
    made = program(nodes, "w")
    found, inside = in_place_writes(made)
    assert same(made) == 1 and len(found["w"].views) == 3 and inside == {"r", "s"}
    assert same(program(nodes, "w", "r")) == 1 and in_place_writes(program(nodes, "w", "r"))[1] == {"s"}
    other = [*nodes[:-1], node("w", "slice_scatter.default", "v", "s", 1, 1, 4)]
    assert same(program(other, "w")) == 1  # another part: the inner value is made, then written


def test_results_that_may_be_views_are_not_overwritten() -> None:
    """`reshape` and `dropout` outside of training may return what they read."""
    for op, rest in (("reshape.default", ([3, 4, 5],)), ("dropout.default", (0.5, False))):
        nodes = [
            node("v", op, "x", *rest),
            node("h", "exp.default", "x"),
            node("s", "select.int", "h", 0, 1),
            node("w", "select_scatter.default", "v", "s", 0, 0),
        ]
        assert same(program(nodes, "w")) == 0


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws a program of views, writes and arithmetic over values of three dims."""
    nodes = [node("v0", "exp.default", "x"), node("v1", "zeros_like.default", "x")]
    shapes: dict[str, tuple[int, ...]] = {"x": SHAPE, "v0": SHAPE, "v1": SHAPE}
    for number in range(2, draw(st.integers(4, 18))):
        name = f"v{number}"
        base = draw(st.sampled_from(sorted(shapes)))
        shape = shapes[base]
        dim = draw(st.integers(0, 2))
        start = draw(st.integers(0, shape[dim] - 1))
        end = draw(st.integers(start + 1, shape[dim]))
        part = tuple(end - start if d == dim else s for d, s in enumerate(shape))
        fitting = sorted(n for n, s in shapes.items() if s == part)
        how = draw(st.sampled_from(["slice", "write", "write", "write", "add", "view"]))
        if how == "write" and fitting:
            source = draw(st.sampled_from(fitting))
            nodes.append(node(name, "slice_scatter.default", base, source, dim, start, end))
            shapes[name] = shape
        elif how == "slice":
            nodes.append(node(name, "slice.Tensor", base, dim, start, end))
            shapes[name] = part
        elif how == "add":
            other = draw(st.sampled_from(sorted(n for n, s in shapes.items() if s == shape)))
            nodes.append(node(name, "add.Tensor", base, other))
            shapes[name] = shape
        else:
            nodes.append(node(name, "view.default", base, list(shape)))
            shapes[name] = shape
            if nodes[-1].op == "aten.view.default" and base != "x":
                nodes[-1] = node(name, "alias.default", base)
    answers = draw(st.lists(st.sampled_from(sorted(set(shapes) - {"x"})), min_size=1, max_size=3))
    return program(nodes, *answers)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_drawn_programs_answer_as_before(made: Program) -> None:
    same(made)


class Scan(torch.nn.Module):
    """A recurrent loop that writes each step into its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.step(h) + x[:, t])
            out[:, t] = h
            out[:, t].mul_(2.0)
        return out


def test_a_written_loop_of_a_network(tmp_path: Any) -> None:
    members, paths = [], []
    for i in range(3):
        torch.manual_seed(i)
        members.append(Scan().eval())
        paths.append(tmp_path / f"m{i}.pt")
        torch.save(members[-1].state_dict(), paths[-1])
    out = tmp_path / "e.wide"
    widepack.build(paths, out, model=Scan, inputs=["x=float32[B, 6, 8]"], pt2=False, race=False)
    ens = widepack.load(out)
    x = torch.randn(4, 6, 8)
    with torch.no_grad():
        wanted = torch.stack([m(x) for m in members])
    for _ in range(2):
        torch.testing.assert_close(ens(x), wanted)
