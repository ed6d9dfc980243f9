"""Tests what the pages of fleets state: the files of adapters, and the messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from doc_pages import blocks
from paths import ROOT

TUTORIAL = (ROOT / "docs/tutorial/fleet-of-adapters.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs/how-to/fine-tunes-of-one-base.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| (`[^|]*`) \|", HOW_TO[HOW_TO.index("## What is refused") :], re.MULTILINE)


def test_the_tutorial_writes_what_peft_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        space: dict[str, object] = {"__name__": "page"}
        model, files = (b.code for b in blocks(TUTORIAL)[:2])
        exec(model, space)
        exec(files.replace("from net import Net\n", ""), space)
        net, settings = space["Net"], json.loads(Path("lora/lyon/adapter_config.json").read_text())
        config = peft.LoraConfig(r=6, lora_alpha=12, target_modules=["body.0", "body.2"])
        peft.get_peft_model(net(), config).save_pretrained("peft")  # type: ignore[operator]  # of the page
    written = json.loads(Path("peft/adapter_config.json").read_text())
    assert all(
        sorted(written[k]) == sorted(v) if isinstance(v, list) else written[k] == v
        for k, v in settings.items()
    )
    ours, theirs = (load_file(Path(f, "adapter_model.safetensors")) for f in ("lora/lyon", "peft"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_table_exist(message: str) -> None:
    """Each text between the dots of a message is in a source file of fleets."""
    files = [*(ROOT / "widepack/fleet").glob("*.py"), ROOT / "widepack/building/request.py"]
    source = "\n".join(re.sub(r'"\n\s*f?"', "", p.read_text(encoding="utf-8")) for p in files)
    for text in re.findall(r"`([^`]*)`", message):
        parts = [p.strip() for p in re.sub(r"'\w+'", "...", text).split("...") if len(p.strip(" ();,")) > 3]
        assert parts
        assert all(part in source for part in parts), parts


def test_the_table_of_messages_is_found() -> None:
    assert len(MESSAGES) > 8
