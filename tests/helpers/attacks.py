"""Shares helpers of the tests of attacks: they load a forged artifact and check how it is refused."""

from __future__ import annotations

import json
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Forged, node, ref

from widepack import load
from widepack.errors import ArtifactError, WidepackError

W, X = ref("w_p_inner_weight"), ref("x")  # [3, 8, 6] and [B, 6]
SELF = {"device": "self"}


def refused(path: Path, *words: str, kind: type[WidepackError] = ArtifactError, **how: Any) -> str:
    """Checks that a load fails soon, with these words and little memory, and returns the message."""
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


def tensors(header_: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header_ if isinstance(header_, bytes) else json.dumps(header_).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


BIG = 2**40


def wide(of: Any, rows: int) -> list[dict[str, Any]]:
    """Returns the node `e`, which expands one number to [rows, rows]."""
    return [node("s", "aten.sum.default", of), node("e", "aten.expand.default", ref("s"), [rows, rows])]


def looped(
    inner: list[dict[str, Any]], times: int, inputs: str = "shared", members: int = 0
) -> dict[str, Any]:
    """Returns a loop over nodes of `a`, nested `times` times."""
    body = {
        "format": "widepack.program/1",
        "members": members,
        "weights": [],
        "inputs": [["a", "a", inputs, ""]],
        "nodes": inner,
        "outputs": [[ref(inner[-1]["name"]), "ragged"]],
    }
    loop = {"name": f"loop_{times}", "op": "loop", "args": [ref("a")], "body": body}
    return loop if times == 1 else looped([loop], times - 1, members=members)


def probe_with(forged: Forged, change: Callable[[dict[str, torch.Tensor]], object]) -> Forged:
    from safetensors.torch import load as read
    from safetensors.torch import save

    def how(data: bytes) -> bytes:
        found = read(data)
        change(found)
        return save(found)

    return forged.change("probe-", how)
