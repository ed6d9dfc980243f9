"""Shares helpers of the tests of isolation: an artifact with NaN in one member, and all members' answers."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from support import leaves, stack
from torch.utils import _pytree as pytree

import cases
from widepack.inference.model import WideModel
from widepack_artifacts.reader import Reader

PATTERNS = ("shared", "each")


def poisoned(artifact: Path, member: int, folder: Path) -> Path:
    """Returns a copy in which every Stacked floating weight of one member is NaN.

    NaN is written into the file, because tensors at another address in memory may round differently.
    """
    shutil.copytree(artifact, folder)
    (path,) = folder.glob("weights-*.safetensors")
    kinds = {weight.name: weight.kind for weight in Reader(artifact).manifest.weights}
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        for name, row in json.loads(file.read(length)).items():
            of, _, number = name.rpartition("@")
            if row.get("dtype") != "F32" or kinds[of or name] == "shared" or (of and int(number) != member):
                continue
            start, end = row["data_offsets"]
            size = end - start if of else (end - start) // row["shape"][0]
            file.seek(8 + length + start + (0 if of else member * size))
            file.write(struct.pack("<f", float("nan")) * (size // 4))
    return folder


def to(value: Any, device: str) -> Any:
    """Moves the tensors of a call to a device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def answers(ens: WideModel, name: str, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Returns, for each member, its answers to calls of both presets."""
    case = cases.load(name)
    found: list[list[torch.Tensor]] = [[] for _ in range(case.N)]
    for batch, pattern in itertools.product((1, 3), PATTERNS):
        calls = [to(case.sample(batch, 40 + i), device) for i in range(case.N)]
        result = (
            ens(*calls[0][0], **calls[0][1])
            if pattern == "shared"
            else ens.each(*stack([a for a, _ in calls]), **stack([k for _, k in calls]))
        )
        wide = (
            leaves(result) if isinstance(result, torch.Tensor) or not isinstance(result, list) else [result]
        )
        for i in range(case.N):
            found[i] += [leaf[i] for leaf in wide]
    return found
