"""Measures cascades and selections on scikit-learn's digits: accuracy, and the members that run for a row.

    python scripts/measure/cascade_digits.py [-o bench/results/cascade-digits.json] [--splits 20]

Each split trains 16 small networks on bootstrap samples of half of the digits, selects members and fits a
cascade on a quarter, and measures both on the rest, which neither has seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, ALLOWED = 16, 0.002


class Net(nn.Module):
    """A small classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def trained(x: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
    """Returns the weights of a network that was trained on a bootstrap sample."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    rows = torch.randint(0, len(x), (len(x),))
    for _ in range(40):
        order = rows[torch.randperm(len(rows))]
        for start in range(0, len(order), 64):
            part = order[start : start + 64]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(net(x[part]), y[part]))
            optimizer.step()
    return net.state_dict()


def split(folder: Path, seed: int) -> dict[str, Any]:
    """Returns the figures of one split."""
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, valid, test = rows[:898], rows[898:1347], rows[1347:]
    paths = []
    for i in range(MEMBERS):
        paths.append(folder / f"m{i:02}.pt")
        torch.save(trained(x[train], y[train], 1000 * seed + i), paths[-1])
    out = folder / "ens.wide"
    options: dict[str, Any] = {"inputs": ["x=float32[B,64]"], "race": False, "pt2": False, "force": True}
    widepack.build(paths, out, model=Net, **options)
    save_file({"x": x[valid].contiguous(), "y": y[valid].contiguous()}, folder / "val.safetensors")
    report = widepack.select(out, folder / "val.safetensors", target="y", of="softmax", allowed=ALLOWED)
    ens = widepack.load(out)

    def accuracy(mean: Tensor) -> float:
        return float((mean.argmax(1) == y[test]).double().mean())

    weights = [report.weights.get(name, 0.0) for name in ens.members]
    found: dict[str, Any] = {
        "seed": seed,
        "all": accuracy(ens.mean(x[test], of="softmax")),
        "members": [accuracy(p) for p in ens(x[test]).softmax(-1)],
        "selected": accuracy(ens.mean(x[test], of="softmax", weights=weights)),
        "selected_members": len(report.weights),
        "fitted": None,
    }
    if report.cascade is not None:
        fitted = ens.cascade(x[test])
        found["fitted"] = {
            "accuracy": accuracy(fitted.mean),
            "calls": fitted.calls / MEMBERS,
            **{key: report.cascade[key] for key in ("stages", "until", "score", "held_out")},
        }
    plain = ens.cascade(x[test], first=3, until=0.9)
    found["first_3_until_0.9"] = {"accuracy": accuracy(plain.mean), "calls": plain.calls / MEMBERS}
    return found


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns means over all splits. `lost` is in points of accuracy against all members."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    found: dict[str, Any] = {
        "splits": len(rows),
        "test_rows": 450,
        "all": mean([r["all"] for r in rows]),
        "best_member": mean([max(r["members"]) for r in rows]),
        "mean_member": mean([mean(r["members"]) for r in rows]),
        "selected": mean([r["selected"] for r in rows]),
    }
    for key in ("fitted", "first_3_until_0.9"):
        some = [r for r in rows if r[key] is not None]
        found[key] = {
            "splits": len(some),
            "accuracy": mean([r[key]["accuracy"] for r in some]),
            "lost_points": 100 * mean([r["all"] - r[key]["accuracy"] for r in some]),
            "calls": mean([r[key]["calls"] for r in some]),
            "most_calls": max(r[key]["calls"] for r in some),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "cascade-digits.json")
    parser.add_argument("--splits", type=int, default=20)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.splits):
            rows.append(split(Path(folder), seed))
            print(seed, rows[-1]["all"], rows[-1]["fitted"], rows[-1]["first_3_until_0.9"], flush=True)
    document = {
        "what": "cascades and selections of 16 networks on scikit-learn's digits",
        "environment": environment("cpu", torch.get_num_threads()),
        "summary": summary_of(rows),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
