"""Makes the tables of what an analysis takes, of predicted times and of advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_results import measured

_PREDICTIONS = "scripts/measure/predictions.py -o bench/results/predictions-cpu.json"
_ADVICE = "scripts/measure/advice.py -o bench/results/advice-cpu.json"
_SETS = {
    "all": "all",
    "suite": "rows of the suite",
    "known": "other configurations",
    "drawn": "configurations drawn afterwards",
}


@measured("predictions-cpu", _PREDICTIONS)
def predictions(document: Any) -> str:
    """Returns how well speed-ups over the members' modules are predicted."""
    lines = [
        "| networks | number | Spearman | error of speed-ups | most | within 1.5x | noise | error of times |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for key, title in _SETS.items():
        s = document["summary"][key]
        lines.append(
            f"| {title} | {s['configurations']} | {s['spearman']:.2f} | {s['geometric_error']:.2f}x | "
            f"{s['largest_error']:.2f}x | {s['within_1.5']} | {s['noise_geometric_error']:.2f}x | "
            f"{s['time_geometric_error']:.2f}x |"
        )
    return "\n".join(lines)


@measured("predictions-cpu", _PREDICTIONS)
def choices(document: Any) -> str:
    """Returns what a choice between plans costs over the fastest of them."""
    lines = ["| who chooses | time over the fastest plan, geometric mean | most |", "|---|--:|--:|"]
    s = document["summary"]["all"]
    for key, title in (("rules", "the rules of thumb"), ("predicted", "the predictions")):
        lines.append(f"| {title} | {s[f'regret_{key}']:.3f}x | {s[f'largest_regret_{key}']:.2f}x |")
    return "\n".join(lines)


@measured("advice-cpu", _ADVICE)
def advice(document: Any) -> str:
    """Returns the recommended moves of every network, and the counts."""
    lines = ["| network | members | batch | move | predicted | measured |", "|---|--:|--:|---|--:|--:|"]
    for row in document["rows"]:
        built = row["built"]
        found = [m for m in built["moves"] if m["outcome"] == "recommended"]
        lines += [_line(row, built, m) for m in found] or [_line(row, built, None)]
    s = document["summary"]
    lines += [
        "",
        f"{s['moves']} moves were offered for {s['networks']} networks, and {s['recommended']} were "
        f"recommended. {s['at_least_0.8_of_predicted']} of {s['with_prediction']} recommended moves with a "
        "prediction gave at least 0.8 of the predicted gain. Tuned artifacts got "
        f"{s['recommended_for_tuned']} recommendations.",
    ]
    return "\n".join(lines)


@measured("analyze-cpu", "scripts/measure/analyze.py -o bench/results/analyze-cpu.json")
def analysis(document: Any) -> str:
    """Returns what `widepack analyze` takes."""
    llama, artifact = document["llama"], document["artifact"]
    without = "with" if artifact["imports_torch"] else "without"
    return "\n".join(
        [
            f"- Llama-2-7B from its config, no weights: {llama['seconds']:.1f} s and "
            f"{llama['peak_bytes'] / 1e6:.0f} MB, of which {llama['own_bytes'] / 1e6:.0f} MB are no imports.",
            f"- Its FLOP: `{llama['formula'][1]}`, {llama['flops_at_1_2048']:,} at B=1, T=2048.",
            f"- {llama['points']:,} values of this formula: {llama['points_seconds']:.2f} s.",
            f"- `widepack analyze ens.wide --at ...`: {artifact['seconds']:.2f} s, {without} torch.",
        ]
    )


def _line(row: Mapping[str, Any], built: Mapping[str, Any], move: Mapping[str, Any] | None) -> str:
    name = row["name"] + (" (with aot)" if "aot" in row["backends"] else "")
    cells = ["none", "", ""]
    if move is not None:
        predicted = "" if move["predicted"] is None else f"{move['predicted']:.2f}x"
        cells = [move["name"], predicted, f"{move['gain']['value']:.2f}x"]
    return f"| {name} | {built['members']} | {built['batch']} | {' | '.join(cells)} |"


PARTS = {"analysis": analysis, "predictions": predictions, "prediction-choices": choices, "advice": advice}
