"""Tests attacks 83 to 89 of ATTACKS.md: sizes that expand, what only `route` runs or reads, parts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import SELF, refused
from forged import Forged, node, ref

from widepack import load
from widepack.errors import ArtifactError, ProbeError, UsageError
from widepack.rows import trials
from widepack.rows.call import MixesRows
from widepack.rows.walk import walk
from widepack.spec.draws import draw_all
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

SIZE = node("b", "aten.sym_size.int", ref("x"), 0)


def saying(forged: Forged) -> Forged:
    """Lets the file say that its rows are independent."""
    forged.entry["rows"] = {"dim": "B", "independent": True, "proved": True, "reason": ""}
    forged.manifest["version"] = [1, 2]
    return forged


def member(nodes: list[dict[str, Any]], added: str) -> Forged:
    """Returns an artifact with nodes in its member program, and one of their values in the answer."""
    forged = Forged().add(*nodes, start="programs/member.")
    for program in forged.programs("programs/member."):
        output = program["outputs"][0]
        program["nodes"].append(node("zy", "aten.add.Tensor", output[0], ref(added)))
        program["outputs"][0] = [ref("zy"), output[1]]
    return forged


def lowered_at_load(forged: Forged) -> Forged:
    """Removes the wide programs."""
    forged.entry["wide"] = []
    return forged


def power_of_a_sum(terms: int, exponent: int) -> list[dict[str, Any]]:
    """Nodes of a small size: its expression has few terms, and C(terms + exponent, exponent) expanded."""
    nodes = [SIZE]
    for i in range(terms):
        nodes.append(node(f"a{i}", "operator.add", ref("b"), i + 1))
        nodes.append(node(f"f{i}", "operator.floordiv", ref(f"a{i}"), i + 3))
        last = f"s{i - 1}" if i > 1 else f"f{i - 1}"
        if i:
            nodes.append(node(f"s{i}", "operator.add", ref(last), ref(f"f{i}")))
    return [
        *nodes,
        node("p", "operator.pow", ref(f"s{terms - 1}"), exponent),
        node("q", "operator.floordiv", ref("p"), 2**60),
        node("q1", "operator.add", ref("q"), 1),
        node("r", "operator.mul", ref("b"), ref("q1")),
        node("e", "aten.full.default", [ref("r"), 3], 0.0, device=SELF),
        node("t", "aten.sum.default", ref("e")),
    ]


def product_of_sums(terms: int) -> list[dict[str, Any]]:
    """Nodes of a view that multiplies sizes: each has few terms, and their product many."""
    nodes = power_of_a_sum(terms, 1)[:-5]
    sizes = []
    for i in range(12):
        nodes.append(node(f"z{i}", "operator.mod", ref(f"s{terms - 1}"), 7 + i))
        nodes.append(node(f"y{i}", "operator.floordiv", ref(f"z{i}"), 100))
        nodes.append(node(f"u{i}", "operator.floordiv", ref("b"), 1000 + i))
        nodes.append(node(f"v{i}", "operator.add", ref(f"y{i}"), ref(f"u{i}")))
        nodes.append(node(f"w{i}", "operator.add", ref(f"v{i}"), 1))
        sizes.append(ref(f"w{i}"))
    nodes.append(node("e", "aten.full.default", sizes, 0.0, device=SELF))
    return [*nodes, node("t", "aten.sum.default", ref("e"))]


def tower() -> list[dict[str, Any]]:
    """Nodes of a number that is 1 at the example's batch of 1, and endless at a batch of 2."""
    nodes = [SIZE]
    for i in range(12):
        nodes.append(node(f"p{i}", "operator.pow", ref(f"p{i - 1}" if i else "b"), 64))
    nodes.append(node("q", "operator.mod", ref("p11"), 2))
    nodes.append(node("e", "aten.full.default", [ref("q")], 0.0, device=SELF))
    return [*nodes, node("t", "aten.sum.default", ref("e"))]


def symbolic_exponent() -> list[dict[str, Any]]:
    """Nodes of 2 to the power of a size that is 1 at the example's batch."""
    nodes = [SIZE, node("p0", "operator.pow", ref("b"), 60), node("p", "operator.pow", 2, ref("p0"))]
    nodes.append(node("q", "operator.mod", ref("p"), 2))
    nodes.append(node("e", "aten.full.default", [ref("q")], 0.0, device=SELF))
    return [*nodes, node("t", "aten.sum.default", ref("e"))]


ENDLESS = {
    "a power of a sum": (power_of_a_sum(14, 9), 4, "operator.pow returns a size that is an expression of"),
    "a product of sums": (product_of_sums(3), 4, "aten.full.default reads sizes that together are"),
    "a tower of powers": (tower(), 1, "operator.pow returns a size that is an expression of"),
    "a size as exponent": (symbolic_exponent(), 1, ""),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_sizes_that_torch_would_expand_without_end(name: str, tmp_path: Path) -> None:
    nodes, example, words = ENDLESS[name]
    forged = lowered_at_load(member(nodes, "t"))
    forged.entry["dims"]["B"]["example"] = example
    forged.manifest["probe"] = ""
    refused(forged.save(tmp_path / "lowered"), words)
    routed = saying(member(nodes, "t"))
    ens = load(routed.save(tmp_path / "routed"), verify="off")
    start = time.process_time()
    with contextlib.suppress(UsageError):  # the walk ends, and refuses what it cannot read
        ens.route(torch.ones(1, 6), member=[0])
    assert time.process_time() - start < 10


def test_large_examples_of_other_dims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first route examines the rows of a file that says nothing of them, at sizes that the file names."""
    forged = Forged()
    forged.entry["inputs"][0]["type"] = "float32[B,T]"
    forged.entry["dims"]["B"]["example"] = 1
    forged.entry["dims"]["T"] = {"example": 30_000_000, "min": 6, "max": None, "source": ""}
    for program in forged.programs("programs/"):
        program["inputs"][0][0], program["inputs"][0][3] = "big", "float32[B,T]"
        program["nodes"].insert(0, node("x", "aten.slice.Tensor", ref("big"), -1, 0, 6))
        for made in program["nodes"]:
            made.pop("out", None)
    ens = load(forged.save(tmp_path), verify="off")
    drawn: list[int] = []

    def counting(*args: Any) -> list[torch.Tensor]:
        found = draw_all(*args)
        drawn.extend(v.numel() for v in found)
        return found

    monkeypatch.setattr(trials, "draw_all", counting)
    ens.route(torch.ones(1, 6), member=[0])
    assert 0 < sum(drawn) < 10_000


def test_a_large_input_of_a_fixed_size(tmp_path: Path) -> None:
    """No dim can be smaller, so trials are left out, and what is not proved is refused."""
    forged = member([node("n", "aten.tril.default", ref("x"), -9)], "v")
    forged.entry["inputs"][0]["type"] = "float32[B,9000000]"
    forged.entry["dims"]["B"]["example"] = 1
    for program in forged.programs("programs/"):
        program["inputs"][0][0], program["inputs"][0][3] = "big", "float32[B,9000000]"
        program["nodes"].insert(0, node("x", "aten.slice.Tensor", ref("big"), -1, 0, 6))
        names = [n["name"] for n in program["nodes"]]
        if "n" in names:
            program["nodes"].insert(names.index("n") + 1, node("v", "aten.sum.default", ref("n")))
        for made in program["nodes"]:
            made.pop("out", None)
    forged.manifest["probe"] = ""
    ens = load(forged.save(tmp_path), verify="off")
    with pytest.raises(UsageError, match="not known to be independent"):
        ens.route(torch.ones(1, 9_000_000), member=[0])


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("type_", ["float32[B,T]", "float32[Q]", "", "int", "float64[B,6]"])
def test_member_programs_with_inputs_of_another_type(type_: str, says: bool, tmp_path: Path) -> None:
    forged = saying(Forged()) if says else Forged()
    for program in forged.programs("programs/member."):
        program["inputs"][0][3] = type_
    ens = load(forged.save(tmp_path))
    for call in (lambda: ens.route(torch.ones(4, 6), member=[0, 1, 0, 2]), lambda: ens.member(0)):
        with pytest.raises(
            ArtifactError, match=r"takes the input x as .* but the entry's type is float32\[B,6\]"
        ):
            call()


@pytest.mark.parametrize("type_", ["float32[T,6]", "", "int", "float32[8,7]", "float16[8,6]"])
def test_member_programs_with_weights_of_another_type(type_: str, tmp_path: Path) -> None:
    forged = saying(Forged())
    for program in forged.programs("programs/member."):
        program["weights"][0][3] = type_
    ens = load(forged.save(tmp_path))
    with pytest.raises(ArtifactError, match=r"in the manifest's table it is float32\[8,6\]"):
        ens.route(torch.ones(4, 6), member=[0, 1, 0, 2])


@pytest.mark.parametrize(
    "size", [node("n", "operator.floordiv", ref("b"), 2), node("n", "operator.add", ref("b"), 4)]
)
def test_answers_of_another_number_of_rows(size: dict[str, Any], tmp_path: Path) -> None:
    full = node("k", "aten.full.default", [ref("n"), 3], 1.0, device=SELF)
    forged = saying(Forged().add(SIZE, size, full, start="programs/member."))
    for program in forged.programs("programs/member."):
        program["outputs"][0] = [ref("k"), "shared"]
    ens = load(forged.save(tmp_path))
    x = torch.ones(4, 6)
    for members in (1, [0, 1, 0, 2]):
        with pytest.raises(ArtifactError, match="the entry says that its rows are in dim 0"):
            ens.route(x, member=members)
    with pytest.raises(ArtifactError, match="the entry says that dim 0 is B, which is 4 in this call"):
        ens.member(0)(x)


def test_a_reason_of_several_lines(tmp_path: Path) -> None:
    forged = saying(Forged())
    forged.entry["rows"].update(independent=False, reason="a\n\nUsageError: all is well\u2028now")
    with pytest.raises(UsageError) as caught:
        load(forged.save(tmp_path)).route(torch.ones(4, 6), member=0)
    assert "\na UsageError: all is well now\n" in str(caught.value)


def test_programs_of_parts_for_other_members(tmp_path: Path) -> None:
    forged = Forged("parts")
    for row in forged.entry["wide"]:
        if row.get("members") == [0, 2]:
            row["members"] = [0, 1]
    path = forged.save(tmp_path / "count")
    with pytest.raises(ArtifactError, match="is for 2 members, but 1 are loaded"):
        load(path, members=[0])
    forged = Forged("parts")
    for row in forged.entry["wide"]:
        if row.get("members") == [0, 2]:
            row["members"] = [0, 4]
    refused(forged.save(tmp_path / "outside"), "4 members from number 0 are not a part of the 3 members")
    forged = Forged("parts")
    for program in forged.programs():
        if program["members"] == 2:  # the answers of the two members, exchanged
            (output,) = program["outputs"]
            program["nodes"].append(node("turned", "aten.flip.default", output[0], [0]))
            output[0] = ref("turned")
    path = forged.save(tmp_path / "answers")
    with pytest.raises(ProbeError):
        load(path, members=[0, 1])


@pytest.mark.parametrize("compares", ["gt", "le", "ne"])
def test_answers_that_follow_the_number_of_rows(compares: str) -> None:
    """`2 * (B > 3)` is the number 2 in the sizes of the walk, since torch decides the comparison there."""
    x = Slot("x", "x", "shared", "float32[B,6]")
    nodes = (
        Node("rows", "aten.sym_size.int", (Ref("x"), 0)),
        Node("more", f"operator.{compares}", (Ref("rows"), 3)),
        Node("twice", "operator.mul", (Ref("more"), 2)),
        Node("y", "aten.mul.Scalar", (Ref("x"), Ref("twice"))),
    )
    with pytest.raises(MixesRows, match="comparison"):
        walk(Program((), (x,), nodes, (Output(Ref("y"), "shared"),)), "B", [{"B": 5}])
