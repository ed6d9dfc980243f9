"""The ways into a reader, numbered as artifacts/ATTACKS.md has them: each is tried, with hashes and digest right wherever that is the stranger's work, and refused in a sentence."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from forged import Forged, golden, node, ref
from support import fresh, must
from widepack import load
from widepack.lowering import relower as relower_
from widepack.errors import ArtifactError, ProbeError, UsageError, WidepackError
from widepack.inference.open_artifact import present
from widepack.system.deadline import Lowering, over
from widepack_artifacts import guards
from widepack_artifacts import header
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest, Weight
from widepack_artifacts.program import Program
from widepack_artifacts.weights import Weights
from widepack_cli.main import cli

ATTACKS = Path(__file__).resolve().parent.parent / "artifacts" / "ATTACKS.md"
W, X = ref("w_p_inner_weight"), ref("x")  # [3, 8, 6] and [B, 6]
SELF = {"device": "self"}
F32 = {"dtype": "float32"}


def refused(path: Path, *words: str, kind: type[WidepackError] = ArtifactError, **how: Any) -> str:
    """What a load of this path is refused with: soon, in one paragraph that names these words, and without memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(kind) as caught:
        load(path, **how)
    text = str(caught.value)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    assert text.strip() and len(text) < 5000 and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    for word in words:
        assert word in text, f"{word!r} is missing from: {text}"
    return text


def test_00_what_is_forged_without_a_change_loads(tmp_path: Path) -> None:
    for name in ("mlp", "conv", "ragged", "entries", "state"):
        load(Forged(name).save(tmp_path / name))


# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "name",
    ["../weights-{}.safetensors", "/etc/weights-{}.safetensors", "programs/../../x-{}.json", "programs/a/b-{}.json", "a..b-{}.json", "-{}.json"],
)
def test_01_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    forged = Forged()
    forged.manifest["files"][name.format("0" * 16)] = {"bytes": 1, "sha256": "0" * 64}
    refused(forged.save(tmp_path), "is no name of a file of an artifact")


@pytest.mark.parametrize("what", ["manifest.json", "weights", "program", "programs", "pipe", "folder"])
def test_02_links_pipes_and_folders_in_the_place_of_files(tmp_path: Path, what: str) -> None:
    path = Forged().save(tmp_path)
    place = {
        "manifest.json": path / "manifest.json",
        "programs": path / "programs",
        "program": next((path / "programs").glob("cpu.*shared*")),
    }.get(what, next(path.glob("weights-*")))
    aside = tmp_path / "aside"
    place.rename(aside)
    if what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    else:
        place.symlink_to(aside)
    for verify in ("sizes", "hashes", "off"):
        refused(path, "a link or special file", verify=verify)


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize("which", ["manifest.json", "program"])
def test_03_a_key_that_stands_twice(tmp_path: Path, which: str) -> None:
    if which == "manifest.json":
        path = Forged().save(tmp_path)
        place = path / which
        place.write_bytes(place.read_bytes().replace(b'"probe":', b'"probe": "", "probe":', 1))
        refused(path, "the key 'probe' stands twice")
        return
    text = json.dumps(Forged().programs()[0]).replace('"nodes"', '"nodes": [], "nodes"', 1)
    with pytest.raises(ArtifactError, match="the key 'nodes' stands twice"):
        strict_json.parse(text.encode(), "program")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 100_000, '{"a":' * 300 + "1" + "}" * 300])
def test_04_deep_nesting(text: str) -> None:
    with pytest.raises(ArtifactError, match="nested over 200 deep|no JSON"):
        strict_json.parse(text.encode(), "manifest")


@pytest.mark.parametrize(
    "text", ["9" * 10_000_000, "9223372036854775808", "-9223372036854775809", "1e400", "1" * 500 + ".5", "NaN", "Infinity", "-Infinity"]
)
def test_05_numbers_past_all_bounds(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ArtifactError, match="outside|no JSON"):
        strict_json.parse(f"[{text}]".encode(), "manifest")
    assert time.process_time() - start < 1


@pytest.mark.parametrize("data", [b"\xff\xfe", b'"\\ud800"', b"\xef\xbb\xbf{}", b'{"a":"\xed\xa0\x80"}', b"", b"\x00" * 100])
def test_06_what_is_no_text(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        strict_json.parse(data, "manifest")


def test_07_a_document_of_more_values_than_any_artifact_has() -> None:
    with pytest.raises(ArtifactError, match="over 8,000,000 values"):
        strict_json.parse(b"[" + b"[]," * 8_000_000 + b"0]", "program")


# ---------------------------------------------------------------- safetensors


def tensors(header_: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header_ if isinstance(header_, bytes) else json.dumps(header_).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensors({}, length=2**63), "not a whole safetensors file"),
        (tensors({"a": ROW}), "not a whole safetensors file"),
        (tensors({"a": {**ROW, "data_offsets": [0, 2**62]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": {**ROW, "data_offsets": [-8, 0]}}, b"\0" * 8), "no pair of places"),
        (tensors({"a": {**ROW, "data_offsets": [8, 0]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": ROW, "b": ROW}, b"\0" * 8), "two tensors over each other"),
        (tensors({"a": ROW, "b": {**ROW, "data_offsets": [4, 12]}}, b"\0" * 12), "two tensors over each other"),
        (tensors({"a": {**ROW, "data_offsets": [4, 12]}}, b"\0" * 12), "a hole"),
        (tensors({"a": {**ROW, "shape": [2**62, 2**62]}}, b"\0" * 8), "data_offsets"),
        (tensors({"a": {**ROW, "shape": [-1, -2]}}, b"\0" * 8), "no list of up to"),
        (tensors({"a": {**ROW, "shape": [True, 2]}}, b"\0" * 8), "no list of up to"),
        (tensors({"a": {**ROW, "shape": [1] * 70}}, b"\0" * 8), "no list of up to"),
        (tensors({"a": {**ROW, "dtype": "O"}}, b"\0" * 8), "the dtype 'O' is unknown"),
        (tensors({"a": {**ROW, "pickle": 1}}, b"\0" * 8), "expected dtype, shape and data_offsets"),
        (tensors({"a": ROW, "__metadata__": {"a": 1}}, b"\0" * 8), "no object of texts"),
        (tensors(b'{"a": %s, "a": %s}' % ((json.dumps(ROW).encode(),) * 2), b"\0" * 8), "stands twice"),
        (tensors(b"[" * 1000 + b"]" * 1000, b"\0" * 8), "nested"),
    ],
)
def test_08_extents_of_tensors(tmp_path: Path, data: bytes, words: str) -> None:
    place = tmp_path / "weights.safetensors"
    place.write_bytes(data)
    for opened in (lambda: header.read(place), lambda: Weights([place])):
        with pytest.raises(ArtifactError, match=re.escape(words)):
            opened()
    path = Forged().change("weights-", lambda _: data).save(tmp_path)
    refused(path, words)


# ---------------------------------------------------------------- names, ops, arguments

CODE = "__import__('os').system('touch canary')"


def test_09_names_that_are_code(tmp_path: Path) -> None:
    changes: list[Callable[[Forged], object]] = [
        lambda f: f.entry["inputs"][0].update(name=CODE),
        lambda f: f.entry["dims"].update({CODE: f.entry["dims"].pop("B")}),
        lambda f: f.entry.update(guards=[{"expr": CODE, "source": ""}]),
        lambda f: f.entry.update(result={"output": [CODE, [[CODE, {"leaf": 0}]]]}),
        lambda f: f.manifest.update(entries={CODE: f.entry}),
        lambda f: [p["nodes"][0].update(name=CODE) for p in f.programs()],
        lambda f: [p["nodes"][0].update(op=CODE) for p in f.programs()],
        lambda f: [p["nodes"][0].update(kwargs={CODE: 1}) for p in f.programs()],
        lambda f: [p["inputs"][0].__setitem__(0, CODE) for p in f.programs()],
        lambda f: f.add(node("a", "aten.einsum.default", {"str": CODE}, [X])),
        lambda f: f.manifest["members"][0].update(name=CODE),
        lambda f: f.manifest["provenance"].update(model=CODE),
    ]
    script = "import sys, widepack\nfrom widepack.errors import ArtifactError\nfor path in sys.argv[1:]:\n    try:\n        print(widepack.load(path))\n    except ArtifactError as e:\n        print('refused')\n"
    paths = []
    for i, change in enumerate(changes):
        forged = Forged()
        change(forged)
        paths.append(forged.save(tmp_path / str(i)))
    said = must(fresh(f"import os; os.chdir({str(tmp_path)!r})\n{script}", *paths)).splitlines()
    assert said.count("refused") == 8, said
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.zeros.out",
        "aten.add_.Tensor",
        "aten.copy_.default",
        "aten.set_.source_Storage",
        "aten.to.device",
        "aten.resize_.default",
        "aten.empty_strided.default",
        "aten._assert_async.default",
        "aten._print.default",
        "prims.device_put.default",
        "os.system",
        "builtins.eval",
        "operator.setitem",
        "operator.attrgetter",
        "operator.methodcaller",
        "torch.load",
        "torch.ops.load_library",
        "higher_order.cond",
        "mkldnn._convolution_pointwise.default",
        "widepack.convolution",
        "aten..default",
        "loop.default",
    ],
)
def test_10_ops_that_are_not_on_the_list(tmp_path: Path, op: str) -> None:
    refused(Forged().add(node("a", op, X)).save(tmp_path), "not on the list of allowed ops")


def test_11_widepacks_own_ops_in_a_member_program(tmp_path: Path) -> None:
    forged = Forged().add(node("a", "widepack.pack_linear.default", W, 1), start="programs/member.")
    forged.entry["wide"] = []
    refused(forged.save(tmp_path), "stands in wide programs alone")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["nodes"].insert(0, node("a", "aten.relu.default", ref("a"))), "which nothing before it makes"),
        (lambda p: p["nodes"].insert(0, node("a", "aten.relu.default", ref(p["nodes"][0]["name"]))), "which nothing before it makes"),
        (lambda p: p["nodes"].reverse(), "which nothing before it makes"),
        (lambda p: p["nodes"].append(copy.deepcopy(p["nodes"][0])), "two values are called"),
        (lambda p: p["nodes"].insert(0, node("x", "aten.relu.default", X)), "two values are called"),
        (lambda p: p["outputs"].__setitem__(0, [ref("gone"), "stacked"]), "which nothing makes"),
    ],
)
def test_12_cycles_and_values_before_they_are_made(tmp_path: Path, change: Callable[[Any], object], words: str) -> None:
    forged = Forged()
    for program in forged.programs():
        change(program)
    refused(forged.save(tmp_path), words)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (node("a", "aten.relu.default", X, out=X), "cannot run"),
        (node("a", "aten.relu.default", X, X), "cannot run"),
        (node("a", "aten.relu.default"), "cannot run"),
        (node("a", "aten.relu.default", {"str": "x"}), "cannot run"),
        (node("a", "aten.linear.default", X, 3), "cannot run"),
        (node("a", "aten.linear.default", X, X, X, self=X), "cannot run"),
        (node("a", "aten.cat.default", [1, 2]), "cannot run"),
        (node("a", "aten.view.default", X, [7, 7]), "cannot run"),
        (node("a", "aten.select.int", X, 5, 0), "cannot run"),
        (node("a", "aten.sum.dim_IntList", X, [0] * 70), "cannot run"),
        (node("a", "aten._to_copy.default", X, dtype={"dtype": "quint8"}), "cannot be told before it runs"),
        (node("a", "aten.zeros.default", [2], layout={"layout": "sparse_coo"}), "layout 'sparse_coo' is unknown"),
        (node("a", "aten.zeros.default", [2], pin_memory=True, device=SELF), "pin_memory"),
        (node("a", "operator.getitem", X, {"str": "__class__"}), "cannot run"),
        (node("a", "aten.softmax.int", X, 0, 2**31 - 1), "which is no number"),
        (node("a", "aten.relu.default", X, memory_format=77), "cannot run"),
        (node("a", "aten._stack.default", []), "cannot run"),
        (node("a", "aten._fft_r2c.default", X, [], 0, True), "transforms the dims []"),
        (node("a", "aten._fft_r2c.default", X, [-2], 2, True), "transforms the dims [-2]"),
        (node("a", "operator.getitem", 3, 3), "cannot run"),
        (node("a", "widepack.linear.default", X, X, None), "not enough values"),
        (node("a", "widepack.pack_linear.default", X, 1), "cannot run"),
        (node("a", "widepack.pack_lstm.default", W, W, False, [2, 2, 6]), "are not those of an LSTM"),
        (node("a", "widepack.lstm_steps.default", *[X] * 4, None, None, None, False), "cannot run"),
    ],
)
def test_13_arguments_of_other_types(tmp_path: Path, bad: dict[str, Any], words: str) -> None:
    refused(Forged().add(bad).save(tmp_path), words)


# ---------------------------------------------------------------- what a node asks for

BIG = 2**40


def wide(of: Any, rows: int) -> list[dict[str, Any]]:
    """`e`: one number seen as [rows, rows]."""
    return [node("s", "aten.sum.default", of), node("e", "aten.expand.default", ref("s"), [rows, rows])]


def bombs(of: Any) -> dict[str, list[dict[str, Any]]]:
    """Nodes that ask for more than any memory or time. of: what they are made of."""
    flat = [node("f", "aten.flatten.using_ints", of)]
    whole = [node("i", "aten._to_copy.default", ref("f"), dtype={"dtype": "int64"})]
    ones = [*flat, node("o", "aten.new_full.default", ref("f"), [4], 2**30, dtype={"dtype": "int64"})]
    image = [*flat, node("p", "aten.slice.Tensor", ref("f"), 0, 0, 1), node("m", "aten.view.default", ref("p"), [1, 1, 1, 1])]
    doubling = [node(f"d{i}", "aten.cat.default", [ref(f"d{i - 1}" if i else "f")] * 16) for i in range(12)]
    return {
        "zeros": [node("a", "aten.zeros.default", [BIG], device=SELF)],
        "zeros without a device": [node("a", "aten.zeros.default", [2**31])],
        "zeros past 64 bits": [node("a", "aten.zeros.default", [2**31, 2**31, 2**31], device=SELF)],
        "empty": [node("a", "aten.empty.memory_format", [2**20, 2**20], device=SELF)],
        "full": [node("a", "aten.full.default", [2**31], 1.0)],
        "new_zeros": [node("a", "aten.new_zeros.default", of, [2**31])],
        "arange": [node("a", "aten.arange.default", 10**10)],
        "linspace": [node("a", "aten.linspace.default", 0, 1, 2**31)],
        "eye": [node("a", "aten.eye.default", 2**20)],
        "randn": [node("a", "aten.randn.default", [2**31])],
        "randperm": [node("a", "aten.randperm.default", 2**31)],
        "tril_indices": [node("a", "aten.tril_indices.default", 2**17, 2**17)],
        "window": [node("a", "aten.kaiser_window.default", 2**31)],
        "fftfreq": [node("a", "aten.fft_fftfreq.default", 2**31)],
        "repeat": [*flat, node("a", "aten.repeat.default", ref("f"), [2**31])],
        "tile": [*flat, node("a", "aten.tile.default", ref("f"), [2**31])],
        "expand and clone": [*wide(of, 2**20), node("a", "aten.clone.default", ref("e"))],
        "product of views": [*wide(of, 2**14), node("a", "aten.mm.default", ref("e"), ref("e"))],
        "einsum": [*wide(of, 2**12), node("a", "aten.einsum.default", {"str": "ij,kl,mn->"}, [ref("e")] * 3)],
        "outer": [*wide(of, 2**11), *[node("g", "aten.reshape.default", ref("e"), [-1])], node("a", "aten.outer.default", ref("g"), ref("g"))],
        "kron": [*wide(of, 2**9), node("a", "aten.kron.default", ref("e"), ref("e"))],
        "cartesian_prod": [node("r", "aten.arange.default", 10**5), node("a", "aten.cartesian_prod.default", [ref("r")] * 3)],
        "one_hot": [*flat, *whole, node("a", "aten.one_hot.default", ref("i"), 2**31)],
        "one_hot by values": [*ones, node("a", "aten.one_hot.default", ref("o"), -1)],
        "bincount": [*ones, node("a", "aten.bincount.default", ref("o"))],
        "bincount at least": [*flat, *whole, node("z", "aten.abs.default", ref("i")), node("a", "aten.bincount.default", ref("z"), None, 2**31)],
        "repeat_interleave": [*ones, node("a", "aten.repeat_interleave.Tensor", ref("o"))],
        "repeat_interleave of rows": [*flat, node("a", "aten.repeat_interleave.self_int", ref("f"), 2**31)],
        "repeat_interleave by values": [
            *ones,
            node("q", "aten.slice.Tensor", ref("f"), 0, 0, 4),
            node("a", "aten.repeat_interleave.self_Tensor", ref("q"), ref("o"), 0),
        ],
        "pad": [*flat, node("a", "aten.constant_pad_nd.default", ref("f"), [2**31, 2**31])],
        "upsample": [*image, node("a", "aten.upsample_nearest2d.default", ref("m"), [2**20, 2**20])],
        "upsample by a factor": [*image, node("a", "aten.upsample_bilinear2d.vec", ref("m"), None, False, [1e6, 1e6])],
        "convolution": [*image, node("a", "aten.conv2d.default", ref("m"), ref("m"), None, [1, 1], [2**20, 2**20])],
        "transposed convolution": [*image, node("a", "aten.conv_transpose2d.input", ref("m"), ref("m"), None, [1, 1], [0, 0], [2**30, 2**30])],
        "pool": [
            *wide(of, 2**12),
            node("h", "aten.unsqueeze.default", ref("e"), 0),
            node("a", "aten.max_pool2d.default", ref("h"), [2049, 2049], [1, 1], [1024, 1024]),
        ],
        "diag_embed": [node("r", "aten.arange.default", 10**6), node("a", "aten.diag_embed.default", ref("r"))],
        "histc": [*flat, node("a", "aten.histc.default", ref("f"), 2**31)],
        "nonzero_static": [*flat, node("a", "aten.nonzero_static.default", ref("f"), size=2**31)],
        "multinomial": [*flat, node("z", "aten.abs.default", ref("f")), node("a", "aten.multinomial.default", ref("z"), 2**31, True)],
        "fft": [*flat, node("a", "aten.fft_fft.default", ref("f"), 2**31)],
        "doubling": [*flat, *doubling],
        "cdist": [*wide(of, 2**13), node("a", "aten.cdist.default", ref("e"), ref("e"))],
        "svd": [*wide(of, 2**12), node("a", "aten.linalg_svd.default", ref("e"))],
        "sort": [*wide(of, 2**14), node("a", "aten.sort.default", ref("e"))],
        "zeta": [*wide(of, 2**12), node("a", "aten.special_zeta.default", ref("e"), ref("e"))],
        "loss over a broadcast": [
            node("r", "aten.randn.default", [10**6, 1]),
            node("q", "aten.randn.default", [1, 10**6]),
            node("a", "aten.mse_loss.default", ref("r"), ref("q")),
        ],
        "attention": [
            node("q", "aten.randn.default", [1, 1, 10**6, 2]),
            node("a", "aten.scaled_dot_product_attention.default", ref("q"), ref("q"), ref("q")),
        ],
        "many steps": [
            node("q", "aten.randn.default", [2**23, 1, 1]),
            node("h", "aten.randn.default", [1, 1, 1]),
            node("v", "aten.randn.default", [1, 1]),
            node("a", "aten.rnn_tanh.input", ref("q"), ref("h"), [ref("v"), ref("v")], False, 1, 0.0, False, False, False),
        ],
        "a list of parts": [*wide(of, 2**13), *[node("g", "aten.reshape.default", ref("e"), [-1])], node("a", "aten.unbind.int", ref("g"))],
        "a list of empty parts": [node("z", "aten.zeros.default", [0]), node("a", "aten.chunk.default", ref("z"), 2**31)],
        "split": [*wide(of, 2**13), *[node("g", "aten.reshape.default", ref("e"), [-1])], node("a", "aten.split.Tensor", ref("g"), 1)],
        "mvlgamma": [*flat, node("a", "aten.mvlgamma.default", ref("f"), 2**31)],
        "many nodes": [*wide(of, 2**12), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(400)]],
    }


BOMBS = sorted(bombs(X))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if i % 3 else []) for i, name in enumerate(BOMBS)])
def test_14_nodes_that_ask_for_enormous_results(tmp_path: Path, name: str) -> None:
    text = refused(Forged().add(*bombs(X)[name]).save(tmp_path))
    assert "node " in text and ("load(limit=" in text or "cannot run" in text), text


@pytest.mark.parametrize("name", ["repeat", "product of views", "einsum", "svd", "doubling", "bincount", "a list of parts"])
def test_15_bombs_in_the_prologue(tmp_path: Path, name: str) -> None:
    """Made of weights alone: they would run before any call."""
    refused(Forged().add(*bombs(W)[name]).save(tmp_path), "node ", "load(limit=")


def looped(inner: list[dict[str, Any]], times: int, inputs: str = "shared", members: int = 0) -> dict[str, Any]:
    """A loop over nodes of `a`, nested so often."""
    body = {
        "format": "widepack.program/1",
        "members": members,
        "weights": [],
        "inputs": [["a", "a", inputs, ""]],
        "nodes": inner,
        "outputs": [[ref(inner[-1]["name"]), "ragged"]],
    }
    made = {"name": f"loop_{times}", "op": "loop", "args": [ref("a")], "body": body}
    return made if times == 1 else looped([made], times - 1, members=members)


def test_16_loops_multiply_work_and_are_not_multiplied(tmp_path: Path) -> None:
    step = [
        node("s", "aten.sum.default", ref("a")),
        node("e", "aten.expand.default", ref("s"), [1000, 1000]),
        node("y", "aten.mm.default", ref("e"), ref("e")),
        node("z", "aten.sum.default", ref("y")),
    ]
    once = looped(step, 1)
    once["args"] = [X]
    load(Forged().add(once).save(tmp_path / "once"), limit=0.07)
    refused(Forged().add(once).save(tmp_path / "1"), "would ", limit=0.03)
    other = looped(step, 1, members=2**31 - 1)
    other["args"] = [X]
    refused(Forged().add(other).save(tmp_path / "2"), "a body for 2147483647 members")
    for members, words in ((0, "a loop in a program of 0 members"), (3, "the work of this load")):
        nested = looped(step, 2, members=members)
        nested["args"] = [X]
        refused(Forged().add(nested).save(tmp_path / f"nested-{members}"), words, limit=0.07)
    deep = looped(step, 3)
    deep["args"] = [X]
    refused(Forged().add(deep).save(tmp_path / "3"), "nested")
    short = looped(step, 1, "stacked")
    short["args"] = [X]
    refused(Forged().add(short).save(tmp_path / "4"), "not one for each of 3 members")


@pytest.mark.parametrize(
    "bad",
    [
        node("a", "operator.pow", 10**18, 10**18),
        node("a", "operator.pow", 3, 65),
        node("a", "operator.mul", [1, 2], 2**40),
        node("a", "operator.add", {"str": "a"}, {"str": "b"}),
        node("a", "operator.mul", X, X),
        node("a", "operator.add", [X], [X]),
    ],
)
def test_17_numbers_and_lists_that_grow(tmp_path: Path, bad: dict[str, Any]) -> None:
    refused(Forged().add(bad).save(tmp_path), "node a")


def test_18_memory_that_is_not_the_tensors(tmp_path: Path) -> None:
    """`_reshape_alias` sets sizes and strides without a look at the memory behind them."""
    for size, stride in (([2**16], [1]), ([2, 6], [2**20, 1]), ([4, 1], [2**28, 1])):
        refused(Forged().add(node("a", "aten._reshape_alias.default", X, size, stride)).save(tmp_path / str(size[0])), "out of bounds")


# ---------------------------------------------------------------- guards, dims, entries


@pytest.mark.parametrize(
    "expr",
    [
        ["add"] + [["add", 1, 1]] * 2 + [1],
        ["eval", 1, 2],
        ["pow", 2, 2**62],
        [["add"], 1, 2],
        ["add", 1.5, 2],
        ["add", True, 2],
        {"add": 1},
        "Q",
        ["not"],
        2**63,
    ],
)
def test_19_guards_that_are_none(tmp_path: Path, expr: Any) -> None:
    forged = Forged()
    forged.entry["guards"] = [{"expr": expr, "source": ""}]
    refused(forged.save(tmp_path), "guard" if expr != 2**63 else "64 bits")


def test_20_guards_without_an_end(tmp_path: Path) -> None:
    deep: Any = "B"
    for _ in range(90):
        deep = ["mul", deep, "B"]
    forged = Forged()
    forged.entry["guards"] = [{"expr": deep, "source": ""}]
    refused(forged.save(tmp_path / "deep"), "nested over 64 deep")
    many: Any = "B"
    for _ in range(11):
        many = ["add", many, copy.deepcopy(many)]
    forged.entry["guards"] = [{"expr": many, "source": ""}]
    refused(forged.save(tmp_path / "many"), "over 1000 terms")
    power: Any = "B"
    for _ in range(60):
        power = ["mul", power, 2**62]
    forged.entry["guards"] = [{"expr": ["ge", power, 0], "source": ""}]  # of a size over 64 bits: not held, and soon
    refused(forged.save(tmp_path / "power"), "the probe is no call of it")
    assert guards.holds(power, {"B": 2}) is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min": 2**62}, "the probe is no call of it"),
        ({"min": 5, "max": 4}, "from 5 to 4 there is nothing"),
        ({"min": -1}, "expected a count"),
        ({"max": 2**63}, "outside 64 bits"),
        ({"example": 1.5}, "expected a count"),
    ],
)
def test_21_dims_with_absurd_bounds(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    forged = Forged()
    forged.entry["dims"]["B"].update(change)
    refused(forged.save(tmp_path), words)


@pytest.mark.parametrize(
    "type_",
    [
        "float32[B,9223372036854775807]",
        "float32[99999999999999999999]",
        "object[B,6]",
        "float32[2000000000*B,6]",
        "float32[" + ",".join("1" * 70) + "]",
        "float32[B,-6]",
    ],
)
def test_22_inputs_of_absurd_types(tmp_path: Path, type_: str) -> None:
    forged = Forged()
    forged.entry["inputs"][0]["type"] = type_
    forged.entry["wide"] = []  # so that the example's sizes are all that there is
    forged.manifest["probe"] = ""
    refused(forged.save(tmp_path))


def growing() -> list[dict[str, Any]]:
    """Sizes that stay small, of expressions that double at every step."""
    made: list[dict[str, Any]] = [node("n0", "aten.sym_size.int", X, 0)]
    for i in range(70):
        made.append(node(f"h{i}", "operator.floordiv", ref(f"n{i}"), 2))
        made.append(node(f"m{i}", "operator.mod", ref(f"n{i}"), 7))
        made.append(node(f"n{i + 1}", "operator.add", ref(f"h{i}"), ref(f"m{i}")))
    return made


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", "operator.pow", 10**18, 10**18)],
        [node("a", "aten.zeros.default", [BIG], device=SELF)],
        pytest.param(growing(), id="growing"),
    ],
)
def test_23_a_program_that_is_lowered_at_load(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    """Without wide programs the member's is lowered: what is enormous is refused before, and sizes that grow into endless expressions are given up."""
    forged = Forged().add(*nodes, start="programs/member.")
    forged.entry["wide"] = []
    refused(forged.save(tmp_path))


def test_24_many_entries_have_one_budget(tmp_path: Path) -> None:
    step = [*wide(X, 2**10), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(30)]]
    forged = Forged().add(*step)
    load(forged.save(tmp_path / "one"), limit=0.05)
    forged.manifest["entries"].update({f"other{i}": copy.deepcopy(forged.entry) for i in range(12)})
    forged.manifest["probe"] = ""
    refused(forged.save(tmp_path / "many"), "the work of this load", limit=0.05)


def test_25_a_service_may_lift_the_limit(tmp_path: Path) -> None:
    path = Forged().add(node("a", "aten.zeros.default", [2_000_000], device=SELF)).save(tmp_path)
    text = refused(path, "may take 2.7 MB when it is loaded", "load(limit=", limit=0.01)
    found = re.search(r"load\(limit=([0-9.e+-]+)\)", text)
    assert found
    load(path, limit=float(found[1]))
    load(path)
    load(path, limit=None)


# ---------------------------------------------------------------- other files, hashes, lies


def test_26_what_is_slipped_in_is_not_opened(tmp_path: Path) -> None:
    """Unlisted files, and .pt2 and .so files with right names and hashes."""
    forged = Forged()
    forged.files["programs/forward.shared-0000000000000000.pt2"] = b"\x80\x04cos\nsystem\n(S'touch canary'\ntR."
    forged.files["native-0000000000000000.so"] = b"\x7fELF" + b"\0" * 60
    forged.entry["pt2"] = {"shared": "programs/forward.shared-0000000000000000.pt2"}
    path = forged.save(tmp_path)
    (path / "programs" / "more.so").write_bytes(b"\x7fELF")
    (path / "sitecustomize.py").write_text("raise SystemExit('run')")
    for name in ("forward.shared", "more", "native"):
        for place in path.rglob(f"*{name}*"):
            place.chmod(0)
    script = (
        "import sys, widepack\nseen = []\n"
        "sys.addaudithook(lambda e, a: seen.append(str(a[0])) if e in ('open', 'ctypes.dlopen', 'import') else None)\n"
        "widepack.load(sys.argv[1])\nprint([s for s in seen if s.endswith(('.pt2', '.so', 'sitecustomize')) and 'forged' in s])"
    )
    assert must(fresh(script, path)).strip() == "[]"


@pytest.mark.parametrize("what", ["weights", "program", "probe", "manifest"])
def test_27_hashes_and_digest_that_do_not_fit(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of a user who has not loaded this artifact before
    path = Forged().save(tmp_path)
    place = {
        "weights": next(path.glob("weights-*")),
        "probe": next(path.glob("probe-*")),
        "program": next((path / "programs").glob("cpu.*shared*")),
        "manifest": path / "manifest.json",
    }[what]
    data = bytearray(place.read_bytes())
    if what in ("program", "manifest"):
        data[data.index(b"stacked")] ^= 1
    else:
        data[-64:] = bytes(b ^ 0x40 for b in data[-64:])
    place.write_bytes(data)
    refused(path, "was changed or damaged" if what == "manifest" else "SHA-256", verify="hashes")
    if what == "weights":  # sizes alone do not tell, but the probe does
        refused(path, "probe", kind=ProbeError)


def test_28_a_digest_that_is_not_the_expected_one(tmp_path: Path) -> None:
    path = Forged().save(tmp_path)
    refused(path, "expected the artifact sha256:", expect="sha256:" + "0" * 64)


def test_29_a_lie_about_the_number_of_members(tmp_path: Path) -> None:
    forged = Forged()
    forged.manifest["members"].pop()
    refused(forged.save(tmp_path / "fewer"), "signatures must name")
    forged.entry["signatures"].pop()
    refused(forged.save(tmp_path / "weights"), "do not hold what the manifest says")
    forged = Forged()
    for program in forged.programs():
        program["members"] = 2**31 - 1
    refused(forged.save(tmp_path / "program"), "is for 2147483647 members, the artifact has 3")
    forged = Forged()
    forged.manifest["members"] = [{"name": f"m{i}", "source": "", "sha256": "0" * 64, "bytes": 0} for i in range(70_000)]
    refused(forged.save(tmp_path / "many"), "1 to 65536")


def test_30_outputs_that_are_swapped_or_of_another_kind(tmp_path: Path) -> None:
    forged = Forged("entries")
    for program in forged.programs("programs/cpu.forward.shared"):
        program["outputs"].reverse()
    refused(forged.save(tmp_path / "swapped"), "probe", kind=ProbeError)
    for kind, words in (("ragged", "ragged"), ("shared", "probe")):
        forged = Forged()
        for program in forged.programs():
            program["outputs"][0][1] = kind
        refused(forged.save(tmp_path / kind), words)
    forged = Forged()
    for program in forged.programs():
        program["outputs"] = [[3, "stacked"]]
    refused(forged.save(tmp_path / "number"), "no tensor of 3 members")
    for program in forged.programs():
        program["outputs"] = []
    refused(forged.save(tmp_path / "none"), "has 0 outputs, the entry 1")


# ---------------------------------------------------------------- free records that are read


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"regions": 3},
        {"batch": ["x", None]},
        {"batch": []},
        {"choices": [1]},
        {"times_ms": {"a": "b"}},
        {"machine": 3, "threads": "many"},
        {"regions": [{"name": 1}]},
        {"at": [1]},
    ],
)
def test_31_plans_of_other_types(tmp_path: Path, plan: dict[str, Any]) -> None:
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"] = {**row["plan"], **plan} if plan else {}
    path = forged.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(path)
        except ArtifactError as e:
            assert "plan" in str(e)
            return
    assert set(plan) <= {"machine", "threads"}  # another machine's plan is not read


RECORD = {"output": "output", "own_max": 0.0, "own_rms": 0.0, "scale": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"wide": []},
        {"wide": {}},
        {"wide": {"shared.0": {}}},
        {"wide": {"shared.0": []}},
        {"wide": {"shared.0": [3]}},
        {"wide": {"shared.0": [{}]}},
        {"wide": {"shared.0": [{**RECORD, "own_max": "x"}]}},
        {"wide": {"shared.0": [{**RECORD, "scale": None}]}},
        {"wide": {"shared.0": [{**RECORD, "own_rms": -1}]}},
        {"wide": {"shared.0": [{**RECORD, "own_max": True}]}},
        {"wide": {"shared.0": [RECORD, RECORD]}},
    ],
)
def test_32_records_of_other_types(tmp_path: Path, record: Any) -> None:
    forged = Forged()
    forged.manifest["verification"] = record
    refused(forged.save(tmp_path))


@pytest.mark.parametrize("entries", [3, [], {"encode": 3}, {"encode": {"wide": 3}}])
def test_33_records_of_other_entries(tmp_path: Path, entries: Any) -> None:
    forged = Forged("entries")
    forged.manifest["verification"]["entries"] = entries
    refused(forged.save(tmp_path))


def probe_with(forged: Forged, change: Callable[[dict[str, torch.Tensor]], object]) -> Forged:
    from safetensors.torch import load as read
    from safetensors.torch import save

    def how(data: bytes) -> bytes:
        found = read(data)
        change(found)
        return save(found)

    return forged.change("probe-", how)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.pop("shared.x0"),
        lambda p: p.update({"shared.x0": torch.zeros(2, 7)}),
        lambda p: p.update({"shared.x0": torch.zeros(2, 6, dtype=torch.int64)}),
        lambda p: p.update({"shared.x0": torch.zeros(6)}),
        lambda p: p.pop("shared.y0.1"),
        lambda p: p.update({"shared.y0.1": torch.zeros(0, dtype=torch.float64)}),
        lambda p: p.update({"shared.y0.1": torch.zeros(2, 2, dtype=torch.float64)}),
        lambda p: p["shared.y0.1"].__setitem__(0, 0.0),
        lambda p: p["shared.y0.1"].__setitem__(0, -1.0),
        lambda p: p["shared.y0.1"].__setitem__(0, float("nan")),
        lambda p: p["shared.y0.1"].__setitem__(0, float("inf")),
        lambda p: p["shared.y0.1"].__setitem__(1, float("nan")),
        lambda p: p["shared.y0.1"].add_(1e-3),
    ],
)
def test_34_a_probe_of_other_tensors(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    refused(probe_with(Forged(), change).save(tmp_path))


def test_35_a_record_that_lets_everything_pass_is_believed(tmp_path: Path) -> None:
    """Not prevented: who writes the answers writes the bounds. Against that stands only a digest from a trusted place."""
    forged = probe_with(Forged(), lambda p: p["shared.y0.1"][1:].add_(1.0))
    for rows in forged.manifest["verification"]["wide"].values():
        for row in rows:
            row["own_max"] = 1e300
    load(forged.save(tmp_path))


@pytest.mark.parametrize("backend", ["aot", "onnxruntime", "compile", "os.system"])
def test_36_plans_that_name_a_backend(tmp_path: Path, backend: str) -> None:
    """Nothing is compiled or opened for it: what is not in this user's own cache runs on eager."""
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"].update(backend=backend, workers=10**9, at=10**12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ens = load(forged.save(tmp_path))
    assert ens.backend == "eager"
    assert torch.equal(ens(torch.ones(2, 6)), load(golden("mlp"))(torch.ones(2, 6)))


# ---------------------------------------------------------------- state, aliases, trees, ragged lists


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.entry["state"].append(f.entry["state"][0]), "an input stands twice"),
        (lambda f: f.entry["state"][0].update(output=9), "names input"),
        (lambda f: f.entry["state"][0].update(initial="inner.weight"), "begins as the weight"),
        (lambda f: f.entry["state"][0].update(initial="gone"), "is not in the table"),
        (lambda f: f.manifest.update(state=["other"]), "the entries carry total"),
        (lambda f: f.manifest.update(version=[1, 0]), "unknown state"),
        (lambda f: f.manifest["weights"][0].update(aliases=[f.manifest["weights"][1]["name"]]), "stands twice"),
        (lambda f: f.manifest["weights"][0].update(aliases=[f.manifest["weights"][0]["name"]]), "stands twice"),
        (lambda f: f.entry.update(result={"leaf": 1}), "result's tree"),
        (lambda f: f.entry["signature"].append(["y", "positional", {"leaf": 0}, False]), "each of the"),
    ],
)
def test_37_state_and_aliases_that_do_not_close(tmp_path: Path, change: Callable[[Forged], object], words: str) -> None:
    forged = Forged("state")
    change(forged)
    refused(forged.save(tmp_path), words)


def test_38_ragged_lists_of_other_lengths(tmp_path: Path) -> None:
    forged = Forged("ragged")
    row = next(w for w in forged.manifest["weights"] if w["kind"] == "ragged")
    row["shape"].append(row["shape"][0])
    refused(forged.save(tmp_path / "more"), "one shape for each of the 2 members")
    row["shape"] = [*row["shape"][:1], []]
    refused(forged.save(tmp_path / "rank"), "all of one rank")
    forged = Forged("ragged")
    for program in forged.programs():
        for item in program["nodes"]:
            if item["op"] == "loop":
                item["args"] = [[1] * 5 if isinstance(a, list) else a for a in item["args"]]
                item["args"][0] = [1, 2, 3]
    refused(forged.save(tmp_path / "loop"), "not one for each of 2 members")
    forged = Forged("ragged")
    for program in forged.programs():
        for slot in program["weights"]:
            slot[2] = "stacked"
    refused(forged.save(tmp_path / "kind"), "in the manifest's table it is ragged")


# ---------------------------------------------------------------- terminals


def test_39_nothing_drives_a_terminal(tmp_path: Path) -> None:
    escape = "\x1b[2J\x1b]0;owned\x07\x9b1m\u202egood"
    forged = Forged()
    forged.manifest["provenance"].update({"command": escape, escape: "x"})
    forged.manifest["verification"]["torch"] = escape
    for row in forged.entry["wide"]:
        row["plan"]["choices"] = {n: [escape, escape] for n in row["plan"]["choices"]}
    for program in forged.programs("programs/"):
        for item in program["nodes"]:
            item.update(source=escape, out=escape, member=item.get("member", ""))
    path = str(forged.save(tmp_path))
    for words in (
        ["inspect", path],
        ["inspect", path, "--files", "--weights"],
        ["trace", path, "--source"],
        ["inspect", path, "--json"],
        ["trace", path, "--json"],
    ):
        result = CliRunner().invoke(cli, words, prog_name="widepack")
        assert result.exit_code == 0, result.output
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", result.output), words
    for change in (
        lambda f: f.manifest["members"][0].update(name=escape),
        lambda f: [p["nodes"][0].update(op=escape) for p in f.programs()],
        lambda f: f.manifest.update({escape: 1}),
    ):
        forged = Forged()
        change(forged)
        refused(forged.save(tmp_path / str(id(change))))


@pytest.mark.parametrize("plan", [{"regions": 3}, {"choices": [1]}, {"regions": [{"strategy": []}]}, {"choices": {"relu": 5}}])
def test_40_records_that_are_shown(tmp_path: Path, plan: dict[str, Any]) -> None:
    forged = Forged()
    for row in forged.entry["wide"]:
        row["plan"] = plan
    forged.manifest["verification"] = {"wide": {"shared.0": [7]}, "calls": 3}
    path = str(forged.save(tmp_path))
    for words in (["inspect", path], ["trace", path], ["inspect", path, "--json"]):
        result = CliRunner().invoke(cli, words, prog_name="widepack")
        assert result.exit_code in (0, 1) and (result.exception is None or isinstance(result.exception, SystemExit)), result.exception


# ---------------------------------------------------------------- all of them at once


@given(st.data())
def test_41_any_change_of_a_manifest_is_refused_or_read(data: st.DataObject) -> None:
    """A short run of what scripts/fuzz_artifacts.py does at length."""
    forged = Forged(data.draw(st.sampled_from(["mlp", "ragged", "state", "entries"])))
    document: Any = forged.manifest if data.draw(st.booleans()) else data.draw(st.sampled_from(forged.programs("programs/")))
    part, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(part[key], (dict, list)) and part[key] and data.draw(st.integers(0, 3)):
        part = part[key]
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
    part[key] = data.draw(
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=5), st.just([]), st.just({})
        )
    )
    try:
        if document is forged.manifest:
            document["digest"] = strict_json.digest({k: v for k, v in document.items() if k != "digest"})
            Manifest.from_bytes(strict_json.canonical(document))
        else:
            Program.from_json(strict_json.parse(strict_json.canonical(document), "program"))
    except ArtifactError as e:
        assert str(e).strip()


@given(st.data())
def test_42_damage_is_refused_or_does_not_matter(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "ens.wide"
    shutil.copytree(golden("mlp"), path)
    place = data.draw(st.sampled_from(sorted(p for p in path.rglob("*") if p.is_file())))
    content = bytearray(place.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    place.write_bytes(content)
    with pytest.raises(ArtifactError):
        load(path, verify="hashes")


# ---------------------------------------------------------------- many programs, and files that are not there


def entries_of(forged: Forged, count: int) -> Forged:
    """The same entry so often, without a probe."""
    forged.manifest.update(probe="", entries={f"e{i}": copy.deepcopy(forged.entry) for i in range(count)})
    return forged


def test_43_results_of_many_prologues_are_held_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forged = Forged().add(
        node("b0", "aten.flatten.using_ints", W),
        node("b1", "aten.slice.Tensor", ref("b0"), 0, 0, 1),
        node("b2", "aten.repeat.default", ref("b1"), [1_500_000]),
        node("b3", "aten.flatten.using_ints", X),
        node("b4", "aten.slice.Tensor", ref("b3"), 0, 0, 1),
        node("b5", "aten.mul.Tensor", ref("b2"), ref("b4")),
    )
    path = entries_of(forged, 1).save(tmp_path / "one")
    load(path, limit=0.1)
    forged.manifest["entries"]["forward"] = forged.manifest["entries"]["e0"]
    path = entries_of(forged, 6).save(tmp_path / "many")
    first = refused(path, "would bring the memory of this load to", "in programs that are bound already", "load(limit=", limit=0.1)
    assert refused(path, "in programs that are bound already", limit=0.1) == first  # those that passed alone are known now
    ens = load(path, limit=1.0)
    assert ens._held._made.bytes >= 6 * 4 * 1_500_000
    ens.close()
    assert ens._held._made.bytes == 0


def test_44_a_load_that_is_refused_stays_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of a program that passed is its work, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    step = [*wide(X, 2**10), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(30)]]
    path = entries_of(Forged().add(*step), 12).save(tmp_path)
    texts = {refused(path, "the work of this load", limit=0.05) for _ in range(4)}
    assert len(texts) == 1
    found = re.search(r"load to ([0-9.]+) s of a core; .* may take ([0-9.]+) s .*load\(limit=([0-9.e+-]+)\) allows this much", texts.pop())
    assert found and float(found[1]) > float(found[2])


def test_45_bytes_that_are_not_there_justify_nothing(tmp_path: Path) -> None:
    """A hole of a sparse file, and a weight that no program reads."""
    big = 2**24

    def forge(asked: int, read: bool = False) -> Path:
        def longer(data: bytes) -> bytes:
            length = struct.unpack("<Q", data[:8])[0]
            found, body = json.loads(data[8 : 8 + length]), data[8 + length :]
            found["more"] = {"dtype": "U8", "shape": [big], "data_offsets": [len(body), len(body) + big]}
            return tensors(found, body + b"\1" * big)

        forged = Forged().change("weights-", longer).add(node("a", "aten.zeros.default", [asked], device=SELF))
        forged.manifest["weights"].append({"name": "more", "kind": "shared", "dtype": "uint8", "shape": [big], "role": "buffer", "aliases": []})
        for program in forged.programs() if read else []:
            program["weights"].append(["more", "more", "shared", f"uint8[{big}]"])
        return forged.save(tmp_path / f"{asked} {read}")

    load(forge(1_000_000, read=True), limit=0.01)  # 4 MB, where 2.7 MB are for any
    refused(forge(1_000_000), "may take 2.7 MB", limit=0.01)
    path = forge(1_000_000 + 1, read=True)
    place = next(path.glob("weights-*"))
    size = place.stat().st_size
    os.truncate(place, size - big)
    os.truncate(place, size)
    if place.stat().st_blocks * 512 > big // 2:
        pytest.skip("this file system has no holes")
    assert present(place) < 10_000 + size - big
    refused(path, "may take 2.7 MB", limit=0.01)


# ---------------------------------------------------------------- names and trees


def test_46_names_in_a_header_that_are_looked_up_one_by_one(tmp_path: Path) -> None:
    def forge(names: list[Any], many: int = 10) -> Path:
        rows: dict[str, Any] = {f"z{i}": {"dtype": "F64", "shape": [0, 2], "data_offsets": [0, 0]} for i in range(many)}
        place = tmp_path / "weights.safetensors"
        place.write_bytes(tensors({**rows, "__metadata__": {"complex128": json.dumps(names)}}))
        return place

    start = time.process_time()
    assert len(Weights([forge([f"z{i}" for i in range(6_000)], 6_000)])) == 6_000
    assert time.process_time() - start < 1
    for names, words in ((["z1", "z2", "z1"], "names 'z1' twice"), (["gone"], "not stored as pairs"), ([3], "not stored as pairs")):
        with pytest.raises(ArtifactError, match=words):
            Weights([forge(names)])


def test_47_a_long_key_above_many_leaves(tmp_path: Path) -> None:
    """The name of a leaf has all the keys above it: none is made while an artifact is read, and keys have a length."""
    many = 20_000
    for length, words in ((1_000_000, "at most 1000 characters"), (1000, "has 1 outputs, the entry 20000")):
        forged = Forged()
        shape: Any = {"tuple": [{"leaf": i} for i in range(many)]}
        for _ in range(1 if length > 1000 else 30):
            shape = {"dict": [["k" * length, shape]]}
        forged.entry["outputs"] = [{**forged.entry["outputs"][0], "name": ""}] * many
        forged.entry["result"] = shape
        refused(forged.save(tmp_path / str(length)), words)


def test_48_names_of_ragged_weights_that_are_written_out(tmp_path: Path) -> None:
    many = 60_000
    rows = [Weight(f"{i}" + "w" * 990, "ragged", "bool", [[]] * many, "buffer") for i in range(12)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(row.bytes(many) for row in rows) == 12 * many
    with pytest.raises(ArtifactError, match="do not hold what the manifest says(?s:.*)and more") as caught:
        Weights([golden("mlp") / next(n for n in Forged().files if n.startswith("weights-"))]).check(rows, many)
    assert len(str(caught.value)) < 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    for other in ("@0", "@1"):  # the second of two members' tensors, and no third
        for where in ("name", "aliases"):
            forged = Forged("ragged")
            row = next(w for w in forged.manifest["weights"] if w["kind"] == "ragged")
            one = next(w for w in forged.manifest["weights"] if w["kind"] != "ragged")
            one[where] = row["name"] + other if where == "name" else [row["name"] + other]
            refused(forged.save(tmp_path / f"{other}{where}"), "stands twice", "ragged weight")
    one["aliases"] = [row["name"] + "@2", row["name"] + "@01"]
    load(forged.save(tmp_path / "free"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"signature": [["x", "positional", {"tuple": [{"leaf": 0}, {"leaf": 0}]}, False]]}, "each of the 1 input leaves once"),
        ({"result": {"dict": [["k", {"leaf": 0}], ["k", {"const": 7}]]}}, "the key 'k' stands twice"),
        ({"result": {"output": ["A", [[1, {"leaf": 0}], [1, {"const": 7}]]]}}, "the key '1' stands twice"),
        ({"result": {"dict": [[True, {"leaf": 0}], [1, {"const": 7}]]}}, "keys are strings or integers"),
        ({"result": {"output": ["A\x1b[31m", [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"output": ["A\u202e", [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"output": ["A" * 1001, [["k", {"leaf": 0}]]]}}, "the name of a class has"),
        ({"result": {"dict": [["k\x1b]0;x\x07", {"leaf": 0}]]}}, "a key has"),
        ({"result": {"dict": [["k\u2066", {"leaf": 0}]]}}, "a key has"),
        ({"result": {"dict": [["k\n", {"leaf": 0}]]}}, "a key has"),
    ],
)
def test_49_trees_that_lose_a_leaf_or_drive_a_terminal(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    forged = Forged()
    forged.entry.update(change)
    refused(forged.save(tmp_path), words)


def test_50_errors_that_are_as_long_as_what_they_name(tmp_path: Path) -> None:
    long = "n" * 1000
    changes: list[Callable[[Forged], object]] = [
        lambda f: f.entry.update(guards=[{"expr": "Q" * 100_000, "source": ""}]),
        lambda f: f.entry["dims"].update({f"d{i}": f.entry["dims"]["B"] for i in range(10_000)}, **{"a b" * 10_000: f.entry["dims"]["B"]}),
        lambda f: f.entry.update(dims={f"d{i}": f.entry["dims"]["B"] for i in range(10_000)}),
        lambda f: [m.update(name=long) for m in f.manifest["members"]],
        lambda f: f.manifest["weights"][0].update(name=long, kind="gone"),
        lambda f: f.manifest["files"].update({f"x{i}-{'0' * 16}.bin": {"bytes": 1, "sha256": "0" * 64} for i in range(1000)}),
    ]
    for i, change in enumerate(changes):
        forged = Forged()
        change(forged)
        refused(forged.save(tmp_path / str(i)))  # whose length is bounded there


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.__setitem__(0, 0.0),
        lambda p: p.__setitem__(0, float("nan")),
        lambda p: p.__setitem__(0, float("inf")),
        lambda p: p.__setitem__(0, 1e300),
        lambda p: p.__setitem__(0, 1.5),
        lambda p: p[:0],
        lambda p: p[None],
        lambda p: p[0],
        lambda p: p[:-1],
        lambda p: p.to(torch.int64),
        lambda p: p.to(torch.complex64),
    ],
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_51_answers_of_other_forms_in_another_dtype(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor | None], dtype: str | None) -> None:
    def how(p: dict[str, torch.Tensor]) -> None:
        made = change(p["shared.y0.0"])
        p["shared.y0.0"] = p["shared.y0.0"] if made is None else made.contiguous()

    refused(probe_with(Forged(), how).save(tmp_path), "probe: ", kind=ProbeError, dtype=dtype)


def test_52_many_entries_that_are_lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline, and the same program once."""
    forged = Forged()
    forged.entry["wide"] = []
    asked: list[int] = []
    right = relower_.relower
    monkeypatch.setattr(relower_, "relower", lambda *a: asked.append(1) or right(*a))  # type: ignore[func-returns-value]  # append() gives None
    ens = load(entries_of(forged, 20).save(tmp_path / "same"))
    assert len(asked) == 1
    x = torch.arange(12.0).reshape(2, 6)
    assert all(torch.equal(ens.entry(name)(x), load(golden("mlp"))(x)) for name in ("e0", "e19"))
    one = Lowering(1.0)
    for files, spent in ((["a"], 0.0), (["a"], 30.0), (["a", "b"], 30.0)):
        one.spent += spent
        with one.within(files, [10] * len(files)):
            assert not over()  # of one file 65 s, of both 70
    assert one.spent < 61
    one.spent += 10
    with one.within(["b"], [10]):
        assert over()


@pytest.mark.parametrize("how", ["slice", "part of a list", "reshape", "loop"])
def test_53_memory_that_a_small_view_holds(tmp_path: Path, how: str) -> None:
    """Twelve tensors of 48 MB, of each of which one number is read at the end."""
    nodes = [node("f", "aten.flatten.using_ints", X), node("one", "aten.slice.Tensor", ref("f"), 0, 0, 1)]
    for i in range(12):
        big = node(f"big{i}", "aten.repeat.default", ref("one"), [12_000_000])
        if how == "slice":
            nodes += [big, node(f"v{i}", "aten.slice.Tensor", ref(f"big{i}"), 0, 0, 1)]
        elif how == "part of a list":
            nodes += [big, node(f"l{i}", "aten.split.Tensor", ref(f"big{i}"), 11_999_999), node(f"v{i}", "operator.getitem", ref(f"l{i}"), 1)]
        elif how == "reshape":
            nodes += [big, node(f"s{i}", "aten.narrow.default", ref(f"big{i}"), 0, 5, 1), node(f"v{i}", "aten.reshape.default", ref(f"s{i}"), [1])]
        else:
            inner = [node("big", "aten.repeat.default", ref("a"), [12_000_000]), node("v", "aten.slice.Tensor", ref("big"), 0, 0, 1)]
            loop = looped(inner, 1, members=3)
            nodes += [{**loop, "name": f"l{i}", "args": [ref("one")]}, node(f"v{i}", "operator.getitem", ref(f"l{i}"), 0)]
            nodes += [node(f"w{i}", "operator.getitem", ref(f"v{i}"), 0)]
    last = "w" if how == "loop" else "v"
    path = Forged().add(*nodes, node("all", "aten.cat.default", [ref(f"{last}{i}") for i in range(12)])).save(tmp_path)
    refused(path, "would bring the memory of this load to", "load(limit=")
    load(path, limit=10).close()


VIEWS = {
    "expand": lambda many: [node("u", "aten.unsqueeze.default", ref("o"), 1), node("v", "aten.expand.default", ref("u"), [3, many, -1, -1])],
    "as_strided": lambda many: [node("v", "aten.as_strided.default", ref("o"), [3, many, 4, 3], [0, 0, 0, 0])],
}


@pytest.mark.parametrize("many", [10**8, 2**30])
@pytest.mark.parametrize("kind", VIEWS)
def test_54_outputs_that_show_more_than_is_there(tmp_path: Path, kind: str, many: int) -> None:
    """A view takes no memory, and whoever reads it as a whole may copy it."""
    forged = Forged()
    for program in forged.programs():
        last = program["outputs"][0][0]
        program["nodes"] += [node("o", "aten.alias.default", last), *VIEWS[kind](many)]
        program["outputs"][0][0] = ref("v")
    text = refused(forged.save(tmp_path))
    assert "reading the outputs would bring the memory" in text or "cannot run" in text, text


def test_an_output_that_is_another_size_is_not_copied(tmp_path: Path) -> None:
    """Also where every limit is lifted."""
    forged = Forged()
    for program in forged.programs():
        program["nodes"] += [node("o", "aten.alias.default", program["outputs"][0][0]), *VIEWS["expand"](2**30)]
        program["outputs"][0][0] = ref("v")
    with pytest.raises(ProbeError, match="numbers, the artifact's answer is of another size"):
        load(forged.save(tmp_path), limit=None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"limit": 10**400}, "a number of 1329 bits is no limit"),
        ({"limit": 1e300}, "is no limit"),
        ({"expect": 5}, "give sha256: and 64 hex digits"),
        ({"expect": b"sha256:" + b"0" * 64}, "give sha256: and 64 hex digits"),
        ({"expect": "0" * 64}, "give sha256: and 64 hex digits"),
        ({"expect": "sha256:" + "AB" * 32}, "in lower case"),
        ({"expect": "x" * 100_000}, "is no digest"),
    ],
)
def test_what_a_service_asks_for_wrongly_is_not_the_artifacts_fault(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    refused(Forged().save(tmp_path), words, kind=UsageError, **how)


def test_the_page_and_the_tests_have_the_same_numbers() -> None:
    told = re.findall(r"^\| (\d+) \|.*`(test_\d+\w+)`", ATTACKS.read_text(encoding="utf-8"), re.MULTILINE)
    tests = [name for name in globals() if re.match(r"test_\d+_", name) and not name.startswith("test_00")]
    assert [name for _, name in told] == tests
    assert [int(number) for number, _ in told] == list(range(1, len(tests) + 1))
