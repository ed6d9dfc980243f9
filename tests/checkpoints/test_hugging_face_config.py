"""Tests the config.json of `--model hf` that an untrusted source wrote."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from widepack import CheckpointError, build
from widepack.checkpoints.hugging_face import read_config
from widepack.checkpoints.named_factory import find_factory
from widepack.errors import MemberMismatch, UsageError

GOOD: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 20,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
}


def written(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**GOOD, **changes}))
    return str(folder / "config.json")


def refused(path: str) -> str:
    begin = time.monotonic()
    with pytest.raises(UsageError) as caught:
        read_config(path, os.path.dirname(path), "hf")
    assert time.monotonic() - begin < 5 and "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a pipe", lambda p: os.mkfifo(p), "is not a plain file"),
    ("a device without end", lambda p: p.symlink_to("/dev/zero"), "is not a plain file"),
    ("a folder", lambda p: p.mkdir(), "is not a plain file"),
    ("a link to nothing", lambda p: p.symlink_to("none"), "has none"),
    ("many levels", lambda p: p.write_text('{"a":' * 100_000 + "1" + "}" * 100_000), "nested over 200 deep"),
    ("many levels of lists", lambda p: p.write_text("[" * 100_000 + "]" * 100_000), "nested over 200 deep"),
    ("no UTF-8", lambda p: p.write_bytes(b"\xff{}"), "not JSON"),
    ("a key twice", lambda p: p.write_text('{"n_layer": 1, "n_layer": 2}'), "occurs twice"),
    ("a long number", lambda p: p.write_text('{"n_layer": ' + "9" * 100_000 + "}"), "outside 64 bits"),
    ("a list", lambda p: p.write_text("[]"), "is not a JSON object"),
]


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_files_that_are_no_config(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    assert words in refused(str(tmp_path / "config.json"))


def test_a_large_file(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    assert "at most 16,777,216 are read" in refused(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 10**9},
        {"num_hidden_layers": 10**9},
        {"vision_config": {"depths": [2, 10**9]}},
        {"num_experts": 10**6},
        {"num_labels": 10**9},
        {"vocab_size": 2**62},
    ],
)
def test_sizes_that_would_not_end(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "at most" in refused(written(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "org/repo"},
        {"attn_implementation": "org/repo:kernel"},
        {"_attn_implementation_internal": "org/repo@v1"},
        {"attn_implementation": {"": "sdpa", "text_config": "org/repo"}},
        {"text_config": {"_attn_implementation": "org/repo"}},
        {"parts": [{"experts_implementation": "org/repo"}]},
        {"_attn_implementation": "paged|org/repo"},
        {"_attn_implementation": ["org/repo"]},
    ],
)
def test_implementations_that_are_downloaded(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "for which transformers may download code" in refused(written(tmp_path, **changes))


def test_configs_as_people_have_them(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "_attn_implementation": "flash_attention_2",  # as in some public models
        "attn_implementation": "sdpa",
        "text_config": {"attn_implementation": {"": "flash_attention_3"}},
        "max_position_embeddings": 10_485_760,
        "sliding_window": 2**31,
        "bos_token_id": 151_643,
        "num_attention_heads": 128,
        "head_dim": 8192,
        "time_step_limit": [0.0, float("inf")],
    }
    found = read_config(written(tmp_path, **changes), str(tmp_path), "hf")
    assert "_attn_implementation" not in found and found["attn_implementation"] == "sdpa"
    assert found["time_step_limit"][1] == float("inf") and found["sliding_window"] == 2**31


@pytest.mark.parametrize("changes", [{"vocab_size": 2**38}, {"n_positions": 2**39}])
def test_sizes_that_no_memory_holds_are_refused_before_they_are_allocated(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    written(tmp_path, **changes)
    with pytest.raises(UsageError, match=r"config\.json describes a model of at least .* memory are free"):
        find_factory("hf", None, [str(tmp_path)])()


@pytest.mark.extended
def test_a_member_is_made_of_the_file_that_was_checked(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    written(tmp_path, _attn_implementation="flash_attention_2")
    factory = find_factory("hf", None, [str(tmp_path)])
    written(tmp_path, n_layer=2)
    module = factory()
    assert module.config.n_layer == 1 and module.config.name_or_path == str(tmp_path)  # type: ignore[union-attr]
    for names in (["PreTrainedModel"], ["GPT2Config"], ["pipeline"], ["torch"]):
        written(tmp_path, architectures=names)
        with pytest.raises(UsageError, match="has no such model"):
            find_factory("hf", None, [str(tmp_path)])
    written(tmp_path)
    with pytest.raises(UsageError, match="may download code"):
        find_factory("hf", {"attn_implementation": "org/repo"}, [str(tmp_path)])()


def test_a_sparse_file_that_no_memory_holds(tmp_path: Path) -> None:
    count = 2**36  # 1 TiB
    header = {"weight": {"dtype": "F32", "shape": [4, count], "data_offsets": [0, 16 * count]}}
    text = json.dumps(header).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + 16 * count)
        except OSError:
            file.truncate(0)
            pytest.skip("this file system has no files of this size")
    with pytest.raises((CheckpointError, MemberMismatch)):  # if it can be mapped, its shape is wrong
        build(
            [tmp_path / "a.safetensors"],
            tmp_path / "e.wide",
            model=lambda: torch.nn.Linear(4, 4),
            inputs=["x=float32[B,4]"],
        )
