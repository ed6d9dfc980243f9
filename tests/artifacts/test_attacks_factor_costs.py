"""Tests the attacks of ATTACKS.md on factored weights that are small on the disk and large in memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import refused, tensors
from forged import Forged, node, ref

from widepack import load
from widepack.errors import ArtifactError

SIDE, MEMBERS = 1024, 256  # the weights are 4 MiB in one member, 1 GiB in all, and 6 MiB as factors
KINDS = {"base": "shared", "left": "stacked", "right": "stacked"}
MERGED = [
    node("p", "aten.bmm.default", ref("left"), ref("right")),
    node("w", "aten.add.Tensor", ref("p"), ref("base")),
    node("t", "aten.transpose.int", ref("w"), 1, 2),
    node("y", "aten.matmul.default", ref("x"), ref("t")),
]


SPLIT = [
    node("e", "aten.expand.default", ref("x"), [MEMBERS, -1, -1]),
    node("y", "widepack.delta_linear.default", ref("e"), ref("base"), ref("left"), ref("right"), None),
]


def large(wide: list[dict[str, Any]]) -> Forged:
    """Returns an artifact of one linear layer with factored weights, which are zeros.

    wide: the nodes of every wide program, over `x` and the parts of the weights.
    """
    shapes = {"base": [SIDE, SIDE], "left": [SIDE, 1], "right": [1, SIDE]}
    forged, type_ = Forged("fleet"), f"float32[B,{SIDE}]"
    m, entry = forged.manifest, forged.entry
    m["members"] = [{"name": f"m{i}", "source": "", "sha256": "0" * 64, "bytes": 0} for i in range(MEMBERS)]
    m["probe"], m["weights"], m["files"], header, at = "", [], {}, {}, 0
    for part, shape in shapes.items():
        stored = shape if part == "base" else [MEMBERS, *shape]
        size = 4 * torch.Size(stored).numel()
        row = {"name": f"w@{part}", "kind": KINDS[part], "dtype": "float32", "shape": shape}
        m["weights"].append({**row, "role": "factor", "aliases": []})
        header[row["name"]] = {"dtype": "F32", "shape": stored, "data_offsets": [at, at := at + size]}
    forged.files = {"weights-0000000000000000.safetensors": tensors(header, bytes(at))}
    parts = {part: f"w@{part}" for part in shapes}
    weight = {"name": "w", "role": "parameter", "aliases": [], "ranks": [1] * MEMBERS, **parts}
    m["factored"] = {"weights": [weight], "corrections": ""}
    entry["signatures"] = [0] * MEMBERS
    entry["inputs"][0]["type"] = entry["outputs"][0]["type"] = type_
    for program in forged.programs("programs/"):
        program["inputs"][0][3] = type_
        program["outputs"][0][0] = ref("y")
        if program["members"]:
            program["members"], program["nodes"] = MEMBERS, wide
            program["weights"] = [
                [p, f"w@{p}", KINDS[p], f"float32[{shapes[p][0]},{shapes[p][1]}]"] for p in shapes
            ]
        else:
            program["nodes"] = [node("y", "aten.linear.default", ref("x"), ref("w"))]
            program["weights"] = [["w", "w", "shared", f"float32[{SIDE},{SIDE}]"]]
    return forged


def test_small_factors_of_weights_that_need_much_memory(tmp_path: Path) -> None:
    """The programs merge 170 times the bytes of the files: others run, which read the factors only."""
    path = large(MERGED).save(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for how in ({}, {"prologue": False}, {"warmup": False}, {"memory": "most"}):
        ens = load(path, **how)
        for rows in (1, 100):
            assert ens(torch.zeros(rows, SIDE)).shape == (MEMBERS, rows, SIDE)
        del ens
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # KiB, with the answers
    refused(path, "(widepack.delta_linear.default) would bring the memory of this load to", limit=1e-3)


def test_small_factors_that_are_not_merged(tmp_path: Path) -> None:
    """The same artifact loads with programs that read the factors only, and computes one member's weight."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ens = load(large(SPLIT).save(tmp_path))
    assert ens(torch.ones(1, SIDE)).shape == (MEMBERS, 1, SIDE)
    assert ens.state_dict(MEMBERS - 1)["w"].shape == (SIDE, SIDE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_a_base_that_is_a_hole(tmp_path: Path) -> None:
    """A base of 4 GiB, none of which is on the disk, with programs that lowering reads at load."""
    side = 2**15
    forged = large([])
    m, header, at = forged.manifest, {}, 0
    forged.entry["wide"] = []
    for program in forged.programs("programs/member."):
        program["weights"][0][3] = f"float32[{side},{side}]"
        program["inputs"][0][3] = f"float32[B,{side}]"
    forged.entry["inputs"][0]["type"] = forged.entry["outputs"][0]["type"] = f"float32[B,{side}]"
    for row in m["weights"]:
        row["shape"] = [side if n == SIDE else n for n in row["shape"]]
        stored = row["shape"] if row["kind"] == "shared" else [MEMBERS, *row["shape"]]
        end = at + 4 * torch.Size(stored).numel()
        header[row["name"]] = {"dtype": "F32", "shape": stored, "data_offsets": [at, end]}
        at = end
    start = tensors(header)
    forged.files = dict.fromkeys(forged.files, start)
    path = forged.save(tmp_path)
    (place,) = path.glob("weights-*")
    with open(place, "r+b") as file:
        file.truncate(len(start) + at)
    refused(path, "would bring the memory of this load to", verify="off")
    words = "weight w has 4,294,967,296 bytes, but its file has "
    with pytest.raises(ArtifactError, match=words):
        load(path, verify="off", warmup=False).state_dict(0)


def test_corrections_that_are_holes(tmp_path: Path) -> None:
    """A correction of 4 GiB, none of which is on the disk."""
    size = 2**32
    path = Forged("fleet").save(tmp_path)
    (place,) = path.glob("corrections-*")
    header = tensors({"inner.weight@0": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    place.write_bytes(header)
    with open(place, "r+b") as file:
        file.truncate(len(header) + size)
    ens = load(path, verify="off")
    with pytest.raises(ArtifactError, match="4,294,967,296 bytes for 768 elements"):
        ens.state_dict(0)
