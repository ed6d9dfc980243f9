"""Tests attacks 68 to 77 of ATTACKS.md: calls that change inputs, compiled code, views of large memory, calls
that fail, and files that are used many times.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import SELF, refused
from click.testing import CliRunner
from forged import Forged, node, ref
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

import widepack
from widepack import InputError, UsageError, load
from widepack.backends.index_flags import unguarded
from widepack.errors import ArtifactError, LoweringError, Unavailable
from widepack.ir import ops
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_cli.main import cli

INT, FLOAT = {"dtype": "int64"}, {"dtype": "float32"}
SIZE = node("b", "aten.sym_size.int", ref("x"), 0)


def ended(forged: Forged, value: str) -> Forged:
    """Adds 0 times the sum of a value to the first output of each program."""
    for program in forged.programs():
        output = program["outputs"][0]
        program["nodes"] += [
            node("zf", "aten._to_copy.default", ref(value), dtype=FLOAT),
            node("zs", "aten.sum.default", ref("zf")),
            node("zm", "aten.mul.Scalar", ref("zs"), 0.0),
            node("zy", "aten.add.Tensor", output[0], ref("zm")),
        ]
        program["outputs"][0] = [ref("zy"), output[1]]
    return forged


@pytest.mark.parametrize(
    "first",
    [
        [node("w", "aten.lift.default", ref("x"))],
        [SIZE, node("w", "aten._unsafe_view.default", ref("x"), [ref("b"), 6])],
        [node("w", "aten.dequantize.self", ref("x"))],
        [node("l", "aten.unsafe_split.Tensor", ref("x"), 3, 1), node("w", "operator.getitem", ref("l"), 0)],
        [
            node("l", "aten.unsafe_split_with_sizes.default", ref("x"), [2, 4], 1),
            node("w", "operator.getitem", ref("l"), 0),
        ],
    ],
)
def test_writes_through_ops_that_return_their_argument(first: list[dict[str, Any]], tmp_path: Path) -> None:
    """The schemas of these ops do not say that the result is in the memory of the argument."""
    forged = Forged().add(
        *first,
        node("s", "aten.select.int", ref("w"), 1, 0),
        node("t", "aten.full_like.default", ref("s"), 7.0),
        node("v", "aten.select_scatter.default", ref("w"), ref("t"), 1, 0),
    )
    ens = load(ended(forged, "v").save(tmp_path))
    x = torch.zeros(5, 6)
    ens(x)
    assert bool((x == 0).all())
    assert ops.may_view(first[-1 if first[-1]["op"] != "operator.getitem" else 0]["op"])


def test_texts_that_a_compiler_would_write_into_code(tmp_path: Path) -> None:
    forged = Forged().add(
        node("a", "aten.select.int", ref("x"), 0, 0),
        node("v", "aten.searchsorted.Tensor", ref("a"), ref("a"), side={"str": 'left"; (void)system("id'}),
    )
    refused(ended(forged, "v").save(tmp_path), "only letters, digits, spaces and _ . , : - > are allowed")


def test_indices_that_compiled_code_does_not_check(tmp_path: Path) -> None:
    """`take` at an index out of range ends the process in compiled code."""
    forged = Forged().add(
        node("c", "aten.select.int", ref("x"), 1, 0),
        node("i", "aten._to_copy.default", ref("c"), dtype=INT),
        node("q", "aten.full.default", [64], 1.0, device=SELF),
        node("v", "aten.take.default", ref("q"), ref("i")),
    )
    path = ended(forged, "v").save(tmp_path)
    with pytest.raises(Unavailable, match=r"node v \(aten.take.default\) reads or writes at indices"):
        load(path, backend="aot", compile="now", verify="off")
    x = torch.full((2, 6), 9e4)
    with pytest.raises(InputError, match="out of range"):
        load(path)(x)
    assert load(path)(torch.ones(2, 6)).shape == (3, 2, 3)


@pytest.mark.parametrize("op", ["take", "put", "nll_loss_forward", "cross_entropy_loss", "max_unpool2d"])
def test_programs_that_are_not_compiled(op: str) -> None:
    """Also where the node is in a loop."""
    inner = Node("v", f"aten.{op}.default", (Ref("x"), Ref("x")))
    program = Program((), (Slot("x", "x", "shared", ""),), (inner,), (Output(Ref("v"), "shared"),))
    loop = Node("l", "loop", (Ref("x"),), body=program)
    assert unguarded(program) == inner == unguarded(replace(program, nodes=(loop,)))
    assert unguarded(replace(program, nodes=(replace(inner, op="aten.embedding.default"),))) is None


def test_views_of_large_memory_are_not_copied_with_it(tmp_path: Path) -> None:
    """torch's scatters copy all memory that the value is in; a budget counts the value."""
    nodes = [node("m", "aten.full.default", [2**25], 1.0, device=SELF), SIZE]
    nodes += [
        node("v0", "aten.slice.Tensor", ref("m"), 0, 0, 2),
        node("s", "aten.select.int", ref("v0"), 0, 0),
    ]
    for i in range(40):
        nodes.append(node(f"v{i + 1}", "aten.select_scatter.default", ref("v0"), ref("s"), 0, 1))
    nodes.append(node("v", "aten.stack.default", [ref(f"v{i + 1}") for i in range(40)]))
    path = ended(Forged().add(*nodes), "v").save(tmp_path)
    start = time.process_time()
    ens = load(path)
    assert time.process_time() - start < 5
    whole = torch.zeros(2_000_000, 6)
    begin = time.process_time()
    for _ in range(20):
        ens(whole[4:8])
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("op", ["index_select", "gather"])
def test_calls_that_fail_in_a_tensor_without_dims(op: str, tmp_path: Path) -> None:
    index = [1] if op == "index_select" else []
    forged = Forged().add(
        SIZE,
        node("g", "operator.gt", ref("b"), 64),
        node("i", "torch.sym_int", ref("g")),
        node("t", "aten.full.default", [], 1.0, device=SELF),
        node("k", "aten.full.default", index, ref("i"), dtype=INT, device=SELF),
        node("v", f"aten.{op}.default", ref("t"), 0, ref("k")),
    )
    ens = load(ended(forged, "v").save(tmp_path))
    with pytest.raises(InputError, match=rf"node v \(aten.{op}.default\) cannot run with the input x"):
        ens(torch.zeros(65, 6))


def test_member_programs_that_only_a_failing_call_runs(tmp_path: Path) -> None:
    forged = Forged().add(
        SIZE,
        node("g", "operator.gt", ref("b"), 64),
        node("i", "torch.sym_int", ref("g")),
        node("t", "aten.full.default", [1], 1.0, device=SELF),
        node("k", "aten.full.default", [1], ref("i"), dtype=INT, device=SELF),
        node("v", "aten.index_select.default", ref("t"), 0, ref("k")),
    )
    for program in forged.programs("programs/member."):
        program["nodes"].insert(0, node("big", "aten.full.default", [2**31], 1.0, device=SELF))
    ens = load(ended(forged, "v").save(tmp_path))
    start = time.process_time()
    with pytest.raises(InputError, match="looks up one of 1 rows"):
        ens(torch.zeros(65, 6))
    assert time.process_time() - start < 5


def test_long_names_in_a_plan(tmp_path: Path) -> None:
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"].setdefault("choices", {})["_rows" * 40_000 + "x"] = ["bmm", "why"]
    start = time.process_time()
    result = CliRunner().invoke(cli, ["trace", str(forged.save(tmp_path))])
    assert time.process_time() - start < 10 and result.exit_code in (0, 3, 4), result.output


def test_a_check_at_other_sizes_is_no_check_of_the_probe(tmp_path: Path) -> None:
    """A load without verification checks the example's sizes, the next one runs the probe's."""
    forged = Forged().add(
        node("t", "aten.transpose.int", ref("x"), -2, -1),
        node("m", "aten.matmul.default", ref("x"), ref("t")),
    )

    def longer(data: bytes) -> bytes:
        found = tensors_of(data)
        for name in list(found):
            if name.endswith(".x0"):
                found[name] = torch.zeros(*found[name].shape[:-2], 30_000, 6)
        return bytes_of(found)

    path = forged.change("probe-", longer).save(tmp_path)
    load(path, verify="off")
    refused(path, "node m (aten.matmul.default) would bring the memory of this load to")


def test_one_program_that_is_bound_many_times(tmp_path: Path) -> None:
    forged = Forged()
    rows = [w for w in forged.entry["wide"] if w["device"] == "cpu" and w["pattern"] == "shared"]
    file = rows[0]["file"]
    nodes = [SIZE, *(node(f"q{i}", "operator.add", ref("b"), i) for i in range(3_000))]
    name = next(n for n in forged.documents if n.startswith(file.rpartition("-")[0]))
    forged.documents[name]["nodes"] = nodes + forged.documents[name]["nodes"]
    forged.entry["wide"] = [w for w in forged.entry["wide"] if w not in rows]
    for k in range(8):
        row = copy.deepcopy(rows[0])
        row["batch"] = row["plan"]["batch"] = [k + 1, None if k == 7 else k + 1]
        forged.entry["wide"].append(row)
    path = forged.save(tmp_path)
    refused(path, "brings the programs of this load to", "nodes; 20,000 are allowed", limit=0.1, verify="off")


@pytest.mark.parametrize("how", ["drop", "export"])
def test_sizes_that_widepack_chooses(how: str, tmp_path: Path) -> None:
    """The programs are small at the sizes of the example and the probe, and take 8.6 GB at another batch."""
    large = [
        node("b", "aten.sym_size.int", ref("x"), -2),
        node("c", "operator.eq", ref("b"), 5),
        node("i", "torch.sym_int", ref("c")),
        node("n", "operator.mul", ref("i"), 2**31),
        node("z", "aten.full.default", [ref("n")], 1.0, device=SELF),
    ]
    forged = Forged()
    for program in forged.programs("programs/member."):
        program["nodes"] = [*large, *program["nodes"]]
    path, out = str(forged.save(tmp_path)), str(tmp_path / "out")
    load(path)
    calls: dict[str, Callable[[], object]] = {
        "drop": lambda: widepack.drop(path, [0], out=out),
        "export": lambda: widepack.export(path, out + ".pt2", to="pt2", member=0),
    }
    words = r"node z \(aten.full.default\) would bring the memory of this run to 8.6 GB"
    with pytest.raises(ArtifactError, match=words):
        calls[how]()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("member", [None, 0])
def test_exports_of_ops_that_read_outside_of_a_value(member: int | None, tmp_path: Path) -> None:
    """The written file has torch's own ops. This one checks nothing: it is written as another."""
    forged = Forged()
    for program in [*forged.programs(), *forged.programs("programs/member.")]:
        output = program["outputs"][0]
        program["nodes"] += [
            node("b", "aten.sym_size.int", ref("x"), -2),
            node("n", "operator.mul", ref("b"), 6),
            node(
                "v", "aten._reshape_alias.default", ref("x"), [-1] if member is None else [ref("n")], [2**22]
            ),
            node("zs", "aten.sum.default", ref("v")),
            node("zm", "aten.mul.Scalar", ref("zs"), 0.0),
            node("zy", "aten.add.Tensor", output[0], ref("zm")),
        ]
        program["outputs"][0] = [ref("zy"), output[1]]
    path = forged.save(tmp_path)
    out = tmp_path / "a.pt2"
    widepack.export(path, out, to="pt2", member=member)
    targets = {str(n.target) for n in torch.export.load(out).graph.nodes}
    assert "aten._reshape_alias.default" not in targets and "aten.reshape.default" in targets


@pytest.mark.parametrize(
    "wrong",
    [
        node("w", "aten.relu.default", 1.5),
        node("w", "aten.select.int", ref("x"), 5, 0),
        node("w", "aten.relu.default", ref("x"), 1),
    ],
)
def test_member_programs_that_torch_refuses(wrong: dict[str, Any], tmp_path: Path) -> None:
    forged = Forged()
    for program in forged.programs("programs/member."):
        program["nodes"] = [wrong, *program["nodes"]]
    path = forged.save(tmp_path)
    load(path)
    calls: list[Callable[[], object]] = [
        lambda: widepack.drop(path, [0], out=tmp_path / "d.wide"),
        lambda: widepack.export(path, tmp_path / "a.pt2", to="pt2"),
        lambda: widepack.export(path, tmp_path / "b.pt2", to="pt2", member=0),
    ]
    for call in calls:
        with pytest.raises((ArtifactError, LoweringError)):
            call()


def test_answers_that_lose_their_dims(tmp_path: Path) -> None:
    """At 65 rows the answer has no dim, or no class."""
    forged = Forged()
    for program in forged.programs():
        output = program["outputs"][0]
        program["nodes"] += [
            SIZE,
            node("g", "operator.gt", ref("b"), 64),
            node("i", "torch.sym_int", ref("g")),
            node("j", "operator.sub", 1, ref("i")),
            node("e", "operator.mul", ref("j"), 10**6),
            node("y", "aten.slice.Tensor", output[0], 2, 0, ref("e")),
        ]
        program["outputs"][0] = [ref("y"), output[1]]
    ens = load(forged.save(tmp_path))
    calls: list[Callable[..., Any]] = [ens.vote, lambda x: ens.reduce(x, "entropy", of="softmax")]
    for call in calls:
        with pytest.raises((InputError, UsageError), match="have no classes"):
            call(torch.zeros(65, 6))


def test_nested_tensors_as_inputs(tmp_path: Path) -> None:
    ens = load(Forged().save(tmp_path))
    nested: Any = torch.nested
    with pytest.warns(UserWarning, match="nested tensors"):
        x = nested.nested_tensor([torch.randn(6), torch.randn(6)])
    with pytest.raises(InputError, match="is a nested tensor, which has no shape"):
        ens(x)
