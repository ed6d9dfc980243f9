"""Tests which folders a swap over HTTP reads: LoRA adapters inside of the folder of swaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from widepack_serve.errors import RequestError
from widepack_serve.lifecycle.swaps import checkpoint_in


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_the_folder_of_an_adapter_is_a_checkpoint(tmp_path: Path) -> None:
    adapter(tmp_path / "lora" / "porto")
    assert checkpoint_in(tmp_path, "lora/porto") == (tmp_path / "lora" / "porto").resolve()


def test_the_folder_of_all_checkpoints_is_none(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    for name in ("lora/..", "."):
        with pytest.raises(RequestError, match="there is no checkpoint"):
            checkpoint_in(tmp_path, name)


def test_an_adapter_outside_is_refused(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    swaps.mkdir()
    outside = adapter(tmp_path / "other")
    with pytest.raises(RequestError, match="outside of the folder"):
        checkpoint_in(swaps, "../other")
    (swaps / "link").symlink_to(outside)
    with pytest.raises(RequestError, match="outside of the folder"):
        checkpoint_in(swaps, "link")
    linked = adapter(swaps / "linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="there is no checkpoint"):
        checkpoint_in(swaps, "linked")
    (linked / "adapter_model.safetensors").unlink()
    checkpoint_in(swaps, "linked")
    (linked / "deeper").mkdir()
    (linked / "deeper" / "link").symlink_to(outside)
    with pytest.raises(RequestError, match="there is no checkpoint"):
        checkpoint_in(swaps, "linked")
