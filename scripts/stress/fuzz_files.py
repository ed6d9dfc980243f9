"""Builds the artifacts that the fuzzer changes, and reads and writes their files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Files = dict[str, bytes]


def corpus(folder: Path) -> None:
    """Builds small artifacts of several forms."""
    import torch
    from torch import nn

    import widepack

    class Mlp(nn.Sequential):
        def __init__(self, out: int = 3) -> None:
            super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, out))

    class Conv(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(64, 5),
            )

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.head = (
                nn.Embedding(11, 8),
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
                nn.Linear(8, 4),
            )

        def forward(self, ids: Any) -> Any:
            return {"logits": self.head(self.layer(self.table(ids)).mean(1)), "seen": (ids > 3).sum(1)}

    class Counting(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.total = self.total + x.sum(0)
            return self.layer(x) + self.total

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.GRU(6, 3, batch_first=True)

        def encode(self, x: Any) -> Any:
            return self.up(x).relu()

        def forward(self, x: Any) -> Any:
            return self.down(self.encode(x))[0]

    def headed(state_dict: Any = None) -> nn.Module:
        return Mlp(3 if state_dict is None else len(state_dict["3.bias"]))

    artifacts: list[tuple[str, Any, list[Callable[[], nn.Module]], list[str], dict[str, Any]]] = [
        ("mlp", Mlp, [Mlp] * 3, ["input=float32[B,6]"], {}),
        ("mlp-pt2", Mlp, [Mlp] * 2, ["input=float32[B,6]"], {"pt2": True}),
        ("conv", Conv, [Conv] * 3, ["input=float32[B,3,8,8]"], {}),
        ("loop", Conv, [Conv] * 2, ["input=float32[B,3,8,8]"], {"strategy": "loop"}),
        ("tokens", Tokens, [Tokens] * 2, ["ids=int64[B,T]:0..10"], {}),
        ("ragged", headed, [lambda: Mlp(3), lambda: Mlp(5)], ["input=float32[B,6]"], {}),
        ("state", Counting, [Counting] * 2, ["x=float32[B,4]"], {"state": ["total"]}),
        (
            "entries",
            Two,
            [Two] * 2,
            ["forward:x=float32[B,3,4]", "encode:x=float32[B,4]"],
            {"entries": ["forward", "encode"]},
        ),
    ]
    for name, model, kinds, inputs, more in artifacts:
        paths = []
        for i, kind in enumerate(kinds):
            torch.manual_seed(i)
            paths.append(str(folder / f"{name}-{i}.pt"))
            torch.save(kind().state_dict(), paths[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            widepack.build(
                paths,
                folder / f"{name}.wide",
                model=model,
                inputs=inputs,
                **{"pt2": False, "targets": ("cpu",), **more},
            )


def read(artifact: Path) -> Files:
    """Returns the files of an artifact."""
    return {
        p.relative_to(artifact).as_posix(): p.read_bytes() for p in sorted(artifact.rglob("*")) if p.is_file()
    }


def write(folder: Path, files: Files, old: Files) -> None:
    """Replaces the old files of a folder by these files. A file is replaced and never written in place,
    because it may be mapped.
    """
    for name in old.keys() - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        if old.get(name) != data:
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            place.write_bytes(data)
