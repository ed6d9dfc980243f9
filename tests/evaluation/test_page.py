"""Tests the page of `widepack evaluate --html`: whole, without scripts or network, and every text escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import widepack
from widepack.evaluation.evaluate import EvaluateReport
from widepack_cli.main import cli
from widepack_cli.shared.evaluation_page import page

VOID = {"meta", "br"}
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "br", "div", "figure", "figcaption"),
    *("details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "text", "polyline", "circle"),
}


class Parsed(HTMLParser):
    """Reads a page. tags: all of it. texts: what a person reads. values: of all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.values: list[str] = []
        self.widths: list[float] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [f"{name}={value}" for name, value in attrs]
        if tag == "svg":
            self.widths.append(float(dict(attrs)["width"] or 0))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(text: str) -> Parsed:
    found = Parsed(text)
    assert set(found.tags) <= ALLOWED
    assert 'name="viewport" content="width=device-width' in text
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert not any(v.startswith(("src=", "href=", "on", "style=")) for v in found.values)
    assert max(found.widths) <= 400 - 2 * 16  # beside the margins of a page on a screen of 400 pixels
    places = re.findall(r'(?:cx|cy|points|x|y)="([^"]*)"', text)
    numbers = [float(n) for p in places for n in re.split(r"[ ,]", p)]
    assert all(0 <= n <= 360 for n in numbers)
    return found


@pytest.fixture(scope="module")
def report(digits: tuple[Path, Path, Any, Any]) -> EvaluateReport:
    return widepack.evaluate(digits[0], digits[1], target="y", of="softmax", calibrate=True)


def test_a_page_of_classes(report: EvaluateReport) -> None:
    found = checked(page(report))
    words = " ".join(found.texts)
    assert found.tags.count("svg") == 4  # fewer members, reliability, and before and after a calibration
    for row in (report.ensemble, *report.members.values()):
        assert f"{row['nll']:.4g}" in words and f"{row['ece']:.4g}" in words
    assert report.calibration is not None
    assert (
        f"{report.calibration['value']:.4g}" in words and f"{report.calibration['after']['ece']:.4g}" in words
    )
    bins = [b for b in report.reliability if b["count"]]
    assert f"{bins[0]['accuracy']:.3f}" in words
    assert all(name in words for name in report.members)
    assert checked(page(replace(report, calibration=None))).tags.count("svg") == 2


def test_every_text_is_escaped(report: EvaluateReport) -> None:
    bad = "<script>alert('1')</script>&amp;\"</style>"
    text = page(replace(report, path=bad, digest=bad, sha256=bad, members={bad: report.members["m0"]}))
    words = " ".join(checked(text).texts)
    assert (
        words.count("<script>alert('1')</script>&amp;\"</style>") == 5
    )  # title, heading, both hashes, member


def test_many_members_and_one(report: EvaluateReport) -> None:
    many = {f"member-{i}": report.members["m0"] for i in range(300)}
    assert "and 100 more; --json has all" in page(replace(report, members=many))
    curve = [{"members": 1, "nll": 0.5}]
    checked(page(replace(report, curve=curve, reliability=[], calibration=None)))


def test_the_command_writes_it(diabetes: tuple[Path, Path, Any, Any], tmp_path: Path) -> None:
    out, data, *_ = diabetes
    args = ["evaluate", str(out), "--on", str(data), "--target", "y", "--calibrate", "--html"]
    result = CliRunner().invoke(cli, [*args, str(tmp_path / "page.html")])
    assert result.exit_code == 0 and f"wrote {tmp_path / 'page.html'}" in result.output
    found = checked((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "error_rank" in " ".join(found.texts) and found.tags.count("svg") == 4
    result = CliRunner().invoke(cli, [*args, str(tmp_path / "none" / "page.html")])
    assert result.exit_code == 2 and "there is no folder" in " ".join(result.output.split())
