"""Makes a folder in which the examples of `--help` and of docstrings run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import widepack

NET = '''
import torch
from torch import nn

class Net(nn.Module):
    """Answers [B, 3] to x [B, ...] with at least 8 numbers in a row."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.layer(x.flatten(1)[:, :8]))))

make = Net
'''
WORDS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.head = nn.Embedding(30522, width), nn.Linear(width, 2)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))
"""
PRICE = "from torch import nn\n\nmake = lambda: nn.Linear(64, 1)\n"
MEMBERS = ("fold0", "fold1", "fold2", "fold3", "fold4", "paris", "rome", "worst")
FEATURES, ROWS = 64, 20


def modules(code: str) -> dict[str, Any]:
    """Returns what a module defines."""
    space: dict[str, Any] = {"__name__": "net"}
    exec(code, space)
    return space


def make_stage(folder: Path) -> None:
    """Writes the files into an empty folder."""
    make = modules(NET)["make"]
    for k, path in enumerate(
        [f"ckpts/{name}.pt" for name in MEMBERS]
        + ["a.pt", "b.pt", "c.pt", "d.pt", "e.pt", "m.pt", "new.pt", "better.pt", "fold3-new.pt"]
        + ["fold8.pt", "fold9.pt", "runs/new/0.pt", "runs/new/1.pt"]
    ):
        _save(make(), folder / path, k)
    for k in range(2):
        _save(modules(WORDS)["Net"](64), folder / f"runs/{k}/best.pt", k)
        _save(modules(PRICE)["make"](), folder / f"prices/{k}.pt", k)
    (folder / "net.py").write_text(NET, encoding="utf-8")
    (folder / "price.py").write_text(PRICE, encoding="utf-8")
    (folder / "pkg").mkdir()
    (folder / "pkg/net.py").write_text(WORDS, encoding="utf-8")
    (folder / "pkg/__init__.py").touch()
    _save(torch.nn.Linear(3, 3), folder / "other_model.pt", 0)
    (folder / "notes.txt").write_text("none\n", encoding="utf-8")
    shape = [f"x=float32[B,{FEATURES}]"]
    files = [folder / f"ckpts/{name}.pt" for name in MEMBERS]
    widepack.build(files, folder / "ens.wide", model=f"{folder}/net.py:make", inputs=shape, budget=0)
    files = [folder / f"prices/{k}.pt" for k in range(2)]
    widepack.build(
        files, folder / "price.wide", model=f"{folder}/price.py:make", inputs=[f"input={shape[0][2:]}"],
        budget=0, pt2=False,
    )  # fmt: skip  # arguments in two lines
    _write_tables(folder)


def _prices(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Returns targets [R] that the first of two members answers exactly."""
    module = torch.nn.Linear(FEATURES, 1)
    module.load_state_dict(torch.load(folder / "prices/0.pt"))
    answer: torch.Tensor = module(x)
    return answer[:, 0].detach()


def _save(module: torch.nn.Module, path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), path)


def _write_tables(folder: Path) -> None:
    """Writes tables of 64 features, and what examples read beside them."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv, parquet

    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))
    table = pa.table(
        {
            "id": [f"{k:04d}" for k in range(ROWS)],
            **{f"f{k}": x[:, k].numpy() for k in range(FEATURES)},
            "tenant": [MEMBERS[k % 4] for k in range(ROWS)],
            "price": _prices(folder, x).numpy(),
            "kind": [("cat", "dog", "bird")[k % 3] for k in range(ROWS)],
            "y": [k % 3 for k in range(ROWS)],
        }
    )
    features = [f"f{k}" for k in range(FEATURES)]
    parquet.write_table(table.select(["id", *features, "tenant"]), folder / "in.parquet")
    parquet.write_table(table.select([*features, "y"]), folder / "val.parquet")
    for name, columns in (("in", ["id", *features, "tenant"]), ("rows", [*features, "tenant"])):
        csv.write_csv(table.select(columns), folder / f"{name}.csv")
    csv.write_csv(table.select([*features, "price", "kind"]), folder / "val.csv")
    np.save(folder / "in.npy", x.numpy())
    save_file({"x": x, "y": torch.arange(ROWS) % 3}, folder / "val.safetensors")
