"""Tests checkpoints that another process shortens while they are read: an error, and no signal (SIGBUS)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_forms import FORMS
from safetensors.torch import save_file
from torch import Tensor, nn

import widepack
from widepack.checkpoints.discovery import open_checkpoint
from widepack.checkpoints.mapped_memory import copied, copy_into, plain_copies

SIZE = 128  # a weight of 64 KiB: several pages


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE))


def exported(path: Path) -> None:
    x = torch.randn(4, SIZE)
    dims = {"input": {0: torch.export.Dim("B")}}
    torch.export.save(torch.export.export(net().eval(), (x,), dynamic_shapes=dims), path)


SAVES: dict[str, Callable[[Path], object]] = {
    "a.pt": lambda p: torch.save(net().state_dict(), p),
    "b.pt": lambda p: torch.save({"epoch": 3, "state_dict": net().state_dict()}, p),
    "a.safetensors": lambda p: save_file(net().state_dict(), p),
    "a.pt2": exported,
    "module.pt": lambda p: torch.save(net(), p),
}


def members(folder: Path, name: str) -> list[str]:
    paths = []
    for i in range(2):
        (folder / str(i)).mkdir()
        torch.manual_seed(i)
        SAVES[name](folder / str(i) / name)
        paths.append(str(folder / str(i) / name))
    return paths


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_the_tensor(form: str, dtype: torch.dtype) -> None:
    for shape in ((4, 6), (6,)):
        made = FORMS[form](torch.randn(shape))
        tensor = made if made.is_neg() else made.to(dtype)
        found = copied(tensor)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.tensor(True),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.arange(60).view(3, 4, 5).permute(2, 0, 1)[1:, :, ::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["empty", "a number", "bool", "conjugated", "strided", "channels last"],
)
def test_a_copy_of_other_forms(tensor: Tensor) -> None:
    assert torch.equal(copied(tensor), tensor)
    given = {"a": [tensor, "text", {"b": tensor}], "c": 1}
    found: Any = plain_copies(given)
    assert torch.equal(found["a"][2]["b"], tensor) and found["a"][1] == "text" and found["c"] == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_into_another_tensor(form: str) -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = FORMS[form](torch.randn(4, 6))
        target = torch.zeros(4, 6, dtype=dtype)
        copy_into(target, tensor)
        assert torch.equal(target, tensor.to(dtype))
    target = torch.zeros(6, 4).t()
    copy_into(target, tensor)
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.pt2"])
def test_a_file_that_becomes_shorter(name: str, tmp_path: Path) -> None:
    path = members(tmp_path, name)[0]
    checkpoint = open_checkpoint(path)
    before = checkpoint.state_dict()
    size = os.path.getsize(path)
    os.truncate(path, 4096)
    words = f"checkpoint {path}: became shorter while it was read: it had {size:,} bytes and has 4,096; build"
    with pytest.raises(widepack.CheckpointError, match=words):
        checkpoint.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in before.values())  # copies stay


def test_a_shard_that_becomes_shorter(tmp_path: Path) -> None:
    state = net().state_dict()
    files = dict.fromkeys(state, "model-1.safetensors") | {"2.weight": "model-2.safetensors"}
    for file in set(files.values()):
        save_file({n: t for n, t in state.items() if files[n] == file}, tmp_path / file)
    text = str({"weight_map": files}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(text)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "model-2.safetensors", 100)
    checkpoint.get("0.weight")
    with pytest.raises(widepack.CheckpointError, match="model-2.safetensors became shorter while"):
        checkpoint.get("2.weight")


STAGES = ("capture", "write weights", "verify")


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(("a.pt", stage) for stage in STAGES),
        ("a.pt2", "verify"),
        ("module.pt", "verify"),
        *(pytest.param("b.pt", stage, marks=pytest.mark.extended) for stage in STAGES),
        *(pytest.param(n, s, marks=pytest.mark.extended) for n in ("a.pt2", "module.pt") for s in STAGES[:2]),
    ],
)
def test_a_build_of_a_file_that_becomes_shorter(name: str, stage: str, tmp_path: Path) -> None:
    paths = members(tmp_path, name)

    def shorten(at: str, done: int, total: int) -> None:
        if at == stage and done == 0:
            os.truncate(paths[1], 4096)

    more: dict[str, Any] = {"trust_pickle": name == "module.pt"}
    if name in ("a.pt", "b.pt"):
        more["model"] = net
    if name != "a.pt2":
        more["inputs"] = [f"input=float32[B,{SIZE}]"]
    with pytest.raises(widepack.WidepackError) as caught:
        widepack.build(
            paths, tmp_path / "e.wide", pt2=False, targets=("cpu",), progress=shorten, budget=0, **more
        )
    assert paths[1] in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "e.wide").exists()
