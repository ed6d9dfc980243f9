"""Tests that edited `.pt2` files are refused, and that no code of a file runs."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import seeded

from capture.pt2_files import DYNAMIC, QUICK, Small, program_of, save
from widepack import build
from widepack.errors import WidepackError


def rewrite(path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """Writes the file with some of its records changed."""
    with zipfile.ZipFile(path) as archive:
        records = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    change(records)
    out = path.with_name("hurt.pt2")
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"hurt/{name}", data)
    return out


def model(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, bytes]], object]:
    return lambda records: _edit(records, "models/model.json", change)


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, bytes]], object]:
    return lambda records: _edit(
        records, "data/weights/model_weights_config.json", lambda v: change(v["config"])
    )


def _edit(records: dict[str, bytes], name: str, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(records[name])
    change(value)
    records[name] = json.dumps(value).encode()


def graph(v: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = v["graph_module"]["graph"]
    return found


def node(**row: Any) -> Callable[[dict[str, bytes]], object]:
    """Changes fields of the first node."""
    return model(lambda v: graph(v)["nodes"][0].update(row))


def argument(number: int, **row: Any) -> Callable[[dict[str, bytes]], object]:
    """Changes fields of an argument of the first node."""
    return model(lambda v: graph(v)["nodes"][0]["inputs"][number].update(row))


def size_of_x(expr: str) -> Callable[[dict[str, bytes]], object]:
    size = {"as_expr": {"expr_str": expr, "hint": {"as_int": 4}}}
    return model(lambda v: graph(v)["tensor_values"]["x"]["sizes"].__setitem__(0, size))


def weight(**meta: Any) -> Callable[[dict[str, bytes]], object]:
    """Changes what the file says of the memory of a weight."""
    return weights(lambda c: c["fc.weight"]["tensor_meta"].update(meta))


def result_of(v: dict[str, Any], kind: str) -> None:
    context = '{"__enum__": true, "fqn": "os:system", "name": "x"}'
    tree = [1, {"type": kind, "context": context, "children_spec": []}]
    v["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(tree)


def parameter_named(v: dict[str, Any], name: str) -> None:
    v["graph_module"]["signature"]["input_specs"][0]["parameter"].update(parameter_name=name)


def written_by_relu(v: dict[str, Any]) -> None:
    first = graph(v)["nodes"][0]
    first.update(target="torch.ops.aten.relu_.default", inputs=first["inputs"][:1])


EVIL = "__import__('os').mkdir('evil-was-here')"
ATTACKS: list[tuple[str, Callable[[dict[str, bytes]], object], str]] = [
    ("another op", node(target="torch.ops.aten.from_file.default"), "contains the op aten.from_file.default"),
    ("a python function", node(target="torch.hub.load"), "contains the op"),
    ("no function", node(target="os.system"), "contains the op"),
    ("an extension", node(target="#evil:op"), "contains the op"),
    ("an op that writes", model(written_by_relu), "writes into a value"),
    ("an expression", size_of_x(EVIL), "a size is a number, or a whole multiple of a dynamic dim"),
    ("a long expression", size_of_x("Pow(Integer(9), Integer(9))"), "a size is a number"),
    (
        "a condition",
        model(lambda v: v.update(guards_code=[EVIL])),
        "a condition that cannot be written as arithmetic over named dims",
    ),
    (
        "a condition of another input",
        model(lambda v: v.update(guards_code=["L['z'].size()[0] <= 3"])),
        "belongs to an unknown input",
    ),
    ("no conditions", model(lambda v: v.pop("guards_code")), "does not store the conditions of a program"),
    (
        "another schema",
        model(lambda v: v["schema_version"].update(major=9)),
        "is a torch.export program of schema 9, but widepack reads 8",
    ),
    ("a tree of another class", model(lambda v: result_of(v, "os.system")), "gives a os.system"),
    (
        "a name",
        model(lambda v: graph(v)["nodes"][0]["outputs"][0]["as_tensor"].update(name="a\n")),
        "is not a name",
    ),
    (
        "a value before it is made",
        argument(0, arg={"as_tensor": {"name": "linear"}}),
        "before it is computed",
    ),
    (
        "two values of one name",
        model(lambda v: graph(v)["nodes"].insert(1, graph(v)["nodes"][0])),
        "two values are called",
    ),
    ("a keyword", argument(1, name="evil", kind=2), "after one by name"),
    ("a large number", argument(0, arg={"as_int": 2**70}), "outside 64 bits"),
    ("a dtype", model(lambda v: graph(v)["tensor_values"]["x"].update(dtype=99)), "has no known dtype"),
    ("a graph", argument(0, arg={"as_graph": {"name": "x", "graph": {}}}), "an argument of kind 'as_graph'"),
    (
        "a custom object",
        model(lambda v: v["graph_module"]["signature"]["input_specs"].append({"custom_obj": {}})),
        "holds an input of kind 'custom_obj'",
    ),
    ("a weight that is not there", model(lambda v: parameter_named(v, "no")), "reads no"),
    ("no JSON", lambda r: r.update({"models/model.json": b"{"}), "not JSON"),
    ("a key twice", lambda r: r.update({"models/model.json": b'{"a": 1, "a": 2}'}), "occurs twice"),
    ("depth", lambda r: r.update({"models/model.json": b"[" * 100_000}), "nested over"),
    (
        "two programs",
        lambda r: r.update({"models/other.json": b"{}"}),
        "an archive of 2 torch.export programs",
    ),
    ("no weights", lambda r: r.pop("data/weights/model_weights_config.json"), "in an unsupported format"),
    (
        "pickled",
        weights(lambda c: c["fc.weight"].update(use_pickle=True)),
        "has a pickled fc.weight, and loading it can run code",
    ),
    (
        "a path",
        weights(lambda c: c["fc.weight"].update(path_name="../../models/no")),
        "fc.weight has no bytes",
    ),
    ("past its bytes", weight(storage_offset={"as_int": 1}), "fc.weight needs 28 bytes, its record has 24"),
    ("strides", weight(strides=[{"as_int": 2**40}, {"as_int": 1}]), "its record has 24"),
    ("negative", weight(strides=[{"as_int": -3}, {"as_int": 1}]), "fc.weight has no shape"),
    ("a symbolic weight", weight(sizes=[{"as_expr": {}}, {"as_int": 3}]), "fc.weight has no shape"),
    (
        "no bytes",
        lambda r: r.update({"data/weights/weight_0": b""}),
        "is a torch.export program without its weights",
    ),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "a.pt2"
    return Path(save(path, seeded(Small, 0), torch.randn(4, 3), dims={"x": {0: DYNAMIC}}))


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in ATTACKS], ids=[row[0] for row in ATTACKS])
def test_an_edited_program_is_refused(
    change: Callable[[dict[str, bytes]], object],
    words: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    copied = tmp_path / "a.pt2"
    copied.write_bytes(small.read_bytes())
    with pytest.raises(WidepackError) as caught:
        build([rewrite(copied, change)], tmp_path / "e.wide", **QUICK)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "evil-was-here").exists()
    assert not (tmp_path / "e.wide").exists()


def test_example_inputs_that_are_pickled_code_are_not_run(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, ("evil-was-here",)

    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save(Evil(), file)
    for data in (pickle.dumps(Evil()), file.getvalue()):
        path = copied_with(small, tmp_path, "data/sample_inputs/model.pt", data)
        build([path], tmp_path / "e.wide", force=True, **QUICK)  # its float inputs are drawn
        assert not (tmp_path / "evil-was-here").exists()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=6))
def test_a_program_overwritten_anywhere_is_read_or_refused(
    small: Path, tmp_path_factory: pytest.TempPathFactory, at: int, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("hurt") / "a.pt2"
    whole = small.read_bytes()
    at %= len(whole)
    path.write_bytes((whole[:at] + data + whole[at + len(data) :])[: len(whole)])
    try:
        program_of(path)
    except WidepackError as error:
        assert "\n" not in str(error)


def deflated(path: Path, only: str) -> Path:
    """Writes the file with some of its records compressed."""
    out = path.with_name("deflated.pt2")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as archive:
        for name in source.namelist():
            archive.writestr(
                name, source.read(name), zipfile.ZIP_DEFLATED if only in name else zipfile.ZIP_STORED
            )
    return out


def copied_with(small: Path, tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / "a.pt2").write_bytes(small.read_bytes())
    return rewrite(tmp_path / "a.pt2", lambda records: records.update({name: data}))


def test_compressed_records_are_read_or_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(small.read_bytes())
    assert build([deflated(tmp_path / "a.pt2", ".json")], tmp_path / "e.wide", **QUICK).members
    with pytest.raises(WidepackError, match="is compressed; torch stores weights uncompressed"):
        program_of(deflated(tmp_path / "a.pt2", "weight_0"))


def bomb(megabytes: int) -> bytes:
    """A file of torch.save with a compressed record of zeros."""
    file = io.BytesIO()
    torch.save(((torch.zeros(4, 3),), {}), file)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(megabytes << 20))
    return file.getvalue()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("inner", [False, True])
def test_example_inputs_that_are_a_zip_bomb(small: Path, tmp_path: Path, inner: bool) -> None:
    data = bomb(300) if inner else bytes(40 << 20)
    path = copied_with(small, tmp_path, "data/sample_inputs/model.pt", data)
    words = (
        "has compressed records of 3145" if inner else "hurt/data/sample_inputs/model.pt has 41943040 bytes"
    )
    with pytest.raises(WidepackError, match=words):
        build([path if inner else deflated(path, "sample_inputs")], tmp_path / "e.wide", **QUICK)


def test_a_program_that_is_a_zip_bomb(small: Path, tmp_path: Path) -> None:
    path = copied_with(small, tmp_path, "models/model.json", b" " * (40 << 20))
    with pytest.raises(WidepackError, match="models/model.json has 41943040 bytes, of which at most"):
        program_of(deflated(path, "models/"))


def test_a_weight_that_is_expanded_to_gigabytes(small: Path, tmp_path: Path) -> None:
    def expanded(config: dict[str, Any]) -> None:
        meta = config["fc.weight"]["tensor_meta"]
        meta["sizes"] = [{"as_int": 1 << 20}, {"as_int": 1 << 20}]
        meta["strides"] = [{"as_int": 0}, {"as_int": 0}]

    (tmp_path / "a.pt2").write_bytes(small.read_bytes())
    with pytest.raises(WidepackError, match="has tensors of 43980465[0-9]+ bytes by their shapes"):
        program_of(rewrite(tmp_path / "a.pt2", weights(expanded)))


@pytest.mark.parametrize(
    ("guards", "words"),
    [
        (["+".join(["L['x'].size()[0]"] * 200_000) + " >= 1"], "has 1 conditions on sizes, the longest of"),
        (["L['x'].size()[0] >= 1"] * 200_000, "has 200000 conditions on sizes"),
        (["(" * 900 + "1" + ")" * 900 + " >= 1"], "cannot be written as arithmetic"),
        (["-" * 1900 + "L['x'].size()[0] <= 1"], "cannot be written as arithmetic"),
        (["1" + "+1" * 950 + " >= 1"], "cannot be written as arithmetic"),
    ],
    ids=["one of many terms", "many", "nested", "signs", "sum"],
)
def test_guards_of_many_terms(small: Path, tmp_path: Path, guards: list[str], words: str) -> None:
    (tmp_path / "a.pt2").write_bytes(small.read_bytes())
    path = rewrite(tmp_path / "a.pt2", model(lambda program: program.update(guards_code=guards)))
    start = perf_counter()
    with pytest.raises(WidepackError, match=words) as caught:
        build([path], tmp_path / "e.wide", **QUICK)
    assert perf_counter() - start < 5
    assert len(str(caught.value)) < 1000 + len(str(path))
