"""Tests the FLOP of attention that `is_causal` forbids, against pairs that are counted one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from counted import torch_flops
from torch import Tensor, nn

from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack_artifacts.costs import FORMAT, MASKED_FORMAT, documents, read_documents
from widepack_artifacts.errors import ArtifactError
from widepack_cli.main import cli

HEADS, WIDTH = 2, 8
INPUTS = [f"q=float32[B,{HEADS},T,{WIDTH}]", f"k=float32[B,{HEADS},S,{WIDTH}]"]


def forbidden(queries: int, keys: int) -> int:
    return int(torch.ones(queries, keys).triu(1).sum())


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


class Own(nn.Module):
    """Attention of projected rows: every member has its own weights."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(8, 24), causal

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_pairs(wide: int) -> None:
    costs = model_costs(Causal, INPUTS, wide=wide)
    for b, t, s in ((1, 5, 5), (3, 9, 17), (2, 17, 9), (2, 2, 30)):
        found = costs.at(costs.values({"B": b, "T": t, "S": s}, members=3))
        assert found["masked_flops"] == 4 * b * HEADS * WIDTH * forbidden(t, s)
        assert found["flops"] == torch_flops(Causal, INPUTS, {"B": b, "T": t, "S": s})


def test_queries_that_are_keys_have_a_short_formula() -> None:
    costs = model_costs(Own, ["x=float32[B,T,8]"])
    assert costs.totals["masked_flops"] == ("0", "16*B*T*(T - 1)")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_members_count_each(wide: int) -> None:
    costs = model_costs(Own, ["x=float32[B,T,8]"], wide=wide)
    for b, t, members in ((1, 5, 1), (3, 17, 4), (2, 64, 100)):
        found = costs.at(costs.values({"B": b, "T": t}, members=members))
        assert found["masked_flops"] == members * 4 * b * 8 * forbidden(t, t)


def test_formats_of_the_file() -> None:
    """The second format has the measure. What the first one has needs no other."""
    costs = model_costs(Own, ["x=float32[B,T,8]"])
    document = documents({"forward": costs})
    assert document["format"] == MASKED_FORMAT and read_documents(document) == {"forward": costs}
    with pytest.raises(ArtifactError, match="masked_flops is a measure of"):
        read_documents({**document, "format": FORMAT})
    with pytest.raises(ArtifactError, match="this widepack reads"):
        read_documents({**document, "format": "widepack.costs/3"})
    full = model_costs(lambda: Own(causal=False), ["x=float32[B,T,8]"])
    assert "masked_flops" not in full.totals and documents({"forward": full})["format"] == FORMAT


def test_the_command_shows_the_line() -> None:
    words = ["analyze", f"{__name__}:Own", "--input", "x=float32[B,T,8]", "--at", "B=2,T=30,N=5"]
    text = CliRunner().invoke(cli, words, prog_name="widepack").stdout
    (line,) = [row for row in text.splitlines() if row.startswith("FLOP that masks forbid")]
    assert f"{5 * 4 * 2 * 8 * forbidden(30, 30):,}" in line
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"], prog_name="widepack").stdout)
    assert found["numbers"]["masked_flops"] == 5 * 4 * 2 * 8 * forbidden(30, 30)
    linear = ["analyze", "torch.nn.Linear", "--model-arg", "in_features=4", "--model-arg", "out_features=4"]
    plain = CliRunner().invoke(cli, [*linear, "--input", "input=float32[B,4]"], prog_name="widepack").stdout
    assert "masks" not in plain
