#!/usr/bin/env python3
"""Measures how good the advice of `widepack advise` is, on networks of the suite and of other sizes.

    taskset -c 1 python scripts/measure/advice.py -o bench/results/advice-cpu.json

Each network is built with the plans by rules of thumb, and advised on. Then it is tuned for the same batch
and advised on again: a tuned artifact should get no advice. One thread. For a few networks the backend `aot`
is tried, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predictions import Case, built, cases

import widepack
from widepack_bench.advice import advise
from widepack_bench.advice.plan_moves import TUNE_S
from widepack_bench.measure.processors import quiet
from widepack_bench.report.environment import environment

NAMES = (
    "mlp-b32",
    "mlp-b1",
    "deep-mlp",
    "resblock",
    "conv-net",
    "vit",
    "bert",
    "bert-lora",
    "gru-8",
    "unet",
    "cnn1d",
    "mlp-192, 8, 32",
    "mlp-384, 8, 1",
    "tabular, 12, 4",
    "vit-64, 16, 4",
    "resblock-16, 12, 2",
)
COMPILED = ("mlp-64, 8, 32", "tabular, 12, 4")


def measured(case: Case, backends: Sequence[str]) -> dict[str, Any]:
    """Builds a case and advises on it, as it is built and tuned."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, _ = built(case, folder)
        first = advise(artifact, batch=case.batch, threads=1, backends=backends)
        widepack.tune(
            artifact,
            batches=(case.batch,),
            patterns=("shared",),
            budget_s=TUNE_S,
            threads=1,
            backends=[b for b in backends if b != "compile"],
            write=True,
        )
        tuned = advise(artifact, batch=case.batch, threads=1, backends=backends)
    found: dict[str, Any] = json.loads(
        json.dumps({"built": first.to_json(), "tuned": tuned.to_json()}).replace(f"{folder}/", "")
    )
    for part in found.values():
        part.pop("environment")
    return {"name": case.name, "backends": list(backends), **found}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how many recommended moves give what was predicted."""
    built = [m for r in rows for m in r["built"]["moves"] if m["outcome"] == "recommended"]
    tuned = [m for r in rows for m in r["tuned"]["moves"] if m["outcome"] == "recommended"]
    foreseen = [m for m in built if m["predicted"] is not None]
    return {
        "networks": len(rows),
        "moves": sum(len(r["built"]["moves"]) for r in rows),
        "recommended": len(built),
        "with_prediction": len(foreseen),
        "at_least_0.8_of_predicted": sum(m["gain"]["value"] >= 0.8 * m["predicted"] for m in foreseen),
        "least_gain": min((m["gain"]["value"] for m in built), default=None),
        "recommended_for_tuned": len(tuned),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how good the advice of widepack is.")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/advice-cpu.json"))
    parser.add_argument("--only", default="", help="names of networks, separated by semicolons")
    options = parser.parse_args()
    only = [n for n in options.only.split(";") if n]
    known = {case.name: case for case in reversed(cases())}
    known |= {f"{case.name}, {case.members}, {case.batch}": case for case in cases()}
    rows: list[dict[str, Any]] = []
    for name, backends in [*((n, ("eager",)) for n in NAMES), *((n, ("eager", "aot")) for n in COMPILED)]:
        if only and name not in only:
            continue
        with quiet(1):
            rows.append(measured(known[name], backends))
        for form in ("built", "tuned"):
            for move in rows[-1][form]["moves"]:
                gain = move["gain"] and move["gain"]["value"]
                print(f"{name}, {form}: {move['name']}: {move['predicted']}, {gain}, {move['outcome']}")
        document = {"environment": environment("cpu", 1), "summary": summary(rows), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
