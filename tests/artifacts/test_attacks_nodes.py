"""Tests attacks 9 to 18 of ATTACKS.md: names, ops, arguments, and nodes that need too much memory or work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import BIG, SELF, W, X, looped, refused, wide
from forged import Forged, node, ref
from support import fresh, must

from widepack import InputError, load

CODE = "__import__('os').system('touch canary')"


@pytest.mark.extended
def test_names_that_are_code(tmp_path: Path) -> None:
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
    script = (
        "import sys, widepack\nfrom widepack.errors import ArtifactError\n"
        "for path in sys.argv[1:]:\n    try:\n        print(widepack.load(path))\n"
        "    except ArtifactError as e:\n        print('refused')\n"
    )
    paths = []
    for i, change in enumerate(changes):
        forged = Forged()
        change(forged)
        paths.append(forged.save(tmp_path / str(i)))
    lines = must(fresh(f"import os; os.chdir({str(tmp_path)!r})\n{script}", *paths)).splitlines()
    assert lines.count("refused") == 8, lines
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
def test_ops_that_are_not_on_the_list(tmp_path: Path, op: str) -> None:
    refused(Forged().add(node("a", op, X)).save(tmp_path), "not on the list of allowed ops")


def test_ops_of_widepack_in_a_member_program(tmp_path: Path) -> None:
    forged = Forged().add(node("a", "widepack.pack_linear.default", W, 1), start="programs/member.")
    forged.entry["wide"] = []
    refused(forged.save(tmp_path), "only wide programs may use")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: p["nodes"].insert(0, node("a", "aten.relu.default", ref("a"))),
            "which does not exist before the node",
        ),
        (
            lambda p: p["nodes"].insert(0, node("a", "aten.relu.default", ref(p["nodes"][0]["name"]))),
            "which does not exist before the node",
        ),
        (lambda p: p["nodes"].reverse(), "which does not exist before the node"),
        (lambda p: p["nodes"].append(copy.deepcopy(p["nodes"][0])), "two values have the name"),
        (lambda p: p["nodes"].insert(0, node("x", "aten.relu.default", X)), "two values have the name"),
        (lambda p: p["outputs"].__setitem__(0, [ref("gone"), "stacked"]), "which does not exist"),
    ],
)
def test_cycles_and_values_that_are_read_before_they_are_computed(
    tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
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
        (node("a", "aten._to_copy.default", X, dtype={"dtype": "quint8"}), "is not known before it runs"),
        (
            node("a", "aten.zeros.default", [2], layout={"layout": "sparse_coo"}),
            "layout 'sparse_coo' is unknown",
        ),
        (node("a", "aten.zeros.default", [2], pin_memory=True, device=SELF), "pin_memory"),
        (node("a", "operator.getitem", X, {"str": "__class__"}), "cannot run"),
        (node("a", "aten.softmax.int", X, 0, 2**31 - 1), "which is not a number"),
        (node("a", "aten.relu.default", X, memory_format=77), "cannot run"),
        (node("a", "aten._stack.default", []), "cannot run"),
        (node("a", "aten._fft_r2c.default", X, [], 0, True), "transforms the dims []"),
        (node("a", "aten._fft_r2c.default", X, [-2], 2, True), "transforms the dims [-2]"),
        (node("a", "operator.getitem", 3, 3), "cannot run"),
        (node("a", "widepack.linear.default", X, X, None), "x has 2 dims; 3 are needed"),
        (node("a", "widepack.pack_linear.default", X, 1), "cannot run"),
        (node("a", "widepack.pack_lstm.default", W, W, False, [2, 2, 6]), "w_x has 6 rows; 4 * 8 are needed"),
        (node("a", "widepack.lstm_steps.default", *[X] * 4, None, None, None, False), "cannot run"),
    ],
)
def test_arguments_of_wrong_types(tmp_path: Path, bad: dict[str, Any], words: str) -> None:
    refused(Forged().add(bad).save(tmp_path), words)


def bombs(of: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns nodes that need more memory or time than any machine has. They read the value `of`."""
    flat = [node("f", "aten.flatten.using_ints", of)]
    whole = [node("i", "aten._to_copy.default", ref("f"), dtype={"dtype": "int64"})]
    ones = [*flat, node("o", "aten.new_full.default", ref("f"), [4], 2**30, dtype={"dtype": "int64"})]
    image = [
        *flat,
        node("p", "aten.slice.Tensor", ref("f"), 0, 0, 1),
        node("m", "aten.view.default", ref("p"), [1, 1, 1, 1]),
    ]
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
        "outer": [
            *wide(of, 2**11),
            *[node("g", "aten.reshape.default", ref("e"), [-1])],
            node("a", "aten.outer.default", ref("g"), ref("g")),
        ],
        "kron": [*wide(of, 2**9), node("a", "aten.kron.default", ref("e"), ref("e"))],
        "cartesian_prod": [
            node("r", "aten.arange.default", 10**5),
            node("a", "aten.cartesian_prod.default", [ref("r")] * 3),
        ],
        "one_hot": [*flat, *whole, node("a", "aten.one_hot.default", ref("i"), 2**31)],
        "one_hot by values": [*ones, node("a", "aten.one_hot.default", ref("o"), -1)],
        "bincount": [*ones, node("a", "aten.bincount.default", ref("o"))],
        "bincount at least": [
            *flat,
            *whole,
            node("z", "aten.abs.default", ref("i")),
            node("a", "aten.bincount.default", ref("z"), None, 2**31),
        ],
        "repeat_interleave": [*ones, node("a", "aten.repeat_interleave.Tensor", ref("o"))],
        "repeat_interleave of rows": [*flat, node("a", "aten.repeat_interleave.self_int", ref("f"), 2**31)],
        "repeat_interleave by values": [
            *ones,
            node("q", "aten.slice.Tensor", ref("f"), 0, 0, 4),
            node("a", "aten.repeat_interleave.self_Tensor", ref("q"), ref("o"), 0),
        ],
        "pad": [*flat, node("a", "aten.constant_pad_nd.default", ref("f"), [2**31, 2**31])],
        "upsample": [*image, node("a", "aten.upsample_nearest2d.default", ref("m"), [2**20, 2**20])],
        "upsample by a factor": [
            *image,
            node("a", "aten.upsample_bilinear2d.vec", ref("m"), None, False, [1e6, 1e6]),
        ],
        "convolution": [
            *image,
            node("a", "aten.conv2d.default", ref("m"), ref("m"), None, [1, 1], [2**20, 2**20]),
        ],
        "transposed convolution": [
            *image,
            node(
                "a", "aten.conv_transpose2d.input", ref("m"), ref("m"), None, [1, 1], [0, 0], [2**30, 2**30]
            ),
        ],
        "pool": [
            *wide(of, 2**12),
            node("h", "aten.unsqueeze.default", ref("e"), 0),
            node("a", "aten.max_pool2d.default", ref("h"), [2049, 2049], [1, 1], [1024, 1024]),
        ],
        "diag_embed": [
            node("r", "aten.arange.default", 10**6),
            node("a", "aten.diag_embed.default", ref("r")),
        ],
        "histc": [*flat, node("a", "aten.histc.default", ref("f"), 2**31)],
        "nonzero_static": [*flat, node("a", "aten.nonzero_static.default", ref("f"), size=2**31)],
        "multinomial": [
            *flat,
            node("z", "aten.abs.default", ref("f")),
            node("a", "aten.multinomial.default", ref("z"), 2**31, True),
        ],
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
            node(
                "a",
                "aten.rnn_tanh.input",
                ref("q"),
                ref("h"),
                [ref("v"), ref("v")],
                False,
                1,
                0.0,
                False,
                False,
                False,
            ),
        ],
        "a list of parts": [
            *wide(of, 2**13),
            *[node("g", "aten.reshape.default", ref("e"), [-1])],
            node("a", "aten.unbind.int", ref("g")),
        ],
        "a list of empty parts": [
            node("z", "aten.zeros.default", [0]),
            node("a", "aten.chunk.default", ref("z"), 2**31),
        ],
        "split": [
            *wide(of, 2**13),
            *[node("g", "aten.reshape.default", ref("e"), [-1])],
            node("a", "aten.split.Tensor", ref("g"), 1),
        ],
        "mvlgamma": [*flat, node("a", "aten.mvlgamma.default", ref("f"), 2**31)],
        "many nodes": [*wide(of, 2**12), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(400)]],
    }


BOMBS = sorted(bombs(X))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i % 3 else []) for i, name in enumerate(BOMBS)]
)
def test_nodes_with_enormous_results(tmp_path: Path, name: str) -> None:
    text = refused(Forged().add(*bombs(X)[name]).save(tmp_path))
    assert "node " in text and ("load(limit=" in text or "cannot run" in text), text


@pytest.mark.parametrize(
    "name", ["repeat", "product of views", "einsum", "svd", "doubling", "bincount", "a list of parts"]
)
def test_enormous_results_in_the_prologue(tmp_path: Path, name: str) -> None:
    """Nodes that depend on weights only would run at load, before any call."""
    refused(Forged().add(*bombs(W)[name]).save(tmp_path), "node ", "load(limit=")


def test_work_and_nesting_of_loops(tmp_path: Path) -> None:
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
    refused(Forged().add(short).save(tmp_path / "4"), "not one value for each of 3 members")


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
def test_enormous_numbers_and_lists_of_python(tmp_path: Path, bad: dict[str, Any]) -> None:
    refused(Forged().add(bad).save(tmp_path), "node a")


def test_views_outside_the_memory_of_a_tensor(tmp_path: Path) -> None:
    """`_reshape_alias` sets sizes and strides without a check of the memory. It runs as a reshape."""
    alias = node("a", "aten._reshape_alias.default", X, [2**16], [1])
    refused(Forged().add(alias).save(tmp_path), "invalid for input of size")


@pytest.mark.parametrize("name", ["dtype", "device", "layout"])
def test_a_dtype_that_is_a_number_at_some_calls(name: str, tmp_path: Path) -> None:
    """At a load with few rows it is a dtype, at a call with more rows the number 200."""
    literal = {"dtype": {"dtype": "float32"}, "device": SELF, "layout": {"layout": "strided"}}[name]
    nodes = [
        node("b", "aten.sym_size.int", X, 0),
        node("g", "operator.gt", ref("b"), 64),
        node("i", "torch.sym_int", ref("g")),
        node("d", "operator.getitem", [literal, 200], ref("i")),
    ]
    full = node("f", "aten.full.default", [4], 1.0, **{name: ref("d")})
    refused(
        Forged().add(*nodes, full).save(tmp_path),
        "node d (operator.getitem) does not read a part of one value",
    )


@pytest.mark.parametrize(
    ("op", "first", "factor"),
    [("operator.pow", 3, 2**33), ("operator.mul", 2**62, 3), ("operator.add", 2**62, 2**62)],
)
def test_arithmetic_without_end_at_some_calls(op: str, first: int, factor: int, tmp_path: Path) -> None:
    nodes = [
        node("b", "aten.sym_size.int", X, 0),
        node("g", "operator.gt", ref("b"), 64),
        node("i", "torch.sym_int", ref("g")),
        node("m", "operator.mul", ref("i"), factor),
        node("p", op, first, ref("m")),
    ]
    ens = load(Forged().add(*nodes).save(tmp_path))
    assert ens(torch.zeros(64, 6)).shape[1] == 64
    with pytest.raises(InputError, match="exponent|bits"):
        ens(torch.zeros(65, 6))
