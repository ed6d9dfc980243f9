"""Tests `widepack analyze --device` and `--html`: least times, what bounds them, and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import Artifacts

from widepack.system.devices import DEVICES, Device
from widepack_cli.main import cli
from widepack_cli.shared.treemap import Box, squarified

LINEAR = ["torch.nn.Linear", "--model-arg", "in_features=512", "--model-arg", "out_features=256"]
INPUT = ["--input", "input=float32[B,512]"]


def analyze(*words: Any) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, words)], prog_name="widepack")


def document(*words: Any) -> dict[str, Any]:
    result = analyze(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_kernel_is_bound_by_what_takes_longer() -> None:
    device = Device("test", {"float32": 100.0}, 10.0, "measured")
    assert device.seconds(500, 20, "float32") == (5.0, "compute")
    assert device.seconds(500, 80, "float32") == (8.0, "bytes")


@pytest.mark.parametrize("name", DEVICES)
def test_data_sheets(name: str) -> None:
    device = DEVICES[name]
    assert device.source.startswith("https://") and device.flops["float16"] > device.flops["float32"] > 1e12
    assert 1e11 < device.bandwidth < 1e13


def test_the_least_time_of_a_layer() -> None:
    """One product: y = x W^T + b. With one row bytes bound it, with many rows computing does."""
    h100 = DEVICES["h100"]
    for rows, bound in ((1, "bytes"), (65536, "compute")):
        found = document(*LINEAR, *INPUT, "--at", f"B={rows}", "--device", "h100")
        moved = 4 * (512 * 256 + 256 + rows * 512 + rows * 256)
        least = max(2 * rows * 512 * 256 / h100.flops["float32"], moved / h100.bandwidth)
        assert found["groups"][0]["least_s"] == pytest.approx(least)
        assert found["groups"][0]["bound_by"] == bound
        assert found["device"]["least_s"] == pytest.approx(least)


def test_this_machine_is_measured(artifacts: Artifacts) -> None:
    found = document(artifacts("mlp"), "--at", "B=64", "--device", "here")
    device = found["device"]
    assert device["source"] == "measured" and device["flop_per_s"] > 1e8 and device["bytes_per_s"] > 1e7
    moved = sum(found["numbers"][m] for m in ("weights_read", "acts_read", "acts_written"))
    computing, moving = found["numbers"]["flops"] / device["flop_per_s"], moved / device["bytes_per_s"]
    assert max(computing, moving) <= device["least_s"] * 1.000001 <= (computing + moving) * 1.000002


def test_the_text_has_times() -> None:
    text = analyze(*LINEAR, *INPUT, "--at", "B=8", "--device", "l4").stdout
    assert "NVIDIA L4, 24 GB: 30.3 TFLOP/s in float32, 300 GB/s, https://" in text
    assert "a call takes at least 1.83 us: kernels that compute bounds take 0%, kernels that bytes" in text
    assert text.splitlines()[-1].endswith("bytes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h100"], "--device gives times at sizes: give --at too"),
        (["--html", "p.html"], "--html gives times at sizes: give --at too"),
        (["--device", "h300", "--at", "B=1"], "'h300' is not known; known: here, h200, h100"),
    ],
)
def test_wrong_devices_are_refused(words: list[str], message: str) -> None:
    result = analyze(*LINEAR, *INPUT, *words)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_dtype_without_a_rate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(8, 4, dtype=torch.float64)\n")
    words = [f"{file}:make", "--input", "input=float64[B,8]", "--at", "B=1", "--device"]
    result = analyze(*words, "l4")
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert "no rate for float64, the dtype of this model; it has float32, float16, bfloat16" in result.stderr
    assert analyze(*words, "here").exit_code == 0


class Tags(HTMLParser):
    """Collects the tags of a page, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "p"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "p":
            assert self.open.pop() == tag


def test_the_page(artifacts: Artifacts, tmp_path: Path) -> None:
    path = tmp_path / "costs.html"
    result = analyze(artifacts("bert"), "--at", "B=8,T=32", "--device", "a100", "--html", path)
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.seen.count("svg") == 2 and "script" not in tags.seen
    assert tags.seen.count("rect") > 5 and tags.seen.count("circle") >= 3
    assert not re.findall(r"(?:src|href)=", text)
    shares = [float(s) for s in re.findall(r", ([0-9.]+)%, bound by", text)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    for names in (re.findall(r"<title>(.*?): ", text.split("<svg")[k]) for k in (1, 2)):
        assert len(names) == len(set(names)) > 2  # no two boxes, and no two dots, have one name


def test_boxes_fill_the_rectangle_with_their_areas() -> None:
    sizes = [8.0, 5.0, 5.0, 3.0, 1.0, 0.5, 0.01]
    boxes = squarified(sizes, Box(0, 0, 300, 200))
    for size, box in zip(sizes, boxes, strict=True):
        assert box.width * box.height == pytest.approx(300 * 200 * size / sum(sizes))
        assert box.x >= -1e-6 and box.x + box.width <= 300 + 1e-6
        assert box.y >= -1e-6 and box.y + box.height <= 200 + 1e-6
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = a.x + a.width <= b.x + 1e-6 or b.x + b.width <= a.x + 1e-6
            assert apart or a.y + a.height <= b.y + 1e-6 or b.y + b.height <= a.y + 1e-6
    assert squarified([], Box(0, 0, 1, 1)) == []
