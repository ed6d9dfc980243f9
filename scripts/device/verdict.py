"""Decides the lines that a device must decide, from the documents of the steps.

| line | figure | bound |
|---|---|---|
| tests | tests that failed or did not run | at most 0 |
| network, published | the baseline's time over that of the fastest form of widepack | published |
| network, fastest baseline | the fastest baseline's time over that of the fastest form | 1 |
| layer, published | the best ratio over N to one compiled module called N times, gradients on | published |
| layer, one program | the lowest ratio over N to N layers in one compiled or graphed program | 1 |
| floor | the sum of the least times of all networks (roofline) over the sum of their times | none |
| memory | the largest peak over weights, inputs and N times one member's activations | at most 1 |
| load | of the largest artifact: its bytes for each second over those of a copy from pinned memory | none |
| fleets | the merged artifact's time over that of the fleet, at one token | 1 |
| route | the geometric mean of the ratios to the fastest baseline | 1 |

A line without a document, or whose row is missing, is `not measured`. A line without a bound is `measured`.
A race that was not quiet, where widepack against itself misses 1, counts as no row. A line that needs all of
its rows is `not measured in part` where the rows that there are reach the bound, and others are missing: they
failed, were not quiet, or are tests that the device skipped.
"""  # fmt: skip

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer_claims import LAYERS, NETWORKS, ONE_MODULE

from .record_tests import PASSED, SKIPPED

FORMAT = "widepack.device-verdict/1"
MET, NOT_MET, NOT_MEASURED, MEASURED = "met", "not met", "not measured", "measured"
IN_PART = "not measured in part"
NOISY = "noisy"
PROGRAMS = ("compiled-loop", "cuda-graph-loop")
FLEET_ROW = ": 1 x 1"
FLEETS = "32 fine-tunes of width 768 at one token, over merged"
LOAD = "load of a large artifact over the bandwidth from pinned memory"
SKIP = re.compile(r"(?s).*Skipped: (.*?)['\"]?\)?\s*\Z")
"""What pytest writes of a test that is skipped; the group is the reason."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the verdict.

    name: what is decided. figure: what was measured; None where it was not. bound: what the figure must
    reach; None without one. at_most: the figure must not exceed the bound. detail: how the figure came about.
    missing: what must reach the bound too and has no figure, with the reasons.
    """

    name: str
    figure: float | None
    bound: float | None
    detail: str = ""
    at_most: bool = False
    missing: str = ""

    @property
    def state(self) -> str:
        """Returns `met`, `not met`, `not measured`, `not measured in part`, or `measured`."""
        if self.figure is None:
            return NOT_MEASURED
        if self.bound is None:
            return MEASURED
        reached = self.figure <= self.bound if self.at_most else self.figure >= self.bound
        return NOT_MET if not reached else IN_PART if self.missing else MET


def verdict(folder: Path) -> dict[str, Any]:
    """Returns the verdict over the documents of a folder. What has no document is not measured."""
    documents = {
        name: _read(folder, name)
        for name in ("tests", "claims", "layers", "fleets", "load", "suite", "route", "device")
    }
    device = documents["device"]
    rehearsal = device.get("rehearsal", False)
    lines = [
        tests_line(documents["tests"], rehearsal),
        *network_lines(documents["claims"]),
        *layer_lines(documents["layers"]),
        *suite_lines(documents["suite"]),
        floor_line(documents["claims"], documents["suite"]),
        memory_line(documents["claims"]),
        load_line(documents["load"]),
        fleets_line(documents["fleets"]),
        route_line(documents["route"]),
    ]
    return {
        "format": FORMAT,
        "environment": device.get("environment", {}),
        "rehearsal": rehearsal,
        "summary": {
            state: sum(line.state == state for line in lines)
            for state in (MET, NOT_MET, NOT_MEASURED, IN_PART, MEASURED)
        },
        "lines": [{**asdict(line), "state": line.state} for line in lines],
    }


def tests_line(document: Row, rehearsal: bool) -> Line:
    """Decides whether the tests pass.

    Tests that are skipped are missing, such as those of Triton's kernels where Triton is not installed.
    rehearsal: the tests ran on a CPU, where some are skipped always.
    """
    tests = document.get("tests", {})
    outcomes = [row["outcome"] for row in tests.values()]
    passed = outcomes.count(PASSED)
    bad = [name for name, row in tests.items() if row["outcome"] not in (PASSED, SKIPPED)]
    missing = document.get("selected", 0) - len(tests)
    figure = float(len(bad) + max(0, missing)) if passed or bad else None
    named = f"; not passed: {', '.join(bad)}" if bad else ""
    detail = f"{passed} passed, {outcomes.count(SKIPPED)} skipped, {max(0, missing)} did not run{named}"
    skipped = Counter(
        SKIP.sub(r"\1", row.get("text", "")) for row in tests.values() if row["outcome"] == SKIPPED
    )
    lacking = "" if rehearsal else "; ".join(f"{count} skipped: {why}" for why, count in skipped.items())
    return Line("tests/gpu", figure, 0.0, detail, at_most=True, missing=lacking)


def forms_ms(row: Row) -> dict[str, float]:
    """Returns the milliseconds of each form of widepack in a row of `widepack bench`, by backend."""
    others = {n: o["median_ms"] for n, o in row["others"].items() if n.startswith("widepack[")}
    return {"auto": row["median_ms"], **{n[len("widepack[") : -1]: ms for n, ms in others.items()}}


def bench_row(row: Row) -> Row | None:
    """Returns the measured row of a network; None where it failed or was refused as noisy."""
    rows = row.get("report", {}).get("rows", []) if "error" not in row else []
    return rows[0] if rows and rows[0]["verdict"] != NOISY else None


def _size(row: Row, found: Row | None) -> str:
    """Returns the size of a network in words, or why it has no measured row."""
    if found is not None:
        return f"N={row['members']}, batch {row['batch']}: "
    return str(row.get("error") or (NOISY if "report" in row else ""))


def over_best_form(found: Row, baseline: str) -> tuple[float, str] | None:
    """Returns a baseline's time over that of the fastest form, and how; None where it was not measured."""
    timing = found["baselines"].get(baseline)
    if timing is None:
        return None
    forms = forms_ms(found)
    best = min(forms, key=lambda name: forms[name])
    ratio = timing["median_ms"] / forms[best]
    return ratio, f"{best} {forms[best]:.3g} ms, {baseline} {timing['median_ms']:.3g} ms"


def network_lines(document: Row) -> Iterator[Line]:
    """Decides the published ratios of networks, and whether each is as fast as the fastest baseline."""
    rows = document.get("rows", {})
    for name, claims in NETWORKS.items():
        row = rows.get(name, {})
        found = bench_row(row)
        size = _size(row, found)
        for claim in claims:
            measured = over_best_form(found, claim.baseline) if found is not None else None
            title = f"{name} over {claim.baseline}, published by {claim.source}"
            figure, how = measured or (None, "")
            yield Line(title, figure, claim.ratio, f"{size}{how}")
        yield _fastest_line(name, found, size)


def _fastest_line(name: str, found: Row | None, size: str) -> Line:
    measured = over_best_form(found, found["fastest"]) if found is not None else None
    figure, how = measured or (None, "")
    return Line(f"{name} over the fastest baseline", figure, 1.0, f"{size}{how}")


def layer_lines(document: Row) -> Iterator[Line]:
    """Decides the ratios of layers and blocks in both ways of counting."""
    rows = document.get("rows", {})
    for name, ratio in LAYERS.items():
        best = best_ratio(rows, name)
        figure, how = best if best is not None else (None, "")
        how = "; not measured: ".join(part for part in (how, _left_out(rows, name, "published")) if part)
        yield Line(f"{name}, published way", figure, ratio, how)
        lowest = lowest_ratio(rows, name)
        figure, how = lowest if lowest is not None else (None, "")
        yield Line(f"{name}, one program", figure, 1.0, how, missing=_left_out(rows, name, "inference"))


def _left_out(rows: Mapping[str, Row], name: str, way: str) -> str:
    """Returns the rows of a layer without a figure, and why. way: `published` or `inference`."""
    why = {
        row["members"]: row.get("error") or row.get(way, {}).get("error") or _noise(row.get(way, {}))
        for row in rows.values()
        if row["name"] == name
    }
    return "; ".join(f"N={members}: {reason}" for members, reason in why.items() if reason)


def _noise(row: Row) -> str:
    """Returns `noisy` for a race that was not quiet; else nothing."""
    return "" if row.get("quiet", True) else NOISY


def _counted(rows: Mapping[str, Row], name: str, way: str) -> Iterator[tuple[Row, dict[str, float]]]:
    """Yields the quiet races of a layer in one way of counting, and the ratios that they have."""
    for row in rows.values():
        found = row.get(way, {}) if row["name"] == name else {}
        if not _noise(found):
            ratios = {b: r["value"] for b, r in found.get("ratios", {}).items() if r["value"] is not None}
            yield {"members": row["members"], **found}, ratios


def best_ratio(rows: Mapping[str, Row], name: str) -> tuple[float, str] | None:
    """Returns the best ratio of a layer to one compiled module called N times, over N."""
    found = [
        (ratios[ONE_MODULE], f"N={row['members']}, {row['form']}")
        for row, ratios in _counted(rows, name, "published")
        if ONE_MODULE in ratios
    ]
    return max(found, default=None)


def lowest_ratio(rows: Mapping[str, Row], name: str) -> tuple[float, str] | None:
    """Returns the lowest ratio of a layer to one compiled or graphed program over its numbers of members."""
    found = [
        (ratios[program], f"N={row['members']}, {row['form']} against {program}")
        for row, ratios in _counted(rows, name, "inference")
        for program in PROGRAMS
        if program in ratios
    ]
    return min(found, default=None)


def suite_lines(document: Row) -> Iterator[Line]:
    """Decides whether each row of the suite is as fast as its fastest baseline."""
    for key, row in document.get("rows", {}).items():
        found = bench_row(row)
        yield _fastest_line(key, found, _size(row, found))


def floor_line(*documents: Row) -> Line:
    """Returns the least times of all networks over their times."""
    floor = time = 0.0
    rows = [bench_row(row) for document in documents for row in document.get("rows", {}).values()]
    counted = [row for row in rows if row is not None and row["roofline"]]
    for row in counted:
        floor += row["roofline"]["floor_ms"]
        time += min(forms_ms(row).values())
    detail = f"{len(counted)} networks: {floor:.3g} ms of {time:.3g} ms"
    return Line("time-weighted floor", floor / time if time else None, None, detail)


def memory_line(document: Row) -> Line:
    """Decides the peak memory."""
    measured = {
        f"{name}, {form}": found
        for name, row in document.get("rows", {}).items()
        for form, found in row.get("memory", {}).items()
    }
    parts = {name: found["part"] for name, found in measured.items() if found.get("part") is not None}
    lacking = "; ".join(
        f"{name}: {found.get('error', '')}" for name, found in measured.items() if name not in parts
    )
    worst = max(parts, key=lambda name: parts[name], default="")
    return Line(
        "peak memory over weights and N times one member's activations",
        parts.get(worst),
        1.0,
        f"{worst}; {len(parts)} measured" if worst else "",
        at_most=True,
        missing=lacking,
    )


def load_line(document: Row) -> Line:
    """Returns the speed of a load as a part of the bandwidth."""
    rows = [row for row in document.get("rows", {}).values() if row.get("part") is not None]
    if not rows:
        errors = "; ".join(row.get("error", "") for row in document.get("rows", {}).values())
        return Line(LOAD, None, None, errors)
    row = max(rows, key=lambda row: row["weights_bytes"])
    rates = row["load_bytes_per_s"] / 1e9, row["pinned_bytes_per_s"] / 1e9
    detail = f"{row['weights_bytes'] / 1e9:.2f} GB at {rates[0]:.1f} GB/s, copies at {rates[1]:.1f} GB/s"
    return Line(LOAD, row["part"], None, detail)


def fleets_line(document: Row) -> Line:
    """Decides fleets at one token."""
    rows = document.get("rows", {})
    found = [row for key, row in rows.items() if key.endswith(FLEET_ROW) and "ratio" in row]
    if not found or _noise(found[0]):
        reasons = [NOISY] if found else [row["error"] for row in rows.values() if "error" in row]
        return Line(FLEETS, None, 1.0, "; ".join(reasons))
    row = found[0]
    detail = f"N={row['members']}, width {row['width']}, {row['form']} against {row['fastest']}"
    return Line(FLEETS, row["ratio"]["value"], 1.0, detail)


def route_line(document: Row) -> Line:
    """Decides rows of several members."""
    rows = document.get("rows", {})
    quiet = [row for row in rows.values() if "ratio" in row and not _noise(row)]
    known = [row["ratio"]["value"] for row in quiet if row["ratio"]["value"] is not None]
    lacking = "; ".join(
        f"{key}: {row.get('error') or _noise(row)}"
        for key, row in rows.items()
        if "error" in row or _noise(row)
    )
    mean = math.exp(sum(map(math.log, known)) / len(known)) if known else None
    lowest = f", the lowest {min(known):.2f}" if known else ""
    return Line("route over the fastest baseline", mean, 1.0, f"{len(known)} rows{lowest}", missing=lacking)


def table(document: Mapping[str, Any]) -> str:
    """Returns the verdict as a table in Markdown."""
    lines = ["| line | figure | bound | state | how |", "|---|--:|--:|---|---|"]
    for line in document["lines"]:
        figure, bound = ("" if value is None else f"{value:.3g}" for value in (line["figure"], line["bound"]))
        sign = "" if line["bound"] is None else "at most " if line["at_most"] else "at least "
        missing = f"not measured: {line['missing']}" if line.get("missing") else ""
        how = "; ".join(part for part in (line["detail"], missing) if part)
        how = " ".join(how.replace("|", "/").split())[:300]
        lines.append(f"| {line['name']} | {figure} | {sign}{bound} | {line['state']} | {how} |")
    counts = ", ".join(f"{count} {state}" for state, count in document["summary"].items())
    rehearsal = (
        ["", "A rehearsal at small sizes: the figures decide nothing."] if document["rehearsal"] else []
    )
    return "\n".join([*lines, "", f"{counts}.", *rehearsal])


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return document
