"""Tests the verdict over the documents of a device (`scripts/device/verdict.py`), and their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import device_results as device_results  # registers its parts
import pytest

import results
from device import verdict

MACHINE = {"device": "cuda (made up)", "tf32": {"products": False}, "versions": {"torch": "2.13.0"}}
SKIPPED = {"outcome": "skipped", "text": "('/tests/gpu/test_some.py', 31, 'Skipped: needs Triton')"}


def _interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def _network(ms: dict[str, float], baselines: dict[str, float], result: str = "holds") -> dict[str, Any]:
    """Returns a row of `peer_networks.py`. ms: of each form, by backend; `auto` among them."""
    fastest = min(baselines, key=lambda name: baselines[name])
    row = {
        "median_ms": ms["auto"],
        "others": {f"widepack[{n}]": {"median_ms": t} for n, t in ms.items() if n != "auto"},
        "baselines": {n: {"median_ms": t} for n, t in baselines.items()},
        "fastest": fastest,
        "verdict": result,
        "roofline": {"floor_ms": 0.5},
    }
    return {"title": "a network", "members": 4, "batch": 8, "report": {"rows": [row]}}


def _layer(
    name: str, members: int, published: float, programs: dict[str, float], quiet: bool = True
) -> dict[str, Any]:
    ratios = {name: _interval(value) for name, value in programs.items()}
    return {
        "name": name,
        "members": members,
        "published": {"form": "fused", "ratios": {"one module": _interval(published)}, "quiet": quiet},
        "inference": {"form": "wide", "ratios": ratios, "quiet": quiet},
    }


def _documents(folder: Path) -> None:
    memory = {"auto": {"part": 0.9}, "auto+graph": {"part": 1.2}}
    claims = {
        "mlp-b32": _network({"auto": 2.0, "auto+graph": 1.0}, {"loop": 50.0, "compiled-loop": 0.8})
        | {"memory": memory},
        "deep-mlp": _network({"auto": 2.0}, {"loop": 8.0}),
        "resblock": _network({"auto": 2.0}, {"loop": 80.0, "compiled-member": 80.0}, "noisy"),
        "resnet18": {"error": "out of memory"},
    }
    layers = {
        "linear, N=4": _layer("linear", 4, 3.0, {"compiled-loop": 1.5, "compiled-member": 0.1}),
        "linear, N=32": _layer("linear", 32, 9.0, {"compiled-loop": 0.7, "cuda-graph-loop": 1.1}),
        "gru, N=32": {"name": "gru", "members": 32, "error": "its process ended"},
    }
    load = {"weights_bytes": 10**10, "load_bytes_per_s": 2e10, "pinned_bytes_per_s": 4e10, "part": 0.5}
    fleet: dict[str, Any] = {
        "members": 32,
        "width": 768,
        "form": "fleet",
        "fastest": "merged",
        "ratio": _interval(5.0),
    }
    written: dict[str, dict[str, Any]] = {
        "claims": {"rows": claims},
        "layers": {"rows": layers},
        "suite": {"rows": {"vit, 1 thread": _network({"auto": 3.0}, {"loop": 2.0})}},
        "load": {"rows": {"10 GB": load}},
        "fleets": {"rows": {"768,1,32,8: 1 x 16": fleet | {"ratio": _interval(0.5)}, "768: 1 x 1": fleet}},
        "route": {
            "rows": {
                "a": {"ratio": _interval(4.0)},
                "b": {"ratio": _interval(0.25)},
                "c": {"error": "it failed"},
            }
        },
        "tests": {"selected": 2, "tests": {"a": {"outcome": "passed"}, "b": SKIPPED}},
        "device": {"rehearsal": False},
    }
    where = {**MACHINE, "threads": 1, "date": "2026-01-01"}
    for name, document in written.items():
        (folder / f"{name}.json").write_text(json.dumps({"environment": where, **document}))


def test_the_verdict_decides_each_line(tmp_path: Path) -> None:
    _documents(tmp_path)
    document = verdict.verdict(tmp_path)
    lines = {line["name"]: line for line in document["lines"]}

    def found(*names: str) -> list[tuple[Any, str]]:
        return [(lines[name]["figure"], lines[name]["state"]) for name in names]

    assert found("tests/gpu") == [(0.0, "not measured in part")]
    assert lines["tests/gpu"]["missing"] == "1 skipped: needs Triton"
    assert found(
        "mlp-b32 over loop, published by WideCompiler", "deep-mlp over loop, published by WideCompiler"
    ) == [(50.0, "met"), (4.0, "not met")]
    assert found("mlp-b32 over the fastest baseline", "vit, 1 thread over the fastest baseline") == [
        (0.8, "not met"),
        (2 / 3, "not met"),
    ]
    assert (
        found(
            "resblock over compiled-member, published by WideCompiler",
            "resnet18 over loop, published by WideCompiler",
            "gru, published way",
        )
        == [(None, "not measured")] * 3
    ), "a row that was refused as noisy, and rows that failed"
    assert lines["resnet18 over loop, published by WideCompiler"]["detail"] == "out of memory"
    assert found("linear, published way", "linear, one program") == [(9.0, "met"), (0.7, "not met")]
    assert lines["linear, one program"]["detail"] == "N=32, wide against compiled-loop"
    assert lines["resblock over compiled-member, published by WideCompiler"]["detail"] == "noisy"
    assert found("time-weighted floor") == [(1.5 / 6.0, "measured")]
    assert found("peak memory over weights and N times one member's activations") == [(1.2, "not met")]
    assert found(verdict.LOAD) == [(0.5, "measured")]
    assert found("32 fine-tunes of width 768 at one token, over merged") == [(5.0, "met")]
    assert found("route over the fastest baseline") == [(1.0, "not measured in part")]
    assert lines["route over the fastest baseline"]["missing"] == "c: it failed"
    assert sum(document["summary"].values()) == len(lines) == len(document["lines"])
    assert "| deep-mlp over loop, published by WideCompiler | 4 | at least 6.2 | not met |" in verdict.table(
        document
    )


@pytest.mark.parametrize(
    ("document", "figure", "state"),
    [
        ({}, None, "not measured"),
        ({"selected": 2, "tests": {"a": {"outcome": "passed"}, "b": SKIPPED}}, 0.0, "not measured in part"),
        ({"selected": 2, "tests": {"a": {"outcome": "failed"}, "b": SKIPPED}}, 1.0, "not met"),
        ({"selected": 1, "tests": {"a": {"outcome": "passed"}}}, 0.0, "met"),
        ({"selected": 1, "tests": {"a": {"outcome": "skipped"}}}, None, "not measured"),
        ({"selected": 3, "tests": {"a": {"outcome": "passed"}}}, 2.0, "not met"),
    ],
)
def test_tests_that_did_not_run_do_not_pass(document: Any, figure: float | None, state: str) -> None:
    line = verdict.tests_line(document, rehearsal=False)
    assert (line.figure, line.state) == (figure, state)


def test_tests_that_a_rehearsal_skips_do_not_count() -> None:
    document = {"selected": 2, "tests": {"a": {"outcome": "passed"}, "b": SKIPPED}}
    assert verdict.tests_line(document, rehearsal=True).state == "met"


def test_races_that_were_not_quiet_decide_nothing() -> None:
    rows = {
        "4": _layer("linear", 4, 3.0, {"compiled-loop": 1.5}),
        "32": _layer("linear", 32, 9.0, {"compiled-loop": 0.7}, quiet=False),
        "gru": _layer("gru", 32, 30.0, {"compiled-loop": 2.0}, quiet=False),
    }
    lines = {line.name: line for line in verdict.layer_lines({"rows": rows})}
    best, lowest = lines["linear, published way"], lines["linear, one program"]
    assert (best.figure, best.state) == (3.0, "not met")
    assert best.detail == "N=4, fused; not measured: N=32: noisy"
    assert (lowest.figure, lowest.state, lowest.missing) == (1.5, "not measured in part", "N=32: noisy")
    for line in (lines["gru, published way"], lines["gru, one program"]):
        assert (line.figure, line.state) == (None, "not measured")
        assert "N=32: noisy" in line.detail + line.missing

    noisy = {"ratio": _interval(5.0), "quiet": False}
    fleets = verdict.fleets_line({"rows": {"768: 1 x 1": noisy}})
    assert (fleets.figure, fleets.state, fleets.detail) == (None, "not measured", "noisy")
    route = verdict.route_line({"rows": {"a": {"ratio": _interval(2.0), "quiet": True}, "b": noisy}})
    assert (route.figure, route.state, route.missing) == (2.0, "not measured in part", "b: noisy")


def test_memory_that_was_not_measured_is_missing() -> None:
    memory = {"auto": {"part": 0.9}, "auto+graph": {"error": "its process ended"}}
    line = verdict.memory_line({"rows": {"a": {"memory": memory}}})
    assert (line.figure, line.state) == (0.9, "not measured in part")
    assert line.missing == "a, auto+graph: its process ended"


def test_tables_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    own = {name: write for name, write in results.PARTS.items() if name.startswith("device-")}
    parts = [write() for write in own.values()]
    assert all(part.startswith("There are no figures yet.") for part in parts)
    folder = tmp_path / "bench" / "results" / "device"
    folder.mkdir(parents=True)
    _documents(folder)
    (folder / "verdict.json").write_text(json.dumps(verdict.verdict(folder)))
    document = json.loads((folder / "verdict.json").read_text())
    document["environment"] = {**MACHINE, "threads": 1}
    (folder / "verdict.json").write_text(json.dumps(document))
    written = {name: write() for name, write in own.items()}
    lines, networks, layers = (written[f"device-{name}"] for name in ("lines", "networks", "layers"))
    assert "| route over the fastest baseline | 1 | at least 1 | not measured in part | 2 rows" in lines
    assert "; not measured: c: it failed |" in lines and "cuda (made up)" in lines
    assert "| a network | 4 | 8 | 50.0 ms | 1.00 ms, auto+graph | compiled-loop, 800 us | 0.80 |" in networks
    assert "- Not measured: resnet18: out of memory" in networks
    assert "| linear | 8.8 | 9.0 (N=32, fused) | 0.70 |" in layers
