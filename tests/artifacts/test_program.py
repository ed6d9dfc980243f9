"""Tests that programs read back equal, and that a reader checks them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import TAGS, Node, Output, Program, Ref, Slot, Tag, refs, substitute

Json = dict[str, Any]


def example() -> Program:
    """Returns a wide program with a loop region, keywords, tags and several outputs."""
    body = Program(
        weights=(),
        inputs=(Slot("a", "x", "stacked", "float32[B,4]"), Slot("w", "head", "ragged", "float32[3,4]")),
        nodes=(
            Node("t", "aten.relu.default", (Ref("a"),)),
            Node("y", "aten.linear.default", (Ref("t"), Ref("w"))),
        ),
        outputs=(Output(Ref("y"), "ragged"),),
    )
    return Program(
        weights=(
            Slot("w_fc", "fc.weight", "stacked", "float32[4,4]"),
            Slot("w_head", "head", "ragged", "float32[3,4]"),
        ),
        inputs=(Slot("x", "x", "shared", "float32[B,4]"),),
        nodes=(
            Node(
                "h",
                "aten.matmul.default",
                (Ref("x"), Ref("w_fc")),
                out="float32[2,B,4]",
                source="net.py:3 in forward",
                member="linear",
            ),
            Node("z", "aten.sum.dim_IntList", (Ref("h"), [-1], False), {"dtype": Tag("dtype", "float32")}),
            Node("loop_0", "loop", (Ref("h"), Ref("w_head")), body=body),
            Node("l", "operator.getitem", (Ref("loop_0"), 0)),
        ),
        outputs=(Output(Ref("l"), "ragged"), Output(Ref("z"), "stacked")),
        members=2,
    )


def refused(data: Any, *words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        Program.from_json(data)
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"
    assert len(str(caught.value)) < 500


def test_the_ops_of_these_tests_are_allowed() -> None:
    assert {
        "aten.linear.default",
        "aten.relu.default",
        "aten.matmul.default",
        "operator.getitem",
        "loop",
    } <= OPS
    assert (
        not {
            "aten.from_file.default",
            "aten.relu_.default",
            "aten.set_.source_Tensor",
            "os.system",
            "operator.attrgetter",
        }
        & OPS
    )


def test_reads_back_what_was_written() -> None:
    assert Program.from_json(json.loads(json.dumps(example().to_json()))) == example()
    assert strict_json.canonical(Program.from_json(example().to_json()).to_json()) == strict_json.canonical(
        example().to_json()
    )


LITERALS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
TAGGED = (
    st.builds(Tag, st.sampled_from(TAGS), st.text("abc123_", min_size=1))
    | st.complex_numbers(allow_nan=False)
    | st.just(Ref("x"))
)
ARGUMENTS = st.recursive(LITERALS | TAGGED, lambda v: st.lists(v, max_size=4), max_leaves=8)


@given(
    st.lists(ARGUMENTS, max_size=4),
    st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), ARGUMENTS, max_size=3),
)
def test_arguments_read_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    program = Program(
        (),
        (Slot("x", "x", "shared", "float32[]"),),
        (Node("y", "aten.relu.default", tuple(args), kwargs),),
        (Output(Ref("y"), "shared"),),
    )
    again = Program.from_json(strict_json.parse(strict_json.canonical(program.to_json()), "program"))
    assert again == program
    assert [type(a) for a in again.nodes[0].args] == [type(a) for a in args], (
        "1, 1.0 and True are different arguments"
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1e308, 0.1])
def test_floats_keep_every_bit(value: float) -> None:
    program = Program((), (), (Node("y", "aten.full.default", ([1], value)),), ())
    again = (
        Program.from_json(strict_json.parse(strict_json.canonical(program.to_json()), "program"))
        .nodes[0]
        .args[1]
    )
    assert again.hex() == value.hex()


def test_values_that_json_cannot_store_are_not_written() -> None:
    with pytest.raises(ArtifactError, match="type set cannot be written"):
        Program((), (), (Node("y", "aten.relu.default", ({1},)),), ()).to_json()


def node(data: Json, i: int = 0) -> Json:
    found: Json = data["nodes"][i]
    return found


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(extra=1), ["expected an object with the keys"]),
        (lambda d: d.pop("members"), ["expected an object with the keys"]),
        (lambda d: d.update(format="widepack.program/2"), ["widepack.program/2", "widepack.program/1"]),
        (lambda d: d.update(members=-1), ["members is not a count"]),
        (lambda d: d.update(members=True), ["members is not a count"]),
        (lambda d: d.update(nodes={}), ["nodes is not a list"]),
        (lambda d: d["weights"][0].pop(), ["a slot needs 4 strings"]),
        (
            lambda d: d["weights"][0].__setitem__(2, "wide"),
            ["slot w_fc", "'wide'", "shared, stacked, ragged"],
        ),
        (lambda d: d["inputs"][0].__setitem__(0, "w_fc"), ["two values have the name 'w_fc'"]),
        (lambda d: d["inputs"][0].__setitem__(0, "x; import os"), ["has a name that is not valid"]),
        (lambda d: d["inputs"][0].__setitem__(0, "x\n"), ["has a name that is not valid"]),
        (lambda d: node(d).update(name="x"), ["two values have the name 'x'"]),
        (lambda d: node(d).update(name="__import__('os')"), ["has a name that is not valid"]),
        (
            lambda d: node(d).update(op="aten.from_file.default"),
            ["node h", "aten.from_file.default", "not on the list"],
        ),
        (lambda d: node(d).update(op="aten.matmul"), ["node h", "not on the list"]),
        (lambda d: node(d).update(op="aten.relu_.default"), ["node h", "not on the list"]),
        (lambda d: node(d).update(op="builtins.eval"), ["node h", "not on the list"]),
        (lambda d: node(d).update(op=["loop"]), ["is not a node"]),
        (lambda d: node(d).update(code="x"), ["is not a node"]),
        (lambda d: node(d).pop("args"), ["is not a node"]),
        (lambda d: node(d).update(args={"ref": "x"}), ["args is not a list"]),
        (lambda d: node(d).update(kwargs=[]), ["is not a node"]),
        (lambda d: node(d).update(kwargs={"a b": 1}), ["keyword 'a b'"]),
        (
            lambda d: node(d).update(args=[{"ref": "z"}]),
            ["node h reads 'z'", "does not exist before the node"],
        ),
        (lambda d: node(d).update(args=[{"ref": "h"}]), ["node h reads 'h'"]),
        (lambda d: node(d).update(args=[{"ref": 3}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{"ref": "x", "str": "x"}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{}]), ["is not an argument"]),
        (lambda d: node(d).update(args=["x"]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{"pickle": "x"}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{"float": "1e5"}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{"complex": [1]}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[{"dtype": None}]), ["is not an argument"]),
        (lambda d: node(d).update(args=[2**63]), ["outside 64 bits"]),
        (lambda d: node(d).update(args=[nested(20)]), ["nested too deep"]),
        (lambda d: node(d).update(body=d), ["nested too deep"]),
        (lambda d: node(d, 2).pop("body"), ["a loop has a body"]),
        (lambda d: node(d).update(body=node(d, 2)["body"]), ["no other op has one"]),
        (lambda d: node(d, 2)["args"].pop(), ["passes 1 values to 2 inputs"]),
        (lambda d: node(node(d, 2)["body"]).update(op="os.system"), ["node t", "not on the list"]),
        (lambda d: node(node(d, 2)["body"]).update(args=[{"ref": "h"}]), ["node t reads 'h'"]),
        (lambda d: d["outputs"].append(3), ["an output is [value, kind]"]),
        (lambda d: d["outputs"][0].__setitem__(0, {"ref": "z9"}), ["an output reads 'z9'"]),
        (lambda d: d["outputs"][0].__setitem__(1, "both"), ["'both'"]),
    ],
)
def test_invalid_values_are_refused(edit: Callable[[Json], object], words: list[str]) -> None:
    data = copy.deepcopy(example().to_json())
    edit(data)
    refused(data, *words)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_complex_numbers_cannot_be_nested() -> None:
    """`{"complex": [...]}` takes only numbers. Other values are an ArtifactError."""
    for part in (None, [1], {"ref": "x"}, {"complex": [1, 2]}, {"str": "1"}):
        data = example().to_json()
        data["nodes"][0]["args"] = [{"complex": [part, 0.0]}]
        refused(data, "is not an argument")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["ref", "x", "loop", "shared", "h"]),
    lambda v: (
        st.lists(v, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ref", "str", "name", "op", "args", "body", "complex", "dtype"]), v, max_size=4
        )
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(
        [
            "format",
            "members",
            "weights",
            "inputs",
            "nodes",
            "outputs",
            ("nodes", 0, "args"),
            ("nodes", 2, "body"),
            ("nodes", 0),
        ]
    ),
    JUNK,
)
def test_no_value_raises_another_exception(where: Any, value: Any) -> None:
    data: Any = copy.deepcopy(example().to_json())
    at = data
    keys = where if isinstance(where, tuple) else (where,)
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    try:
        Program.from_json(data)
    except ArtifactError as e:
        assert str(e).startswith("program: ")


def test_loops_nest_twice_and_no_deeper() -> None:
    def wrapped(inner: Program) -> Program:
        slot = Slot("a", "a", "stacked", "float32[4]")
        nodes = (Node("y", "loop", (Ref("a"),), body=inner),)
        return Program((), (slot,), nodes, (Output(Ref("y"), "stacked"),))

    program = Program(
        (),
        (Slot("a", "a", "stacked", "float32[4]"),),
        (Node("y", "aten.relu.default", (Ref("a"),)),),
        (Output(Ref("y"), "stacked"),),
    )
    for _ in range(2):
        program = wrapped(program)
        assert Program.from_json(program.to_json()) == program
    with pytest.raises(ArtifactError, match="nested more than twice"):
        wrapped(program).check()


def test_refs_and_substitute() -> None:
    value = (Ref("a"), [Ref("b"), 1], {"k": Ref("c")}, Tag("dtype", "float32"))
    assert list(refs(value)) == ["a", "b", "c"]
    assert substitute(value, str.upper) == ("A", ["B", 1], {"k": "C"}, Tag("dtype", "float32"))
