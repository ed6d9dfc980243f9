"""Tests the writes that overwrite a value: the answers are those of the ops that copy."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
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


def test_what_is_written_may_change_before_the_whole_is_written() -> None:
    """`w` stands for two nodes. Between them, another write overwrites what it writes."""
    nodes = [
        node("v", "exp.default", "x"),
        node("p", "slice.Tensor", "v", 1, 0, 3),
        node("a", "slice.Tensor", "x", 1, 0, 3),
        node("b", "select.int", "a", 2, 1),
        node("h", "exp.default", "b"),
        node("z", "select.int", "b", 1, 2),
        node("q", "select_scatter.default", "p", "h", 2, 0),
        node("h2", "select_scatter.default", "h", "z", 1, 0),
        node("w", "slice_scatter.default", "v", "q", 1, 0, 3),
    ]
    made = program(nodes, "w", "h2")
    assert set(in_place_writes(made)[0]) == {"h2"}
    same(made)


def test_a_part_of_a_reshaped_part_of_a_view() -> None:
    nodes = [
        node("m", "exp.default", "x"),
        node("v", "transpose.int", "m", 0, 1),
        node("p", "select.int", "v", 1, 0),
        Node("r", "aten.view.default", (Ref("p"), [2, 2, 5])),
        node("h", "select.int", "x", 0, 1),
        node("i", "slice.Tensor", "h", 0, 0, 2),
        node("s", "select_scatter.default", "r", "i", 1, 1),
        Node("b", "aten.reshape.default", (Ref("s"), [4, 5])),
        node("w", "select_scatter.default", "v", "b", 1, 0),
    ]
    made = program(nodes, "w")
    found, inside = in_place_writes(made)
    assert same(made) == 1 and len(found["w"].views) == 3 and inside == {"s", "b"}


def test_a_reshape_that_must_copy_is_not_written_through() -> None:
    nodes = [
        node("m", "exp.default", "x"),
        node("v", "transpose.int", "m", 1, 2),
        node("p", "slice.Tensor", "v", 0, 0, 2),
        Node("r", "aten.reshape.default", (Ref("p"), [2, 20])),
        node("h", "select.int", "m", 0, 1),
        node("e", "exp.default", "h"),
        Node("i", "aten.reshape.default", (Ref("e"), [20])),
        node("s", "select_scatter.default", "r", "i", 0, 1),
        Node("b", "aten.reshape.default", (Ref("s"), [2, 5, 4])),
        node("w", "slice_scatter.default", "v", "b", 0, 0, 2),
    ]
    assert same(program(nodes, "w")) == 1


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


class Draw:
    """Draws a program of views, writes and arithmetic."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes = [node("v0", "exp.default", "x"), node("v1", "zeros_like.default", "x")]
        self.shapes: dict[str, tuple[int, ...]] = {"x": SHAPE, "v0": SHAPE, "v1": SHAPE}

    def add(self, op: str, shape: tuple[int, ...], base: str, *args: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(node(name, op, base, *args))
        self.shapes[name] = shape
        return name

    def one(self, shape: tuple[int, ...] | None = None) -> str:
        """Draws a value, one of the last three more often: older ones are overwritten no more."""
        fitting = [n for n, s in self.shapes.items() if shape in (None, s)]
        return self.draw(st.sampled_from(fitting[-3:] if self.draw(st.booleans()) else fitting))

    def part(self, base: str) -> tuple[str, tuple[int, ...], tuple[Any, ...]]:
        """Draws a part of a value: the op that reads it, its shape, and the arguments of the op."""
        shape = self.shapes[base]
        dim = self.draw(st.integers(0, len(shape) - 1))
        start = self.draw(st.integers(0, shape[dim] - 1))
        if len(shape) > 1 and self.draw(st.booleans()):
            return "select.int", shape[:dim] + shape[dim + 1 :], (dim, start)
        end = self.draw(st.integers(start + 1, shape[dim]))
        return "slice.Tensor", (*shape[:dim], end - start, *shape[dim + 1 :]), (dim, start, end)

    def reshaped(self, base: str) -> str:
        """Draws a value with two dims in one, or one dim in two, or with other order of the dims."""
        shape = self.shapes[base]
        dim = self.draw(st.integers(0, len(shape) - 1))
        how = self.draw(st.sampled_from(["join", "part", "transpose", "expand"]))
        if how == "transpose":
            last = len(shape) - 1
            dims = list(range(len(shape)))
            dims[dim], dims[last] = last, dim
            return self.add("transpose.int", tuple(shape[d] for d in dims), base, dim, last)
        if how == "expand" and shape[dim] == 1:
            made = (*shape[:dim], 3, *shape[dim + 1 :])
            return self.add("expand.default", made, base, list(made))
        if how == "join" and dim + 1 < len(shape):
            made = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        elif shape[dim] % 2 == 0:
            made = (*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :])
        else:
            return self.add("alias.default", shape, base)
        return self.add("reshape.default", made, base, list(made))

    def write(self, base: str, depth: int = 0) -> str | None:
        """Writes into a part of a value, or into a part of a part, by way of a reshape or not."""
        op, shape, place = self.part(base)
        source: str | None = None
        if depth < 2 and self.draw(st.booleans()):
            part = self.add(op, shape, base, *place)
            inner = self.reshaped(part) if self.draw(st.booleans()) else part
            source = self.write(inner, depth + 1)
            if source is not None and prod(self.shapes[source]) != prod(shape):
                source = None
            elif source is not None and self.shapes[source] != shape:
                source = self.add("reshape.default", shape, source, list(shape))
        if source is None:
            if shape not in self.shapes.values():
                return None
            source = self.one(shape)
        if self.draw(st.booleans()):
            self.step()
        scatter = "select_scatter.default" if op == "select.int" else "slice_scatter.default"
        return self.add(scatter, self.shapes[base], base, source, *place)

    def step(self) -> None:
        """Adds a view, or a write, or a sum."""
        base = self.one()
        how = self.draw(
            st.sampled_from(["part", "write", "write", "write", "write", "add", "exp", "reshape"])
        )
        if how == "write":
            self.write(base)
        elif how == "part":
            op, shape, place = self.part(base)
            self.add(op, shape, base, *place)
        elif how == "add":
            self.add("add.Tensor", self.shapes[base], base, self.one(self.shapes[base]))
        elif how == "exp":
            self.add("exp.default", self.shapes[base], base)
        else:
            self.reshaped(base)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws a program of views, writes and arithmetic."""
    made = Draw(draw)
    for _ in range(draw(st.integers(2, 12))):
        made.step()
    names = list(made.shapes)[-4:]
    return program(made.nodes, *draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))


@pytest.mark.extended
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


@pytest.mark.extended
def test_a_written_loop_of_a_network(tmp_path: Any) -> None:
    members, paths = [], []
    for i in range(3):
        torch.manual_seed(i)
        members.append(Scan().eval())
        paths.append(tmp_path / f"m{i}.pt")
        torch.save(members[-1].state_dict(), paths[-1])
    out = tmp_path / "e.wide"
    widepack.build(paths, out, model=Scan, inputs=["x=float32[B, 6, 8]"], pt2=False, budget=0)
    ens = widepack.load(out)
    x = torch.randn(4, 6, 8)
    with torch.no_grad():
        wanted = torch.stack([m(x) for m in members])
    for _ in range(2):
        torch.testing.assert_close(ens(x), wanted)
