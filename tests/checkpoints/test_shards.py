"""Tests checkpoints in several files, and folders of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.refusals import refusal
from widepack.checkpoints.discovery import member_names, open_checkpoint
from widepack.errors import CheckpointError
from widepack_artifacts.format_version import FORMAT

STATE: dict[str, Tensor] = {
    name: torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
    for i, name in enumerate(("a.weight", "a.bias", "b.weight", "b.bias"))
}
SAVERS: dict[str, tuple[Callable[..., Any], str]] = {
    "safetensors": (save_file, "model.safetensors"),
    "bin": (torch.save, "pytorch_model.bin"),
}


def sharded(folder: Path, form: str, prefix: str = "") -> Path:
    """Writes two shards and their index. Returns the path of the index."""
    save, stem = SAVERS[form]
    folder.mkdir(parents=True, exist_ok=True)
    parts = {f"model-0000{i}-of-00002.{form}": list(STATE)[2 * i - 2 : 2 * i] for i in (1, 2)}
    for name, keys in parts.items():
        save({prefix + k: STATE[k] for k in keys}, folder / name)
    index = folder / f"{stem}.index.json"
    files = {prefix + k: name for name, keys in parts.items() for k in keys}
    index.write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": files}))
    return index


@pytest.mark.parametrize("form", SAVERS)
def test_shards_are_one_checkpoint(tmp_path: Path, form: str) -> None:
    index = sharded(tmp_path / "runs", form)
    for path in (index, index.parent):
        found = open_checkpoint(path)
        assert found.path == str(path)
        assert list(found.tensors()) == list(STATE)
        assert all(torch.equal(found.get(k), v) for k, v in STATE.items())
        files = [index, *sorted(index.parent.glob("model-*"))]
        assert found.bytes == sum(f.stat().st_size for f in files)
        lines = "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files)
        assert found.sha256() == hashlib.sha256(lines.encode()).hexdigest()
    renamed = index.rename(index.parent / "whatever")  # recognised by its content
    assert list(open_checkpoint(renamed).tensors()) == list(STATE)


def test_prefixes_and_keys_of_shards(tmp_path: Path) -> None:
    found = open_checkpoint(sharded(tmp_path, "bin", "module._orig_mod."))
    assert list(found.tensors()) == list(STATE)
    assert torch.equal(found.get("b.bias"), STATE["b.bias"])
    index = sharded(tmp_path / "ema", "safetensors", "ema.")
    assert all(torch.equal(open_checkpoint(index, "ema").get(k), v) for k, v in STATE.items())
    assert "no name in it begins with 'emma.', so the key 'emma' names nothing" in refusal(index, "emma")


def test_a_shard_that_changes_is_noticed(tmp_path: Path) -> None:
    index = sharded(tmp_path, "bin")
    found = open_checkpoint(index)
    torch.save(dict(STATE), tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match="model-00002-of-00002.bin: was changed or replaced"):
        found.sha256()


def edit(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(index.read_text())
    change(value)
    index.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (
            lambda i: [p.unlink() for p in i.parent.glob("model-*")],
            "is an index of 2 files, of which these are missing: model-00001-of-00002.bin, "
            "model-00002-of-00002.bin",
        ),
        (
            lambda i: (i.parent / "model-00002-of-00002.bin").write_text("hello"),
            "its shard model-00002-of-00002.bin is a text file",
        ),
        (
            lambda i: edit(i, lambda v: v["weight_map"].update({"c": "model-00001-of-00002.bin"})),
            "the index says that c is in model-00001-of-00002.bin, but it is not",
        ),
        (
            lambda i: edit(i, lambda v: v["weight_map"].update({"c": "../c.bin"})),
            "is an index that names '../c.bin'; shards must be files beside their index",
        ),
        (
            lambda i: edit(i, lambda v: v["weight_map"].update({"c": 3})),
            "has no weight_map of file names by tensor",
        ),
        (lambda i: edit(i, lambda v: v.update({"weight_map": {}})), "is an index of no tensors"),
        (lambda i: edit(i, dict.clear), "is a text file (it starts with '{}')"),
        (
            lambda i: i.write_text('{"weight_map": {"a": "b"'),
            "is not an index of shards: the index: not JSON",
        ),
        (lambda i: i.write_text('{"weight_map": {"a": "b", "a": "c"}}'), "occurs twice"),
    ],
)
def test_an_index_that_cannot_be_used(tmp_path: Path, hurt: Callable[[Path], object], words: str) -> None:
    index = sharded(tmp_path, "bin")
    hurt(index)
    assert words in refusal(index)


def test_the_checkpoint_that_is_chosen_in_a_folder(tmp_path: Path) -> None:
    def folder(*names: str) -> Path:
        path = tmp_path / f"f{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        for name in names:
            torch.save({name: torch.ones(1)}, path / name)
        return path

    for names in (
        ["model.safetensors", "pytorch_model.bin", "other.pt"],
        ["diffusion_model.bin", "optimizer.pt", "training_args.bin"],
    ):
        assert list(open_checkpoint(folder(*names)).tensors()) == names[:1]
    assert "it has a.pt, b.pt; name the files in it" in refusal(folder("b.pt", "a.pt"))
    assert "it has no weights" in refusal(folder())
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    words = "is a folder of torch.distributed.checkpoint; convert the folder to one file: python -m"
    assert words in refusal(tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"PK")
    assert "is a part of a folder of torch.distributed.checkpoint; convert the folder" in refusal(
        tmp_path / "dcp" / "__0_0.distcp"
    )
    (tmp_path / "e.wide").mkdir()
    (tmp_path / "e.wide" / "manifest.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "e.wide" / "model.safetensors").touch()
    assert "is an artifact, not a checkpoint; `widepack extract` writes" in refusal(tmp_path / "e.wide")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "zero_to_fp32.py").touch()
    assert "is a folder of DeepSpeed" in refusal(tmp_path / "deep")
    assert member_names(["runs/a", "runs/b/"]) == ["a", "b"]
    assert member_names(["a/model.safetensors.index.json", "b/model.safetensors.index.json"]) == ["a", "b"]
