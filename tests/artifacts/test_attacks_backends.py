"""Tests attacks 78 to 82 of ATTACKS.md: what backends and exports do not check by themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import SELF
from click.testing import CliRunner
from forged import Forged, node, ref

import widepack
from widepack import InputError, UsageError, load
from widepack.errors import ArtifactError, LoweringError, Unavailable
from widepack.system.compiled_cache import CompiledCache
from widepack_cli.main import cli

INT, FLOAT = {"dtype": "int64"}, {"dtype": "float32"}
COMPUTED = [  # -1 where x is negative
    node("c", "aten.select.int", ref("x"), 1, 0),
    node("i", "aten._to_copy.default", ref("c"), dtype=INT),
    node("q", "aten.arange.default", 64, dtype=FLOAT, device=SELF),
    node("t", "aten.unsqueeze.default", ref("q"), 1),
    node("d", "aten.add.Scalar", ref("i"), 1),
    node("n", "aten.full_like.default", ref("d"), 100),
]
INDICES: dict[str, tuple[Any, ...]] = {
    "aten.embedding.default": (ref("t"), ref("i")),
    "aten.index_select.default": (ref("q"), 0, ref("i")),
    "aten.gather.default": (ref("q"), 0, ref("i")),
    "aten.scatter.value": (ref("q"), 0, ref("i"), 100.0),
    "aten.one_hot.default": (ref("i"), 64),
    "aten.floor_divide.default": (ref("n"), ref("d")),
    "aten.remainder.Tensor": (ref("n"), ref("d")),
}


def added(nodes: list[Any], value: str) -> Forged:
    """Adds the sum of a value to the first output of each program."""
    forged = Forged().add(*nodes).add(*nodes, start="programs/member.")
    for program in [*forged.programs(), *forged.programs("programs/member.")]:
        output = program["outputs"][0]
        program["nodes"] += [
            node("zf", "aten._to_copy.default", ref(value), dtype=FLOAT),
            node("zs", "aten.sum.default", ref("zf")),
            node("zy", "aten.add.Tensor", output[0], ref("zs")),
        ]
        program["outputs"][0] = [ref("zy"), output[1]]
    return forged


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("op", INDICES)
def test_indices_and_divisors_that_a_program_computes(op: str, tmp_path: Path) -> None:
    """ONNX Runtime takes -1 for the last row, and answers a division of integers by 0 with a number."""
    pytest.importorskip("onnxruntime")
    path = added([*COMPUTED, node("v", op, *INDICES[op])], "v").save(tmp_path)
    eager = load(path, verify="off")
    ens = load(path, verify="off", backend="onnxruntime", compile="now", cache=tmp_path / "cache")
    x = torch.ones(4, 6)
    torch.testing.assert_close(ens(x), eager(x))
    x[2, 0] = -1.0
    for model in (eager, ens):
        with pytest.raises(InputError):
            model(x)


@pytest.mark.parametrize("backend", ["aot", "onnxruntime"])
@pytest.mark.parametrize("divisor", [0, ref("s")])
@pytest.mark.parametrize("op", ["div.Scalar_mode", "floor_divide.Scalar", "remainder.Scalar", "fmod.Scalar"])
def test_divisions_by_a_number_that_may_be_0(op: str, divisor: Any, backend: str, tmp_path: Path) -> None:
    """AOTInductor's code ends the process at a division by 0."""
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime")
    rows = node("b", "aten.sym_size.int", ref("x"), 0)
    mode = {"rounding_mode": {"str": "trunc"}} if op.startswith("div") else {}
    nodes = [*COMPUTED, rows, node("s", "operator.sub", ref("b"), 5)]
    path = added([*nodes, node("v", f"aten.{op}", ref("n"), divisor, **mode)], "v").save(tmp_path)
    with pytest.raises(Unavailable, match=r"node v .* divides by a number, that '\w+' does not check"):
        load(path, verify="off", backend=backend, compile="now", cache=tmp_path / "cache")
    with pytest.raises(InputError):
        load(path, verify="off")(torch.ones(5, 6))


def endless() -> Forged:
    """A program with a size that becomes an expression of ever more terms: torch would simplify for hours."""
    nodes = [node("n0", "aten.sym_size.int", ref("x"), -2)]
    for i in range(24):
        nodes += [
            node(f"a{i}", "operator.mul", ref(f"n{i}"), ref(f"n{i}")),
            node(f"b{i}", "operator.add", ref(f"a{i}"), ref(f"n{i}")),
            node(f"n{i + 1}", "operator.mod", ref(f"b{i}"), 7 + i),
        ]
    nodes += [
        node("np", "operator.add", ref("n24"), 1),
        node("e", "aten.full.default", [ref("np")], 0.0, device=SELF),
    ]
    return added(nodes, "e")


def test_endless_sizes_in_a_compiler_and_in_an_export(tmp_path: Path) -> None:
    path = endless().save(tmp_path)
    load(path, verify="off")
    start = time.process_time()
    with pytest.raises(LoweringError, match="an expression of more than 500 terms"):
        load(path, verify="off", backend="aot", compile="now", cache=tmp_path / "cache")
    for member in (0, None):
        with pytest.raises(LoweringError, match="an expression of more than 500 terms"):
            widepack.export(path, tmp_path / "e.pt2", to="pt2", member=member)
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"least": {}', '"least": []'),
        ('"least": {}', '"least": {"B": 1e999}'),
        ('"inputs": [0]', '"inputs": [7]'),
        ('"booleans": [false]', '"booleans": [true]'),
    ],
)
def test_changed_records_of_compiled_programs(old: str, new: str, tmp_path: Path) -> None:
    cache = CompiledCache(tmp_path)
    record = {"least": {}, "inputs": [0], "booleans": [False]}
    place, _ = cache.make("key", lambda folder: record)
    assert cache.find("key") is not None
    text = json.dumps(json.loads((place / "record.json").read_text()))
    assert old in text
    (place / "record.json").write_text(text.replace(old, new))
    assert cache.find("key") is None


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_measurements_of_member_programs_that_torch_refuses(command: str, tmp_path: Path) -> None:
    """A load runs the wide programs alone; a measurement runs the member programs, too."""
    forged = Forged().add(node("w", "aten.sum.dim_IntList", ref("x"), [7]), start="programs/member.")
    path = forged.save(tmp_path)
    load(path)
    words = [command, str(path), "--budget", "1", "--batch", "2"]
    more = ["--backend", "eager", "--pattern", "shared"] if command == "tune" else ["--baseline", "loop"]
    result = CliRunner().invoke(cli, [*words, *more])
    assert result.exit_code == 1 and "IndexError: Dimension out of range" in result.output
    assert "This is an error in widepack" not in result.output


@pytest.mark.parametrize("says", [False, True])
def test_member_programs_that_only_a_route_runs(says: bool, tmp_path: Path) -> None:
    """At some numbers of rows a member program takes gigabytes, and the file may say that rows are apart."""
    nodes = [
        node("b", "aten.sym_size.int", ref("x"), 0),
        node("d", "operator.floordiv", 2**32, ref("b")),
        node("e", "aten.full.default", [ref("d")], 0.0, device=SELF),
        node("s", "aten.sum.default", ref("e")),
    ]
    forged = Forged().add(*nodes, start="programs/member.")
    for program in forged.programs("programs/member."):
        output = program["outputs"][0]
        program["nodes"].append(node("zy", "aten.add.Tensor", output[0], ref("s")))
        program["outputs"][0] = [ref("zy"), output[1]]
    if says:
        forged.entry["rows"] = {"dim": "B", "independent": True, "proved": True, "reason": ""}
        forged.manifest["version"] = [1, 2]
    ens = load(forged.save(tmp_path))
    with pytest.raises((ArtifactError, UsageError)):
        ens.route(torch.ones(4, 6), member=[0, 1, 0, 2])
    with pytest.raises((ArtifactError, UsageError)):
        ens.route(torch.ones(1, 6), member=[1])


@pytest.mark.parametrize("dim", ["", "Q", "B B", "6"])
def test_rows_along_a_dim_that_no_input_has(dim: str, tmp_path: Path) -> None:
    forged = Forged()
    forged.entry["rows"] = {"dim": dim, "independent": True, "proved": True, "reason": ""}
    forged.manifest["version"] = [1, 2]
    ens = load(forged.save(tmp_path))
    assert ens.entry("forward").tensor_calls.rows.dim == "B"  # derived from the program, not read
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    torch.testing.assert_close(ens.route(x, member=[0, 1, 0, 2]), ens(x)[[0, 1, 0, 2], range(4)])
