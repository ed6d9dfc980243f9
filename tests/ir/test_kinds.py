"""Tests kinds: a value that may differ by member is never Shared."""

from __future__ import annotations

import itertools

import pytest
from small import all_kinds, classifier, lowered, node, plan, program

from widepack import primitives as primitives  # fills the registry
from widepack.ir.kinds import SIZES, kinds, reaches, weights_only
from widepack.registry.registry import REGISTRY
from widepack_artifacts.program import Kind, Node, Program, Ref, refs

ORDER: tuple[Kind, ...] = ("shared", "stacked", "ragged")


def one(kind: Kind, *nodes: Node) -> dict[str, Kind]:
    net = program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, nodes, [nodes[-1].name])
    return kinds(net, {"w": kind, "x": "shared"})


def test_weights_have_the_kinds_of_the_checkpoints_and_inputs_those_of_the_pattern() -> None:
    net = classifier()
    for chosen in itertools.product(ORDER[:2], repeat=2):
        slots = all_kinds(net, w_head=chosen[0], x=chosen[1])
        assert {n: kinds(net, slots)[n] for n in slots} == slots


@pytest.mark.parametrize(("x", "head", "want"), [
    ("shared", "shared", {"made": "shared", "y": "shared", "v": "shared"}),
    ("shared", "stacked", {"made": "shared", "y": "stacked", "v": "stacked"}),
    ("stacked", "shared", {"made": "stacked", "y": "stacked", "v": "stacked"}),
    ("shared", "ragged", {"made": "shared", "y": "ragged", "v": "ragged"}),
    ("stacked", "ragged", {"made": "stacked", "y": "ragged", "v": "ragged"}),
])  # fmt: skip
def test_a_value_is_of_the_highest_kind_that_it_reads(x: Kind, head: Kind, want: dict[str, Kind]) -> None:
    net = classifier()
    found = kinds(net, all_kinds(net, x=x, w_head=head))
    assert {n: found[n] for n in want} == want
    assert (found["h"], found["doubled"], found["b"], found["twice"]) == ("shared", head, "shared", "shared")


def test_sizes_of_a_stacked_value_are_shared_and_of_a_ragged_one_ragged() -> None:
    cases: tuple[tuple[Kind, Kind], ...] = (("stacked", "shared"), ("ragged", "ragged"))
    for kind, want in cases:
        found = one(
            kind,
            node("s", "sym_size.int", Ref("w"), 0),
            node("z", "zeros_like", Ref("w")),
            node("y", "add.Scalar", Ref("z"), Ref("s")),
        )
        assert {found[n] for n in ("s", "z", "y")} == {want}


def test_a_tensor_filled_with_a_number_of_each_member_is_stacked() -> None:
    found = one(
        "stacked",
        node("m", "sum", Ref("w")),
        node("f", "full_like", Ref("w"), Ref("m")),
        node("n", "new_full", Ref("x"), [2], Ref("m")),
    )
    assert (found["f"], found["n"]) == ("stacked", "stacked")


def test_random_numbers_are_stacked() -> None:
    found = one(
        "shared",
        node("r", "rand_like", Ref("x")),
        node("n", "randn", [2, 2]),
        node("y", "add.Tensor", Ref("x"), Ref("r")),
    )
    assert {found[n] for n in ("r", "n", "y")} == {"stacked"}


def test_a_ragged_value_in_a_list_makes_the_result_ragged() -> None:
    assert one("ragged", node("c", "cat", [Ref("x"), Ref("w")]))["c"] == "ragged"


@pytest.mark.parametrize("chosen", list(itertools.product(ORDER, repeat=3)))
def test_only_sizes_have_a_lower_kind_than_their_arguments(chosen: tuple[Kind, ...]) -> None:
    net = classifier()
    found = kinds(net, all_kinds(net, **dict(zip(("w_trunk", "w_head", "x"), chosen))))
    for n in net.nodes:
        highest = max((ORDER.index(found[r]) for r in refs((n.args, n.kwargs))), default=0)
        assert ORDER.index(found[n.name]) == highest or n.op in SIZES


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("chosen", list(itertools.product(ORDER[:2], repeat=3)))
def test_lowered_values_have_the_kinds_of_the_analysis(chosen: tuple[Kind, ...]) -> None:
    net = classifier()
    slots = all_kinds(net, **dict(zip(("w_trunk", "w_head", "x"), chosen)))
    found = lowered(net, slots, plan())
    assert [o.kind for o in found.program.outputs] == [
        kinds(net, slots)[next(refs(o.value))] for o in net.outputs
    ]


def test_every_op_that_reads_sizes_only_has_a_rule() -> None:
    assert sorted(SIZES - set(REGISTRY)) == []


def test_the_prologue_contains_the_nodes_that_depend_on_weights_only() -> None:
    net = classifier()
    assert weights_only(net) == {s.name for s in net.weights} | {"h", "doubled"}
    noisy = program(
        {"w": "float32[4]"},
        {},
        [
            node("n", "rand_like", Ref("w")),
            node("y", "mul.Tensor", Ref("w"), Ref("n")),
            node("z", "ones", [2]),
        ],
        ["y", "z"],
    )
    assert weights_only(noisy) == {"w", "z"}  # a draw at load would give the same numbers in every call


def test_reaches_follows_sizes_too() -> None:
    net: Program = classifier()
    assert reaches(net, {"x"}) == {"x", "made", "r", "y", "dead", "z", "b", "twice", "v", "total"}
    assert reaches(net, {"w_head"}) == {"w_head", "doubled", "y", "dead", "z", "v", "total"}
    assert reaches(net, set()) == set()
