"""Tests models with sparse tensors: they are refused by name, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack

QUICK: dict[str, Any] = {"inputs": ["x=float32[B,4]"], "pt2": False, "targets": ("cpu",), "budget": 0}
INSTEAD = r"register adj.to_dense\(\), and multiply by adj @ x"
COMPUTES = "computes with a sparse tensor at .*Keep it dense"


class Graph(nn.Module):
    """Multiplies by a sparse matrix. how: where it is kept."""

    def __init__(self, how: str = "saved", layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        adj = torch.eye(4).to_sparse(layout=layout)
        if how == "parameter":
            self.adj = nn.Parameter(adj)
        elif how == "attribute":
            self.adj = adj  # type: ignore[assignment]
        else:
            self.register_buffer("adj", adj, persistent=how == "saved")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.adj, x.t()).t())  # type: ignore[no-any-return]


class Made(nn.Module):
    """Makes a sparse matrix in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((torch.eye(4).to_sparse() @ x.t()).t())  # type: ignore[no-any-return]


def csr() -> nn.Module:
    return Graph("saved", torch.sparse_csr)


ROWS: list[tuple[Callable[[], nn.Module], str, str]] = [
    (
        Graph,
        rf"adj is a sparse tensor \(layout torch.sparse_coo\).*{INSTEAD}.*save the checkpoint again",
        INSTEAD,
    ),
    (csr, rf"layout torch.sparse_csr\).*{INSTEAD}", "layout torch.sparse_csr"),
    (lambda: Graph("parameter"), INSTEAD, INSTEAD),
    (lambda: Graph("unsaved"), COMPUTES, INSTEAD),
    (
        lambda: Graph("attribute"),
        "computes with a sparse tensor at .*Keep it dense",
        "computes with a sparse",
    ),
    (Made, COMPUTES, COMPUTES),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("make", "of_build", "of_fuse"), ROWS, ids=range(len(ROWS)))
def test_a_sparse_tensor(make: Callable[[], nn.Module], of_build: str, of_fuse: str, tmp_path: Path) -> None:
    torch.save(make().state_dict(), tmp_path / "a.pt")
    with pytest.raises(widepack.WidepackError, match=of_build):
        widepack.build([tmp_path / "a.pt"], tmp_path / "e.wide", model=make, **QUICK)
    with pytest.raises(widepack.WidepackError, match=of_fuse):
        widepack.fuse([make(), make()], torch.randn(3, 4))


def test_a_dense_checkpoint_of_a_sparse_model(tmp_path: Path) -> None:
    state = {name: t.to_dense() if t.is_sparse else t for name, t in Graph().state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(widepack.UsageError, match=f"model Graph: adj is a sparse tensor.*{INSTEAD}"):
        widepack.build([tmp_path / "a.pt"], tmp_path / "e.wide", model=Graph, **QUICK)
